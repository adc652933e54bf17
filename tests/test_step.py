"""A step in units of the scores: against loops over pairs of items, its invariance, its limits, its exactness."""

import functools
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch

from rambo_plugins.core import (
    AveragePrecisionLoss,
    NDCGLoss,
    PrecisionAtKLoss,
    RecallAtKLoss,
    RecallLoss,
    ReciprocalRankLoss,
    SpearmanLoss,
    average_precision_item_loss,
    average_precision_loss,
    compiled,
    counting,
    kernels,
    ndcg_loss,
    precision_at_k_loss,
    rank,
    rank_loss,
    ranking,
    recall_at_k_loss,
    recall_item_loss,
    recall_loss,
    reciprocal_rank_loss,
    sorting,
    spearman_loss,
)
from rambo_plugins.core.detection import DetectionLoss
from rambo_plugins.core.graded_metrics import ndcg_item_loss, spearman_item_loss
from rambo_plugins.core.rank_metrics import reciprocal_rank_item_loss

KERNELS = {
    "compiled": (compiled, {"MANY_RELEVANT": 1.0}),
    "compiled with a table": (compiled, {"MANY_RELEVANT": 1.0, "FEW": 0}),
    "compiled in blocks with a table": (compiled, {"MANY_RELEVANT": 1.0, "FEW": 0, "BLOCK": 2}),
    "compiled in threads": (compiled, {"MANY_RELEVANT": 1.0, "ITEMS_PER_THREAD": 1}),
    "compiled by sorting all": (compiled, {"MANY_RELEVANT": 0.0, "SHORT": 0}),
    "counting": (counting, {}),
    "counting with a table": (counting, {"FEW": 0}),
    "counting in blocks": (counting, {"FEW": 0, "BLOCK": 4}),
    "sorting": (sorting, {}),
}


@pytest.fixture(params=KERNELS)
def kernel(request, monkeypatch):
    module, constants = KERNELS[request.param]
    for name, value in constants.items():
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(kernels, "kernel_for", lambda scores, relevance: module)


def spearman_slope(rank, plus, num, grade):
    deviation = math.sqrt(max((num**2 - 1) / 12, 0.25))
    return ((rank - (num + 1) / 2) / deviation + grade) / deviation


# item loss, and d loss / d rank of (rank, rank⁺, P, grade)
LOSSES = {
    "ap": (average_precision_item_loss, lambda rank, plus, num, grade: Fraction(plus, rank**2)),
    "recall": (recall_item_loss("log"), lambda rank, plus, num, grade: Fraction(1, 1 + rank - plus)),
    "table": (recall_item_loss([1.0, 0.0, 0.25]), lambda rank, plus, num, grade: [1, 0, 0.25, 0][min(rank - plus, 3)]),
    "reciprocal rank": (reciprocal_rank_item_loss, lambda rank, plus, num, grade: num * (plus == 1) / rank**2),
    "up and down": (lambda rank, *_: (rank - 3) ** 2, lambda rank, plus, num, grade: 2 * (rank - 3)),
}
GRADED = {
    "ndcg": (
        ndcg_item_loss(),
        lambda rank, plus, num, grade: grade / (math.log(2) * (1 + rank) * math.log2(1 + rank) ** 2),
    ),
    "spearman": (spearman_item_loss, spearman_slope),
    "graded": (lambda rank, plus, num, grade: grade * rank, lambda rank, plus, num, grade: grade),
}


