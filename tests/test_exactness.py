"""Recall@K, ties and MAP@R against integer arithmetic, on rows that rounded scores get wrong.

A float32 number is a whole number of 2⁻¹⁴⁹, so scores are whole numbers too, which Python adds up without an end. Each
case goes through counting, lists, what a GPU would do, and ``RecallMetric``.
"""

import multiprocessing
import os

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rambo_plugins.evaluation import ExactKNN, RecallMetric, recall_at_k
from rambo_plugins.evaluation import counting as counting_module
from rambo_plugins.evaluation import lists as lists_module
from rambo_plugins.evaluation import neighbours as neighbours_module
from rambo_plugins.evaluation import plan as plan_module
from rambo_plugins.evaluation import recall as recall_module
from rambo_plugins.evaluation import scores as scores_module
from rambo_plugins.evaluation import search as search_module

KS = (1, 2, 5)


def constant(rng, num, dim):
    return np.full((num, dim), np.float32(rng.choice([0.9, 0.1, 1 / 3, -0.7, 1e-3])))


def codes(rng, num, dim):
    """Binary codes times a constant: scores are k c², which float64 holds only roughly."""
    return rng.integers(rng.integers(-1, 1), 2, (num, dim)) * np.float32(rng.choice([0.9, 0.1, 1 / 3, 1, 1e-20]))


def last_place(rng, num, dim):
    """Rows that differ from one another by a unit in the last place here and there."""
    row = rng.standard_normal(dim).astype(np.float32)
    steps = (rng.random((num, dim)) < rng.choice([1.5 / dim, 0.5])) * rng.integers(-1, 2, (num, dim))
    return (row.view(np.int32) + steps.astype(np.int32)).view(np.float32)


def cancelling(rng, num, dim):
    """Large products that cancel but for a small rest."""
    half = rng.standard_normal((1, (dim + 1) // 2)) * 10.0 ** rng.integers(0, 7)
    rows = np.concatenate([np.tile(half, (num, 1)), np.tile(-half, (num, 1))], axis=1)[:, :dim]
    rows = np.where(np.arange(dim) < dim // 2, np.abs(rows), rows)
    return rows + 2.0 ** -rng.integers(0, 24) * rng.integers(-1, 2, rows.shape)


def small(rng, num, dim):
    return rng.integers(-3, 4, (num, dim)) * 2.0 ** -rng.integers(60, 150)


def large(rng, num, dim):
    return rng.standard_normal((num, dim)) * 10.0 ** rng.integers(10, 17)


def uneven(rng, num, dim):
    """Numbers of very different size, in one row."""
    return rng.standard_normal((num, dim)) * 2.0 ** rng.integers(-140, 40, (num, dim))


def unit(rng, num, dim):
    rows = rng.standard_normal((num, dim))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def half(rng, num, dim):
    return unit(rng, num, dim).astype(np.float16)


def collapsed(rng, num, dim):
    return 1 + 10.0 ** -rng.integers(2, 8) * rng.standard_normal((num, dim))


def integers(rng, num, dim):
    return rng.integers(-2, 3, (num, dim))


KINDS = (constant, codes, last_place, cancelling, small, large, uneven, unit, half, collapsed, integers)


def case(seed, largest=96):
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)]
    dim = max(1, int(largest ** rng.random()))
    num = int(rng.integers(4, 13))
    rows = kind(rng, num, dim).astype(np.float16 if kind is half else np.float32)
    copied = rng.random(num) < rng.choice([0, 0.3])  # duplicates, in other blocks and on other processes
    rows[copied] = rows[rng.integers(0, num, copied.sum())]
    labels = rng.integers(0, rng.integers(1, 5), num)
    return rows, labels, ("inner_product", "l2")[int(rng.integers(2))], rng


def whole(rows):
    """Rows as whole numbers of 2⁻¹⁴⁹."""
    fraction, exponent = np.frexp(rows.astype(np.float64))
    numbers = (fraction * 2.0**24).astype(np.int64).astype(object)
    return numbers * np.array([1 << int(e) for e in (exponent + 149 - 24 + 300).ravel()], object).reshape(rows.shape)


def definition(rows, labels, metric, ks=KS):
    """Ranks, pessimistic and optimistic, MAP@R and R-precision in a loop over whole numbers."""
    x = whole(rows)
    outcome = {"first": [], "optimistic": [], "average": [], "precision": []}
    for q in range(len(x)):
        others = [g for g in range(len(x)) if g != q]
        if metric == "inner_product":
            score = dict(zip(others, x[others] @ x[q], strict=True))
        else:
            score = dict(zip(others, -((x[others] - x[q]) ** 2).sum(axis=1), strict=True))
        relevant = [g for g in others if labels[g] == labels[q]]
        irrelevant = [g for g in others if labels[g] != labels[q]]
        if not relevant:
            continue
        best = max(score[g] for g in relevant)
        outcome["first"].append(1 + sum(score[g] >= best for g in irrelevant))
        outcome["optimistic"].append(1 + sum(score[g] > best for g in irrelevant))
        total = hits = 0
        for plus, g in enumerate(sorted(relevant, key=lambda g: -score[g]), start=1):
            rank = plus + sum(score[h] >= score[g] for h in irrelevant)
            if rank <= len(relevant):
                total, hits = total + plus / rank, hits + 1
        outcome["average"].append(total / len(relevant))
        outcome["precision"].append(hits / len(relevant))
    return outcome


def check(result, expected, what):
    found = result.first_rank[np.setdiff1d(np.arange(result.num_queries), result.lone_queries)]
    first, optimistic = np.array(expected["first"], int), np.array(expected["optimistic"], int)
    assert found.tolist() == np.where(first <= KS[-1], first, 0).tolist(), what
    assert result.num_tied == (np.minimum(first, KS[-1] + 1) != np.minimum(optimistic, KS[-1] + 1)).sum(), what
    for k in KS:
        assert round(result.recall_optimistic[k] * len(first)) == (optimistic <= k).sum() if len(first) else True, what
    if result.map_at_r is not None and len(first):
        assert result.map_at_r == pytest.approx(np.mean(expected["average"]), abs=1e-12), what
        assert result.r_precision == pytest.approx(np.mean(expected["precision"]), abs=1e-12), what


def by_torch(query, items, k, metric):
    """What a GPU would do."""
    return search_module._by_torch(query, items, k, metric, torch.device("cpu"), torch.float32)


def small_parts(patch, rng):
    """Parts of a few queries, blocks of a few items, short lists, products for small classes too."""
    plan = plan_module.Plan(*(int(size) for size in rng.integers(2, 6, 3)))
    for module in (recall_module, neighbours_module):
        patch.setattr(module, "make_plan", lambda *arguments: plan)
        patch.setattr(module, "SPARE", 0)
    patch.setattr(lists_module, "WIDE_BLOCK", int(rng.integers(1, 6)))
    patch.setattr(search_module, "_by_faiss", by_torch)
    patch.setattr(search_module, "_SCORES", 8)
    for module in (counting_module, scores_module):
        patch.setattr(module, "PAIRS", 4)
    patch.setattr(counting_module, "_CLASS_PRODUCT", int(rng.integers(1, 12)))
    patch.setattr(counting_module, "_DENSE", int(rng.choice([2, 10**9])))  # products in float64 at times, or always


def run(seeds, **options):
    for seed in seeds:
        rows, labels, metric, rng = case(seed, **options)
        expected, what = definition(rows, labels, metric), f"case({seed}, {options})"
        devices = ["cpu"] * int(rng.integers(1, 3))
        for method, map_at_r in (("count", False), ("search", False), ("search", True)):
            found = recall_at_k(rows, labels, ks=KS, metric=metric, method=method, map_at_r=map_at_r, device=devices)
            check(found, expected, f"{what}, {method}, map_at_r {map_at_r}")
            with pytest.MonkeyPatch.context() as patch:
                small_parts(patch, rng)
                found = recall_at_k(
                    rows, labels, ks=KS, metric=metric, method=method, map_at_r=map_at_r, device=devices
                )
            check(found, expected, f"{what}, small parts, {method}, map_at_r {map_at_r}")
        measured = RecallMetric(ks=KS, metric=metric)
        for at in range(0, len(rows), 5):
            measured.update(rows[at : at + 5], labels[at : at + 5])
        check(measured.compute(), expected, f"{what}, RecallMetric")
        check_lists(rows, metric, rng, what)


def check_lists(rows, metric, rng, what):
    """The k nearest by whole numbers, equal ones by their row."""
    x, k = whole(rows), int(rng.integers(1, len(rows)))
    expected = []
    for q in range(len(x)):
        score = x @ x[q] if metric == "inner_product" else -((x - x[q]) ** 2).sum(axis=1)
        expected.append(sorted((g for g in range(len(x)) if g != q), key=lambda g: (-score[g], g))[:k])
    query = torch.from_numpy(rows)
    assert ExactKNN(metric)(query, k, query, True)[1].tolist() == expected, what
    with pytest.MonkeyPatch.context() as patch:
        small_parts(patch, rng)
        assert ExactKNN(metric)(query, k, query, True)[1].tolist() == expected, f"{what}, small parts"


@pytest.mark.parametrize("start", range(0, 220, 22))
def test_no_figure_is_off(start):
    run(range(start, start + 22))


@pytest.mark.parametrize("seed", range(4 * len(KINDS)))
def test_no_figure_is_off_with_many_dimensions(seed):
    run([seed], largest=8192)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(1000, 21000, 1000))
