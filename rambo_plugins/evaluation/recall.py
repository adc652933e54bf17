"""Recall@K and MAP@R of embeddings, exact at every K, with ties broken against the relevant item."""

import logging
import math
import time
from collections.abc import Iterable
from typing import Any

import numpy as np

from rambo_plugins.evaluation.inputs import (
    ArrayLike,
    as_embeddings,
    as_keys,
    check_choice,
    check_ks,
    find_own_rows,
    joint_codes,
)
from rambo_plugins.evaluation.result import RecallResult
from rambo_plugins.evaluation.search import BACKEND, METRICS, flat_index, rounding, search
from rambo_plugins.evaluation.ties import average_precision_at_r, certain, first_ranks

LONE = ("exclude", "miss")
SPARE = 8  # neighbours beyond the last that counts, so that a tie there is seen to end
GROWTH = 4  # of the lists of queries that a search leaves open; at least 2, which settles MAP@R

logger = logging.getLogger("rambo_plugins")


def recall_at_k(
    query: ArrayLike,
    query_labels: ArrayLike,
    gallery: ArrayLike | None = None,
    gallery_labels: ArrayLike | None = None,
    ks: Iterable[int] = (1, 10, 100, 1000),
    *,
    query_ids: ArrayLike | None = None,
    gallery_ids: ArrayLike | None = None,
    metric: str = "inner_product",
    normalize: bool = False,
    lone: str = "exclude",
    map_at_r: bool = False,
    progress: bool = False,
) -> RecallResult:
    """Share of queries with an item of their label among their K nearest, for several K in one search.

    Recall@K = mean over queries of [rank ≤ K], rank = 1 + #{irrelevant items, s ≥ s*}, with s* the score of the nearest
    relevant item (Jégou et al., TPAMI 2011, as used by Oh Song et al., CVPR 2016). An irrelevant item of the same score
    counts as nearer: embeddings that are all alike score 0. MAP@R = mean over queries of
    (1/R) Σ rank⁺_i / rank_i over the relevant items with rank_i ≤ R, the number of relevant items (Musgrave et al.,
    ECCV 2020), rank_i = #{irrelevant, s ≥ s_i} + rank⁺_i. Scores are taken in float32, each pair's by itself where
    rounding could decide, so identical items tie. The query itself is never its own neighbour.

    Args:
        query: (Q, D) array or tensor of any real dtype and device.
        query_labels: (Q,) integers of any size, or strings.
        gallery: (N, D). None: the queries search among themselves and each leaves itself out.
        gallery_labels: (N,), with ``gallery``.
        ks: the cutoffs K, positive integers. One beyond the gallery is a search of all of it.
        query_ids: (Q,) integers or strings, with ``gallery_ids``: a gallery item of the query's id is the query itself
            and is left out. Without ids nothing of a separate gallery is left out.
        gallery_ids: (N,), each once.
        metric: "inner_product" or "l2".
        normalize: bring all embeddings to length 1 first, so that the inner product is the cosine.
        lone: queries without a relevant item in the gallery: "exclude" them, or count each as a "miss". They are
            reported and logged either way.
        map_at_r: compute MAP@R too; this searches for as many neighbours as the largest class has.
        progress: show a bar over the queries.

    Returns:
        a ``RecallResult``; ``result.recall[k]`` is Recall@K.

    Raises:
        TypeError: a dtype that is none of the above; labels or ids of different kinds.
        ValueError: shapes that do not fit, NaN or inf, and other arguments out of range.

    >>> import numpy as np
    >>> embeddings = np.array([[1.0, 0.0], [0.9, 0.1], [0.1, 0.9], [0.8, 0.2]])
    >>> result = recall_at_k(embeddings, ["cat", "cat", "dog", "dog"], ks=(1, 2), normalize=True)
    >>> result.recall
    {1: 0.75, 2: 0.75}
    >>> result.first_rank
    array([1, 1, 1, 0])
    """
    started = time.perf_counter()
    ks = check_ks(ks)
    check_choice(metric, "metric", METRICS)
    check_choice(lone, "lone", LONE)
    limit = ks[-1]

    query_rows = as_embeddings(query, "query", normalize)
    query_keys = as_keys(query_labels, "query_labels", len(query_rows))
    if gallery is None:
        if gallery_labels is not None or query_ids is not None or gallery_ids is not None:
            raise ValueError("gallery_labels, query_ids and gallery_ids go with a gallery, but gallery is None")
        gallery_rows, gallery_keys = query_rows, query_keys
        own_rows = np.arange(len(query_rows))
    else:
        if gallery_labels is None:
            raise ValueError("gallery: expected gallery_labels with it, got None")
        gallery_rows = as_embeddings(gallery, "gallery", normalize)
        gallery_keys = as_keys(gallery_labels, "gallery_labels", len(gallery_rows))
        own_rows = find_own_rows(query_ids, gallery_ids, len(query_rows), len(gallery_rows))
    if query_rows.shape[1] != gallery_rows.shape[1]:
        raise ValueError(
            f"query and gallery: expected the same D, got shapes {query_rows.shape} and {gallery_rows.shape}"
        )

    query_codes, gallery_codes = joint_codes(query_keys, gallery_keys, "query_labels and gallery_labels")
    r = np.bincount(gallery_codes, minlength=query_codes.max() + 1)[query_codes]
    r -= (own_rows >= 0) & (gallery_codes[own_rows] == query_codes)
    lone_queries = np.flatnonzero(r == 0)
    _report_lone(lone_queries, len(query_rows), lone)

    pessimistic = np.full(len(query_rows), limit + 1)
    optimistic = pessimistic.copy()
    precision = np.zeros(len(query_rows))
    pending = np.flatnonzero(r)
    index = flat_index(gallery_rows, metric)
    tolerance = rounding(query_rows, gallery_rows, metric)
    length = max(limit, int(r.max()) if map_at_r else 0) + SPARE
    pairwise = False  # one fast search of all queries, then slower ones of those whose outcome it left open
    bar = _bar(len(pending)) if progress else None
    while len(pending):
        length = min(length, len(gallery_rows))
        whole = length == len(gallery_rows)
        left_open = []
        searched = query_rows if len(pending) == len(query_rows) else query_rows[pending]
        for block, scores, rows in search(index, searched, length, own_rows[pending], pairwise):
            at = pending[block]
            relevant = (gallery_codes[rows] == query_codes[at, None]) & (rows >= 0)
            pessimistic[at], optimistic[at], settled = first_ranks(scores, relevant, whole, limit)
            needed = np.minimum(optimistic[at], limit)
            if map_at_r:
                precision[at] = average_precision_at_r(scores, relevant, r[at])
                needed = np.maximum(needed, r[at])
            if not pairwise:
                settled = certain(scores, relevant, whole, needed, tolerance[at])
            left_open.append(at[~settled])
            if bar is not None:
                bar.update(int(settled.sum()))
        pending = np.concatenate(left_open)
        length, pairwise = GROWTH * length, True
    if bar is not None:
        bar.close()

    averaged = len(query_rows) - (len(lone_queries) if lone == "exclude" else 0)

    def mean(per_query: np.ndarray) -> float:
        return float(per_query.sum() / averaged) if averaged else math.nan

    return RecallResult(
        recall={k: mean(pessimistic <= k) for k in ks},
        recall_optimistic={k: mean(optimistic <= k) for k in ks},
        map_at_r=mean(precision) if map_at_r else None,
        first_rank=np.where(pessimistic <= limit, pessimistic, 0),
        lone_queries=lone_queries,
        num_queries=len(query_rows),
        num_gallery=len(gallery_rows),
        num_tied=int((pessimistic != optimistic).sum()),
        ks=ks,
        backend=BACKEND,
        seconds=time.perf_counter() - started,
    )


def _report_lone(rows: np.ndarray, num_queries: int, lone: str) -> None:
    if len(rows):
        logger.warning(
            "%d of %d queries have no relevant item in the gallery (rows %s%s) and are %s",
            len(rows),
            num_queries,
            ", ".join(map(str, rows[:5])),
            ", …" if len(rows) > 5 else "",
            "left out of the mean" if lone == "exclude" else "counted as misses",
        )
    if len(rows) == num_queries and lone == "exclude":
        logger.warning("no query is left to average over: the figures are nan")


def _bar(total: int) -> Any:
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm") from error
    return tqdm(total=total, unit="query", desc="recall")