@functools.cache
def drawn(name, seed):
    """A problem with ties, masks, weights, rows without a relevant item, and its gradient by loops over pairs."""
    draw = random.Random(seed)
    num_rows, num_items = draw.randint(1, 4), draw.randint(1, 9)
    levels = draw.choice([1, 3, 10, 2000])  # few levels: many ties; all are binary fractions, sums are exact
    scores = [[draw.randint(-levels, levels) / 1024 for _ in range(num_items)] for _ in range(num_rows)]
    if draw.random() < 0.2:
        scores = [[draw.choice([s, s, math.inf, -math.inf]) for s in row] for row in scores]
    share = [draw.choice([0.0, 0.2, 0.5, 1.0]) for _ in range(num_rows)]

    def of_items(values):
        return [[draw.choice(values) for _ in range(num_items)] for _ in range(num_rows)]

    problem = {
        "scores": scores,
        "relevance": [[draw.random() < share[q] for _ in range(num_items)] for q in range(num_rows)],
        "mask": draw.choice([None, of_items([True, True, False])]),
        "weights": draw.choice([None, [draw.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(num_rows)]]),
        "item_weights": draw.choice([None, of_items([0.0, 1.0, 2.5])]),
        "grades": of_items([-1.0, 0.0, 0.5, 2.0]) if name in GRADED else None,
        "margin": draw.choice([0.0, 1 / 512, 0.25]),
        "step": draw.choice([1 / 1024, 1 / 256, 0.25, 2.0, 64.0]),
    }
    return problem, by_pairs((LOSSES | GRADED)[name][1], **problem)


def by_pairs(slope_of, scores, relevance, mask, weights, item_weights, grades, margin, step):
    """d(Σ w_q L_q / Σ w_q)/d scores, and the number of relevant items without a gradient of L_q, a row."""
    everyone = [range(len(row)) for row in scores]
    exist = [[i for i in everyone[q] if mask is None or mask[q][i]] for q in range(len(scores))]
    relevant = [[i for i in exist[q] if relevance[q][i]] for q in range(len(scores))]
    weights = [(1.0 if weights is None else weights[q]) * bool(relevant[q]) for q in range(len(scores))]
    gradient, still = [[0.0] * len(row) for row in scores], [0] * len(scores)
    for q, own in enumerate(relevant):
        y = {i: scores[q][i] + (-margin / 2 if i in own else margin / 2) for i in exist[q]}
        grade = {i: 0 if grades is None else grades[q][i] for i in own}
        order = {i: (-y[i], 1, grade[i], i) if i in own else (-y[i], 0, 0, i) for i in exist[q]}
        total = sum(1 if item_weights is None else item_weights[q][i] for i in own)
        slope, after = {}, dict(y)
        for i in own:
            rank_plus = 1 + sum(order[k] < order[i] for k in own)
            of_mean = (1 if item_weights is None else item_weights[q][i]) / (total or 1)
            slope[i] = slope_of(1 + sum(order[j] < order[i] for j in exist[q]), rank_plus, len(own), grade[i]) * of_mean
            after[i] += step * ((slope[i] > 0) - (slope[i] < 0))
        unit = dict.fromkeys(exist[q], 0.0)
        for i in own:
            for j in exist[q]:
                if j == i:
                    continue
                equal_stays = j in own and order[i] < order[j]
                passed = (after[i] > after[j] or (after[i] == after[j] and equal_stays)) - (order[i] < order[j])
                unit[i] -= float(abs(slope[i])) * passed / step
                if j not in own:
                    unit[j] += float(abs(slope[i])) * passed / step
        for i in exist[q]:
            gradient[q][i] = unit[i] * weights[q] / (sum(weights) or 1)
        still[q] = sum(unit[i] == 0 for i in own)
    return gradient, still


def tensor_of(values):
    return values if values is None or isinstance(values, float) else torch.tensor(values, dtype=type_of(values))


