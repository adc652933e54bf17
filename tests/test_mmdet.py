"""The mmdet plugin, with real detectors on the CPU: values, heads, checkpoints, averaging, processes, configs."""

import copy
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("mmdet")

import detection_data
import detection_mmdet
from mmdet.models.losses import CrossEntropyLoss
from mmdet.models.test_time_augs import DetTTAModel
from mmdet.registry import MODELS
from mmdet.testing._utils import demo_mm_inputs
from mmdet.utils import register_all_modules
from mmengine.config import Config, ConfigDict
from mmengine.hooks import EMAHook, Hook, SyncBuffersHook
from mmengine.logging import MessageHub
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper
from mmengine.runner import Runner
from mmengine.runner.checkpoint import load_state_dict

from rambo_plugins.core import average_precision_loss
from rambo_plugins.core.detection import DetectionLoss
from rambo_plugins.mmdet import RamboLoss, RamboRetinaHead, losses
from rambo_plugins.mmdet.heads import check_heads
from rambo_plugins.mmdet.train import main as train_main

ROOT = Path(__file__).parent.parent
NUM_CLASSES = 4


def seed(number):
    torch.manual_seed(number)
    np.random.seed(number)  # noqa: NPY002  mmdet's samplers draw from it


@pytest.fixture(autouse=True)
def one_thread():
    register_all_modules()
    seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def detector(loss, **sizes):
    return MODELS.build(ConfigDict(detection_mmdet.model(NUM_CLASSES, loss, **({"channels": 16, "fc": 32} | sizes))))


def batch_of(model, num_items=(3, 2), num_classes=NUM_CLASSES, side=96, with_mask=False):
    data = demo_mm_inputs(len(num_items), (3, side, side), list(num_items), num_classes, with_mask=with_mask)
    return model.data_preprocessor(data, training=True)


def step(model, optimizer=None, **kwargs):
    data = batch_of(model, **kwargs)
    losses = model(**data, mode="loss")
    loss, log = model.parse_losses(losses)
    if optimizer is not None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss, log


def rois(seed, num=20, num_channels=NUM_CLASSES):
    generator = torch.Generator().manual_seed(seed)
    scores = 0.3 * torch.randn(num, num_channels, generator=generator)
    return scores.requires_grad_(), torch.randint(0, NUM_CLASSES + 1, (num,), generator=generator)


# --- the loss ---------------------------------------------------------------------------------------------------------


def core_loss(scores, labels, lambda_val=0.5, margin=0.15):
    """The unit loss from the core's public function: λ_p = λ·s_p, see DetectionLoss."""
    relevance = labels == torch.arange(scores.shape[1])[:, None]
    return sum(
        s * average_precision_loss(scores.T, relevance, lambda_val=lambda_val * s, margin=margin, over_all=over_all)
        for s, over_all in ((2 / 3, False), (1 / 3, True))
    )


def test_the_loss_of_a_detector_is_the_core_on_the_same_tensors_memory_included():
    model = detector({"lambda_val": 3.0})
    loss_cls, calls = model.roi_head.bbox_head.loss_cls, []

    def keep(module, args, kwargs, output):
        args[0].retain_grad()
        calls.append((args[0], args[1], output))

    loss_cls.register_forward_hook(keep, with_kwargs=True)
    for num_items in ((3, 2), (1, 4), (2, 2)):
        model.zero_grad()
        step(model, num_items=num_items)[0].backward()
    (scores, labels, loss), others = calls[2], calls[:2]
    everything = torch.cat([scores.detach(), *(s.detach() for s, *_ in others)]).requires_grad_()
    expected = core_loss(everything, torch.cat([labels, *(label for _, label, _ in others)]), lambda_val=3.0)
    expected.backward()
    assert scores.grad.any()
    torch.testing.assert_close(loss.detach(), expected.detach())
    torch.testing.assert_close(scores.grad, everything.grad[: len(scores)])


@pytest.mark.parametrize(
    ("options", "channels", "to_scores"),
    [
        ({}, NUM_CLASSES, lambda x: x),
        ({"score_space": "probabilities"}, NUM_CLASSES, torch.sigmoid),
        ({"use_sigmoid": False}, NUM_CLASSES + 1, lambda x: x.softmax(1)[:, :-1]),
    ],
)
def test_what_is_ranked(options, channels, to_scores):
    logits, labels = rois(0, num_channels=channels)
    RamboLoss(lambda_val=3.0, loss_weight=2.0, **options)(logits, labels).backward()
    expected = logits.detach().clone().requires_grad_()
    (2 * core_loss(to_scores(expected), labels, lambda_val=3.0)).backward()
    assert logits.grad.any()
    torch.testing.assert_close(logits.grad, expected.grad)


def test_weights_of_zero_leave_the_ranking_and_the_memory():
    logits, labels = rois(1)
    weight = torch.ones(len(labels))
    weight[::3] = 0
    loss_fn = RamboLoss(lambda_val=3.0)
    loss = loss_fn(logits, labels, weight, avg_factor=7.0)
    kept = weight > 0
    torch.testing.assert_close(loss, RamboLoss(lambda_val=3.0)(logits[kept], labels[kept]))
    assert len(loss_fn.rank_loss.memory) == int(kept.sum())


def test_the_auxiliary_loss_is_the_toolkits_own_and_fades():
    logits, labels = rois(2)
    weight = torch.linspace(0.5, 1, len(labels))
    alone = RamboLoss(memory=0, loss_weight=3.0)(logits, labels, weight)
    cross_entropy = CrossEntropyLoss(use_sigmoid=True)(logits, labels, weight, avg_factor=5.0)
    loss_fn = RamboLoss(memory=0, loss_weight=3.0, aux_weight=0.4, aux_steps=4)
    for factor in (1, 0.75, 0.5, 0.25, 0, 0):
        with torch.no_grad():
            loss_fn(logits, labels, weight, avg_factor=5.0)  # does not count
        loss = loss_fn(logits, labels, weight, avg_factor=5.0)
        torch.testing.assert_close(loss, alone + 3 * 0.4 * factor * cross_entropy)
        resumed = RamboLoss(memory=0, loss_weight=3.0, aux_weight=0.4, aux_steps=4)
        resumed.resume(loss_fn.run_state())
        loss_fn = resumed
    softmax, labels = rois(2, num_channels=NUM_CLASSES + 1)
    loss = RamboLoss(use_sigmoid=False, memory=0, aux_weight=0.4)(softmax, labels)
    alone = RamboLoss(use_sigmoid=False, memory=0)(softmax, labels)
    torch.testing.assert_close(loss, alone + 0.4 * torch.nn.functional.cross_entropy(softmax, labels))
    focal = {"type": "FocalLoss", "use_sigmoid": True}
    assert type(RamboLoss(aux_weight=1.0, aux_loss=focal).aux_loss).__name__ == "FocalLoss"


def test_parts_and_figures_reach_the_log_and_add_up():
    totals = []
    for return_dict in (False, True):
        seed(0)
        model = detector({"return_dict": return_dict, "aux_weight": 0.5})
        loss, log = step(model)
        totals.append(loss.item())
        assert {"acc_classes", "ap_map", "ap_apc", "share_zero_gradient"} <= set(log)
        if return_dict:
            parts = {name for name in log if name.startswith("loss_cls")}
            assert parts == {"loss_cls_map", "loss_cls_apc", "loss_cls_aux"}
    assert totals[0] == pytest.approx(totals[1])


