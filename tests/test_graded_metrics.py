"""NDCG and Spearman's correlation as losses: values against scikit-learn and SciPy, gradients against loops."""

import math

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from sklearn.metrics import ndcg_score

from rambo_plugins.core import compiled, counting, kernels, sorting
from rambo_plugins.core.graded_metrics import NDCGLoss, SpearmanLoss, ndcg_loss, spearman_loss

LOSSES = {"ndcg": ndcg_loss, "ndcg@2": lambda *args, **options: ndcg_loss(*args, cutoff=2, **options)}
LOSSES |= {"spearman": spearman_loss}
MODULES = {"ndcg": NDCGLoss, "ndcg@2": lambda **options: NDCGLoss(cutoff=2, **options), "spearman": SpearmanLoss}


def problem(seed, shape=(3, 8), levels=20):
    """Scores and gains or targets, both with ties: binary fractions, so that sums are exact."""
    draw = np.random.default_rng(seed)
    return draw.integers(-levels, levels + 1, shape) / 16, draw.integers(0, 4, shape).astype(float)


def ranks_in_loss(scores, grades):
    """Among equal scores the one without a grade (irrelevant) first, then the lower grade, then the lower index."""
    keys = [(-s, -math.inf if g is None else g, i) for i, (s, g) in enumerate(zip(scores, grades, strict=True))]
    return [1 + sum(other < key for other in keys) for key in keys]


def discount(rank, cutoff, temperature=1.0):
    """1 / log2(1 + rank), by the relaxed [rank <= cutoff], and the slope."""
    value, slope = 1 / math.log2(1 + rank), -math.log(2) / ((1 + rank) * math.log(1 + rank) ** 2)
    if cutoff is None:
        return value, slope
    soft = 1 / (1 + (rank / (cutoff + 0.5)) ** (1 / temperature))
    return value * soft, slope * soft - value * soft * (1 - soft) / (temperature * rank)


def loop(metric, scores, values, lambda_val, margin):
    """Loss and gradient of one row, None where the metric is not defined."""
    num, cutoff = len(scores), 2 if metric == "ndcg@2" else None
    if metric == "spearman":
        target_ranks = [sum(v > u for v in values) + (1 + sum(v == u for v in values)) / 2 for u in values]
        spread = np.std(target_ranks)
        if spread == 0:
            return None
        standard = [(t - np.mean(target_ranks)) / spread for t in target_ranks]
        grades, relevant = [-t for t in standard], range(num)
    else:
        ideal = sum(g * discount(i + 1, cutoff)[0] for i, g in enumerate(sorted(values, reverse=True)))
        grades, relevant = [g if g > 0 else None for g in values], [i for i in range(num) if values[i] > 0]
        if not relevant:
            return None
    y = [s + (margin / 2 if g is None else -margin / 2) for s, g in zip(scores, grades, strict=True)]
    ranks = ranks_in_loss(y, grades)
    loss, slopes = 0.0 if metric == "spearman" else 1.0, [0.0] * num
    for i in relevant:
        if metric == "spearman":
            spread = np.std(range(num))
            distance = (ranks[i] - (num + 1) / 2) / spread - standard[i]
            loss, slopes[i] = loss + distance**2 / 2 / num, distance / spread / num
        else:
            value, slope = discount(ranks[i], cutoff)
            loss, slopes[i] = loss - values[i] * value / ideal, -values[i] * slope / ideal
    moved = ranks_in_loss([s + lambda_val * num * d for s, d in zip(y, slopes, strict=True)], grades)
    return loss, [(m - r) / (lambda_val * num) for m, r in zip(moved, ranks, strict=True)]


