"""``RecallMetric`` on one process, and on two and four that each have a part of the rows, against the definition."""

import copy
import logging
import math
import multiprocessing
import os
import pickle
import signal
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from rambo_plugins.evaluation import distributed, recall_at_k
from rambo_plugins.evaluation.distributed import RecallMetric

WAIT = 120  # seconds, for processes that should have ended long before


# The problems: rows in some order, with an id each.


def problem(seed, num, dim, integers=True, num_labels=None, splits=("both",), **options):
    rng = np.random.default_rng(seed)
    rows = rng.integers(-2, 3, (num, dim)) if integers else rng.standard_normal((num, dim))
    labels = np.minimum(rng.geometric(0.15, num), num_labels or num)  # the last ones are lone
    return {
        "rows": rows.astype(np.float32), "labels": labels, "ids": rng.permutation(num) * 7 - 3 * num,
        "splits": rng.choice(splits, num), "options": options,
    }  # fmt: skip


def problems():
    found = {
        "queries among themselves": problem(0, 60, 3, ks=(1, 2, 5)),
        "squared distances, counted misses": problem(1, 50, 2, ks=(1, 3, 200), metric="l2", lone="miss"),
        "cosines of large and small": problem(2, 70, 6, integers=False, ks=(1, 4), normalize=True),
        "queries and gallery": problem(3, 80, 3, ks=(1, 10), splits=("query", "gallery")),
        "distractors": problem(4, 80, 3, ks=(1, 10), splits=("both", "gallery")),
        "no relevant item at all": problem(5, 9, 3, ks=(1, 2)),
        "many blocks": problem(6, 1500, 8, integers=False, ks=(1, 10, 100), max_memory="400K"),
        "many blocks of ties": problem(7, 1200, 2, ks=(1, 10, 1000), metric="l2", max_memory="400K"),
    }
    texts = found["squared distances, counted misses"]
    texts["labels"] = np.array(["é", "zebra", "ab", "abc", "Ω"], dtype="U40")[texts["labels"] % 5]
    texts["labels"][0] = "lone"
    texts["ids"] = np.array([f"{'ü' * (number % 3)}/{number}.jpg" for number in texts["ids"]], dtype="U40")
    texts["labels"][1], texts["ids"][7] = "zebra crossing", texts["ids"][6] + ", the whole name"
    cosines = found["cosines of large and small"]
    cosines["rows"][:35] = cosines["rows"][35:] * np.exp2(np.arange(35) % 5)[:, None].astype(np.float32)
    cosines["labels"] = 2**62 + cosines["labels"]  # all the same as floats
    cosines["ids"] = 2**62 + cosines["ids"]
    separate = found["queries and gallery"]
    repeated = np.flatnonzero(separate["splits"] == "query")[:12]  # of these, the gallery has the item too
    for name in ("rows", "labels", "ids"):
        separate[name] = np.concatenate([separate[name], separate[name][repeated]])
    separate["splits"] = np.concatenate([separate["splits"], np.full(12, "gallery")])
    found["no relevant item at all"]["labels"] = np.arange(9)
    blocks = found["many blocks"]
    blocks["rows"][::3] = blocks["rows"][1::3]  # ties of identical items, on different ranks
    return found


PROBLEMS = problems()


def definition(rows, labels, ids, splits, options):
    """Recall@K in a loop over the queries, in the order of their ids."""
    ks, lone = sorted(options["ks"]), options.get("lone", "exclude")
    x = rows.astype(np.float64)
    if options.get("normalize"):
        x = x / np.sqrt((x**2).sum(axis=1, keepdims=True))
    ranks, optimistic, lone_queries = [], [], []
    gallery = [g for g in range(len(x)) if splits[g] != "query"]
    queries = sorted((q for q in range(len(x)) if splits[q] != "gallery"), key=lambda q: ids[q])
    for number, q in enumerate(queries):
        others = [g for g in gallery if ids[g] != ids[q]]
        if options.get("metric") == "l2":
            score = -((x[others] - x[q]) ** 2).sum(axis=1)
        else:
            score = (x[others] * x[q]).sum(axis=1)
            if options.get("normalize"):
                score = score.round(9)  # scaled copies of a row are one direction
        relevant = labels[others] == labels[q]
        if not relevant.any():
            lone_queries.append(number)
            ranks.append(math.inf)
            optimistic.append(math.inf)
            continue
        best = score[relevant].max()
        ranks.append(1 + int((score[~relevant] >= best).sum()))
        optimistic.append(1 + int((score[~relevant] > best).sum()))
    averaged = len(queries) - (len(lone_queries) if lone == "exclude" else 0)

    def share(found, k):
        return sum(rank <= k for rank in found) / averaged if averaged else math.nan

    first = [rank if rank <= ks[-1] else 0 for rank in ranks]
    return {
        "recall": {str(k): share(ranks, k) for k in ks},
        "recall_optimistic": {str(k): share(optimistic, k) for k in ks},
        "first_rank": first,
        "lone_queries": lone_queries,
        "num_queries": len(queries),
        "num_averaged": averaged,
        "num_gallery": len(gallery),
        "num_tied": sum(a != (b if b <= ks[-1] else 0) for a, b in zip(first, optimistic, strict=True) if b < math.inf),
    }