def test_the_hooks_of_a_custom_loss():
    roi, dense = RamboLoss(test_temperature=0.5), RamboLoss()
    assert roi.get_cls_channels(NUM_CLASSES) == NUM_CLASSES
    logits, labels = rois(3)
    scores = roi.get_activation(logits)
    assert scores.shape == (len(logits), NUM_CLASSES + 1)
    torch.testing.assert_close(scores[:, :-1], torch.sigmoid(2 * logits))
    assert not scores[:, -1].any()
    torch.testing.assert_close(dense.get_activation(logits), torch.sigmoid(logits))
    of_objects = labels < NUM_CLASSES
    expected = 100 * (logits.argmax(1) == labels)[of_objects].float().mean()
    torch.testing.assert_close(roi.get_accuracy(logits, labels)["acc_classes"][0], expected)
    flags = ("custom_cls_channels", "custom_activation", "custom_accuracy")
    assert all(getattr(roi, flag) for flag in flags)
    assert not any(getattr(RamboLoss(use_sigmoid=False), flag) for flag in flags)


@pytest.mark.parametrize("options", [{}, {"use_sigmoid": False}, {"score_space": "probabilities", "aux_weight": 0.5}])
def test_half_precision_and_loss_scaling_change_no_lambda(options):
    channels = NUM_CLASSES + 1 if options.get("use_sigmoid") is False else NUM_CLASSES
    logits, labels = rois(4, num_channels=channels)
    half = logits.detach().bfloat16().requires_grad_()
    single = half.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = RamboLoss(lambda_val=3.0, **options)(half, labels)
    (loss * 1024).backward()
    expected = RamboLoss(lambda_val=3.0, **options)(single, labels)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    assert single.grad.any()
    torch.testing.assert_close(half.grad, (1024 * single.grad).bfloat16())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"score_space": "margins"}, "score_space must be one of 'logits', 'probabilities', got 'margins'"),
        ({"use_sigmoid": False, "score_space": "logits"}, "softmax reorders the boxes"),
        ({"use_sigmoid": False, "test_temperature": 0.5}, "test_temperature needs sigmoid, got 0.5 with softmax"),
        ({"test_temperature": 0.0}, "test_temperature must be a finite number > 0"),
        ({"aux_steps": 10}, "need aux_weight > 0"),
        ({"lambda_val": -1}, "lambda_val must be a finite number > 0, got -1"),
        ({"aux_weight": 1.0, "aux_steps": 2.5}, "aux_steps must be an integer >= 0, got 2.5"),
        ({"memory": 1.5}, "memory must be an integer >= 0, got 1.5"),
    ],
)
def test_errors_of_the_options(options, message):
    with pytest.raises(ValueError, match=message):
        RamboLoss(**options)


def test_what_cannot_be_ranked_is_refused():
    logits, labels = rois(5)
    loss_fn = RamboLoss()
    for override in ("none", "sum"):
        with pytest.raises(ValueError, match=f"got reduction_override='{override}'.* use RandomSampler"):
            loss_fn(logits, labels, reduction_override=override)
    with pytest.raises(TypeError, match="got a tuple of 2: heads with quality"):
        loss_fn(logits, (labels, torch.rand(len(labels))), weight=None)
    with pytest.raises(TypeError, match="labels must be an integer tensor"):
        loss_fn(logits, torch.rand(len(labels), NUM_CLASSES))
    assert len(loss_fn.rank_loss.memory) == 0
    loss_fn.get_cls_channels(NUM_CLASSES - 1)
    with pytest.raises(ValueError, match=r"expected 3 channels .* got 4: .*use_sigmoid=False"):
        loss_fn(logits, labels)


@pytest.fixture
def warnings_of_the_loss(monkeypatch):
    said = []
    monkeypatch.setattr(losses, "print_log", lambda message, logger, level: said.append(message))
    return said


@pytest.mark.parametrize("num_background", [0, 1])
def test_a_batch_that_is_mostly_of_the_last_class_is_ranked(num_background, warnings_of_the_loss):
    logits, _ = rois(5)
    labels = torch.full((len(logits),), NUM_CLASSES - 1)
    labels[:3] = 0
    labels[len(labels) - num_background :] = NUM_CLASSES
    loss_fn = RamboLoss(lambda_val=3.0)
    torch.testing.assert_close(loss_fn(logits, labels), core_loss(logits, labels, lambda_val=3.0))
    assert len(warnings_of_the_loss) == (num_background == 0)  # with a background box all is clear
    loss_fn(logits, labels)
    assert len(warnings_of_the_loss) <= 1
    roi = RamboLoss(lambda_val=3.0)
    roi.get_cls_channels(NUM_CLASSES)
    roi(logits, labels)
    assert len(warnings_of_the_loss) == (num_background == 0)


def test_one_background_channel_too_many_is_suspected(warnings_of_the_loss):
    logits, _ = rois(5, num_channels=NUM_CLASSES + 1)
    labels = torch.full((len(logits),), NUM_CLASSES)
    labels[:5] = 0
    RamboLoss()(logits, labels)
    (said,) = warnings_of_the_loss
    assert "most boxes have the last label of 5 channels and none is background" in said


def test_weights_have_no_memory_of_the_run_that_trained_them():
    trained = RamboLoss(memory=3, aux_weight=0.5, aux_steps=9)
    trained(*rois(0))
    assert trained.state_dict() == {}
    for classes in (NUM_CLASSES, 2):
        fresh = RamboLoss(memory=3, aux_weight=0.5, aux_steps=9)
        load_state_dict(fresh, trained.state_dict(), strict=True)  # mmengine's
        fresh.load_state_dict(trained.state_dict(), strict=True)
        assert (len(fresh.rank_loss.memory), fresh.num_steps) == (0, 0)
        logits = torch.randn(8, classes, requires_grad=True)
        expected = RamboLoss(memory=0, aux_weight=0.5)(logits, torch.arange(8) % (classes + 1))
        torch.testing.assert_close(fresh(logits, torch.arange(8) % (classes + 1)), expected)


@pytest.mark.parametrize("memory", [0, 2])
def test_a_run_state_goes_on_exactly_and_none_starts_anew(memory):
    options = {"memory": memory, "lambda_val": 3.0, "aux_weight": 0.5, "aux_steps": 5}
    loss_fn, resumed = RamboLoss(**options), RamboLoss(**options)
    for number in range(3):
        loss_fn(*rois(number))
    resumed(*rois(9))
    resumed.resume(copy.deepcopy(loss_fn.run_state()))
    torch.testing.assert_close(resumed(*rois(4)), loss_fn(*rois(4)), rtol=0, atol=0)
    resumed.resume(None)
    torch.testing.assert_close(resumed(*rois(5)), RamboLoss(**options)(*rois(5)), rtol=0, atol=0)