def type_of(values):
    while isinstance(values, list):
        values = values[0]
    return torch.bool if isinstance(values, bool) else torch.float64


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", LOSSES | GRADED)
def test_gradients_equal_loops_over_pairs(name):
    moved = 0
    for seed in range(40):
        problem, (expected, still) = drawn(name, seed)
        tensors = {key: tensor_of(value) for key, value in problem.items()}
        y = tensors.pop("scores").requires_grad_()
        loss, statistics = rank_loss(y, tensors.pop("relevance"), (LOSSES | GRADED)[name][0], **tensors)
        loss.backward()
        np.testing.assert_allclose(y.grad.numpy(), expected, rtol=1e-12, atol=1e-12, err_msg=f"{seed} {problem}")
        assert statistics.zero_gradient.tolist() == still, (seed, problem)
        assert ((y.grad == 0) == (torch.tensor(expected) == 0)).all(), (seed, problem)
        moved += sum(g != 0 for row in expected for g in row)
    assert moved > 15


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("name", ["ap", "up and down", "graded"])
def test_segments_equal_loops_over_pairs(name):
    moved = 0
    for seed in range(40):
        problem, (expected, still) = drawn(name, seed)
        rows = range(len(problem["scores"]))
        exist = [(q, i) for q in rows for i, _ in enumerate(problem["scores"][q])]
        if problem["mask"] is not None:  # rows of unequal length
            exist = [(q, i) for q, i in exist if problem["mask"][q][i]]
        mixed = [q for q, _ in exist]
        random.Random(seed).shuffle(mixed)
        rest = {q: iter([i for p, i in exist if p == q]) for q in rows}
        exist = [(q, next(rest[q])) for q in mixed]

        def flat(key, problem=problem, exist=exist):
            values = problem[key]
            return None if values is None else torch.tensor([values[q][i] for q, i in exist], dtype=type_of(values))

        y = flat("scores").double().requires_grad_()
        weights = [1.0] * len(rows) if problem["weights"] is None else problem["weights"]
        loss, statistics = rank_loss(
            y, flat("relevance").bool(), (LOSSES | GRADED)[name][0], step=problem["step"], margin=problem["margin"],
            weights=torch.tensor(weights), item_weights=flat("item_weights"), grades=flat("grades"),
            segments=torch.tensor(mixed, dtype=torch.int64),
        )  # fmt: skip
        loss.backward()
        np.testing.assert_allclose(y.grad.numpy(), [expected[q][i] for q, i in exist], rtol=1e-12, atol=1e-12)
        assert statistics.zero_gradient.tolist() == still, (seed, problem)
        moved += int(y.grad.count_nonzero())
    assert moved > 30


def long_rows(kind, num_relevant, num_rows=3, num_items=2000):
    generator = torch.Generator().manual_seed(num_relevant)
    scores = torch.randn(num_rows, num_items, generator=generator)
    if kind == "tied":
        scores = scores.mul(4).round()
    if kind == "with outliers":
        scores[:, :2] *= 1e30
    if kind == "close":  # adding the step makes many of them equal
        scores = 1e-7 * scores
    relevance = torch.rand(num_rows, num_items, generator=generator).argsort(1) < num_relevant
    relevance[1:] &= torch.rand(num_rows - 1, num_items, generator=generator) < 0.7  # rows of unequal P
    return scores, relevance, generator


