"""Recall@K and MAP@R against their definitions, one query and one item at a time."""

import importlib
import json
import logging
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rambo_plugins.evaluation import ExactKNN, RecallCalculator, RecallResult, recall_at_k
from rambo_plugins.evaluation import counting as counting_module
from rambo_plugins.evaluation import lists as lists_module
from rambo_plugins.evaluation import plan as plan_module
from rambo_plugins.evaluation import recall as recall_module
from rambo_plugins.evaluation import scores as scores_module
from rambo_plugins.evaluation import search as search_module


def oracle(query, query_labels, gallery, gallery_labels, ks, same, metric="inner_product", lone="exclude"):
    """The definitions, in loops over float64. ``same(q, g)``: gallery item g is query q itself."""
    ranks, optimistic_ranks, average_precisions, precisions, lone_queries = [], [], [], [], []
    for q in range(len(query)):
        others = [g for g in range(len(gallery)) if not same(q, g)]
        score = {}
        for g in others:
            a, b = np.asarray(query[q], float), np.asarray(gallery[g], float)
            score[g] = float(a @ b) if metric == "inner_product" else -float(((a - b) ** 2).sum())
        relevant = [g for g in others if gallery_labels[g] == query_labels[q]]
        irrelevant = [g for g in others if gallery_labels[g] != query_labels[q]]
        if not relevant:
            lone_queries.append(q)
            ranks.append(float("inf"))
            optimistic_ranks.append(float("inf"))
            average_precisions.append(0.0)
            precisions.append(0.0)
            continue
        best = max(score[g] for g in relevant)
        ranks.append(1 + sum(score[g] >= best for g in irrelevant))
        optimistic_ranks.append(1 + sum(score[g] > best for g in irrelevant))
        total, hits = 0.0, 0
        for plus, g in enumerate(sorted(relevant, key=lambda g: -score[g]), start=1):
            rank = plus + sum(score[h] >= score[g] for h in irrelevant)
            if rank <= len(relevant):
                total += plus / rank
                hits += 1
        average_precisions.append(total / len(relevant))
        precisions.append(hits / len(relevant))
    kept = [q for q in range(len(query)) if lone == "miss" or q not in lone_queries]

    def mean(values):
        return sum(values[q] for q in kept) / len(kept) if kept else float("nan")

    def seen(rank):
        return rank if rank <= max(ks) else 0

    return {
        "recall": {k: mean([rank <= k for rank in ranks]) for k in sorted(ks)},
        "recall_optimistic": {k: mean([rank <= k for rank in optimistic_ranks]) for k in sorted(ks)},
        "map_at_r": mean(average_precisions),
        "r_precision": mean(precisions),
        "first_rank": [seen(rank) for rank in ranks],
        "lone_queries": lone_queries,
        "num_tied": sum(seen(a) != seen(b) for a, b in zip(ranks, optimistic_ranks, strict=True)),
    }


def check(result, expected, map_at_r=True):
    for name in ("recall", "recall_optimistic"):
        figures = getattr(result, name)
        assert list(figures) == list(expected[name])
        assert list(figures.values()) == pytest.approx(list(expected[name].values()), nan_ok=True), name
    if map_at_r:
        assert result.map_at_r == pytest.approx(expected["map_at_r"], nan_ok=True)
        assert result.r_precision == pytest.approx(expected["r_precision"], nan_ok=True)
    else:
        assert result.map_at_r is None
        assert result.r_precision is None
    assert result.first_rank.tolist() == expected["first_rank"]
    assert result.lone_queries.tolist() == expected["lone_queries"]
    assert result.num_tied == expected["num_tied"]


@pytest.fixture
def searches(monkeypatch):
    """The shortest first lists; notes (queries, k) of every search."""
    calls = []
    nearest = lists_module.nearest
    monkeypatch.setattr(recall_module, "SPARE", 0)

    def noted(query, own, blocks, k, *rest, **options):
        calls.append((len(query), k))
        return nearest(query, own, blocks, k, *rest, **options)

    monkeypatch.setattr(lists_module, "nearest", noted)
    return calls


@st.composite
def small_integers(draw):
    """Embeddings of small integers: exact scores, many of them equal; classes of unequal size."""
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    dim, spread, classes = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 6))
    sizes = draw(st.integers(1, 12)), draw(st.integers(1, 24))
    rows = [rng.integers(-spread, spread + 1, (size, dim)) for size in sizes]
    labels = [np.minimum(rng.geometric(0.4, size), classes) for size in sizes]
    ks = draw(st.sets(st.integers(1, 40), min_size=1, max_size=3))
    metric, lone = draw(st.sampled_from(["inner_product", "l2"])), draw(st.sampled_from(["exclude", "miss"]))
    options = {"ks": ks, "metric": metric, "lone": lone}
    map_at_r = draw(st.booleans())
    how = {
        "map_at_r": map_at_r,
        "method": "search" if map_at_r else draw(st.sampled_from(["count", "search"])),
        "device": ["cpu"] * draw(st.integers(1, 3)),
    }
    return rng, rows, labels, options, how


def by_torch(query, items, k, metric):
    """What a GPU would do."""
    return search_module._by_torch(query, items, k, metric, torch.device("cpu"), torch.float32)


def small_blocks(patch, rng):
    """Parts of a few queries, blocks of a few items, short lists, matrix products for small classes too."""
    plan = plan_module.Plan(*(int(size) for size in rng.integers(1, 6, 3)))
    patch.setattr(recall_module, "make_plan", lambda *arguments: plan)
    patch.setattr(recall_module, "SPARE", 0)
    if rng.random() < 0.5:
        patch.setattr(search_module, "_by_faiss", by_torch)
        patch.setattr(search_module, "_SCORES", 8)
    for module in (counting_module, scores_module):
        patch.setattr(module, "PAIRS", 4)
    patch.setattr(counting_module, "_CLASS_PRODUCT", int(rng.integers(1, 12)))
    patch.setattr(counting_module, "_WIDE", int(rng.integers(1, 12)))
    patch.setattr(counting_module, "_DENSE", int(rng.choice([2, 10**9])))  # products in float64 at times, or always
    patch.setattr(lists_module, "WIDE_BLOCK", int(rng.integers(1, 6)))


@pytest.mark.parametrize("short", [True, False], ids=["small blocks", "default"])
@settings(max_examples=250, deadline=None)
@given(case=small_integers())
def test_queries_among_themselves(short, case):
    rng, (_, rows), (_, labels), options, how = case
    expected = oracle(rows, labels, rows, labels, same=lambda q, g: q == g, **options)
    with pytest.MonkeyPatch.context() as patch:
        if short:
            small_blocks(patch, rng)
        check(recall_at_k(rows, labels, **how, **options), expected, how["map_at_r"])