def test_a_call_that_failed_and_is_repeated_counts_once(monkeypatch):
    loss_fn = RamboLoss(memory=2, aux_weight=0.5, aux_steps=5)

    def out_of_memory(*args, **kwargs):
        raise torch.OutOfMemoryError("as a GPU would")

    for part in (loss_fn.aux_loss, loss_fn.rank_loss):
        with monkeypatch.context() as patch:
            patch.setattr(part, "forward", out_of_memory)
            with pytest.raises(torch.OutOfMemoryError):
                loss_fn(*rois(0))
    assert (len(loss_fn.rank_loss.memory), loss_fn.num_steps) == (0, 0)
    loss_fn(*rois(0))
    assert (len(loss_fn.rank_loss.memory), loss_fn.num_steps) == (20, 1)


def test_scores_that_are_nan_are_refused_and_not_remembered():
    loss_fn = RamboLoss(memory=2)
    logits, labels = rois(0)
    with torch.no_grad():
        logits[3] = torch.nan
    with pytest.raises(ValueError, match="4 NaN of 80"):
        loss_fn(logits, labels)
    assert len(loss_fn.rank_loss.memory) == 0


def test_evaluation_mode_reaches_the_memory():
    loss_fn = RamboLoss(memory=2)
    loss_fn.eval()(*rois(0))
    assert len(loss_fn.rank_loss.memory) == 0
    torch.nn.Sequential(loss_fn).train()
    loss_fn(*rois(0))
    assert len(loss_fn.rank_loss.memory) == 20