@pytest.mark.parametrize("kind", ["random", "tied", "with outliers", "close"])
@pytest.mark.parametrize("name", ["ap", "recall", "up and down"])
def test_the_kernels_agree_to_the_last_bit(kind, name, monkeypatch):
    monkeypatch.setattr(counting, "BLOCK", 700)
    moved = 0
    for num_relevant in (0, 1, 2, 13, 100, 1000, 2000):
        scores, relevance, generator = long_rows(kind, num_relevant)
        mask = torch.rand(scores.shape, generator=generator) < 0.9 if num_relevant == 13 else None
        item_weights = torch.rand(scores.shape, generator=generator) ** 9 if num_relevant == 100 else None
        results = []
        for module in (sorting, counting, compiled):
            monkeypatch.setattr(kernels, "kernel_for", lambda scores, relevance, module=module: module)
            y = scores.clone().requires_grad_()
            loss, statistics = rank_loss(
                y, relevance, LOSSES[name][0], step=0.7, margin=0.3, mask=mask, item_weights=item_weights
            )
            loss.backward()
            results.append((y.grad, statistics.zero_gradient))
        for grad, still in results[1:]:
            assert torch.equal(grad, results[0][0])
            assert torch.equal(still, results[0][1])
        moved += int(results[0][0].count_nonzero())
    assert moved > 300


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("kind", ["random", "tied"])
def test_what_nobody_passes_has_a_gradient_of_exactly_zero(kind):
    """And of the others the exact sum, rounded: thresholds and sums by numpy, in float32 as the scores are."""
    step, margin = np.float32(0.375), np.float32(0.25)
    for num_relevant in (3, 100, 1000):
        scores, relevance, _ = long_rows(kind, num_relevant, 1)
        y = scores.clone().requires_grad_()
        recall_loss(y, relevance, step=float(step), margin=float(margin)).backward()
        grad, relevant = y.grad[0].numpy(), relevance[0].numpy()
        threshold, others = scores[0].numpy()[relevant] - margin / 2, scores[0].numpy()[~relevant] + margin / 2
        r = (others[:, None] >= threshold).sum(0)
        slope = 1 / (1.0 + r) / len(threshold)
        passed = (threshold <= others[:, None]) & (threshold + step > others[:, None])
        assert ((grad[~relevant] == 0) == ~passed.any(1)).all()
        assert 0 < passed.any(1).sum() < len(others)
        np.testing.assert_allclose(grad[~relevant], passed @ slope / step, rtol=4e-7)
        np.testing.assert_allclose(grad[relevant], -slope * passed.sum(0) / step, rtol=4e-7)


@pytest.mark.usefixtures("kernel")
def test_items_that_move_alike_keep_their_order_where_their_sums_are_equal():
    """1e-9 is lost beside 1: after the move all relevant items score 1, and none has passed another."""
    scores = torch.tensor([[0.0, 1e-9, 2e-9, 3e-9]], requires_grad=True)
    loss, statistics = rank_loss(scores, torch.ones(1, 4, dtype=torch.bool), average_precision_item_loss, step=1.0)
    loss.backward()
    assert scores.grad.tolist() == [[0, 0, 0, 0]]
    assert statistics.zero_gradient.tolist() == [4]


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(16, 64, generator=generator, dtype=torch.float64)
    relevance = torch.rand(16, 64, generator=generator) < 0.1
    relevance[:, 0] = True
    return scores, relevance


def grad_of(scores, relevance, factor=1.0, loss_fn=average_precision_loss, **options):
    y = scores.clone().requires_grad_()
    (factor * loss_fn(y, relevance, **({"step": 0.5, "margin": 0.1} | options)).sum()).backward()
    return y.grad


class TestTheStepIsInvariant:
    def test_to_a_loss_weight(self, problem):
        assert torch.equal(grad_of(*problem, factor=65_536.0) / 65_536, grad_of(*problem))

    def test_to_the_size_of_the_batch(self, problem):
        twice = grad_of(*(torch.cat([values, values]) for values in problem))
        assert torch.equal(2 * twice[:16], grad_of(*problem))
        assert torch.equal(twice[:16], twice[16:])
        alone = [grad_of(scores[None], relevant[None]) for scores, relevant in zip(*problem, strict=True)]
        assert torch.equal(torch.cat(alone) / 16, grad_of(*problem))

    @pytest.mark.usefixtures("kernel")
    def test_to_rows_of_other_slopes(self, problem):
        scores, relevance = (values[:3] for values in problem)
        grades = 2.0 ** torch.tensor([-50.0, 0.0, 50.0], dtype=torch.float64)[:, None].expand(3, 64)

        def loss_fn(*given, **options):
            return rank_loss(*given, GRADED["graded"][0], reduction="sum", **options)[0]

        equal = grad_of(scores, relevance, loss_fn=loss_fn, grades=torch.ones_like(grades))
        assert equal.any(1).all()
        assert torch.equal(grad_of(scores, relevance, loss_fn=loss_fn, grades=grades), equal * grades)

    def test_to_the_weights_of_the_rows(self, problem):
        weights = 2.0 ** torch.arange(-8, 8)
        weighted = grad_of(*problem, weights=weights, reduction="sum")
        assert torch.equal(weighted / weights[:, None], grad_of(*problem, reduction="sum"))

    def test_to_items_far_below_and_rows_without_a_relevant_item(self, problem):
        more, none = torch.full((16, 500), -1e6, dtype=torch.float64), torch.zeros(16, 500, dtype=torch.bool)
        scores, relevance = torch.cat([problem[0], more], 1), torch.cat([problem[1], none], 1)
        scores = torch.cat([scores, torch.zeros(7, 564, dtype=torch.float64)])
        relevance = torch.cat([relevance, torch.zeros(7, 564, dtype=torch.bool)])
        grad = grad_of(scores, relevance)
        assert torch.equal(grad[:16, :64], grad_of(*problem))
        assert not grad[16:].any()
        assert not grad[:16, 64:].any()

    def test_and_not_to_the_scale_of_the_scores(self, problem):
        scores, relevance = problem
        assert torch.equal(4 * grad_of(4 * scores, relevance, step=2.0, margin=0.4), grad_of(scores, relevance))
        assert not torch.equal(4 * grad_of(4 * scores, relevance, margin=0.4), grad_of(scores, relevance))


