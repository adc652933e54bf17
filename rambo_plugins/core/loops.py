"""The compiled loops of ``compiled.py``, on numpy arrays of float32 or float64. What they share is explained there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Machine code, made at the first call and kept on disk, that other threads run beside."""
    return numba.njit(nogil=True, cache=True)(function)


@compiled
def sort(values, bits, starts, ordered, order, short):
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
def count(scores, half, thresholds, starts, row, rows_end, item, items_end, values, out, counts, few, block, per_bin):
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
    """How many thresholds lie above the score, at least ``first`` and at most ``end``; ``end`` is a table's entry."""
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
def count_sorted(ordered, order, half, thresholds, starts, row, rows_end, values, out, counts):
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
def above(counts, thresholds, starts, relevant, relevant_starts, num_missing):
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
def merge(old, order, new, new_order, starts, slopes, unit, divisor):
    """Both thresholds from the highest to the lowest; in each interval the sum of the slopes of the new ones above,
    less that of the old ones, times its unit and by the divisor; and where each new one went. ``slopes`` are whole
    numbers in the order of the items, 1 where the thresholds count alike."""
    both, places = np.empty(2 * len(old), old.dtype), np.empty(len(new), np.int64)
    values = np.empty(2 * len(old) + len(starts) - 1, old.dtype)
    for q in range(len(starts) - 1):
        at_old, at_new, end = starts[q], starts[q], starts[q + 1]
        at, excess = 2 * starts[q], 0
        values[at + q] = 0
        while at < 2 * end:
            if at_new == end or (at_old < end and old[at_old] >= new[at_new]):
                both[at] = old[at_old]
                excess -= slopes[starts[q] + order[at_old]]
                at_old += 1
            else:
                both[at] = new[at_new]
                places[at_new] = at
                excess += slopes[starts[q] + new_order[at_new]]
                at_new += 1
            at += 1
            values[at + q] = old.dtype.type(excess) * unit[q] / divisor[q]
    return both, values, places


@compiled
def unsort(order, starts, places, above):
    """rank⁺ and r in the order of the items, from that of their scores."""
    ranks_plus, r = np.empty(len(order), np.int64), np.empty(len(order), np.int64)
    for q in range(len(starts) - 1):
        for place in range(starts[q], starts[q + 1]):
            item = starts[q] + order[place]
            ranks_plus[item] = place - starts[q] + 1
            r[item] = above[places[place]]
    return ranks_plus, r
