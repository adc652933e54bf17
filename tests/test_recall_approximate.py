"""Recall@K by approximate indexes: against loops over faiss's lists and over all scores, and with interruptions."""

import functools
import json
import logging
import math
import os
import shutil
from pathlib import Path

import faiss
import numpy as np
import pytest
import torch

from rambo_plugins.evaluation import approximate as approximate_module
from rambo_plugins.evaluation import index as index_module
from rambo_plugins.evaluation import index_files
from rambo_plugins.evaluation import recall as recall_module
from rambo_plugins.evaluation.approximate import approximate_recall_at_k
from rambo_plugins.evaluation.result import paired_interval


@pytest.fixture(autouse=True)
def few_threads():
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(1)
    yield
    assert faiss.omp_get_max_threads() == 1
    faiss.omp_set_num_threads(before)


def all_scores(query, gallery, metric):
    """Float64, one pair at a time."""
    query, gallery = np.asarray(query, float), np.asarray(gallery, float)
    if metric == "inner_product":
        return [[float(a @ b) for b in gallery] for a in query]
    return [[-float(((a - b) ** 2).sum()) for b in gallery] for a in query]


def exact_ranks(query, query_labels, gallery, gallery_labels, own, limit, metric="inner_product", length=None):
    """Rank of the first relevant item, 0 beyond ``limit`` or without one, by the definition.

    ``own``: the query's gallery row, or None. ``length``: lists are cut there, and what may tie beyond is a miss.
    """
    ranks = []
    for q, scores in enumerate(all_scores(query, gallery, metric)):
        others = [g for g in range(len(gallery)) if g != own[q]]
        relevant = [scores[g] for g in others if gallery_labels[g] == query_labels[q]]
        if not relevant:
            ranks.append(0)
            continue
        rank = 1 + sum(scores[g] >= max(relevant) for g in others if gallery_labels[g] != query_labels[q])
        if length is not None and length < len(gallery) and sum(scores[g] >= max(relevant) for g in others) >= length:
            rank = math.inf
        ranks.append(rank if rank <= limit else 0)
    return ranks


def listed_ranks(index, query, query_labels, gallery_labels, own, limit, metric):
    """The same from the lists of a faiss index, item by item."""
    length = min(limit + 8, len(gallery_labels))
    scores, found = index.search(query, length + 1)
    ranks = []
    for q in range(len(query)):
        items = [
            (s if metric == "inner_product" else -s, gallery_labels[g] == query_labels[q])
            for s, g in zip(scores[q], found[q], strict=True)
            if g not in (-1, own[q])
        ][:length]
        best = max((s for s, relevant in items if relevant), default=None)
        cut = len(items) == length < len(gallery_labels) and items[-1][0] == best
        rank = 0 if best is None or cut else 1 + sum(s >= best for s, relevant in items if not relevant)
        ranks.append(rank if rank <= limit else 0)
    return ranks


def share(ranks, k):
    return sum(0 < rank <= k for rank in ranks) / len(ranks)