# --- a detector -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"score_space": "probabilities"}, {"use_sigmoid": False, "margin": 0.02}])
def test_training_lowers_the_loss_and_inference_gives_detections(options):
    model = detector({"lambda_val": 2.0, "memory": 2, **options}, channels=32, fc=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    values = [step(model, optimizer)[1]["loss_cls"].item() for _ in range(30)]
    assert np.mean(values[-5:]) < 0.8 * np.mean(values[:5])
    model.eval()
    with torch.no_grad():
        (first, *_) = model(**batch_of(model), mode="predict")
    assert 0 < len(first.pred_instances) <= 100
    assert (first.pred_instances.labels < NUM_CLASSES).all()
    scores = first.pred_instances.scores
    assert (scores >= 0).all()
    assert (scores <= 1).all()
    assert len(model.roi_head.bbox_head.loss_cls.rank_loss.memory) > 0


def test_a_batch_without_objects_and_one_after_it():
    model = detector({})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    assert step(model, optimizer, num_items=(0, 0))[1]["loss_cls"].item() == 0
    assert step(model, optimizer, num_items=(2, 1))[1]["loss_cls"].item() > 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_autocast_of_a_detector_ranks_its_logits_in_float32():
    """In the box head: mmcv's own operators have no bfloat16 on a CPU."""
    model = detector({"lambda_val": 3.0, "memory": 0})
    head, calls = model.roi_head.bbox_head, []
    head.forward, head.loss = (torch.autocast("cpu", torch.bfloat16)(run) for run in (head.forward, head.loss))
    hook = lambda module, args, output: (args[0].retain_grad(), calls.append((args[0], args[1], output)))  # noqa: E731
    model.roi_head.bbox_head.loss_cls.register_forward_hook(lambda *inputs: hook(*inputs) and None)
    loss, _ = step(model)
    (4096 * loss).backward()
    ((scores, labels, value),) = calls
    assert scores.dtype == torch.bfloat16
    single = scores.detach().float().requires_grad_()
    expected = core_loss(single, labels, lambda_val=3.0)
    expected.backward()
    torch.testing.assert_close(value.detach(), expected.detach())
    torch.testing.assert_close(scores.grad.float(), (4096 * single.grad).bfloat16().float())


def test_ohem_is_refused_and_the_memory_left_alone():
    config = ConfigDict(detection_mmdet.model(NUM_CLASSES, {}, channels=16, fc=32))
    config.train_cfg.rcnn.sampler = {"type": "OHEMSampler", "num": 16, "pos_fraction": 0.25}
    model = MODELS.build(config)
    with pytest.raises(ValueError, match="OHEMSampler"):
        step(model)
    assert len(model.roi_head.bbox_head.loss_cls.rank_loss.memory) == 0


# --- heads ------------------------------------------------------------------------------------------------------------


def stock(name, swap, num_classes=NUM_CLASSES):
    """mmdet's own config with a smaller backbone, fewer classes and ``swap`` of the dict of each classifying head."""
    model = get_stock(name)
    model.backbone.update(depth=18, init_cfg=None)
    model.backbone.pop("style", None)
    model.neck.in_channels = [64, 128, 256, 512]
    heads = model.roi_head.bbox_head if "roi_head" in model else model.bbox_head
    for head in heads if isinstance(heads, list) else [heads]:
        head.num_classes = num_classes
        swap(head)
    if "roi_head" in model and "rpn_proposal" in model.train_cfg:  # few boxes, which is faster
        model.train_cfg.rpn_proposal.max_per_img = model.test_cfg.rpn.max_per_img = 40
        for rcnn in model.train_cfg.rcnn if isinstance(model.train_cfg.rcnn, list) else [model.train_cfg.rcnn]:
            rcnn.sampler.num = 24
    if model.get("roi_head", {}).get("mask_head"):
        model.roi_head.mask_head.num_classes = num_classes
    return model


def get_stock(name):
    from mmengine.hub import get_config

    return copy.deepcopy(get_config(f"mmdet::{name}").model)


def rambo(**options):
    def swap(head):
        head.loss_cls = {"type": "RamboLoss", "memory": 1, **options}

    return swap


def dense(kind=None, **options):
    def swap(head):
        head.loss_cls = {"type": "RamboLoss", "use_sigmoid": True, "memory": 0, **options}
        if kind:
            head.type = kind

    return swap


SUPPORTED = {
    "faster": ("faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", rambo()),
    "faster softmax": ("faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", rambo(use_sigmoid=False)),
    "cascade": ("cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py", rambo()),
    "cascade softmax": ("cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py", rambo(use_sigmoid=False, return_dict=True)),
    "mask": ("mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py", rambo()),
    "double head softmax": ("double_heads/dh-faster-rcnn_r50_fpn_1x_coco.py", rambo(use_sigmoid=False)),
    "SABL softmax": ("sabl/sabl-faster-rcnn_r50_fpn_1x_coco.py", rambo(use_sigmoid=False)),
    "SABL cascade softmax": ("sabl/sabl-cascade-rcnn_r50_fpn_1x_coco.py", rambo(use_sigmoid=False)),
    "sparse": ("sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py", rambo()),
    "sparse softmax": ("sparse_rcnn/sparse-rcnn_r50_fpn_1x_coco.py", rambo(use_sigmoid=False)),
    "FCOS": ("fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py", dense()),
    "RetinaNet": ("retinanet/retinanet_r50_fpn_1x_coco.py", dense("RamboRetinaHead")),
    "RetinaNet dict": ("retinanet/retinanet_r50_fpn_1x_coco.py", dense("RamboRetinaHead", return_dict=True)),
    "ATSS": ("atss/atss_r50_fpn_1x_coco.py", dense("RamboATSSHead", aux_weight=1.0)),
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_heads_train_and_detect(name):
    config, swap = SUPPORTED[name]
    model = MODELS.build(stock(config, swap))
    check_heads(model)
    if name.startswith("sparse"):
        model.init_weights()  # boxes that are boxes
    data = batch_of(model, with_mask=name == "mask")
    losses = model(**data, mode="loss")
    loss, log = model.parse_losses(losses)
    loss.backward()
    mine = [value for key, value in log.items() if "loss_cls" in key or "loss_rpn_cls" in key]
    assert mine
    assert all(torch.isfinite(value) for value in log.values())
    calls = [module for module in model.modules() if isinstance(module, RamboLoss)]
    stages = {"cascade": 3, "SABL": 3, "sparse": 6}.get(name.split()[0], 1) if name != "SABL softmax" else 1
    assert len(calls) == stages
    for loss_cls in calls:
        assert loss_cls.rank_loss.statistics  # each was called
    if not name.startswith(("RetinaNet", "ATSS", "FCOS")):
        assert all(len(loss_cls.rank_loss.memory) > 0 for loss_cls in calls)
    model.eval()
    with torch.no_grad():
        results = model(**batch_of(model, with_mask=name == "mask"), mode="predict")
    found = results[0].pred_instances
    assert len(found) > 0
    assert ((found.scores >= 0) & (found.scores <= 1)).all()
    assert (found.labels < NUM_CLASSES).all()


REFUSED = {
    "double head": ("double_heads/dh-faster-rcnn_r50_fpn_1x_coco.py", rambo(), "needs use_sigmoid=False"),
    "PAA": ("paa/paa_r50_fpn_1x_coco.py", dense(), "one value for all boxes"),
    "GFL": ("gfl/gfl_r50_fpn_1x_coco.py", dense(), "GFL, TOOD"),
    "TOOD": ("tood/tood_r50_fpn_1x_coco.py", dense(), "GFL, TOOD"),
}
REFUSED_BEFORE_A_RUN = {
    "double head": (*REFUSED["double head"][:2], "expected 4 channels .*, got 5: .* needs use_sigmoid=False"),
    "SABL": ("sabl/sabl-faster-rcnn_r50_fpn_1x_coco.py", rambo(), "roi_head.bbox_head .SABLHead.: .* got 5: .*SABL"),
    "use_sigmoid not in the config": (
        "fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py",
        rambo(memory=0),
        "expected 4 channels for 4 classes with use_sigmoid=True, got 5: .* written in the config",
    ),
    "levels by themselves": ("retinanet/retinanet_r50_fpn_1x_coco.py", dense(), "RetinaHead.* calls its loss for each"),
    "levels of ATSS": ("atss/atss_r50_fpn_1x_coco.py", dense(), "ATSSHead.* calls its loss for each level"),
}


@pytest.mark.parametrize("name", REFUSED_BEFORE_A_RUN)
def test_heads_that_cannot_be_served_are_refused_before_a_run(name):
    config, swap, message = REFUSED_BEFORE_A_RUN[name]
    with pytest.raises(ValueError, match=message):
        check_heads(MODELS.build(stock(config, swap)))


@pytest.mark.parametrize("name", REFUSED)
def test_heads_that_cannot_be_served_say_why(name):
    config, swap, message = REFUSED[name]
    model = stock(config, swap)
    if name == "TOOD":
        model.bbox_head.num_dcn = 0
        model.train_cfg.initial_epoch = 0
    model = MODELS.build(model)
    if name == "TOOD":
        MessageHub.get_current_instance().update_info("epoch", 0)  # where it looks whether its second phase has begun
    with pytest.raises((TypeError, ValueError), match=message):
        model(**batch_of(model), mode="loss")


@pytest.mark.parametrize("kind", ["RetinaNet", "ATSS"])
def test_one_stage_heads_rank_all_levels_at_once_and_leave_the_other_losses_as_they_are(kind):
    config, swap = SUPPORTED[kind]
    ours = MODELS.build(stock(config, swap))
    theirs = MODELS.build(stock(config, lambda head: None))
    theirs.load_state_dict(ours.state_dict())
    calls = []
    ours.bbox_head.loss_cls.rank_loss.register_forward_hook(lambda module, args, output: calls.append(args))
    mine, others = (model(**batch_of(model), mode="loss") for model in (ours, theirs))
    assert len(calls) == 1
    for key in others:
        if key != "loss_cls":
            torch.testing.assert_close(mine[key], others[key])
    scores, labels, weights = calls[0]
    sizes = [score[0, 0].numel() for score in ours.bbox_head(ours.extract_feat(batch_of(ours)["inputs"]))[0]]
    anchors = ours.bbox_head.num_base_priors
    assert len(scores) == len(labels) == len(weights) == 2 * anchors * sum(sizes)
    assert 0 < int((labels < NUM_CLASSES).sum()) < len(labels)


def test_a_one_stage_head_of_this_package_wants_this_loss():
    with pytest.raises(TypeError, match="RamboRetinaHead ranks with RamboLoss, got loss_cls of type CrossEntropyLoss"):
        RamboRetinaHead(num_classes=3, in_channels=8, feat_channels=8)


# --- the other tools of mmdet -----------------------------------------------------------------------------------------


def soft_teacher(**options):
    config = get_stock("soft_teacher/soft-teacher_faster-rcnn_r50-caffe_fpn_180k_semi-0.1-coco.py")
    config.detector = stock("faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py", rambo(**options))
    config.data_preprocessor.data_preprocessor = config.detector.data_preprocessor
    config.semi_train_cfg.update(pseudo_label_initial_score_thr=0.0, rpn_pseudo_thr=0.0, cls_pseudo_thr=0.0)
    return MODELS.build(config)


@pytest.mark.parametrize("options", [{"memory": 0}, {"use_sigmoid": False, "memory": 1}])
def test_soft_teacher_without_a_score_of_the_background_or_with_a_memory_is_refused(options):
    said = (
        f"SoftTeacher needs use_sigmoid=False.* memory=0.* got use_sigmoid={'memory' in options and len(options) == 1}"
    )
    with pytest.raises(ValueError, match=said):
        check_heads(soft_teacher(**options))


def test_soft_teacher_ranks_its_pseudo_boxes_against_the_background():
    model = soft_teacher(use_sigmoid=False, memory=0)
    check_heads(model)
    calls = []
    model.student.roi_head.bbox_head.loss_cls.rank_loss.register_forward_hook(
        lambda module, args, _: calls.append(args)
    )
    first, second = batch_of(model.student), batch_of(model.student)
    for sample in second["data_samples"]:
        sample.set_metainfo({"homography_matrix": np.eye(3, dtype=np.float32)})
    names = ("sup", "unsup_teacher", "unsup_student")
    batches = dict(zip(names, (first, second, copy.deepcopy(second)), strict=True))
    found = model.loss(*({n: batches[n][part] for n in names} for part in ("inputs", "data_samples")))
    assert torch.isfinite(found["unsup_loss_cls"])
    assert found["unsup_loss_cls"] > 0
    _, labels, weights = calls[1]  # 0: labelled images, 1: pseudo labels, 2: for the boxes alone
    assert (labels < NUM_CLASSES).any()
    background = labels == NUM_CLASSES
    assert background.any()
    assert (weights[background] > 0).all()


@pytest.mark.parametrize("teacher", [lambda head: head.update(type="LADHead"), dense("LADHead")], ids=["own", "ours"])
def test_label_assignment_distillation_takes_the_loss_in_the_students_head(teacher):
    config = stock("lad/lad_r50-paa-r101_fpn_2xb8_coco_1x.py", dense())
    other = stock("paa/paa_r50_fpn_1x_coco.py", teacher)
    config.update(teacher_ckpt=None, teacher_backbone=other.backbone, teacher_neck=other.neck)
    config.teacher_bbox_head = other.bbox_head
    model = MODELS.build(config)
    check_heads(model)
    if other.bbox_head.loss_cls.type == "RamboLoss":
        with pytest.raises(ValueError, match="RamboLoss has one value for all boxes"):
            model(**batch_of(model), mode="loss")
    else:
        loss = model(**batch_of(model), mode="loss")["loss_cls"]
        assert 0 < loss < 1
        assert loss.requires_grad


def test_augmented_images_are_tested_together():
    model = detector({"memory": 1})
    step(model)
    averaged = DetTTAModel(
        tta_cfg=ConfigDict(nms={"type": "nms", "iou_threshold": 0.5}, max_per_img=100), module=model
    ).eval()
    data = demo_mm_inputs(1, (3, 96, 96), [3], NUM_CLASSES)
    views = [data, {**copy.deepcopy(data), "inputs": [image.flip(-1) for image in data["inputs"]]}]
    for view, flip in zip(views, (False, True), strict=True):
        metainfo = {"flip": flip, "flip_direction": "horizontal" if flip else None, "scale_factor": (1.0, 1.0)}
        view["data_samples"][0].set_metainfo(metainfo)
    with torch.no_grad():
        (found,) = averaged.test_step({name: [view[name] for view in views] for name in ("inputs", "data_samples")})
    assert 0 < len(found.pred_instances) <= 100
    assert (found.pred_instances.scores > 0).all()


def test_a_model_is_copied_and_saved_whole_memory_included(tmp_path):
    model = detector({"memory": 2, "aux_weight": 0.5, "aux_steps": 9})
    step(model)
    torch.save(model, tmp_path / "model.pth")
    state = model.roi_head.bbox_head.loss_cls.run_state()
    assert state["memory"]["pushes"] == 1
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pth", weights_only=False)):
        torch.testing.assert_close(other.roi_head.bbox_head.loss_cls.run_state(), state, rtol=0, atol=0)
        states = [seed(1) or step(one)[0] for one in (model, other)]
        torch.testing.assert_close(states[0], states[1])
        model.roi_head.bbox_head.loss_cls.resume(state)
    before = model.roi_head.bbox_head.fc_cls.weight.clone()
    model.init_weights()
    assert not torch.equal(model.roi_head.bbox_head.fc_cls.weight, before)


@pytest.mark.parametrize("options", [{"test_temperature": 0.5}, {"use_sigmoid": False}])
def test_a_traced_head_takes_another_number_of_boxes(options):
    head = detector(options).roi_head.bbox_head.eval().requires_grad_(False)

    def scores(features):
        logits, _ = head(features)
        return head.loss_cls.get_activation(logits) if head.custom_activation else logits.softmax(1)

    traced = torch.jit.trace(scores, torch.randn(5, 16, 7, 7))
    features = torch.randn(9, 16, 7, 7)
    assert traced(features).shape == (9, NUM_CLASSES + 1)
    torch.testing.assert_close(traced(features), scores(features))


# --- runner -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return detection_data.glyph_scenes(tmp_path_factory.mktemp("scenes"), num_train=8, num_test=3)


class SeedOfTheEpoch(Hook):
    """mmengine does not keep the random state; the same one at the start of an epoch makes runs comparable."""

    def before_train_epoch(self, runner):
        seed(runner.epoch)


def runner_config(scenes, folder, loss=None, epochs=2, validate=False):
    config = detection_mmdet.config(
        scenes, loss or {"memory": 3}, lr=1e-3, seed=0, epochs=epochs, batch=4, folder=Path(folder)
    )
    config.model = detection_mmdet.model(len(scenes.classes), loss or {"memory": 3}, channels=16, fc=32)
    config.param_scheduler = []
    if not validate:
        config.val_dataloader = config.val_evaluator = config.val_cfg = None
    return config


def run(config, hooks=()):
    runner = Runner.from_cfg(config)
    for hook in (SeedOfTheEpoch(), *hooks):
        runner.register_hook(hook)
    runner.train()
    return runner


def states_equal(first, second):
    first, second = first.model.state_dict(), second.model.state_dict()
    assert set(first) == set(second)
    for name, value in first.items():
        torch.testing.assert_close(second[name], value, rtol=0, atol=0, msg=name)


def test_a_resumed_run_goes_on_as_the_one_that_was_not_interrupted(scenes, tmp_path):
    loss = {"memory": 3, "lambda_val": 3.0, "aux_weight": 0.5, "aux_steps": 5}
    whole = run(runner_config(scenes, tmp_path / "whole", loss, epochs=3))
    run(runner_config(scenes, tmp_path / "parts", loss, epochs=2))
    resumed = run(runner_config(scenes, tmp_path / "parts", loss, epochs=3))
    assert resumed.iter == whole.iter == 6
    states_equal(whole, resumed)
    memory = resumed.model.roi_head.bbox_head.loss_cls.rank_loss.memory
    assert len(memory) > 0
    assert memory._pushes == 6


@pytest.mark.parametrize("changes", [{"update_buffers": False}, {"update_buffers": True, "begin_iter": 3}])
def test_weight_averaging_and_synced_buffers_leave_the_memory_alone(scenes, tmp_path, changes):
    changes = dict(changes)
    hooks = lambda: [EMAHook(**changes), SyncBuffersHook()]  # noqa: E731
    whole = run(runner_config(scenes, tmp_path / "whole", epochs=3), hooks())
    run(runner_config(scenes, tmp_path / "parts", epochs=2), hooks())
    resumed = run(runner_config(scenes, tmp_path / "parts", epochs=3), hooks())
    states_equal(whole, resumed)
    plain = run(runner_config(scenes, tmp_path / "plain", epochs=3))
    states_equal(plain, whole)
    assert len(whole.model.roi_head.bbox_head.loss_cls.rank_loss.memory) > 0


class Boxes(BaseModel):
    """A linear classifier of given boxes, for runs that take no time."""

    def __init__(self, loss):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.fc = torch.nn.Linear(5, NUM_CLASSES)
        self.fc.weight.data.copy_(torch.randn(NUM_CLASSES, 5, generator=generator))
        self.fc.bias.data.zero_()
        self.loss_cls = RamboLoss(**{"memory": 3, "lambda_val": 3.0, "aux_weight": 0.5, "aux_steps": 9, **loss})

    def forward(self, inputs, labels, mode):
        return {"loss_cls": self.loss_cls(self.fc(torch.cat(inputs)), torch.cat(labels))}


def boxes_run(folder, epochs=3, loss=(), launcher="none", by_epoch=True, hooks=(), **options):
    """A run of 4 steps an epoch, of 2 processes 2 each, on boxes that differ; trained."""
    generator = torch.Generator().manual_seed(1)
    data = [
        {"inputs": torch.randn(6, 5, generator=generator), "labels": torch.randint(5, (6,), generator=generator)}
        for _ in range(8)
    ]
    loop = {"by_epoch": True, "max_epochs": epochs} if by_epoch else {"by_epoch": False, "max_iters": 4 * epochs}
    runner = Runner(
        Boxes(dict(loss)),
        str(folder),
        train_dataloader={"dataset": data, "sampler": {"type": "InfiniteSampler" if not by_epoch else "DefaultSampler",
                                                       "shuffle": False}, "batch_size": 2},
        train_cfg=loop,
        optim_wrapper={"optimizer": {"type": "SGD", "lr": 0.5}},
        default_hooks={"checkpoint": {"type": "CheckpointHook", "interval": 1 if by_epoch else 4,
                                      "by_epoch": by_epoch}},
        custom_hooks=list(hooks),
        launcher=launcher,
        default_scope="mmdet",
        experiment_name=f"{folder}{options}{epochs}",
        cfg={"model_wrapper_cfg": {"type": "MMDistributedDataParallel", "device_ids": None}},
        **options,
    )  # fmt: skip
    runner.train()
    return runner


def saved_state(folder, name="epoch_3.pth"):
    return torch.load(Path(folder) / name, weights_only=False)["rambo_state"]


def log_of(runner):
    return next(Path(runner.log_dir).glob("*.log")).read_text()


def same(first, second):
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    return True


@pytest.mark.parametrize("by_epoch", [True, False])
def test_resuming_restores_the_memory_and_the_fading_loss(tmp_path, by_epoch):
    last, middle = ("epoch_3.pth", "epoch_2.pth") if by_epoch else ("iter_12.pth", "iter_8.pth")
    whole = boxes_run(tmp_path / "whole", by_epoch=by_epoch)
    boxes_run(tmp_path / "parts", 2, by_epoch=by_epoch)
    resumed = boxes_run(tmp_path / "parts", by_epoch=by_epoch, resume=True)
    elsewhere = boxes_run(
        tmp_path / "elsewhere", by_epoch=by_epoch, resume=True, load_from=str(tmp_path / "whole" / middle)
    )
    for folder, other in (("parts", resumed), ("elsewhere", elsewhere)):
        states_equal(whole, other)
        assert same(saved_state(tmp_path / "whole", last), saved_state(tmp_path / folder, last))
        assert "loss_cls: the memory goes on with 36 boxes" in log_of(other)
    (state,) = saved_state(tmp_path / "whole", last)["losses"]["loss_cls"]
    assert (state["num_steps"], state["memory"]["pushes"]) == (12, 12)


def test_a_run_that_loads_weights_starts_anew(tmp_path):
    boxes_run(tmp_path / "old", 2)
    new = boxes_run(tmp_path / "new", 1, load_from=str(tmp_path / "old" / "epoch_2.pth"))
    weights = torch.load(tmp_path / "old" / "epoch_2.pth", weights_only=False)["state_dict"]
    torch.save(weights, tmp_path / "weights.pth")
    expected = boxes_run(tmp_path / "expected", 1, load_from=str(tmp_path / "weights.pth"))
    assert set(weights) == {"fc.weight", "fc.bias"}
    states_equal(new, expected)
    assert same(saved_state(tmp_path / "new", "epoch_1.pth"), saved_state(tmp_path / "expected", "epoch_1.pth"))
    assert saved_state(tmp_path / "new", "epoch_1.pth")["losses"]["loss_cls"][0]["memory"]["pushes"] == 4
    other = boxes_run(tmp_path / "other", 1, {"memory": 1}, load_from=str(tmp_path / "old" / "epoch_2.pth"))
    assert "the memory" not in log_of(other)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda saved: saved.pop("rambo_state"), "memory and aux_steps start anew, since the checkpoint has no"),
        (lambda saved: saved["rambo_state"]["losses"].clear(), "memory and aux_steps start anew, since the"),
        (
            lambda saved: saved["rambo_state"].update(processes=2),
            "the memory starts empty, since the checkpoint has those of 1 of 2 processes, and this run has 1",
        ),
        (
            lambda saved: saved["rambo_state"]["losses"]["loss_cls"].append({}),
            "the memory starts empty, since the checkpoint has those of 2 of 1 processes, and this run has 1",
        ),
    ],
)  # fmt: skip
def test_a_memory_that_cannot_be_restored_starts_empty_and_the_log_says_so(tmp_path, change, said):
    boxes_run(tmp_path, 2)
    saved = torch.load(tmp_path / "epoch_2.pth", weights_only=False)
    change(saved)
    torch.save(saved, tmp_path / "epoch_2.pth")
    resumed = boxes_run(tmp_path, 3, resume=True)
    assert log_of(resumed).count(f"WARNING - loss_cls: {said}") == 1
    (state,) = saved_state(tmp_path)["losses"]["loss_cls"]
    assert state["memory"]["pushes"] == 4
    assert state["num_steps"] == (12 if "processes" in said else 4)  # the steps are the same in all processes


