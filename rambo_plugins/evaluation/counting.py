"""The rank of each query's first relevant item by counting: exact at every K, one number a query, no lists.

First the best relevant score s* of each query from the labels, then one pass over the gallery that counts the
irrelevant items above it. Matrix products in float32 decide what is further from s* than rounding can reach, float64
most of the rest, exact scores what is left (``scores.py``). Both passes take the gallery in blocks, and their outcomes
over parts of a gallery combine by maximum and by sum.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch

from rambo_plugins.evaluation.embeddings import lengths
from rambo_plugins.evaluation.exact import compare, raise_to
from rambo_plugins.evaluation.scores import (
    PAIRS,
    Items,
    above,
    below,
    check_range,
    exact_scores_of_pairs,
    full_precision,
    grain,
    in_steps,
    item_part,
    product,
    query_part,
    rounding,
    to_device,
    wide_is_exact,
    wide_product,
    wide_scores_of_pairs,
)

Blocks = Iterable[tuple[int, np.ndarray, np.ndarray]]  # first row, rows (n, D) float32, label codes (n,)

_WIDE = 2**20  # scores in float64 at a time
_DENSE = 64  # more than one pair in so many left open: products in float64 are cheaper than pair by pair
_CLASS_PRODUCT = 16384  # pairs of one class in a block from which a matrix product is cheaper than pair by pair


@dataclass(frozen=True)
class Queries:
    """B queries, each with a relevant item somewhere in the gallery."""

    rows: np.ndarray  # (B, D) float32
    codes: np.ndarray  # (B,) integers, equal to those of relevant items
    own: np.ndarray  # (B,) int64, the gallery row that is the query itself, −1 where there is none

    def __len__(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def lengths(self) -> np.ndarray:
        return lengths(self.rows)

    @functools.cached_property
    def grain(self) -> float:
        return grain(self.rows)


def best_relevant(queries: Queries, blocks: Blocks, metric: str, device: torch.device) -> np.ndarray:
    """The best exact score of a relevant item other than the query itself, (B, W) float64 as in ``exact.py``.

    Its first column is the score rounded to float64, −inf where ``blocks`` hold no relevant item.
    """
    best = np.zeros((len(queries), 2))
    best[:, 0] = -np.inf
    order = np.argsort(queries.codes, kind="stable")
    sorted_codes = queries.codes[order]
    for start, rows, codes in blocks:
        first, last = np.searchsorted(sorted_codes, codes, "left"), np.searchsorted(sorted_codes, codes, "right")
        items = np.flatnonzero(last > first)
        if len(items) == 0:
            continue
        _, class_of, num_items = np.unique(codes[items], return_inverse=True, return_counts=True)
        large = num_items * (last - first)[items][np.unique(class_of, return_index=True)[1]] >= _CLASS_PRODUCT
        for number in np.flatnonzero(large):
            mine = items[class_of == number]
            members = order[first[mine[0]] : last[mine[0]]]
            best = _best_of_class(best, queries, members, mine, start, rows, metric, device)
        items = items[~large[class_of]]
        known = Items(rows)
        for q, g in _pairs(order, first[items], last[items], items):
            keep = queries.own[q] != g + start
            best = _best_of_pairs(best, queries, q[keep], known, g[keep], metric)
    return best


def _best_of_pairs(
    best: np.ndarray, queries: Queries, q: np.ndarray, items: Items, g: np.ndarray, metric: str
) -> np.ndarray:
    """``best`` raised to the scores of the pairs (q, g): those that rounding lets be the best, exactly."""
    if len(q) == 0:
        return best
    scores = wide_scores_of_pairs(queries.rows, items, q, g, metric)
    largest = float(lengths(items.rows[np.unique(g)]).max())
    reach = rounding(queries.lengths[q], largest, queries.rows.shape[1], metric, np.float64)
    top = best[:, 0].copy()
    np.maximum.at(top, q, scores)
    near = scores >= top[q] - 2 * reach
    q, g = q[near], g[near]
    return raise_to(best, q, exact_scores_of_pairs(queries.rows, items, q, g, metric))


def _pairs(
    order: np.ndarray, first: np.ndarray, last: np.ndarray, items: np.ndarray
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Each item with the queries ``order[first:last]``, some ``PAIRS`` at a time."""
    end = np.cumsum(last - first)
    start = 0
    while start < len(items):
        done = end[start - 1] if start else 0
        stop = max(start + 1, int(np.searchsorted(end, done + PAIRS, "right")))
        counts = (last - first)[start:stop]
        within = np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
        yield order[np.repeat(first[start:stop], counts) + within], np.repeat(items[start:stop], counts)
        start = stop