def by_recall_at_k(rows, labels, ids, splits, options):
    """The same rows, in the order of their ids, by the function."""
    order = np.argsort(ids, kind="stable")
    query, gallery = order[splits[order] != "gallery"], order[splits[order] != "query"]
    return recall_at_k(
        rows[query], labels[query], rows[gallery], labels[gallery], query_ids=ids[query], gallery_ids=ids[gallery],
        **options,
    )  # fmt: skip


def outcome(result):
    return {
        **result.to_dict(), "first_rank": result.first_rank.tolist(), "lone_queries": result.lone_queries.tolist(),
    }  # fmt: skip


def check(found, name):
    expected = definition(**PROBLEMS[name])
    for key, value in expected.items():
        if key.startswith("recall"):
            numbers = [math.nan if figure is None else figure for figure in found[key].values()]
            assert numbers == pytest.approx(list(value.values()), nan_ok=True), key
        else:
            assert found[key] == value, key
    of_function = outcome(by_recall_at_k(**PROBLEMS[name]))
    told_apart = {"seconds", "backend"}
    assert {key: found[key] for key in found.keys() - told_apart} == {
        key: of_function[key] for key in of_function.keys() - told_apart
    }


def fed(rank, world, rows, labels, ids, splits, options, **more):
    """A metric with the part of ``rank``: of very unequal size, in batches, with copies of rows that came before.

    The last of four ranks has none. The copies have other embeddings, so that it shows which of them counts.
    """
    metric = RecallMetric(**options, **more)
    rng = np.random.default_rng(len(ids))
    filled = 3 if world == 4 else world
    owner = np.minimum(rng.geometric(0.5, len(ids)) - 1, filled - 1)
    copies = rng.choice(len(ids), len(ids) // 4, replace=False)
    at = rng.integers(owner[copies], filled)
    mine = np.flatnonzero(owner == rank)
    repeated = copies[at == rank]
    x = np.concatenate([rows[mine], rows[repeated] * -3 + 1])
    which = np.concatenate([mine, repeated])
    for split in ("gallery", "both", "query"):
        for start in range(0, len(which), 23):
            batch = np.arange(start, min(start + 23, len(which)))
            batch = batch[splits[which[batch]] == split]
            metric.update(x[batch], labels[which[batch]], ids[which[batch]], split=split)
    return metric


# One process.


@pytest.mark.parametrize("name", PROBLEMS)
def test_one_process_equals_the_definition(name):
    check(outcome(fed(0, 1, **PROBLEMS[name]).compute()), name)


@pytest.mark.parametrize("metric", ["inner_product", "l2"])
@pytest.mark.parametrize("lone", ["exclude", "miss"])
def test_many_small_problems_equal_the_definition(metric, lone):
    for seed in range(25):
        case = problem(seed, 1 + seed, 2, ks=(1, 3), metric=metric, lone=lone, splits=("both", "query", "gallery"))
        case["splits"][0] = "both"
        found, expected = outcome(fed(0, 1, **case).compute()), definition(**case)
        assert {key: found[key] for key in ("first_rank", "lone_queries", "num_tied", "num_averaged")} == {
            key: expected[key] for key in ("first_rank", "lone_queries", "num_tied", "num_averaged")
        }, seed


def test_without_ids_each_row_is_an_item_and_ranks_come_in_the_order_of_the_updates():
    case = PROBLEMS["queries among themselves"]
    metric = RecallMetric(ks=(1, 2, 5))
    for start in range(0, 60, 17):
        metric.update(case["rows"][start : start + 17], case["labels"][start : start + 17])
    expected = definition(case["rows"], case["labels"], np.arange(60), case["splits"], case["options"])
    assert metric.compute().first_rank.tolist() == expected["first_rank"]


def test_without_ids_nothing_of_a_separate_gallery_is_left_out():
    metric = RecallMetric(ks=(1,))
    metric.update(np.eye(3), [0, 1, 2], split="query")
    metric.update(np.eye(3), [0, 1, 2], split="gallery")
    assert metric.compute().recall == {1: 1.0}


def test_compute_keeps_the_rows_and_reset_forgets_them():
    case = PROBLEMS["queries among themselves"]
    metric = RecallMetric(ks=(1, 2, 5))
    half = slice(0, 30)
    metric.update(case["rows"][half], case["labels"][half], case["ids"][half])
    assert metric.compute().num_queries == 30
    metric.update(case["rows"][30:], case["labels"][30:], case["ids"][30:])
    again = pickle.loads(pickle.dumps(copy.deepcopy(metric)))
    for _ in range(2):
        check(outcome(metric.compute()), "queries among themselves")
    check(outcome(again.compute()), "queries among themselves")
    metric.reset()
    with pytest.raises(ValueError, match="no rows: expected update to be called before compute"):
        metric.compute()
    metric.update(np.eye(2, 5), ["a", "a"])  # another D, other kinds of labels
    assert metric.compute().num_queries == 2


def test_batches_are_copied_and_may_be_half_precision_tensors_that_require_grad():
    metric = RecallMetric(ks=(1,))
    buffer = torch.eye(2, dtype=torch.float32)
    metric.update(buffer, torch.tensor([0, 1]), torch.tensor([0, 1]))
    buffer.zero_()
    metric.update(torch.eye(2, dtype=torch.bfloat16, requires_grad=True), torch.tensor([0, 1]), torch.tensor([2, 3]))
    metric.update(torch.empty(0, 2), torch.empty(0, dtype=torch.int64))  # a batch of nothing
    assert metric.compute().first_rank.tolist() == [1, 1, 1, 1]


def test_lone_queries_are_logged(caplog):
    fed(0, 1, **PROBLEMS["no relevant item at all"]).compute()
    assert [record.message for record in caplog.records if record.name == "rambo_plugins"] == [
        "9 of 9 queries have no relevant item in the gallery and are left out of the mean",
        "no query is left to average over: the figures are nan",
    ]


@pytest.mark.parametrize(
    ("error", "message", "embeddings", "labels", "more"),
    [
        (ValueError, "embeddings: 1 of 2 rows have NaN or inf", [[1, 2], [3, math.nan]], [0, 1], {"ids": [8, 9]}),
        (ValueError, "expected 2 dimensions as before, got shape (1, 3)", np.ones((1, 3)), [0], {"ids": [9]}),
        (ValueError, "embeddings of shape (N, D), got shape (2,)", np.ones(2), [0, 1], {"ids": [8, 9]}),
        (ValueError, "labels: expected one entry for each of the 2 embeddings, got 1", np.eye(2), [0], {"ids": [8, 9]}),
        (ValueError, "ids: expected one entry for each of the 2 embeddings, got 1", np.eye(2), [0, 1], {"ids": [9]}),
        (TypeError, "labels: expected integers or strings, got dtype float64", np.eye(2), [0.5, 1], {"ids": [8, 9]}),
        (TypeError, "labels: expected integers as before, got strings", np.eye(2), ["a", "b"], {"ids": [8, 9]}),
        (TypeError, "ids: expected integers as before, got strings", np.eye(2), [0, 1], {"ids": ["a", "b"]}),
        (ValueError, "ids: expected in every update or in none, got None", np.eye(2), [0, 1], {}),
        (ValueError, "split: expected one of 'both', 'query', 'gallery', got 'test'", np.eye(2), [0, 1],
         {"ids": [8, 9], "split": "test"}),
    ],
)  # fmt: skip
def test_a_batch_that_does_not_fit_is_refused_and_leaves_the_metric_as_it_was(error, message, embeddings, labels, more):
    metric = RecallMetric(ks=(1,))
    metric.update(np.eye(2), [0, 0], [1, 2])
    with pytest.raises(error) as caught:
        metric.update(embeddings, labels, **more)
    assert message in str(caught.value)
    metric.update(np.eye(2), [0, 0], [3, 4])
    assert metric.compute().num_queries == 4


def test_ids_after_updates_without_are_refused():
    metric = RecallMetric()
    metric.update(np.eye(2), [0, 0])
    with pytest.raises(ValueError, match="ids: expected in every update or in none, got some after updates without"):
        metric.update(np.eye(2), [0, 0], [3, 4])


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("ks: expected one or more positive integers", {"ks": ()}),
        ("metric: expected one of 'inner_product', 'l2', got 'cosine'", {"metric": "cosine"}),
        ("lone: expected one of 'exclude', 'miss', got 'drop'", {"lone": "drop"}),
        ("max_memory: expected bytes, or a figure", {"max_memory": "much"}),
        ("device: expected 'cpu', 'cuda', 'cuda:1' and so on, got 'gpu'", {"device": "gpu"}),
    ],
)
def test_options_are_checked_at_once(message, options):
    with pytest.raises(ValueError) as caught:
        RecallMetric(**options)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("message", "splits", "labels"),
    [
        ("split: expected rows of 'both' or 'gallery' on some rank, got none", ["query", "query"], ["a", "b"]),
        ("split: expected rows of 'both' or 'query' on some rank, got none", ["gallery", "gallery"], ["a", "b"]),
        ("got 'x' with label 'a' on rank 0 and with label 'b' on rank 0", ["query", "gallery"], ["a", "b"]),
    ],
)
def test_rows_that_make_no_evaluation_are_refused(message, splits, labels):
    metric = RecallMetric()
    for split, label in zip(splits, labels, strict=True):
        metric.update(np.eye(1, 3), [label], ["x" if len(set(splits)) == 2 else label], split=split)
    with pytest.raises(ValueError) as caught:
        metric.compute()
    assert message in str(caught.value)


