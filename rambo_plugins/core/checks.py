"""What the core accepts: every check of a caller's input, and the switch of those that read tensors.

Shapes, dtypes and options are checked on the host and cost nothing. Scores, weights, grades and what an ``item_loss``
returns are read too. On the CPU that raises a ValueError that names the first bad value. On a GPU it is an asynchronous
assertion: no synchronisation per step, but the error surfaces at the next one, without the positions; run once with
``CUDA_LAUNCH_BLOCKING=1`` to see where. These checks are on unless Python runs with ``-O`` or ``check_nan(False)`` was
called.

A number may be one of Python or numpy, or an array or a tensor on the CPU without dimensions; the checks of numbers
return Python's. A tensor on a GPU is refused: each time it is read the host would wait for the device.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

LEAST, LARGEST = 1e-30, 1e30
"""Bounds of λ and of the margin, between which a step neither vanishes nor overflows in float32."""

_check_nan = __debug__


def check_nan(enabled: bool) -> None:
    """Switch the checks that read tensors, of NaN and of other bad values, on or off.

    They are on unless Python runs with ``-O``.
    """
    global _check_nan
    _check_nan = bool(enabled)


def check_scores(scores: Tensor, mask: Tensor | None = None) -> None:
    """Floating point, at least one dimension, a mask that fits, and no NaN among what exists where that check is on."""
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores must be a torch.Tensor, got {type(scores).__name__}")
    if not scores.is_floating_point():
        raise TypeError(f"scores must be floating point, got {scores.dtype}")
    if _in_transform(scores):
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
    _expect(~nan.any(), "scores hold", "NaN", lambda: nan)


def check_weights(name: str, weights: Tensor, sums: Tensor) -> None:
    """Numbers of zero or more, floating point, whose sums are finite."""
    if _check_nan and weights.numel():
        weights, sums = weights.detach(), sums.detach()
        holds = (weights.amin() >= 0) & sums.isfinite().all()
        says = f"{name} must be finite numbers >= 0 with a finite sum, got"
        _expect(holds, says, "others", lambda: ~((weights >= 0) & weights.isfinite()), weights)


def check_finite(name: str, values: Tensor) -> None:
    """No NaN and no infinity."""
    if _check_nan and values.numel():
        values = values.detach()
        _expect(values.isfinite().all(), f"{name} must be finite, got", "others", lambda: ~values.isfinite(), values)


def check_not_nan(name: str, values: Tensor) -> None:
    """No NaN; infinities are numbers that can be compared."""
    if _check_nan:
        values = values.detach()
        _expect(~values.isnan().any(), f"{name} must not be NaN, got", "of them", values.isnan)


def _expect(holds: Tensor, says: str, what: str, bad: Callable[[], Tensor], values: Tensor | None = None) -> None:
    """That a bool without dimensions is True; what is bad is looked for where it is not, on the CPU alone."""
    if holds.device.type != "cpu":
        try:
            torch._assert_async(holds, f"rambo_plugins: {says} {what}")
            return
        except (AttributeError, NotImplementedError):  # no public function, and not for all devices: wait for it
            pass
    if not holds:
        where = [tuple(index) for index in bad().nonzero().tolist()]
        if not where:
            raise ValueError(f"{says} an infinite sum")
        first = [f"{index}" if values is None else f"{index}: {values[index].item()}" for index in where[:3]]
        raise ValueError(f"{says} {len(where)} {what} of {bad().numel()}, the first at {', '.join(first)}")


def _in_transform(scores: Tensor) -> bool:
    """Whether torch.func or vmap follow the scores, as far as this torch tells; its own errors come later."""
    try:
        return torch._C._functorch.is_functorch_wrapped_tensor(scores)
    except AttributeError:  # it is not a public function
        return False


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
    """Weights and grades: floating point, of the shape; those of items have no gradient of their own."""
    if not isinstance(value, Tensor) or not value.is_floating_point():
        got = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a floating-point tensor, got {got}")
    if value.requires_grad and name != "weights" and torch.is_grad_enabled():
        raise ValueError(f"{name} must not require a gradient, of which none would reach it: pass {name}.detach()")
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


def check_number(name: str, value: object) -> float:
    """A finite number."""
    number = _number(value, name)
    if number is None or not -float("inf") < number < float("inf"):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return number


def check_positive(name: str, value: object) -> float:
    """A finite number above zero."""
    number = _number(value, name)
    if number is None or not 0 < number < float("inf"):
        raise ValueError(f"{name} must be a finite number > 0, got {value!r}")
    return number


def check_not_negative(name: str, value: object) -> float:
    """A finite number of zero or more."""
    number = _number(value, name)
    if number is None or not 0 <= number < float("inf"):
        raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
    return number


def check_lambda(value: object) -> float:
    """A number > 0 whose steps float32 can hold."""
    number = check_positive("lambda_val", value)
    if not LEAST <= number <= LARGEST:
        raise ValueError(f"lambda_val must lie between {LEAST} and {LARGEST}, got {value!r}")
    return number


def check_margin(value: object) -> float | tuple[float, ...]:
    """A number of zero or more that float32 can hold, or several in a sequence, array or tensor (M,); all of them."""
    values = several(value, "margin")
    if values is not None and not values:
        raise ValueError("margin must be a number or a sequence of one or more, got an empty one")
    margins = tuple(check_not_negative("margin", one) for one in ([value] if values is None else values))
    if max(margins) > LARGEST:
        raise ValueError(f"margin must be at most {LARGEST}, got {max(margins)!r}")
    return margins[0] if values is None else margins


def check_integer(name: str, value: object, least: int) -> int:
    """An integer, at least ``least``."""
    plain = _plain(value, name)
    integer = int(plain) if isinstance(plain, numbers.Integral) and not isinstance(plain, bool) else None
    if integer is None or not least <= integer < 2**63:
        raise ValueError(f"{name} must be an integer >= {least}, got {value!r}")
    return integer


def check_flag(name: str, value: object) -> bool:
    """True or False."""
    plain = _plain(value, name)
    if not isinstance(plain, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")
    return plain


def several(value: object, name: str) -> list[Any] | None:
    """The elements of a sequence or of an array or tensor (M,); None where it is none."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    if getattr(value, "ndim", None) == 1 and hasattr(value, "tolist"):
        _check_on_host(value, name)
        return list(value.tolist())
    return None