@pytest.mark.parametrize("short", [True, False], ids=["small blocks", "default"])
@settings(max_examples=250, deadline=None)
@given(case=small_integers())
def test_separate_gallery(short, case):
    rng, (query, gallery), (query_labels, gallery_labels), options, how = case
    expected = oracle(query, query_labels, gallery, gallery_labels, same=lambda q, g: False, **options)
    with pytest.MonkeyPatch.context() as patch:
        if short:
            small_blocks(patch, rng)
        result = recall_at_k(query, query_labels, gallery, gallery_labels, **how, **options)
    check(result, expected, how["map_at_r"])


@pytest.mark.parametrize("strings", [True, False], ids=["string ids", "integer ids"])
@settings(max_examples=150, deadline=None)
@given(case=small_integers())
def test_a_query_is_left_out_by_its_id_wherever_it_is(strings, case):
    rng, (query, gallery), (query_labels, gallery_labels), options, how = case
    gallery_ids = rng.permutation(10**12 + np.arange(len(gallery)))
    query_ids = 10**12 + rng.integers(0, len(gallery) + 4, len(query))  # some repeat, some are not in the gallery
    expected = oracle(
        query, query_labels, gallery, gallery_labels, same=lambda q, g: query_ids[q] == gallery_ids[g], **options
    )
    if strings:
        query_ids, gallery_ids = [f"image {i}" for i in query_ids], [f"image {i}" for i in gallery_ids]
    result = recall_at_k(
        query,
        query_labels,
        gallery,
        gallery_labels,
        query_ids=query_ids,
        gallery_ids=gallery_ids,
        **how,
        **options,
    )
    check(result, expected, how["map_at_r"])


def test_exact_duplicates_do_not_let_a_query_find_itself():
    """Pairs of identical images of different classes: a query that is not first in its own list is no hit."""
    rng = np.random.default_rng(0)
    half = rng.integers(-3, 4, (60, 8))
    rows = np.concatenate([half, half])
    labels = np.arange(120)  # every query is alone in its class ...
    labels[[0, 60]] = 0  # ... but for one pair
    result = recall_at_k(rows, labels, ks=(1, 5), lone="miss")
    assert result.recall[5] == pytest.approx(2 / 120)
    assert result.num_lone == 118


@pytest.mark.parametrize("count", [40, 1001, 5003])
@pytest.mark.parametrize("metric", ["inner_product", "l2"])
def test_a_collapsed_model_gets_the_worst_result_not_luck(count, metric):
    """Matrix products give identical rows scores that differ in the last bit, which is no order."""
    row = np.random.default_rng(1).standard_normal(128)
    rows = np.tile(row / np.linalg.norm(row), (count, 1))
    labels = np.arange(count) // 2
    queries = slice(0, 40)
    result = recall_at_k(
        rows[queries],
        labels[queries],
        rows,
        labels,
        ks=(1, 10, count - 2, count - 1),
        query_ids=np.arange(40),
        gallery_ids=np.arange(count),
        metric=metric,
        map_at_r=True,
    )
    assert result.recall == {1: 0.0, 10: 0.0, count - 2: 0.0, count - 1: 1.0}
    assert set(result.recall_optimistic.values()) == {1.0}
    assert result.map_at_r == 0
    assert result.num_tied == 40
    assert set(result.first_rank.tolist()) == {count - 1}


def test_identical_rows_tie_whatever_the_matrix_product_makes_of_them():
    """The same distinct rows in ever larger galleries: ranks against a score per distinct row, counted in float64."""
    rng = np.random.default_rng(2)
    distinct = rng.standard_normal((30, 100)).astype(np.float32)
    copies = rng.integers(0, 30, 3000)
    labels = np.where(rng.random(3000) < 0.2, copies % 3, 3 + np.arange(3000) % 7)
    result = recall_at_k(distinct[copies], labels, ks=(1, 10, 1000), map_at_r=True)
    score = distinct.astype(float) @ distinct.T.astype(float)
    for q in range(0, 3000, 10):
        mine = score[copies[q], copies]
        others = np.arange(3000) != q
        relevant = others & (labels == labels[q])
        rank = 1 + (mine[others & ~relevant] >= mine[relevant].max()).sum()
        assert result.first_rank[q] == (rank if rank <= 1000 else 0)


def test_short_lists_grow_until_the_tie_is_resolved(searches):
    rows = np.ones((50, 2))
    labels = np.arange(50) // 2
    check(
        recall_at_k(rows, labels, ks=(3,), map_at_r=True),
        oracle(rows, labels, rows, labels, (3,), same=lambda q, g: q == g),
    )
    assert [k for _, k in searches] == [3, 3, 12, 48, 50]


