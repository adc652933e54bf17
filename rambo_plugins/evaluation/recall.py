"""Recall@K and MAP@R of embeddings, exact at every K, with ties broken against the relevant item."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rambo_plugins.evaluation.counting import Queries, best_relevant, count_above
from rambo_plugins.evaluation.inputs import (
    ArrayLike,
    check_choice,
    check_ks,
    check_number,
    check_seed,
)
from rambo_plugins.evaluation.lists import WIDE_BLOCK, settle
from rambo_plugins.evaluation.plan import Plan, make_plan
from rambo_plugins.evaluation.progress import bar
from rambo_plugins.evaluation.result import RecallResult
from rambo_plugins.evaluation.scores import METRICS
from rambo_plugins.evaluation.search import as_devices
from rambo_plugins.evaluation.sides import Sides, as_sides
from rambo_plugins.evaluation.ties import certain, first_ranks, precisions_at_r
from rambo_plugins.evaluation.work import PARTS, WorkFolder, digest, digest_of_all

LONE = ("exclude", "miss")
METHODS = ("auto", "count", "search")
SPARE = 8  # neighbours beyond the last that counts, so that a tie there is seen to end

logger = logging.getLogger("rambo_plugins")


def recall_at_k(
    query: ArrayLike | Iterable[ArrayLike],
    query_labels: ArrayLike,
    gallery: ArrayLike | Iterable[ArrayLike] | None = None,
    gallery_labels: ArrayLike | None = None,
    ks: Iterable[int] = (1, 10, 100, 1000),
    *,
    query_ids: ArrayLike | None = None,
    gallery_ids: ArrayLike | None = None,
    metric: str = "inner_product",
    normalize: bool = False,
    lone: str = "exclude",
    map_at_r: bool = False,
    sample: int | None = None,
    seed: int = 0,
    method: str = "auto",
    max_memory: int | str | None = None,
    device: str | torch.device | Sequence[str | torch.device] | None = None,
    work: str | Path | None = None,
    progress: bool = False,
) -> RecallResult:
    """Share of queries with an item of their label among their K nearest, for several K in one search.

    Recall@K = mean over queries of [rank ≤ K], rank = 1 + #{irrelevant items, s ≥ s*}, with s* the score of the nearest
    relevant item (Jégou et al., TPAMI 2011, as used by Oh Song et al., CVPR 2016). An irrelevant item of the same score
    counts as nearer: embeddings that are all alike score 0. MAP@R = mean over queries of
    (1/R) Σ rank⁺_i / rank_i over the relevant items with rank_i ≤ R, the number of relevant items (Musgrave et al.,
    ECCV 2020), rank_i = #{irrelevant, s ≥ s_i} + rank⁺_i; R-precision is the share of them with rank_i ≤ R. Scores are
    those of the embeddings as float32 numbers, without rounding: where that of a matrix product could decide, by a
    bound that holds for every order of summation, the pair's score is computed in float64 and, if need be, exactly. So
    scores that are equal tie, and no others. The query itself is never its own neighbour.

    Args:
        query: (Q, D) array or tensor of any real dtype and device, a memory map, which is read in blocks, or an
            iterable of such blocks that can be iterated more than once.
        query_labels: (Q,) integers of any size, or strings.
        gallery: (N, D) likewise. None: the queries search among themselves and each leaves itself out.
        gallery_labels: (N,), with ``gallery``.
        ks: the cutoffs K, positive integers. One beyond the gallery is a search of all of it.
        query_ids: (Q,) integers or strings, with ``gallery_ids``: a gallery item of the query's id is the query itself
            and is left out. Without ids nothing of a separate gallery is left out.
        gallery_ids: (N,), each once.
        metric: "inner_product" or "l2".
        normalize: bring all embeddings to length 1 first, so that the inner product is the cosine.
        lone: queries without a relevant item in the gallery: "exclude" them, or count each as a "miss". They are
            reported and logged either way.
        map_at_r: compute MAP@R and R-precision too; this searches for as many neighbours as the largest class has.
        sample: search only so many queries, drawn without replacement with ``seed``; ``result.interval`` says how far
            the figures of all queries may lie from theirs.
        method: "count" what lies above the best relevant item, which is as fast for any K; "search" for lists of
            neighbours, with faiss on the CPU and torch on GPUs, which MAP@R needs; "auto": search if ``map_at_r``, else
            count. The result is the same.
        max_memory: bytes, or "800M", "4G": what this call takes beyond the embeddings that are in memory already;
            512 MiB by default. It decides the sizes of blocks.
        device: where products are computed, or several of them, which share the gallery; the current CUDA device if
            there is one, else the CPU.
        work: a folder for finished parts of the queries, new or empty, or of the same call, which goes on from them.
        progress: show a bar.

    Returns:
        a ``RecallResult``; ``result.recall[k]`` is Recall@K.

    Raises:
        TypeError: a dtype that is none of the above; labels or ids of different kinds; a generator of blocks.
        ValueError: shapes that do not fit, NaN or inf, a work folder of anything else or in use, ``max_memory`` too
            small, and other arguments out of range.

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
    check_choice(method, "method", METHODS)
    if map_at_r and method == "count":
        raise ValueError("method: expected 'search' or 'auto' with map_at_r, got 'count'")
    sample = None if sample is None else check_number(sample, "sample", "a positive number of queries")
    seed = check_seed(seed)
    devices = as_devices(device)
    limit = ks[-1]

    sides = as_sides(query, query_labels, gallery, gallery_labels, query_ids, gallery_ids, normalize)
    num_queries, num_gallery, r = sides.query.num, sides.gallery.num, sides.num_relevant
    chosen = np.ones(num_queries, dtype=bool)
    if sample is not None and sample < num_queries:
        chosen[:] = False
        chosen[np.random.default_rng(seed).choice(num_queries, sample, replace=False)] = True
    lone_queries = np.flatnonzero(chosen & (r == 0))
    report_lone(lone_queries, int(chosen.sum()), lone)

    searched = np.flatnonzero(chosen & (r > 0))
    problem = _Problem(**vars(sides), metric=metric, limit=limit, map_at_r=map_at_r)
    counting = method == "count" or (method == "auto" and not map_at_r)
    length = min(max(limit, int(r[searched].max(initial=0)) if map_at_r else 0) + SPARE, num_gallery)
    plan = make_plan(sides.query, sides.gallery, max_memory, None if counting else length, devices)
    pessimistic = np.full(num_queries, limit + 1)
    optimistic = pessimistic.copy()
    average_precision, precision = np.zeros((2, num_queries))
    used = (
        contextlib.nullcontext()
        if work is None
        else WorkFolder(work, PARTS, lambda: _described(problem, searched, counting, plan, progress))
    )
    with used as folder, bar(progress, "recall", len(searched) * num_gallery, "pair") as report:
        for part, start in enumerate(range(0, len(searched), plan.queries)):
            at = searched[start : start + plan.queries]
            found = None if folder is None else folder.load(part, len(at))
            if found is not None:
                report(len(at) * num_gallery)
            else:
                if counting:
                    found = _count(problem, at, plan, devices, report)
                else:
                    found = _search(problem, at, length, plan, devices, report)
                if folder is not None:
                    folder.save(part, found)
            pessimistic[at], optimistic[at] = (ranks.astype(np.int64) for ranks in found[:2])
            average_precision[at], precision[at] = found[2:] if map_at_r else (0, 0)

    averaged = int(chosen.sum()) - (len(lone_queries) if lone == "exclude" else 0)

    def mean(per_query: np.ndarray) -> float:
        return float(per_query.sum() / averaged) if averaged else math.nan

    return RecallResult.of_ranks(
        pessimistic,
        optimistic,
        ks,
        averaged,
        lone_queries=lone_queries,
        num_gallery=num_gallery,
        num_sampled=int(chosen.sum()),
        backend=f"{'counting' if counting else 'lists'}, {', '.join(map(str, devices))}",
        seconds=time.perf_counter() - started,
        map_at_r=mean(average_precision) if map_at_r else None,
        r_precision=mean(precision) if map_at_r else None,
    )


