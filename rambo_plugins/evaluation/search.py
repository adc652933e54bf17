"""Exact nearest neighbours by faiss flat search on the CPU: blocks of queries in, lists without the query out."""

from collections.abc import Iterator

import faiss
import numpy as np

from rambo_plugins.evaluation.inputs import lengths

METRICS = {"inner_product": faiss.IndexFlatIP, "l2": faiss.IndexFlatL2}
BLOCK_BYTES = 256 * 2**20  # the lists of a block of queries and what is computed from them
BLOCK_QUERIES = 4096  # the size in which faiss multiplies matrices; larger blocks gain nothing
BACKEND = "faiss flat, cpu"
_BYTES_PER_NEIGHBOUR = 64
_ROUNDING = 16  # in float32 epsilons; two ways to add up one score were seen to differ by up to 6, D = 8 to 2048


def flat_index(gallery: np.ndarray, metric: str) -> faiss.Index:
    """A flat index of ``gallery``, (N, D) float32; ``metric`` is a key of ``METRICS``."""
    index = METRICS[metric](gallery.shape[1])
    index.add(gallery)
    return index


def rounding(query: np.ndarray, gallery: np.ndarray, metric: str) -> np.ndarray:
    """How far two scores of a query must lie apart for their order to be free of rounding, (Q,) float32."""
    size, largest = lengths(query), lengths(gallery).max()
    scale = size * largest if metric == "inner_product" else (size + largest) ** 2
    with np.errstate(over="ignore"):
        return (_ROUNDING * np.finfo(np.float32).eps * scale).astype(np.float32)


def search(
    index: faiss.Index, query: np.ndarray, k: int, own_rows: np.ndarray, pairwise: bool = False
) -> Iterator[tuple[slice, np.ndarray, np.ndarray]]:
    """The ``k`` nearest gallery rows of each query other than the query itself, block by block.

    Matrix products add up a score in an order that depends on where in the matrix it lies, so that identical gallery
    rows can differ in the last bit. ``pairwise`` computes each score by itself: identical rows tie exactly, at two to
    three times the price.

    Args:
        index: a flat index of N gallery rows.
        query: (Q, D) float32.
        k: neighbours wanted; the whole gallery when k ≥ N.
        own_rows: (Q,) int64, the gallery row that is the query itself, −1 where there is none.

    Yields:
        the slice of the queries; their scores, (B, L) float32, best first, higher is better (L2: the negative squared
        distance); the gallery rows, (B, L) int64. L = min(k, N). A query that is itself in the gallery has only N − 1
        others: if k ≥ N its list ends in a score of −inf and a row of −1.

    Raises:
        ValueError: scores beyond the range of float32.
    """
    total = index.ntotal
    width = min(k + 1, total)
    step = max(1, min(BLOCK_QUERIES, BLOCK_BYTES // (_BYTES_PER_NEIGHBOUR * width)))
    for start in range(0, len(query), step):
        block = slice(start, min(start + step, len(query)))
        scores, rows = _nearest(index, query[block], width, pairwise)
        if rows[:, -1].min() < 0 or not np.isfinite(scores[:, [0, -1]]).all():
            raise ValueError("the scores of some embeddings overflow float32; scale them down or pass normalize=True")
        if isinstance(index, faiss.IndexFlatL2):
            np.negative(scores, out=scores)
        if k >= total:  # the list holds all there is: a query that is not in it must not lose its last neighbour
            scores = np.pad(scores, ((0, 0), (0, 1)), constant_values=-np.inf)
            rows = np.pad(rows, ((0, 0), (0, 1)), constant_values=-1)
        own = own_rows[block, None]
        drop = (rows == own) & (own >= 0)
        drop[~drop.any(axis=1), -1] = True
        shape = (len(rows), rows.shape[1] - 1)
        yield block, scores[~drop].reshape(shape), rows[~drop].reshape(shape)


def _nearest(index: faiss.Index, query: np.ndarray, k: int, pairwise: bool) -> tuple[np.ndarray, np.ndarray]:
    """faiss takes the matrix product from a threshold on, which only a global variable sets."""
    threshold = faiss.cvar.distance_compute_blas_threshold
    try:
        if pairwise:
            faiss.cvar.distance_compute_blas_threshold = 2**31 - 1
        return index.search(query, k)
    finally:
        faiss.cvar.distance_compute_blas_threshold = threshold
