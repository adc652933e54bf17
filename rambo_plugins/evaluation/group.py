"""The processes that evaluate together: what they exchange, and how a failure of one reaches all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

T = TypeVar("T")


class Group:
    """The processes that compute together, or this one alone. All methods but for ``together`` take the same steps on
    every rank and do not fail unless a process is lost."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group, self.ranks, self.rank = group, [0], 0  # ranks: as the default group counts; rank: in this group
        if not (dist.is_available() and dist.is_initialized()):
            return
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(self.group)
        if self.rank < 0:
            raise ValueError(f"group: expected one that this process is in, got one without rank {dist.get_rank()}")
        self.ranks = dist.get_process_group_ranks(self.group)
        cuda = dist.get_backend(self.group) == "nccl"
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")

    def together(self, work: Callable[[], T]) -> T:
        """What ``work`` returns on this rank; an error on all ranks if it raises on one.

        It is the same error if all have the same, which says what is wrong with the arguments.
        """
        error = None
        try:
            result = work()
        except Exception as caught:
            error = caught
        if not self.reduce(np.array([error is not None], np.int64), "MAX")[0]:
            return result
        if len(self.ranks) == 1 and error is not None:
            raise error
        text = "" if error is None else f"{type(error).__name__}: {error}"
        texts = self.gather_texts(text)
        if error is not None and set(texts) == {text}:
            raise error
        failed = "; ".join(f"rank {rank}: {text}" for rank, text in zip(self.ranks, texts, strict=True) if text)
        raise RuntimeError(f"RecallMetric.compute failed on {failed}") from error

    def reduce(self, array: np.ndarray, operation: str) -> np.ndarray:
        """The "MAX" or "SUM" of all ranks' arrays, of one shape and dtype."""
        if len(self.ranks) == 1:
            return array
        tensor = torch.from_numpy(array).to(self.device)
        with self._contact():
            dist.all_reduce(tensor, getattr(dist.ReduceOp, operation), group=self.group)
            return tensor.cpu().numpy()

    def broadcast(self, array: np.ndarray, source: int) -> np.ndarray:
        """The array of the rank ``source``; the others give one of the same shape and dtype, which is overwritten."""
        if len(self.ranks) == 1 or not array.size:
            return array
        as_bytes = array.reshape(-1).view(np.uint8)  # not every backend knows every dtype
        tensor = torch.from_numpy(as_bytes).to(self.device)
        with self._contact():
            dist.broadcast(tensor, self.ranks[source], group=self.group)
            return tensor.cpu().numpy().view(array.dtype).reshape(array.shape)

    def gather(self, array: np.ndarray) -> list[np.ndarray]:
        """The arrays (n,) of all ranks, n may differ, of one dtype."""
        lengths = np.zeros(len(self.ranks), np.int64)
        lengths[self.rank] = len(array)
        lengths = self.reduce(lengths, "SUM")
        return [
            self.broadcast(array if source == self.rank else np.empty(length, array.dtype), source)
            for source, length in enumerate(lengths)
        ]

    def gather_texts(self, text: str) -> list[str]:
        arrays = self.gather(np.array(list(text.encode("utf-8", "replace")), np.uint8))
        return [array.tobytes().decode() for array in arrays]

    @contextlib.contextmanager
    def _contact(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"RecallMetric.compute on rank {self.ranks[self.rank]} lost another process, which ended or did not "
                f"answer in time: {error}"
            ) from error
