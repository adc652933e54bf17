"""The core against slow oracles, and what it promises: invariance of λ, ties, masks, half precision, empty rows."""

import copy
import fractions
import functools
import importlib.util
import itertools
import pickle
import random
import sys

import numpy as np
import oracles
import pytest
import torch
import torch.utils.checkpoint

from rambo_plugins import core
from rambo_plugins.core import (
    AveragePrecisionLoss,
    RankLoss,
    RecallLoss,
    average_precision_item_loss,
    average_precision_loss,
    check_nan,
    checks,
    compiled,
    counting,
    kernels,
    rank,
    rank_loss,
    recall_item_loss,
    recall_loss,
    sorting,
)

TABLE = [1.0, 0.5, 0.25, 0.0, 0.125]
LOSSES = {
    "log": (recall_item_loss("log"), oracles.recall_item("log")),
    "loglog": (recall_item_loss("loglog"), oracles.recall_item("loglog")),
    "table": (recall_item_loss(TABLE), oracles.recall_item(TABLE)),
    "callable": (recall_item_loss(torch.log1p), oracles.recall_item("log")),
    "ap": (average_precision_item_loss, oracles.ap_item),
}


def random_problem(seed):
    """Rows of one length with ties, masks, rows that are empty, all relevant or without a relevant item."""
    draw = random.Random(seed)
    num_rows, num_items = draw.randint(1, 4), draw.randint(1, 9)
    levels = draw.choice([1, 3, 10, 10**6])  # few levels: many ties; scores are binary fractions, sums are exact
    scores = [[draw.randint(-levels, levels) / 1024 for _ in range(num_items)] for _ in range(num_rows)]
    if draw.random() < 0.2:
        scores = [[draw.choice([s, float("inf"), -float("inf")]) for s in row] for row in scores]
    share = [draw.choice([0.0, 0.2, 0.5, 1.0]) for _ in range(num_rows)]
    relevance = [[draw.random() < share[q] for _ in range(num_items)] for q in range(num_rows)]
    mask = draw.choice([None, [[draw.random() < 0.7 for _ in range(num_items)] for _ in range(num_rows)]])
    weights = draw.choice([None, [draw.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(num_rows)]])
    options = {
        "lambda_val": draw.choice([0.05, 0.5, 3.0, 20.0]),
        "margin": draw.choice([0.0, 1 / 512, 0.25]),
        "normalize": draw.random() < 0.7,
        "lambda_per": draw.choice(["batch", "row"]),
        "rank_plus_grad": draw.random() < 0.3,
    }
    return scores, relevance, mask, weights, options


KERNELS = {  # the same on all of these: what is meant for long rows is made to run on short ones
    "compiled": (compiled, {"MANY_RELEVANT": 1.0}),
    "compiled with a table": (compiled, {"MANY_RELEVANT": 1.0, "FEW": 0}),
    "compiled with few bins": (compiled, {"MANY_RELEVANT": 1.0, "FEW": 0, "BINS_PER_THRESHOLD": 1}),
    "compiled in blocks with a table": (compiled, {"MANY_RELEVANT": 1.0, "FEW": 0, "BLOCK": 2}),
    "compiled in blocks by comparing": (compiled, {"MANY_RELEVANT": 1.0, "BLOCK": 3}),
    "compiled in threads": (compiled, {"MANY_RELEVANT": 1.0, "ITEMS_PER_THREAD": 1}),
    "compiled by sorting all": (compiled, {"MANY_RELEVANT": 0.0, "SHORT": 0}),
    "compiled by sorting all in threads": (compiled, {"MANY_RELEVANT": 0.0, "ITEMS_PER_THREAD": 1}),
    "counting": (counting, {}),
    "counting with a table": (counting, {"FEW": 0}),
    "counting in blocks with a table": (counting, {"FEW": 0, "BLOCK": 4}),
    "counting in blocks by comparing": (counting, {"BLOCK": 3}),
    "counting with one bin": (counting, {"FEW": 0, "MOST_BINS": 1, "CROWD": 3}),
    "sorting": (sorting, {}),
}


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    module, constants = KERNELS[request.param]
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(kernels, "kernel_for", lambda scores, relevance: module)


@pytest.mark.parametrize("name", LOSSES)
def test_values_and_gradients_equal_loops_from_the_equations(name, kernel):
    item_loss, oracle_item = LOSSES[name]
    moved = 0
    for seed in range(300):
        scores, relevance, mask, weights, options = random_problem(seed)
        losses, shares, grads = oracles.rank_loss(scores, relevance, oracle_item, mask=mask, weights=weights, **options)
        y = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
        tensors = {
            "mask": None if mask is None else torch.tensor(mask),
            "weights": None if weights is None else torch.tensor(weights, dtype=torch.float64),
        }
        loss, statistics = rank_loss(y, torch.tensor(relevance), item_loss, **tensors, **options)
        loss.backward()
        expected = sum(share * value for share, value in zip(shares, losses, strict=True))
        assert loss.item() == pytest.approx(expected, abs=1e-12), (seed, options)
        np.testing.assert_allclose(y.grad.numpy(), np.array(grads), atol=1e-9, err_msg=f"{seed} {options}")
        moved += any(g != 0 for row in grads for g in row)
        # The other reductions: the same gradient, up to the factor between the losses.
        total = sum(w for w, s in zip(weights or [1.0] * len(scores), shares, strict=True) if s > 0)
        for reduction in ("sum", "none"):
            z = torch.tensor(scores, dtype=torch.float64, requires_grad=True)
            other, _ = rank_loss(z, torch.tensor(relevance), item_loss, reduction=reduction, **tensors, **options)
            other.sum().backward()
            assert other.sum().item() == pytest.approx(expected * total, abs=1e-12)
            np.testing.assert_allclose(z.grad.numpy(), np.array(grads) * total, atol=1e-9)
        assert statistics.num_relevant.tolist() == [
            sum(r and (mask is None or mask[q][i]) for i, r in enumerate(row)) for q, row in enumerate(relevance)
        ]
    assert moved > 50, "the cases must move something"


@pytest.mark.parametrize("seed", range(200))
def test_rank_is_algorithm_1(seed):
    generator = np.random.default_rng(seed)
    shape = [(7,), (3, 5), (2, 3, 4)][seed % 3]
    scores = generator.integers(-3, 4, shape) / 4 if seed % 2 else generator.normal(size=shape)
    upstream, lambda_val = generator.normal(size=shape), [0.1, 1.0, 7.0][seed % 3]
    normalize = bool(seed % 4)
    mask = generator.random(shape) < 0.8 if seed % 5 else np.ones(shape, bool)

    def ranks_of(values):  # an independent sort: numpy's lexsort, the last key is the first to count
        ranks = np.zeros(shape)
        for row in np.ndindex(shape[:-1]):
            order = np.lexsort((np.arange(shape[-1]), -values[row]))
            order = [i for i in order if mask[row][i]]
            for position, i in enumerate(order):
                ranks[row][i] = (position + 1) / (len(order) if normalize else 1)
        return ranks

    y = torch.tensor(scores, requires_grad=True)
    ranks = rank(y, lambda_val, mask=torch.tensor(mask), normalize=normalize)
    ranks.backward(torch.tensor(upstream))
    expected = -(ranks_of(scores) - ranks_of(scores + lambda_val * upstream)) / lambda_val
    np.testing.assert_allclose(ranks.detach().numpy(), ranks_of(scores), atol=1e-12)
    np.testing.assert_allclose(y.grad.numpy(), expected, atol=1e-9)