def _best_of_class(
    best: np.ndarray, queries: Queries, members: np.ndarray, items: np.ndarray, start: int, rows: np.ndarray,
    metric: str, device: torch.device,
) -> np.ndarray:  # fmt: skip
    """``best`` of these queries of a class raised to that of these items: a product, then the near ones exactly."""
    where = np.full(len(rows), -1)
    where[items] = np.arange(len(items))
    item_rows = rows[items]
    known = Items(item_rows)
    size, dim = queries.lengths, rows.shape[1]
    largest = float(lengths(item_rows).max())
    check_range(size[members], largest, metric)
    with full_precision(device):
        items_on_device = item_part(item_rows, metric, device)
        for at in range(0, len(members), 4096):
            part = members[at : at + 4096]
            scores = product(query_part(to_device(queries.rows[part], device), metric), items_on_device)
            own = queries.own[part] - start
            inside = np.flatnonzero((own >= 0) & (own < len(rows)))
            inside = inside[where[own[inside]] >= 0]
            scores[inside, where[own[inside]]] = -torch.inf
            top = np.maximum(scores.amax(dim=1).cpu().numpy().astype(np.float64), best[part, 0])
            low = below(top - 2 * rounding(size[part], largest, dim, metric))
            near = (scores >= to_device(low, device)[:, None]) & (scores > -torch.inf)
            for some in _row_slices(near, dim):
                if _is_dense(near[some]):
                    wide = wide_product(queries.rows[part[some]], item_rows, metric, device)
                    wide.masked_fill_(~near[some], -torch.inf)
                    top = np.maximum(wide.amax(dim=1).cpu().numpy(), best[part[some], 0])
                    reach = rounding(size[part[some]], largest, dim, metric, np.float64)
                    near[some] &= wide >= to_device(top - 2 * reach, device)[:, None]
                q, g = near[some].nonzero().cpu().numpy().T
                best = _best_of_pairs(best, queries, part[some][q], known, g, metric)
    return best


