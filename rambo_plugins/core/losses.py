"""The paper's two losses on ``rank_loss``, recall (§4.5) and average precision (§4.6), as functions and as modules.

A function takes everything as arguments; its module holds the options and is called with the scores, the relevance and,
where there are any, a mask and weights. The conventions (λ, margin, ties, masks) are at the top of ``ranking.py``.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rambo_plugins.core import checks
from rambo_plugins.core.ranking import ItemLoss, RankStatistics, rank_loss

Weighting = str | Callable[[Tensor], Tensor] | Sequence[float] | Tensor


def recall_item_loss(weighting: Weighting = "log") -> ItemLoss:
    r"""W(r_i), the recall loss of one relevant item (Eqs. 16-20), from ``weighting``.

    .. math:: W(r) = w_1 + \dots + w_r, \qquad r_i = rank_i - rank^+_i

    Args:
        weighting: "log": W(r) = log(1 + r); "loglog": W(r) = log(1 + log(1 + r)); a callable W, elementwise and
            differentiable (to be pickled, a function of a module); or the table (w_1, ..., w_M) of the weights of
            Recall@1, ..., Recall@M, a sequence, an array or a tensor, zero beyond M, whose slope at r is w_{r+1}, the
            cost of one more irrelevant item above.

    Raises:
        TypeError, ValueError: an unknown name, an empty or not finite table, or anything else.
    """
    if isinstance(weighting, str):
        checks.check_choice("weighting", weighting, _WEIGHTINGS)
        cost = _WEIGHTINGS[weighting]
    elif callable(weighting):
        cost = weighting
    else:
        cost = _table_cost(weighting)
    return functools.partial(_recall_item_loss, cost=cost)  # and not a function in a function: it can be pickled


def _recall_item_loss(
    rank: Tensor, rank_plus: Tensor, num_relevant: Tensor, *, cost: Callable[[Tensor], Tensor]
) -> Tensor:
    return cost(rank - rank_plus)


def _loglog(r: Tensor) -> Tensor:
    return torch.log1p(torch.log1p(r))


_WEIGHTINGS: dict[str, Callable[[Tensor], Tensor]] = {"log": torch.log1p, "loglog": _loglog}


def _table_cost(table: Sequence[float] | Tensor) -> Callable[[Tensor], Tensor]:
    values = checks.several(table, "weighting")
    if values is None:
        raise TypeError(f"weighting must be a name, a callable or a table of numbers of shape (M,), got {table!r}")
    try:
        numbers = [checks.check_number("a weight of the table", value) for value in values]
    except ValueError as error:
        raise ValueError(f"a table of weights must hold finite numbers, got {table!r}: {error}") from error
    if not numbers:
        raise ValueError(f"a table of weights must have shape (M,), M >= 1, got {table!r}")
    # W at 0, 1, ..., M, and its slope to the right, which is 0 from M on.
    cumulative = torch.tensor([0.0, *itertools.accumulate(numbers)], dtype=torch.float64)
    slopes = torch.tensor([*numbers, 0.0], dtype=torch.float64)
    if not cumulative.isfinite().all():
        raise ValueError(f"a table of weights must have a finite sum, got {table!r}")
    return functools.partial(_stepwise, cumulative=cumulative, slopes=slopes)


def _stepwise(r: Tensor, *, cumulative: Tensor, slopes: Tensor) -> Tensor:
    index = r.detach().long().clamp(max=len(slopes) - 1)
    value, slope = (values.to(r)[index] for values in (cumulative, slopes))
    return value + slope * (r - r.detach())


def average_precision_item_loss(rank: Tensor, rank_plus: Tensor, num_relevant: Tensor) -> Tensor:
    """1 - rank⁺ / rank, what one relevant item takes from the average precision (Eqs. 21, 22)."""
    return 1 - rank_plus / rank


def log_precision_item_loss(rank: Tensor, rank_plus: Tensor, num_relevant: Tensor) -> Tensor:
    """-log(rank⁺ / rank), of the precision at one relevant item: as 1 minus it near 1, but not flat near 0."""
    return rank.log() - rank_plus.log()


def recall_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    lambda_val: float,
    weighting: Weighting = "log",
    **options: Any,
) -> Tensor:
    r"""Recall at all K at once (Eqs. 16-20): the mean over the relevant items, then over the rows, of W(r_i).

    .. math:: L = \frac1Q \sum_q \frac1P \sum_{i\ relevant} W(r_i), \qquad r_i = rank_i - rank^+_i

    Args:
        weighting: W, see ``recall_item_loss``: "log", "loglog", a callable, or a table of weights w_K.

    The ``options`` (margin, mask, weights, ...), what is returned and the errors are those of ``rank_loss``.

    >>> scores = torch.tensor([[0.9, 0.8, 0.1]], requires_grad=True)
    >>> relevance = torch.tensor([[False, True, False]])
    >>> loss = recall_loss(scores, relevance, lambda_val=0.2)
    >>> loss  # one irrelevant item above: log(1 + 1)
    tensor(0.6931, grad_fn=<DivBackward0>)
    >>> loss.backward()
    >>> scores.grad  # λ·N·dL/drank = 0.2·3·0.5 carries the relevant item past the first
    tensor([[ 1.6667, -1.6667,  0.0000]])
    """
    loss, _ = rank_loss(
        scores,
        relevance,
        recall_item_loss(weighting),
        lambda_val=lambda_val,
        **options,
    )
    return loss


def average_precision_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    lambda_val: float,
    over_all: bool = False,
    **options: Any,
) -> Tensor:
    r"""One minus the (mean) average precision (Eqs. 21, 22), or the average precision over all rows at once (Eq. 23).

    .. math:: L = 1 - \frac1Q \sum_q \frac1P \sum_{i\ relevant} \frac{rank^+_i}{rank_i}

    Args:
        over_all: rank the items of all rows as one sequence (Eq. 23, "AP over all classes"); ``weights`` has no meaning
            there, and "none" returns a scalar.

    The ``options``, what is returned and the errors are those of ``rank_loss``. The rows of the mean are those with a
    relevant item: for a detector, the classes present.

    >>> scores = torch.tensor([[0.9, 0.8, 0.1], [0.5, 0.2, 0.7]])
    >>> relevance = torch.tensor([[False, True, True], [False, False, True]])
    >>> average_precision_loss(scores, relevance, lambda_val=0.5)  # AP (1/2 + 2/3) / 2 and 1
    tensor(0.2083)
    >>> average_precision_loss(scores, relevance, lambda_val=0.5, over_all=True)  # ranks 2, 3 and 6
    tensor(0.4444)
    """
    if checks.check_flag("over_all", over_all):
        scores, relevance, options = _one_row(scores, relevance, options)
    loss, _ = rank_loss(
        scores,
        relevance,
        average_precision_item_loss,
        lambda_val=lambda_val,
        **options,
    )
    return loss


def _one_row(scores: Tensor, relevance: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """The items of all rows as one row."""
    for name in ("weights", "segments"):
        if options.get(name) is not None:
            raise ValueError(f"{name} are of rows, and over_all ranks all rows as one: pass {name}=None")
    if not isinstance(scores, Tensor):
        raise TypeError(f"scores must be a torch.Tensor, got {type(scores).__name__}")
    checks.check_boolean("relevance", relevance, scores)
    of_items = {name: options[name] for name in ("mask", "item_weights") if options.get(name) is not None}
    if "mask" in of_items:
        checks.check_boolean("mask", of_items["mask"], scores)
    if "item_weights" in of_items:
        checks.check_float("item_weights", of_items["item_weights"], scores, tuple(scores.shape))
    flat = {name: value.flatten() for name, value in of_items.items()}
    return scores.flatten(), relevance.flatten(), options | flat


class RankLoss(nn.Module):
    """The options that all rank losses share and their forward pass; a subclass, or an ``item_loss``, is a new loss.

    Args:
        item_loss: the loss of one relevant item, see ``rank_loss``, where the other arguments are explained too.

    ``statistics`` holds the ``RankStatistics`` of the last forward pass that did not raise. The state of a
    ``generator`` is part of the module's ``state_dict``. A module can be pickled and copied, with its generator; an
    ``item_loss`` of one's own then has to be a function of a module, not a lambda.

    >>> loss_fn = RankLoss(lambda rank, rank_plus, num_relevant: rank.log(), lambda_val=1.0)
    >>> loss_fn(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([False, True, False]))  # log 2
    tensor(0.6931)
    """

    def __init__(
        self,
        item_loss: ItemLoss,
        *,
        lambda_val: float,
        margin: float | Sequence[float] = 0.0,
        reduction: str = "mean",
        normalize: bool = True,
        lambda_per: str = "batch",
        rank_plus_grad: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not callable(item_loss):
            raise TypeError(f"item_loss must be a function of (rank, rank_plus, num_relevant), got {item_loss!r}")
        checks.check_choice("reduction", reduction, ("mean", "sum", "none"))
        checks.check_choice("lambda_per", lambda_per, ("batch", "row"))
        if generator is not None and not isinstance(generator, torch.Generator):
            raise TypeError(f"generator must be a torch.Generator, got {type(generator).__name__}")
        self.item_loss = item_loss
        self.lambda_val = checks.check_lambda(lambda_val)
        self.margin = checks.check_margin(margin)
        self.reduction = reduction
        self.normalize = checks.check_flag("normalize", normalize)
        self.lambda_per = lambda_per
        self.rank_plus_grad = checks.check_flag("rank_plus_grad", rank_plus_grad)
        self.generator = generator
        self.statistics: RankStatistics | None = None

    def forward(
        self,
        scores: Tensor,
        relevance: Tensor,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        *,
        item_weights: Tensor | None = None,
        grades: Tensor | None = None,
        segments: Tensor | None = None,
    ) -> Tensor:
        """The loss of scores (..., N), or (M,) with ``segments``, as ``rank_loss`` reduces it."""
        loss, self.statistics = rank_loss(
            scores,
            relevance,
            self.item_loss,
            lambda_val=self.lambda_val,
            margin=self.margin,
            mask=mask,
            weights=weights,
            item_weights=item_weights,
            grades=grades,
            segments=segments,
            reduction=self.reduction,
            normalize=self.normalize,
            lambda_per=self.lambda_per,
            rank_plus_grad=self.rank_plus_grad,
            generator=self.generator,
        )
        return loss

    def extra_repr(self) -> str:
        names = ("lambda_val", "margin", "reduction", "normalize", "lambda_per", "rank_plus_grad")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)

    def __getstate__(self) -> dict[str, Any]:
        """What is pickled and copied: of a generator its device and its state."""
        state = self.__dict__.copy()
        if self.generator is not None:  # as bytes: a tensor made here is gone before a spawned process opens it
            state["generator"] = (str(self.generator.device), bytes(self.generator.get_state().tolist()))
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["generator"] is not None:
            device, drawn = state["generator"]
            state = state | {"generator": torch.Generator(device)}
            state["generator"].set_state(torch.frombuffer(bytearray(drawn), dtype=torch.uint8))
        super().__setstate__(state)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self.generator is not None:
            destination[prefix + "generator"] = self.generator.get_state()

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
        state = state_dict.pop(prefix + "generator", None) if self.generator is not None else None
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if self.generator is not None and state is not None:
            self.generator.set_state(state.cpu())
        elif self.generator is not None:
            missing_keys.append(prefix + "generator")


class RecallLoss(RankLoss):
    """Module of ``recall_loss``: the loss of Recall@K at all K. The ``options`` are those of ``RankLoss``.

    >>> loss_fn = RecallLoss(lambda_val=0.2, margin=0.02)
    >>> loss_fn(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([False, True, False]))
    tensor(0.6931)
    """

    def __init__(self, *, lambda_val: float, weighting: Weighting = "log", **options: Any) -> None:
        super().__init__(recall_item_loss(weighting), lambda_val=lambda_val, **options)


class AveragePrecisionLoss(RankLoss):
    """Module of ``average_precision_loss``: one minus the mean average precision of the rows, or that over all rows.

    The ``options`` are those of ``RankLoss``.

    >>> loss_fn = AveragePrecisionLoss(lambda_val=0.5, margin=0.15)
    >>> loss_fn(torch.tensor([0.9, 0.8, 0.1]), torch.tensor([False, True, False]))
    tensor(0.5000)
    """

    def __init__(self, *, lambda_val: float, over_all: bool = False, **options: Any) -> None:
        super().__init__(average_precision_item_loss, lambda_val=lambda_val, **options)
        self.over_all = checks.check_flag("over_all", over_all)

    def forward(
        self,
        scores: Tensor,
        relevance: Tensor,
        mask: Tensor | None = None,
        weights: Tensor | None = None,
        **of_items: Any,
    ) -> Tensor:
        """As ``RankLoss.forward``; with ``over_all`` neither ``weights`` nor ``segments``."""
        if self.over_all:
            options = {"mask": mask, "weights": weights, **of_items}
            scores, relevance, options = _one_row(scores, relevance, options)
            return super().forward(scores, relevance, **options)
        return super().forward(scores, relevance, mask, weights, **of_items)
