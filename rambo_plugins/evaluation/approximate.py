"""Recall@K by an approximate faiss index, for galleries of ten million and more, checked against exact search.

The index is built block by block; with a folder it survives an interruption, serves later calls, and the inverted lists
of an IVF index stay on disk. A sample of the queries is searched exactly too: the result says how far off the index is.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

from rambo_plugins.evaluation.embeddings import Embeddings
from rambo_plugins.evaluation.index import Index
from rambo_plugins.evaluation.inputs import (
    ArrayLike,
    check_choice,
    check_ks,
    check_number,
    check_seed,
)
from rambo_plugins.evaluation.plan import parse_bytes
from rambo_plugins.evaluation.progress import bar
from rambo_plugins.evaluation.recall import LONE, recall_at_k, report_lone
from rambo_plugins.evaluation.result import ApproximationCheck, RecallResult, paired_interval, wilson_interval
from rambo_plugins.evaluation.scores import METRICS
from rambo_plugins.evaluation.sides import as_sides
from rambo_plugins.evaluation.ties import first_ranks
from rambo_plugins.evaluation.work import digest

MEMORY = "2G"  # unless max_memory says otherwise
SPARE = 8  # neighbours beyond max(ks), so that a tie there is seen to end


def approximate_recall_at_k(
    query: ArrayLike | Iterable[ArrayLike],
    query_labels: ArrayLike,
    gallery: ArrayLike | Iterable[ArrayLike] | None = None,
    gallery_labels: ArrayLike | None = None,
    ks: Iterable[int] = (1, 10, 100, 1000),
    *,
    index: str,
    parameters: str = "",
    check: int = 1000,
    query_ids: ArrayLike | None = None,
    gallery_ids: ArrayLike | None = None,
    metric: str = "inner_product",
    normalize: bool = False,
    lone: str = "exclude",
    training: int | None = None,
    seed: int = 0,
    max_memory: int | str | None = None,
    device: str | torch.device | Sequence[str | torch.device] | None = None,
    folder: str | Path | None = None,
    progress: bool = False,
) -> RecallResult:
    """Share of queries with an item of their label among the K neighbours that an approximate index finds.

    Recall@K = mean over queries of [rank ≤ K], as in ``recall_at_k`` (Jégou et al., TPAMI 2011), but with the ranks
    taken from the index's list of max(ks) + 8 neighbours: rank = 1 + #{irrelevant items of the list, s ≥ s*}, s* the
    best score of a relevant item of the list. A query without one is a miss. Scores are the index's own: those of
    quantised vectors (SQ, PQ) coincide more often, and such ties count against the relevant item as all others; one
    that goes on to the end of the list counts as beyond max(ks). The query itself is left out by its row, wherever it
    is.

    ``result.exact`` is False, and ``result.check`` compares the index with exact search on a sample of the queries:
    gap = approximate − exact Recall@K of the same queries. ``result.recall[k] - result.check.gap[k]`` estimates the
    exact Recall@K of all queries.

    faiss runs on the CPU, with as many threads as ``faiss.omp_set_num_threads`` or OMP_NUM_THREADS say.

    Args:
        query: (Q, D) as in ``recall_at_k``: an array, a tensor, a memory map, or an iterable of blocks.
        query_labels: (Q,) integers or strings.
        gallery: (N, D) likewise. None: the queries search among themselves and each leaves itself out.
        gallery_labels: (N,), with ``gallery``.
        ks: the cutoffs K. HNSW looks at as many nodes as are listed at least: with a large K the small ones gain.
        index: what ``faiss.index_factory`` takes: "IVF4096,Flat", "OPQ64,IVF16384_HNSW32,PQ64", "HNSW32".
        parameters: of the search, what ``faiss.ParameterSpace`` takes: "nprobe=16", "efSearch=256". faiss's own values
            are low; nprobe is 1.
        check: queries of the sample that is searched exactly, at least 1; all of them if there are fewer.
        query_ids: (Q,), with ``gallery_ids``: a gallery item of the query's id is the query itself and is left out.
        gallery_ids: (N,), each once.
        metric: "inner_product" or "l2".
        normalize: bring all embeddings to length 1 first.
        lone: queries without a relevant item in the gallery: "exclude" them, or count each as a "miss".
        training: gallery rows to train on, drawn with ``seed``; 64 a centroid and at least 65,536 by default, as far as
            the gallery and ``max_memory`` go.
        seed: of the two samples.
        max_memory: bytes, or "800M", "4G": what this call takes beyond the index and the embeddings that are in memory
            already; 2 GiB by default.
        device: where the exact search of the sample runs, as in ``recall_at_k``.
        folder: new or empty, or of such a call: keeps the index, as far as it is built, and the exact search of the
            sample, for one process at a time. The same call goes on from there, and calls with other queries, labels or
            parameters, but the same gallery and index, use it again. The inverted lists of IVF indexes, except FastScan
            and refined ones, stay in it and are read as needed: the index may be larger than the memory. Building takes
            twice their size on disk.
        progress: show bars.

    Returns:
        a ``RecallResult`` with ``exact=False`` and a ``check``.

    Raises:
        TypeError, ValueError: as ``recall_at_k``; an index or parameters that faiss does not know or cannot use here;
            a gallery too small to train it; a folder with another index or with anything else, or in use.
        OSError: a full disk; what is finished stays.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> labels = np.arange(4000) // 4
    >>> rows = rng.standard_normal((1000, 16))[labels] + 0.5 * rng.standard_normal((4000, 16))
    >>> result = approximate_recall_at_k(rows, labels, ks=(1, 10), index="IVF64,Flat", parameters="nprobe=8")
    >>> result.exact, result.check.num_queries
    (False, 1000)
    >>> low, high = result.check.gap_interval[1]
    >>> low <= result.check.gap[1] <= high
    True
    """
    started = time.perf_counter()
    ks = check_ks(ks)
    limit = ks[-1]
    check_choice(metric, "metric", METRICS)
    check_choice(lone, "lone", LONE)
    check = check_number(check, "check", "a positive number of rows")
    training = None if training is None else check_number(training, "training", "a positive number of rows")
    seed = check_seed(seed)
    max_memory = MEMORY if max_memory is None else max_memory
    memory = parse_bytes(max_memory)

    sides = as_sides(query, query_labels, gallery, gallery_labels, query_ids, gallery_ids, normalize)
    query_rows, gallery_rows, own_rows = sides.query, sides.gallery, sides.own_rows
    codes, gallery_codes, relevant = sides.query_codes, sides.gallery_codes, sides.num_relevant
    report_lone(np.flatnonzero(relevant == 0), query_rows.num, lone)

    averaged = np.arange(query_rows.num) if lone == "miss" else np.flatnonzero(relevant)
    sample_rng = np.random.default_rng(seed).spawn(1)[0]
    sample = np.sort(sample_rng.choice(averaged, min(check, len(averaged)), replace=False))
    exact, approximate, optimistic = np.full((3, query_rows.num), limit + 1)
    used = Index(index, parameters, metric, gallery_rows, training, seed, memory, folder, progress)
    with contextlib.closing(used):
        at = sample[relevant[sample] > 0]
        if len(at):
            rows = query_rows.take(at)
            name = f"check-{digest(rows, codes[at], own_rows[at], gallery_codes, np.array(str((limit, memory))))}"
            found = recall_at_k(
                rows,
                codes[at],
                _Blocks(gallery_rows),  # normalized already
                gallery_codes,
                ks,
                query_ids=own_rows[at],
                gallery_ids=np.arange(gallery_rows.num),
                metric=metric,
                method="count",
                max_memory=memory,
                device=device,
                work=None if used.folder is None else used.folder.files.own(name),
                progress=progress,
            )
            exact[at] = np.where(found.first_rank > 0, found.first_rank, limit + 1)
        if relevant.any():
            used.build()
            k = min(limit + SPARE, gallery_rows.num) + 1  # one for the query itself
            batch = max(1, min(4096, memory // 2 // (80 * k + 8 * query_rows.dim)))
            with bar(progress, "search", query_rows.num, "query") as report:
                for start, rows in query_rows.blocks(batch):
                    some = np.flatnonzero(relevant[start : start + len(rows)])
                    at = start + some
                    scores, neighbours = used.search(rows[some], k)
                    approximate[at], optimistic[at] = _ranks(
                        scores, neighbours, own_rows[at], codes[at], gallery_codes, k > gallery_rows.num, limit
                    )
                    report(len(rows))

    return RecallResult.of_ranks(
        approximate,
        optimistic,
        ks,
        len(averaged),
        lone_queries=np.flatnonzero(relevant == 0),
        num_gallery=gallery_rows.num,
        backend=f"faiss {' '.join(filter(None, (index, parameters)))}, cpu",
        seconds=time.perf_counter() - started,
        exact=False,
        check=_compared(ks, exact[sample], approximate[sample]),
    )


def _ranks(
    scores: np.ndarray, found: np.ndarray, own: np.ndarray, codes: np.ndarray, gallery_codes: np.ndarray, whole: bool,
    limit: int,
) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Pessimistic and optimistic rank of the first relevant item of each list, limit + 1 for none and all beyond."""
    drop = (found == own[:, None]) & (own >= 0)[:, None]
    drop[~drop.any(axis=1), -1] = True
    shape = len(found), found.shape[1] - 1
    scores, found = scores[~drop].reshape(shape), found[~drop].reshape(shape)
    relevant = (gallery_codes[found] == codes[:, None]) & (found >= 0)
    floor = np.full(len(found), -np.inf) if whole else scores[:, -1]
    pessimistic, optimistic, settled = first_ranks(scores, relevant, floor, limit)
    missed = ~relevant.any(axis=1)
    return np.where(missed | ~settled, limit + 1, pessimistic), np.where(missed, limit + 1, optimistic)


def _compared(ks: tuple[int, ...], exact: np.ndarray, approximate: np.ndarray) -> ApproximationCheck:
    """From the ranks of the same n queries, (n,) int64 each."""
    num = len(exact)
    shares, gap_interval = [], {}
    for k in ks:
        hits, true_hits = approximate <= k, exact <= k
        shares.append((hits.sum() / num, true_hits.sum() / num) if num else (math.nan, math.nan))
        gap_interval[k] = paired_interval(int((hits & ~true_hits).sum()), int((~hits & true_hits).sum()), num)
    found, true = ({k: float(pair[i]) for k, pair in zip(ks, shares, strict=True)} for i in (0, 1))
    return ApproximationCheck(
        num_queries=num,
        exact=true,
        interval={k: wilson_interval(share, num) for k, share in true.items()},
        approximate=found,
        gap={k: found[k] - true[k] for k in ks},
        gap_interval=gap_interval,
    )


class _Blocks:
    """Embeddings as an iterable of blocks."""

    def __init__(self, rows: Embeddings) -> None:
        self.rows = rows

    def __iter__(self) -> Iterator[np.ndarray]:
        return (block for _, block in self.rows.blocks(4096))
