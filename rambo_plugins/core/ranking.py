r"""Ranking and its gradient: ``rank`` (Algorithm 1 of the paper) and ``rank_loss``, on which every rank loss stands.

The paper is Rolínek, Musil, Paulus, Vlastelica, Michaelis, Martius: "Optimizing Rank-based Metrics with Blackbox
Differentiation", CVPR 2020. These conventions hold everywhere in the package:

* ``scores`` (..., N), higher is better; ``relevance`` (..., N) bool; ``mask`` (..., N) bool, False where the item does
  not exist for this row. A row is a query, or a class of a detector. Rank 1 is the best.
* For a relevant item i, ``r_i`` is the number of irrelevant items above it, ``rank⁺_i`` its rank among the relevant,
  and ``rank_i = r_i + rank⁺_i``. P is the number of relevant items of a row.
* Margin (Eq. 14): α/2 is taken from relevant scores and added to irrelevant ones before they are ranked.
* Ties. In a loss, an irrelevant item ranks above a relevant one of the same score, so that a constant score is the
  worst and not a lucky one; among equals of the same kind the lower index ranks first. ``rank`` goes by index alone.
* λ is in units of normalised ranks (rank / N, N the number of items that exist in the row): y is moved by λ·N·dL/drank
  and the difference of the ranks divided by λ·N. ``normalize=False`` takes absolute ranks: the same without the N.
* λ is invariant. The blackbox gradient is not linear in the gradient that arrives, so a loss weight, a gradient scaler
  or an accumulation step in front of ``rank`` changes λ. A ``rank_loss`` therefore computes, in its forward pass, the
  gradient for an upstream gradient of 1, and its backward pass only multiplies.
* That unit loss is the weighted mean over the rows that have a relevant item, so λ belongs to the size of a batch
  (the paper's: 128 queries). ``lambda_per="row"`` takes each row's own loss as the unit: λ_row = λ / rows.
* Half precision is ranked in float32 with autocast off; the gradient returns in the dtype of the scores.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rambo_plugins.core import blackbox, checks
from rambo_plugins.core.rows import DenseRows, SegmentRows
from rambo_plugins.core.sorting import ItemGradient, Pack, Problem

ItemLoss = Callable[..., Tensor]
"""``item_loss(rank, rank_plus, num_relevant) -> loss`` of each relevant item, elementwise, differentiable in the first
two; where there are grades ``item_loss(rank, rank_plus, num_relevant, grade)``. The loss of a row is its mean over the
relevant items."""


class RankStatistics(NamedTuple):
    """What the forward pass of a rank loss knows of each row; detached tensors (...), 0 in a row without a relevant."""

    num_relevant: Tensor
    """Relevant items."""
    mean_r: Tensor
    """Mean over the relevant items of r_i, the irrelevant items above."""
    zero_gradient: Tensor
    """Relevant items whose score has no gradient; all of them when no gradient was asked for. With several margins the
    smallest of their numbers."""


def rank(scores: Tensor, lambda_val: float, *, mask: Tensor | None = None, normalize: bool = True) -> Tensor:
    r"""Ranks of the scores with the blackbox gradient, Algorithm 1 of the paper, for free composition.

    .. math:: \nabla_y = -\frac1\lambda \left(rk(y) - rk\left(y + \lambda \frac{dL}{drk}\right)\right)

    The gradient depends on the scale of dL/drk, as in the paper; the losses of this package do not (see the module).

    Args:
        scores: (..., N) float; higher is better, ±inf allowed.
        lambda_val: λ, the length of the step, in [1e-30, 1e30].
        mask: (..., N) bool; items where it is False are not ranked: rank 0, no gradient.
        normalize: divide the ranks by the number of items of the row that exist.

    Returns:
        (..., N) ranks in [1/N, 1], or 1..N with ``normalize=False``, ties by index; float32 for half precision. Above
        2²⁴ items float32 cannot tell neighbouring ranks apart: pass float64 scores.

    Raises:
        TypeError, ValueError: an input of the wrong type, shape or value; NaN scores.

    >>> y = torch.tensor([0.1, 0.9, 0.5], requires_grad=True)
    >>> ranks = rank(y, lambda_val=0.6, normalize=False)
    >>> ranks
    tensor([3., 1., 2.], grad_fn=<RankBackward>)
    >>> ranks[0].backward()  # a smaller rank for the first item: one step of 0.6 carries it past the third
    >>> y.grad
    tensor([-1.6667,  0.0000,  1.6667])
    """
    checks.check_scores(scores, mask)
    lambda_val = checks.check_lambda(lambda_val)
    normalize = checks.check_flag("normalize", normalize)
    with torch.autocast(scores.device.type, enabled=False):
        return blackbox.Rank.apply(_prepare(scores, mask), mask, lambda_val, normalize)


@torch.compiler.disable  # the kernels look at the data: one graph break, not one each time they do
def rank_loss(
    scores: Tensor,
    relevance: Tensor,
    item_loss: ItemLoss,
    *,
    lambda_val: float,
    margin: float | Sequence[float] = 0.0,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    item_weights: Tensor | None = None,
    grades: Tensor | None = None,
    segments: Tensor | None = None,
    reduction: str = "mean",
    normalize: bool = True,
    lambda_per: str = "batch",
    rank_plus_grad: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, RankStatistics]:
    r"""Any loss of the ranks of the relevant items, with its blackbox gradient: the primitive under every rank loss.

    .. math:: L = \sum_q c_q L_q, \quad L_q = \sum_{i\ relevant} v_i\, \ell(rank_i, rank^+_i, P), \quad
              c_q = \frac{w_q}{\sum_{q'} w_{q'}}, \quad v_i = \frac1P

    The gradient of L_q is that of Algorithm 1 for an upstream gradient of c_q, divided by c_q; so all the reductions,
    and whatever multiplies them, give the same gradient up to their factor (see the module).

    A new loss is its ``item_loss``; here 1 minus the reciprocal rank, averaged over the relevant items:

    >>> scores, relevance = torch.tensor([[0.9, 0.5, 0.1]]), torch.tensor([[False, True, True]])
    >>> loss, statistics = rank_loss(scores, relevance, lambda rank, rank_plus, num: 1 - 1 / rank, lambda_val=1.0)
    >>> loss, statistics.mean_r  # the relevant items have ranks 2 and 3, one irrelevant above each
    (tensor(0.5833), tensor([1.]))

    Rows of different length are one flat line of items and the row of each, ``segments``; all that is (..., N) here is
    then (M,), and (...) is (Q,), from segment 0 to the last one.

    >>> scores, relevance = torch.tensor([0.9, 0.5, 0.1, 0.3]), torch.tensor([False, True, True, True])
    >>> segments = torch.tensor([0, 0, 1, 1])  # from lengths: torch.arange(Q).repeat_interleave(lengths)
    >>> rank_loss(scores, relevance, lambda rank, *_: 1 - 1 / rank, lambda_val=1.0, segments=segments)[0]
    tensor(0.3750)

    Args:
        scores: (..., N) float; higher is better, ±inf allowed.
        relevance: (..., N) bool.
        item_loss: ``(rank, rank_plus, num_relevant) -> loss`` of one relevant item, elementwise over float tensors of
            one shape, differentiable in the first two. Other items may be passed as rank 1 of 1, their loss is ignored.
        lambda_val: λ, in units of normalised ranks of the mean loss (see the module), in [1e-30, 1e30].
        margin: α in [0, 1e30] (Eq. 14), in units of the scores; or several (a sequence, an array or a tensor (M,)),
            over which loss and gradient are averaged: a smoother loss, in as many times the time.
        mask: (..., N) bool; items where it is False are not ranked and get no gradient.
        weights: (...) float ≥ 0, w_q, the weight of each row; rows without a relevant item do not count.
        item_weights: (..., N) float ≥ 0, of the relevant items in the mean of their row: v_i = w_i / Σ w_i. Those of
            other items are not read; a row whose relevant items all weigh 0 has no loss, but counts as a row.
        grades: (..., N) float, of the relevant items: ``item_loss`` takes them as a fourth argument, and among equal
            scores the lower grade ranks first. Those of other items are not read.
        segments: (M,) int64, the row of each item of flat scores (M,), in any order; rows may be empty. The number of
            rows is the largest value + 1, or the length of ``weights`` (read from the device once).
        reduction: "mean" (Σ w_q L_q / Σ w_q over the rows with a relevant item), "sum" (Σ w_q L_q) or "none" (w_q L_q).
        normalize: λ in units of normalised (True) or of absolute ranks.
        lambda_per: "batch" (the unit is the mean over the rows) or "row" (the unit is each row's own loss L_q).
        rank_plus_grad: let rank⁺ carry a gradient too, by a ranking of the relevant items alone (Eqs. 17 and 21 to the
            letter); without it rank⁺ is a constant, as in the authors' code.
        generator: draws a random margin, |N(0, 1)|·α/2 for each score, as the authors' code does; None: exactly α/2.
            On the device of the scores. Each forward pass draws anew, one that ``torch.utils.checkpoint`` repeats too.

    Returns:
        The loss, a scalar, or (...) for "none", and the statistics of the rows. No relevant item anywhere: a zero that
        is attached to the graph. float32 for half-precision scores.

    Raises:
        TypeError, ValueError: an input of the wrong type, shape or value; NaN scores; weights that are negative or not
            finite, grades that are not finite; an ``item_loss`` whose value or slope is NaN. A call that
            raises leaves the ``generator`` as it was. A second derivative, ``create_graph=True``, is a RuntimeError.
    """
    checks.check_scores(scores, mask)
    checks.check_boolean("relevance", relevance, scores)
    lambda_val = checks.check_lambda(lambda_val)
    margins = checks.check_margin(margin)
    margins = margins if isinstance(margins, tuple) else (margins,)
    checks.check_choice("reduction", reduction, ("mean", "sum", "none"))
    checks.check_choice("lambda_per", lambda_per, ("batch", "row"))
    normalize = checks.check_flag("normalize", normalize)
    rank_plus_grad = checks.check_flag("rank_plus_grad", rank_plus_grad)
    if generator is not None:
        checks.check_generator(generator, scores)
    if item_weights is not None:
        checks.check_float("item_weights", item_weights, scores, tuple(scores.shape))
    if grades is not None:
        checks.check_float("grades", grades, scores, tuple(scores.shape))
        checks.check_takes_grades(item_loss)
    if segments is None:
        rows: DenseRows | SegmentRows = DenseRows(math.prod(scores.shape[:-1]), scores.shape[-1])
        lead = tuple(scores.shape[:-1])
    else:
        checks.check_segments(segments, scores)
        rows = SegmentRows(segments, None if weights is None else weights.numel())
        lead = tuple(rows.lengths.shape)
    if weights is not None:
        checks.check_float("weights", weights, scores, lead)

    values, relevance = _prepare(scores, mask).reshape(rows.shape), relevance.reshape(rows.shape)
    mask = None if mask is None else mask.reshape(rows.shape)
    if mask is not None:
        relevance = relevance & mask
    if grades is not None:
        grades = torch.where(relevance, grades.reshape(rows.shape).to(values.dtype), 1)
        checks.check_finite("grades", grades.view(scores.shape))
    num_relevant = rows.total(relevance)
    present = num_relevant > 0
    if weights is None:
        row_weights = present.to(values.dtype)
    else:
        row_weights = weights.reshape(-1).to(values.dtype)
        checks.check_weights("weights", row_weights.view(lead), row_weights.sum())
        row_weights = row_weights * present
    share = row_weights / _or_one(row_weights.sum()) if lambda_per == "batch" else present.to(values.dtype)
    lambda_rows = lambda_val * share
    if normalize:
        lambda_rows = lambda_rows * (rows.lengths if mask is None else rows.total(mask))
    if item_weights is not None:
        item_weights = torch.where(relevance, item_weights.reshape(rows.shape).to(values.dtype), 0)
        sums = rows.total(item_weights)
        checks.check_weights("item_weights", item_weights.view(scores.shape), sums)
        item_weights = item_weights / rows.spread(_or_one(sums))
    needs_grad = torch.is_grad_enabled() and scores.requires_grad
    slopes = needs_grad * (1 + rank_plus_grad)
    item_gradient = _item_gradient(item_loss, num_relevant, item_weights, grades, values.dtype, slopes)
    drawn = generator.get_state() if generator is not None else torch.empty(0)
    try:
        outcomes = []
        for one in margins:
            moved = values
            if generator is not None and one:
                noise = torch.randn(values.shape, generator=generator, dtype=values.dtype, device=values.device).abs()
                moved, one = values + torch.where(relevance, -one / 2, one / 2) * noise, 0.0
            problem = Problem(
                moved.detach(),
                relevance,
                mask,
                grades,
                one,
                lambda_rows[:, None],
                item_gradient,
                rank_plus_grad,
                needs_grad,
            )
            with torch.autocast(scores.device.type, enabled=False):
                outcomes.append(blackbox.RankLoss.apply(moved, problem, rows))
    except BaseException:
        if generator is not None:
            generator.set_state(drawn)
        raise
    losses, mean_r, num_still = outcomes[0]
    if len(outcomes) > 1:
        losses, mean_r = (torch.stack([outcome[k] for outcome in outcomes]).mean(0) for k in (0, 1))
        num_still = torch.stack([outcome[2] for outcome in outcomes]).amin(0)
    weighted = losses * row_weights
    weighted = weighted.view(lead) if reduction == "none" else weighted.sum()
    if reduction == "mean":
        weighted = weighted / _or_one(row_weights.sum())
    return weighted, RankStatistics(*(values.view(lead) for values in (num_relevant, mean_r, num_still)))


def _item_gradient(
    item_loss: ItemLoss,
    num_relevant: Tensor,
    weights: Tensor | None,
    grades: Tensor | None,
    dtype: torch.dtype,
    num_slopes: int,
) -> ItemGradient:
    """What the kernels call for the losses of the rows and their gradients, of which they read so many."""
    num_relevant = num_relevant.clamp(min=1).to(dtype)[:, None]

    def item_gradient(
        ranks: Tensor, ranks_plus: Tensor, pack: Pack, total: Pack
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        num = pack(num_relevant)
        with torch.enable_grad():
            rank, rank_plus = ranks.to(dtype).requires_grad_(), ranks_plus.to(dtype).requires_grad_()
            per_item = item_loss(rank, rank_plus, num, *([] if grades is None else [pack(grades)]))
            if not isinstance(per_item, Tensor) or per_item.shape != rank.shape:
                got = tuple(per_item.shape) if isinstance(per_item, Tensor) else type(per_item).__name__
                raise ValueError(
                    f"item_loss must return a tensor of the shape of its ranks, {tuple(rank.shape)}, got {got}"
                )
            losses = total(per_item / num if weights is None else per_item * pack(weights))
            slopes: tuple[Tensor | None, ...] = (None, None)
            if losses.requires_grad:
                slopes = torch.autograd.grad(losses.sum(), (rank, rank_plus), allow_unused=True)
        losses = losses.detach()
        sums = sum((total(slope) for slope in slopes[:num_slopes] if slope is not None), losses)
        checks.check_not_nan("the loss of an item and its slope, summed over the rows,", sums)
        return losses, slopes[0], slopes[1]

    return item_gradient


def _prepare(scores: Tensor, mask: Tensor | None) -> Tensor:
    """In float32 at least, and what does not exist below everything."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _or_one(value: Tensor) -> Tensor:
    """The value, and 1 in place of 0: a divisor."""
    return torch.where(value == 0, 1, value)
