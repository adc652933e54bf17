"""The detection loss that the plugins share: against loops, its memory, its figures, its errors."""

import copy
import pickle

import numpy as np
import oracles
import pytest
import torch

from rambo_plugins.core import average_precision_loss, check_nan, detection
from rambo_plugins.core.detection import DetectionLoss

NUM_CLASSES = 3


def boxes(seed, num=12, num_classes=NUM_CLASSES, ties=False):
    generator = torch.Generator().manual_seed(seed)
    scores = 0.3 * torch.randn(num, num_classes, generator=generator, dtype=torch.float64)
    if ties:
        scores = (5 * scores).round() / 5
    labels = torch.randint(0, num_classes + 1, (num,), generator=generator)
    return scores.requires_grad_(), labels


def total(parts):
    return parts.map + parts.apc


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "options",
    [
        {"lambda_val": 2.0, "margin": 0.15},
        {"lambda_val": 6.0, "margin": 0.0},
        {"lambda_val": 20.0, "margin": 1.0, "map_weight": 1.0, "apc_weight": 3.0},
        {"lambda_val": 2.0, "margin": 0.15, "precision_loss": "log"},
    ],
)
def test_the_loss_and_its_gradient_are_those_of_the_loops(seed, options):
    options = dict(options)
    scores, labels = boxes(seed, ties=seed % 2 == 0)
    parts = DetectionLoss(memory=0, **options)(scores, labels)
    total(parts).backward()
    item = oracles.log_precision_item if options.pop("precision_loss", "linear") == "log" else oracles.ap_item
    of_map, of_apc, grad = oracles.detection_loss(scores.tolist(), labels.tolist(), NUM_CLASSES, item=item, **options)
    assert parts.map.item() == pytest.approx(of_map)
    assert parts.apc.item() == pytest.approx(of_apc)
    assert any(any(row) for row in grad)
    torch.testing.assert_close(scores.grad, torch.tensor(grad, dtype=torch.float64))


@pytest.mark.parametrize("weights", [{"map_weight": 1.0, "apc_weight": 0.0}, {"map_weight": 0.0, "apc_weight": 2.0}])
def test_one_part_alone_is_the_loss_of_the_core(weights):
    scores, labels = boxes(0)
    total(DetectionLoss(memory=0, lambda_val=2.0, margin=0.3, **weights)(scores, labels)).backward()
    alone = scores.detach().clone().requires_grad_()
    relevance = labels == torch.arange(NUM_CLASSES)[:, None]
    over_all = not weights["map_weight"]
    average_precision_loss(alone.T, relevance, lambda_val=2.0, margin=0.3, over_all=over_all).backward()
    torch.testing.assert_close(scores.grad, alone.grad, rtol=0, atol=0)


