"""The ranks of the relevant items, and the blackbox gradient of all, by counting instead of sorting.

Only relevant items move, so no order of all N items is needed. The scores of a row's P relevant items, sorted, are
thresholds between which each irrelevant item falls. How many fall into each interval gives the ranks; the gradient of
an irrelevant item is the number of relevant items above it after the move less that before it. Both are a look-up of
the item's interval, in O(log P) at most:

* a few thresholds: a comparison with each;
* else a table of uniform bins over the range of the row's thresholds tells the interval, or where to begin to compare
  with the thresholds in the item's own bin.

Items are taken in blocks that stay in the cache, so nothing of the size of the scores is made but the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rambo_plugins.core.sorting import Outcome, Problem, order_of, positions

SMALL, MOST_RELEVANT = 2**13, 0.25
"""Items of a whole problem below which, and share of the relevant items above which, sorting is faster."""
MOST_IN_BINS = 2**22
"""Relevant items of a row above which sorting is faster too: its bins would be crowded."""
BLOCK = 2**17
"""Items of a block."""
FEW = 5
"""Thresholds up to which each item is compared with each."""
BINS_PER_THRESHOLD, ITEMS_PER_BIN, MOST_BINS = 16, 16, 2**20
CROWD = 64
"""Thresholds in one bin above which the items of such bins are searched for among all thresholds."""


def is_faster(scores: Tensor, relevance: Tensor) -> bool:
    """Than sorting, by the measurements of ``benchmarks/speed.py``."""
    most = min(MOST_RELEVANT * scores.numel(), MOST_IN_BINS * len(scores))
    return scores.numel() >= SMALL and int(relevance.count_nonzero()) <= most


def rank_and_move(problem: Problem) -> Outcome:
    """The kernel of the CPU without numba, where it ``is_faster``: does what ``sorting.rank_and_move`` does."""
    scores, relevance, mask, grades, margin, step, item_gradient, rank_plus_grad, needs_grad = problem
    num_rows, num_items = scores.shape
    losses, mean_r = scores.new_zeros(num_rows), scores.new_zeros(num_rows)
    num_still = torch.zeros(num_rows, dtype=torch.int64)
    grad = torch.zeros_like(scores) if needs_grad else scores.new_zeros(0)
    rows_at_once = max(1, BLOCK // max(num_items, 1))
    for start in range(0, num_rows, rows_at_once):
        rows = slice(start, start + rows_at_once)
        num_missing = 0 if mask is None else (~mask[rows]).sum(1)
        part = _Rows(scores[rows], relevance[rows], num_missing, None if grades is None else grades[rows], margin)
        if part.valid.shape[1] == 0:
            continue
        now = _Sorted(part.relevant)
        ranks_plus, r = now.ranks, now.unsort(part.count(now.ascending))

        def pack(values: Tensor, part: _Rows = part, rows: slice = rows) -> Tensor:
            return part.pack(values[rows])

        losses[rows], to_rank, to_rank_plus = item_gradient(
            torch.where(part.valid, r + ranks_plus, 1), torch.where(part.valid, ranks_plus, 1), pack, part.total
        )
        mean_r[rows] = part.total(r) / part.num_relevant.clamp(min=1)
        num_still[rows] = part.num_relevant
        if not needs_grad:
            continue
        row_step = step[rows]
        divisor = torch.where(row_step == 0, 1, row_step)
        moved_by = torch.zeros_like(r)
        if to_rank is not None:
            moved = _Sorted(part.relevant + row_step * to_rank)
            moved_by += part.move(now, moved, divisor, grad[rows]) + moved.ranks - r - ranks_plus
        if rank_plus_grad and to_rank_plus is not None:
            moved_by += _Sorted(part.relevant + row_step * to_rank_plus).ranks - ranks_plus
        num_still[rows] = (part.valid & (moved_by == 0)).sum(1)
        part.scatter(moved_by.to(scores.dtype) / divisor, grad[rows])
    return losses, mean_r, num_still, grad


class _Sorted:
    """Scores of relevant items (R, P), their ranks among each other, and the same scores ascending: thresholds."""

    def __init__(self, relevant: Tensor) -> None:
        self._order = order_of(relevant, descending=True)
        self.ranks = positions(self._order)
        self.ascending = relevant.gather(1, self._order).flip(1)

    def unsort(self, values: Tensor) -> Tensor:
        """Values (R, P) of the ascending thresholds, in the order of the items."""
        return torch.empty_like(values).scatter_(1, self._order, values.flip(1))


class _Rows:
    """Rows that are worked on together: R rows of N items, the relevant ones packed into (R, P)."""

    def __init__(
        self, scores: Tensor, relevance: Tensor, num_missing: Tensor | int, grades: Tensor | None, margin: float
    ) -> None:
        self.scores, self.relevance, self.margin = scores, relevance, margin
        self.row, self.column = relevance.nonzero(as_tuple=True)
        if grades is not None:  # among equals the lower grade first
            by_grade = grades[self.row, self.column].argsort(stable=True)
            by_grade = by_grade[self.row[by_grade].argsort(stable=True)]
            self.row, self.column = self.row[by_grade], self.column[by_grade]
        self.num_relevant = torch.bincount(self.row, minlength=len(scores))
        first = self.num_relevant.cumsum(0) - self.num_relevant
        self.place = torch.arange(len(self.row)) - first[self.row]
        self.valid = torch.arange(int(self.num_relevant.max())) < self.num_relevant[:, None]
        # A row with fewer relevant items ends in -inf: thresholds below every item, whose counts nobody reads.
        packed = self.pack(scores, -torch.inf)
        self.relevant, self._as_irrelevant = packed - margin / 2, packed + margin / 2
        self._num_at_minus_infinity = num_missing - (~self.valid).sum(1)

    def pack(self, values: Tensor, fill: float = 1.0) -> Tensor:
        """Values (R, N) of the relevant items as (R, P), or values (R, 1) of the rows as they are."""
        if values.shape[1] == 1 and self.scores.shape[1] != 1:
            return values.expand(self.valid.shape)
        packed = torch.full(self.valid.shape, fill, dtype=values.dtype)
        packed[self.row, self.place] = values[self.row, self.column]
        return packed

    def total(self, values: Tensor) -> Tensor:
        """Sums (R,) of values (R, P) of the relevant items."""
        return torch.where(self.valid, values, 0).sum(1)

    def count(self, thresholds: Tensor, values: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """Irrelevant items at or above each of the ascending thresholds (R, T).

        With ``values`` (R, T + 1), ``out`` (R, N) takes for each item the value at the number of thresholds at or below
        it, as if it were irrelevant.
        """
        step = _StepFunction(thresholds, self.scores.shape[1])
        size = max(BLOCK, thresholds.shape[1])  # each block costs a pass over the thresholds too
        for start in range(0, self.scores.shape[1], size):
            block = slice(start, start + size)
            scores = self.scores[:, block] + self.margin / 2
            interval = step(scores)
            if values is not None and out is not None:
                out[:, block] = values.flatten().index_select(0, interval.flatten()).view_as(scores)
        # All items were counted, as if they were irrelevant; those that are not, and those that do not exist, are taken
        # back. The latter lie at -inf, as does what fills up the relevant items.
        step(self._as_irrelevant, times=-1)
        return step.above() - (thresholds == -torch.inf) * self._num_at_minus_infinity[:, None]

    def move(self, now: _Sorted, moved: _Sorted, divisor: Tensor, grad: Tensor) -> Tensor:
        """r (R, P) after the move; the irrelevant items' gradient goes to ``grad`` (R, N)."""
        old, new = now.ascending, moved.ascending
        one_by_one = torch.arange(old.shape[1])
        old_place = one_by_one + torch.searchsorted(new, old)
        new_place = one_by_one + torch.searchsorted(old, new, right=True)
        both = torch.cat([old, new], 1)
        both = torch.empty_like(both).scatter_(1, torch.cat([old_place, new_place], 1), both)
        # By how many of both are at or below an item: those before the move, less those after it.
        passed = torch.ones_like(both).scatter_(1, new_place, -1.0).cumsum(1)
        values = torch.cat([torch.zeros_like(divisor), passed / divisor], 1)
        return moved.unsort(self.count(both, values, grad).gather(1, new_place))

    def scatter(self, values: Tensor, out: Tensor) -> None:
        """Values (R, P) of the relevant items to their places in (R, N)."""
        out[self.row, self.column] = values[self.row, self.place]