@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize("kind", ["ap", "recall"])
def test_gradient_is_the_authors_formula_on_distinct_scores(kind, seed):
    """Double argsort, normalised ranks, rank⁺ constant, gradient of the mean over the rows: written out in numpy."""
    generator = np.random.default_rng(seed)
    num_rows, num_items, lambda_val, margin = 4, 30, 2.0, 0.1
    scores, relevance = generator.normal(size=(num_rows, num_items)), generator.random((num_rows, num_items)) < 0.3
    relevance[:, 0] = True
    y = scores - margin * (relevance - 0.5)

    def normalised_rank(values):
        return (np.argsort(np.argsort(-values, axis=1), axis=1) + 1) / num_items

    ranks = normalised_rank(y)
    ranks_plus = normalised_rank(y + 1e4 * relevance)
    count = relevance.sum(1, keepdims=True)
    if kind == "ap":
        upstream = relevance * ranks_plus / ranks**2 / count / num_rows
    else:
        upstream = relevance * num_items / (1 + num_items * (ranks - ranks_plus)) / count / num_rows
    expected = -(ranks - normalised_rank(y + lambda_val * upstream)) / lambda_val
    loss_fn = average_precision_loss if kind == "ap" else recall_loss
    tensor = torch.tensor(scores, requires_grad=True)
    loss_fn(tensor, torch.tensor(relevance), lambda_val=lambda_val, margin=margin).backward()
    np.testing.assert_allclose(tensor.grad.numpy(), expected, atol=1e-9)
    assert np.abs(expected).max() > 0


def score_like(kind, num_rows, num_items, generator):
    normal = torch.randn(num_rows, num_items, generator=generator)
    if kind == "tied":
        return normal.mul(4).round()
    if kind == "sorted":
        return normal.sort(dim=1).values
    if kind == "constant":
        return torch.ones_like(normal)
    if kind == "with outliers":
        normal[:, :2] *= 1e30
    return normal


@pytest.mark.parametrize("kind", ["random", "tied", "sorted", "constant", "with outliers", "trained"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_the_kernels_agree_on_long_rows(kind, num_rows, monkeypatch):
    """Rows of all sorts of P, several blocks long; the gradient is the same to the last bit."""
    monkeypatch.setattr(counting, "BLOCK", 700)
    generator, moved = torch.Generator().manual_seed(0), 0
    for num_relevant in (0, 1, 2, 13, 100, 1000, 1999, 2000):
        scores = score_like(kind, num_rows, 2000, generator)
        relevance = torch.rand(num_rows, 2000, generator=generator).argsort(1) < num_relevant
        relevance[1:] &= torch.rand(num_rows - 1, 2000, generator=generator) < 0.7  # rows of unequal P
        if kind == "trained":
            scores += 5.0 * relevance
        mask = torch.rand(num_rows, 2000, generator=generator) < 0.9 if num_relevant == 13 else None
        results = []
        for module in (sorting, counting, compiled):
            monkeypatch.setattr(kernels, "kernel_for", lambda scores, relevance, module=module: module)
            y = scores.clone().requires_grad_()
            loss, statistics = rank_loss(
                y, relevance, recall_item_loss("log"), lambda_val=20.0, margin=0.3, mask=mask, rank_plus_grad=True
            )
            loss.backward()
            results.append((loss, y.grad, *statistics))
        loss, grad, num_relevant, mean_r, zero_gradient = results[0]
        for other in results[1:]:
            torch.testing.assert_close((other[0], other[3]), (loss, mean_r))
            for one, two in zip((other[1], other[2], other[4]), (grad, num_relevant, zero_gradient), strict=True):
                assert torch.equal(one, two)
        moved += int(grad.count_nonzero())
    assert moved > 300


def segmented(seed):
    """Rows of a random problem as one shuffled line of items; dense indices of the items, and each item's row."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 40, (6,), generator=generator) ** 2 // 40  # unequal, some empty
    segments = torch.arange(6).repeat_interleave(lengths)
    segments = segments[torch.randperm(len(segments), generator=generator)] if seed % 2 else segments
    scores = torch.randint(-8, 9, (len(segments),), generator=generator) / 8
    scores = scores.double()
    relevance = torch.rand(len(segments), generator=generator) < 0.3
    mask = torch.rand(len(segments), generator=generator) < 0.8 if seed % 3 else None
    return scores, relevance, mask, segments


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("lambda_per", ["batch", "row"])
def test_segments_equal_loops_over_rows_of_unequal_length(lambda_per):
    moved = 0
    for seed in range(30):
        scores, relevance, mask, segments = segmented(seed)
        weights = torch.tensor([1.0, 2.0, 0.0, 1.0, 3.0, 0.5], dtype=torch.float64)
        options = {"lambda_val": 4.0, "margin": 0.25, "lambda_per": lambda_per}
        rows = [(segments == q).nonzero()[:, 0] for q in range(6)]
        losses, shares, grads = oracles.rank_loss(
            [scores[row].tolist() for row in rows],
            [relevance[row].tolist() for row in rows],
            oracles.ap_item,
            mask=None if mask is None else [mask[row].tolist() for row in rows],
            weights=weights.tolist(),
            **options,
        )
        y = scores.clone().requires_grad_()
        each = average_precision_loss(
            y, relevance, mask=mask, segments=segments, weights=weights, reduction="none", **options
        )
        np.testing.assert_allclose(each.detach().numpy(), np.multiply(losses, weights.tolist()), atol=1e-12)
        loss = average_precision_loss(y, relevance, mask=mask, segments=segments, weights=weights, **options)
        assert loss.item() == pytest.approx(np.dot(shares, losses), abs=1e-12)
        loss.backward()
        for row, expected in zip(rows, grads, strict=True):
            np.testing.assert_allclose(y.grad[row].numpy(), expected, atol=1e-9)
        moved += int(y.grad.count_nonzero())
    assert moved > 100


def test_segments_without_weights_end_with_the_largest():
    scores, relevance = torch.tensor([0.5, 0.2, 0.1]), torch.tensor([False, True, True])
    losses = recall_loss(scores, relevance, lambda_val=1.0, segments=torch.tensor([0, 0, 3]), reduction="none")
    assert losses.tolist() == pytest.approx([np.log(2), 0.0, 0.0, 0.0])
    nothing = recall_loss(scores[:0], relevance[:0], lambda_val=1.0, segments=torch.zeros(0, dtype=torch.int64))
    assert nothing.item() == 0


@pytest.mark.usefixtures("kernel")
def test_item_weights_are_those_of_the_relevant_items_in_the_mean_of_their_row():
    """A row's loss is Σ w_i ℓ_i / Σ w_i; what weighs more moves further."""
    scores = torch.tensor([[0.5, 0.4, 0.3, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4, 0.5]], dtype=torch.float64)
    relevance = torch.tensor([[False, True, False, True, False], [True, False, False, False, True]])
    item_weights = torch.tensor([[9.0, 1.0, 9.0, 3.0, 9.0], [0.0, 9.0, 9.0, 9.0, 0.0]])
    loss, _ = rank_loss(
        scores, relevance, recall_item_loss("log"), lambda_val=1.0, item_weights=item_weights, reduction="none"
    )
    # One and two irrelevant items above; the second row's relevant items weigh nothing.
    assert loss.tolist() == pytest.approx([(1 * np.log(2) + 3 * np.log(3)) / 4, 0.0])
    y = scores[:1].clone().requires_grad_()
    loss, _ = rank_loss(y, relevance[:1], recall_item_loss("log"), lambda_val=0.1, item_weights=item_weights[:1])
    loss.backward()
    # λ·N = 0.5, the slopes 1/2 · 1/4 and 1/3 · 3/4: 0.4 moves to 0.4625, which changes nothing, 0.2 to 0.325, past 0.3.
    np.testing.assert_allclose(y.grad.numpy(), [[0, 0, 1 / 0.5, -1 / 0.5, 0]], atol=1e-12)


@pytest.mark.usefixtures("kernel")
def test_equal_weights_are_no_weights(problem):
    scores, relevance = problem
    weighted = grad_of(scores, relevance, item_weights=torch.full((16, 64), 2.5))
    torch.testing.assert_close(weighted, grad_of(scores, relevance))


@pytest.mark.usefixtures("kernel")
def test_grades_reach_the_item_loss_and_break_ties_the_lower_grade_first():
    scores = torch.tensor([[0.5, 0.5, 0.5, 0.5, 0.9]])
    relevance = torch.tensor([[True, True, True, False, False]])
    mask = torch.tensor([[True, True, True, True, False]])
    grades = torch.tensor([[3.0, -1.0, 2.0, 77.0, 77.0]])
    seen = []

    def item_loss(rank, rank_plus, num_relevant, grade):
        seen.extend(zip(rank.flatten().tolist(), rank_plus.flatten().tolist(), grade.flatten().tolist(), strict=True))
        return rank * grade

    loss, _ = rank_loss(scores, relevance, item_loss, lambda_val=1.0, mask=mask, grades=grades)
    assert {(2.0, 1.0, -1.0), (3.0, 2.0, 2.0), (4.0, 3.0, 3.0)} <= set(seen)
    assert loss.item() == pytest.approx((2 * -1 + 3 * 2 + 4 * 3) / 3)


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(16, 64, generator=generator, dtype=torch.float64)
    relevance = torch.rand(16, 64, generator=generator) < 0.1
    return scores, relevance


def grad_of(scores, relevance, backward=torch.Tensor.backward, loss_fn=average_precision_loss, **options):
    y = scores.clone().requires_grad_()
    backward(loss_fn(y, relevance, **({"lambda_val": 0.5, "margin": 0.1} | options)))
    return y.grad


@pytest.mark.parametrize("loss_fn", [average_precision_loss, recall_loss])
class TestLambdaIsInvariant:
    def test_to_a_loss_weight(self, problem, loss_fn):
        scaled = grad_of(*problem, backward=lambda loss: (loss * 65_536).backward(), loss_fn=loss_fn)
        torch.testing.assert_close(scaled / 65_536, grad_of(*problem, loss_fn=loss_fn))
        assert scaled.abs().max() > 0

    def test_to_accumulated_halves(self, problem, loss_fn):
        y = problem[0].clone().requires_grad_()
        for _ in range(2):
            (loss_fn(y, problem[1], lambda_val=0.5, margin=0.1) * 0.5).backward()
        torch.testing.assert_close(y.grad, grad_of(*problem, loss_fn=loss_fn))

    def test_to_a_grad_scaler(self, problem, loss_fn):
        scores, relevance = problem[0].float(), problem[1]
        steps = []
        for enabled in (False, True):
            y = torch.nn.Parameter(scores.clone())
            optimizer = torch.optim.SGD([y], lr=1.0)
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, enabled=enabled)
            scaler.scale(loss_fn(y, relevance, lambda_val=0.5, margin=0.1)).backward()
            if enabled:
                assert y.grad.abs().max() > 1
            scaler.step(optimizer)
            steps.append(y.detach() - scores)
        torch.testing.assert_close(*steps)
        assert steps[0].abs().max() > 0

    def test_and_rank_composed_by_hand_is_not(self, problem, loss_fn):
        """What the losses avoid: the same loss on ``rank`` changes its gradient with its weight."""
        scores, relevance = problem

        def composed(weight):
            y = scores.clone().requires_grad_()
            ranks = rank(y, 0.5)
            (weight * (ranks * relevance).sum()).backward()
            return y.grad / weight

        assert not torch.allclose(composed(1.0), composed(65_536.0))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("loss_fn", [average_precision_loss, recall_loss])
def test_half_precision_is_ranked_in_float32(problem, dtype, loss_fn):
    half = problem[0].to(dtype).requires_grad_()
    full = half.detach().float().requires_grad_()
    loss_full = loss_fn(full, problem[1], lambda_val=0.5, margin=0.1)
    loss_full.backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss_half = loss_fn(half, problem[1], lambda_val=0.5, margin=0.1)
    loss_half.backward()
    assert loss_half.dtype == torch.float32
    assert half.grad.dtype == dtype
    assert half.grad.isfinite().all()
    assert half.grad.abs().max() > 0
    assert loss_half.item() == loss_full.item()
    assert torch.equal(half.grad, full.grad.to(dtype))
    ranks = rank(half, 0.5)
    assert ranks.dtype == torch.float32
    assert torch.equal(ranks, rank(half.float(), 0.5))


@pytest.mark.parametrize("shape", [(5,), (0,), (3, 4), (3, 0), (0, 4), (2, 3, 4)])
@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("loss_fn", [average_precision_loss, recall_loss])
def test_without_a_relevant_item_the_loss_is_a_zero_in_the_graph(shape, loss_fn):
    scores = torch.zeros(shape, requires_grad=True)
    loss = loss_fn(scores, torch.zeros(shape, dtype=torch.bool), lambda_val=0.5)
    loss.backward()
    assert loss.item() == 0
    assert torch.equal(scores.grad, torch.zeros(shape))


@pytest.mark.parametrize("loss_fn", [average_precision_loss, recall_loss])
def test_masking_equals_removal(problem, loss_fn):
    scores, relevance = (x[0] for x in problem)
    mask = torch.rand(64, generator=torch.Generator().manual_seed(1)) < 0.6
    scores[~mask] = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e9] * 64)[: (~mask).sum()].double()
    masked = grad_of(scores, relevance, loss_fn=loss_fn, mask=mask)
    torch.testing.assert_close(masked[mask], grad_of(scores[mask], relevance[mask], loss_fn=loss_fn))
    assert torch.equal(masked[~mask], torch.zeros_like(masked[~mask]))
    assert grad_of(scores, relevance, loss_fn=loss_fn, mask=torch.zeros_like(mask)).eq(0).all()