@pytest.mark.parametrize("kernel", [compiled, counting, sorting])
@pytest.mark.parametrize("metric", LOSSES)
def test_values_and_gradients_equal_loops(metric, kernel, monkeypatch):
    monkeypatch.setattr(kernels, "kernel_for", lambda scores, relevance: kernel)
    moved = 0
    for seed in range(40):
        scores, values = problem(seed, (3, 1 + seed % 8), levels=[3, 40][seed % 2])
        margin, lambda_val = [0.0, 0.125][seed % 2], [0.7, 5.0][seed // 2 % 2]
        rows = [loop(metric, s.tolist(), v.tolist(), lambda_val, margin) for s, v in zip(scores, values, strict=True)]
        there = sum(row is not None for row in rows)
        expected = [row or (0.0, [0.0] * scores.shape[1]) for row in rows]
        y = torch.tensor(scores, requires_grad=True)
        options = {"lambda_val": lambda_val, "margin": margin, "lambda_per": "row"}
        losses = LOSSES[metric](y, torch.tensor(values), reduction="none", **options)
        np.testing.assert_allclose(losses.tolist(), [loss for loss, _ in expected], atol=1e-12)
        assert MODULES[metric](**options)(y, torch.tensor(values)).item() == pytest.approx(
            losses.sum().item() / max(there, 1)
        )
        losses.sum().backward()
        np.testing.assert_allclose(y.grad, [grad for _, grad in expected], atol=1e-9, err_msg=f"{seed}")
        moved += int(y.grad.count_nonzero())
    assert moved > 100


@pytest.mark.parametrize("seed", range(20))
def test_values_are_those_of_scikit_learn_and_scipy(seed):
    draw = np.random.default_rng(seed)
    scores, gains = draw.permutation(30).astype(float), draw.integers(0, 5, 30) * (draw.random(30) < 0.7)
    y, gains_tensor = torch.tensor(scores), torch.tensor(gains, dtype=torch.float64)
    assert ndcg_loss(y, gains_tensor, lambda_val=1.0).item() == pytest.approx(1 - ndcg_score([gains], [scores]))
    for k in (1, 3, 10):
        loss = ndcg_loss(y, gains_tensor, lambda_val=1.0, cutoff=k, temperature=1e-3)
        assert loss.item() == pytest.approx(1 - ndcg_score([gains], [scores], k=k))
    assert spearman_loss(y, gains_tensor, lambda_val=1.0).item() == pytest.approx(
        1 - spearmanr(scores, gains).statistic
    )


@pytest.mark.parametrize("metric", LOSSES)
def test_masks_and_segments_equal_rows_alone(metric):
    for seed in range(20):
        draw = np.random.default_rng(seed)
        scores, values = (torch.tensor(a) for a in problem(seed, (4, 9)))
        values = torch.where(torch.tensor(draw.random((4, 9)) < 0.1), 99.0, values)  # also where it does not exist
        mask = torch.tensor(draw.random((4, 9)) < 0.6)
        weights = torch.tensor([1.0, 0.5, 2.0, 3.0], dtype=torch.float64)
        options = {"lambda_val": 4.0, "margin": 0.125, "lambda_per": "row", "reduction": "none"}
        y = scores.clone().requires_grad_()
        masked = LOSSES[metric](y, values, mask=mask, weights=weights, **options)
        masked.sum().backward()
        assert not y.grad[~mask].any()
        z = scores.clone().requires_grad_()
        alone = [LOSSES[metric](z[q][mask[q]], values[q][mask[q]], **options) * weights[q] for q in range(4)]
        torch.stack(alone).sum().backward()
        torch.testing.assert_close(masked, torch.stack(alone))
        torch.testing.assert_close(y.grad, z.grad)
        # The same rows as segments, column by column; once what the mask leaves of them, once with the mask.
        by_column = torch.arange(36).view(4, 9).T.flatten()
        there = mask.flatten()[by_column]
        for items, flat_mask in ((by_column[there], None), (by_column, there)):
            u = scores.clone().requires_grad_()
            flat = {"mask": flat_mask, "weights": weights, "segments": items // 9}
            in_segments = LOSSES[metric](u.flatten()[items], values.flatten()[items], **flat, **options)
            in_segments.sum().backward()
            torch.testing.assert_close(in_segments, masked)
            torch.testing.assert_close(u.grad, y.grad)


@pytest.mark.parametrize("metric", LOSSES)
def test_a_constant_score_is_the_worst_and_a_perfect_ranking_has_the_least(metric):
    values = torch.tensor([0.0, 3.0, 1.0, 2.0, 1.0])
    losses = [LOSSES[metric](y, values, lambda_val=1.0) for y in (torch.zeros(5), -values - torch.arange(5) / 100)]
    assert losses[0] == pytest.approx(max(losses).item(), abs=1e-6)
    perfect = LOSSES[metric](values + torch.arange(5) / 100, values, lambda_val=1.0)
    least = 1 - spearmanr([0, 4, 1, 3, 2], values)[0] if metric == "spearman" else 0  # two targets are equal
    assert perfect.item() == pytest.approx(least, abs=1e-6)


@pytest.mark.parametrize("metric", LOSSES)
def test_rows_without_the_metric_give_zeros_and_do_not_count(metric):
    scores = torch.tensor([[0.3, 0.1, 0.2], [0.3, 0.1, 0.2]], requires_grad=True)
    values = torch.tensor([[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]])
    loss = LOSSES[metric](scores, values, lambda_val=5.0)
    assert loss.item() == LOSSES[metric](scores[0], values[0], lambda_val=5.0).item() > 0
    loss.backward()
    assert scores.grad[0].any()
    assert not scores.grad[1].any()
    for shape in ((1,), (0,), (2, 1), (0, 3)):
        y = torch.zeros(shape, requires_grad=True)
        loss = LOSSES[metric](y, torch.ones(shape), lambda_val=1.0)
        loss.backward()
        assert loss.item() == 0
        assert torch.equal(y.grad, torch.zeros(shape))
    y = torch.zeros(2, 3, requires_grad=True)
    LOSSES[metric](y, torch.ones(2, 3), lambda_val=1.0, mask=torch.zeros(2, 3, dtype=torch.bool)).backward()
    assert torch.equal(y.grad, torch.zeros(2, 3))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("metric", LOSSES)
def test_half_precision_is_ranked_in_float32(metric, dtype):
    scores, values = (torch.tensor(a, dtype=torch.float32) for a in problem(3, (2, 200)))
    y, z = scores.to(dtype).requires_grad_(), scores.to(dtype).float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half = LOSSES[metric](y, values.to(dtype), lambda_val=5.0)
    full = LOSSES[metric](z, values, lambda_val=5.0)
    half.backward()
    full.backward()
    assert half.dtype == torch.float32
    assert half.item() == full.item()
    assert y.grad.dtype == dtype
    torch.testing.assert_close(y.grad, z.grad.to(dtype))


@pytest.mark.parametrize("metric", LOSSES)
def test_descent_lowers_the_loss(metric):
    draw = torch.Generator().manual_seed(0)
    y = torch.randn(4, 50, generator=draw).requires_grad_()
    values = torch.randint(0, 4, (4, 50), generator=draw).float()
    optimizer = torch.optim.Adam([y], lr=0.05)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        loss = LOSSES[metric](y, values, lambda_val=20.0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 0.2
    assert losses[-1] < 0.2 * losses[0], losses[-1]


@pytest.mark.parametrize("metric", LOSSES)
def test_a_multiple_of_the_loss_is_the_same_multiple_of_the_gradient(metric):
    scores, values = (torch.tensor(a) for a in problem(5))
    grads = []
    for factor in (1.0, 1024.0):
        y = scores.clone().requires_grad_()
        (factor * LOSSES[metric](y, values, lambda_val=3.0)).backward()
        grads.append(y.grad)
    assert grads[0].any()
    torch.testing.assert_close(grads[1], 1024 * grads[0])


def test_item_weights_of_spearman_weigh_the_squared_distances():
    scores, target = torch.tensor([4.0, 3.0, 2.0, 1.0]), torch.tensor([1.0, 4.0, 3.0, 2.0])
    weights = torch.tensor([1.0, 0.0, 0.0, 3.0])  # ranks 1 and 4, of the target 4 and 3
    loss = spearman_loss(scores, target, lambda_val=1.0, item_weights=weights)
    assert loss.item() == pytest.approx((1 * 3**2 + 3 * 1**2) / 4 / (2 * 15 / 12))


def test_bad_input_is_named():
    scores, values = torch.zeros(2, 3), torch.zeros(2, 3)
    for name, loss in (("gains", ndcg_loss), ("target", spearman_loss)):
        with pytest.raises(TypeError, match=f"{name} must be a floating-point tensor, got torch.int64"):
            loss(scores, values.long(), lambda_val=1.0)
        with pytest.raises(ValueError, match=rf"{name} must have shape \(2, 3\).*got \(3,\)"):
            loss(scores, values[0], lambda_val=1.0)
        with pytest.raises(TypeError, match=r"scores must be a torch\.Tensor, got list"):
            loss([0.0], values, lambda_val=1.0)
        with pytest.raises(ValueError, match="lambda_val must be"):
            loss(scores, values, lambda_val=0.0)
        with pytest.raises(ValueError, match=r"segments are for flat scores"):
            loss(scores, values, lambda_val=1.0, segments=torch.zeros(2, 3, dtype=torch.int64))
        with pytest.raises(ValueError, match=r"segments must lie in 0 to 0"):
            loss(scores[0], values[0], lambda_val=1.0, segments=torch.arange(3), weights=torch.ones(1))
        with pytest.raises(ValueError, match="grades has no meaning"):
            loss(scores, values, lambda_val=1.0, grades=values)
    with pytest.raises(ValueError, match="grades has no meaning"):
        SpearmanLoss(lambda_val=1.0)(scores, values, grades=values)
    with pytest.raises(ValueError, match="item_weights has no meaning"):
        ndcg_loss(scores, values, lambda_val=1.0, item_weights=values)
    with pytest.raises(ValueError, match="item_weights has no meaning"):
        NDCGLoss(lambda_val=1.0)(scores, values, item_weights=values)
    for cutoff in (0, 1.5, True, "1"):
        with pytest.raises(ValueError, match="cutoff must be an integer >= 1"):
            NDCGLoss(lambda_val=1.0, cutoff=cutoff)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature must be"):
            ndcg_loss(scores, values, lambda_val=1.0, temperature=temperature)
