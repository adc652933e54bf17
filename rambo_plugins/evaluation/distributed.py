"""Recall@K that gathers rows batch by batch, on one process or on several, each of which keeps the rows it encoded.

Labels and ids of all rows are known to every rank; embeddings stay where they are. Each rank in turn sends its queries
around in blocks, and all match them with their own part of the gallery: the best relevant score of a query is the
maximum over the ranks, the number of irrelevant items above it the sum. So the figures are those of ``recall_at_k`` on
one process with all rows, exactly. Before every exchange the ranks tell each other whether they failed.
"""

from __future__ import annotations

import json
import logging
import time
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rambo_plugins.evaluation.counting import Queries, best_relevant, count_above
from rambo_plugins.evaluation.embeddings import as_embeddings
from rambo_plugins.evaluation.group import Group
from rambo_plugins.evaluation.inputs import ArrayLike, as_keys, check_choice, check_ks
from rambo_plugins.evaluation.plan import PART, Plan, parse_bytes
from rambo_plugins.evaluation.result import RecallResult
from rambo_plugins.evaluation.scores import METRICS

SPLITS = ("both", "query", "gallery")
LONE = ("exclude", "miss")
_BYTES_PER_ROW = 96  # of all ranks, on every rank, beside labels and ids

logger = logging.getLogger("rambo_plugins")


