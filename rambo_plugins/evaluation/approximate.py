"""Recall@K by an approximate faiss index, for galleries of ten million and more, checked against exact search.

The index is built block by block; with a folder it survives an interruption, serves later calls, and the inverted lists
of an IVF index stay on disk. A sample of the queries is searched exactly too: the result says how far off the index is.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from faiss.contrib.ondisk import merge_ondisk

from rambo_plugins.evaluation.embeddings import Embeddings
from rambo_plugins.evaluation.inputs import (
    ArrayLike,
    as_keys,
    check_choice,
    check_ks,
    find_own_rows,
    joint_codes,
)
from rambo_plugins.evaluation.plan import parse_bytes
from rambo_plugins.evaluation.recall import LONE, _report_lone, recall_at_k
from rambo_plugins.evaluation.result import ApproximationCheck, RecallResult, paired_interval, wilson_interval
from rambo_plugins.evaluation.scores import METRICS
from rambo_plugins.evaluation.ties import first_ranks
from rambo_plugins.evaluation.work import WorkFolder, digest

MEMORY = "2G"  # unless max_memory says otherwise
TRAINING = 65536  # rows to train on, or
PER_CENTROID = 64  # times the centroids, if that is more
CHECKPOINT = 600  # seconds of adding after which an index that is filled in memory is written to the folder
SPARE = 8  # neighbours beyond max(ks), so that a tie there is seen to end
_FEWEST = 39  # rows a centroid that faiss asks for

logger = logging.getLogger("rambo_plugins")


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
        folder: keeps the index, as far as it is built, and the exact search of the sample. The same call goes on from
            there, and calls with other queries, labels or parameters, but the same gallery and index, use it again. The
            inverted lists of IVF indexes, except FastScan and refined ones, stay in it and are read as needed: the
            index may be larger than the memory. Building takes twice their size on disk.
        progress: show bars.

    Returns:
        a ``RecallResult`` with ``exact=False`` and a ``check``.

    Raises:
        TypeError, ValueError: as ``recall_at_k``; an index or parameters that faiss does not know or cannot use here;
            a gallery too small to train it; a folder with another index.

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
    for name, value in (("check", check), ("training", 1 if training is None else training)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name}: expected a positive number of rows, got {value!r}")
    max_memory = MEMORY if max_memory is None else max_memory
    memory = parse_bytes(max_memory)

    query_keys = as_keys(query_labels, "query_labels")
    query_rows = Embeddings(query, "query", len(query_keys), normalize)
    if gallery is None:
        if gallery_labels is not None or query_ids is not None or gallery_ids is not None:
            raise ValueError("gallery_labels, query_ids and gallery_ids go with a gallery, but gallery is None")
        gallery_rows, gallery_keys = query_rows, query_keys
        own_rows = np.arange(query_rows.num)
    else:
        if gallery_labels is None:
            raise ValueError("gallery: expected gallery_labels with it, got None")
        gallery_keys = as_keys(gallery_labels, "gallery_labels")
        gallery_rows = Embeddings(gallery, "gallery", len(gallery_keys), normalize)
        own_rows = find_own_rows(query_ids, gallery_ids, query_rows.num, gallery_rows.num)
    if query_rows.dim != gallery_rows.dim:
        raise ValueError(
            f"query and gallery: expected the same D, got shapes {(query_rows.num, query_rows.dim)} and "
            f"{(gallery_rows.num, gallery_rows.dim)}"
        )
    codes, gallery_codes = joint_codes(query_keys, gallery_keys, "query_labels and gallery_labels")
    relevant = np.bincount(gallery_codes, minlength=codes.max() + 1)[codes]
    relevant -= (own_rows >= 0) & (gallery_codes[own_rows] == codes)
    used = _Index(index, parameters, metric, gallery_rows, training, seed, memory, folder, progress)
    _report_lone(np.flatnonzero(relevant == 0), query_rows.num, lone)

    averaged = np.arange(query_rows.num) if lone == "miss" else np.flatnonzero(relevant)
    sample_rng = np.random.default_rng(seed).spawn(1)[0]
    sample = np.sort(sample_rng.choice(averaged, min(check, len(averaged)), replace=False))
    exact, approximate, optimistic = np.full((3, query_rows.num), limit + 1)
    at = sample[relevant[sample] > 0]
    if len(at):
        rows = query_rows.take(at)
        name = f"check-{digest(rows, codes[at], own_rows[at], gallery_codes, np.array([limit, memory]))}"
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
            work=None if folder is None else Path(folder) / name,
            progress=progress,
        )
        exact[at] = np.where(found.first_rank > 0, found.first_rank, limit + 1)
    if relevant.any():
        used.build()
        k = min(limit + SPARE, gallery_rows.num) + 1  # one for the query itself
        batch = max(1, min(4096, memory // 2 // (80 * k + 8 * query_rows.dim)))
        with _bar(progress, "search", query_rows.num, "query") as report:
            for start, rows in query_rows.blocks(batch):
                some = np.flatnonzero(relevant[start : start + len(rows)])
                at = start + some
                scores, neighbours = used.search(rows[some], k)
                approximate[at], optimistic[at] = _ranks(
                    scores, neighbours, own_rows[at], codes[at], gallery_codes, k > gallery_rows.num, limit
                )
                report(len(rows))

    def mean(ranks: np.ndarray, k: int) -> float:
        return float((ranks <= k).mean()) if len(ranks) else math.nan

    recall = {k: mean(approximate[averaged], k) for k in ks}
    return RecallResult(
        recall=recall,
        recall_optimistic={k: mean(optimistic[averaged], k) for k in ks},
        interval={k: wilson_interval(share, len(averaged)) for k, share in recall.items()},
        map_at_r=None,
        r_precision=None,
        first_rank=np.where(approximate <= limit, approximate, 0),
        lone_queries=np.flatnonzero(relevant == 0),
        num_queries=query_rows.num,
        num_sampled=query_rows.num,
        num_averaged=len(averaged),
        num_gallery=gallery_rows.num,
        num_tied=int((approximate != optimistic).sum()),
        ks=ks,
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


class _Index:
    """A faiss index of the gallery: made and checked at once, filled by ``build``.

    In a folder: ``trained.index``; then ``shard-{n}.index``, rows up to n of an IVF index, which ``build`` merges; or
    ``filled.index`` with the first rows, written again and again. At the end only ``filled.index`` is left, and the
    file of inverted lists that it refers to.
    """

    def __init__(
        self, factory: str, parameters: str, metric: str, gallery: Embeddings, training: int | None, seed: int,
        memory: int, folder: str | Path | None, progress: bool,
    ) -> None:  # fmt: skip
        if not isinstance(factory, str) or not isinstance(parameters, str):
            raise TypeError(f"index, parameters: expected strings, got {factory!r}, {parameters!r}")
        self.factory, self.parameters, self.metric, self.gallery = factory, parameters, metric, gallery
        self.seed, self.memory, self.progress = seed, memory, progress
        self.block = max(64, min(65536, memory // 8 // (4 * gallery.dim)))
        with self._errors("make"):
            kind = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
            self.index = faiss.index_factory(gallery.dim, factory, kind)
        if isinstance(self.index, faiss.IndexIDMap | faiss.IndexIDMap2 | faiss.IndexNSG):
            raise ValueError(f"index: expected one that takes rows block by block, in their order, got {factory!r}")
        self._set_parameters()
        self.num_training = 0 if self.index.is_trained else self._training_size(training)
        self.folder = None if folder is None else Path(folder).resolve()
        if self.folder is not None:
            rows = gallery.take(np.unique(np.linspace(0, gallery.num - 1, 64).astype(np.int64)))
            problem = {
                "index": factory,
                "metric": metric,
                "gallery": [gallery.num, gallery.dim, digest(rows)],
                "training rows": training,
                "seed": seed,
            }
            WorkFolder(self.folder, problem)
            # named for its contents, so that a copied index never reads the lists of another one
            self.lists = self.folder / f"lists-{digest(np.array(str(problem)))}.ivf"

    def build(self) -> None:
        """Trains and fills the index, or reads it."""
        if self.folder is None:
            self._train()
            self._add()
        else:
            filled, trained = self.folder / "filled.index", self.folder / "trained.index"
            if not filled.exists():
                if trained.exists():
                    self.index = _read(trained)
                else:
                    self._train()
                    _write(self.index, trained)
                if _has_plain_lists(self.index):
                    self._fill_shards()
                    self._merge(filled)
            if filled.exists():
                self.index = _read(filled)
            if self.index.ntotal < self.gallery.num:
                self._add(filled)
                _write(self.index, filled)
            for path in [trained, *self.folder.glob("shard-*")]:
                path.unlink(missing_ok=True)
        self._set_parameters()

    def search(self, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores, best first, higher is better, and gallery rows, −1 where there are no more: (B, k) each."""
        with self._errors("search"):
            scores, found = self.index.search(rows, k)
        return -scores if self.metric == "l2" else scores, found

    def _set_parameters(self) -> None:
        if not self.parameters:
            return
        wrong = [
            part
            for part in self.parameters.split(",")
            if not re.fullmatch(r"\s*\w+=\d+(\.\d*)?\s*", part) or float(part.split("=")[1]) <= 0
        ]
        if wrong:
            raise ValueError(
                "parameters: expected positive numbers as 'nprobe=16' or 'nprobe=16,quantizer_efSearch=64', "
                f"got {wrong[0]!r}"
            )
        space: Any = faiss.ParameterSpace()
        try:
            space.set_index_parameters(self.index, self.parameters)
        except RuntimeError as error:
            raise ValueError(
                f"parameters: {self.factory!r} does not take {self.parameters!r}: {_said(error)}"
            ) from error

    def _training_size(self, asked: int | None) -> int:
        ivf = faiss.try_extract_index_ivf(self.index)
        centroids = 0 if ivf is None else ivf.nlist
        if ivf is not None and isinstance(faiss.downcast_index(ivf.quantizer), faiss.MultiIndexQuantizer):
            centroids = 0  # products of few
        wanted = min(asked or max(TRAINING, PER_CENTROID * centroids), self.gallery.num)
        fits = self.memory // (2 * 4 * self.gallery.dim)  # faiss may copy them
        if wanted < centroids:
            raise ValueError(
                f"index: {self.factory!r} has {centroids:,} centroids, which need as many rows to train on, better "
                f"{PER_CENTROID} times as many, got {wanted:,} of a gallery of {self.gallery.num:,}"
            )
        if fits < centroids:
            raise ValueError(
                f"max_memory: {self.memory:,} bytes hold {fits:,} rows to train on, but {self.factory!r} needs "
                f"{centroids:,}"
            )
        if fits < wanted:
            logger.warning(
                "training %s on %d rows, as max_memory allows, instead of %d; faiss asks for %d a centroid",
                self.factory, fits, wanted, _FEWEST,
            )  # fmt: skip
        return min(wanted, fits)

    def _train(self) -> None:
        if self.index.is_trained:
            return
        rng = np.random.default_rng(self.seed)
        rows = self.gallery.take(np.sort(rng.choice(self.gallery.num, self.num_training, replace=False)))
        with _bar(self.progress, "train", len(rows), "row") as report, self._errors("train"):
            self.index.train(rows)
            report(len(rows))

    def _add(self, filled: Path | None = None) -> None:
        """The rows that the index lacks; now and then it is written to ``filled``."""
        written = time.monotonic()
        for _, rows in self._missing(self.index.ntotal):
            with self._errors("add to"):
                self.index.add(rows)
            if filled is not None and time.monotonic() - written > CHECKPOINT:
                _write(self.index, filled)
                written = time.monotonic()

    def _fill_shards(self) -> None:
        """The rows that the shards lack, in more of them, each of a quarter of the memory: lists grow by doubling."""
        assert self.folder is not None
        done = max((int(path.stem.split("-")[1]) for path in self.folder.glob("shard-*.index")), default=0)
        most = self.memory // 4 // (faiss.extract_index_ivf(self.index).code_size + 8)
        for start, rows in self._missing(done):
            stop = start + len(rows)
            with self._errors("add to"):
                self.index.add_with_ids(rows, np.arange(start, stop))
            if self.index.ntotal >= most or stop == self.gallery.num:
                _write(self.index, self.folder / f"shard-{stop:012d}.index")
                self.index.reset()

    def _merge(self, filled: Path) -> None:
        """The inverted lists of the shards in one file each of whose lists is in one piece."""
        assert self.folder is not None
        merge_ondisk(self.index, [str(path) for path in sorted(self.folder.glob("shard-*.index"))], str(self.lists))
        _write(self.index, filled)

    def _missing(self, done: int) -> Iterator[tuple[int, np.ndarray]]:
        """The gallery but for the first ``done`` rows, in blocks."""
        if done == self.gallery.num:
            return
        with _bar(self.progress, "add", self.gallery.num, "row") as report:
            for start, rows in self.gallery.blocks(self.block):
                if start + len(rows) > done:
                    skipped = max(0, done - start)
                    yield start + skipped, rows[skipped:]
                report(len(rows))

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ValueError(f"index: faiss cannot {doing} {self.factory!r}: {_said(error)}") from error