def test_without_ties_each_query_is_searched_once(searches, monkeypatch):
    monkeypatch.setattr(recall_module, "SPARE", 1)
    rows = np.random.default_rng(3).standard_normal((200, 16))
    recall_at_k(rows, np.arange(200) // 4, ks=(1, 10), map_at_r=True)
    assert searches[0] == (200, 11)
    assert sum(size for size, _ in searches[1:]) <= 5  # two scores closer than rounding, by chance


@pytest.mark.parametrize("metric", ["inner_product", "l2"])
@pytest.mark.parametrize("seed", range(10))
def test_the_fast_search_may_round_as_it_likes(seed, metric, monkeypatch):
    """Scores off by a few float32 epsilons, which separates and swaps equal ones, must not show in the figures."""
    rng = np.random.default_rng(seed)
    rows, labels = rng.integers(-2, 3, (40, 4)), rng.integers(0, 8, 40)
    largest = np.linalg.norm(rows, axis=1).max()
    nearest = lists_module.nearest

    def rounded(query, *rest):
        scores, found, longest = nearest(query, *rest)
        size = np.linalg.norm(query, axis=1, keepdims=True) * largest * np.finfo(scores.dtype).eps
        scores = scores + (size * rng.uniform(-3, 3, scores.shape)).astype(scores.dtype)
        order = np.argsort(-scores, axis=1)
        return np.take_along_axis(scores, order, 1), np.take_along_axis(found, order, 1), longest

    monkeypatch.setattr(lists_module, "nearest", rounded)
    expected = oracle(rows, labels, rows, labels, (1, 2, 5), metric=metric, same=lambda q, g: q == g)
    for spare in (8, 0):
        monkeypatch.setattr(recall_module, "SPARE", spare)
        check(recall_at_k(rows, labels, ks=(1, 2, 5), metric=metric, map_at_r=True), expected)
        check(recall_at_k(rows, labels, ks=(1, 2, 5), metric=metric, method="search"), expected, map_at_r=False)


@pytest.mark.parametrize("metric", ["inner_product", "l2"])
@pytest.mark.parametrize("seed", range(10))
def test_the_product_of_counting_may_round_as_it_likes(seed, metric, monkeypatch):
    rng = np.random.default_rng(seed)
    rows, labels = rng.integers(-2, 3, (40, 4)), rng.integers(0, 8, 40)
    product = counting_module.product

    def rounded(query, items, out=None):
        scores = product(query, items, out=out)
        off = torch.from_numpy(rng.uniform(-3, 3, scores.shape).astype(np.float32)) * 2**-23
        return scores.add_(off * query.norm(dim=1, keepdim=True) * items[0].norm(dim=0))

    monkeypatch.setattr(counting_module, "product", rounded)
    monkeypatch.setattr(counting_module, "_CLASS_PRODUCT", 4)
    fine = np.stack([np.ones(40), 2.0 ** -rng.integers(10, 14, 40)], axis=1).astype(np.float32)
    query = np.array([[1, 2.0**-20]], dtype=np.float32)  # scores 1 + 2^-30 and so on, all 1 in float32
    found = recall_at_k(query, labels[:1], fine, labels, ks=(40,), metric=metric)
    same = oracle(query, labels[:1], fine, labels, (40,), metric=metric, same=lambda q, g: False)
    check(found, same, map_at_r=False)
    expected = oracle(rows, labels, rows, labels, (1, 2, 5), metric=metric, same=lambda q, g: q == g)
    check(recall_at_k(rows, labels, ks=(1, 2, 5), metric=metric), expected, map_at_r=False)


@pytest.mark.parametrize("best_irrelevant", [2.0**-30, 0.0])
def test_what_rounding_kept_out_of_a_list_counts_and_what_it_let_in_does_not(best_irrelevant, monkeypatch):
    """Scores 1 + c 2^-20, in float64 as good as 1; the list has the relevant item and a worse one, not the third."""
    query = np.array([[1, 2.0**-20]], dtype=np.float32)
    gallery = np.array([[1, 2.0**-31], [1, 2.0**-32], [1, best_irrelevant]], dtype=np.float32)
    labels = np.array([7, 8, 8])
    nearest, searches = lists_module.nearest, []

    def by_row(query, own, blocks, k, *rest):
        searches.append(k)
        scores, found, longest = nearest(query, own, blocks, len(gallery), *rest)
        order = np.argsort(found, axis=1)[:, :k]
        return np.take_along_axis(scores, order, 1), np.take_along_axis(found, order, 1), longest

    monkeypatch.setattr(lists_module, "nearest", by_row)
    monkeypatch.setattr(recall_module, "SPARE", 1)
    result = recall_at_k(query, labels[:1], gallery, labels, ks=(1,), method="search")
    assert searches == [2, 2, 3]
    expected = oracle(query, labels[:1], gallery, labels, (1,), same=lambda q, g: False)
    check(result, expected, map_at_r=False)
    assert result.first_rank.tolist() == [0 if best_irrelevant else 1]


@pytest.mark.parametrize("metric", ["inner_product", "l2"])
@pytest.mark.parametrize("classes", [2, 60])
@pytest.mark.parametrize("noise", [1e-3, 1e-5])
def test_a_nearly_collapsed_model_is_decided_in_float64(noise, classes, metric, monkeypatch):
    """Scores that differ by less than float32 can tell; some rows are the same."""
    rng = np.random.default_rng(5)
    rows = (np.ones(32) + noise * rng.standard_normal((300, 32))).astype(np.float32)
    rows[rng.integers(0, 300, 40)] = rows[rng.integers(0, 300, 40)]
    labels = rng.integers(0, classes, 300)
    pairs, scores = [], scores_module._wide_scores
    monkeypatch.setattr(scores_module, "_wide_scores", lambda q, *more: [pairs.append(len(q)), scores(q, *more)][1])
    expected = oracle(rows, labels, rows, labels, (1, 5), metric=metric, same=lambda q, g: q == g)
    assert expected["num_tied"] > 0
    monkeypatch.setattr(counting_module, "_CLASS_PRODUCT", 1)
    check(recall_at_k(rows, labels, ks=(1, 5), metric=metric), expected, map_at_r=False)
    assert sum(pairs) < 300 * 299 / 4  # and not every pair by itself
    monkeypatch.setattr(counting_module, "_CLASS_PRODUCT", 10**6)
    check(recall_at_k(rows, labels, ks=(1, 5), metric=metric), expected, map_at_r=False)
    check(recall_at_k(rows, labels, ks=(1, 5), metric=metric, map_at_r=True), expected)


def test_labels_beyond_float32_stay_apart():
    labels = 2**24 + np.array([0, 1, 0, 1])
    rows = np.array([[1.0, 0.0], [0.99, 0.1], [0.0, 1.0], [0.1, 0.99]])
    assert np.float32(labels[0]) == np.float32(labels[1])
    assert recall_at_k(rows, labels, ks=(1, 3)).recall == {1: 0.0, 3: 1.0}
    assert recall_at_k(rows, torch.tensor(labels) + 2**60, ks=(1, 3)).recall == {1: 0.0, 3: 1.0}


@pytest.mark.parametrize(
    "convert", [list, np.array, lambda x: np.array(x, dtype=object)], ids=["list", "str", "object"]
)
def test_labels_can_be_strings(convert):
    rng = np.random.default_rng(4)
    rows, numbers = rng.integers(-2, 3, (30, 3)), rng.integers(0, 5, 30)
    result = recall_at_k(rows, convert([f"class {n}" for n in numbers]), ks=(1, 4), map_at_r=True)
    check(result, oracle(rows, numbers, rows, numbers, (1, 4), same=lambda q, g: q == g))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int64])
def test_tensors_of_any_dtype_give_what_the_array_gives(dtype):
    rng = np.random.default_rng(5)
    rows, labels = rng.integers(-3, 4, (40, 4)), rng.integers(0, 8, 40)
    tensor = torch.tensor(rows, dtype=dtype, requires_grad=dtype.is_floating_point)
    result = recall_at_k(tensor, torch.tensor(labels, dtype=torch.int32), ks=(1, 3), map_at_r=True)
    check(result, oracle(rows, labels, rows, labels, (1, 3), same=lambda q, g: q == g))


