"""Score memory (§4.3 of the paper): what the last batches held, to rank the current batch among more items.

The memory is a plain attribute, not buffers: DistributedDataParallel and weight averaging leave it alone, each process
has its own. It is nevertheless part of ``state_dict``, so that a resumed run continues with it bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class ScoreMemory(nn.Module):
    """A ring of the last ``batches`` batches, each a tuple of tensors of one length, detached.

    Args:
        batches: τ ≥ 0, how many batches to keep; 0 keeps none.
        warmup: pushes before the memory is used; it is filled from the first one, so that it is full then.

    Raises:
        ValueError: a negative or not integral argument.

    >>> memory = ScoreMemory(batches=2)
    >>> for step in range(3):
    ...     memory.push(torch.full((2, 1), float(step)), torch.tensor([step, step]))
    >>> embeddings, labels = memory.contents()
    >>> labels
    tensor([1, 1, 2, 2])
    """

    def __init__(self, batches: int, *, warmup: int = 0) -> None:
        super().__init__()
        for name, value in (("memory", batches), ("memory warm-up", warmup)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} must be an integer >= 0, got {value!r}")
        self.batches = batches
        self.warmup = warmup
        self.reset()

    def reset(self) -> None:
        """Forget everything, the warm-up included."""
        self._slots: list[tuple[Tensor, ...]] = []
        self._pushes = 0

    def push(self, *tensors: Tensor) -> None:
        """Keep a batch, detached copies of tensors (B, ...) of one B; the oldest one leaves a full memory.

        Raises:
            ValueError: tensors of different lengths, or of other shapes or kinds than those in the memory.
        """
        if len({len(tensor) for tensor in tensors}) != 1:
            raise ValueError(f"a batch must have one length, got tensors of {[len(tensor) for tensor in tensors]}")
        if self._slots:
            kept, came = ([tuple(t.shape[1:]) for t in batch] for batch in (self._slots[-1], tensors))
            if kept != came:
                raise ValueError(f"the memory holds items of shapes {kept}, got {came}: reset() it first")
        self._pushes += 1
        if self.batches:
            self._slots.append(tuple(tensor.detach().clone() for tensor in tensors))
            del self._slots[: -self.batches]

    def contents(self) -> tuple[Tensor, ...] | None:
        """The kept batches, concatenated, oldest first; None while there are none or the warm-up lasts."""
        if not self._slots or self._pushes <= self.warmup:
            return None
        return self._concatenated()

    def __len__(self) -> int:
        """Items kept, whether they are in use already or not."""
        return sum(len(slot[0]) for slot in self._slots)

    def extra_repr(self) -> str:
        return f"batches={self.batches}, warmup={self.warmup}"

    def _concatenated(self) -> tuple[Tensor, ...]:
        return tuple(torch.cat(tensors) for tensors in zip(*self._slots, strict=True))

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.batches:
            destination[prefix + "pushes"] = torch.tensor(self._pushes)
            destination[prefix + "lengths"] = torch.tensor([len(slot[0]) for slot in self._slots], dtype=torch.int64)
            for position, tensor in enumerate(self._concatenated()):
                destination[f"{prefix}field{position}"] = tensor

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = {key.removeprefix(prefix): key for key in state_dict if key.startswith(prefix)}
        if not self.batches or "lengths" not in saved:
            # Not this memory's checkpoint: no memory here, or none there.
            unexpected_keys.extend(saved.values())
            missing_keys.extend([prefix + "pushes", prefix + "lengths"] if self.batches else [])
            return
        lengths = state_dict[saved["lengths"]].tolist()
        fields = [state_dict[saved[name]].clone() for name in sorted(saved) if name.startswith("field")]
        split = [tensor.split(lengths) for tensor in fields] if lengths else []
        self._slots = list(zip(*split, strict=True))[-self.batches :]
        self._pushes = int(state_dict[saved["pushes"]])
