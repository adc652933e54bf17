"""Losses of the other rank metrics against loops over the ranks."""

import functools
import math

import numpy as np
import oracles
import pytest
import torch

from rambo_plugins.core import rank_metrics


def soft(rank, k, temperature):
    """The relaxed [rank <= k] and its slope."""
    value = 1 / (1 + (rank / (k + 0.5)) ** (1 / temperature))
    return value, -value * (1 - value) / (temperature * rank)


def problem(seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-20, 21, (3, 12), generator=generator).double() / 16
    return scores, torch.rand(3, 12, generator=generator) < 0.3


def slow_item(metric, num, temperature):
    """(loss, d loss / d rank, d loss / d rank⁺) of one of ``num`` relevant items."""

    def item(rank, rank_plus):
        if metric == "reciprocal rank":
            best = num * (rank_plus == 1)
            return best * (1 - 1 / rank), best / rank**2, 0.0
        if metric == "precision":
            value, slope = soft(rank, 3, temperature)
            return 1 - num / 3 * value, -num / 3 * slope, 0.0
        values = [soft(rank - rank_plus + 1, k, temperature) for k in (1, 4)]
        return 1 - sum(v for v, _ in values) / 2, -sum(s for _, s in values) / 2, 0.0

    return item


def function_and_module(metric, **options):
    """Both take (scores, relevance, **what is of the items)."""
    if metric == "reciprocal rank":
        options.pop("temperature", None)
        function, module = rank_metrics.reciprocal_rank_loss, rank_metrics.ReciprocalRankLoss(**options)
    elif metric == "precision":
        options = {"k": 3} | options
        function, module = rank_metrics.precision_at_k_loss, rank_metrics.PrecisionAtKLoss(**options)
    else:
        options = {"ks": (1, 4)} | options
        function, module = rank_metrics.recall_at_k_loss, rank_metrics.RecallAtKLoss(**options)
    return functools.partial(function, **options), module


METRICS = ["reciprocal rank", "precision", "recall"]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("layout", ["dense", "mask", "segments"])
@pytest.mark.parametrize("metric", METRICS)
def test_values_and_gradients_equal_loops(metric, layout, temperature):
    moved = 0
    for seed in range(20):
        scores, relevance = problem(seed)
        exist = torch.ones_like(relevance)
        if layout != "dense":
            exist = torch.rand(3, 12, generator=torch.Generator().manual_seed(seed)) < 0.7
        counted = [q for q in range(3) if (relevance & exist)[q].any()]
        expected_grad, expected = torch.zeros_like(scores), 0.0
        for q in counted:
            num = int((relevance & exist)[q].sum())
            losses, _, grads = oracles.rank_loss(
                [scores[q].tolist()], [relevance[q].tolist()], slow_item(metric, num, temperature),
                lambda_val=8.0 / len(counted), margin=0.125, mask=[exist[q].tolist()],
            )  # fmt: skip
            expected += losses[0] / len(counted)
            expected_grad[q] = torch.tensor(grads[0]) / len(counted)
        function, module = function_and_module(metric, lambda_val=8.0, margin=0.125, temperature=temperature)
        y = scores.clone().requires_grad_()
        arguments, of_items = (y, relevance), {}
        if layout == "mask":
            of_items = {"mask": exist}
        elif layout == "segments":
            arguments, of_items = (y[exist], relevance[exist]), {"segments": exist.nonzero()[:, 0]}
        loss = function(*arguments, **of_items)
        assert loss.item() == pytest.approx(expected, abs=1e-9)
        assert module(*arguments, **of_items).item() == loss.item()
        loss.backward()
        np.testing.assert_allclose(y.grad.numpy(), expected_grad.numpy(), atol=1e-9)
        moved += int(y.grad.count_nonzero())
    assert moved > 10


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_ranked_in_single_precision(metric, dtype):
    scores, relevance = (values.to(dtype) if values.dtype != torch.bool else values for values in problem(1))
    function, _ = function_and_module(metric, lambda_val=8.0, margin=0.125)
    results = []
    for y in (scores.requires_grad_(), scores.detach().float().requires_grad_()):
        loss = function(y, relevance)
        loss.backward()
        results.append((loss, y.grad))
    (half, half_grad), (single, single_grad) = results
    assert half.dtype == torch.float32
    assert half == single
    assert half_grad.dtype == dtype
    assert half_grad.count_nonzero()
    assert torch.equal(half_grad, single_grad.to(dtype))