def test_normalize_ranks_by_cosine_and_leaves_the_callers_array_alone():
    rows = np.array([[1, 0], [2, 0.2], [0, 100], [50, 30]], dtype=np.float32)
    before, labels = rows.copy(), [0, 0, 1, 1]
    assert recall_at_k(rows, labels, ks=(1,)).first_rank.tolist() == [0, 0, 1, 1]
    assert recall_at_k(rows, labels, ks=(1,), normalize=True).first_rank.tolist() == [1, 1, 1, 0]
    np.testing.assert_array_equal(rows, before)
    recall_at_k(np.zeros((4, 2)), labels, ks=(1,), normalize=True)  # no direction: no NaN


def test_lone_queries_are_left_out_or_missed_and_logged(caplog):
    rows, labels = np.eye(3)[[0, 0, 1, 2]], [5, 5, 6, 7]
    with caplog.at_level(logging.WARNING, "rambo_plugins"):
        result = recall_at_k(rows, labels, ks=(1,), map_at_r=True)
    assert "2 of 4 queries have no relevant item in the gallery (rows 2, 3)" in caplog.text
    assert (result.recall[1], result.map_at_r, result.num_lone) == (1.0, 1.0, 2)
    assert result.lone_queries.tolist() == [2, 3]
    result = recall_at_k(rows, labels, ks=(1,), map_at_r=True, lone="miss")
    assert (result.recall[1], result.recall_optimistic[1], result.map_at_r, result.num_lone) == (0.5, 0.5, 0.5, 2)


def test_no_query_to_average_over_is_nan_with_a_warning(caplog):
    result = recall_at_k([[1.0, 2.0]], [3], ks=(1, 2), map_at_r=True)
    assert np.isnan([*result.recall.values(), *result.recall_optimistic.values(), result.map_at_r]).all()
    assert "no query is left to average over" in caplog.text
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["recall"] == {"1": None, "2": None}
    assert recall_at_k([[1.0, 2.0]], [3], ks=(1,), lone="miss").recall == {1: 0.0}


def test_one_query_against_one_item():
    assert recall_at_k([[1.0]], [3], [[2.0]], [3], ks=(1, 7)).recall == {1: 1.0, 7: 1.0}
    assert recall_at_k([[1.0]], [3], [[2.0]], [3], ks=(1,), query_ids=["a"], gallery_ids=["a"]).num_lone == 1


def test_the_result_reads_and_serialises():
    result = recall_at_k(np.eye(4)[[0, 0, 1, 1]], [0, 0, 1, 1], ks=[10, 1, 10], map_at_r=True)
    assert isinstance(result, RecallResult)
    assert (result.ks, result.backend, result.exact, result.num_queries, result.num_gallery) == (
        (1, 10),
        "lists, cpu",
        True,
        4,
        4,
    )
    assert str(result).startswith(
        "R@1 100.00  R@10 100.00  MAP@R 100.00  (%; 4 queries, 4 in the gallery, 0 lone, 0 tied"
    )
    assert json.loads(json.dumps(result.to_dict())) == result.to_dict()
    assert result.first_rank.dtype == result.lone_queries.dtype == np.int64


def test_progress_shows_every_pair(capsys):
    recall_at_k(np.ones((12, 2)), np.arange(12) // 3, ks=(1,), progress=True)
    assert "144/144" in capsys.readouterr().err


GOOD = {"query": np.eye(3), "query_labels": [0, 0, 1]}
GALLERY = {"gallery": np.eye(3), "gallery_labels": [0, 0, 1]}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"query": np.ones(3)}, ValueError, r"query: expected embeddings of shape \(N, D\), got shape \(3,\)"),
        ({"query": np.ones((3, 2), complex)}, TypeError, "query: expected real numbers, got dtype complex128"),
        ({"query": np.empty((0, 3)), "query_labels": []}, ValueError, "query: expected at least one embedding"),
        ({**GALLERY, "gallery": np.empty((0, 3))}, ValueError, "gallery: expected at least one embedding"),
        ({**GALLERY, "gallery": np.ones((3, 2))}, ValueError, r"the same D, got shapes \(3, 3\) and \(3, 2\)"),
        ({"query": [[1, np.nan], [1, 2], [np.inf, 1]]}, ValueError, r"query: 2 of 3 rows have NaN.*at \[0, 2\]"),
        ({"query": np.full((3, 2), 1e300)}, ValueError, "query: 3 of 3 rows have NaN or inf as float32"),
        ({"query": np.full((3, 2), 1e30)}, ValueError, "overflow float32"),
        (
            {"query": np.full((3, 2), 1e30), "metric": "l2", **GALLERY, "gallery": -np.full((3, 2), 1e30)},
            ValueError,
            "ov",
        ),
        ({"query_labels": [0, 1]}, ValueError, "query_labels: expected one entry for each of the 3 embeddings, got 2"),
        ({"query_labels": [[0], [0], [1]]}, ValueError, r"query_labels: expected shape \(N,\), got shape \(3, 1\)"),
        ({"query_labels": [0.0, 0.0, 1.0]}, TypeError, "query_labels: expected integers or strings, got dtype float64"),
        ({"query_labels": torch.zeros(3)}, TypeError, "query_labels: expected integers or strings, got dtype torch.fl"),
        ({"query_labels": np.full(3, 2**64 - 1, np.uint64)}, ValueError, "expected integers that fit int64"),
        ({**GALLERY, "gallery_labels": ["a", "b", "c"]}, TypeError, "expected both integers or both strings"),
        ({"gallery": np.eye(3)}, ValueError, "gallery: expected gallery_labels with it, got None"),
        ({"gallery_labels": [0, 0, 1]}, ValueError, "go with a gallery, but gallery is None"),
        ({"query_ids": [0, 1, 2]}, ValueError, "go with a gallery, but gallery is None"),
        ({**GALLERY, "query_ids": [0, 1, 2]}, ValueError, "got query_ids without gallery_ids"),
        ({**GALLERY, "gallery_ids": [0, 1, 2]}, ValueError, "got gallery_ids without query_ids"),
        ({**GALLERY, "query_ids": [0, 1, 2], "gallery_ids": [4, 4, 2]}, ValueError, r"each id once, got \[4, 4\]"),
        ({**GALLERY, "query_ids": [0, 1, 2], "gallery_ids": ["0", "1", "2"]}, TypeError, "query_ids and gallery_ids"),
        ({"metric": "cosine"}, ValueError, "metric: expected one of 'inner_product', 'l2', got 'cosine'"),
        ({"lone": "drop"}, ValueError, "lone: expected one of 'exclude', 'miss', got 'drop'"),
        ({"ks": ()}, ValueError, "ks: expected one or more positive integers"),
        ({"ks": (1, 0)}, ValueError, r"ks: expected one or more positive integers, got \(1, 0\)"),
        ({"ks": (1.5,)}, ValueError, "ks: expected one or more positive integers"),
        ({"ks": 5}, TypeError, "ks: expected a sequence of positive integers, got 5"),
    ],
)
def test_errors_say_what_came_and_what_was_expected(arguments, error, message):
    with pytest.raises(error, match=message):
        recall_at_k(**{**GOOD, **arguments})