def clusters(num=600, dim=8, size=5, noise=0.7, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.permutation(num) // size
    centres = rng.standard_normal((num, dim))
    return (centres[labels] + noise * rng.standard_normal((num, dim))).astype(np.float32), labels


@functools.cache
def exact_ranks_of_clusters(num, limit, metric="inner_product"):
    rows, labels = clusters(num)
    return exact_ranks(rows, labels, rows, labels, range(num), limit, metric)


EXHAUSTIVE = [
    ("Flat", ""),
    ("IVF8,Flat", "nprobe=8"),
    ("IVF4(IVF2,Flat),Flat", "nprobe=4,quantizer_nprobe=2"),
    ("IVF4,Flat,RFlat", "nprobe=4"),
]


# --- ranks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ks", [(1, 5), (1, 30), (1, 200)], ids=str)
@pytest.mark.parametrize("metric", ["inner_product", "l2"])
@pytest.mark.parametrize(("index", "parameters"), EXHAUSTIVE[:2], ids=str)
def test_an_index_that_looks_at_everything_is_exact(index, parameters, metric, ks):
    """Small integers: many exact ties, many identical rows; queries found by id among them."""
    rng = np.random.default_rng(0)
    gallery, gallery_labels = rng.integers(-2, 3, (150, 3)), rng.integers(0, 12, 150)
    query, query_labels = rng.integers(-2, 3, (60, 3)), rng.integers(0, 14, 60)
    own = rng.choice(200, 60, replace=False)  # some of them are not in the gallery
    inside = own < 150
    query[inside], query_labels[inside] = gallery[own[inside]], gallery_labels[own[inside]]
    gallery_ids = 10**12 + np.arange(150)
    result = approximate_recall_at_k(
        query, query_labels, gallery, gallery_labels, ks, query_ids=10**12 + own, gallery_ids=gallery_ids,
        index=index, parameters=parameters, metric=metric, lone="miss", training=150,
    )  # fmt: skip
    exact = exact_ranks(query, query_labels, gallery, gallery_labels, own, ks[-1], metric)
    cut = exact_ranks(query, query_labels, gallery, gallery_labels, own, ks[-1], metric, length=ks[-1] + 8)
    assert result.first_rank.tolist() == cut
    assert result.recall == {k: share(cut, k) for k in ks}
    assert result.check.num_queries == 60
    assert result.check.exact == {k: share(exact, k) for k in ks}
    assert result.check.approximate == result.recall
    assert result.check.gap == {k: result.recall[k] - result.check.exact[k] for k in ks}
    if ks[-1] == 200:
        assert set(result.check.gap.values()) == {0}


@pytest.mark.parametrize(("index", "parameters"), [*EXHAUSTIVE, ("HNSW16", "efSearch=600")], ids=str)
def test_queries_among_themselves_leave_themselves_out(index, parameters):
    rows, labels = clusters()
    result = approximate_recall_at_k(rows, labels, ks=(1, 10, 600), index=index, parameters=parameters)
    ranks = exact_ranks_of_clusters(600, 600)
    assert result.first_rank.tolist() == ranks
    assert result.recall == result.check.exact == {k: share(ranks, k) for k in (1, 10, 600)}
    assert 0.1 < result.recall[1] < 0.9
    assert not result.exact


def test_exact_duplicates_do_not_let_a_query_find_itself():
    """Pairs of identical images of different classes: a query that is not first in its own list is no hit."""
    half = np.random.default_rng(0).integers(-3, 4, (60, 8))
    labels = np.arange(120)
    labels[[0, 60]] = 0
    for index, parameters in EXHAUSTIVE:
        result = approximate_recall_at_k(
            np.concatenate([half, half]), labels, ks=(1, 5), lone="miss", index=index, parameters=parameters
        )
        assert result.recall[5] == pytest.approx(2 / 120)
        assert result.check.exact[5] == pytest.approx(2 / 120)


@pytest.mark.parametrize("metric", ["inner_product", "l2"])
@pytest.mark.parametrize(
    ("index", "parameters"),
    [
        ("IVF16,Flat", ""),
        ("IVF16,Flat", "nprobe=3"),
        ("IVF8_HNSW4,SQ8", "nprobe=2,quantizer_efSearch=4"),
        ("IVF8,PQ4x4", "nprobe=3"),
        ("PQ4x4", ""),
        ("IVF4,PQ4x4fs", "nprobe=2"),
        ("IVF8,PQ4x4,RFlat", "nprobe=4,k_factor_rf=2"),
        ("PCA4,IVF8,Flat", "nprobe=4"),
        ("HNSW4", "efSearch=8"),
        ("SQ4", ""),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("folder", [False, True], ids=["memory", "folder"])
def test_ranks_are_those_of_faisss_lists(tmp_path, index, parameters, metric, folder):
    """−1 and the query itself left out, ties of quantised scores against the relevant item."""
    rows, labels = clusters(num=500)
    options = {"ks": (1, 10, 60), "index": index, "parameters": parameters, "metric": metric}
    result = approximate_recall_at_k(rows, labels, **options, folder=tmp_path if folder else None)
    plain = faiss.index_factory(8, index, faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT)
    plain.train(rows)
    plain.add(rows)
    if parameters:
        faiss.ParameterSpace().set_index_parameters(plain, parameters)
    expected = listed_ranks(plain, rows, labels, labels, range(len(rows)), 60, metric)
    assert np.mean(result.first_rank == expected) > 0.998  # where a transform is a matrix product, of other sizes
    if "PCA" not in index:
        assert result.first_rank.tolist() == expected
    exact = exact_ranks_of_clusters(500, 60, metric)
    assert result.check.exact == {k: share(exact, k) for k in (1, 10, 60)}
    assert result.recall != result.check.exact or "HNSW4" in index


def test_an_item_that_was_not_found_is_no_hit_of_the_last_label():
    """Lists of an IVF index end in −1, which indexes the last row."""
    rows = np.repeat([[1.0, 0.0], [0.0, 1.0]], [20, 20], axis=0)
    labels = np.arange(40) // 2
    labels[[0, 39]] = 100
    result = approximate_recall_at_k(rows, labels, ks=(40,), index="IVF2,Flat", lone="miss")
    assert result.first_rank[[0, 39]].tolist() == [0, 0]
    assert result.recall[40] == result.recall_optimistic[40] == 36 / 40  # two more are alone
    assert result.check.exact[40] > result.recall[40]


def test_a_collapsed_model_gets_the_worst_result_not_luck():
    """All alike: a tie that goes on to the end of the list counts as beyond it, whatever else the list holds."""
    rows, labels = np.ones((400, 4)), np.repeat([0, 1], [380, 20])
    for ks in ((1, 10), (1, 360)):
        result = approximate_recall_at_k(rows, labels, ks=ks, index="IVF1,Flat")
        assert result.recall == dict.fromkeys(ks, 0)
        assert set(result.recall_optimistic.values()) == {0.95}  # the lists hold the first rows, of the first label
        assert result.num_tied == 380
    whole = approximate_recall_at_k(rows, labels, ks=(20, 21, 400), index="Flat")  # of the 380, 20 are irrelevant
    assert whole.recall == {20: 0, 21: 0.95, 400: 1}
    assert whole.check.exact == whole.recall


def test_k_beyond_the_gallery_is_a_search_of_all_of_it():
    rows, labels = clusters(50)
    result = approximate_recall_at_k(rows, labels, ks=(1, 49, 1000), index="IVF2,Flat", parameters="nprobe=2")
    assert result.first_rank.tolist() == exact_ranks(rows, labels, rows, labels, range(50), 1000)
    apart = approximate_recall_at_k(
        rows[:5], labels[:5], rows[5:], labels[5:], ks=(1, 1000), index="HNSW8", lone="miss"
    )
    assert apart.first_rank.tolist() == exact_ranks(rows[:5], labels[:5], rows[5:], labels[5:], [None] * 5, 1000)
    one = approximate_recall_at_k([[1.0]], [3], [[2.0]], [3], ks=(1, 7), index="Flat")
    assert one.recall == {1: 1, 7: 1}


# --- forms of input ---------------------------------------------------------------------------------------------------


class Blocks:
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(np.array_split(self.rows, [5, 300, 301]))


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("metric", ["inner_product", "l2"])
def test_embeddings_and_labels_may_come_in_any_form(tmp_path, metric, normalize):
    rows, labels = clusters()
    rows *= np.random.default_rng(1).uniform(0.5, 2, (600, 1)).astype(np.float32)
    np.save(tmp_path / "rows.npy", rows)
    options = {"ks": (1, 10), "metric": metric, "normalize": normalize, "index": "IVF8,Flat", "parameters": "nprobe=8"}
    before = rows.copy()
    used = rows / np.linalg.norm(rows.astype(float), axis=1, keepdims=True) if normalize else rows
    expected = exact_ranks(used, labels, used, labels, range(600), 10, metric)
    for values in (
        rows,
        torch.tensor(rows),
        np.load(tmp_path / "rows.npy", mmap_mode="r"),
        Blocks(rows),
    ):
        result = approximate_recall_at_k(values, [f"class {label}" for label in labels], **options)
        assert result.first_rank.tolist() == expected
        assert result.check.exact == result.recall
        apart = approximate_recall_at_k(
            rows[:90], labels[:90], values, labels, query_ids=np.arange(90), gallery_ids=np.arange(600), **options
        )
        assert apart.first_rank.tolist() == expected[:90]
        assert apart.check.exact == apart.recall
    np.testing.assert_array_equal(rows, before)


def test_lone_queries_are_left_out_or_missed_and_logged_once(caplog):
    rows, labels = clusters()
    labels[:150] = 1000 + np.arange(150)
    ranks = exact_ranks(rows, labels, rows, labels, range(600), 10)
    lone = [q for q in range(600) if (labels == labels[q]).sum() == 1]
    options = {"ks": (1, 10), "index": "IVF8,Flat", "parameters": "nprobe=2", "check": 200}
    with caplog.at_level(logging.WARNING, "rambo_plugins"):
        excluded = approximate_recall_at_k(rows, labels, **options)
    assert [record.message for record in caplog.records] == [
        f"{len(lone)} of 600 queries have no relevant item in the gallery (rows 0, 1, 2, 3, 4, …) and are left out of "
        "the mean"
    ]
    missed = approximate_recall_at_k(rows, labels, **options, lone="miss")
    for result, averaged in ((excluded, 600 - len(lone)), (missed, 600)):
        assert result.lone_queries.tolist() == lone
        assert (result.num_queries, result.num_averaged, result.check.num_queries) == (600, averaged, 200)
        for k in (1, 10):
            assert result.recall[k] == pytest.approx(
                ((result.first_rank > 0) & (result.first_rank <= k)).sum() / averaged
            )
            low, high = result.check.interval[k]
            assert low < sum(0 < rank <= k for rank in ranks) / averaged < high
    everyone = approximate_recall_at_k(rows, labels, **{**options, "check": 10**6}, lone="miss")
    assert everyone.check.exact == {k: share(ranks, k) for k in (1, 10)}


def test_no_query_to_average_over_is_nan(caplog):
    result = approximate_recall_at_k([[1.0, 2.0]], [3], ks=(1, 2), index="Flat")
    assert "no query is left to average over" in caplog.text
    assert result.check.num_queries == 0
    figures = [*result.recall.values(), *result.check.gap.values(), *result.check.gap_interval[1]]
    assert np.isnan(figures).all()
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["check"]["gap"] == {"1": None, "2": None}
    assert approximate_recall_at_k([[1.0, 2.0]], [3], ks=(1,), index="Flat", lone="miss").recall == {1: 0}


# --- the check --------------------------------------------------------------------------------------------------------


def test_the_gap_of_a_sample_covers_the_true_gap():
    rows, labels = clusters(num=2000)
    options = {"ks": (1, 10), "index": "IVF64,Flat", "training": 1000, "metric": "l2"}
    exact = recall_module.recall_at_k(rows, labels, ks=(1, 10), metric="l2").first_rank
    expected = exact_ranks(rows[:40], labels[:40], rows, labels, range(40), 10, "l2")
    assert exact[:40].tolist() == expected
    covered = 0
    for seed in range(20):
        result = approximate_recall_at_k(rows, labels, check=300, seed=seed, **options)
        assert result.check.num_queries == 300
        for k in (1, 10):
            true_gap = result.recall[k] - share(exact.tolist(), k)
            low, high = result.check.gap_interval[k]
            assert true_gap < (0 if k == 1 else -0.05)
            assert low < result.check.gap[k] < high < (0.05 if k == 1 else 0)
            assert result.check.gap[k] == pytest.approx(result.check.approximate[k] - result.check.exact[k])
            covered += low <= true_gap <= high
    assert covered >= 34  # of 40, 38 expected
    wide = approximate_recall_at_k(rows, labels, check=30, **options).check.gap_interval[1]
    narrow = approximate_recall_at_k(rows, labels, check=2000, **options).check
    assert narrow.num_queries == 2000
    assert narrow.exact == {k: share(exact.tolist(), k) for k in (1, 10)}
    assert wide[1] - wide[0] > 3 * (narrow.gap_interval[1][1] - narrow.gap_interval[1][0])


def slow_paired_interval(gained, lost, num):
    """Tango's interval from its words: of all δ, those that a score test does not reject, in steps of 1/4000."""
    kept = []
    for delta in np.arange(-3999, 4000) / 4000:
        q = np.linspace(max(0, -delta), (1 - delta) / 2, 4001)  # probability of a loss; of a gain: q + δ
        with np.errstate(divide="ignore", invalid="ignore"):
            likelihood = sum(
                np.where(count == 0, 0, count * np.log(np.maximum(p, 0)))
                for count, p in ((gained, q + delta), (lost, q), (num - gained - lost, 1 - 2 * q - delta))
            )
        q = q[np.argmax(likelihood)]
        variance = (2 * q + delta - delta**2) / num
        if ((gained - lost) / num - delta) ** 2 <= 1.959964**2 * variance:
            kept.append(delta)
    return min(kept), max(kept)


@pytest.mark.parametrize(
    ("gained", "lost", "num"), [(0, 0, 40), (0, 5, 50), (3, 0, 12), (7, 12, 60), (0, 10, 10), (1, 1, 2)]
)
def test_the_interval_of_the_gap_is_the_one_of_tango(gained, lost, num):
    assert paired_interval(gained, lost, num) == pytest.approx(slow_paired_interval(gained, lost, num), abs=1.5e-3)
    low, high = paired_interval(lost, gained, num)
    assert paired_interval(gained, lost, num) == pytest.approx((-high, -low))


def test_no_difference_seen_is_not_no_difference():
    z = 1.959964
    assert paired_interval(0, 0, 1000) == pytest.approx((-(z**2) / (1000 + z**2), z**2 / (1000 + z**2)))
    assert np.isnan(paired_interval(0, 0, 0)).all()


@pytest.mark.parametrize(("gain", "loss"), [(0.0, 0.01), (0.02, 0.05), (0.1, 0.3)])
def test_the_interval_of_the_gap_covers_what_it_says(gain, loss):
    rng = np.random.default_rng(0)
    covered = []
    for gained, lost, _ in rng.multinomial(200, [gain, loss, 1 - gain - loss], 400):
        low, high = paired_interval(int(gained), int(lost), 200)
        covered.append(low <= gain - loss <= high)
    assert np.mean(covered) > 0.925


def test_the_result_reads_and_serialises():
    rows, labels = clusters()
    result = approximate_recall_at_k(rows, labels, ks=(1, 10), index="IVF16,Flat", parameters="nprobe=2", check=100)
    text = str(result)
    assert text.startswith(f"approximate: R@1 {100 * result.recall[1]:.2f}  R@10 ")
    low, high = (100 * bound for bound in result.check.gap_interval[1])
    assert "faiss IVF16,Flat nprobe=2, cpu" in text
    assert "; check on 100 queries: R@1 exact " in text
    assert f"gap {100 * result.check.gap[1]:+.2f} [{low:+.2f}, {high:+.2f}]; R@10 exact" in text
    saved = json.loads(json.dumps(result.to_dict()))
    assert saved == result.to_dict()
    assert saved["exact"] is False
    assert saved["check"]["gap_interval"]["1"] == list(result.check.gap_interval[1])
    assert saved["check"]["num_queries"] == 100
    assert recall_module.recall_at_k(rows, labels, ks=(1,)).to_dict()["check"] is None


# --- training, memory, progress ---------------------------------------------------------------------------------------


@pytest.fixture
def work(monkeypatch):
    """Rows that faiss trains on, and the gallery rows that it adds, by their order."""
    done = {"trained": [], "added": []}
    for kind in (faiss.IndexIVFFlat, faiss.IndexHNSWFlat):
        train, add, add_with_ids = kind.train, kind.add, kind.add_with_ids

        def noted_train(self, rows, train=train):
            done["trained"].append(len(rows))
            return train(self, rows)

        def noted_add(self, rows, add=add):
            done["added"].extend(range(self.ntotal, self.ntotal + len(rows)))
            return add(self, rows)

        def noted_add_with_ids(self, rows, ids, add_with_ids=add_with_ids):
            done["added"].extend(ids.tolist())
            return add_with_ids(self, rows, ids)

        monkeypatch.setattr(kind, "train", noted_train)
        monkeypatch.setattr(kind, "add", noted_add)
        monkeypatch.setattr(kind, "add_with_ids", noted_add_with_ids)
    return done


def test_the_training_rows_are_drawn_by_the_seed(work):
    rows, labels = clusters()
    options = {"ks": (1, 10), "index": "IVF16,Flat"}
    results = [approximate_recall_at_k(rows, labels, training=200, seed=seed, **options) for seed in (0, 0, 1)]
    approximate_recall_at_k(rows, labels, **options)
    assert work["trained"] == [200, 200, 200, 600]
    assert results[0].first_rank.tolist() == results[1].first_rank.tolist() != results[2].first_rank.tolist()


def test_memory_bounds_the_training_rows_and_says_so(work, caplog):
    rows, labels = clusters(num=4000, dim=128)
    with caplog.at_level(logging.WARNING, "rambo_plugins"):
        approximate_recall_at_k(rows, labels, ks=(1,), index="IVF16,Flat", max_memory="2M", check=50)
    assert work["trained"] == [2048]
    assert sorted(work["added"]) == list(range(4000))
    assert "training IVF16,Flat on 2048 rows, as max_memory allows, instead of 4000" in caplog.text
    with pytest.raises(
        ValueError, match="max_memory: 2,097,152 bytes hold 2,048 rows to train on, but 'IVF3000,Flat' ne"
    ):
        approximate_recall_at_k(rows, labels, ks=(1,), index="IVF3000,Flat", max_memory="2M")


def test_a_product_of_few_centroids_trains_on_few_rows():
    rows, labels = clusters()
    result = approximate_recall_at_k(rows, labels, ks=(10,), index="IMI2x5,Flat", parameters="nprobe=1024", metric="l2")
    assert result.first_rank.tolist() == exact_ranks_of_clusters(600, 10, "l2")


def test_progress_shows_each_stage(capsys):
    rows, labels = clusters()
    approximate_recall_at_k(rows, labels, ks=(1,), index="IVF8,Flat", progress=True, check=100)
    shown = capsys.readouterr().err
    for stage, total in (("train", "600/600"), ("add", "600/600"), ("search", "600/600"), ("recall", "60.0k/60.0k")):
        assert any(stage in line and total in line for line in shown.replace("\r", "\n").splitlines()), stage


# --- the folder -------------------------------------------------------------------------------------------------------


SHARDS = {"ks": (1, 10), "index": "IVF16,Flat", "parameters": "nprobe=2", "max_memory": "2M", "check": 100}


@pytest.fixture
def interrupted_write(monkeypatch):
    """A write to the folder, of the given number, ends half way through."""
    write = index_module.write_index

    def at(number):
        names = []

        def noted(index, path):
            names.append(path.name.removeprefix(".unfinished-"))
            if len(names) == number:
                path.write_bytes(b"half")
                raise KeyboardInterrupt
            write(index, path)

        monkeypatch.setattr(index_module, "write_index", noted)
        return names

    return at


def test_an_interrupted_ivf_index_goes_on_from_its_shards(tmp_path, work, interrupted_write):
    rows, labels = clusters(num=2500, dim=128)
    expected = approximate_recall_at_k(rows, labels, **SHARDS)
    work.update(trained=[], added=[])
    for number, names, added in (
        (1, ["trained.index"], []),
        (2, ["trained.index", "shard-000000001024.index"], range(1024)),
        (2, ["shard-000000001024.index", "shard-000000002048.index"], range(2048)),
        (1, ["shard-000000002048.index"], range(1024, 2048)),
        (3, ["shard-000000002048.index", "shard-000000002500.index", "filled.index"], range(1024, 2500)),
        (1, ["filled.index"], []),
    ):
        seen = interrupted_write(number)
        work["added"] = []
        with pytest.raises(KeyboardInterrupt):
            approximate_recall_at_k(rows, labels, **SHARDS, folder=tmp_path)
        assert seen == names
        assert work["added"] == list(added)
    assert work["trained"] == [2048, 2048]  # the first was not written
    seen = interrupted_write(-1)
    result = approximate_recall_at_k(rows, labels, **SHARDS, folder=tmp_path)
    assert seen == ["filled.index"]
    assert len(work["trained"]) == 2
    assert result.first_rank.tolist() == expected.first_rank.tolist()
    assert result.check == expected.check
    kept = sorted(path.name.split("-")[0] for path in tmp_path.iterdir())
    assert kept == ["check", "filled.index", "lists", "problem.json", "rambo_files.json"]


def test_blocks_of_another_size_go_on_in_the_middle_of_a_block(tmp_path, work, interrupted_write):
    rows, labels = clusters(num=2500, dim=128)
    interrupted_write(3)
    with pytest.raises(KeyboardInterrupt):
        approximate_recall_at_k(rows, labels, **SHARDS, folder=tmp_path)
    interrupted_write(-1)
    expected = approximate_recall_at_k(rows, labels, **SHARDS)
    work["added"] = []
    result = approximate_recall_at_k(rows, labels, **{**SHARDS, "max_memory": "3M"}, folder=tmp_path)  # 768 rows
    assert work["added"] == list(range(1024, 2500))
    assert result.first_rank.tolist() == expected.first_rank.tolist()


def test_an_interrupted_graph_goes_on_from_its_last_checkpoint(tmp_path, work, interrupted_write, monkeypatch):
    rows, labels = clusters(num=2000, dim=128)
    options = {**SHARDS, "index": "HNSW8", "parameters": "efSearch=16"}
    expected = approximate_recall_at_k(rows, labels, **options)
    monkeypatch.setattr(index_module, "CHECKPOINT", 0)
    seen = interrupted_write(4)
    work["added"] = []
    with pytest.raises(KeyboardInterrupt):
        approximate_recall_at_k(rows, labels, **options, folder=tmp_path)
    assert seen == ["trained.index", "filled.index", "filled.index", "filled.index"]
    block = len(work["added"]) // 3
    interrupted_write(-1)
    work["added"] = []
    result = approximate_recall_at_k(rows, labels, **options, folder=tmp_path)
    assert work["added"] == list(range(2 * block, 2000))
    assert 0 < 2 * block < 2000
    assert result.first_rank.tolist() == expected.first_rank.tolist()


def test_a_finished_index_serves_other_queries_and_parameters(tmp_path, work, monkeypatch):
    rows, labels = clusters(num=600)
    options = {"ks": (1, 10), "index": "IVF16,Flat", "check": 100}
    approximate_recall_at_k(rows, labels, **options, parameters="nprobe=1", folder=tmp_path)
    work.update(trained=[], added=[])
    (tmp_path / "shard-000000000300.index").write_bytes(b"the user's")
    apart = {"gallery": rows, "gallery_labels": labels, "query_ids": np.arange(9), "gallery_ids": np.arange(600)}
    found = approximate_recall_at_k(
        rows[:9] * 2, labels[:9], **apart, **options, parameters="nprobe=4", folder=tmp_path
    )
    assert (tmp_path / "shard-000000000300.index").read_bytes() == b"the user's"
    with monkeypatch.context() as patch:
        patch.setattr(recall_module, "_count", None)  # the exact search is there too
        result = approximate_recall_at_k(rows, labels, **options, parameters="nprobe=16", folder=tmp_path)
    assert work == {"trained": [], "added": []}
    assert result.first_rank.tolist() == exact_ranks_of_clusters(600, 10)
    expected = approximate_recall_at_k(rows[:9] * 2, labels[:9], **apart, **options, parameters="nprobe=4")
    assert found.first_rank.tolist() == expected.first_rank.tolist()


def test_a_folder_can_be_moved_and_copied(tmp_path, work):
    rows, labels = clusters()
    options = {"ks": (1, 10), "index": "IVF16,Flat", "parameters": "nprobe=2"}
    expected = approximate_recall_at_k(rows, labels, **options, folder=tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    shutil.move(tmp_path / "a", tmp_path / "c")
    others, _ = clusters(seed=5)
    approximate_recall_at_k(others, labels, **options, folder=tmp_path / "a")
    work["added"] = []
    for name in "bc":
        result = approximate_recall_at_k(rows, labels, **options, folder=tmp_path / name)
        assert result.first_rank.tolist() == expected.first_rank.tolist()
    assert work["added"] == []


def test_the_lists_of_an_ivf_index_stay_on_disk(tmp_path):
    rows, labels = clusters()
    for index, on_disk in (
        ("IVF8,Flat", True), ("OPQ4,IVF8,SQ8", True), ("IVF8,PQ4x4fs", False), ("IVF8,Flat,RFlat", False),
        ("SQ8", False),
    ):  # fmt: skip
        folder = tmp_path / index
        approximate_recall_at_k(rows, labels, ks=(1,), index=index, folder=folder)
        assert len(list(folder.glob("lists-*"))) == on_disk
        assert ((folder / "filled.index").stat().st_size < 600 * 8) == on_disk


def test_the_folder_of_another_index_is_refused(tmp_path):
    rows, labels = clusters()
    options = {"ks": (1,), "index": "IVF8,Flat", "folder": tmp_path / "index"}
    approximate_recall_at_k(rows, labels, **options)
    for changed, named in (
        ({"index": "IVF16,Flat"}, "index"),
        ({"metric": "l2"}, "metric"),
        ({"seed": 1}, "seed"),
        ({"training": 300}, "training rows"),
        ({"normalize": True}, "gallery"),
    ):
        with pytest.raises(
            ValueError, match=rf"^\S*/index: holds parts of another evaluation, which differs in {named};"
        ):
            approximate_recall_at_k(rows, labels, **{**options, **changed})
    with pytest.raises(ValueError, match="which differs in gallery;"):
        approximate_recall_at_k(rows + 1, labels, **options)
    os.truncate(tmp_path / "index" / "filled.index", 200)
    with pytest.raises(ValueError, match=r"filled.index: faiss cannot read it: .*; remove the folder"):
        approximate_recall_at_k(rows, labels, **options)


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (
            {"index": "IVF8,Flut"},
            ValueError,
            r"index: faiss cannot make 'IVF8,Flut': .*could not parse code description",
        ),
        ({"index": "bogus"}, ValueError, "index: faiss cannot make 'bogus': could not parse index string bogus"),
        ({"index": "PQ5"}, ValueError, r"index: faiss cannot make 'PQ5': .*multiple of the number of subquantizers"),
        ({"index": "LSH"}, ValueError, "index: faiss cannot make 'LSH'"),  # of inner products
        ({"index": 5}, TypeError, "index, parameters: expected strings, got 5"),
        ({"index": "IDMap,Flat"}, ValueError, "index: expected one that takes rows block by block, in their order"),
        ({"index": "NSG8"}, ValueError, "index: expected one that takes rows block by block, in their order"),
        (
            {"index": "IVF601,Flat"},
            ValueError,
            "'IVF601,Flat' has 601 centroids, which need .* got 600 of a gallery of",
        ),
        ({"training": 7}, ValueError, "'IVF8,Flat' has 8 centroids, which need as many rows to train on, .* got 7 of"),
        ({"index": "IVF8,PQ4x10"}, ValueError, r"index: faiss cannot train 'IVF8,PQ4x10': .*training points \(600\)"),
        ({"parameters": "efSearch=8"}, ValueError, "parameters: 'IVF8,Flat' does not take 'efSearch=8': .*efSearch"),
        ({"parameters": "nprobe"}, ValueError, "parameters: expected positive numbers as 'nprobe=16' .*, got 'nprobe'"),
        ({"parameters": "nprobe=0"}, ValueError, "parameters: expected positive numbers .*, got 'nprobe=0'"),
        ({"parameters": "nprobe=-4"}, ValueError, "parameters: expected positive numbers .*, got 'nprobe=-4'"),
        ({"parameters": "nprobe=4;k=2"}, ValueError, "parameters: expected positive numbers .*, got 'nprobe=4;k=2'"),
        ({"check": 0}, ValueError, "check: expected a positive number of rows, got 0"),
        ({"check": 0.5}, ValueError, "check: expected a positive number of rows, got 0.5"),
        ({"training": 0}, ValueError, "training: expected a positive number of rows, got 0"),
        ({"metric": "cosine"}, ValueError, "metric: expected one of 'inner_product', 'l2', got 'cosine'"),
        ({"lone": "drop"}, ValueError, "lone: expected one of 'exclude', 'miss', got 'drop'"),
        ({"ks": (0,)}, ValueError, "ks: expected one or more positive integers"),
        ({"max_memory": 100_000}, ValueError, "max_memory: 100,000 bytes are too little"),
        ({"max_memory": "much"}, ValueError, "max_memory: expected bytes"),
        ({"gallery_labels": [1]}, ValueError, "go with a gallery, but gallery is None"),
        ({"gallery": np.eye(8)}, ValueError, "gallery: expected gallery_labels with it, got None"),
        ({"gallery": np.eye(9), "gallery_labels": np.arange(9)}, ValueError, r"the same D, got shapes \(600, 8\)"),
        (
            {"query_labels": [1, 2]},
            ValueError,
            "query_labels: expected one entry for each of the 600 embeddings, got 2",
        ),
        ({"query": np.full((600, 8), np.nan)}, ValueError, "query: 600 of 600 rows have NaN or inf"),
    ],
)
def test_errors_say_what_came_and_what_was_expected(arguments, error, message):
    rows, labels = clusters()
    with pytest.raises(error, match=message):
        approximate_recall_at_k(**{"query": rows, "query_labels": labels, "index": "IVF8,Flat", **arguments})


def test_bad_arguments_are_found_before_the_exact_search(monkeypatch, tmp_path):
    rows, labels = clusters()
    monkeypatch.setattr(approximate_module, "recall_at_k", None)
    for wrong in ({"index": "IVF601,Flat"}, {"index": "x"}, {"parameters": "nprob=2"}, {"training": 5}):
        with pytest.raises(ValueError, match=r"^(index|parameters): "):
            approximate_recall_at_k(rows, labels, **{"index": "IVF8,Flat", "folder": tmp_path / "new", **wrong})
    assert not (tmp_path / "new").exists()


def test_nan_in_a_memory_map_is_found_before_training(tmp_path, work):
    rows, labels = clusters()
    rows[571] = np.nan
    np.save(tmp_path / "rows.npy", rows)
    with pytest.raises(ValueError, match=r"rows have NaN or inf as float32, the first at \[571\]"):
        approximate_recall_at_k(
            rows[:9], labels[:9], np.load(tmp_path / "rows.npy", mmap_mode="r"), labels, index="IVF8,Flat"
        )
    assert work == {"trained": [], "added": []}


def test_storage_in_float16_is_an_exhaustive_search_of_rounded_rows():
    """ "SQfp16": what half the memory costs is what the check says."""
    rng = np.random.default_rng(3)
    labels = np.arange(120) // 3
    rows = (100 + rng.standard_normal((40, 3))[labels] + 0.2 * rng.standard_normal((120, 3))).astype(np.float32)
    rounded = rows.astype(np.float16).astype(np.float32)
    result = approximate_recall_at_k(rows, labels, ks=(1, 5), index="SQfp16", metric="l2", check=120)
    own = np.arange(120)
    expected = exact_ranks(rows, labels, rounded, labels, own, 5, "l2")
    exact = exact_ranks(rows, labels, rows, labels, own, 5, "l2")
    assert expected != exact
    assert result.first_rank.tolist() == expected
    for k in (1, 5):
        gap = sum(0 < rank <= k for rank in expected) - sum(0 < rank <= k for rank in exact)
        assert result.check.gap[k] == pytest.approx(gap / 120)
    assert not result.exact


# --- what fails -------------------------------------------------------------------------------------------------------


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_gallery_that_differs_in_one_number_is_another_one(tmp_path):
    rows, labels = clusters()
    rows = rows.astype(np.float32)
    options = {"ks": (1,), "index": "IVF8,Flat", "folder": tmp_path / "index"}
    approximate_recall_at_k(rows, labels, **options)
    before = contents(tmp_path)
    rows[123, 4] = np.nextafter(rows[123, 4], 9, dtype=np.float32)
    with pytest.raises(ValueError, match="which differs in gallery;"):
        approximate_recall_at_k(rows, labels, **options)
    assert contents(tmp_path) == before


def test_shards_of_ours_are_removed_and_others_left(tmp_path, interrupted_write):
    rows, labels = clusters(num=2500, dim=128)
    interrupted_write(3)
    with pytest.raises(KeyboardInterrupt):
        approximate_recall_at_k(rows, labels, **SHARDS, folder=tmp_path)
    (tmp_path / "shard-000000009999.index").write_bytes(b"theirs")
    interrupted_write(-1)
    expected = approximate_recall_at_k(rows, labels, **SHARDS)
    result = approximate_recall_at_k(rows, labels, **SHARDS, folder=tmp_path)
    assert [path.read_bytes() for path in tmp_path.glob("shard-*")] == [b"theirs"]
    assert result.first_rank.tolist() == expected.first_rank.tolist()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 1), "faiss cannot merge the shards: .*; remove the fold"),
        (lambda path: os.truncate(path, 0), "faiss cannot merge the shards: .*; remove the folder"),
        (lambda path: path.unlink(), r"its shards have 1,476 of 2,500 rows; remove it"),
    ],
)
def test_a_shard_that_is_damaged_or_missing_is_no_index(tmp_path, interrupted_write, damage, message):
    rows, labels = clusters(num=2500, dim=128)
    interrupted_write(3)
    with pytest.raises(KeyboardInterrupt):
        approximate_recall_at_k(rows, labels, **SHARDS, folder=tmp_path)
    interrupted_write(3)
    with pytest.raises(KeyboardInterrupt):
        approximate_recall_at_k(rows, labels, **SHARDS, folder=tmp_path)
    damage(tmp_path / "shard-000000001024.index")
    interrupted_write(-1)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            approximate_recall_at_k(rows, labels, **SHARDS, folder=tmp_path)