def test_a_step_towards_zero_is_the_density_at_the_threshold():
    """Irrelevant items 2⁻¹⁴ apart, a relevant one below the upper half of them."""
    others = torch.arange(-(2**14), 2**14, dtype=torch.float64) / 2**14
    scores, relevance = torch.cat([torch.zeros(1), others]), torch.arange(len(others) + 1) == 0
    slope = 1 / (1 + 2**14)  # of log(1 + r)
    for steps in (1, 4, 64):
        grad = grad_of(scores, relevance, loss_fn=recall_loss, step=steps / 2**14, margin=0.0)
        assert grad[0].item() == pytest.approx(-slope * 2**14)
        assert grad[1:].count_nonzero() == steps
    loss_fn = RecallLoss(step=2.0**-16)
    grad = grad_of(scores - 2.0**-15 * relevance, relevance, loss_fn=lambda y, relevant, **_: loss_fn(y, relevant))
    assert not grad.any()
    assert loss_fn.statistics.zero_gradient.item() == 1


def test_a_step_towards_infinity_counts_every_irrelevant_item_above(problem):
    grad = 1e6 * grad_of(*problem, step=1e6, margin=0.0, loss_fn=recall_loss)
    for scores, relevance, row in zip(*problem, grad, strict=True):
        above = (scores[~relevance][:, None] > scores[relevance]).double()
        slope = 1 / (1 + above.sum(0)) / relevance.sum() / 16
        torch.testing.assert_close(row[relevance], -slope * above.sum(0))
        torch.testing.assert_close(row[~relevance], above @ slope)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_ranked_in_float32(problem, dtype):
    half = problem[0].to(dtype).requires_grad_()
    full = half.detach().float().requires_grad_()
    average_precision_loss(full, problem[1], step=0.3, margin=0.1).backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = average_precision_loss(half, problem[1], step=0.3, margin=0.1)
    loss.backward()
    assert loss.dtype == torch.float32
    assert half.grad.any()
    assert torch.equal(half.grad, full.grad.to(dtype))


def test_several_margins_are_the_mean_of_the_gradients(problem):
    several = grad_of(*problem, margin=[0.0, 0.3, 1.0])
    torch.testing.assert_close(several, sum(grad_of(*problem, margin=margin) for margin in (0.0, 0.3, 1.0)) / 3)