def test_a_missing_tqdm_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match="pip install tqdm"):
        recall_at_k(**GOOD, progress=True)


def test_a_missing_faiss_says_how_to_install_it(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("rambo_plugins.evaluation")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        ImportError, match=r'rambo_plugins.evaluation needs faiss: pip install "rambo-plugins\[faiss-cpu\]"'
    ):
        importlib.import_module("rambo_plugins.evaluation")


# pytorch-metric-learning


def clusters(seed, count, classes, dim=16):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, count)
    rows = np.random.default_rng(99).standard_normal((classes, dim))[labels] + 1.5 * rng.standard_normal((count, dim))
    return torch.tensor(rows / np.linalg.norm(rows, axis=1, keepdims=True), dtype=torch.float32), torch.tensor(labels)


def pml_calculator():
    accuracy_calculator = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    return accuracy_calculator.AccuracyCalculator(
        include=("precision_at_1", "mean_average_precision_at_r"), device=torch.device("cpu")
    )


def test_figures_equal_those_of_pytorch_metric_learning():
    rows, labels = clusters(0, 300, 12)
    gallery, gallery_labels = clusters(1, 500, 12)
    both, both_labels = torch.cat([rows, gallery]), torch.cat([labels, gallery_labels])
    for arguments in [
        (rows, labels),
        (rows, labels, gallery, gallery_labels, False),
        (rows, labels, both, both_labels, True),
    ]:
        theirs = pml_calculator().get_accuracy(*arguments)
        ours = RecallCalculator(ks=(1, 5)).get_accuracy(*arguments)
        assert 0.1 < ours["recall_at_1"] < 0.9
        assert ours["recall_at_1"] == pytest.approx(theirs["precision_at_1"])
        assert ours["mean_average_precision_at_r"] == pytest.approx(theirs["mean_average_precision_at_r"])


@pytest.mark.parametrize("splits", [None, [("query", ["gallery"])], [("query", ["gallery", "query"])]])
def test_works_in_a_tester(splits):
    testers = pytest.importorskip("pytorch_metric_learning.testers")
    data = {"query": clusters(0, 60, 5), "gallery": clusters(1, 90, 5)}
    data_sets = {name: torch.utils.data.TensorDataset(rows, labels) for name, (rows, labels) in data.items()}
    figures = {}
    for calculator in (RecallCalculator(ks=(1, 10)), pml_calculator()):
        tester = testers.GlobalEmbeddingSpaceTester(
            accuracy_calculator=calculator, dataloader_num_workers=0, data_device=torch.device("cpu")
        )
        figures[type(calculator)] = tester.test(data_sets, 1, torch.nn.Identity(), splits_to_eval=splits)
        assert tester.description_suffixes("accuracies").endswith(calculator.description())
    ours, theirs = figures.values()
    assert ours.keys() == theirs.keys() == ({"query", "gallery"} if splits is None else {"query"})
    for split, found in ours.items():
        assert found.keys() == {
            "epoch",
            "recall_at_1_level0",
            "recall_at_10_level0",
            "mean_average_precision_at_r_level0",
        }
        assert found["recall_at_1_level0"] == pytest.approx(theirs[split]["precision_at_1_level0"])
        assert found["mean_average_precision_at_r_level0"] == pytest.approx(
            theirs[split]["mean_average_precision_at_r_level0"]
        )