@dataclass(frozen=True)
class _Problem(Sides):
    metric: str
    limit: int
    map_at_r: bool


def _count(
    problem: _Problem, at: np.ndarray, plan: Plan, devices: list[torch.device], report: Callable[[int], object]
) -> list[np.ndarray]:
    """Pessimistic and optimistic rank of the first relevant item of these queries, limit + 1 for all beyond."""
    queries = Queries(problem.query.take(at), problem.query_codes[at], problem.own_rows[at])
    best = best_relevant(queries, problem.labelled_blocks(plan.block), problem.metric, devices[0])
    blocks = problem.labelled_blocks(plan.block)
    counts = count_above(queries, best, blocks, problem.metric, devices, plan.step, report)
    return list(np.minimum(1 + counts, problem.limit + 1))


def _search(
    problem: _Problem, at: np.ndarray, length: int, plan: Plan, devices: list[torch.device],
    report: Callable[[int], object],
) -> list[np.ndarray]:  # fmt: skip
    """The same ranks, and average precision and precision at R if asked, from lists of neighbours."""
    asked = _Outcomes(problem, at)
    rows = problem.query.take(at)
    settle(asked, rows, problem.own_rows[at], problem.gallery, length, problem.metric, plan, devices, report)
    return list(asked.outcome[: 4 if problem.map_at_r else 2])


