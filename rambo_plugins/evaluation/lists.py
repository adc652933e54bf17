"""Exact lists of nearest neighbours, from lists whose order is true up to rounding and which may end too early.

A list is brought into its exact order, equal scores known as equal, by ``exactly``; ``settle`` makes lists longer, and
searches in float64, until what is missing from them cannot matter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import torch

from rambo_plugins.evaluation.embeddings import Embeddings, lengths
from rambo_plugins.evaluation.exact import compare, joined
from rambo_plugins.evaluation.plan import Plan
from rambo_plugins.evaluation.scores import Items, exact_scores_of_pairs, rounding, wide_scores_of_pairs
from rambo_plugins.evaluation.search import nearest

WIDE_BLOCK = 4096  # items at a time in float64
GROWTH = 4  # of the lists of queries that a search leaves open; at least 2, which settles MAP@R


class Lists(Protocol):
    """What is asked of the lists, of those queries ``some``, (n,), whose lists these are."""

    def rounded(
        self, some: np.ndarray, scores: np.ndarray, found: np.ndarray, whole: bool, tolerance: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Lists in the order of rounded scores: which are settled, (n,) bool; how many of the nearest matter, (n,).

        ``scores``, (n, L), best first, of the gallery rows ``found``, (n, L); two that differ by no more than the
        ``tolerance``, (n,), may be equal or in either order. ``whole``: no item is missing.
        """

    def exact(self, some: np.ndarray, levels: np.ndarray, found: np.ndarray, floor: np.ndarray) -> np.ndarray:
        """Lists in their exact order: which are settled, (n,) bool.

        ``levels``, (n, L) float64, best first, are equal for equal scores; all that is missing has a level of no more
        than ``floor``, (n,), which is −inf where nothing is. A level of 0 and a row of −1: no item.
        """


def settle(
    asked: Lists, query: np.ndarray, own: np.ndarray, gallery: Embeddings, length: int, metric: str, plan: Plan,
    devices: Sequence[torch.device], report: Callable[[int], object] = lambda pairs: None,
) -> None:  # fmt: skip
    """Lists of ``length`` neighbours for all queries, then longer ones for those whose outcome these leave open."""
    size, pending, wide = lengths(query), np.arange(len(query)), False
    while len(pending):
        length = min(length, gallery.num)
        whole = length == gallery.num
        left_open = []
        batch = max(1, plan.queries * 64 // length) if wide else plan.queries
        for first in range(0, len(pending), batch):
            some = pending[first : first + batch]
            blocks = gallery.blocks(min(plan.block, WIDE_BLOCK) if wide else plan.block)
            told = (lambda pairs: None) if wide else report
            scores, found, largest = nearest(query[some], own[some], blocks, length, metric, devices, told, wide)
            dtype = np.float64 if wide else np.float32
            tolerance = 2 * rounding(size[some], largest, gallery.dim, metric, dtype)
            settled, needed = asked.rounded(some, scores, found, whole, tolerance)
            left = np.flatnonzero(~settled)
            if len(left):
                settled[left] = _exactly(
                    asked, some[left], query[some[left]], scores[left], found[left], whole, needed[left],
                    tolerance[left], gallery, plan.block, metric, largest,
                )  # fmt: skip
            left_open.append(some[~settled])
        pending = np.concatenate(left_open)
        length, wide = GROWTH * length if wide else length, True


def _exactly(
    asked: Lists, some: np.ndarray, query: np.ndarray, scores: np.ndarray, found: np.ndarray, whole: bool,
    needed: np.ndarray, tolerance: np.ndarray, gallery: Embeddings, block: int, metric: str, largest: float,
) -> np.ndarray:  # fmt: skip
    """``asked.exact`` of these lists, as far down as they can matter: which are settled."""
    scores = scores.astype(np.float64)
    at = np.arange(len(some))
    kept = scores >= (scores[at, needed - 1] - 2 * tolerance)[:, None]
    next_best = np.where(kept.all(axis=1), -np.inf if whole else scores[:, -1], scores[at, kept.argmin(axis=1)])
    floor = next_best + tolerance  # of the exact scores of what is missing or not kept
    levels, values, found = exactly(query, np.where(kept, found, -1), gallery, block, metric, largest)
    unsure = np.where((values <= floor[:, None]) & (found >= 0), levels, 0).max(axis=1) + 0.5
    return asked.exact(some, levels, found, np.where(np.isneginf(floor), -np.inf, unsure))


def exactly(
    query: np.ndarray, rows: np.ndarray, gallery: Embeddings, block: int, metric: str, largest: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Lists in their exact order, equal scores by the number of the row.

    Args:
        query: (B, D) float32.
        rows: (B, L) int64, rows of the gallery, −1 where there is none.
        gallery: read ``block`` rows at a time.
        metric: "inner_product" or "l2".
        largest: the length of the longest gallery row.

    Returns:
        levels, (B, L) float64: from L down, equal for equal scores, 0 where there is no row; the scores in float64,
        (B, L), −inf there; the rows, (B, L).
    """
    size = lengths(query)
    values = np.full(rows.shape, -np.inf)
    for q, place, g, items in _listed(rows, gallery, block):
        values[q, place] = wide_scores_of_pairs(query, items, q, g, metric)
    if metric == "l2":
        values -= np.square(size)[:, None]
    order = np.argsort(-values, axis=1, kind="stable")
    values, rows = np.take_along_axis(values, order, 1), np.take_along_axis(rows, order, 1)

    # Neighbours in the list whose order rounding may have changed, and chains of them, are put in order exactly.
    reach = 2 * rounding(size, largest, gallery.dim, metric, np.float64)[:, None]
    linked = (values[:, 1:] >= values[:, :-1] - reach) & (rows[:, 1:] >= 0)
    ends = np.ones((len(rows), 1), bool)
    higher = np.concatenate([ends, ~linked], axis=1)  # the score before is higher
    q, place = np.nonzero(~higher | ~np.concatenate([~linked, ends], axis=1))
    if len(q):
        chained = np.full(rows.shape, -1)
        chained[q, place] = rows[q, place]
        parts, scores = [], []
        for part_q, part_place, g, items in _listed(chained, gallery, block):
            parts.append(part_q * rows.shape[1] + part_place)
            scores.append(exact_scores_of_pairs(query, items, part_q, g, metric))
        in_list = np.argsort(np.concatenate(parts))
        exact, mine = joined(scores)[in_list], rows[q, place]
        chain = np.cumsum(higher, axis=1)[q, place]
        order = np.lexsort([mine, *-exact.T[::-1], chain, q])
        exact = exact[order]
        values[q, place], rows[q, place] = values[q, place][order], mine[order]
        same = (q[1:] == q[:-1]) & (chain[1:] == chain[:-1])
        higher[q[1:][same], place[1:][same]] = compare(exact[:-1], exact[1:])[same] > 0
    levels = rows.shape[1] + 1 - np.cumsum(higher, axis=1, dtype=np.float64)
    return np.where(rows >= 0, levels, 0), values, rows


def _listed(
    rows: np.ndarray, gallery: Embeddings, block: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, Items]]:
    """For each block of the gallery the queries, the places in their lists, the rows in the block, and the block."""
    for start, items in gallery.blocks(block):
        q, place = np.nonzero((rows >= start) & (rows < start + len(items)))
        if len(q):
            yield q, place, rows[q, place] - start, Items(items)
