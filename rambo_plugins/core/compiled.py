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

import numba
import numpy as np
import torch
from torch import Tensor

from rambo_plugins.core.sorting import ItemGradient, Outcome

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

Array = Any  # numpy's; the compiled functions take float32 and float64
Piece = tuple[int, int, int, int]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return numba.njit(nogil=True, cache=True)(function)


def rank_and_move(
    scores: Tensor,
    relevance: Tensor,
    mask: Tensor | None,
    grades: Tensor | None,
    margin: float,
    step: Tensor,
    item_gradient: ItemGradient,
    rank_plus_grad: bool,
    needs_grad: bool,
) -> Outcome:
    """The kernel of ``rank_loss`` on the CPU: what ``sorting.rank_and_move`` does, with the same result."""
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
        moved_plus_alone, _ = items.rank(*items.sort(relevant + pack(step) * to_rank_plus))
        moved_by = moved_by + torch.from_numpy(moved_plus_alone) - ranks_plus
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
                lambda rows: _sort(
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
        _sort(array, _bits(array), self.starts, ordered, order, SHORT)
        return ordered, order

    def rank(self, thresholds: Array, order: Array) -> tuple[Array, Array]:
        """(T,) rank⁺ and r of the relevant items that stood at ``order`` before they were sorted."""
        above = self._count(thresholds, self.starts)
        return _unsort(order, self.starts, np.arange(len(order)), above)

    def move(self, old: Array, new: Array, new_order: Array, divisor: Array) -> tuple[Array, Array, Array]:
        """(Q, N) the gradient of all items as if they were irrelevant, and rank⁺ and r after the move."""
        both, passed, places = _merge(old, new, self.starts, divisor)
        grad = np.empty_like(self.scores)
        above = self._count(both, 2 * self.starts, passed, grad)
        return grad, *_unsort(new_order, self.starts, places, above)

    def _count(self, thresholds: Array, starts: Array, values: Array | None = None, out: Array | None = None) -> Array:
        """(T,) irrelevant items at or above each threshold; ``out`` takes the value of each item's interval."""
        if values is None or out is None:
            values, out = thresholds[:0], self.scores[:0]
        counts = np.zeros((len(self.pieces), len(thresholds) + len(self.scores)), np.int64)

        def work(piece: Piece) -> None:
            into = counts[self.pieces.index(piece)]
            if self.all_sorted:
                rows = piece[:2]
                _count_sorted(self.ordered, self.order, self.half, thresholds, starts, *rows, values, out, into)
            else:
                _count(
                    self.scores, self.half, thresholds, starts, *piece, values, out, into,
                    FEW, BLOCK, BINS_PER_THRESHOLD,
                )  # fmt: skip

        _in_threads(work, self.pieces)
        return _above(counts.sum(0), thresholds, starts, self.relevant, self.starts, self.num_missing)


def _bits(values: Array) -> Array:
    return values.view(np.uint32 if values.itemsize == 4 else np.uint64)


def _pieces(num_rows: int, num_items: int, size: int) -> list[Piece]:
    """(first row, end, first item, end) for each thread: rows of their own, or a part of the items of all the rows."""
    num = max(1, min(torch.get_num_threads(), max(num_rows, num_items), size // ITEMS_PER_THREAD))
    by_rows = num_rows >= num or num_items == 1
    length = num_rows if by_rows else num_items
    num = min(num, length)
    ends = [length * piece // num for piece in range(num + 1)]
    pairs = itertools.pairwise(ends)
    return [(*pair, 0, num_items) if by_rows else (0, num_rows, *pair) for pair in pairs]


def _in_threads(work: Callable[[Piece], None], pieces: list[Piece]) -> None:
    if len(pieces) == 1:
        work(pieces[0])
        return
    with ThreadPoolExecutor(len(pieces)) as pool:
        list(pool.map(work, pieces))


@compiled
def _sort(values, bits, starts, ordered, order, short):
    """Each row's values from the highest to the lowest, equal ones in their order; ``order`` counts within the row."""
    longest = 0
    for row in range(len(starts) - 1):
        longest = max(longest, starts[row + 1] - starts[row])
    size = longest if longest > short else 0
    keys, other_keys = np.empty(size, bits.dtype), np.empty(size, bits.dtype)
    places, other_places = np.empty(size, np.uint32), np.empty(size, np.uint32)
    num_passes = 3 if values.itemsize == 4 else 6  # digits of 11 bits
    counts = np.empty((num_passes, 2048), np.int64)
    sign = bits.dtype.type(1 << (8 * values.itemsize - 1))
    for row in range(len(starts) - 1):
        first, length = starts[row], starts[row + 1] - starts[row]
        if length <= short:
            for place in range(length):
                value, at = values[first + place], first + place
                while at > first and ordered[at - 1] < value:
                    ordered[at], order[at] = ordered[at - 1], order[at - 1]
                    at -= 1
                ordered[at], order[at] = value, place
            continue
        counts[:] = 0
        for place in range(length):
            # Unsigned integers, of which the smallest is the highest value.
            key = bits[first + place]
            if values[first + place] == 0:
                key = ~sign  # both zeros
            elif not key & sign:
                key = ~(key | sign)
            keys[place], places[place] = key, place
            key = keys[place]  # numba computes in 64 bits
            for number in range(num_passes):
                counts[number, (key >> (11 * number)) & 2047] += 1
        for number in range(num_passes):
            total = 0
            for digit in range(2048):
                total, counts[number, digit] = total + counts[number, digit], total
            for place in range(length):
                digit = (keys[place] >> (11 * number)) & 2047
                at = counts[number, digit]
                counts[number, digit] += 1
                other_keys[at], other_places[at] = keys[place], places[place]
            keys, other_keys, places, other_places = other_keys, keys, other_places, places
        for place in range(length):
            order[first + place] = places[place]
            ordered[first + place] = values[first + places[place]]


@compiled
def _count(scores, half, thresholds, starts, row, rows_end, item, items_end, values, out, counts, few, block, per_bin):
    """Add up the items of each interval, rows and items from ... to; ``out`` takes the values of the intervals."""
    moving = len(out) > 0
    bins, shifted = np.empty(block, np.int32), np.empty(block, scores.dtype)
    for q in range(row, rows_end):
        above, shift = thresholds[starts[q] : starts[q + 1]], starts[q] + q
        num = len(above)
        if num == 0:
            if moving:
                out[q, item:items_end] = 0
        elif num <= few:
            for begin in range(item, items_end, block):
                size = min(block, items_end - begin)
                for at in range(size):
                    shifted[at] = scores[q, begin + at] + half
                    bins[at] = num  # the interval, one less for each threshold that is reached
                last = 0
                for place in range(num):
                    threshold, reached = above[place], np.int32(0)
                    for at in range(size):
                        reaches = np.int32(shifted[at] >= threshold)
                        reached += reaches
                        bins[at] -= reaches
                    counts[shift + place] += reached - last
                    last = reached
                if moving:
                    for at in range(size):
                        out[q, begin + at] = values[shift + bins[at]]
        else:
            table, high, scale, top, one = _table(above, per_bin)
            for begin in range(item, items_end, block):
                size = min(block, items_end - begin)
                for at in range(size):
                    score = scores[q, begin + at] + half
                    shifted[at] = score
                    bins[at] = _bin(score, high, scale, top, one)
                for at in range(size):
                    interval = table[bins[at]]
                    if interval < 0:
                        interval = _search(above, shifted[at], ~interval, table[bins[at] + 1])
                    counts[shift + interval] += 1
                    if moving:
                        out[q, begin + at] = values[shift + interval]


@compiled
def _bin(score, high, scale, top, one):
    """Never less for a smaller score, however the arithmetic rounds: scores in two bins are in their order."""
    place = (high - score) * scale + one
    place = place if place > 0 else one - one  # also where it is a NaN
    return np.int32(place if place < top else top)


@compiled
def _table(thresholds, per_bin):
    """How many thresholds lie above each bin, as the complement where the bin holds thresholds itself; and the bins."""
    first, last = 0, len(thresholds) - 1
    while first < last and thresholds[first] == np.inf:
        first += 1
    while last > first and thresholds[last] == -np.inf:
        last -= 1
    high, low = thresholds[first], thresholds[last]
    one, largest = thresholds.dtype.type(1), thresholds.dtype.type(np.finfo(thresholds.dtype).max)
    if not np.isfinite(high):
        high = low = one
    num_bins = per_bin * len(thresholds)
    scale = thresholds.dtype.type(num_bins) / (high - low) if high > low else largest
    scale = min(max(scale, one / largest), largest)
    top = thresholds.dtype.type(num_bins + 1)
    table = np.zeros(num_bins + 3, np.int32)
    for threshold in thresholds:
        table[_bin(threshold, high, scale, top, one)] += 1
    total = 0
    for at in range(num_bins + 3):
        held = table[at]
        table[at] = ~total if held else total
        total += held
    return table, high, scale, top, one


@compiled
def _search(thresholds, score, first, end):
    """How many thresholds lie above the score, at least ``first`` and at most ``end``, or its complement."""
    end = ~end if end < 0 else end
    if end - first <= 8:
        while first < end and thresholds[first] > score:
            first += 1
        return first
    while first < end:
        middle = (first + end) >> 1
        if thresholds[middle] > score:
            first = middle + 1
        else:
            end = middle
    return first


@compiled
def _count_sorted(ordered, order, half, thresholds, starts, row, rows_end, values, out, counts):
    """Like ``_count``, of rows whose items are sorted."""
    moving = len(out) > 0
    for q in range(row, rows_end):
        num, first, shift = starts[q + 1] - starts[q], starts[q], starts[q] + q
        interval = 0
        for place in range(ordered.shape[1]):
            score = ordered[q, place] + half
            while interval < num and thresholds[first + interval] > score:
                interval += 1
            counts[shift + interval] += 1
            if moving:
                out[q, order[q, place]] = values[shift + interval]


@compiled
def _above(counts, thresholds, starts, relevant, relevant_starts, num_missing):
    """Irrelevant items at or above each threshold, from the numbers of all items in the intervals."""
    above = np.empty(len(thresholds), np.int64)
    for q in range(len(starts) - 1):
        first, end = starts[q], starts[q + 1]
        interval = first
        for place in range(relevant_starts[q], relevant_starts[q + 1]):
            while interval < end and thresholds[interval] > relevant[place]:
                interval += 1
            counts[interval + q] -= 1
        interval = end
        while interval > first and thresholds[interval - 1] == -np.inf:
            interval -= 1
        counts[interval + q] -= num_missing[q]
        total = 0
        for place in range(first, end):
            total += counts[place + q]
            above[place] = total
    return above


@compiled
def _merge(old, new, starts, divisor):
    """Both thresholds from the highest to the lowest; in each interval how many more of the new than of the old lie
    above, by the divisor; and where each new one went."""
    both, places = np.empty(2 * len(old), old.dtype), np.empty(len(new), np.int64)
    values = np.empty(2 * len(old) + len(starts) - 1, old.dtype)
    for q in range(len(starts) - 1):
        at_old, at_new, end = starts[q], starts[q], starts[q + 1]
        at, excess = 2 * starts[q], 0
        values[at + q] = 0
        while at < 2 * end:
            if at_new == end or (at_old < end and old[at_old] >= new[at_new]):
                both[at] = old[at_old]
                at_old += 1
                excess -= 1
            else:
                both[at] = new[at_new]
                places[at_new] = at
                at_new += 1
                excess += 1
            at += 1
            values[at + q] = excess / divisor[q]
    return both, values, places


@compiled
def _unsort(order, starts, places, above):
    """rank⁺ and r in the order of the items, from that of their scores."""
    ranks_plus, r = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    for q in range(len(starts) - 1):
        for place in range(starts[q], starts[q + 1]):
            item = starts[q] + order[place]
            ranks_plus[item] = place - starts[q] + 1
            r[item] = above[places[place]]
    return ranks_plus, r
