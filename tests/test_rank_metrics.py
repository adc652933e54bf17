"""Losses of the other rank metrics against loops over the ranks."""

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


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize("metric", ["reciprocal rank", "precision", "recall"])
def test_values_and_gradients_equal_loops(metric, temperature):
    moved = 0
    for seed in range(20):
        scores, relevance = problem(seed)
        y, expected_grad, expected = scores.clone().requires_grad_(), [], 0.0
        rows = [q for q in range(3) if relevance[q].any()]
        for q in range(3):
            num = int(relevance[q].sum())

            def item(rank, rank_plus, num=num):
                if metric == "reciprocal rank":
                    best = num * (rank_plus == 1)
                    return best * (1 - 1 / rank), best / rank**2, 0.0
                if metric == "precision":
                    value, slope = soft(rank, 3, temperature)
                    return 1 - num / 3 * value, -num / 3 * slope, 0.0
                values = [soft(rank - rank_plus + 1, k, temperature) for k in (1, 4)]
                return 1 - sum(v for v, _ in values) / 2, -sum(s for _, s in values) / 2, 0.0

            losses, _, grads = oracles.rank_loss(
                [scores[q].tolist()], [relevance[q].tolist()], item, lambda_val=8.0 / max(len(rows), 1), margin=0.125
            )
            expected += losses[0] / max(len(rows), 1)
            expected_grad.append([value / max(len(rows), 1) for value in grads[0]])
        options = {"lambda_val": 8.0, "margin": 0.125}
        if metric == "reciprocal rank":
            loss = rank_metrics.reciprocal_rank_loss(y, relevance, **options)
            module = rank_metrics.ReciprocalRankLoss(**options)
        elif metric == "precision":
            options |= {"k": 3, "temperature": temperature}
            loss = rank_metrics.precision_at_k_loss(y, relevance, **options)
            module = rank_metrics.PrecisionAtKLoss(**options)
        else:
            options |= {"ks": (1, 4), "temperature": temperature}
            loss = rank_metrics.recall_at_k_loss(y, relevance, **options)
            module = rank_metrics.RecallAtKLoss(**options)
        assert loss.item() == pytest.approx(expected, abs=1e-9)
        assert module(y, relevance).item() == loss.item()
        loss.backward()
        np.testing.assert_allclose(y.grad.numpy(), expected_grad, atol=1e-9)
        moved += int(y.grad.count_nonzero())
    assert moved > 10


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
