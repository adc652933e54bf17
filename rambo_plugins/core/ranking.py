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
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rambo_plugins.core import checks, counting, sorting

ItemLoss = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``item_loss(rank, rank_plus, num_relevant) -> loss`` of each relevant item, elementwise, differentiable in the first
two. The loss of a row is its mean over the relevant items."""


class RankStatistics(NamedTuple):
    """What the forward pass of a rank loss knows of each row; detached tensors (...), 0 in a row without a relevant."""

    num_relevant: Tensor
    """Relevant items."""
    mean_r: Tensor
    """Mean over the relevant items of r_i, the irrelevant items above."""
    zero_gradient: Tensor
    """Relevant items whose score has no gradient; all of them when no gradient was asked for."""


def rank(scores: Tensor, lambda_val: float, *, mask: Tensor | None = None, normalize: bool = True) -> Tensor:
    r"""Ranks of the scores with the blackbox gradient, Algorithm 1 of the paper, for free composition.

    .. math:: \nabla_y = -\frac1\lambda \left(rk(y) - rk\left(y + \lambda \frac{dL}{drk}\right)\right)

    The gradient depends on the scale of dL/drk, as in the paper; the losses of this package do not (see the module).

    Args:
        scores: (..., N) float; higher is better, ±inf allowed.
        lambda_val: λ > 0, the length of the step.
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
    tensor([3., 1., 2.], grad_fn=<_RankBackward>)
    >>> ranks[0].backward()  # a smaller rank for the first item: one step of 0.6 carries it past the third
    >>> y.grad
    tensor([-1.6667,  0.0000,  1.6667])
    """
    checks.check_scores(scores, mask)
    checks.check_positive("lambda_val", lambda_val)
    with torch.autocast(scores.device.type, enabled=False):
        return _Rank.apply(_prepare(scores, mask), mask, float(lambda_val), normalize)


def rank_loss(
    scores: Tensor,
    relevance: Tensor,
    item_loss: ItemLoss,
    *,
    lambda_val: float,
    margin: float = 0.0,
    mask: Tensor | None = None,
    weights: Tensor | None = None,
    reduction: str = "mean",
    normalize: bool = True,
    lambda_per: str = "batch",
    rank_plus_grad: bool = False,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, RankStatistics]:
    r"""Any loss of the ranks of the relevant items, with its blackbox gradient: the primitive under every rank loss.

    .. math:: L = \sum_q c_q L_q, \quad L_q = \frac1P \sum_{i\ relevant} \ell(rank_i, rank^+_i, P), \quad
              c_q = \frac{w_q}{\sum_{q'} w_{q'}}

    The gradient of L_q is that of Algorithm 1 for an upstream gradient of c_q, divided by c_q; so all the reductions,
    and whatever multiplies them, give the same gradient up to their factor (see the module).

    A new loss is its ``item_loss``; here 1 minus the reciprocal rank, averaged over the relevant items:

    >>> scores, relevance = torch.tensor([[0.9, 0.5, 0.1]]), torch.tensor([[False, True, True]])
    >>> loss, statistics = rank_loss(scores, relevance, lambda rank, rank_plus, num: 1 - 1 / rank, lambda_val=1.0)
    >>> loss, statistics.mean_r  # the relevant items have ranks 2 and 3, one irrelevant above each
    (tensor(0.5833), tensor([1.]))

    Args:
        scores: (..., N) float; higher is better, ±inf allowed.
        relevance: (..., N) bool.
        item_loss: ``(rank, rank_plus, num_relevant) -> loss`` of one relevant item, elementwise over float tensors of
            one shape, differentiable in the first two. Other items are passed as rank 1 of 1, their loss is ignored.
        lambda_val: λ > 0, in units of normalised ranks of the mean loss (see the module).
        margin: α ≥ 0 (Eq. 14), in units of the scores.
        mask: (..., N) bool; items where it is False are not ranked and get no gradient.
        weights: (...) float ≥ 0, w_q, the weight of each row; rows without a relevant item do not count.
        reduction: "mean" (Σ w_q L_q / Σ w_q over the rows with a relevant item), "sum" (Σ w_q L_q) or "none" (w_q L_q).
        normalize: λ in units of normalised (True) or of absolute ranks.
        lambda_per: "batch" (the unit is the mean over the rows) or "row" (the unit is each row's own loss L_q).
        rank_plus_grad: let rank⁺ carry a gradient too, by a ranking of the relevant items alone (Eqs. 17 and 21 to the
            letter); without it rank⁺ is a constant, as in the authors' code.
        generator: draws a random margin, |N(0, 1)|·α/2 for each score, as the authors' code does; None: exactly α/2.

    Returns:
        The loss, a scalar, or (...) for "none", and the statistics of the rows. No relevant item anywhere: a zero that
        is attached to the graph. float32 for half-precision scores.

    Raises:
        TypeError, ValueError: an input of the wrong type, shape or value; NaN scores.
    """
    checks.check_scores(scores, mask)
    checks.check_boolean("relevance", relevance, scores)
    checks.check_positive("lambda_val", lambda_val)
    checks.check_not_negative("margin", margin)
    checks.check_choice("reduction", reduction, ("mean", "sum", "none"))
    checks.check_choice("lambda_per", lambda_per, ("batch", "row"))
    if weights is not None:
        checks.check_weights(weights, scores)

    if mask is not None:
        relevance = relevance & mask
    rows, lead = _prepare(scores, mask), scores.shape[:-1]
    flat = (math.prod(lead), scores.shape[-1])
    num_relevant = relevance.view(torch.uint8).sum(-1, dtype=torch.int32)  # faster than of bool
    present = num_relevant > 0
    row_weights = present.to(rows.dtype) if weights is None else weights.to(rows.dtype) * present
    share = row_weights / _or_one(row_weights.sum()) if lambda_per == "batch" else present.to(rows.dtype)
    lambda_rows = lambda_val * share.reshape(flat[0], 1)
    if normalize:
        lambda_rows = lambda_rows * (flat[1] if mask is None else mask.reshape(flat).sum(-1, keepdim=True))
    if generator is not None and margin:
        noise = torch.randn(rows.shape, generator=generator, dtype=rows.dtype, device=rows.device).abs()
        rows, margin = rows + torch.where(relevance, -margin / 2, margin / 2) * noise, 0.0
    with torch.autocast(scores.device.type, enabled=False):
        losses, mean_r, num_still = _RankLoss.apply(
            rows.reshape(flat),
            relevance.reshape(flat),
            num_relevant,
            None if mask is None else mask.reshape(flat),
            float(margin),
            lambda_rows,
            item_loss,
            rank_plus_grad,
            torch.is_grad_enabled() and scores.requires_grad,
        )
    weighted = losses.view(lead) * row_weights
    if reduction != "none":
        weighted = weighted.sum()
    if reduction == "mean":
        weighted = weighted / _or_one(row_weights.sum())
    return weighted, RankStatistics(num_relevant, mean_r.view(lead), num_still.view(lead))


class _Rank(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, lambda_val: float, normalize: bool) -> Tensor:
        ctx.last = None if mask is None else sorting.order_of(~mask)
        ctx.lambda_val, ctx.normalize = lambda_val, normalize
        ranks = _Rank.ranks(ctx, scores, mask)
        ctx.save_for_backward(scores, mask, ranks)
        return ranks

    @staticmethod
    def ranks(ctx: Any, scores: Tensor, mask: Tensor | None) -> Tensor:
        ranks = sorting.positions(sorting.order_of(scores, ctx.last, descending=True)).to(scores.dtype)
        if mask is not None:
            ranks = ranks * mask
        if ctx.normalize:
            ranks = ranks / (scores.shape[-1] if mask is None else mask.sum(-1, keepdim=True).clamp(min=1))
        return ranks

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        scores, mask, ranks = ctx.saved_tensors
        moved_ranks = _Rank.ranks(ctx, scores + ctx.lambda_val * grad, mask)
        return (moved_ranks - ranks) / ctx.lambda_val, None, None, None


class _RankLoss(torch.autograd.Function):
    """Losses of the rows (Q,) of scores (Q, N); the forward pass computes the gradient, the backward multiplies it."""

    @staticmethod
    def forward(
        ctx: Any,
        scores: Tensor,
        relevance: Tensor,
        num_relevant: Tensor,
        mask: Tensor | None,
        margin: float,
        lambda_rows: Tensor,
        item_loss: ItemLoss,
        rank_plus_grad: bool,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        def item_gradient(
            ranks: Tensor, ranks_plus: Tensor, relevant: Tensor
        ) -> tuple[Tensor, Tensor | None, Tensor | None]:
            return _item_gradient(item_loss, ranks, ranks_plus, relevant, scores.dtype)

        kernel = counting if counting.is_faster(scores, num_relevant) else sorting
        losses, mean_r, num_still, grad = kernel.rank_and_move(
            scores, relevance, mask, margin, lambda_rows, item_gradient, rank_plus_grad, needs_grad
        )
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(mean_r, num_still)
        return losses, mean_r, num_still

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        (unit_grad,) = ctx.saved_tensors
        return grad.unsqueeze(-1) * unit_grad, *[None] * 8


def _item_gradient(
    item_loss: ItemLoss, ranks: Tensor, ranks_plus: Tensor, relevant: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Losses of the rows, means over their relevant items, and the gradients of these to rank and rank⁺."""
    num_relevant = relevant.sum(-1, keepdim=True)
    with torch.enable_grad():
        rank = torch.where(relevant, ranks, 1).to(dtype).requires_grad_()
        rank_plus = torch.where(relevant, ranks_plus, 1).to(dtype).requires_grad_()
        per_item = item_loss(rank, rank_plus, torch.where(relevant, num_relevant, 1).to(dtype))
        if not isinstance(per_item, Tensor) or per_item.shape != rank.shape:
            got = tuple(per_item.shape) if isinstance(per_item, Tensor) else type(per_item).__name__
            raise ValueError(
                f"item_loss must return a tensor of the shape of its ranks, {tuple(rank.shape)}, got {got}"
            )
        losses = torch.where(relevant, per_item, 0).sum(-1) / num_relevant[:, 0].clamp(min=1)
        if not losses.requires_grad:
            return losses, None, None
        to_rank, to_rank_plus = torch.autograd.grad(losses.sum(), (rank, rank_plus), allow_unused=True)
    return losses.detach(), to_rank, to_rank_plus


def _prepare(scores: Tensor, mask: Tensor | None) -> Tensor:
    """In float32 at least, and what does not exist below everything."""
    scores = scores if scores.dtype == torch.float64 else scores.float()
    return scores if mask is None else scores.masked_fill(~mask, -torch.inf)


def _or_one(value: Tensor) -> Tensor:
    """The value, and 1 in place of 0: a divisor."""
    return torch.where(value == 0, 1, value)