def test_what_multiplies_the_loss_multiplies_the_gradient():
    gradients = []
    for factor in (1.0, 65536.0, 0.25):
        scores, labels = boxes(1)
        (factor * total(DetectionLoss(memory=0, lambda_val=2.0)(scores, labels))).backward()
        gradients.append(scores.grad / factor)
    assert gradients[0].any()
    torch.testing.assert_close(gradients[1], gradients[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients[2], gradients[0], rtol=0, atol=0)


def test_the_memory_is_ranked_together_with_the_batch():
    loss_fn = DetectionLoss(memory=2, lambda_val=2.0)
    batches = [boxes(seed, num=4 + seed) for seed in range(4)]
    for scores, labels in batches:
        parts = loss_fn(scores, labels)
    total(parts).backward()
    (first, *_), *rest = batches[3], batches[1], batches[2]
    scores = torch.cat([first.detach(), *(s.detach() for s, _ in rest)]).requires_grad_()
    labels = torch.cat([batches[3][1], *(labels for _, labels in rest)])
    expected = DetectionLoss(memory=0, lambda_val=2.0)(scores, labels)
    total(expected).backward()
    assert parts.map.item() == pytest.approx(expected.map.item())
    assert parts.apc.item() == pytest.approx(expected.apc.item())
    torch.testing.assert_close(batches[3][0].grad, scores.grad[: len(first)])
    assert batches[2][0].grad is None


def test_positives_of_the_memory_move_the_negatives_of_a_batch_without_any():
    loss_fn = DetectionLoss(lambda_val=20.0)
    scores, labels = boxes(0)
    loss_fn(scores, labels)
    background, _ = boxes(1)
    total(loss_fn(background, torch.full((len(background),), NUM_CLASSES))).backward()
    assert (background.grad >= 0).all()
    assert background.grad.any()


def test_ignored_boxes_are_neither_ranked_nor_remembered():
    scores, labels = boxes(2)
    weights = torch.tensor([1.0, 0.0, 0.5] * 4)
    kept = weights > 0
    loss_fn = DetectionLoss(lambda_val=2.0)
    parts = loss_fn(scores, labels, weights)
    total(parts).backward()
    left = scores.detach()[kept].requires_grad_()
    expected = DetectionLoss(lambda_val=2.0)(left, labels[kept])
    total(expected).backward()
    assert parts == expected
    torch.testing.assert_close(scores.grad[kept], left.grad, rtol=0, atol=0)
    assert not scores.grad[~kept].any()
    torch.testing.assert_close(loss_fn.memory.contents()[0], left.detach())


@pytest.mark.parametrize("num", [0, 5])
def test_without_an_object_the_loss_is_a_zero_attached_to_the_graph(num):
    scores = torch.randn(num, NUM_CLASSES, requires_grad=True)
    parts = DetectionLoss()(scores, torch.full((num,), NUM_CLASSES))
    total(parts).backward()
    assert total(parts).item() == 0
    assert scores.grad.shape == (num, NUM_CLASSES)
    assert not scores.grad.any()


def test_evaluation_and_no_grad_leave_the_memory_alone():
    loss_fn = DetectionLoss()
    scores, labels = boxes(0)
    with torch.no_grad():
        loss_fn(scores, labels)
    loss_fn(scores.detach(), labels)
    loss_fn.eval()(scores, labels)
    assert len(loss_fn.memory) == 0
    loss_fn.train()(scores, labels)
    assert len(loss_fn.memory) == len(scores)


def test_the_figures_are_of_the_batch_alone_without_margin():
    sklearn_metrics = pytest.importorskip("sklearn.metrics")
    loss_fn = DetectionLoss(margin=5.0, precision_loss="log")
    for seed in range(2):
        scores, labels = boxes(seed, num=40)
        loss_fn(scores, labels)
    truth = torch.nn.functional.one_hot(labels, NUM_CLASSES + 1)[:, :NUM_CLASSES].numpy()
    per_class = sklearn_metrics.average_precision_score(truth, scores.detach().numpy(), average="macro")
    over_all = sklearn_metrics.average_precision_score(truth.ravel(), scores.detach().numpy().ravel())
    assert float(loss_fn.statistics["ap_map"]) == pytest.approx(per_class)
    assert float(loss_fn.statistics["ap_apc"]) == pytest.approx(over_all)
    assert 0 <= float(loss_fn.statistics["share_zero_gradient"]) <= 1
    loss_fn(scores, torch.full_like(labels, NUM_CLASSES))
    assert float(loss_fn.statistics["ap_map"]) == float(loss_fn.statistics["ap_apc"]) == 0


def test_a_half_precision_batch_is_ranked_in_float32_under_autocast():
    scores, labels = boxes(3)
    half = scores.detach().bfloat16().requires_grad_()
    single = half.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        parts = DetectionLoss(lambda_val=2.0)(half, labels)
    expected = DetectionLoss(lambda_val=2.0)(single, labels)
    total(parts).backward()
    total(expected).backward()
    assert parts == expected
    assert parts.map.dtype == torch.float32
    assert half.grad.dtype == torch.bfloat16
    torch.testing.assert_close(half.grad, single.grad.bfloat16(), rtol=0, atol=0)


def test_a_resumed_loss_goes_on_as_the_one_that_was_not_interrupted():
    losses = [DetectionLoss(memory=3), DetectionLoss(memory=3)]
    for seed in range(5):
        losses[0](*boxes(seed, num=4 + seed))
    shapes = {name: value.shape for name, value in losses[1].state_dict().items()}
    losses[1].load_state_dict(losses[0].state_dict())
    assert shapes.items() <= {name: value.shape for name, value in losses[0].state_dict().items()}.items()
    first, second = (loss_fn(*boxes(9)) for loss_fn in losses)
    assert first == second
    assert len(losses[0].memory) == len(losses[1].memory)


def test_a_step_that_failed_and_is_repeated_is_remembered_once(monkeypatch):
    loss_fn = DetectionLoss(memory=2, margin=0.3)
    loss_fn(*boxes(0))
    whole, calls = detection.rank_loss, []

    def out_of_memory(*args, **kwargs):
        calls.append(kwargs["margin"])
        if len(calls) == 4:  # the last one of the step
            raise torch.OutOfMemoryError("as a GPU would")
        return whole(*args, **kwargs)

    monkeypatch.setattr(detection, "rank_loss", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        loss_fn(*boxes(1))
    assert calls[-1] == 0.3
    loss_fn(*boxes(1))
    torch.testing.assert_close(loss_fn.memory.contents()[0], torch.cat([boxes(0)[0], boxes(1)[0]]).detach())


def test_with_the_check_of_nan_off_boxes_with_nan_are_not_remembered():
    loss_fn = DetectionLoss(memory=2)
    scores, labels = boxes(0)
    with torch.no_grad():
        scores[3, 1] = scores[7, 0] = torch.nan
    check_nan(False)
    try:
        loss_fn(scores, labels)
    finally:
        check_nan(True)
    kept = [row for row in range(len(labels)) if row not in (3, 7)]
    torch.testing.assert_close(loss_fn.memory.contents()[0], scores.detach()[kept])
    torch.testing.assert_close(loss_fn.memory.contents()[1], labels[kept])


def test_a_batch_with_nan_is_refused_and_not_remembered():
    loss_fn = DetectionLoss(memory=2)
    scores, labels = boxes(0)
    with torch.no_grad():
        scores[3, 1] = torch.nan
    with pytest.raises(ValueError, match="1 NaN of 36"):
        loss_fn(scores, labels)
    assert len(loss_fn.memory) == 0


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda loss_fn: pickle.loads(pickle.dumps(loss_fn))])
def test_a_copy_goes_on_as_the_original_memory_included(copied):
    loss_fn = DetectionLoss(memory=2, lambda_val=2.0, precision_loss="log")
    loss_fn(*boxes(0))
    assert copied(loss_fn)(*boxes(1)) == loss_fn(*boxes(1))