def test_a_constant_score_is_the_worst_score():
    for place in range(10):
        relevance = torch.arange(10) == place
        assert recall_loss(torch.zeros(10), relevance, lambda_val=1.0).item() == pytest.approx(np.log(10))
        assert average_precision_loss(torch.zeros(10), relevance, lambda_val=1.0).item() == pytest.approx(0.9)


def test_margin_is_half_on_each_side():
    scores, relevance = torch.tensor([0.50, 0.41]), torch.tensor([True, False])
    for margin, expected in ((0.0, 0.0), (0.08, 0.0), (0.1, 0.5)):
        loss = average_precision_loss(scores, relevance, lambda_val=1.0, margin=margin)
        assert loss.item() == pytest.approx(expected), margin


@pytest.mark.parametrize("rank_plus_grad", [False, True])
def test_several_margins_are_the_mean_of_the_losses_and_of_their_gradients(problem, rank_plus_grad):
    scores, relevance = problem
    options = {"lambda_val": 0.3, "rank_plus_grad": rank_plus_grad}
    losses, gradients = [], []
    for margin in (0.0, 0.3, 1.0):
        leaf = scores.detach().clone().requires_grad_()
        loss, statistics = rank_loss(leaf, relevance, average_precision_item_loss, margin=margin, **options)
        loss.backward()
        losses.append((loss.item(), statistics.mean_r, statistics.zero_gradient))
        gradients.append(leaf.grad)
    assert losses[0][0] < losses[1][0] < losses[2][0]
    leaf = scores.detach().clone().requires_grad_()
    loss, statistics = rank_loss(leaf, relevance, average_precision_item_loss, margin=[0.0, 0.3, 1.0], **options)
    loss.backward()
    assert loss.item() == pytest.approx(sum(one for one, _, _ in losses) / 3)
    torch.testing.assert_close(leaf.grad, sum(gradients) / 3)
    torch.testing.assert_close(statistics.mean_r, sum(mean for _, mean, _ in losses) / 3)
    assert torch.equal(statistics.zero_gradient, torch.stack([still for _, _, still in losses]).amin(0))


