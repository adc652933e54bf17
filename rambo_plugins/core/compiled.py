"""``counting.py`` as compiled loops: the same counts and gradients, several times as fast, where numba is installed.

The interval of an item among the T thresholds of its row is how many of them lie above it. It is found

* for a few thresholds by comparing each with every item, in loops that become vector instructions;
* else from a table of uniform bins over the thresholds' range, which tells how many lie above the item's own bin; where
  that one holds thresholds, it is compared with them;
* where the relevant items are many, by sorting all items once, digit by digit (radix sort), and merging.

Nothing of the size of the scores is made but the gradient, and the order where all are sorted. Rows, or the items of a
long row, are split among ``torch.get_num_threads()`` threads.

All relevant items stand in one line, row after row: those of row q are ``starts[q]:starts[q + 1]``. A row has one
interval more than thresholds, so what belongs to its intervals begins at ``starts[q] + q``.

The machine code is made at the first call, which takes some seconds, and kept on disk by numba.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rambo_plugins.core import loops
from rambo_plugins.core.sorting import Outcome, Problem

MANY_RELEVANT = 1 / 16
"""Share of the relevant items from which all items are sorted."""
FEW = 16
"""Thresholds up to which each item is compared with each."""
BLOCK = 2**10
"""Items that are worked on together while they are in the cache."""
BINS_PER_THRESHOLD = 16
SHORT = 32
"""Items of a row up to which insertion sorts them."""
ITEMS_PER_THREAD = 2**16

Array = Any  # numpy's
Piece = tuple[int, int, int, int]


def rank_and_move(problem: Problem) -> Outcome:
    """The kernel of the CPU where numba is installed: what ``sorting.rank_and_move`` does, with the same result."""
    scores, relevance, mask, grades, margin, step, item_gradient, rank_plus_grad, needs_grad = problem
    num_rows, num_items = scores.shape
    scores = scores.contiguous()
    index = relevance.reshape(-1).nonzero()[:, 0]
    row = index // num_items if num_rows > 1 else torch.zeros_like(index)
    if grades is not None:  # among equals the lower grade first
        by_grade = grades.reshape(-1)[index].argsort(stable=True)
        by_grade = by_grade[row[by_grade].argsort(stable=True)]
        index, row = index[by_grade], row[by_grade]
    num_relevant = torch.bincount(row, minlength=num_rows)
    own = scores.view(-1)[index]
    relevant = own - margin / 2
    items = _Items(scores.numpy(), mask, own, margin, num_relevant)

    def pack(values: Tensor) -> Tensor:
        return values.reshape(-1)[row] if values.shape[1] == 1 else values.reshape(-1)[index]

    def total(values: Tensor) -> Tensor:
        if num_rows == 1:
            return values.sum().to(own.dtype).view(1)
        return torch.zeros(num_rows, dtype=torch.float64).index_add(0, row, values.double()).to(own.dtype)

    old, order = items.sort(relevant)
    ranks_plus, r = (torch.from_numpy(values) for values in items.rank(old, order))
    losses, to_rank, to_rank_plus = item_gradient(r + ranks_plus, ranks_plus, pack, total)
    mean_r = total(r) / num_relevant.clamp(min=1)
    if not needs_grad:
        return losses, mean_r, num_relevant, scores.new_zeros(0)
    divisor = torch.where(step == 0, 1, step)
    moved_by = torch.zeros_like(r)
    if to_rank is None:
        grad = torch.zeros_like(scores)
    else:
        new, new_order = items.sort(relevant + pack(step) * to_rank)
        moved = items.move(old, new, new_order, divisor[:, 0].numpy())
        grad, moved_plus, moved_r = (torch.from_numpy(values) for values in moved)
        moved_by = moved_r + moved_plus - r - ranks_plus
    if rank_plus_grad and to_rank_plus is not None:
        _, plus_order = items.sort(relevant + pack(step) * to_rank_plus)
        moved_by = moved_by + torch.from_numpy(items.ranks_plus(plus_order)) - ranks_plus
    num_still = torch.bincount(row[moved_by == 0], minlength=num_rows)
    grad.view(-1)[index] = moved_by.to(scores.dtype) / pack(divisor)
    return losses, mean_r, num_still, grad


class _Items:
    """The items of all rows, to be ranked as if they were irrelevant among thresholds."""

    def __init__(self, scores: Array, mask: Tensor | None, own: Tensor, margin: float, num_relevant: Tensor) -> None:
        num_rows, num_items = scores.shape
        self.scores = scores
        self.half = scores.dtype.type(margin / 2)
        self.starts = np.zeros(num_rows + 1, np.int64)
        np.cumsum(num_relevant.numpy(), out=self.starts[1:])
        # The relevant ones, from the highest to the lowest, and those that do not exist are counted and taken back.
        self.relevant, _ = self.sort(own + margin / 2)
        self.num_missing = np.zeros(num_rows, np.int64) if mask is None else (~mask).sum(1).numpy()
        self.all_sorted = len(own) > MANY_RELEVANT * scores.size
        if self.all_sorted:
            self.ordered, self.order = np.empty_like(scores), np.empty(scores.shape, np.uint32)
            self.pieces = _pieces(num_rows, 1, scores.size)
            ends = np.arange(num_rows + 1) * num_items
            _in_threads(
                lambda _, rows: loops.sort(
                    scores.ravel(), _bits(scores).ravel(), ends[rows[0] : rows[1] + 1],
                    self.ordered.ravel(), self.order.ravel(), SHORT,
                ),
                self.pieces,
            )  # fmt: skip
        else:
            self.pieces = _pieces(num_rows, num_items, scores.size)

    def sort(self, values: Tensor) -> tuple[Array, Array]:
        """(T,) each row's values from the highest to the lowest, and the places in the row where they stood."""
        array = values.numpy()
        ordered, order = np.empty_like(array), np.empty(len(array), np.uint32)
        loops.sort(array, _bits(array), self.starts, ordered, order, SHORT)
        return ordered, order

    def rank(self, thresholds: Array, order: Array) -> tuple[Array, Array]:
        """(T,) rank⁺ and r of the relevant items that stood at ``order`` before they were sorted."""
        above = self._count(thresholds, self.starts)
        return loops.unsort(order, self.starts, np.arange(len(order)), above)

    def ranks_plus(self, order: Array) -> Array:
        """(T,) rank⁺ alone."""
        places = np.arange(len(order))
        return loops.unsort(order, self.starts, places, places)[0]

    def move(self, old: Array, new: Array, new_order: Array, divisor: Array) -> tuple[Array, Array, Array]:
        """(Q, N) the gradient of all items as if they were irrelevant, and rank⁺ and r after the move."""
        both, passed, places = loops.merge(old, new, self.starts, divisor)
        grad = np.empty_like(self.scores)
        above = self._count(both, 2 * self.starts, passed, grad)
        return grad, *loops.unsort(new_order, self.starts, places, above)

    def _count(self, thresholds: Array, starts: Array, values: Array | None = None, out: Array | None = None) -> Array:
        """(T,) irrelevant items at or above each threshold; ``out`` takes the value of each item's interval."""
        if values is None or out is None:
            values, out = thresholds[:0], self.scores[:0]
        counts = np.zeros((len(self.pieces), len(thresholds) + len(self.scores)), np.int64)

        def work(number: int, piece: Piece) -> None:
            into = counts[number]
            if self.all_sorted:
                rows = piece[:2]
                loops.count_sorted(self.ordered, self.order, self.half, thresholds, starts, *rows, values, out, into)
            else:
                loops.count(
                    self.scores, self.half, thresholds, starts, *piece, values, out, into,
                    FEW, BLOCK, BINS_PER_THRESHOLD,
                )  # fmt: skip

        _in_threads(work, self.pieces)
        return loops.above(counts.sum(0), thresholds, starts, self.relevant, self.starts, self.num_missing)


def _bits(values: Array) -> Array:
    return values.view(np.uint32 if values.itemsize == 4 else np.uint64)


def _pieces(num_rows: int, num_items: int, size: int) -> list[Piece]:
    """(first row, end, first item, end) for each thread: rows of their own, or a part of the items of all the rows."""
    num = max(1, min(torch.get_num_threads(), max(num_rows, num_items), size // ITEMS_PER_THREAD))
    by_rows = num_rows >= num or num_items == 1
    length = num_rows if by_rows else num_items
    num = max(1, min(num, length))
    ends = [length * piece // num for piece in range(num + 1)]
    pairs = itertools.pairwise(ends)
    return [(*pair, 0, num_items) if by_rows else (0, num_rows, *pair) for pair in pairs]


def _in_threads(work: Callable[[int, Piece], None], pieces: list[Piece]) -> None:
    """``work(number, piece)`` for each piece."""
    if len(pieces) == 1:
        work(0, pieces[0])
        return
    with ThreadPoolExecutor(len(pieces)) as pool:
        list(pool.map(work, range(len(pieces)), pieces))