def test_a_compiled_step_is_the_same_and_compiled_once():
    compiled, counts = [], []

    def backend(graph, inputs):
        compiled.append(graph)
        return graph.forward

    models = [Boxes({}), Boxes({})]
    steps = [lambda x, y, model=model: model([x], [y], mode="loss")["loss_cls"] for model in models]
    steps[1] = torch.compile(steps[1], backend=backend)
    for number in range(5):
        losses_of = [one(torch.randn(6, 5, generator=torch.Generator().manual_seed(number)), torch.arange(6) % 5)
                     for one in steps]  # fmt: skip
        assert same(*losses_of)
        for model, loss in zip(models, losses_of, strict=True):
            model.zero_grad()
            loss.backward()
            with torch.no_grad():
                model.fc.weight -= model.fc.weight.grad
        counts.append(len(compiled))
    assert same(models[0].fc.weight, models[1].fc.weight)
    assert counts[0] > 0
    assert counts[1] == counts[-1]


def test_a_published_checkpoint_has_weights_alone(tmp_path):
    boxes_run(tmp_path, 1, hooks=[{"type": "CheckpointHook", "published_keys": ["meta", "state_dict"]}])
    (published,) = tmp_path.glob("epoch_1-*.pth")
    published = torch.load(published, weights_only=False)
    assert set(published) == {"meta", "state_dict"}
    assert set(published["state_dict"]) == {"fc.weight", "fc.bias"}