def test_several_random_margins_are_drawn_one_after_the_other(problem):
    first = RecallLoss(lambda_val=0.3, margin=(0.5, 0.5), generator=torch.Generator().manual_seed(3))(*problem)
    one = RecallLoss(lambda_val=0.3, margin=0.5, generator=torch.Generator().manual_seed(3))
    assert first.item() == pytest.approx((one(*problem).item() + one(*problem).item()) / 2)


def test_margins_that_are_none_are_refused(problem):
    for margin, message in (
        ((), "one or more"),
        ([0.1, -1.0], "got -1.0"),
        ([0.1, "a"], "got 'a'"),
        ("ab", "got 'ab'"),
    ):
        with pytest.raises(ValueError, match=f"margin must be .*{message}"):
            recall_loss(*problem, lambda_val=0.3, margin=margin)
        with pytest.raises(ValueError, match=f"margin must be .*{message}"):
            RecallLoss(lambda_val=0.3, margin=margin)


def test_random_margin_is_seeded_and_has_the_mean_of_a_half_normal():
    relevance = torch.arange(20_000) < 10_000
    seen = {}

    def item_loss(rank, rank_plus, num_relevant):
        seen["ranks"] = rank.detach()
        return rank

    def ranks(seed):
        generator = torch.Generator().manual_seed(seed)
        scores = torch.where(relevance, 0.0, -1.0)
        rank_loss(scores, relevance, item_loss, lambda_val=1.0, margin=2.0, generator=generator)
        return seen["ranks"].flatten()[:10_000]

    assert torch.equal(ranks(0), ranks(0))
    assert not torch.equal(ranks(0), ranks(1))
    # Irrelevant -1 + |z|, relevant -|z'|: above when |z| + |z'| >= 1, a probability of 0.7298 by integration.
    above = (ranks(2) - torch.arange(1, 10_001).float()[ranks(2).argsort().argsort()]).mean() / 10_000
    z = np.abs(np.random.default_rng(0).normal(size=(2, 1_000_000)))
    assert above.item() == pytest.approx((z.sum(0) >= 1).mean(), abs=0.01)


def test_ap_over_all_rows_ranks_them_as_one(problem):
    scores, relevance = problem
    mask = torch.rand(scores.shape, generator=torch.Generator().manual_seed(3)) < 0.5
    together = grad_of(scores, relevance, over_all=True, mask=mask)
    flat = grad_of(scores.flatten(), relevance.flatten(), mask=mask.flatten())
    assert torch.equal(together.flatten(), flat)
    assert together.abs().max() > 0
    module = AveragePrecisionLoss(lambda_val=0.5, margin=0.1, over_all=True)
    expected = average_precision_loss(scores.flatten(), relevance.flatten(), lambda_val=0.5, margin=0.1)
    assert module(scores, relevance) == expected
    with pytest.raises(ValueError, match="over_all"):
        module(scores, relevance, None, torch.ones(16))
    with pytest.raises(ValueError, match="shape"):
        module(scores, relevance.T)


def test_leading_dimensions_are_rows(problem):
    scores, relevance = problem
    expected = average_precision_loss(scores, relevance, lambda_val=0.5, reduction="none")
    shaped = average_precision_loss(scores.view(2, 8, 64), relevance.view(2, 8, 64), lambda_val=0.5, reduction="none")
    assert torch.equal(shaped, expected.view(2, 8))
    assert average_precision_loss(scores[0], relevance[0], lambda_val=0.5, reduction="none").shape == ()


def test_lambda_per_row_does_not_depend_on_the_batch(problem):
    scores, relevance = problem
    relevance[:, 0] = True
    alone = grad_of(scores[:1], relevance[:1], lambda_per="row")
    among = grad_of(scores, relevance, lambda_per="row")
    torch.testing.assert_close(among[:1] * 16, alone)
    torch.testing.assert_close(grad_of(scores, relevance, lambda_val=0.5 * 16), among)


def test_statistics_of_the_forward_pass():
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]], requires_grad=True)
    relevance = torch.tensor([[True, False, True, False], [False, False, False, False]])
    loss_fn = RecallLoss(lambda_val=1e-3)
    loss_fn(scores, relevance)
    assert loss_fn.statistics.num_relevant.tolist() == [2, 0]
    assert loss_fn.statistics.mean_r.tolist() == [0.5, 0.0]
    assert loss_fn.statistics.zero_gradient.tolist() == [2, 0]  # the step is too small to move anything
    loss_fn = RecallLoss(lambda_val=10.0)
    loss_fn(scores, relevance)
    assert loss_fn.statistics.zero_gradient.tolist() == [1, 0]  # the third item overtakes the second, the first stays


def test_modules_equal_functions(problem):
    for weighting in ("log", "loglog", TABLE):
        module = RecallLoss(lambda_val=0.3, margin=0.1, weighting=weighting, reduction="none")
        expected = recall_loss(*problem, lambda_val=0.3, margin=0.1, weighting=weighting, reduction="none")
        assert torch.equal(module(*problem), expected)
    assert "lambda_val=0.3" in repr(module)


def test_module_checkpoint_restores_the_random_margin(problem):
    def module(seed):
        return RecallLoss(lambda_val=0.3, margin=1.0, generator=torch.Generator().manual_seed(seed))

    first, second = module(0), module(1)
    first(*problem)
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(*problem), second(*problem))
    with pytest.raises(RuntimeError, match="generator"):
        second.load_state_dict({})
    RecallLoss(lambda_val=0.3).load_state_dict({})


def test_gradient_descent_ranks_the_relevant_first():
    torch.manual_seed(0)
    scores, relevance = torch.nn.Parameter(torch.randn(8, 40)), torch.rand(8, 40) < 0.2
    for loss_fn in (AveragePrecisionLoss(lambda_val=50.0, margin=0.2), RecallLoss(lambda_val=50.0, margin=0.2)):
        y = torch.nn.Parameter(scores.detach().clone())
        optimizer = torch.optim.Adam([y], lr=0.05)
        before = loss_fn(y, relevance).item()
        for _ in range(200):
            optimizer.zero_grad()
            loss_fn(y, relevance).backward()
            optimizer.step()
        assert before > 0.3
        assert loss_fn(y, relevance).item() < before / 5


def test_a_loss_of_ones_own_is_an_item_loss():
    class ReciprocalRankLoss(RankLoss):
        def __init__(self, **options):
            super().__init__(lambda rank, rank_plus, num_relevant: 1 - 1 / rank, **options)

    loss = ReciprocalRankLoss(lambda_val=1.0)(torch.tensor([3.0, 2.0, 1.0]), torch.tensor([False, True, True]))
    assert loss.item() == pytest.approx(1 - (1 / 2 + 1 / 3) / 2)


