"""Exact lists of nearest neighbours, also as a ``knn_func`` for pytorch-metric-learning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rambo_plugins.evaluation.embeddings import Embeddings
from rambo_plugins.evaluation.inputs import check_choice
from rambo_plugins.evaluation.lists import settle
from rambo_plugins.evaluation.plan import make_plan
from rambo_plugins.evaluation.scores import METRICS, PAIRS
from rambo_plugins.evaluation.search import as_devices

SPARE = 8  # neighbours beyond the last, so that a tie there is seen to end


class ExactKNN:
    """The ``knn_func`` of pytorch-metric-learning's ``AccuracyCalculator``, exact, within bounded memory.

    ``knn_func(query, k, reference, ref_includes_query)`` finds the k references of the largest inner product, or the
    smallest squared distance, exactly as for ``recall_at_k``; equal ones are listed by their number. Memory beyond the
    lists themselves, 12 bytes a neighbour, stays within ``max_memory``. With ``ref_includes_query`` the first
    references are the queries and each leaves itself out, by its row.

    Args:
        metric: "inner_product" or "l2", which is the host's default.
        max_memory, device: as in ``rambo_plugins.evaluation.recall_at_k``.

    >>> query = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
    >>> ExactKNN()(query, 1, query, ref_includes_query=True)[1]
    tensor([[1],
            [0],
            [1]])
    """

    def __init__(
        self,
        metric: str = "l2",
        *,
        max_memory: int | str | None = None,
        device: str | torch.device | Sequence[str | torch.device] | None = None,
    ) -> None:
        check_choice(metric, "metric", METRICS)
        self.metric, self.max_memory, self.devices = metric, max_memory, as_devices(device)

    def __call__(
        self, query: Tensor, k: int, reference: Tensor, ref_includes_query: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The k nearest references of each query.

        Args:
            query: (Q, D), any real dtype and device.
            k: neighbours, at most N, or N − 1 with ``ref_includes_query``.
            reference: (N, D).
            ref_includes_query: the first Q references are the queries.

        Returns:
            (Q, k) float32 inner products, descending, or squared distances, ascending; (Q, k) int64 rows of the
            reference; both on the device of ``query``.

        Raises:
            ValueError: a k out of range; shapes that do not fit, NaN or inf.
        """
        queries, gallery = Embeddings(query, "query", len(query)), Embeddings(reference, "reference", len(reference))
        if queries.dim != gallery.dim:
            raise ValueError(f"reference: expected {queries.dim} dimensions as in query, got {gallery.dim}")
        if ref_includes_query and queries.num > gallery.num:
            raise ValueError(f"ref_includes_query: expected {queries.num} references or more, got {gallery.num}")
        if not 1 <= k <= gallery.num - ref_includes_query:
            raise ValueError(f"k: expected 1 to {gallery.num - ref_includes_query}, got {k}")
        own = np.arange(queries.num) if ref_includes_query else np.full(queries.num, -1)
        scores, rows = find_neighbours(
            queries, np.arange(queries.num), own, gallery, k, self.metric, self.max_memory, self.devices
        )
        distances = scores if self.metric == "inner_product" else -scores
        return torch.from_numpy(distances).to(query.device), torch.from_numpy(rows).to(query.device)


def find_neighbours(
    query: Embeddings, at: np.ndarray, own: np.ndarray, gallery: Embeddings, k: int, metric: str,
    max_memory: int | str | None, devices: Sequence[torch.device],
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Scores, (B, k) float32, best first, and gallery rows, (B, k) int64, of the queries ``at``, (B,) ascending.

    ``own``, (B,): the gallery row that is the query itself and left out, −1 where there is none. A list that has no k
    others ends in −inf and −1.
    """
    k = min(k, gallery.num)
    length = min(k + SPARE, gallery.num)
    plan = make_plan(query, gallery, max_memory, length + 1, devices)
    scores, rows = np.empty((len(at), k), np.float32), np.empty((len(at), k), np.int64)
    for start in range(0, len(at), plan.queries):
        part = slice(start, start + plan.queries)
        taken = query.take(at[part])
        asked = _Nearest(rows[part])
        settle(asked, taken, own[part], gallery, length, metric, plan, devices)
        scores[part] = _scores(taken, rows[part], gallery, plan.block, metric)
    return scores, rows


class _Nearest:
    """``Lists`` whose first k rows are written to ``rows``, (B, k) int64."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def rounded(
        self, some: np.ndarray, scores: np.ndarray, found: np.ndarray, whole: bool, tolerance: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        return np.zeros(len(some), bool), np.full(len(some), self.rows.shape[1])

    def exact(self, some: np.ndarray, levels: np.ndarray, found: np.ndarray, floor: np.ndarray) -> np.ndarray:
        self.rows[some] = found[:, : self.rows.shape[1]]
        return levels[:, self.rows.shape[1] - 1] > floor


def _scores(query: np.ndarray, rows: np.ndarray, gallery: Embeddings, block: int, metric: str) -> np.ndarray:
    """Inner products or negative squared distances of the listed, (B, k) float64, −inf for a row of −1."""
    scores = np.full(rows.shape, -np.inf)
    for start, items in gallery.blocks(block):
        q, place = np.nonzero((rows >= start) & (rows < start + len(items)))
        for at in range(0, len(q), PAIRS):
            some = q[at : at + PAIRS], place[at : at + PAIRS]
            a, b = query[some[0]].astype(np.float64), items[rows[some] - start].astype(np.float64)
            scores[some] = (a * b).sum(axis=1) if metric == "inner_product" else -np.square(a - b).sum(axis=1)
    return scores