def test_a_loss_that_is_not_called_once_in_a_step_is_told(tmp_path, warnings_of_the_loss, monkeypatch):
    boxes_run(tmp_path / "once", 1)
    assert warnings_of_the_loss == []
    forward = Boxes.forward
    monkeypatch.setattr(Boxes, "forward", lambda self, **kwargs: [forward(self, **kwargs) for _ in range(2)][1])
    boxes_run(tmp_path / "twice", 1)
    monkeypatch.setattr(Boxes, "forward", lambda self, **kwargs: {"loss": self.fc.weight.sum()})
    boxes_run(tmp_path / "never", 1)
    twice, never = warnings_of_the_loss
    assert "loss_cls was called 2 times in the first step" in twice
    assert "loss_cls was not called in the first step" in never


def test_a_run_with_a_head_that_cannot_be_served_does_not_start(scenes, tmp_path):
    config = runner_config(scenes, tmp_path, epochs=1)
    config.model = stock("retinanet/retinanet_r50_fpn_1x_coco.py", dense(), len(scenes.classes))
    with pytest.raises(ValueError, match=r"bbox_head \(RetinaHead\) calls its loss for each level"):
        run(config)


def two_processes(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    os.environ["LOCAL_RANK"] = str(rank)
    torch.set_num_threads(1)
    register_all_modules()
    for name, loss in (("own", {}), ("gathered", {"memory_gather": True})):
        boxes_run(f"{folder}/{name}/whole", 2, loss, "pytorch")
        boxes_run(f"{folder}/{name}/parts", 1, loss, "pytorch")
        boxes_run(f"{folder}/{name}/parts", 2, loss, "pytorch", resume=True)
    boxes_run(f"{folder}/iterations", 1, launcher="pytorch", by_epoch=False)
    torch.distributed.barrier()
    os._exit(0)  # gloo's destructor can wait for a thread that waits for Python's lock, and never end


def test_each_of_two_processes_gets_its_own_memory_back(tmp_path):
    torch.multiprocessing.spawn(two_processes, (str(tmp_path),), nprocs=2)
    for name in ("own", "gathered"):
        whole, parts = (saved_state(tmp_path / name / run, "epoch_2.pth") for run in ("whole", "parts"))
        assert same(whole, parts)
        assert whole["processes"] == 2
        weights = [torch.load(tmp_path / name / run / "epoch_2.pth", weights_only=False)["state_dict"]
                   for run in ("whole", "parts")]  # fmt: skip
        assert same(*weights)
    first, second = saved_state(tmp_path / "own" / "whole", "epoch_2.pth")["losses"]["loss_cls"]
    assert first["memory"]["pushes"] == second["memory"]["pushes"] == 4
    assert not torch.equal(first["memory"]["field0"], second["memory"]["field0"])
    (gathered,) = saved_state(tmp_path / "gathered" / "whole", "epoch_2.pth")["losses"]["loss_cls"]
    assert gathered["memory"]["lengths"].tolist() == [24, 24, 24]
    assert len(saved_state(tmp_path / "iterations", "iter_4.pth")["losses"]["loss_cls"]) == 2
    alone = boxes_run(tmp_path / "own" / "parts", 3, resume=True)
    assert "the checkpoint has those of 2 of 2 processes, and this run has 1" in log_of(alone)


def test_a_run_from_the_command_line_to_the_average_precision(scenes, tmp_path):
    config = runner_config(scenes, tmp_path / "work", {"return_dict": True, "aux_weight": 0.3}, epochs=1, validate=True)
    config.resume = False
    config.test_dataloader, config.test_evaluator = config.val_dataloader, config.val_evaluator
    config.test_cfg = {"type": "TestLoop"}
    config.train_cfg.val_interval = 1
    config.default_hooks.logger.interval = 1
    config.dump(tmp_path / "config.py")
    trained = train_main([str(tmp_path / "config.py"), "--cfg-options", "train_cfg.max_epochs=2"])
    assert trained.epoch == 2
    (log,) = Path(trained.log_dir).glob("vis_data/scalars.json")
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [line for line in lines if "loss_cls_map" in line]
    assert len(steps) == 4
    assert {"loss_cls_apc", "loss_cls_aux", "ap_map", "ap_apc", "acc_classes", "share_zero_gradient"} <= set(steps[0])
    assert [line for line in lines if "coco/bbox_mAP_50" in line]
    again = train_main([str(tmp_path / "config.py"), "--cfg-options", "train_cfg.max_epochs=2"])
    assert "has checkpoints of an earlier run, which those of this one replace" in log_of(again)
    assert "earlier run" not in log_of(trained)
    resumed = train_main([str(tmp_path / "config.py"), "--resume", "--cfg-options", "train_cfg.max_epochs=3"])
    assert (resumed.epoch, resumed.iter) == (3, 6)
    checkpoint = next((tmp_path / "work").glob("epoch_3.pth"))
    tested = train_main([str(tmp_path / "config.py"), "--test", str(checkpoint), "--work-dir", str(tmp_path / "test")])
    (log,) = (tmp_path / "test").glob("*/*.json")
    assert "coco/bbox_mAP_50" in json.loads(log.read_text())
    states_equal(resumed, tested)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{tmp}/none.py"], "config: no such file: {tmp}/none.py"),
        (["{tmp}"], "config: no such file: {tmp}"),
        (["{config}", "--test", "{tmp}/none.pth"], "--test: no such file: {tmp}/none.pth"),
        (["{config}", "--resume", "{tmp}/none.pth"], "--resume: no such file: {tmp}/none.pth"),
        (["{config}", "--resume"], "--resume: {tmp}/work has no last_checkpoint"),
        (["{config}", "--work-dir", "{tmp}/moved", "--resume"], "--resume: no such file: {tmp}/gone.pth"),
        (["{config}", "--cfg-options", "load_from={tmp}/none.pth"], "load_from: no such file: {tmp}/none.pth"),
        (["{config}", "--test", "{config}", "--resume"], "--test and --resume exclude each other"),
        (["{config}", "--test", "{config}", "--amp"], "--test and --amp exclude each other"),
        (["{config}", "--test", "{config}", "--auto-scale-lr"], "--test and --auto-scale-lr exclude each other"),
        (["{config}", "--test", "{config}"], "config.py has no test_dataloader"),
        (["{config}", "--auto-scale-lr"], "--auto-scale-lr needs auto_scale_lr = dict(base_batch_size=...)"),
        (["{config}", "--launcher", "pytorch"], "--launcher pytorch needs the processes that torchrun starts"),
        (["{config}", "--launcher", "slurm"], "needs the processes that srun starts: SLURM_PROCID is not set"),
        (["{config}", "--device", "cpu"], "unrecognized arguments: --device cpu"),
        (["{config}", "--cfg-options", "epochs"], "--cfg-options: expected key.subkey=value"),
        (["{config}", "--cfg-options", "train_dataloader.dataset.ann_file={tmp}/none.json"], "{tmp}/none.json"),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)