SCORES, RELEVANCE = torch.zeros(2, 3), torch.tensor([[True, False, True], [False, True, True]])
FLAT = {"scores": torch.zeros(3), "relevance": torch.tensor([True, False, True])}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"scores": [0.1]}, TypeError, "torch.Tensor, got list"),
        ({"scores": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "floating point, got torch.int64"),
        ({"scores": torch.tensor(0.0)}, ValueError, "without dimensions"),
        ({"scores": torch.tensor([[0.0, float("nan"), 0.0]] * 2)}, ValueError, r"2 NaN of 6, the first at \(0, 1\)"),
        ({"relevance": torch.zeros(2, 3)}, TypeError, "relevance must be a bool tensor, got torch.float32"),
        ({"relevance": torch.zeros(3, 2, dtype=torch.bool)}, ValueError, r"shape \(2, 3\).* got \(3, 2\)"),
        ({"relevance": torch.zeros(2, 3, dtype=torch.bool, device="meta")}, ValueError, "device"),
        ({"mask": torch.zeros(3, dtype=torch.bool)}, ValueError, r"mask must have shape \(2, 3\)"),
        ({"weights": torch.zeros(3)}, ValueError, r"weights must have shape \(2,\)"),
        ({"item_weights": torch.zeros(3)}, ValueError, r"item_weights must have shape \(2, 3\)"),
        ({"grades": torch.zeros(2, 3, dtype=torch.int64)}, TypeError, "grades must be a floating-point"),
        ({"grades": torch.zeros(2, 3)}, TypeError, "grades are a fourth argument"),
        ({"segments": torch.zeros(2, 3, dtype=torch.int64)}, ValueError, r"flat scores \(M,\), got .*\(2, 3\)"),
        (FLAT | {"segments": torch.zeros(3)}, TypeError, "segments must be an int64 tensor, got torch.float32"),
        (FLAT | {"segments": torch.tensor([0, -1, 2])}, ValueError, "segments must lie in 0 to 2, got values from -1"),
        (FLAT | {"segments": torch.tensor([0, 1, 2]), "weights": torch.ones(2)}, ValueError, "0 to 1, .* from 0 to 2"),
        ({"margins": 0.1}, TypeError, "margins"),
        ({"weights": torch.zeros(2, dtype=torch.int64)}, TypeError, "weights must be a floating-point"),
        ({"lambda_val": 0.0}, ValueError, "lambda_val must be a finite number > 0, got 0.0"),
        ({"lambda_val": float("nan")}, ValueError, "lambda_val"),
        ({"lambda_val": "4"}, ValueError, "lambda_val"),
        ({"margin": -0.1}, ValueError, "margin must be a finite number >= 0, got -0.1"),
        ({"reduction": "avg"}, ValueError, "reduction must be one of 'mean', 'sum', 'none', got 'avg'"),
        ({"lambda_per": "query"}, ValueError, "lambda_per must be one of 'batch', 'row'"),
        ({"weighting": "linear"}, ValueError, "weighting must be one of 'log', 'loglog', got 'linear'"),
        ({"weighting": []}, ValueError, r"shape \(M,\)"),
        ({"weighting": 3}, TypeError, r"shape \(M,\)"),
        ({"weighting": object()}, TypeError, "a name, a callable or a table"),
        (
            {"weighting": lambda r: r.sum()},
            ValueError,
            r"item_loss must return a tensor of the shape of its ranks, .*got \(\)",
        ),
    ],
)
def test_bad_input_is_named(change, error, message):
    arguments = {"scores": SCORES, "relevance": RELEVANCE, "lambda_val": 1.0} | change
    scores, relevance = arguments.pop("scores"), arguments.pop("relevance")
    with pytest.raises(error, match=message):
        recall_loss(scores, relevance, **arguments)


def test_the_nan_check_can_be_switched_off():
    scores = torch.tensor([float("nan"), 1.0])
    check_nan(False)
    try:
        recall_loss(scores, torch.tensor([True, False]), lambda_val=1.0)
    finally:
        check_nan(True)
    with pytest.raises(ValueError, match="NaN"):
        recall_loss(scores, torch.tensor([True, False]), lambda_val=1.0)
    with pytest.raises(ValueError, match="NaN"):
        rank(scores, 1.0)


@pytest.mark.usefixtures("kernel")
def test_infinite_scores_rank_like_any_others():
    for order in itertools.permutations([-float("inf"), 0.0, float("inf")]):
        scores = torch.tensor(order, requires_grad=True)
        relevance = torch.tensor(order) == 0
        loss = average_precision_loss(scores, relevance, lambda_val=1.0)
        loss.backward()
        assert loss.item() == 0.5
        assert scores.grad.isfinite().all()


def test_torch_func_and_vmap_are_refused_clearly():
    relevance = torch.tensor([True, False, True])

    def loss(scores):
        return recall_loss(scores, relevance, lambda_val=1.0)

    for transformed in (torch.func.grad(loss), torch.func.vmap(loss)):
        with pytest.raises(TypeError, match=r"torch\.func transforms or vmap"):
            transformed(torch.zeros(3, 3))


def test_compiled_training_steps_break_once_and_have_the_same_gradient(problem):
    scores, relevance = problem

    def step(y):
        return 3 * average_precision_loss(2 * y, relevance, lambda_val=20.0, margin=0.1)

    plain, y = (scores.clone().requires_grad_() for _ in range(2))
    step(plain).backward()
    torch.compile(step, backend="eager")(y).backward()
    assert plain.grad.count_nonzero()
    assert torch.equal(y.grad, plain.grad)
    assert torch._dynamo.explain(step)(y).graph_break_count == 1


def test_without_numba_the_other_kernels_run(problem, monkeypatch):
    few = torch.arange(2**13) < 3
    scores, relevance = few.float()[None], few[None]
    assert kernels.kernel_for(scores, relevance) is compiled
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "numba" else find_spec(name))
    kernels.compiled_kernel.cache_clear()
    try:
        assert kernels.kernel_for(scores, relevance) is counting
        assert kernels.kernel_for(scores[:, :100], relevance[:, :100]) is sorting
        assert kernels.kernel_for(scores, torch.ones_like(relevance)) is sorting
    finally:
        kernels.compiled_kernel.cache_clear()


def test_a_numba_that_does_not_work_is_reported(monkeypatch):
    monkeypatch.delattr("rambo_plugins.core.compiled")
    monkeypatch.setitem(sys.modules, "rambo_plugins.core.compiled", None)
    kernels.compiled_kernel.cache_clear()
    try:
        with pytest.warns(UserWarning, match="numba is installed, but cannot be used"):
            assert kernels.compiled_kernel() is None
    finally:
        kernels.compiled_kernel.cache_clear()


def distinct_problem(seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, 12, generator=generator, dtype=torch.float64)
    return scores, torch.rand(4, 12, generator=generator) < 0.4


def outcome(loss_fn, scores, values):
    """The loss and its gradient, in one tensor."""
    y = scores.clone().requires_grad_()
    loss = loss_fn(y, values)
    loss.backward()
    return torch.cat([loss.detach()[None], y.grad.flatten()])


def own_item_loss(rank, rank_plus, num_relevant):
    return rank.log()


def own_weighting(r):
    return r.sqrt()


MODULES = {  # how each public loss is made; the last is called with floats, the others with what is relevant
    "RankLoss": lambda **options: RankLoss(own_item_loss, **options),
    "RecallLoss": RecallLoss,
    "RecallLoss, table": lambda **options: RecallLoss(weighting=np.array([1.0, 0.5, 0.25]), **options),
    "RecallLoss, function": lambda **options: RecallLoss(weighting=own_weighting, **options),
    "RecallLoss, loglog": lambda **options: RecallLoss(weighting="loglog", **options),
    "AveragePrecisionLoss": AveragePrecisionLoss,
    "ReciprocalRankLoss": core.ReciprocalRankLoss,
    "PrecisionAtKLoss": lambda **options: core.PrecisionAtKLoss(k=3, **options),
    "RecallAtKLoss": lambda **options: core.RecallAtKLoss(ks=(1, 4), **options),
    "NDCGLoss": core.NDCGLoss,
    "NDCGLoss, cutoff": lambda **options: core.NDCGLoss(cutoff=3, **options),
    "SpearmanLoss": core.SpearmanLoss,
}
every_module = pytest.mark.parametrize("name", MODULES)


def problem_of(name, seed=0):
    scores, relevance = distinct_problem(seed)
    if name.startswith(("NDCG", "Spearman")):
        return scores, relevance * torch.arange(1.0, 13.0, dtype=torch.float64)
    return scores, relevance