class RecallMetric:
    """Recall@K of ``recall_at_k``, gathered by ``update``, computed by ``compute``, emptied by ``reset``.

    Recall@K = mean over queries of [rank ≤ K], rank = 1 + #{irrelevant items, s ≥ s*}, with s* the score of the nearest
    relevant item (Jégou et al., TPAMI 2011, as used by Oh Song et al., CVPR 2016): exact at every K, ties broken
    against the relevant item. MAP@R is not computed here. With torch.distributed every rank updates a metric with the
    rows that it encoded, and all call ``compute`` together. The interface is that of torchmetrics, without ``forward``;
    what was gathered stays until ``reset``.

    An id stands for one item, whatever split it is in. Rows that repeat an id, as a DistributedSampler appends to give
    all ranks equally many, are dropped: of queries, and of the gallery, the first in the order of the ranks, then of
    the updates, stays. A query is never its own neighbour: the gallery item of its id is left out. So ids of separate
    query and gallery sets must differ, unless they mean the same item.

    A rank that fails in ``compute`` ends all of them with an error that names it. Where a process ends, those that
    exchange with it fail, with gloo at once, and the rest as soon as these end. How long they wait for one that stands
    still, or does not call ``compute``, is the timeout of the group: with gloo 30 minutes, unless it was made with
    another, and nccl's watchdog ends the process. For another time, beside either of them, pass
    ``group=dist.new_group(backend="gloo", timeout=timedelta(minutes=5))``; it must be enough for the slowest rank to
    reach ``compute``. A group that lost a process is of no more use.

    Args:
        ks: the cutoffs K, positive integers. One beyond the gallery is a search of all of it.
        metric: "inner_product" or "l2".
        normalize: bring all embeddings to length 1 first, so that the inner product is the cosine.
        lone: queries without a relevant item in the gallery: "exclude" them, or count each as a "miss". They are
            reported, and logged by the first rank, either way.
        max_memory: bytes, or "800M", "4G": what ``compute`` takes on each rank beyond the rows that it has, 512 MiB by
            default; the smallest of all ranks holds. The labels and ids of all ranks' rows must fit, and the rest
            decides the sizes of the blocks that are exchanged.
        device: where products are computed; the current CUDA device if there is one, else the CPU.
        group: the process group that computes together; the default group, if there is one.

    Raises:
        TypeError, ValueError: arguments out of range.

    >>> import numpy as np
    >>> metric = RecallMetric(ks=(1, 2), normalize=True)
    >>> metric.update(np.array([[1.0, 0.0], [0.9, 0.1]]), ["cat", "cat"], ids=["a.jpg", "b.jpg"])
    >>> metric.update(np.array([[0.1, 0.9], [0.8, 0.2]]), ["dog", "dog"], ids=["c.jpg", "d.jpg"])
    >>> metric.compute().recall
    {1: 0.75, 2: 0.75}
    """

    def __init__(
        self,
        ks: Iterable[int] = (1, 10, 100, 1000),
        *,
        metric: str = "inner_product",
        normalize: bool = False,
        lone: str = "exclude",
        max_memory: int | str | None = None,
        device: str | torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.ks = check_ks(ks)
        check_choice(metric, "metric", METRICS)
        check_choice(lone, "lone", LONE)
        self.metric, self.normalize, self.lone = metric, normalize, lone
        self.max_memory = parse_bytes(max_memory)
        try:
            self.device = None if device is None else torch.device(device)
        except RuntimeError as error:
            raise ValueError(f"device: expected 'cpu', 'cuda', 'cuda:1' and so on, got {device!r}") from error
        self.group = group
        self.reset()

    def reset(self) -> None:
        """Forgets all rows of this rank."""
        self._rows: list[np.ndarray] = []  # (n, D) float32 of each update
        self._labels: list[np.ndarray] = []  # (n,) int64, or UTF-8
        self._ids: list[np.ndarray] = []  # likewise; empty if no ids are given
        self._splits: list[np.ndarray] = []  # (n,) uint8, the number in SPLITS
        self._starts = [0]  # the first row of each update, and the number of all

    def update(
        self, embeddings: ArrayLike, labels: ArrayLike, ids: ArrayLike | None = None, *, split: str = "both"
    ) -> None:
        """Adds a batch to the rows of this rank. They are copied to the CPU as float32.

        Args:
            embeddings: (n, D), any real dtype and device. A batch without rows changes nothing.
            labels: (n,) integers of any size, or strings.
            ids: (n,) integers or strings. They may be left out of all updates on a single process: then every row is an
                item of its own.
            split: "both" for queries that search among themselves, as in SOP and CUB; "query" or "gallery" for separate
                sets, as in In-shop. Rows of "gallery" beside those of "both" are distractors.

        Raises:
            TypeError: a dtype that is none of the above, also labels or ids of another kind than before.
            ValueError: shapes that do not fit, another D than before, NaN or inf, missing ids. Nothing is added then.
        """
        check_choice(split, "split", SPLITS)
        if len(embeddings) == len(labels) == 0:
            return
        rows = as_embeddings(embeddings, "embeddings", self.normalize)
        if self._rows and rows.shape[1] != self._rows[0].shape[1]:
            raise ValueError(
                f"embeddings: expected {self._rows[0].shape[1]} dimensions as before, got shape {rows.shape}"
            )
        label_keys = _packed(as_keys(labels, "labels", len(rows)), "labels", self._labels)
        id_keys = None
        if ids is None:
            num = len(Group(self.group).ranks)
            if num > 1:
                raise ValueError(_ids_missing(num))
            if self._ids:
                raise ValueError("ids: expected in every update or in none, got None after updates with ids")
        else:
            id_keys = _packed(as_keys(ids, "ids", len(rows)), "ids", self._ids)
            if self._rows and not self._ids:
                raise ValueError("ids: expected in every update or in none, got some after updates without")
        kept = rows if self.normalize else rows.copy()  # the caller may write to its batch again
        splits = np.full(len(rows), SPLITS.index(split), np.uint8)
        self._rows.append(kept)  # from here on nothing fails
        self._labels.append(label_keys)
        if id_keys is not None:
            self._ids.append(id_keys)
        self._splits.append(splits)
        self._starts.append(self._starts[-1] + len(rows))

    def compute(self) -> RecallResult:
        """The figures of all rows on all ranks. Every rank of the group must call this, and gets the same result.

        ``first_rank``, and the numbers in ``lone_queries``, are in ascending order of the queries' ids, each once;
        without ids in the order of the updates. ``seconds`` are those of the slowest rank.

        Raises:
            ValueError: on all ranks: no queries or no gallery; options, D, or kinds of labels or ids that differ
                between ranks; missing ids; an id with two labels; ``max_memory`` too small.
            RuntimeError: on all ranks: one of several ranks failed, or a process of the group was lost.
        """
        started = time.perf_counter()
        group = Group(self.group)
        device = self.device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        texts = group.gather_texts(json.dumps(self._described(device)))
        headers = {rank: json.loads(text) for rank, text in zip(group.ranks, texts, strict=True)}
        _check_headers(headers)
        dim = next(header["dim"] for header in headers.values() if header["rows"])
        plan = _plan(headers, dim)
        table = self._table(group, headers)
        if group.rank == 0:
            _report_lone(table, self.lone)

        limit = self.ks[-1]
        ranks = np.full((2, len(table.queries)), limit + 1)
        searched = np.flatnonzero(table.num_relevant)
        searched = searched[np.argsort(table.queries[searched])]  # as the rows lie on the ranks
        bounds = np.searchsorted(table.queries[searched], table.starts)
        for source in range(len(group.ranks)):
            for start in range(bounds[source], bounds[source + 1], plan.queries):
                part = searched[start : min(start + plan.queries, bounds[source + 1])]
                counts = self._count(group, source, table, part, dim, plan, device)
                ranks[:, part] = np.minimum(1 + counts, limit + 1)
        seconds = group.reduce(np.array([time.perf_counter() - started]), "MAX")
        devices = ", ".join(sorted({header["device"] for header in headers.values()}))
        backend = f"counting, {devices}" + (f", {len(group.ranks)} processes" if len(group.ranks) > 1 else "")
        return self._result(table, ranks, backend, float(seconds[0]))

    def _described(self, device: torch.device) -> dict[str, Any]:
        """What the other ranks must know, or must have too."""
        return {
            "ks": self.ks,
            "metric": self.metric,
            "normalize": self.normalize,
            "lone": self.lone,
            "memory": self.max_memory,
            "device": str(device),
            "rows": self._starts[-1],
            "dim": self._rows[0].shape[1] if self._rows else None,
            "labels": _widest(batch.dtype for batch in self._labels),
            "ids": _widest(batch.dtype for batch in self._ids),
        }

    def _table(self, group: Group, headers: Mapping[int, dict[str, Any]]) -> _Table:
        """The labels, ids and splits of all ranks' rows, brought together on every rank."""

        def all_of(batches: list[np.ndarray], dtype: str) -> np.ndarray:
            own = group.together(lambda: np.concatenate([np.empty(0, dtype), *batches], dtype=dtype))
            return np.concatenate(group.gather(own))

        labels, ids = (_widest(np.dtype(h[name]) for h in headers.values() if h[name]) for name in ("labels", "ids"))
        starts = np.cumsum([0] + [header["rows"] for header in headers.values()])
        all_labels = all_of(self._labels, str(labels))
        all_ids = all_of(self._ids, ids) if ids else np.arange(starts[-1])
        all_splits = all_of(self._splits, "u1")
        return group.together(lambda: _make_table(all_labels, all_ids, all_splits, starts, list(headers)))

    def _count(
        self, group: Group, source: int, table: _Table, part: np.ndarray, dim: int, plan: Plan, device: torch.device
    ) -> np.ndarray:
        """The counts of these queries, whose embeddings ``source`` has, over the gallery of all ranks."""
        first, last = table.starts[group.rank : group.rank + 2]
        items = table.gallery[slice(*np.searchsorted(table.gallery, (first, last)))]  # those of this rank

        def blocks() -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
            for start in range(0, len(items), plan.block):
                block = items[start : start + plan.block]
                yield start, self._take(block - first), table.codes[block]

        def sent() -> np.ndarray:
            if group.rank == source:
                return self._take(table.queries[part] - first)
            return np.empty((len(part), dim), np.float32)

        rows = group.broadcast(group.together(sent), source)
        queries = Queries(rows, table.codes[table.queries[part]], _places(items, table.own[part]))
        best = group.together(lambda: best_relevant(queries, blocks(), self.metric, device))
        best = _largest(group, best)
        counts = group.together(lambda: count_above(queries, best, blocks(), self.metric, [device], plan.step))
        return group.reduce(counts, "SUM")

    def _take(self, rows: np.ndarray) -> np.ndarray:
        """The embeddings of these rows of this rank, counted over the updates, ascending: (n, D) float32."""
        taken = np.empty((len(rows), self._rows[0].shape[1]), np.float32)
        starts = self._starts
        for batch in range(bisect_right(starts, rows[0]) - 1, bisect_left(starts, rows[-1] + 1)):
            at = slice(*np.searchsorted(rows, starts[batch : batch + 2]))
            taken[at] = self._rows[batch][rows[at] - starts[batch]]
        return taken

    def _result(self, table: _Table, ranks: np.ndarray, backend: str, seconds: float) -> RecallResult:
        pessimistic, optimistic = ranks
        lone_queries = np.flatnonzero(table.num_relevant == 0)
        averaged = len(table.queries) - (len(lone_queries) if self.lone == "exclude" else 0)

        return RecallResult.of_ranks(
            pessimistic,
            optimistic,
            self.ks,
            averaged,
            lone_queries=lone_queries,
            num_gallery=len(table.gallery),
            backend=backend,
            seconds=seconds,
        )


@dataclass(frozen=True)
class _Table:
    """All rows of all ranks but for their embeddings; a row's number counts through the ranks, then the updates."""

    starts: np.ndarray  # (ranks + 1,) the first row of each rank
    codes: np.ndarray  # (rows,) int64, equal for equal labels
    queries: np.ndarray  # (Q,) rows of the queries, in the order of their ids
    gallery: np.ndarray  # (N,) rows of the gallery, ascending
    own: np.ndarray  # (Q,) the row of the gallery that is the query itself, −1 where there is none
    num_relevant: np.ndarray  # (Q,) how many relevant items the gallery has for each query


def _make_table(
    labels: np.ndarray, ids: np.ndarray, splits: np.ndarray, starts: np.ndarray, ranks: list[int]
) -> _Table:
    codes = np.unique(labels, return_inverse=True)[1]
    _, first, id_codes = np.unique(ids, return_index=True, return_inverse=True)
    wrong = np.flatnonzero(codes != codes[first[id_codes]])
    if len(wrong):
        a, b = first[id_codes[wrong[0]]], wrong[0]
        on = [ranks[number] for number in np.searchsorted(starts, (a, b), "right") - 1]
        raise ValueError(
            f"ids: expected one label for each id, got {_shown(ids[a])} with label {_shown(labels[a])} on rank {on[0]} "
            f"and with label {_shown(labels[b])} on rank {on[1]}; an id stands for one item, in whatever split"
        )

    def rows_of(other: str) -> np.ndarray:
        """The rows that do not belong to the other split only, the first of each id, in the order of the ids."""
        rows = np.flatnonzero(splits != SPLITS.index(other))
        return rows[np.unique(id_codes[rows], return_index=True)[1]]

    queries, gallery = rows_of("gallery"), rows_of("query")
    if not len(queries) or not len(gallery):
        missing = "gallery" if len(queries) else "query"
        raise ValueError(f"split: expected rows of 'both' or {missing!r} on some rank, got none")
    row_of = np.full(len(first), -1)
    row_of[id_codes[gallery]] = gallery
    own = row_of[id_codes[queries]]
    num_relevant = np.bincount(codes[gallery], minlength=len(codes))[codes[queries]] - (own >= 0)
    return _Table(starts, codes, queries, np.sort(gallery), own, num_relevant)


def _check_headers(headers: Mapping[int, dict[str, Any]]) -> None:
    """Raises if the ranks do not fit together; ``headers``: of each rank."""
    filled = {rank: header for rank, header in headers.items() if header["rows"]}
    if not filled:
        raise ValueError("no rows: expected update to be called before compute")
    if len(headers) > 1 and not all(header["ids"] for header in filled.values()):
        raise ValueError(_ids_missing(len(headers)))
    for name in ("ks", "metric", "normalize", "lone"):
        _check_same(name, {rank: header[name] for rank, header in headers.items()})
    _check_same("dimensions of the embeddings", {rank: header["dim"] for rank, header in filled.items()})
    kinds = {"i": "integers", "S": "strings"}
    for name in ("labels", "ids"):
        _check_same(name, {rank: h[name] and kinds[np.dtype(h[name]).kind] for rank, h in filled.items()})


def _check_same(name: str, values: Mapping[int, Any]) -> None:
    (first, expected), *others = values.items()
    for rank, value in others:
        if value != expected:
            raise ValueError(
                f"{name}: expected the same on all ranks, got {expected!r} on rank {first} and {value!r} on rank {rank}"
            )


def _plan(headers: Mapping[int, dict[str, Any]], dim: int) -> Plan:
    """Sizes for the smallest memory of a rank: half for two matrices of step × block and pairs, half for queries."""
    memory = min(header["memory"] for header in headers.values())
    total = sum(header["rows"] for header in headers.values())
    keys = sum(
        max(np.dtype(header[name]).itemsize if header[name] else 0 for header in headers.values())
        for name in ("labels", "ids")
    )
    known = (_BYTES_PER_ROW + 3 * keys) * total  # sorting takes copies
    left = memory - known
    row = 4 * dim
    size = 4096
    while size > 64 and _block_bytes(size, row) > left // 2:
        size //= 2
    per_query = 3 * row + 64
    needed = known + 2 * max(_block_bytes(64, row), per_query)
    if memory < needed:
        raise ValueError(
            f"max_memory: {memory:,} bytes are too little for the labels and ids of {total:,} rows and blocks of "
            f"embeddings of dimension {dim}; {needed:,} are needed"
        )
    largest = max(header["rows"] for header in headers.values())
    queries = min(left // 2 // per_query, max(1024, PART // (2 * largest * dim)))
    return Plan(int(queries), size, size)


def _block_bytes(size: int, row: int) -> int:
    return 8 * size**2 + 8 * size * row + 10 * min(size, 8192) * row


def _packed(keys: np.ndarray, name: str, before: list[np.ndarray]) -> np.ndarray:
    """Strings as UTF-8, which has the same order and is a quarter of the size; ``before``: those of other updates."""
    if keys.dtype.kind == "U":
        keys = np.char.encode(keys, "utf-8", "surrogatepass")
    if before and before[0].dtype.kind != keys.dtype.kind:
        expected, got = ("integers", "strings") if keys.dtype.kind == "S" else ("strings", "integers")
        raise TypeError(f"{name}: expected {expected} as before, got {got}")
    return keys


def _shown(key: Any) -> str:
    return repr(key.decode("utf-8", "surrogatepass") if isinstance(key, bytes) else int(key))


def _widest(dtypes: Iterable[np.dtype]) -> str | None:
    widest = max(dtypes, key=lambda dtype: dtype.itemsize, default=None)
    return None if widest is None else widest.str


def _ids_missing(num: int) -> str:
    return (
        f"ids: expected with {num} processes, got None; a DistributedSampler repeats samples so that all ranks have "
        "equally many, and only ids, such as the index in the data set, tell these copies from items of their own"
    )


def _largest(group: Group, scores: np.ndarray) -> np.ndarray:
    """The largest of all ranks' exact scores (n, W), row by row; W may differ between ranks."""
    width = int(group.reduce(np.array([scores.shape[1]]), "MAX")[0])
    largest = np.pad(scores, ((0, 0), (0, width - scores.shape[1])))
    leads = np.ones(len(scores), bool)  # whose columns so far are those of the largest
    for column in range(width):
        top = group.reduce(np.where(leads, largest[:, column], -np.inf), "MAX")
        leads &= largest[:, column] == top
        largest[:, column] = top
    return largest


def _places(items: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Where in ``items``, ascending, each of ``rows`` is; −1 where it is not."""
    at = np.searchsorted(items, rows)
    return np.where(np.searchsorted(items, rows, "right") > at, at, -1)


def _report_lone(table: _Table, lone: str) -> None:
    num, num_lone = len(table.queries), int((table.num_relevant == 0).sum())
    if num_lone:
        logger.warning(
            "%d of %d queries have no relevant item in the gallery and are %s",
            num_lone,
            num,
            "left out of the mean" if lone == "exclude" else "counted as misses",
        )
    if num_lone == num and lone == "exclude":
        logger.warning("no query is left to average over: the figures are nan")