def test_what_a_command_lacks_is_one_line_and_status_2(scenes, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.delenv("RANK", raising=False)
    runner_config(scenes, tmp_path / "work", epochs=1).dump(tmp_path / "config.py")
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved" / "last_checkpoint").write_text(f"{tmp_path}/gone.pth")
    config = Config.fromfile(tmp_path / "config.py")
    config.resume = False
    config.dump(tmp_path / "config.py")
    places = {"tmp": tmp_path, "config": tmp_path / "config.py"}
    with pytest.raises(SystemExit) as ended:
        train_main([argument.format(**places) for argument in arguments])
    assert ended.value.code == 2
    assert message.format(**places) in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_mixed_precision_without_a_gpu_is_refused(tmp_path, capsys):
    (tmp_path / "config.py").touch()
    with pytest.raises(SystemExit, match="2"):
        train_main([str(tmp_path / "config.py"), "--amp"])
    assert "--amp needs a GPU" in capsys.readouterr().err


def test_processes_without_a_launcher_are_refused(tmp_path, monkeypatch, capsys):
    (tmp_path / "config.py").touch()
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit, match="2"):
        train_main([str(tmp_path / "config.py")])
    assert "2 processes were started (WORLD_SIZE): add --launcher pytorch" in capsys.readouterr().err


class Asked(Exception):
    """In place of a runner: the config that it was asked for."""