def test_every_public_loss_is_among_the_modules_of_these_tests():
    public = {name for name in core.__all__ if isinstance(getattr(core, name), type)}
    losses = {name for name in public if issubclass(getattr(core, name), torch.nn.Module)} - {"ScoreMemory"}
    assert losses == {name.split(",")[0] for name in MODULES}


def through_a_file(module, folder):
    torch.save(module, folder / "loss.pt")
    return torch.load(folder / "loss.pt", weights_only=False)


@every_module
def test_every_loss_can_be_pickled_saved_and_copied_with_its_random_margin(name, tmp_path):
    def made():
        return MODULES[name](lambda_val=5.0, margin=0.5, generator=torch.Generator().manual_seed(3))

    scores, values = problem_of(name)
    first, expected = made(), made()
    for loss_fn in (first, expected):
        outcome(loss_fn, scores, values)
    copies = [pickle.loads(pickle.dumps(first)), copy.deepcopy(first), through_a_file(first, tmp_path)]
    outcome(first, scores, values)  # the copies draw for themselves
    then = outcome(expected, scores, values)
    assert then[1:].any()
    for other in copies:
        assert torch.equal(outcome(other, scores, values), then)
        assert repr(other) == repr(first)
    plain = pickle.loads(pickle.dumps(MODULES[name](lambda_val=5.0)))
    assert torch.equal(outcome(plain, scores, values), outcome(MODULES[name](lambda_val=5.0), scores, values))


NUMBERS = {
    "int": 2, "float": 2.0, "fraction": fractions.Fraction(2), "np.float32": np.float32(2), "np.float16": np.float16(2),
    "np.float64": np.float64(2), "np.int64": np.int64(2), "np.uint8": np.uint8(2), "array": np.array(2.0),
    "int array": np.array(2), "tensor": torch.tensor(2.0), "bfloat16": torch.tensor(2.0, dtype=torch.bfloat16),
    "int tensor": torch.tensor(2),
}  # fmt: skip
NO_NUMBERS = {
    "bool": True, "np.bool": np.True_, "bool tensor": torch.tensor(True), "str": "2", "np.str": np.str_("2"),
    "None": None, "complex": 2 + 0j, "list": [2.0], "tensor (1,)": torch.tensor([2.0]), "nan": float("nan"),
    "np.nan": np.float32("nan"), "nan tensor": torch.tensor(float("nan")), "inf": float("inf"),
    "np.inf": np.float64("inf"),
    "huge int": 10**400, "device": torch.empty((), device="meta"), "learned": torch.tensor(2.0, requires_grad=True),
    "negative": -2,
}  # fmt: skip


@pytest.mark.parametrize("kind", NUMBERS)
def test_numbers_of_numpy_and_torch_are_numbers(kind, problem):
    number = NUMBERS[kind]
    expected = outcome(RecallLoss(lambda_val=2.0, margin=2.0), *problem)
    assert expected[1:].any()
    module = RecallLoss(lambda_val=number, margin=number)
    assert (type(module.lambda_val), type(module.margin)) == (float, float)
    assert torch.equal(outcome(module, *problem), expected)
    function = functools.partial(recall_loss, lambda_val=number, margin=number)
    assert torch.equal(outcome(function, *problem), expected)
    assert torch.equal(rank(problem[0], number), rank(problem[0], 2.0))
    expected = outcome(core.PrecisionAtKLoss(k=2, lambda_val=2.0, temperature=2.0), *problem)
    if "int" in kind:
        precision = core.PrecisionAtKLoss(k=number, lambda_val=2.0, temperature=number)
        assert torch.equal(outcome(precision, *problem), expected)
        gains = problem[1].double()
        cut = [core.NDCGLoss(cutoff=k, lambda_val=2.0, temperature=k) for k in (number, 2)]
        assert torch.equal(*(outcome(loss_fn, problem[0], gains) for loss_fn in cut))
        assert core.RecallAtKLoss(ks=number, lambda_val=2.0)(*problem) == core.RecallAtKLoss(ks=2, lambda_val=2.0)(
            *problem
        )
    else:
        for make in (core.PrecisionAtKLoss, lambda k, **of: core.RecallAtKLoss(ks=k, **of)):
            with pytest.raises(ValueError, match="must be an integer >= 1"):
                make(k=2.5 if kind in ("int", "fraction") else number, lambda_val=1.0)


@pytest.mark.parametrize("kind", NO_NUMBERS)
def test_what_is_no_number_is_refused_everywhere(kind, problem):
    value = NO_NUMBERS[kind]
    made = {
        "lambda_val": lambda v: recall_loss(*problem, lambda_val=v),
        "lambda_val ": lambda v: rank(problem[0], v),
        "lambda_val  ": lambda v: AveragePrecisionLoss(lambda_val=v),
        "margin": lambda v: RecallLoss(lambda_val=1.0, margin=[0.1, v]),
        "temperature": lambda v: core.PrecisionAtKLoss(k=2, lambda_val=1.0, temperature=v),
        "temperature ": lambda v: core.RecallAtKLoss(ks=2, lambda_val=1.0, temperature=v),
        "temperature  ": lambda v: core.NDCGLoss(lambda_val=1.0, temperature=v),
        "k": lambda v: core.PrecisionAtKLoss(k=v, lambda_val=1.0),
        "ks": lambda v: core.RecallAtKLoss(ks=[1, v], lambda_val=1.0),
    }
    if kind != "negative":
        made["weight of the table"] = lambda v: RecallLoss(lambda_val=1.0, weighting=[1.0, v])
    if kind != "None":
        made["cutoff"] = lambda v: core.NDCGLoss(lambda_val=1.0, cutoff=v)
        made["margin "] = lambda v: RecallLoss(lambda_val=1.0, margin=[v, v])
    for name, make in made.items():
        with pytest.raises(ValueError, match=f"{name.strip()} must"):
            make(value)


@pytest.mark.parametrize("several", [list, tuple, np.array, torch.tensor, lambda v: np.array(v, dtype=np.float64)])
def test_several_numbers_are_a_sequence_an_array_or_a_tensor(several, problem):
    table = several([1.0, 0.5, 0.25])
    assert torch.equal(
        outcome(RecallLoss(lambda_val=2.0, margin=table, weighting=table), *problem),
        outcome(RecallLoss(lambda_val=2.0, margin=[1.0, 0.5, 0.25], weighting=[1.0, 0.5, 0.25]), *problem),
    )
    margins = RecallLoss(lambda_val=2.0, margin=several(np.linspace(0, 1, 3).tolist())).margin
    assert margins == (0.0, 0.5, 1.0)
    one, other = (core.RecallAtKLoss(ks=ks, lambda_val=2.0) for ks in ([1, 4], np.array([1, 4])))
    assert one(*problem) == other(*problem) == core.RecallAtKLoss(ks=torch.tensor([1, 4]), lambda_val=2.0)(*problem)


@pytest.mark.parametrize("lambda_val", [1e-31, 1e-320, 1e31, 1e300])
def test_a_lambda_whose_steps_vanish_or_overflow_is_refused(lambda_val, problem):
    for call in (lambda: recall_loss(*problem, lambda_val=lambda_val), lambda: rank(problem[0], lambda_val)):
        with pytest.raises(ValueError, match=r"lambda_val must lie between 1e-30 and 1e\+30"):
            call()
    with pytest.raises(ValueError, match="lambda_val"):
        RecallLoss(lambda_val=lambda_val)
    with pytest.raises(ValueError, match=r"margin must be at most 1e\+30"):
        recall_loss(*problem, lambda_val=1.0, margin=1e39)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("lambda_val", [1e-30, 1e30])
def test_the_bounds_of_lambda_give_finite_gradients(lambda_val):
    relevance = torch.arange(5) < 2
    for scores in (torch.zeros(5), torch.arange(5.0), torch.tensor([-1e38, 1e38, 0.0, 1.0, -float("inf")])):
        grad = outcome(AveragePrecisionLoss(lambda_val=lambda_val, margin=0.1), scores, relevance)
        assert grad.isfinite().all()