def _row_slices(matrix: torch.Tensor, dim: int) -> Iterator[slice]:
    """Rows that take no more memory in float64, or pair by pair, than as many items of ``dim`` as there are columns."""
    step = max(1, min(_WIDE // max(1, matrix.shape[1]), dim // 8))
    yield from (slice(at, at + step) for at in range(0, len(matrix), step))


def _is_dense(pairs: torch.Tensor) -> bool:
    return int(pairs.sum()) * _DENSE > pairs.numel()


def count_above(
    queries: Queries,
    best: np.ndarray,
    blocks: Blocks,
    metric: str,
    devices: Sequence[torch.device],
    step: int = 4096,
    report: Callable[[int], object] = lambda pairs: None,
) -> np.ndarray:
    """How many irrelevant items score at least ``best``, and how many more than it: (2, B) int64.

    Args:
        queries: B queries; items of a query's code, and its own row, are not counted.
        best: (B, W) float64, of ``best_relevant``.
        blocks: the gallery.
        metric: a member of ``METRICS``.
        devices: where the products run; blocks go to them in turns.
        step: queries at a time; the products take 8 · step · n bytes.
        report: is told the number of pairs after each block.
    """
    workers = [_Counter(queries, best, metric, device, step) for device in devices]
    blocks = iter(blocks)
    with full_precision(devices[0]), ThreadPoolExecutor(len(workers)) as pool:
        while turn := list(itertools.islice(blocks, len(workers))):
            if len(turn) == 1:
                workers[0].count(turn[0])
            else:
                list(pool.map(_Counter.count, workers, turn))
            report(sum(len(queries) * len(rows) for _, rows, _ in turn))
    return np.sum([worker.counts for worker in workers], axis=0)


class _Counter:
    """The counts of one device. Its memory: the queries, and two matrices of ``step`` times a block."""

    def __init__(self, queries: Queries, best: np.ndarray, metric: str, device: torch.device, step: int) -> None:
        self.queries, self.best, self.metric, self.device, self.step = queries, best, metric, device, step
        self.counts = np.zeros((2, len(queries)), np.int64)
        self.rows = query_part(to_device(queries.rows, device), metric)
        self.buffer = torch.empty(0, dtype=torch.float32, device=device)

    def count(self, block: tuple[int, np.ndarray, np.ndarray]) -> None:
        start, rows, codes = block
        largest = float(lengths(rows).max())
        check_range(self.queries.lengths, largest, self.metric)
        items = item_part(rows, self.metric, self.device)
        known = Items(rows)

        def part(part: slice) -> None:  # may be repeated where memory ran out: the counts change once, at its end
            self.counts[:, part] += self._count_part(part, start, known, codes, items, largest)

        self.step = in_steps(part, len(self.queries), self.step, self.device, self.release)

    def release(self) -> None:
        self.buffer = torch.empty(0, dtype=torch.float32, device=self.device)

    def _count_part(
        self, part: slice, start: int, known: Items, codes: np.ndarray,
        items: tuple[torch.Tensor, torch.Tensor | None], largest: float,
    ) -> np.ndarray:  # fmt: skip
        """The counts of these queries in a block, (2, n) int64."""
        num, rows = part.stop - part.start, known.rows
        counts = np.zeros((2, num), np.int64)
        if self.buffer.numel() < 2 * num * len(rows):
            self.buffer = torch.empty(2 * num * len(rows), dtype=torch.float32, device=self.device)
        scores, flags = self.buffer[: 2 * num * len(rows)].view(2, num, len(rows))
        product(self.rows[part], items, out=scores)
        own = self.queries.own[part] - start
        inside = np.flatnonzero((own >= 0) & (own < len(rows)))
        scores[inside, own[inside]] = -torch.inf

        middle = self.best[part, 0]
        reach = rounding(self.queries.lengths[part], largest, rows.shape[1], self.metric)
        low, high = (to_device(end, self.device)[:, None] for end in (below(middle - reach), above(middle + reach)))
        possible = torch.ge(scores, low, out=flags).sum(dim=1)
        active = possible.nonzero()[:, 0]
        if len(active) == 0:
            return counts
        if 2 * len(active) < num:
            scores, possible, low, high = scores[active], possible[active], low[active], high[active]
        else:
            active = torch.arange(num, device=self.device)
        surely = torch.gt(scores, high, out=flags[: len(active)]).sum(dim=1)
        close_rows = (possible > surely).nonzero()[:, 0]
        places = active.cpu().numpy()
        counts[:, places] = surely.cpu().numpy()
        if len(close_rows) < len(active):
            scores, low, high = scores[close_rows], low[close_rows], high[close_rows]
        close = (scores >= low) & (scores <= high)
        places = places[close_rows.cpu().numpy()]
        for some in _row_slices(close, rows.shape[1]):
            counts[:, places[some]] += self._count_close(part.start + places[some], close[some], known, codes, largest)
        return counts

    def _count_close(
        self, queries: np.ndarray, close: torch.Tensor, known: Items, codes: np.ndarray, largest: float
    ) -> np.ndarray:
        """The counts of these n queries among these pairs, (n, items) bool: (2, n) int64."""
        counts = np.zeros((2, len(queries)), np.int64)
        mine, best, size = self.queries.codes[queries], self.best[queries], self.queries.lengths[queries]
        middle, dim = best[:, 0], known.rows.shape[1]
        reach = rounding(size, largest, dim, self.metric, np.float64)
        if _is_dense(close):
            wide = wide_product(self.queries.rows[queries], known.rows, self.metric, self.device)
            low, high = (to_device(end, self.device)[:, None] for end in (middle - reach, middle + reach))
            counts += (close & (wide > high)).sum(dim=1).cpu().numpy()
            close = close & (wide >= low) & (wide <= high)
            if _is_dense(close) and wide_is_exact(self.queries.grain, size, known, largest, self.metric):
                close &= to_device(mine, self.device)[:, None] != to_device(codes, self.device)
                level = to_device(middle, self.device)[:, None]
                more, same = ((close & found).sum(dim=1).cpu().numpy() for found in (wide > level, wide == level))
                rest = compare(best[:, 1:], np.zeros((len(best), 1)))  # of the best score beyond its first column
                return counts + np.stack([more + same * (rest <= 0), more + same * (rest < 0)])
        q, g = close.nonzero().cpu().numpy().T
        irrelevant = mine[q] != codes[g]
        q, g = q[irrelevant], g[irrelevant]
        distance = wide_scores_of_pairs(self.queries.rows, known, queries[q], g, self.metric) - middle[q]
        counts += np.bincount(q[distance > reach[q]], minlength=len(queries))
        undecided = np.abs(distance) <= reach[q]
        q, g = q[undecided], g[undecided]
        order = compare(exact_scores_of_pairs(self.queries.rows, known, queries[q], g, self.metric), best[q])
        return counts + np.stack(
            [np.bincount(q[reached], minlength=len(queries)) for reached in (order >= 0, order > 0)]
        )