def test_an_index_of_other_rows_in_the_place_of_ours_is_refused(tmp_path):
    rows, labels = clusters()
    options = {"ks": (1,), "index": "IVF8,SQ8"}
    approximate_recall_at_k(rows, labels, **options, folder=tmp_path / "a")
    for other in (np.concatenate([rows, rows]), rows[:, :4]):
        twice = np.resize(labels, len(other))
        approximate_recall_at_k(other, twice, **options, folder=tmp_path / "b")
        shutil.copy(tmp_path / "b" / "filled.index", tmp_path / "a" / "filled.index")
        with pytest.raises(ValueError, match=r"a/filled.index: has [\d,]+ rows of \d dimensions, of a gallery of 600"):
            approximate_recall_at_k(rows, labels, **options, folder=tmp_path / "a")
        shutil.rmtree(tmp_path / "b")


def test_a_full_disk_is_said_at_any_byte_and_the_next_call_goes_on(tmp_path, monkeypatch):
    rows, labels = clusters()
    options = {"ks": (1, 10), "index": "HNSW8", "folder": tmp_path / "index"}
    expected = approximate_recall_at_k(rows, labels, ks=(1, 10), index="HNSW8")
    with pytest.raises(OSError, match="No space left on device"):
        index_files.write_index(faiss.IndexFlatL2(4), Path("/dev/full"))
    write = index_files.write_index
    with monkeypatch.context() as patch:
        patch.setattr(index_module, "write_index", lambda index, path: write(index, Path("/dev/full")))
        with pytest.raises(OSError, match=r"No space left on device: '\S+trained.index'"):
            approximate_recall_at_k(rows, labels, **options)
    assert not list((tmp_path / "index").glob("*.index"))
    assert approximate_recall_at_k(rows, labels, **options).first_rank.tolist() == expected.first_rank.tolist()