@pytest.mark.parametrize("weights", [{}, {"map_weight": 0.0}, {"apc_weight": 0.0}])
def test_a_lambda_that_moves_nothing_is_told_by_the_share_without_a_gradient(weights):
    """Over the relevant items of the part that trains, by its own gradient."""
    for lambda_val in (1e-12, 2.0, 1e6):
        scores, labels = boxes(0, num=30)
        loss_fn = DetectionLoss(memory=0, lambda_val=lambda_val, margin=0.3, **weights)
        total(loss_fn(scores, labels)).backward()
        share = float(loss_fn.statistics["share_zero_gradient"])
        if len(weights):
            relevant = scores.grad[torch.arange(30), labels.clamp(max=NUM_CLASSES - 1)][labels < NUM_CLASSES]
            assert share == pytest.approx(float((relevant == 0).double().mean()))
        assert (share == 1) == (lambda_val == 1e-12) == (not scores.grad.any())


def test_numbers_of_numpy_are_numbers():
    numbers = {"lambda_val": np.float32(4), "margin": np.float16(0.5), "map_weight": np.int64(2), "memory": np.int64(2)}
    plain = {"lambda_val": 4.0, "margin": 0.5, "map_weight": 2, "memory": 2}
    assert repr(DetectionLoss(**numbers)) == repr(DetectionLoss(**plain))
    assert DetectionLoss(**numbers)(*boxes(0)) == DetectionLoss(**plain)(*boxes(0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lambda_val": 0.0}, "lambda_val must be a finite number > 0, got 0.0"),
        ({"margin": -1.0}, "margin must be a finite number >= 0"),
        ({"lambda_val": np.float32("nan")}, "lambda_val must be a finite number > 0, got np.float32"),
        ({"lambda_val": np.bool_(True)}, "lambda_val must be a finite number > 0"),
        ({"lambda_val": 1e-31}, "lambda_val must lie between 1e-30 and 1e\\+30, got 1e-31"),
        ({"lambda_val": 1.2e-30}, "lambda_val must lie between 1e-30"),  # of a part: a third or two thirds of it
        ({"memory": 0, "memory_warmup": 2}, "memory_warmup needs memory > 0, got memory_warmup=2 and memory=0"),
        ({"memory": -1}, "memory must be an integer >= 0, got -1"),
        ({"map_weight": 0, "apc_weight": 0}, "map_weight or apc_weight must be > 0"),
        ({"apc_weight": -1}, "apc_weight must be a finite number >= 0"),
        ({"precision_loss": "square"}, "precision_loss must be one of 'linear', 'log', got 'square'"),
    ],
)
def test_errors_of_the_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        DetectionLoss(**arguments)