def _has_plain_lists(index: Any) -> bool:
    """Whether it is an IVF index whose lists can be merged on disk, and holds nothing beside them."""
    while isinstance(index, faiss.IndexPreTransform):
        index = faiss.downcast_index(index.index)
    if not isinstance(index, faiss.IndexIVF) or isinstance(index, faiss.IndexIVFPQR):
        return False
    return isinstance(_lists(index), faiss.ArrayInvertedLists) and hasattr(faiss, "OnDiskInvertedLists")  # not Windows


def _lists(ivf: Any) -> Any:
    return faiss.downcast_InvertedLists(ivf.invlists)


def _read(path: Path) -> Any:
    try:
        try:
            index = faiss.read_index(str(path), faiss.IO_FLAG_READ_ONLY)
        except RuntimeError:  # the folder was moved
            index = faiss.read_index(str(path), faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR)
    except RuntimeError as error:
        raise ValueError(f"{path}: faiss cannot read it: {_said(error)}; remove the folder") from error
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None and isinstance(_lists(ivf), getattr(faiss, "OnDiskInvertedLists", ())):
        _lists(ivf).prefetch_nthread = faiss.omp_get_max_threads()
    return index


def _write(index: Any, path: Path) -> None:
    unfinished = path.with_suffix(".unfinished")
    faiss.write_index(index, str(unfinished))
    os.replace(unfinished, path)


def _said(error: RuntimeError) -> str:
    """faiss's message without the place in its source."""
    return re.sub(r"^Error in .*? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL)


@contextlib.contextmanager
def _bar(show: bool, what: str, total: int, unit: str) -> Iterator[Callable[[int], object]]:
    if not show:
        yield lambda done: None
        return
    try:
        from tqdm import tqdm
    except ModuleNotFoundError as error:
        raise ImportError("progress=True needs tqdm: pip install tqdm") from error
    with tqdm(total=total, desc=what, unit=unit, unit_scale=True) as bar:
        yield bar.update