def test_too_little_memory_is_told_with_what_is_needed():
    case = PROBLEMS["queries among themselves"]
    metric = fed(0, 1, **{**case, "options": {"max_memory": 1000}})
    with pytest.raises(
        ValueError, match=r"1,000 bytes are too little for .* 75 rows .*; ([\d,]+) are needed"
    ) as caught:
        metric.compute()
    needed = int(str(caught.value).split("; ")[1].split(" are needed")[0].replace(",", ""))
    assert fed(0, 1, **{**case, "options": {"max_memory": needed}}).compute().num_queries == 60
    with pytest.raises(ValueError, match="too little"):
        fed(0, 1, **{**case, "options": {"max_memory": needed - 1}}).compute()


def test_the_device_is_that_of_the_products(monkeypatch):
    seen = []
    monkeypatch.setattr(distributed, "count_above", lambda *a: seen.append(a[4]) or np.zeros((2, len(a[0])), np.int64))
    monkeypatch.setattr(distributed, "best_relevant", lambda *a: seen.append(a[3]) or np.zeros((len(a[0]), 2)))
    assert fed(0, 1, **PROBLEMS["distractors"], device="meta").compute().backend == "counting, meta"
    assert seen == [torch.device("meta"), [torch.device("meta")]]


# Several processes. Each writes what it found to a file of its own, after every step: some do not live long.