@pytest.mark.parametrize(
    ("own", "arguments", "resume", "load_from"),
    [
        ({"resume": True}, [], True, None),  # the config's own
        ({"load_from": "{last}"}, ["--resume"], True, None),  # the run, not the weights that it began with
        ({}, ["--resume", "{last}"], True, "{last}"),
        ({"resume": True}, ["--test", "{last}"], False, "{last}"),
        ({"load_from": "{last}"}, [], False, "{last}"),
    ],
)
def test_what_a_run_starts_from(tmp_path, monkeypatch, own, arguments, resume, load_from):
    last = tmp_path / "epoch_1.pth"
    last.touch()
    (tmp_path / "last_checkpoint").write_text(str(last))
    parts = {"work_dir": str(tmp_path), "train_dataloader": {"a": 1}, "train_cfg": {"a": 1}, "optim_wrapper": {"a": 1}}
    parts |= {"test_dataloader": {"a": 1}, "test_cfg": {"a": 1}, "test_evaluator": {"a": 1}}
    own = {name: value.format(last=last) if isinstance(value, str) else value for name, value in own.items()}
    Config({**parts, **own}).dump(tmp_path / "config.py")

    def asked(cfg):
        raise Asked(cfg)

    monkeypatch.setattr(Runner, "from_cfg", asked)
    with pytest.raises(Asked) as told:
        train_main([str(tmp_path / "config.py"), *(argument.format(last=last) for argument in arguments)])
    (cfg,) = told.value.args
    assert cfg.get("resume", False) is resume
    assert cfg.get("load_from") == (load_from and load_from.format(last=last))


def test_two_processes(scenes, tmp_path):
    """torchrun with the launcher, two batches of 2 and a memory that gathers; both processes end with one state."""
    config = runner_config(scenes, tmp_path / "work", {"memory": 2, "memory_gather": True}, epochs=1)
    config.train_dataloader.batch_size = 2
    config.dump(tmp_path / "config.py")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "rambo_plugins.mmdet.train", str(tmp_path / "config.py"), "--launcher", "pytorch"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True, text=True, check=False, cwd=ROOT, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kept = torch.load(tmp_path / "work" / "epoch_1.pth", weights_only=False)["rambo_state"]
    (state,) = kept["losses"]["roi_head.bbox_head.loss_cls"]  # one, since it is the same for both
    assert kept["processes"] == 2
    assert state["memory"]["lengths"].tolist() == [4 * 128, 4 * 128]


# --- configs ----------------------------------------------------------------------------------------------------------

CONFIGS = sorted((ROOT / "mmdet_configs").rglob("*.py"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_configs_parse_and_build(path):
    config = Config.fromfile(path)
    if "_rambo_" not in path.stem:
        assert "RamboLoss" not in config.pretty_text
        assert path.with_name(path.name.replace("_ce_", "_rambo_")).exists()
    with torch.device("meta"):
        model = MODELS.build(config.model)
    losses = [module for module in model.modules() if isinstance(module, RamboLoss)]
    assert len(losses) == ("_rambo_" in path.stem) * (3 if "cascade" in path.stem else 1)
    for loss in losses:
        blend = "blend" in path.stem
        assert loss.use_sigmoid != blend
        assert loss.loss_weight * loss.aux_weight == blend  # the usual weight of cross-entropy
        assert loss.rank_loss.margin == (0.0 if "no-margin" in path.stem else 0.02 if blend else 0.15)
        assert loss.rank_loss.lambda_val == next((v for v in (0.1, 2.5) if f"lambda{v}" in path.stem), 0.5)
    if "voc" in path.stem:
        assert config.optim_wrapper.optimizer.lr == (0.1 if "lr0.1" in path.stem else 0.005)
        assert len(config.train_dataloader.dataset.dataset.datasets) == (2 if "voc0712" in path.stem else 1)
        assert config.train_dataloader.batch_size == 8


def test_the_twins_of_the_configs_differ_in_the_loss_alone():
    for path in CONFIGS:
        twin = path.with_name(path.name.replace("_rambo_", "_ce_"))
        if path == twin or not twin.exists():
            continue
        ours, theirs = (Config.fromfile(p).to_dict() for p in (path, twin))
        assert ours.pop("custom_imports") == {"imports": ["rambo_plugins.mmdet"], "allow_failed_imports": False}
        del ours["model"], theirs["model"]
        assert ours == theirs


def test_the_configs_of_the_table_are_there():
    names = {path.stem for path in CONFIGS}
    for backbone, data in (("r50", "voc07"), ("r50", "voc0712"), ("r101", "voc0712"), ("x101-32x4d", "voc0712")):
        for loss in ("ce", "rambo"):
            for lr in ("", "_lr0.1"):
                assert f"faster-rcnn_{backbone}_fpn_{loss}_{data}{lr}" in names
    assert len([name for name in names if name.endswith("_rambo_coco")]) == 6


def test_the_optimiser_wrapper_accumulates_without_a_change_of_lambda():
    """Two steps that accumulate are the mean of the gradients of each alone."""
    layer = torch.nn.Linear(8, NUM_CLASSES, bias=False)
    inputs = [torch.randn(20, 8) for _ in range(2)]
    labels = [torch.randint(0, NUM_CLASSES + 1, (20,)) for _ in range(2)]
    wrapper = OptimWrapper(torch.optim.SGD(layer.parameters(), lr=1.0), accumulative_counts=2)
    wrapper.initialize_count_status(layer, 0, 2)
    start, single = layer.weight.detach().clone(), []
    for x, y in zip(inputs, labels, strict=True):
        loss = RamboLoss(memory=0, lambda_val=2.0)(layer(x), y)
        single.append(torch.autograd.grad(loss, layer.weight)[0])
    for x, y in zip(inputs, labels, strict=True):
        wrapper.update_params(RamboLoss(memory=0, lambda_val=2.0)(layer(x), y))
    assert single[0].any()
    torch.testing.assert_close(start - layer.weight.detach(), (single[0] + single[1]) / 2)


def test_numbers_of_numpy_are_numbers():
    numbers = {"loss_weight": np.float32(2), "lambda_val": np.float64(3), "aux_weight": np.float32(0.5),
               "aux_steps": np.int64(4), "memory": np.int32(1), "test_temperature": np.float32(1)}  # fmt: skip
    plain = {name: value.item() for name, value in numbers.items()}
    losses_of = [RamboLoss(**options)(*rois(0)) for options in (numbers, plain)]
    assert losses_of[0].requires_grad
    torch.testing.assert_close(*losses_of, rtol=0, atol=0)


def test_the_defaults_are_those_of_the_core():
    ours, core = RamboLoss().rank_loss, DetectionLoss()
    assert ours.extra_repr() == core.extra_repr()
    assert ours.memory.batches == core.memory.batches == 7


def test_the_config_of_the_readme_builds(tmp_path):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE)
    (block,) = (text for language, text in blocks if not language and "RamboLoss" in text)
    assert len(block.splitlines()) <= 1 + 5
    (tmp_path / "config.py").write_text(block)
    with torch.device("meta"):
        model = MODELS.build(Config.fromfile(tmp_path / "config.py").model)
    assert isinstance(model.roi_head.bbox_head.loss_cls, RamboLoss)
    assert model.roi_head.bbox_head.fc_cls.out_features == 20