def test_lists_are_not_merged_where_they_have_no_room(tmp_path, monkeypatch):
    rows, labels = clusters()
    options = {"ks": (1, 10), "index": "IVF8,Flat", "folder": tmp_path / "index"}
    with monkeypatch.context() as patch:
        patch.setattr(index_files.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 9, 0))
        with pytest.raises(OSError, match=r"merging the lists takes [\d,]+ bytes, and 0 are free: '\S+/index'"):
            approximate_recall_at_k(rows, labels, **options)
    assert approximate_recall_at_k(rows, labels, **options).exact is False


def test_a_folder_in_the_place_of_a_check_is_refused_and_left(tmp_path):
    rows, labels = clusters()
    options = {"ks": (1,), "index": "IVF8,Flat"}
    for name, check in (("a", 50), ("b", 20)):
        approximate_recall_at_k(rows, labels, **options, check=check, folder=tmp_path / name)
    (check,) = (path.name for path in (tmp_path / "a").glob("check-*"))
    (tmp_path / "b" / check).mkdir()
    (tmp_path / "b" / check / "part-000000").write_text("theirs")
    with pytest.raises(ValueError, match=rf"{check}: is there, but was not written by us"):
        approximate_recall_at_k(rows, labels, **options, check=50, folder=tmp_path / "b")
    assert [path.read_text() for path in (tmp_path / "b" / check).iterdir()] == ["theirs"]