def test_none_of_twenty_thousand_is_off(start):
    run(range(start, start + 1000))


@pytest.mark.parametrize(("beyond", "rank"), [(2.0**-60, 1), (-(2.0**-60), 65), (0.0, 65)])
@pytest.mark.parametrize("dense", [2, 10**9])
def test_a_best_score_between_two_numbers_of_float64_is_neither(beyond, rank, dense, monkeypatch):
    """64 irrelevant items score 1, in a block of their own; the relevant one 1 + 2⁻⁶⁰, 1 − 2⁻⁶⁰ or 1."""
    monkeypatch.setattr(recall_module, "make_plan", lambda *arguments: plan_module.Plan(64, 64, 64))
    monkeypatch.setattr(counting_module, "_DENSE", dense)
    gallery = np.array([[1, 0]] * 64 + [[1, beyond]], np.float32)
    labels = np.array([0] * 64 + [1])
    result = recall_at_k(np.ones((1, 2), np.float32), [1], gallery, labels, ks=(100,))
    assert result.first_rank.tolist() == [rank]
    assert result.num_tied == (beyond == 0)


def member(rank, world, folder, seeds):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world)
    for seed in seeds:
        rows, labels, metric, rng = case(seed)
        measured = RecallMetric(ks=KS, metric=metric)
        mine = np.flatnonzero(rng.integers(0, world, len(rows)) == rank)
        measured.update(rows[mine], labels[mine], mine)
        check(measured.compute(), definition(rows, labels, metric), f"case({seed}), rank {rank} of {world}")
    dist.barrier()
    os._exit(0)


@pytest.mark.parametrize("world", [2])
def test_no_figure_is_off_on_several_processes(world, tmp_path):
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=member, args=(rank, world, tmp_path, range(220))) for rank in range(world)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0] * world