class _StepFunction:
    """How many of the ascending thresholds (R, T) of its row lie at or below a score."""

    def __init__(self, thresholds: Tensor, num_items: int) -> None:
        self.thresholds = thresholds
        num_rows, num = thresholds.shape
        # The intervals of all rows are numbered through, T + 1 a row.
        self._row_start = torch.arange(num_rows, dtype=torch.int32)[:, None] * (num + 1)
        self._counts = torch.zeros(num_rows, num if num <= FEW else num + 1, dtype=torch.int64)
        if num <= FEW:
            return
        bins = min(max(BINS_PER_THRESHOLD * num, num_items // ITEMS_PER_BIN), max(1, MOST_BINS // num_rows))
        finite, largest = thresholds.isfinite(), torch.finfo(thresholds.dtype).max
        low = torch.where(finite, thresholds, largest).amin(1, keepdim=True)
        high = torch.where(finite, thresholds, -largest).amax(1, keepdim=True)
        self._low, self._scale = low, (bins / (high - low)).clamp(1 / largest, largest)
        self._last, self._bin_start = float(bins + 2), torch.arange(num_rows, dtype=torch.int32)[:, None] * (bins + 3)
        # What is below the first bin, the bins, what is above them: the interval where no threshold is in the bin, and
        # else the complement of the first of its intervals.
        held = torch.bincount(self._bin(thresholds).flatten(), minlength=num_rows * (bins + 3)).int().view(num_rows, -1)
        first = held.cumsum(1, dtype=torch.int32).sub_(held).add_(self._row_start)
        self._table = first.bitwise_xor_(-(held > 0).int()).flatten()
        self._crowded = int(held.max()) > CROWD
        # A row's thresholds end in one that no score reaches.
        self._ended = torch.cat([thresholds, thresholds.new_full((num_rows, 1), torch.nan)], 1).flatten()

    def above(self) -> Tensor:
        """How many of the scores of all calls lie at or above each threshold, (R, T)."""
        if self.thresholds.shape[1] <= FEW:
            return self._counts
        return self._counts[:, 1:].flip(1).cumsum(1).flip(1)

    def __call__(self, scores: Tensor, times: int = 1) -> Tensor:
        """The intervals (R, n) of scores (R, n), which count ``times``."""
        num = self.thresholds.shape[1]
        if num <= FEW:
            count = torch.zeros(scores.shape, dtype=torch.uint8)
            for place, threshold in enumerate(self.thresholds.unbind(1)):
                reached = (scores >= threshold[:, None]).view(torch.uint8)
                self._counts[:, place] += times * reached.sum(1, dtype=torch.int32)
                count += reached
            return count + self._row_start
        interval = self._table.index_select(0, self._bin(scores).flatten())
        unsure = (interval < 0).nonzero()[:, 0]
        if self._crowded:
            found = (
                torch.searchsorted(self.thresholds, scores.contiguous(), right=True, out_int32=True) + self._row_start
            )
            interval.index_copy_(0, unsure, found.flatten().index_select(0, unsure))
        else:
            score, found = scores.flatten().index_select(0, unsure), interval.index_select(0, unsure).bitwise_not_()
            while len(unsure):
                higher = self._ended.index_select(0, found) <= score
                interval.index_copy_(0, unsure, found.add_(higher))
                on = higher.nonzero()[:, 0]
                unsure, score, found = (values.index_select(0, on) for values in (unsure, score, found))
        held = torch.bincount(interval, minlength=self._counts.numel())
        self._counts.add_(held.view_as(self._counts), alpha=times)
        return interval.view_as(scores)

    def _bin(self, values: Tensor) -> Tensor:
        """Never less for a greater value, however the arithmetic rounds: values in two bins are in their order."""
        return (values - self._low).mul_(self._scale).add_(1).clamp_(0, self._last).int().add_(self._bin_start)