def test_a_tester_averages_over_label_levels():
    testers = pytest.importorskip("pytorch_metric_learning.testers")
    rows, labels = clusters(0, 60, 6)
    data = torch.utils.data.TensorDataset(rows, torch.stack([labels, labels // 2], dim=1))
    tester = testers.GlobalEmbeddingSpaceTester(
        accuracy_calculator=RecallCalculator(ks=(1,)),
        label_hierarchy_level="all",
        dataloader_num_workers=0,
        data_device=torch.device("cpu"),
    )
    found = tester.test({"val": data}, 1, torch.nn.Identity())["val"]
    mean = (found["recall_at_1_level0"] + found["recall_at_1_level1"]) / 2
    assert found["AVERAGE_recall_at_1"] == pytest.approx(mean)


def test_the_calculator_selects_names():
    rows, labels = clusters(0, 30, 3)
    calculator = RecallCalculator(ks=(4, 1))
    assert calculator.get_curr_metrics() == ["recall_at_1", "recall_at_4", "mean_average_precision_at_r"]
    assert list(calculator.get_accuracy(rows, labels, include=("recall_at_4",))) == ["recall_at_4"]
    assert calculator.result.map_at_r is None
    assert list(calculator.get_accuracy(rows, labels, exclude=("recall_at_4",))) == [
        "recall_at_1",
        "mean_average_precision_at_r",
    ]
    assert RecallCalculator(ks=(1,), map_at_r=False).get_curr_metrics() == ["recall_at_1"]
    with pytest.raises(ValueError, match=r"include and exclude: expected one of 'recall_at_1'.*got 'NMI'"):
        calculator.get_accuracy(rows, labels, include=("NMI",))
    with pytest.raises(ValueError, match="ks: expected"):
        RecallCalculator(ks=(0,))
    with pytest.raises(ValueError, match="metric: expected"):
        RecallCalculator(metric="cos")


def test_the_calculator_passes_memory_and_devices_on():
    rows, labels = clusters(0, 30, 3)
    calculator = RecallCalculator(ks=(1,), map_at_r=False, max_memory="2M", device=["cpu", "cpu"])
    calculator.get_accuracy(rows, labels)
    assert calculator.result.backend == "counting, cpu, cpu"
    with pytest.raises(ValueError, match="max_memory: 100 bytes are too little"):
        RecallCalculator(max_memory=100).get_accuracy(rows, labels)
    with pytest.raises(ValueError, match="max_memory: expected bytes"):
        RecallCalculator(max_memory="much")
    with pytest.raises(ValueError, match="device: expected"):
        RecallCalculator(device="abacus")


@pytest.mark.parametrize("wrong", ["rows", "labels", "length"])
def test_the_calculator_wants_the_queries_first_in_the_reference(wrong):
    rows, labels = clusters(0, 30, 3)
    reference, reference_labels = rows.clone(), labels.clone()
    if wrong == "rows":
        reference = rows.flip(0)
    elif wrong == "labels":
        reference_labels = labels.flip(0)
    else:
        reference, reference_labels = rows[:20], labels[:20]
    with pytest.raises(ValueError, match="ref_includes_query: expected the first 30 rows"):
        RecallCalculator().get_accuracy(rows, labels, reference, reference_labels, True)


# --- what does not fit into memory, several devices, samples, interruptions -------------------------------------------


def random_case(num=3000, dim=24, seed=6):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num // 5, num)
    centres = rng.standard_normal((num // 5, dim))
    return (centres[labels] + rng.standard_normal((num, dim))).astype(np.float32), labels


def brute_force(rows, labels, queries):
    """Rank of the first relevant item of each query, by sorting all scores in float64."""
    ranks = []
    for q in queries:
        score = rows.astype(np.float64) @ rows[q].astype(np.float64)
        others = np.arange(len(rows)) != q
        relevant = others & (labels == labels[q])
        ranks.append(1 + int((score[others & ~relevant] >= score[relevant].max()).sum()) if relevant.any() else 0)
    return ranks


class Blocks:
    """Batches of unequal size, as a data loader gives them; iterated anew each time."""

    def __init__(self, rows, tensors):
        self.rows, self.tensors = rows, tensors

    def __iter__(self):
        for block in np.array_split(self.rows, [5, 700, 701, 2500]):
            yield torch.from_numpy(block.copy()) if self.tensors else block


@pytest.mark.parametrize("method", ["count", "search"])
@pytest.mark.parametrize("kind", ["array", "memory map", "slice of a map", "list of blocks", "loader", "tensors"])
def test_embeddings_may_come_in_any_form(tmp_path, method, kind):
    rows, labels = random_case()
    np.save(tmp_path / "rows.npy", np.concatenate([rows[:100], rows]))
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    np.save(tmp_path / "exact.npy", rows)
    values = {
        "array": rows,
        "memory map": np.load(tmp_path / "exact.npy", mmap_mode="r"),
        "slice of a map": mapped[100:],
        "list of blocks": list(Blocks(rows, tensors=False)),
        "loader": Blocks(rows, tensors=False),
        "tensors": Blocks(rows, tensors=True),
    }[kind]
    options = {"ks": (1, 10, 3000), "method": method, "max_memory": "6M" if method == "count" else "512M"}
    result = recall_at_k(values, labels, **options)
    assert result.first_rank.tolist() == brute_force(rows, labels, range(3000))
    apart = recall_at_k(rows[:50], labels[:50], values, labels, query_ids=np.arange(50), gallery_ids=np.arange(3000),
                        **options)  # fmt: skip
    assert apart.first_rank.tolist() == result.first_rank[:50].tolist()


def test_normalized_blocks_are_the_normalized_array():
    rows, labels = random_case(600)
    expected = recall_at_k(rows, labels, normalize=True)
    found = recall_at_k(Blocks(rows, tensors=False), labels, normalize=True)
    assert found.first_rank.tolist() == expected.first_rank.tolist()


def test_what_is_wrong_with_blocks_is_said():
    rows, labels = random_case(600)
    cases = [
        ((block for block in [rows]), TypeError, "more than once .*, got generator"),
        ([rows[:5], rows[5:], rows[:1]], ValueError, "expected 600 rows in all blocks, as labels, got more"),
        ([rows[:5]], ValueError, "expected 600 rows in all blocks, as labels, got 5"),
        ([rows[:5], rows[5:, :3]], ValueError, r"blocks of 24 dimensions as the first, got shape \(595, 3\)"),
        (
            [rows[:5], np.full((595, 24), np.nan)],
            ValueError,
            r"595 of 595 rows have NaN or inf .* first at \[5, 6, 7",
        ),
    ]
    for values, error, message in cases:
        with pytest.raises(error, match=message):
            recall_at_k(values, labels)


def test_nan_in_a_memory_map_is_found_before_anything_is_returned(tmp_path):
    rows, labels = random_case(600)
    rows[571] = np.nan
    np.save(tmp_path / "rows.npy", rows)
    with pytest.raises(ValueError, match=r"1 of \d+ rows have NaN or inf as float32, the first at \[571\]"):
        recall_at_k(np.load(tmp_path / "rows.npy", mmap_mode="r"), labels, max_memory="2M")


def test_what_was_written_to_a_private_map_stays_there(tmp_path):
    rows, labels = random_case(600)
    np.save(tmp_path / "rows.npy", np.zeros_like(rows))
    private = np.load(tmp_path / "rows.npy", mmap_mode="c")
    private[:] = rows
    readable = private[:]
    readable.flags.writeable = False
    for values in (private, readable):
        found = recall_at_k(values, labels, ks=(600,))
        assert found.first_rank.tolist() == brute_force(rows, labels, range(600))
        np.testing.assert_array_equal(private, rows)


def test_memory_that_is_too_small_says_what_is_needed():
    rows, labels = random_case()
    with pytest.raises(ValueError, match=r"max_memory: 200,000 bytes are too little for 6,000 labels .* are needed"):
        recall_at_k(rows, labels, max_memory=200_000)
    for wrong in ("4 Gigabytes", "many", True):
        with pytest.raises(ValueError, match="max_memory: expected bytes"):
            recall_at_k(rows, labels, max_memory=wrong)
    assert [plan_module.parse_bytes(text) for text in (1000, "1000", "1.5K", "2 GiB", "3mb")] == [
        1000, 1000, 1536, 2 * 2**30, 3 * 2**20,
    ]  # fmt: skip


def test_a_collapsed_model_counts_distinct_rows_once(monkeypatch):
    """Some identical rows in large numbers: the path that scores each pair of distinct rows once."""
    rng = np.random.default_rng(8)
    distinct = rng.standard_normal((3, 100)).astype(np.float32)
    rows, labels = distinct[rng.integers(0, 3, 2000)], np.arange(2000) // 4
    for module in (counting_module, scores_module):
        monkeypatch.setattr(module, "PAIRS", 64)
    result = recall_at_k(rows, labels, ks=(1, 2000), lone="miss", max_memory="12M")
    queries = range(0, 2000, 40)
    distinct_scores = distinct.astype(np.float64) @ distinct.astype(np.float64).T
    kind = np.array([np.flatnonzero((distinct == row).all(axis=1))[0] for row in rows])
    for q in queries:
        score, others = distinct_scores[kind[q], kind], np.arange(2000) != q
        relevant = others & (labels == labels[q])
        assert result.first_rank[q] == 1 + (score[others & ~relevant] >= score[relevant].max()).sum()


def test_several_devices_share_the_gallery():
    rows, labels = random_case()
    expected = brute_force(rows, labels, range(0, 3000, 7))
    for devices in ("cpu", ["cpu", "cpu"], [torch.device("cpu")] * 3):
        found = recall_at_k(rows, labels, ks=(3000,), device=devices, max_memory="6M")
        assert found.first_rank[::7].tolist() == expected
        lists = recall_at_k(rows, labels, ks=(3000,), device=devices, method="search", max_memory="1G")
        assert lists.first_rank[::7].tolist() == expected
    assert found.backend == "counting, cpu, cpu, cpu"
    assert lists.backend == "lists, cpu, cpu, cpu"
    with pytest.raises(ValueError, match="device: expected 'cpu', 'cuda'"):
        recall_at_k(rows, labels, device="abacus")
    with pytest.raises(ValueError, match="device: meta cannot be used here"):
        recall_at_k(rows, labels, device="meta")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("metric", ["inner_product", "l2"])
@pytest.mark.parametrize("method", ["count", "search"])
def test_a_gpu_finds_the_same(method, metric, monkeypatch):
    rows, labels = random_case(400)
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    expected = oracle(rows, labels, rows, labels, (1, 400), metric=metric, same=lambda q, g: q == g)
    found = recall_at_k(rows, labels, ks=(1, 400), metric=metric, method=method, map_at_r=method == "search")
    assert "cuda" in found.backend
    check(found, expected, map_at_r=method == "search")


@pytest.mark.parametrize("method", ["count", "search"])
def test_a_device_out_of_memory_halves_the_queries_at_a_time_and_says_so(method, monkeypatch, caplog):
    rows, labels = random_case()
    product = counting_module.product

    def small(query, items, out=None):
        if len(query) > 100:
            raise torch.cuda.OutOfMemoryError("no room")
        return product(query, items, out=out)

    for module in (counting_module, search_module):
        monkeypatch.setattr(module, "product", small)
    monkeypatch.setattr(search_module, "_by_faiss", by_torch)
    monkeypatch.setattr(search_module, "_SCORES", 4096 * 3000)
    with caplog.at_level(logging.WARNING, "rambo_plugins"):
        found = recall_at_k(rows, labels, ks=(3000,), method=method, max_memory="1G")
    assert "cpu is out of memory: going on with 64 queries at a time" in caplog.text
    assert found.first_rank[::7].tolist() == brute_force(rows, labels, range(0, 3000, 7))


class Table:
    """As much of a data frame as an array is made of."""

    columns = ("f0", "f1", "label")

    def __array__(self, dtype=None, copy=None):
        return np.eye(4, 3, dtype=dtype)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (Table(), "got a table with the columns f0, f1, label; pass those of the vector"),
        (np.ma.masked_less(np.eye(4, 3), 0.5), "expected an array without a mask"),
        (torch.eye(4, dtype=torch.complex64), "a dense tensor of real numbers, got torch.complex64"),
        (torch.eye(4, dtype=torch.bool), "got torch.bool"),
        (torch.eye(4).to_sparse(), "got torch.float32, torch.sparse_coo"),
        (torch.quantize_per_tensor(torch.eye(4), 0.1, 0, torch.qint8), "got torch.qint8"),
    ],
    ids=["table", "mask", "complex", "bool", "sparse", "quantized"],
)
def test_embeddings_that_would_be_read_otherwise_than_they_are_meant_are_refused(rows, message):
    with pytest.raises(TypeError, match=message):
        recall_at_k(rows, [0, 0, 1, 1])


@pytest.mark.parametrize("digits", [8, 11])
@pytest.mark.parametrize("method", ["count", "search"])
def test_products_of_fewer_digits_are_refused(method, digits, monkeypatch):
    """TF32 and bfloat16, which an environment variable can force on a process."""
    rows, labels = random_case(600)
    mm = torch.mm

    def short(a, b, **options):
        fraction, exponent = torch.frexp(a)
        return mm(torch.ldexp((fraction * 2**digits).round() / 2**digits, exponent), b, **options)

    monkeypatch.setattr(torch, "mm", short)
    with pytest.raises(RuntimeError, match="cpu: expected products of float32 numbers, got ones of fewer digits"):
        recall_at_k(rows, labels, method=method)


def test_a_failure_in_the_exact_stage_that_is_repeated_counts_nothing_twice(monkeypatch):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((40, 8)).astype(np.float32)[rng.integers(0, 40, 600)]
    labels = rng.integers(0, 50, 600)
    expected = oracle(rows, labels, rows, labels, (1, 600), same=lambda q, g: q == g)
    count, calls = counting_module._Counter._count_close, []

    def fails(self, *rest):
        calls.append(1)
        if len(calls) in (5, 40, 90):
            raise torch.cuda.OutOfMemoryError("no room")
        return count(self, *rest)

    monkeypatch.setattr(counting_module._Counter, "_count_close", fails)
    for devices in ("cpu", ["cpu", "cpu"]):
        calls.clear()
        check(recall_at_k(rows, labels, ks=(1, 600), device=devices), expected, map_at_r=False)
        assert len(calls) > 600


@pytest.mark.parametrize("method", ["count", "search"])
def test_low_precision_that_the_caller_allows_stays_outside(method, monkeypatch):
    rows, labels = random_case(600)
    expected = brute_force(rows, labels, range(600))
    before, product, seen = torch.get_float32_matmul_precision(), counting_module.product, set()

    def noted(*arguments, **options):
        seen.add(torch.get_float32_matmul_precision() if old else torch.backends.mkldnn.matmul.fp32_precision)
        return product(*arguments, **options)

    old = not hasattr(torch.backends.cuda.matmul, "fp32_precision")
    for module in (counting_module, search_module):
        monkeypatch.setattr(module, "product", noted)
    monkeypatch.setattr(counting_module, "_CLASS_PRODUCT", 1)
    monkeypatch.setattr(search_module, "_by_faiss", by_torch)
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = recall_at_k(rows, labels, ks=(600,), method=method)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == {"highest" if old else "ieee"}
    assert found.first_rank.tolist() == expected


def test_the_default_dtype_of_torch_does_not_matter():
    rows, labels = random_case(600)
    torch.set_default_dtype(torch.float64)
    try:
        found = [recall_at_k(rows, labels, ks=(600,), method=method) for method in ("count", "search")]
    finally:
        torch.set_default_dtype(torch.float32)
    for one in found:
        assert one.first_rank.tolist() == brute_force(rows, labels, range(600))


def test_a_sample_of_the_queries_has_an_interval():
    rows, labels = random_case()
    whole = recall_at_k(rows, labels, ks=(1, 10))
    part = recall_at_k(rows, labels, ks=(1, 10), sample=500, seed=3)
    ranks = np.array(brute_force(rows, labels, range(3000)))
    searched = np.flatnonzero(part.first_rank)
    np.testing.assert_array_equal(part.first_rank[searched], ranks[searched])
    assert (part.num_sampled, part.num_queries) == (500, 3000)
    assert part.num_averaged == 500 - part.num_lone
    for k in (1, 10):
        low, high = part.interval[k]
        assert low < part.recall[k] < high
        assert 0.02 < high - low < 0.1
    again = recall_at_k(rows, labels, ks=(1, 10), sample=500, seed=4)
    assert again.first_rank.tolist() != part.first_rank.tolist()
    covered = 0
    for seed in range(40):
        low, high = recall_at_k(rows, labels, ks=(1,), sample=300, seed=seed).interval[1]
        covered += low <= whole.recall[1] <= high
    assert covered >= 34  # of 40, 38 expected
    assert "500 sampled of 3,000 queries" in str(part)
    with pytest.raises(ValueError, match="sample: expected a positive number of queries, got 0"):
        recall_at_k(rows, labels, sample=0)


def test_the_interval_is_the_one_of_wilson():
    scipy_stats = pytest.importorskip("scipy.stats")
    rows, labels = random_case(600)
    result = recall_at_k(rows, labels, ks=(1, 600))
    for k in (1, 600):
        hits = round(result.recall[k] * result.num_averaged)
        expected = scipy_stats.binomtest(hits, result.num_averaged).proportion_ci(0.95, method="wilson")
        assert result.interval[k] == pytest.approx((expected.low, expected.high))


@pytest.mark.parametrize("map_at_r", [False, True])
def test_finished_parts_are_not_done_again(tmp_path, monkeypatch, map_at_r):
    rows, labels = random_case()
    monkeypatch.setattr(plan_module, "PART", 1)  # 1,024 queries a part
    work, name = tmp_path / "work", "_search" if map_at_r else "_count"
    options = {"ks": (1, 10), "map_at_r": map_at_r}
    expected = recall_at_k(rows, labels, **options)
    step, done = getattr(recall_module, name), []

    def interrupted(problem, at, *rest):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(len(at))
        return step(problem, at, *rest)

    monkeypatch.setattr(recall_module, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        recall_at_k(rows, labels, work=work, **options)
    done.clear()
    result = recall_at_k(rows, labels, work=work, **options)
    assert len(done) == 1
    assert result.first_rank.tolist() == expected.first_rank.tolist()
    assert (result.recall, result.map_at_r) == (expected.recall, expected.map_at_r)
    with pytest.raises(ValueError, match=r"holds parts of another evaluation, which differs in query, gallery"):
        recall_at_k(rows + 1, labels, work=work, **options)
    with pytest.raises(ValueError, match=r"which differs in labels and ids"):
        recall_at_k(rows, np.roll(labels, 1), work=work, **options)
    with pytest.raises(ValueError, match=r"which differs in largest K"):
        recall_at_k(rows, labels, work=work, **{**options, "ks": (5,)})


def test_map_at_r_takes_lists():
    with pytest.raises(ValueError, match="method: expected 'search' or 'auto' with map_at_r, got 'count'"):
        recall_at_k(np.eye(3), [0, 0, 1], map_at_r=True, method="count")


# --- lists of neighbours ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", ["inner_product", "l2"])
@pytest.mark.parametrize("own", [True, False], ids=["among themselves", "separate"])
def test_the_knn_func_finds_what_a_sort_finds(own, metric, monkeypatch):
    monkeypatch.setattr(search_module, "_SCORES", 1000)
    rows, _ = random_case(300)
    rows[7] = rows[11]
    query, wide = torch.from_numpy(rows[:120]), rows.astype(np.float64)
    product = wide[:120] @ wide.T
    distance = -product if metric == "inner_product" else (wide[:120, None] - wide[None]).__pow__(2).sum(2)
    excluded = distance.copy()
    if own:
        np.fill_diagonal(excluded, np.inf)
    expected = np.sort(excluded, axis=1)[:, :5]
    for by in (search_module._by_faiss, by_torch):
        monkeypatch.setattr(search_module, "_by_faiss", by)
        knn = ExactKNN(metric, max_memory="2M")
        found, at = knn(query, 5, torch.from_numpy(rows), ref_includes_query=own)
        assert (found.dtype, at.dtype, found.shape, at.shape) == (torch.float32, torch.int64, (120, 5), (120, 5))
        np.testing.assert_allclose(found if metric == "l2" else -found, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(np.take_along_axis(distance, at.numpy(), 1), expected, rtol=1e-6, atol=1e-6)
        assert not own or not (at == torch.arange(120)[:, None]).any()


def test_pml_computes_the_same_with_the_knn_func():
    accuracy_calculator = pytest.importorskip("pytorch_metric_learning.utils.accuracy_calculator")
    rows, labels = random_case(300)
    query, reference = torch.from_numpy(rows), torch.from_numpy(rows[:200])
    include = ("precision_at_1", "r_precision", "mean_average_precision_at_r")
    plain, ours = (
        accuracy_calculator.AccuracyCalculator(include=include, k="max_bin_count", **options)
        for options in ({}, {"knn_func": ExactKNN()})
    )
    for data in ((query, labels), (query, labels, reference, labels[:200])):
        assert ours.get_accuracy(*data) == pytest.approx(plain.get_accuracy(*data))


def test_the_knn_func_says_what_does_not_fit():
    query = torch.eye(3)
    for arguments, message in (
        ((query, 3, query, True), "k: expected 1 to 2, got 3"),
        ((query, 0, query), "k: expected 1 to 3, got 0"),
        ((query, 1, torch.ones(4, 2)), "reference: expected 3 dimensions as in query, got 2"),
        ((query, 1, query[:2], True), "ref_includes_query: expected 3 references or more, got 2"),
        ((query * torch.nan, 1, query), "query: 3 of 3 rows have NaN"),
    ):
        with pytest.raises(ValueError, match=message):
            ExactKNN()(*arguments)
    with pytest.raises(ValueError, match="metric: expected one of 'inner_product', 'l2'"):
        ExactKNN("cosine")