def run(world, folder):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=member, args=(rank, world, str(folder))) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(WAIT)
        assert processes[0].exitcode == 0
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(world)]


class Notes(logging.Handler):
    """What this process found, by the name of the step."""

    def __init__(self, path):
        super().__init__()
        self.path, self.found, self.logged = path, {}, []
        logging.getLogger("rambo_plugins").addHandler(self)

    def emit(self, record):
        self.logged.append(record.getMessage())

    def step(self, name, work):
        self.logged.clear()
        started = time.monotonic()
        try:
            found = work()
        except Exception as error:
            found = f"{type(error).__name__}: {error}"
        self.found[name] = found, self.logged[:], time.monotonic() - started
        self.path.with_suffix(".new").write_bytes(pickle.dumps(self.found))
        os.replace(self.path.with_suffix(".new"), self.path)


def member(rank, world, folder):
    torch.set_num_threads(1)
    notes = Notes(Path(folder) / f"{rank}")
    early = RecallMetric()
    early.update(np.eye(2), [0, 0])
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=world, timeout=timedelta(seconds=WAIT)
    )
    alone = [dist.new_group([other]) for other in range(world)][rank]

    for name, case in PROBLEMS.items():
        notes.step(name, lambda case=case: outcome(fed(rank, world, **case).compute()))
    sizes = []
    whole = distributed.count_above
    distributed.count_above = lambda *a: sizes.append(len(a[0])) or whole(*a)
    notes.step("sizes", lambda: fed(rank, world, **PROBLEMS["many blocks"]).compute() and sizes)
    distributed.count_above = whole

    def by_sampler():
        case, metric = PROBLEMS["cosines of large and small"], RecallMetric(ks=(1, 4), normalize=True)
        for at in DistributedSampler(range(len(case["ids"])), seed=3):
            metric.update(case["rows"][at : at + 1], case["labels"][at : at + 1], case["ids"][at : at + 1])
        return outcome(metric.compute())

    notes.step("sampler", by_sampler)

    def on_its_own():
        metric = RecallMetric(ks=(1,), group=alone)
        metric.update(np.eye(2 + rank), np.zeros(2 + rank, int))
        return metric.compute().num_queries

    notes.step("group of one", on_its_own)
    if world == 4:
        failures(rank, notes, early)
        notes.step("killed", dies_in_compute(rank == 2, signal.SIGKILL).compute)
    else:
        notes.step("memory", lambda: memory_above_the_rows(rank))
        pair = dist.new_group([0, 1], timeout=timedelta(seconds=3))
        other = [0, 0]
        dist.all_gather_object(other, os.getpid())
        notes.step("stands still", dies_in_compute(rank == 1, signal.SIGSTOP, group=pair).compute)
        if rank == 0:
            os.kill(other[1], signal.SIGCONT)
        else:
            RecallMetric().update(np.full((1, 3), np.nan), [0], [0])
        notes.step("died in update", dies_in_compute(False).compute)
    os._exit(0)  # gloo's destructor can wait for a thread that waits for Python's lock, and never end


