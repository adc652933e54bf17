"""Scores of queries and items: the inner product, or the negative squared distance.

Matrix products in float32 on any device come first. What their rounding leaves open goes to products in float64 where
it is much, as with a nearly collapsed model; what remains is added up pair by pair, where identical items tie exactly.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterator

import numpy as np
import torch

METRICS = ("inner_product", "l2")
PAIRS = 8192  # pairs of rows at a time
_CHUNK = 512  # of them, so that their products stay in the cache
# in epsilons; two ways to add up one score in float32 were seen to differ by up to 6, D = 8 to 2048
_ROUNDING = {np.dtype(np.float32): 16, np.dtype(np.float64): 64}

logger = logging.getLogger("rambo_plugins")


def exact_scores(query: np.ndarray, item: np.ndarray, metric: str) -> np.ndarray:
    """The score of each pair of rows, both (n, D) float32, added up in float64 in one order: (n,) float64.

    The inner product, or the negative squared distance.
    """
    scores = np.empty(len(query))
    for start in range(0, len(query), _CHUNK):
        part = slice(start, start + _CHUNK)
        if metric == "inner_product":
            np.multiply(query[part], item[part], dtype=np.float64).sum(axis=1, out=scores[part])
        else:
            difference = np.subtract(query[part], item[part], dtype=np.float64)
            np.negative(np.square(difference, out=difference).sum(axis=1), out=scores[part])
    return scores


def rounding(
    query_lengths: np.ndarray, largest: float, metric: str, dtype: type[np.floating] = np.float32
) -> np.ndarray:
    """How far a product's score of a query may lie from the exact one, (B,) float64; ``largest``: the longest item."""
    return _ROUNDING[np.dtype(dtype)] * float(np.finfo(dtype).eps) * _bound(query_lengths, largest, metric)


def check_range(query_lengths: np.ndarray, largest: float, metric: str) -> None:
    if _bound(query_lengths, largest, metric).max(initial=0) > np.finfo(np.float32).max:
        raise ValueError("the scores of some embeddings overflow float32; scale them down or pass normalize=True")


def _bound(query_lengths: np.ndarray, largest: float, metric: str) -> np.ndarray:
    """No score of a query is larger in size, (B,) float64."""
    return query_lengths * largest if metric == "inner_product" else (query_lengths + largest) ** 2


class Items:
    """Rows of a gallery, and, once they are asked for, those among them that differ."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    @functools.cached_property
    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct rows, and the number of each row among them."""
        return _distinct(self.rows)


def exact_scores_of_pairs(query: np.ndarray, items: Items, q: np.ndarray, g: np.ndarray, metric: str) -> np.ndarray:
    """``exact_scores`` of the pairs (q, g); once for each pair of distinct rows where many rows are the same."""
    if len(q) > PAIRS:
        used_q, q_at = np.unique(q, return_inverse=True)
        distinct_q, of_q = _distinct(query[used_q])
        distinct_g, of_g = items.distinct
        if 4 * len(distinct_q) * len(distinct_g) < len(q):
            a, b = np.indices((len(distinct_q), len(distinct_g))).reshape(2, -1)
            table = _one_by_one(distinct_q, distinct_g, a, b, metric).reshape(len(distinct_q), -1)
            return table[of_q[q_at], of_g[g]]
    return _one_by_one(query, items.rows, q, g, metric)


def _one_by_one(query: np.ndarray, items: np.ndarray, q: np.ndarray, g: np.ndarray, metric: str) -> np.ndarray:
    scores = np.empty(len(q))
    for start in range(0, len(q), PAIRS):
        part = slice(start, start + PAIRS)
        scores[part] = exact_scores(query[q[part]], items[g[part]], metric)
    return scores


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.ascontiguousarray(rows)
    keys = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return rows[first], inverse


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    if not array.flags.writeable:  # torch would warn, though nothing writes to it
        array = array.copy()
    return torch.from_numpy(array).to(device)


def query_part(rows: torch.Tensor, metric: str) -> torch.Tensor:
    return rows if metric == "inner_product" else 2 * rows


def item_part(rows: torch.Tensor, metric: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    return rows.T, None if metric == "inner_product" else -rows.square().sum(dim=1)


def product(
    query: torch.Tensor, items: tuple[torch.Tensor, torch.Tensor | None], out: torch.Tensor | None = None
) -> torch.Tensor:
    """The inner product, or the negative squared distance but for |query|², which is the same in a row."""
    rows, bias = items
    return torch.mm(query, rows, out=out) if bias is None else torch.addmm(bias, query, rows, out=out)


def wide_product(query: np.ndarray, items: np.ndarray, metric: str, device: torch.device) -> torch.Tensor:
    """``product`` of float32 rows in float64."""
    wide_query, wide_items = (to_device(rows, device).double() for rows in (query, items))
    return product(query_part(wide_query, metric), item_part(wide_items, metric))


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in float32, whatever the caller has allowed: no autocast, no TF32 or bfloat16 inside.

    The settings are the process's: enter it once around threads, which start without autocast, not in each.
    """
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch < 2.9
            allowed = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(allowed)
            return
        backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        before = [backend.fp32_precision for backend in backends]
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


def in_steps(
    run: Callable[[slice], None],
    num: int,
    step: int,
    device: torch.device,
    release: Callable[[], None] = lambda: None,
) -> int:
    """``run`` for ``step`` of ``num`` rows at a time, halved where the GPU is out of memory; the step in the end."""
    at = 0
    while at < num:
        try:
            run(slice(at, min(at + step, num)))
        except torch.cuda.OutOfMemoryError:
            if step == 1:
                raise
            release()
            step //= 2
            logger.warning("%s is out of memory: going on with %d queries at a time", device, step)
        else:
            at += step
    return step