@pytest.mark.parametrize("option", ["rank_plus_grad", "memory_gather"])
def test_a_word_is_no_flag(option):
    with pytest.raises(TypeError, match="must be True or False, got 'False'"):
        DetectionLoss(**{option: "False"})


@pytest.mark.parametrize(
    ("labels", "weights", "error", "message"),
    [
        (torch.tensor([0, 1]), None, ValueError, r"labels must have shape \(3,\) .* got \(2,\)"),
        (torch.tensor([0.0, 1.0, 2.0]), None, TypeError, "labels must be an integer tensor, got torch.float32"),
        (torch.tensor([0, 1, 3]), None, ValueError, r"labels must be in \[0, 2\] for 2 classes.* got 0 to 3"),
        (torch.tensor([0, -1, 2]), None, ValueError, "got -1 to 2"),
        (torch.tensor([0.0, torch.nan, 2.0]), None, TypeError, "labels must be an integer tensor, got torch.float32"),
        ([0, 1, 2], None, TypeError, "labels must be an integer tensor, got list"),
        (
            torch.zeros(3, dtype=torch.int64, device="meta"),
            None,
            ValueError,
            "labels must be on the device .* got meta",
        ),
        (torch.tensor([0, 1, 2]), [1, 1, 1], TypeError, "weights must be a tensor, got list"),
        (torch.tensor([0, 1, 2]), torch.tensor([1, torch.nan, 0]), ValueError, "weights must be .* >= 0, got nan"),
        (torch.tensor([0, 1, 2]), torch.tensor([1, -0.5, 0]), ValueError, "weights must be numbers >= 0, got -0.5"),
        (torch.tensor([0, 1, 2]), torch.ones(3, 2), ValueError, r"weights must have shape \(3,\)"),
    ],
)
def test_errors_of_the_inputs(labels, weights, error, message):
    with pytest.raises(error, match=message):
        DetectionLoss()(torch.zeros(3, 2), labels, weights)


def test_scores_that_are_no_table_are_refused():
    with pytest.raises(ValueError, match=r"scores must have shape \(R, C\), got \(3,\)"):
        DetectionLoss()(torch.zeros(3), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="1 NaN of 4"):
        DetectionLoss()(torch.tensor([[0.0, torch.nan], [0.0, 0.0]]), torch.tensor([0, 1]))
