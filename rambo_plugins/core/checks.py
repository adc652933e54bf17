"""What the core accepts: every check of a caller's input, and the switch of the one that reads the scores.

Shapes, dtypes and options are checked on the host and cost nothing. Only the NaN check reads the scores. On the CPU it
raises a ValueError that names the first of them. On a GPU it is an asynchronous assertion: no synchronisation per step,
but the error surfaces at the next one, without the positions; run once with ``CUDA_LAUNCH_BLOCKING=1`` to see where.
It is on unless Python runs with ``-O`` or ``check_nan(False)`` was called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

_check_nan = __debug__


def check_nan(enabled: bool) -> None:
    """Switch the NaN check of all the losses on or off (default: on, off under ``python -O``)."""
    global _check_nan
    _check_nan = bool(enabled)


def check_scores(scores: Tensor, mask: Tensor | None = None) -> None:
    """Floating point, at least one dimension, a mask that fits, and no NaN among what exists where that check is on."""
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores must be a torch.Tensor, got {type(scores).__name__}")
    if not scores.is_floating_point():
        raise TypeError(f"scores must be floating point, got {scores.dtype}")
    if torch._C._functorch.is_functorch_wrapped_tensor(scores):
        raise TypeError(
            "rank losses do not work inside torch.func transforms or vmap: the blackbox gradient is not the derivative "
            "of a function. Use backward() or torch.autograd.grad, and rows (..., N) in place of vmap"
        )
    if scores.dim() == 0:
        raise ValueError("scores must have shape (..., N), got a tensor without dimensions")
    if mask is not None:
        check_boolean("mask", mask, scores)
    if not _check_nan or (scores.device.type == "cpu" and not scores.detach().sum().isnan()):
        return  # a NaN would be in the sum, which needs no tensor of the size of the scores
    nan = torch.isnan(scores.detach())
    if mask is not None:
        nan &= mask
    if scores.device.type != "cpu":
        torch._assert_async(~nan.any(), "rambo_plugins: NaN among the scores")
    elif nan.any():
        where = nan.nonzero()
        first = ", ".join(str(tuple(index)) for index in where[:3].tolist())
        raise ValueError(f"scores hold {len(where)} NaN of {scores.numel()}, the first at {first}")


def check_boolean(name: str, value: Tensor, scores: Tensor) -> None:
    """``relevance`` and ``mask``: bool, of the shape and on the device of the scores."""
    if not isinstance(value, Tensor) or value.dtype != torch.bool:
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a bool tensor, got {got}")
    _check_like(name, value, scores, tuple(scores.shape))


def check_segments(segments: Tensor, scores: Tensor) -> None:
    """int64, one for each of the flat scores."""
    if scores.dim() != 1:
        raise ValueError(f"segments are for flat scores (M,), got scores of shape {tuple(scores.shape)}")
    if not isinstance(segments, Tensor) or segments.dtype != torch.int64:
        got = segments.dtype if isinstance(segments, Tensor) else type(segments).__name__
        raise TypeError(f"segments must be an int64 tensor, got {got}")
    _check_like("segments", segments, scores, tuple(scores.shape))


def check_float(name: str, value: Tensor, scores: Tensor, shape: tuple[int, ...]) -> None:
    """Weights and grades: floating point, of the shape (their values are not read: it would cost a synchronisation)."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {got}")
    _check_like(name, value, scores, shape)


def check_takes_grades(item_loss: Callable[..., Any]) -> None:
    """Where there are grades the item loss takes a fourth argument."""
    try:
        signature = inspect.signature(item_loss)
    except ValueError:  # a builtin
        return
    try:
        signature.bind(0, 0, 0, 0)
    except TypeError:
        raise TypeError(
            "grades are a fourth argument, (rank, rank_plus, num_relevant, grade), of the loss of an item; this loss "
            f"takes {signature}"
        ) from None


def _check_like(name: str, value: Tensor, scores: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} must have shape {shape} for scores {tuple(scores.shape)}, got {tuple(value.shape)}")
    if value.device != scores.device:
        raise ValueError(f"{name} must be on the device of the scores, {scores.device}, got {value.device}")


def check_positive(name: str, value: float) -> None:
    """A finite number above zero."""
    if not _is_number(value) or not 0 < value < float("inf"):
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")


def check_not_negative(name: str, value: float) -> None:
    """A finite number of zero or more."""
    if not _is_number(value) or not 0 <= value < float("inf"):
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")


def check_margin(value: float | Sequence[float]) -> tuple[float, ...]:
    """A finite number of zero or more, or a sequence of them; all of them."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        check_not_negative("margin", value)
        return (float(value),)
    if not value:
        raise ValueError("margin must be a number or a sequence of one or more, got an empty one")
    for one in value:
        check_not_negative("margin", one)
    return tuple(map(float, value))


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)  # numpy's numbers among them


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """One of the listed strings."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
