"""The rows of a rank loss: those of a dense tensor, or segments of one flat line of items.

Both sum over each row, spread values of the rows over their items, and run the kernels. These know dense rows alone:
segments of about the same length, from one power of two to the next, are packed into dense rows of the longest.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from rambo_plugins.core import kernels
from rambo_plugins.core.sorting import Outcome, Pack, Problem, order_of


class DenseRows:
    """Q rows of N items: values of items (Q, N), of rows (Q,)."""

    def __init__(self, num: int, length: int) -> None:
        self.shape = (num, length)
        self.lengths = length

    def total(self, values: Tensor) -> Tensor:
        """(Q,) the sum of values, or the number of True, in each row."""
        if values.dtype == torch.bool:
            return values.view(torch.uint8).sum(-1, dtype=torch.int32)  # faster than of bool
        return values.sum(-1)

    def spread(self, values: Tensor) -> Tensor:
        """Values (Q,) of the rows, to be broadcast with those of the items."""
        return values.unsqueeze(-1)

    def rank_and_move(self, problem: Problem) -> Outcome:
        """See ``sorting.rank_and_move``."""
        return kernels.rank_and_move(problem)


class SegmentRows:
    """Q segments of M items in all: values of items (M,), of rows (Q,)."""

    def __init__(self, segments: Tensor, num: int | None) -> None:
        found = int(segments.max()) + 1 if len(segments) else 0
        num = found if num is None else num
        if found > num or (len(segments) and int(segments.min()) < 0):
            raise ValueError(
                f"segments must lie in 0 to {num - 1}, got values from {int(segments.min())} to {found - 1}"
            )
        self.shape = (len(segments),)
        self.lengths = torch.bincount(segments, minlength=num)
        self._segments = segments
        in_order = len(segments) < 2 or bool((segments[1:] >= segments[:-1]).all())
        self._order = None if in_order else order_of(segments)

    def total(self, values: Tensor) -> Tensor:
        """(Q,) the sum of values, or the number of True, in each row."""
        wide = values.double() if values.is_floating_point() else values.long()
        total = wide.new_zeros(len(self.lengths)).index_add_(0, self._segments, wide)
        return total.to(values.dtype) if values.is_floating_point() else total

    def spread(self, values: Tensor) -> Tensor:
        """Values (Q,) of the rows, for each item."""
        return values[self._segments]

    def rank_and_move(self, problem: Problem) -> Outcome:
        """See ``sorting.rank_and_move``; values of items are (M,) here, not (Q, N)."""
        scores, num = problem.scores, len(self.lengths)
        losses, mean_r = scores.new_zeros(num), scores.new_zeros(num)
        num_still = torch.zeros_like(self.lengths)
        grad = scores.new_zeros(len(scores) if problem.needs_grad else 0)
        for rows, items, exist in self._groups():
            mask = exist if problem.mask is None else exist & problem.mask[items]

            def item_gradient(
                ranks: Tensor, ranks_plus: Tensor, pack: Pack, total: Pack, rows: Tensor = rows, items: Tensor = items
            ) -> tuple[Tensor, Tensor | None, Tensor | None]:
                def pack_segments(values: Tensor) -> Tensor:
                    return pack(values[rows] if values.dim() == 2 else values[items])

                return problem.item_gradient(ranks, ranks_plus, pack_segments, total)

            dense = problem._replace(
                scores=scores[items].masked_fill_(~mask, -torch.inf),
                relevance=problem.relevance[items] & exist,
                mask=mask,
                grades=None if problem.grades is None else problem.grades[items],
                step=problem.step[rows],
                item_gradient=item_gradient,
            )
            losses[rows], mean_r[rows], num_still[rows], dense_grad = kernels.rank_and_move(dense)
            if problem.needs_grad:
                grad[items[exist]] = dense_grad[exist]
        return losses, mean_r, num_still, grad

    def _groups(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each power of two of lengths: the rows (R,), their items (R, L), and which of these exist."""
        last = self.lengths.cumsum(0)
        for power in range(int(self.lengths.max()).bit_length() if len(self.lengths) else 0):
            (rows,) = torch.where((self.lengths >= 2**power) & (self.lengths < 2 ** (power + 1)))
            if len(rows) == 0:
                continue
            lengths = self.lengths[rows, None]
            places = torch.arange(int(lengths.max()), device=lengths.device).expand(len(rows), -1)
            exist = places < lengths
            items = (last[rows, None] - lengths + places).clamp_(max=self.shape[0] - 1)
            yield rows, items if self._order is None else self._order[items], exist