def test_a_random_margin_moves_the_scores_by_what_is_drawn(problem):
    scores, relevance = problem
    random_margin = grad_of(*problem, margin=0.6, generator=torch.Generator().manual_seed(5))
    noise = torch.randn(scores.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64).abs()
    assert torch.equal(
        random_margin, grad_of(scores + torch.where(relevance, -0.3, 0.3) * noise, relevance, margin=0.0)
    )


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("slope", [1e-25, 1.0, 1e30])
def test_slopes_of_any_size_neither_vanish_nor_overflow(slope):
    scores, relevance, _ = long_rows("random", 100, num_items=400)

    def loss_fn(*given, **options):
        return rank_loss(*given, lambda rank, *_: slope * rank, **options)[0]

    grad = grad_of(scores, relevance, loss_fn=loss_fn)
    above = scores[:, :, None] + 0.05 >= scores[:, None] - 0.05  # (rows, items, relevant)
    passed = (
        (above & (scores[:, :, None] + 0.05 < scores[:, None] - 0.05 + 0.5))
        & relevance[:, None]
        & ~relevance[:, :, None]
    )
    expected = slope * (passed.sum(2) - passed.sum(1)).double() / 0.5 / relevance.sum(1, keepdim=True) / 3
    torch.testing.assert_close(grad.double(), expected, rtol=1e-6, atol=0)


MODULES = {
    "recall": (RecallLoss, recall_loss, {"weighting": "loglog"}),
    "ap": (AveragePrecisionLoss, average_precision_loss, {}),
    "ap over all": (AveragePrecisionLoss, average_precision_loss, {"over_all": True}),
    "reciprocal rank": (ReciprocalRankLoss, reciprocal_rank_loss, {}),
    "precision at k": (PrecisionAtKLoss, precision_at_k_loss, {"k": 3}),
    "recall at k": (RecallAtKLoss, recall_at_k_loss, {"ks": (1, 4)}),
    "ndcg": (NDCGLoss, ndcg_loss, {"cutoff": 5}),
    "spearman": (SpearmanLoss, spearman_loss, {}),
}


@pytest.mark.parametrize("name", MODULES)
def test_modules_and_functions_take_a_step_and_gradient_descent_lowers_their_loss(problem, name):
    module, function, options = MODULES[name]
    scores, relevance = problem
    second = scores.roll(1, 1) * (relevance | (name == "spearman")) if name in ("ndcg", "spearman") else relevance
    second = second.clamp(min=0) if name == "ndcg" else second
    loss_fn = module(step=0.5, margin=0.1, **options)
    assert "lambda_val=None, step=0.5" in repr(loss_fn)
    grads = []
    for compute in (loss_fn, functools.partial(function, step=0.5, margin=0.1, **options)):
        y = scores.clone().requires_grad_()
        compute(y, second).backward()
        grads.append(y.grad)
    assert grads[0].any()
    assert torch.equal(*grads)
    y = torch.nn.Parameter(scores.clone())
    optimizer, before = torch.optim.Adam([y], lr=0.05), loss_fn(y, second).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss_fn(y, second).backward()
        optimizer.step()
    assert loss_fn(y, second).item() < before - 0.3 * (before - floor(loss_fn, second))


def floor(loss_fn, second):
    """The loss of the perfect order."""
    return loss_fn(100.0 * second.double(), second).item()


def test_the_parts_of_a_detector_are_multiplied_by_their_shares():
    generator = torch.Generator().manual_seed(1)
    scores = 0.3 * torch.randn(12, 3, generator=generator, dtype=torch.float64)
    labels = torch.randint(0, 4, (12,), generator=generator)
    y = scores.clone().requires_grad_()
    parts = DetectionLoss(memory=0, step=0.4, margin=0.2, map_weight=1.0, apc_weight=3.0)(y, labels)
    (parts.map + parts.apc).backward()
    relevance = labels == torch.arange(3)[:, None]
    of_map, of_apc = (grad_of(scores.T, relevance, step=0.4, margin=0.2, over_all=over) for over in (False, True))
    assert of_map.any()
    assert of_apc.any()
    torch.testing.assert_close(y.grad.T, 0.25 * of_map + 0.75 * of_apc)