def failures(rank, notes, early):
    """Each ends all ranks with an error, after which they go on together."""

    def with_rows(dim=3, ks=(1,), scale=1.0, label=0, **options):
        metric = RecallMetric(ks, **options)
        if rank != 3:
            metric.update(np.eye(2, dim) * scale, [label, label], [rank, rank + 1])
        return metric

    def broken(*arguments):
        raise KeyError("of this rank only")

    notes.step("ids missing in update", lambda: RecallMetric().update(np.eye(2), [0, 0]))
    notes.step("ids missing in compute", early.compute)
    notes.step("no rows", RecallMetric().compute)
    notes.step("other D", with_rows(dim=5 if rank == 1 else 3).compute)
    notes.step("other ks", with_rows(ks=(1, 2) if rank == 3 else (1,)).compute)
    notes.step("other normalize", with_rows(normalize=rank == 0).compute)
    notes.step("other kind of labels", with_rows(label="a" if rank == 2 else 0).compute)
    notes.step("other label of an id", with_rows(label=2**60 + rank // 2).compute)
    notes.step("little memory on one rank", with_rows(max_memory=1000 if rank == 2 else None).compute)
    notes.step("scores that overflow", with_rows(scale=1e30 if rank == 1 else 1).compute)
    for name in ("best_relevant", "count_above"):
        whole = getattr(distributed, name)
        if rank == 2:
            setattr(distributed, name, broken)
        notes.step(f"broken {name}", with_rows().compute)
        setattr(distributed, name, whole)
    pair = dist.new_group([1, 2])
    notes.step("group of two", lambda: outcome(fed(rank - 1, 2, **PROBLEMS["distractors"], group=pair).compute()))


def memory_above_the_rows(rank):
    """Bytes that compute takes at most, beyond the 30 MB of this rank."""

    def measured(name):
        return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024

    rng = np.random.default_rng(rank)
    metric = RecallMetric(max_memory="24M")
    for ids in np.arange(rank, 60_000, 2).reshape(-1, 500):
        split = "query" if ids[0] < 100 else "gallery"
        metric.update(rng.standard_normal((500, 256), dtype=np.float32), ids % 9000, ids, split=split)
    before = measured("VmRSS")
    metric.compute()
    return measured("VmHWM") - before


def dies_in_compute(here, fatal=None, **options):
    """A metric that has rows; where it is ``here``, the process gets the signal ``fatal`` in the middle."""
    whole = distributed.count_above

    def signalled(*arguments):
        os.kill(os.getpid(), fatal)
        return whole(*arguments)

    distributed.count_above = signalled if here else whole
    metric = RecallMetric(ks=(1,), **options)
    metric.update(np.eye(3), [0, 0, 0], np.arange(3) + 3 * dist.get_rank())
    return metric


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    return run(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory):
    return run(4, tmp_path_factory.mktemp("four"))


@pytest.mark.parametrize("world", ["two", "four"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_several_processes_equal_one_and_each_other(name, world, request):
    notes = [found[name][0] for found in request.getfixturevalue(world)]
    check(notes[0], name)
    assert notes == notes[:1] * len(notes)
    assert notes[0]["backend"].endswith({"two": ", 2 processes", "four": ", 4 processes"}[world])


def test_samples_that_a_distributed_sampler_repeats_count_once(four):
    assert len(PROBLEMS["cosines of large and small"]["ids"]) % 4
    for found in four:
        check(found["sampler"][0], "cosines of large and small")


@pytest.mark.parametrize("world", ["two", "four"])
def test_only_the_first_rank_logs_lone_queries(world, request):
    logged = [found["no relevant item at all"][1] for found in request.getfixturevalue(world)]
    assert [len(messages) for messages in logged] == [2] + [0] * (len(logged) - 1)


@pytest.mark.parametrize("world", ["two", "four"])
def test_queries_are_exchanged_in_blocks_that_fit_the_memory(world, request):
    sizes = [found["sizes"][0] for found in request.getfixturevalue(world)]
    assert sizes == sizes[:1] * len(sizes)  # every rank sees the queries of all
    assert len(sizes[0]) > {"two": 2, "four": 3}[world]
    row = 4 * PROBLEMS["many blocks"]["rows"].shape[1]
    assert max(sizes[0]) * row < 400 * 1024 / 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not tell the memory in use")
def test_compute_keeps_to_the_memory(two):
    for found in two:
        assert 0 < found["memory"][0] < 24 * 2**20


def test_a_group_of_some_processes_computes_by_itself(two, four):
    assert [found["group of one"][0] for found in two] == [2, 3]
    outside, first, second, _ = (found["group of two"][0] for found in four)
    assert "expected one that this process is in, got one without rank 0" in outside
    check(first, "distractors")
    assert first == second


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("ids missing in update", "ValueError: ids: expected with 4 processes, got None; a DistributedSampler"),
        ("ids missing in compute", "ValueError: ids: expected with 4 processes, got None; a DistributedSampler"),
        ("no rows", "ValueError: no rows: expected update to be called before compute"),
        ("other D", "ValueError: dimensions of the embeddings: expected the same on all ranks, got 3 on rank 0 and 5 "
         "on rank 1"),
        ("other ks", "ValueError: ks: expected the same on all ranks, got [1] on rank 0 and [1, 2] on rank 3"),
        ("other normalize", "ValueError: normalize: expected the same on all ranks, got True on rank 0 and False on "
         "rank 1"),
        ("other kind of labels", "ValueError: labels: expected the same on all ranks, got 'integers' on rank 0 and "
         "'strings' on rank 2"),
        ("other label of an id", "ValueError: ids: expected one label for each id, got 2 with label "
         "1152921504606846976 on rank 1 and with label 1152921504606846977 on rank 2;"),
        ("little memory on one rank", "ValueError: max_memory: 1,000 bytes are too little"),
        ("scores that overflow", "RuntimeError: RecallMetric.compute failed on rank 1: ValueError: the scores of some "
         "embeddings overflow float32"),
        ("broken best_relevant", "RuntimeError: RecallMetric.compute failed on rank 2: KeyError: 'of this rank only'"),
        ("broken count_above", "RuntimeError: RecallMetric.compute failed on rank 2: KeyError: 'of this rank only'"),
    ],
)  # fmt: skip
def test_what_fails_on_one_rank_ends_all_with_an_error_that_names_it(four, step, message):
    for rank, found in enumerate(four):
        text, _, seconds = found[step]
        assert text.startswith(message), (rank, text)
        assert seconds < 20


@pytest.mark.parametrize(
    ("world", "step", "survivors", "least"),
    [("four", "killed", [0, 1, 3], 0), ("two", "died in update", [0], 0), ("two", "stands still", [0], 2.9)],
)
def test_a_lost_process_ends_the_others(world, step, survivors, least, request):
    processes = request.getfixturevalue(world)
    if step != "stands still":  # that one went on in the end
        assert [rank for rank, found in enumerate(processes) if step in found] == survivors
    for rank in survivors:
        text, _, seconds = processes[rank][step]
        assert text.startswith(f"RuntimeError: RecallMetric.compute on rank {rank} lost another process"), text
        assert least <= seconds < 20