class _Outcomes:
    """``Lists`` that give each query its ranks, average precision and precision at R: ``outcome``, (4, B)."""

    def __init__(self, problem: _Problem, at: np.ndarray) -> None:
        self.problem = problem
        self.codes, self.r = problem.query_codes[at], problem.num_relevant[at]
        self.outcome = np.zeros((4, len(at)))

    def rounded(
        self, some: np.ndarray, scores: np.ndarray, found: np.ndarray, whole: bool, tolerance: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        floor = np.full(len(some), -np.inf) if whole else scores[:, -1]
        relevant, _, needed = self._judge(some, scores, found, floor)
        return certain(scores, relevant, whole, needed, tolerance), needed

    def exact(self, some: np.ndarray, levels: np.ndarray, found: np.ndarray, floor: np.ndarray) -> np.ndarray:
        _, settled, needed = self._judge(some, levels, found, floor)
        if self.problem.map_at_r:
            settled &= levels[np.arange(len(some)), needed - 1] > floor
        return settled

    def _judge(
        self, some: np.ndarray, scores: np.ndarray, found: np.ndarray, floor: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which of the listed are relevant; whether the ranks are settled; how many of the nearest matter."""
        limit = self.problem.limit
        relevant = (self.problem.gallery_codes[found] == self.codes[some, None]) & (found >= 0)
        pessimistic, optimistic, settled = first_ranks(scores, relevant, floor, limit)
        self.outcome[:2, some] = pessimistic, optimistic
        needed = np.minimum(optimistic, limit)
        if self.problem.map_at_r:
            self.outcome[2:, some] = precisions_at_r(scores, relevant, self.r[some])
            needed = np.maximum(needed, self.r[some])
        return relevant, settled, np.minimum(needed, scores.shape[1])


def _described(
    problem: _Problem, searched: np.ndarray, counting: bool, plan: Plan, progress: bool
) -> dict[str, object]:
    """What decides the outcome of the parts."""
    size = min(plan.block, WIDE_BLOCK)
    query = digest_of_all(problem.query, size, progress)
    among_themselves = problem.gallery is problem.query
    return {
        "query": [problem.query.num, problem.query.dim, query],
        "gallery": [
            problem.gallery.num,
            problem.gallery.dim,
            query if among_themselves else digest_of_all(problem.gallery, size, progress),
        ],
        "labels and ids": digest(problem.query_codes, problem.gallery_codes, problem.own_rows),
        "sampled queries": digest(searched),
        "metric": problem.metric,
        "largest K": problem.limit,
        "method": "count" if counting else "search",
        "map_at_r": problem.map_at_r,
        "max_memory": plan.queries,
    }


def report_lone(rows: np.ndarray, num_queries: int, lone: str) -> None:
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