def test_a_detector_without_either_has_the_papers_lambda():
    assert (DetectionLoss().lambda_val, DetectionLoss().step) == (0.5, None)
    assert (DetectionLoss(step=0.2).lambda_val, DetectionLoss(step=0.2).step) == (None, 0.2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "either step or lambda_val must be given, not both, got lambda_val=None and step=None"),
        (
            {"lambda_val": 1.0, "step": 0.5},
            "either step or lambda_val must be given, not both, got lambda_val=1.0 and step=0.5",
        ),
        ({"step": 0.0}, "step must be a finite number > 0, got 0.0"),
        ({"step": math.inf}, "step must be a finite number > 0, got inf"),
        ({"step": "0.5"}, "step must be a finite number > 0, got '0.5'"),
        ({"step": True}, "step must be a finite number > 0, got True"),
        ({"step": 1e-31}, "step must lie between 1e-30 and 1e"),
        ({"step": 0.5, "normalize": False}, "normalize has no meaning with a step.* got False"),
        ({"step": 0.5, "lambda_per": "row"}, "lambda_per has no meaning with a step.* got 'row'"),
        ({"step": 0.5, "rank_plus_grad": True}, "rank_plus_grad has no meaning with a step.* got True"),
    ],
)
def test_bad_steps_are_named(problem, options, message):
    for loss_fn in (recall_loss, lambda *_, **given: RecallLoss(**given)):
        with pytest.raises(ValueError, match=message):
            loss_fn(*problem, **options)
    if options and not {"normalize", "lambda_per"} & set(options):
        with pytest.raises(ValueError, match=message):
            DetectionLoss(**options)


@pytest.mark.usefixtures("kernel")
def test_an_infinite_slope_is_an_error(problem):
    with pytest.raises(ValueError, match=r"the loss of an item and its slope.* must be finite"):
        grad_of(*problem, loss_fn=recall_loss, weighting=torch.sqrt)  # at r = 0
    assert recall_loss(*problem, weighting=torch.sqrt, step=0.5) > 0  # without a gradient there is no slope


def test_rank_itself_takes_no_step(problem):
    with pytest.raises(TypeError, match="step"):
        rank(problem[0], step=0.5)


@pytest.mark.parametrize("module", [sorting, counting])
@pytest.mark.parametrize(
    ("item_loss", "rank_plus_grad"),
    [(lambda rank, plus, num: (rank - plus).sqrt(), False), (lambda rank, plus, num: rank + (plus - 1).sqrt(), True)],
)
def test_an_infinite_slope_of_one_item_stays_its_own_under_lambda(module, item_loss, rank_plus_grad, monkeypatch):
    """The item moves to infinity, whatever else the kernel holds beside the relevant items."""
    scores, relevance, _ = long_rows("random", 13)
    scores[:, 0], relevance[:, 0] = 10.0, True  # r = 0, rank⁺ = 1
    grads = []
    for one in (compiled, module):
        monkeypatch.setattr(kernels, "kernel_for", lambda scores, relevance, one=one: one)
        y = scores.clone().requires_grad_()
        rank_loss(y, relevance, item_loss, lambda_val=2.0, rank_plus_grad=rank_plus_grad)[0].backward()
        grads.append(y.grad)
    assert grads[0].any()
    assert torch.equal(*grads)


def test_the_kernel_of_other_devices_does_not_wait_for_them():
    """On a device that has shapes and no values, whatever reads a value raises."""
    scores = torch.zeros(3, 5, device="meta")
    for grades, mask in ((None, None), (scores, scores > 0)):
        item_gradient = ranking._item_gradient(
            lambda rank, *_: rank.log(), torch.ones(3, device="meta"), None, grades, torch.float32, 0, finite=False
        )
        outcome = sorting.rank_and_move(
            sorting.Problem(
                scores, scores > 0, mask, grades, 0.1, torch.ones(3, 1, device="meta"), True, item_gradient, False, True
            )
        )
        assert outcome[3].shape == (3, 5)
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool(scores.any())