def _plain(value: object, name: str) -> object:
    """Python's number in place of numpy's, or of an array or tensor without dimensions; else the value itself."""
    _check_on_host(value, name)
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _number(value: object, name: str) -> float | None:
    plain = _plain(value, name)
    if not isinstance(plain, numbers.Real) or isinstance(plain, bool):
        return None
    try:
        return float(plain)
    except OverflowError:  # an integer beyond all floats
        return float("inf")


def _check_on_host(value: object, name: str) -> None:
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise ValueError(
            f"{name} must be a number of the host, got a tensor on {value.device}, for which it would wait: "
            f"pass {name}.tolist()"
        )
    if isinstance(value, Tensor) and value.requires_grad:
        raise ValueError(f"{name} must be a number, got a tensor that requires a gradient, of which none reaches it")


def check_generator(generator: torch.Generator, scores: Tensor) -> None:
    """On the device of the scores."""
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
    if generator.device.type != scores.device.type or (generator.device.index or 0) != (scores.device.index or 0):
        raise ValueError(
            f"generator must be on the device of the scores, {scores.device}, got one on {generator.device}"
        )


def refuse(options: dict[str, Any], *names: str, because: str) -> None:
    """Options that a loss has no use for."""
    for name in names:
        if options.get(name) is not None:
            raise ValueError(f"{name} has no meaning in this loss, where {because}: pass {name}=None")


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """One of the listed strings."""
    choices = tuple(choices)
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