@pytest.mark.parametrize("metric", METRICS)
def test_a_row_without_a_relevant_item_does_not_count(metric):
    scores, relevance = problem(3)
    relevance[1] = False
    assert relevance[[0, 2]].any(1).all()
    function, _ = function_and_module(metric, lambda_val=8.0)
    assert function(scores, relevance) == function(scores[[0, 2]], relevance[[0, 2]])
    y = scores.clone().requires_grad_()
    loss = function(y, torch.zeros_like(relevance))
    loss.backward()
    assert loss == 0
    assert not y.grad.any()


@pytest.mark.parametrize("metric", METRICS)
def test_descent_brings_relevant_items_from_the_bottom_to_the_top(metric):
    scores = torch.linspace(1, 0, 40)
    relevance = torch.zeros(40, dtype=torch.bool)
    relevance[[37, 38, 39]] = True
    function, _ = function_and_module(metric, lambda_val=50.0)
    y = scores.clone().requires_grad_()
    for _ in range(300):
        (grad,) = torch.autograd.grad(function(y, relevance), y)
        with torch.no_grad():
            y -= grad
    first = y.detach().argsort(descending=True).tolist()
    if metric == "reciprocal rank":  # that of the best relevant item alone
        assert first[0] in {37, 38, 39}
    else:
        assert set(first[:3]) == {37, 38, 39}


def test_at_a_small_temperature_the_cutoffs_are_the_metrics():
    scores, relevance = torch.arange(8.0).flip(0), torch.tensor([0, 1, 0, 0, 1, 0, 0, 1]).bool()
    options = {"lambda_val": 1.0, "temperature": 1e-3}
    for k, precision, recall in ((1, 0, 0), (2, 1 / 2, 1 / 3), (4, 1 / 4, 2 / 3), (8, 3 / 8, 1)):
        loss = rank_metrics.precision_at_k_loss(scores, relevance, k=k, **options)
        assert loss.item() == pytest.approx(1 - precision, abs=1e-6)
        loss = rank_metrics.recall_at_k_loss(scores, relevance, ks=k, **options)
        assert loss.item() == pytest.approx(1 - recall, abs=1e-6)


@pytest.mark.parametrize(("k", "temperature"), [(0, 1.0), (1.5, 1.0), (True, 1.0), (1, 0.0), (1, math.nan)])
def test_bad_cutoffs_are_named(k, temperature):
    with pytest.raises(ValueError, match=r"k must be|temperature must be"):
        rank_metrics.PrecisionAtKLoss(k=k, lambda_val=1.0, temperature=temperature)
    with pytest.raises(ValueError, match=r"ks must be|temperature must be"):
        rank_metrics.RecallAtKLoss(ks=[k], lambda_val=1.0, temperature=temperature)


@pytest.mark.parametrize("ks", [1.5, [], None])
def test_bad_ks_are_named(ks):
    with pytest.raises(ValueError, match="ks must"):
        rank_metrics.RecallAtKLoss(ks=ks, lambda_val=1.0)


@pytest.mark.parametrize("metric", METRICS)
def test_item_weights_weigh_the_recall_and_are_refused_where_no_mean_over_the_relevant_items_is(metric):
    scores, relevance = problem(4)
    relevance[:, :2] = True
    weights = torch.rand(3, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    function, module = function_and_module(metric, lambda_val=8.0, margin=0.125)
    if metric != "recall":
        reason = {"reciprocal rank": "the best relevant item alone", "precision": "the first k places"}[metric]
        for call in (function, module):
            with pytest.raises(ValueError, match=f"item_weights has no meaning in this loss, where {reason}"):
                call(scores, relevance, item_weights=weights)
        return
    expected = 0.0
    for row, relevant, weight in zip(scores.tolist(), relevance.tolist(), weights.tolist(), strict=True):
        shifted = [s + (-0.0625 if rel else 0.0625) for s, rel in zip(row, relevant, strict=True)]
        above = [sum(t >= s for t, rel in zip(shifted, relevant, strict=True) if not rel) for s in shifted]
        total = sum(w for w, rel in zip(weight, relevant, strict=True) if rel)
        recall = 0.0
        for r, w, rel in zip(above, weight, relevant, strict=True):
            if rel:
                recall += w / total * sum(soft(r + 1, k, 1.0)[0] for k in (1, 4)) / 2
        expected += (1 - recall) / 3
    for call in (function, module):
        assert call(scores, relevance, item_weights=weights).item() == pytest.approx(expected)
        assert call(scores, relevance).item() != pytest.approx(expected, abs=1e-3)