BAD = (float("nan"), float("inf"), -1.0)


@pytest.mark.parametrize("bad", BAD)
def test_weights_and_grades_that_are_no_weights_or_grades_are_named(bad, problem):
    scores, relevance = problem
    scores, relevance = scores[:2, :4], torch.tensor([[True, False, False, True], [False, True, False, False]])
    of_rows, of_items = torch.tensor([1.0, bad]), torch.ones(2, 4)
    of_items[0, 3] = bad
    for call in (
        lambda: recall_loss(scores, relevance, lambda_val=1.0, weights=of_rows),
        lambda: core.ndcg_loss(scores, of_items.double(), lambda_val=1.0, weights=of_rows),
    ):
        with pytest.raises(ValueError, match=r"must be finite numbers >= 0 .*1 others of \d, the first at \(.*\): "):
            call()
    with pytest.raises(ValueError, match=rf"^item_weights must be .*1 others of 8, the first at \(0, 3\): {bad}"):
        recall_loss(scores, relevance, lambda_val=1.0, item_weights=of_items)
    with pytest.raises(ValueError, match=rf"^gains must be .*1 others of 8, the first at \(0, 3\): {bad}"):
        core.ndcg_loss(scores, of_items, lambda_val=1.0)
    if bad != -1.0:
        with pytest.raises(
            ValueError, match=rf"^grades must be finite, got 1 others of 8, the first at \(0, 3\): {bad}"
        ):
            rank_loss(scores, relevance, lambda r, p, n, g: r * g, lambda_val=1.0, grades=of_items)
    if bad != bad:
        with pytest.raises(ValueError, match=r"^target must not be NaN, got 1 .* of 8, the first at \(0, 3\)"):
            core.spearman_loss(scores, of_items, lambda_val=1.0)
    # What is not read may be anything: irrelevant items, those that do not exist.
    elsewhere, mask = torch.ones(2, 4), torch.ones(2, 4, dtype=torch.bool)
    elsewhere[0, 1], mask[0, 1] = bad, False
    expected = recall_loss(scores, relevance, lambda_val=1.0)
    assert recall_loss(scores, relevance, lambda_val=1.0, item_weights=elsewhere) == expected
    for loss_fn in (core.ndcg_loss, core.spearman_loss):
        clean = elsewhere.nan_to_num(1.0, 1.0, 1.0).abs()
        assert loss_fn(scores, elsewhere, lambda_val=1.0, mask=mask) == loss_fn(
            scores, clean, lambda_val=1.0, mask=mask
        )


def test_weights_whose_sum_is_infinite_are_refused(problem):
    scores, relevance = (values.float() if values.is_floating_point() else values for values in problem)
    for weights in ({"weights": torch.full((16,), 3e38)}, {"item_weights": torch.full((16, 64), 3e38)}):
        with pytest.raises(ValueError, match=r"weights must be .* with a finite sum, got an infinite sum"):
            recall_loss(scores, relevance, lambda_val=1.0, **weights)
    with pytest.raises(ValueError, match=r"gains must be .* with a finite sum"):
        core.ndcg_loss(scores, torch.full((16, 64), 3e38), lambda_val=1.0)


def test_infinite_targets_are_ranked():
    scores = torch.tensor([3.0, 1.0, 2.0])
    infinite = core.spearman_loss(scores, torch.tensor([float("inf"), -float("inf"), 0.0]), lambda_val=1.0)
    assert infinite.item() == pytest.approx(0.0, abs=1e-6)


def test_weights_of_items_that_would_learn_are_refused_and_those_of_rows_learn(problem):
    scores, relevance = problem
    learned = torch.ones(16, 64, dtype=torch.float64, requires_grad=True)
    for call in (
        lambda: recall_loss(scores, relevance, lambda_val=1.0, item_weights=learned),
        lambda: core.ndcg_loss(scores, learned, lambda_val=1.0),
        lambda: core.spearman_loss(scores, learned, lambda_val=1.0),
    ):
        with pytest.raises(ValueError, match="must not require a gradient, of which none would reach it"):
            call()
    weights = torch.ones(16, dtype=torch.float64, requires_grad=True)
    each = recall_loss(scores, relevance, lambda_val=1.0, reduction="none")
    recall_loss(scores, relevance, lambda_val=1.0, weights=weights, reduction="sum").backward()
    torch.testing.assert_close(weights.grad, each)


@pytest.mark.usefixtures("kernel")
def test_a_loss_of_ones_own_that_gives_nan_is_named(problem):
    for item_loss in (
        lambda rank, rank_plus, num: (rank - rank_plus) * torch.nan,
        lambda rank, rank_plus, num: (rank - rank).sqrt() * 0 + rank,  # the value is a number, the slope is none
    ):
        y = problem[0].clone().requires_grad_()
        with pytest.raises(ValueError, match="loss of an item and its slope, summed over the rows, must not be NaN"):
            rank_loss(y, problem[1], item_loss, lambda_val=1.0)
    with torch.no_grad():  # no slope is asked for
        rank_loss(y, problem[1], item_loss, lambda_val=1.0)


def test_nan_that_arrives_at_a_rank_is_nan_in_the_gradient_of_its_row():
    y = torch.tensor([[0.3, 0.1, 0.2]] * 3, requires_grad=True)
    mask = torch.tensor([[True, True, True], [True, True, True], [True, True, False]])
    arrives = torch.tensor([[0.0, 1.0, 0.0], [0.0, float("nan"), 0.0], [0.0, 1.0, float("nan")]])
    rank(y, 1.0, mask=mask).backward(arrives)
    assert y.grad.isnan().all(1).tolist() == [False, True, False]
    assert y.grad[[0, 2]].isfinite().all()


def test_a_second_derivative_is_refused_clearly(problem):
    for loss_fn in (lambda y: recall_loss(y, problem[1], lambda_val=5.0), lambda y: rank(y, 1.0)[problem[1]].sum()):
        y, scale = problem[0].clone().requires_grad_(), torch.ones((), requires_grad=True)
        (first,) = torch.autograd.grad(scale * loss_fn(y), y, create_graph=True)
        (plain,) = torch.autograd.grad(loss_fn(y), y)
        assert torch.equal(first, plain)
        with pytest.raises(RuntimeError, match="rank losses have no second derivative"):
            first.norm().backward()


def test_a_call_that_raises_leaves_the_random_margin_and_the_statistics_as_they_were(problem):
    def fails_at_the_second(rank, rank_plus, num_relevant):
        calls.append(1)
        if len(calls) == 4:  # the second margin of the second call
            raise MemoryError
        return 1 - 1 / rank

    calls = []
    loss_fn = RankLoss(
        fails_at_the_second, lambda_val=1.0, margin=[0.5, 0.5], generator=torch.Generator().manual_seed(1)
    )
    one_row = [values[:1] for values in problem]
    loss_fn(*one_row)
    statistics, drawn = loss_fn.statistics, loss_fn.generator.get_state()
    with pytest.raises(MemoryError):
        loss_fn(*one_row)
    assert loss_fn.statistics is statistics
    assert torch.equal(loss_fn.generator.get_state(), drawn)
    for bad in (problem[0] * torch.nan, problem[0][:, :3]):
        with pytest.raises(ValueError, match=r"NaN|shape"):
            loss_fn(bad, problem[1])
    assert loss_fn.statistics is statistics
    assert torch.equal(loss_fn.generator.get_state(), drawn)


