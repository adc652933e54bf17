"""The two autograd functions: ranks with the gradient of Algorithm 1, and rank losses whose gradient is ready.

The conventions are at the top of ``ranking.py``. Neither has a second derivative.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rambo_plugins.core import sorting
from rambo_plugins.core.rows import DenseRows, SegmentRows
from rambo_plugins.core.sorting import Problem


class Rank(torch.autograd.Function):
    """Ranks (..., N), whose backward pass ranks the scores moved along the gradient that arrives."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, mask: Tensor | None, lambda_val: float, normalize: bool) -> Tensor:
        ctx.last = None if mask is None else sorting.order_of(~mask)
        ctx.lambda_val, ctx.normalize = lambda_val, normalize
        ranks = Rank.ranks(ctx, scores, mask)
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
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        scores, mask, ranks = ctx.saved_tensors
        with torch.no_grad():
            moved = scores + ctx.lambda_val * grad
            lost = moved.isnan() if mask is None else moved.isnan() & mask
            gradient = (Rank.ranks(ctx, moved, mask) - ranks) / ctx.lambda_val
            gradient = gradient.masked_fill(lost.any(-1, keepdim=True), torch.nan)  # what arrived was no number
        return _once(gradient), None, None, None


class RankLoss(torch.autograd.Function):
    """Losses of the rows (Q,); the forward pass computes the gradient of the scores, the backward multiplies it."""

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, problem: Problem, rows: DenseRows | SegmentRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        losses, mean_r, num_still, grad = rows.rank_and_move(problem)
        ctx.rows = rows
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(mean_r, num_still)
        return losses, mean_r, num_still

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, None, None]:
        (unit_grad,) = ctx.saved_tensors
        with torch.no_grad():
            gradient = ctx.rows.spread(grad) * unit_grad
        return _once(gradient), None, None


class _Once(torch.autograd.Function):
    """A gradient that is not to be differentiated."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, anchor: Tensor) -> Tensor:
        return gradient.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError(
            "ranks and rank losses have no second derivative: the blackbox gradient is not the derivative of a "
            "function. Leave what needs one, as a gradient penalty does, to another loss"
        )


def _once(gradient: Tensor) -> Tensor:
    """With ``create_graph=True`` a gradient whose own derivative is an error, and never a zero without a word."""
    if not torch.is_grad_enabled():
        return gradient
    return _Once.apply(gradient, torch.zeros((), device=gradient.device, requires_grad=True))
