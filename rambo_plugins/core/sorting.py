"""The ranks and the blackbox gradient of all items by sorting them twice: no synchronisation with the device.

The kernel of ``rank_loss`` on a GPU, and on the CPU where ``kernels.py`` finds it the fastest; and the sorts of
``rank``. Sorts are stable, so among equal scores the order before the sort decides.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Pack = Callable[[Tensor], Tensor]
ItemGradient = Callable[[Tensor, Tensor, Pack, Pack], tuple[Tensor, "Tensor | None", "Tensor | None"]]
"""(rank, rank⁺, pack, total) -> losses of the rows and their gradients to rank and to rank⁺.

A kernel holds the relevant items in a form of its own. ``pack`` brings what is known of all items, (Q, N), or of the
rows, (Q, 1), into this form, and ``total`` sums values in it over the relevant items of each row."""


class Problem(NamedTuple):
    """What a kernel ranks: Q rows of N items."""

    scores: Tensor
    """(Q, N) float32 or float64, outside the graph, -inf where an item does not exist."""
    relevance: Tensor
    """(Q, N) bool, False where an item does not exist."""
    mask: Tensor | None
    """(Q, N) bool, which items exist; None: all."""
    grades: Tensor | None
    """(Q, N) float, of the relevant items; among equals the lower grade ranks first. None: all the same."""
    margin: float
    """α."""
    step: Tensor
    """(Q, 1), what the gradient of a row's own loss is multiplied with for the move."""
    item_gradient: ItemGradient
    """The losses of the rows and their gradients, from the ranks of relevant items."""
    rank_plus_grad: bool
    """Let rank⁺ carry a gradient too."""
    needs_grad: bool
    """Without it nothing moves, and the gradient of the outcome is not to be read."""


Outcome = tuple[Tensor, Tensor, Tensor, Tensor]
"""(Q,) losses, (Q,) mean r, (Q,) number of relevant items that do not move, and (Q, N) the gradient."""


def rank_and_move(problem: Problem) -> Outcome:
    """Rank the relevant items, move them along the gradient of their loss, rank again."""
    scores, relevance, mask, grades, margin, step, item_gradient, rank_plus_grad, needs_grad = problem
    num_relevant = relevance.sum(-1)
    # Among equals: irrelevant items first, then relevant ones, what does not exist last.
    kind = relevance.byte() if grades is None else torch.where(relevance, grades, -torch.inf)
    if mask is not None:
        kind = kind.masked_fill(~mask, 2 if grades is None else torch.inf)
    tie_order = order_of(kind)
    if margin:
        scores = scores + torch.where(relevance, -margin / 2, margin / 2).to(scores.dtype)
    ranks, ranks_plus = _ranks(scores, relevance, tie_order)

    def pack(values: Tensor) -> Tensor:
        return values.expand_as(ranks)

    def total(values: Tensor) -> Tensor:
        return torch.where(relevance, values, 0).sum(-1)

    one = torch.ones_like(ranks[:1, :1])
    losses, to_rank, to_rank_plus = item_gradient(
        torch.where(relevance, ranks, one), torch.where(relevance, ranks_plus, one), pack, total
    )
    mean_r = total(ranks - ranks_plus) / num_relevant.clamp(min=1)
    moved_by = torch.zeros_like(ranks)
    if needs_grad and to_rank is not None:
        moved_by += _ranks(scores + step * to_rank, relevance, tie_order)[0] - ranks
    if needs_grad and rank_plus_grad and to_rank_plus is not None:
        moved_plus = _ranks(scores + step * to_rank_plus, relevance, tie_order)[1] - ranks_plus
        moved_by += torch.where(relevance, moved_plus, 0)
    grad = moved_by.to(scores.dtype) / torch.where(step == 0, 1, step)
    return losses, mean_r.to(scores.dtype), (relevance & (moved_by == 0)).sum(-1), grad


def _ranks(scores: Tensor, relevance: Tensor, tie_order: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of every item, and of the relevant ones among the relevant; (Q, N) int64."""
    order = order_of(scores, tie_order, descending=True)
    ranks_plus = relevance.gather(-1, order).cumsum(-1)
    return positions(order), torch.empty_like(order).scatter_(-1, order, ranks_plus)


def order_of(keys: Tensor, tie_order: Tensor | None = None, descending: bool = False) -> Tensor:
    """Indices that sort the last dimension; equal keys stay in ``tie_order``, or in the order of their indices."""
    if tie_order is None:
        return keys.argsort(dim=-1, descending=descending, stable=True)
    order = keys.gather(-1, tie_order).argsort(dim=-1, descending=descending, stable=True)
    return tie_order.gather(-1, order)


def positions(order: Tensor) -> Tensor:
    """The inverse of a permutation of the last dimension, counted from 1."""
    one_to_n = torch.arange(1, order.shape[-1] + 1, device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, one_to_n)