def test_a_generator_of_another_device_is_named():
    scores, relevance = torch.zeros(2, 3, device="meta"), torch.zeros(2, 3, dtype=torch.bool, device="meta")
    with pytest.raises(ValueError, match="generator must be on the device of the scores, meta, got one on cpu"):
        recall_loss(scores, relevance, lambda_val=1.0, margin=0.1, generator=torch.Generator())
    for make in (functools.partial(recall_loss, SCORES, RELEVANCE), RecallLoss):
        with pytest.raises(TypeError, match=r"generator must be a torch\.Generator, got int"):
            make(lambda_val=1.0, margin=0.1, generator=3)


def test_bad_input_of_the_loss_over_all_rows_is_named(problem):
    scores, relevance = problem
    for arguments, error, message in (
        ((scores.tolist(), relevance), TypeError, "scores must be a torch.Tensor, got list"),
        ((scores, relevance.tolist()), TypeError, "relevance must be a bool tensor, got list"),
        ((scores, relevance, relevance[0]), ValueError, "mask must have shape"),
        ((scores, relevance, relevance.float()), TypeError, "mask must be a bool tensor, got torch.float32"),
    ):
        for over_all in (AveragePrecisionLoss(lambda_val=1.0, over_all=True), over_all_rows):
            with pytest.raises(error, match=message):
                over_all(*arguments)
    for value in ("False", 0):
        with pytest.raises(TypeError, match="over_all must be True or False"):
            AveragePrecisionLoss(lambda_val=1.0, over_all=value)
        with pytest.raises(TypeError, match="over_all must be True or False"):
            average_precision_loss(scores, relevance, lambda_val=1.0, over_all=value)


def over_all_rows(scores, relevance, mask=None):
    return average_precision_loss(scores, relevance, lambda_val=1.0, over_all=True, mask=mask)


@pytest.mark.parametrize("option", ["normalize", "rank_plus_grad"])
def test_switches_are_true_or_false(option, problem):
    for value in ("False", 0, None, 1.0):
        for make in (functools.partial(recall_loss, *problem), RecallLoss):
            with pytest.raises(TypeError, match=f"{option} must be True or False"):
                make(lambda_val=1.0, **{option: value})
    loss_fn = RecallLoss(lambda_val=1.0, **{option: np.True_})
    assert getattr(loss_fn, option) is True


def test_without_the_private_functions_of_torch_the_losses_run(problem, monkeypatch):
    expected = outcome(RecallLoss(lambda_val=2.0), *problem)
    monkeypatch.delattr(torch, "_assert_async")
    meta = torch.tensor(True, device="meta")
    with pytest.raises(RuntimeError, match="meta"):  # read then and there, where a tensor can be read
        checks._expect(meta, "scores hold", "NaN", lambda: meta)
    with monkeypatch.context() as removed:
        removed.delattr(torch._C._functorch, "is_functorch_wrapped_tensor")
        assert torch.equal(outcome(RecallLoss(lambda_val=2.0), *problem), expected)
        for transform, y in ((torch.func.grad, problem[0][0]), (torch.func.vmap, problem[0])):
            with pytest.raises(RuntimeError, match=r"functorch|vmap"):  # torch's own
                transform(lambda y: recall_loss(y, problem[1][0], lambda_val=1.0))(y)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("masked", [False, True])
def test_layouts_of_the_tensors_do_not_matter(problem, masked):
    mask, item_weights = torch.rand(16, 64) < 0.9, torch.rand(16, 64, dtype=torch.float64)
    whole = (*problem, mask, item_weights)

    def gradient(layout, tensors):
        leaf = tensors[0].clone().requires_grad_()
        y, relevance, mask, item_weights = map(layout, (leaf, *tensors[1:]))
        options = {"mask": mask, "item_weights": item_weights} if masked else {}
        average_precision_loss(y, relevance, lambda_val=5.0, margin=0.1, **options).backward()
        return leaf.grad

    expected = gradient(lambda values: values, whole)
    assert expected.any()
    assert torch.equal(gradient(lambda values: values.T, [values.T.contiguous() for values in whole]).T, expected)
    wide = [values.repeat_interleave(2, 1) for values in whole]
    assert torch.equal(gradient(lambda values: values[:, ::2], wide)[:, ::2], expected)
    one_row = [values[:1] for values in whole]
    repeated = gradient(lambda values: values.repeat(3, 1), one_row)
    assert repeated.any()
    assert torch.equal(gradient(lambda values: values.expand(3, -1), one_row), repeated)


@every_module
def test_without_a_gradient_the_value_is_the_same(name):
    scores, values = problem_of(name)
    loss_fn = MODULES[name](lambda_val=5.0)
    expected = loss_fn(scores.clone().requires_grad_(), values).item()
    with torch.no_grad():
        assert loss_fn(scores.clone().requires_grad_(), values).item() == expected
    with torch.inference_mode():
        assert loss_fn(scores.clone(), values.clone()).item() == expected
        made_here = scores.clone()
    assert loss_fn(made_here, values).item() == expected


@every_module
@pytest.mark.parametrize("margin", [0.0, (0.0, 0.05)])
def test_a_lambda_that_moves_nothing_is_visible_in_the_statistics(name, margin):
    scores, values = problem_of(name)
    loss_fn = MODULES[name](lambda_val=1e-9, margin=margin)
    grad = outcome(loss_fn, scores, values)[1:]
    assert not grad.any()
    assert loss_fn.statistics.num_relevant.sum() > 0
    assert torch.equal(loss_fn.statistics.zero_gradient.long(), loss_fn.statistics.num_relevant.long())
    loss_fn.lambda_val = 50.0
    assert outcome(loss_fn, scores, values)[1:].any()
    assert loss_fn.statistics.zero_gradient.sum() < loss_fn.statistics.num_relevant.sum()


@every_module
@pytest.mark.parametrize("reentrant", [False, True])
def test_a_loss_in_a_checkpointed_part_has_its_gradient(name, reentrant):
    scores, values = problem_of(name)
    loss_fn = MODULES[name](lambda_val=50.0, margin=0.1)
    y = scores.clone().requires_grad_()
    loss = torch.utils.checkpoint.checkpoint(loss_fn, 2 * y, values, use_reentrant=reentrant)
    loss.backward()
    plain = scores.clone().requires_grad_()
    loss_fn(2 * plain, values).backward()
    assert plain.grad.any()
    assert torch.equal(y.grad, plain.grad)


@pytest.mark.usefixtures("kernel")
def test_item_weights_in_segments_equal_loops():
    moved = 0
    for seed in range(10):
        scores, relevance, mask, segments = segmented(seed)
        weights = torch.rand(len(scores), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        y = scores.clone().requires_grad_()
        options = {"lambda_val": 9.0, "margin": 0.25, "lambda_per": "row", "reduction": "sum"}
        average_precision_loss(y, relevance, mask=mask, segments=segments, item_weights=weights, **options).backward()
        for q in range(int(segments.max()) + 1):
            row = [i for i in (segments == q).nonzero()[:, 0].tolist() if mask is None or mask[i]]
            relevant = [relevance[i].item() for i in row]
            shifted = [scores[i].item() + (-0.125 if rel else 0.125) for i, rel in zip(row, relevant, strict=True)]
            ranks = oracles.ranks_in_loss(shifted, relevant)
            plus = oracles.ranks_by_index([s if rel else None for s, rel in zip(shifted, relevant, strict=True)])
            total = sum(weights[i].item() for i, rel in zip(row, relevant, strict=True) if rel)
            then = [
                s + 9.0 * len(row) * weights[i].item() / total * p / r**2 if rel else s
                for i, s, rel, r, p in zip(row, shifted, relevant, ranks, plus, strict=True)
            ]
            for i, before, after in zip(row, ranks, oracles.ranks_in_loss(then, relevant), strict=True):
                assert y.grad[i].item() == pytest.approx((after - before) / (9.0 * len(row)), abs=1e-9)
        moved += int(y.grad.count_nonzero())
    assert moved > 50
