"""Score memory (§4.3 of the paper): what the last batches held, to rank the current batch among more items.

The memory is a plain attribute, not buffers: DistributedDataParallel and weight averaging leave it alone, each process
has its own. It is nevertheless part of ``state_dict``, so that a resumed run continues with it bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rambo_plugins.core import checks
from rambo_plugins.core.distributed import gather_rows


class ScoreMemory(nn.Module):
    """A ring of the last ``batches`` batches, each a tuple of tensors of one length, detached.

    What a batch holds is free: embeddings and labels, scores (rows, classes) and targets, or the flat scores, relevance
    and segments of ``rank_loss``. Batches may differ in length.

    Args:
        batches: τ ≥ 0, how many batches to keep; 0 keeps none.
        warmup: pushes before the memory is used; it is filled from the first one, so that it is full then.
        gather: in ``extend``, take the batches of all processes of the default group as one.
        like: tensors of the shapes (longest batch, ...) and dtypes that will be pushed. With it the tensors in
            ``state_dict`` have fixed shapes from the start, as checkpoints that are loaded in place ask for (FSDP,
            ``torch.distributed.checkpoint``); without it they are as long as what is kept.

    Raises:
        TypeError, ValueError: an argument of the wrong type, a negative one, or tensors of different lengths.

    >>> memory = ScoreMemory(batches=2)
    >>> for step in range(3):
    ...     memory.push(torch.full((2, 1), float(step)), torch.tensor([step, step]))
    >>> embeddings, labels = memory.contents()
    >>> labels
    tensor([1, 1, 2, 2])
    """

    def __init__(
        self, batches: int, *, warmup: int = 0, gather: bool = False, like: Sequence[Tensor] | None = None
    ) -> None:
        super().__init__()
        self.batches = checks.check_integer("memory", batches, 0)
        self.warmup = checks.check_integer("memory warm-up", warmup, 0)
        self.gather = checks.check_flag("memory gather", gather)
        self._like = None if like is None else tuple(tensor.new_empty(tensor.shape, device="meta") for tensor in like)
        _length(self._like or ())
        self.reset()

    def reset(self) -> None:
        """Forget everything, the warm-up included."""
        self._slots: list[tuple[Tensor, ...]] = []
        self._pushes = 0

    def push(self, *tensors: Tensor) -> None:
        """Keep a batch, detached copies of tensors (B, ...) of one B; the oldest one leaves a full memory.

        Raises:
            ValueError: tensors of different lengths, of other shapes or kinds than those in the memory, or longer than
                those of ``like``.
        """
        length = _length(tensors)
        kept = self._like or (self._slots[-1] if self._slots else tensors)
        known, came = _shapes(kept), _shapes(tensors)
        if known != came:
            raise ValueError(f"the memory holds items of shapes {known}, got {came}: reset() it first")
        if self._like is not None:
            if length > len(self._like[0]):
                raise ValueError(f"the memory takes batches of at most {len(self._like[0])} items, got {length}")
            tensors = tuple(tensor.to(like.dtype) for tensor, like in zip(tensors, self._like, strict=True))
        self._pushes += 1
        if self.batches:
            # On one device: a checkpoint may have come to another one than the batches.
            kept_here = [tuple(k.to(t.device) for k, t in zip(slot, tensors, strict=True)) for slot in self._slots]
            self._slots = [*kept_here, tuple(tensor.detach().clone() for tensor in tensors)][-self.batches :]

    def contents(self) -> tuple[Tensor, ...] | None:
        """The kept batches, concatenated, oldest first; None while there are none or the warm-up lasts."""
        if not self._slots or self._pushes <= self.warmup:
            return None
        return self._concatenated()

    def extend(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The batch, longer by the memory, which then takes the batch in: one call for a training step.

        What can fail between the two is better done between ``join`` and ``push``.

        Returns:
            For each tensor (B, ...) one (batch + memory, ...) in the batch's dtype and on its device.
        """
        joined, batch = self.join(*tensors)
        if batch is not None:
            self.push(*batch)
        return joined

    def join(self, *tensors: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...] | None]:
        """The batch, longer by the memory, and what to ``push`` when the step has not failed; changes nothing.

        A forward pass without a gradient (evaluation mode, ``no_grad``, scores that do not require one) gets the batch
        back as it is, and None to push.

        With ``gather`` the batches of all processes come first, in the order of the ranks; the gradient of the own rows
        is multiplied by the number of processes. DistributedDataParallel takes the mean over the processes, so the
        parameters get the gradient of one process with the whole batch. All processes must make the call.

        Raises:
            ValueError: tensors of different lengths, or of other shapes than those in the memory.
        """
        _length(tensors)
        if not (self.training and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)):
            return tensors, None
        if self.gather:
            tensors = gather_rows(*tensors)
        past = self.contents()
        if past is None:
            return tensors, tensors
        if _shapes(past) != _shapes(tensors):
            raise ValueError(
                f"the memory holds items of shapes {_shapes(past)}, got {_shapes(tensors)}: reset() it first"
            )
        return tuple(torch.cat([now, kept.to(now)]) for now, kept in zip(tensors, past, strict=True)), tensors

    def __len__(self) -> int:
        """Items kept, whether they are in use already or not."""
        return sum(len(slot[0]) for slot in self._slots)

    def extra_repr(self) -> str:
        return f"batches={self.batches}, warmup={self.warmup}, gather={self.gather}"

    def _concatenated(self) -> tuple[Tensor, ...]:
        return tuple(torch.cat(tensors) for tensors in zip(*self._slots, strict=True))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ScoreMemory:
        super()._apply(fn, recurse)
        self._slots = [tuple(fn(tensor) for tensor in slot) for slot in self._slots]
        return self

    def __getattr__(self, name: str) -> Any:
        """Entries of the state dict by their names, by which ``torch.distributed.checkpoint`` looks them up."""
        if name in ("pushes", "lengths") or name.removeprefix("field").isdecimal():
            state = self.state_dict()
            if name in state:
                return state[name]
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.batches:
            return
        lengths = torch.full((self.batches,), -1)  # -1: no batch yet
        lengths[: len(self._slots)] = torch.tensor([len(slot[0]) for slot in self._slots], dtype=torch.int64)
        fields = self._concatenated()
        if self._like is not None:
            fields = fields or tuple(torch.zeros_like(like[:0], device="cpu") for like in self._like)
            padding = self.batches * len(self._like[0]) - len(self)
            fields = tuple(torch.cat([field, field.new_zeros(padding, *field.shape[1:])]) for field in fields)
        destination[prefix + "pushes"] = torch.tensor(self._pushes)
        destination[prefix + "lengths"] = lengths
        for position, field in enumerate(fields):
            destination[f"{prefix}field{position}"] = field

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
        saved = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        if not self.batches or not {"pushes", "lengths"} <= saved.keys():
            # Not this memory's checkpoint: no memory here, or none there.
            unexpected_keys.extend(prefix + name for name in saved)
            missing_keys.extend([prefix + "pushes", prefix + "lengths"] if self.batches else [])
            return
        pushes, lengths = int(saved.pop("pushes")), [length for length in saved.pop("lengths").tolist() if length >= 0]
        fields = [saved.pop(f"field{position}") for position in range(len(saved)) if f"field{position}" in saved]
        unexpected_keys.extend(prefix + name for name in saved)
        wrong = self._why_not(lengths, fields)
        if wrong:
            error_msgs.append(f"{prefix or 'memory'}: {wrong}")
            return
        if self._like is not None:
            fields = [field.to(like.dtype) for field, like in zip(fields, self._like, strict=True)]
        split = [field[: sum(lengths)].clone().split(lengths) for field in fields] if lengths else []
        self._pushes, self._slots = pushes, list(zip(*split, strict=True))[-self.batches :]

    def _why_not(self, lengths: list[int], fields: list[Tensor]) -> str | None:
        """What keeps saved fields from being batches of this memory."""
        if lengths and (not fields or min(map(len, fields)) < sum(lengths)):
            return f"expected tensors of {sum(lengths)} items or more, got {[len(field) for field in fields]}"
        if self._like is not None and _shapes(fields) != _shapes(self._like):
            return f"expected items of shapes {_shapes(self._like)}, got {_shapes(fields)}"
        if self._like is not None and max(lengths, default=0) > len(self._like[0]):
            return f"expected batches of at most {len(self._like[0])} items, got {max(lengths)}"
        return None


def _shapes(tensors: Sequence[Tensor]) -> list[tuple[int, ...]]:
    """Of one item."""
    return [tuple(tensor.shape[1:]) for tensor in tensors]


def _length(tensors: Sequence[Tensor]) -> int:
    lengths = [len(tensor) for tensor in tensors]
    if len(set(lengths)) > 1:
        raise ValueError(f"a batch must have one length, got tensors of {lengths}")
    return lengths[0] if lengths else 0
