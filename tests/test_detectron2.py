"""The detectron2 plugin, with real detectors on the CPU: values, heads, checkpoints, processes, launcher, configs."""

import copy
import json
import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("detectron2")

import detection_data
from detectron2 import model_zoo
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyConfig, get_cfg, instantiate
from detectron2.data import MetadataCatalog
from detectron2.engine import DefaultPredictor
from detectron2.export import TracingAdapter, scripting_with_instances
from detectron2.layers import ShapeSpec
from detectron2.modeling import GeneralizedRCNNWithTTA, build_model
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.roi_heads import FastRCNNOutputLayers
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from fvcore.nn.precise_bn import update_bn_stats

from rambo_plugins.core import average_precision_loss
from rambo_plugins.core.detection import DetectionLoss
from rambo_plugins.detectron2 import RamboFastRCNNOutputLayers, RamboState, add_rambo_config
from rambo_plugins.detectron2.evaluators import PreciseVOCEvaluator
from rambo_plugins.detectron2.train import main as train_main

ROOT = Path(__file__).parent.parent
CONFIGS = sorted(path for path in (ROOT / "detectron2_configs").rglob("*.*") if not path.stem.startswith("Base"))
NUM_CLASSES = 4
KINDS = {
    "FPN": ("COCO-Detection/faster_rcnn_R_50_FPN_1x", "RamboROIHeads"),
    "C4": ("COCO-Detection/faster_rcnn_R_50_C4_1x", "RamboRes5ROIHeads"),
    "cascade": ("Misc/cascade_mask_rcnn_R_50_FPN_1x", "RamboCascadeROIHeads"),
}


@pytest.fixture(autouse=True)
def one_thread():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def small(cfg):
    """A thin ResNet, few boxes, small images."""
    cfg.merge_from_list(
        ["MODEL.DEVICE", "cpu", "MODEL.WEIGHTS", "", "MODEL.MASK_ON", False, "MODEL.ROI_HEADS.NUM_CLASSES", NUM_CLASSES,
         "MODEL.RESNETS.STEM_OUT_CHANNELS", 8, "MODEL.RESNETS.RES2_OUT_CHANNELS", 32,
         "MODEL.RESNETS.WIDTH_PER_GROUP", 8,
         "MODEL.FPN.OUT_CHANNELS", 32, "MODEL.RPN.CONV_DIMS", [32], "MODEL.RPN.POST_NMS_TOPK_TRAIN", 100,
         "MODEL.RPN.POST_NMS_TOPK_TEST", 50, "MODEL.ROI_HEADS.BATCH_SIZE_PER_IMAGE", 32,
         "MODEL.RESNETS.NORM", "BN", "MODEL.BACKBONE.FREEZE_AT", 0, "MODEL.ROI_BOX_HEAD.FC_DIM", 64,
         "INPUT.MIN_SIZE_TRAIN", [128], "INPUT.MIN_SIZE_TEST", 128, "SOLVER.IMS_PER_BATCH", 2]
    )  # fmt: skip
    return cfg


def config(kind="FPN", head=None, **rambo):
    path, name = KINDS[kind]
    cfg = get_cfg()
    add_rambo_config(cfg)
    cfg.merge_from_file(model_zoo.get_config_file(f"{path}.yaml"))
    small(cfg)
    cfg.MODEL.ROI_HEADS.NAME = head or name
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    cfg.MODEL.ROI_BOX_HEAD.RAMBO.merge_from_other_cfg(type(cfg)({key.upper(): value for key, value in rambo.items()}))
    return cfg


def batch(num_items=(3, 2), seed=0, side=128):
    generator = torch.Generator().manual_seed(seed)
    data = []
    for num in num_items:
        instances = Instances((side, side))
        corner = torch.rand(num, 2, generator=generator) * (side - 64)
        sides = 24 + 40 * torch.rand(num, 2, generator=generator)
        instances.gt_boxes = Boxes(torch.cat([corner, corner + sides], 1))
        instances.gt_classes = torch.randint(NUM_CLASSES, (num,), generator=generator)
        image = torch.randint(256, (3, side, side), generator=generator, dtype=torch.uint8)
        data.append({"image": image, "instances": instances, "height": side, "width": side})
    return data


def step(model, optimizer=None, data=None):
    with EventStorage() as storage:
        losses = model(data or batch())
        scalars = {name: value for name, (value, _) in storage.latest().items()}
    loss = sum(losses.values())
    if optimizer is not None:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return losses, scalars


def predictors(model):
    return [module for module in model.modules() if isinstance(module, RamboFastRCNNOutputLayers)]


def predictor(**options):
    transform = Box2BoxTransform(weights=(10, 10, 5, 5))
    return RamboFastRCNNOutputLayers(
        ShapeSpec(channels=8), box2box_transform=transform, num_classes=NUM_CLASSES, **options
    )


def proposals(num=20, seed=0):
    generator = torch.Generator().manual_seed(seed)
    instances = Instances((100, 100))
    corner = 50 * torch.rand(num, 2, generator=generator)
    instances.proposal_boxes = Boxes(torch.cat([corner, corner + 20], 1))
    instances.gt_boxes = Boxes(torch.cat([corner + 1, corner + 22], 1))
    instances.gt_classes = torch.randint(0, NUM_CLASSES + 1, (num,), generator=generator)
    logits = 0.3 * torch.randn(num, NUM_CLASSES + 1, generator=generator)
    return logits.requires_grad_(), torch.zeros(num, 4 * NUM_CLASSES), [instances]


# --- the loss ---------------------------------------------------------------------------------------------------------


def core_loss(scores, labels, lambda_val=0.5, margin=0.15):
    """The unit loss from the core's public function: λ_p = λ·s_p, see DetectionLoss."""
    relevance = labels == torch.arange(scores.shape[1])[:, None]
    return sum(
        s * average_precision_loss(scores.T, relevance, lambda_val=lambda_val * s, margin=margin, over_all=over_all)
        for s, over_all in ((2 / 3, False), (1 / 3, True))
    )


@pytest.mark.parametrize(
    ("options", "to_scores"),
    [
        ({}, lambda x: x[:, :-1]),
        ({"score_space": "probabilities"}, lambda x: x[:, :-1].sigmoid()),
        ({"score_mode": "softmax"}, lambda x: x.softmax(1)[:, :-1]),
    ],
)
def test_the_loss_is_the_core_on_the_same_tensors_memory_included(options, to_scores):
    layers = predictor(lambda_val=3.0, loss_weight={"loss_cls": 2.0}, **options)
    past = [proposals(seed=seed, num=10 + seed) for seed in (1, 2)]
    for logits, deltas, boxes in past:
        layers.losses((logits, deltas), boxes)
    logits, deltas, boxes = proposals()
    loss = layers.losses((logits, deltas), boxes)["loss_cls"]
    loss.backward()
    everything = torch.cat([logits.detach(), *(other.detach() for other, _, _ in past)]).requires_grad_()
    labels = torch.cat([some[0].gt_classes for some in (boxes, *(other for _, _, other in past))])
    expected = 2 * core_loss(to_scores(everything), labels, lambda_val=3.0)
    expected.backward()
    assert logits.grad.any()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(logits.grad, everything.grad[: len(logits)])


@pytest.mark.parametrize("mode", ["sigmoid", "softmax"])
def test_the_loss_of_mmdets_plugin_on_the_same_scores_is_the_same(mode):
    pytest.importorskip("mmdet")
    from rambo_plugins.mmdet import RamboLoss

    common = {"lambda_val": 3.0, "margin": 0.1, "memory": 2, "map_weight": 1.0, "apc_weight": 3.0}
    ours = predictor(score_mode=mode, aux_ce_weight=0.5, aux_ce_steps=4, loss_weight={"loss_cls": 2.0}, **common)
    theirs = RamboLoss(use_sigmoid=mode == "sigmoid", aux_weight=0.5, aux_steps=4, loss_weight=2.0, **common)
    for seed in range(4):
        logits, deltas, boxes = proposals(seed=seed)
        other = logits.detach()[:, :-1] if mode == "sigmoid" else logits.detach()
        other = other.clone().requires_grad_()
        loss = ours.losses((logits, deltas), boxes)["loss_cls"]
        expected = theirs(other, boxes[0].gt_classes, avg_factor=len(logits))
        loss.backward()
        expected.backward()
        assert other.grad.any()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(logits.grad[:, : other.shape[1]], other.grad)


@pytest.mark.parametrize("mode", ["sigmoid", "softmax"])
def test_the_box_loss_and_the_cross_entropy_are_detectron2s_own(mode):
    layers = predictor(score_mode=mode, map_weight=0.0, memory=0, aux_ce_weight=1.0)
    stock = FastRCNNOutputLayers(
        ShapeSpec(channels=8), box2box_transform=layers.box2box_transform, num_classes=NUM_CLASSES,
        use_sigmoid_ce=mode == "sigmoid",
    )  # fmt: skip
    logits, deltas, boxes = proposals()
    deltas = torch.randn_like(deltas)
    with EventStorage() as storage:
        ours = layers.losses((logits, deltas), boxes)
        scalars = {name: value for name, (value, _) in storage.latest().items()}
    with EventStorage() as storage:
        theirs = stock.losses((logits, deltas), boxes)
        stock_scalars = {name: value for name, (value, _) in storage.latest().items()}
    torch.testing.assert_close(ours["loss_box_reg"], theirs["loss_box_reg"])
    assert scalars["rambo/loss_ce"] == pytest.approx(theirs["loss_cls"].item())
    parts = sum(scalars[f"rambo/{name}"] for name in ("loss_map", "loss_apc", "loss_ce"))
    assert parts == pytest.approx(ours["loss_cls"].item())
    assert {"rambo/ap_map", "rambo/ap_apc", "rambo/share_zero_gradient"} <= set(scalars)
    if mode == "softmax":
        assert {k: v for k, v in scalars.items() if "fast_rcnn" in k} == pytest.approx(stock_scalars)
    else:
        objects = boxes[0].gt_classes < NUM_CLASSES
        right = (logits[:, :-1].argmax(1) == boxes[0].gt_classes)[objects].float().mean()
        assert scalars["fast_rcnn/fg_cls_accuracy"] == pytest.approx(right.item())
        assert not {"fast_rcnn/cls_accuracy", "fast_rcnn/false_negative"} & set(scalars)


def test_half_precision_and_loss_scaling_change_no_lambda():
    logits, deltas, boxes = proposals()
    half = logits.detach().bfloat16().requires_grad_()
    single = half.detach().float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = predictor(lambda_val=3.0).losses((half, deltas), boxes)["loss_cls"]
    (1024 * loss).backward()
    core_loss(single[:, :-1], boxes[0].gt_classes, lambda_val=3.0).backward()
    assert single.grad.any()
    torch.testing.assert_close(half.grad, (1024 * single.grad).bfloat16())


def test_the_scores_of_detections():
    logits, deltas, boxes = proposals()
    (scores,) = predictor(test_temperature=0.5).predict_probs((logits, deltas), boxes)
    assert scores.shape == logits.shape
    torch.testing.assert_close(scores[:, :-1], torch.sigmoid(2 * logits[:, :-1]))
    assert not scores[:, -1].any()
    (scores,) = predictor(score_mode="softmax").predict_probs((logits, deltas), boxes)
    torch.testing.assert_close(scores, logits.softmax(1))


def test_what_does_not_go_together_is_refused():
    for options, message in (
        ({"score_mode": "margins"}, "score_mode must be one of 'sigmoid', 'softmax', got 'margins'"),
        ({"score_mode": "softmax", "score_space": "logits"}, "softmax reorders the boxes"),
        ({"score_mode": "softmax", "test_temperature": 0.5}, "test_temperature needs sigmoid, got 0.5"),
        ({"score_mode": "softmax", "use_sigmoid_ce": True}, "set USE_SIGMOID_CE to False"),
        ({"use_fed_loss": True}, "set USE_FED_LOSS to False"),
        ({"aux_ce_steps": 10}, "aux_ce_steps needs aux_ce_weight > 0"),
        ({"lambda_val": -1}, "lambda_val must be a finite number > 0, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            predictor(**options)
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file("COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml"))
    cfg.MODEL.ROI_HEADS.NAME = "RamboROIHeads"
    with pytest.raises(KeyError, match=r"RamboROIHeads reads MODEL.ROI_BOX_HEAD.RAMBO: call add_rambo_config\(cfg\)"):
        build_model(cfg)


def test_the_defaults_are_those_of_the_core_and_of_the_config_node():
    from_lazy, (from_yaml,) = predictor(), predictors(build_model(config()))
    for layers in (from_lazy, from_yaml):
        assert layers.rank_loss.extra_repr() == DetectionLoss().extra_repr()
        assert layers.rank_loss.memory.batches == 7
        assert layers.use_sigmoid_ce
    names = ("score_space", "test_temperature", "aux_ce_weight", "aux_ce_steps")
    assert [getattr(from_lazy, name) for name in names] == [getattr(from_yaml, name) for name in names]


# --- a detector -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["sigmoid", "softmax"])
def test_yaml_models_train_and_detect(kind, mode):
    model = build_model(config(kind, score_mode=mode, memory=2, lambda_val=20.0, margin=0.0))
    weights = [layers.box2box_transform.weights for layers in predictors(model)]
    scales = (10.0, 20.0, 30.0) if kind == "cascade" else (10.0,)
    assert weights == [(scale, scale, scale / 2, scale / 2) for scale in scales]
    losses, scalars = step(model)
    sum(losses.values()).backward()
    prefix = "stage0/" if kind == "cascade" else ""
    assert scalars[f"{prefix}rambo/ap_map"] > 0
    for layers in predictors(model):
        assert layers.cls_score.out_features == NUM_CLASSES + 1
        assert layers.cls_score.weight.grad[:-1].any()
        assert len(layers.rank_loss.memory) > 0
    model.eval()
    with torch.no_grad():
        found = model(batch())[0]["instances"]
    assert 0 < len(found) <= 100
    assert ((found.scores >= 0) & (found.scores <= 1)).all()
    assert (found.pred_classes < NUM_CLASSES).all()


def group_norm(backbone, *more):
    """Overrides: the frozen BatchNorm of a network without weights scales nothing."""
    return [f"model.{part}.norm=GN" for part in (f"{backbone}.stem", f"{backbone}.stages", *more)]


LAZY = {
    "faster_rcnn_R_50_FPN_1x_rambo.py": group_norm("backbone.bottom_up"),
    "mask_rcnn_R_50_FPN_1x_rambo.py": group_norm("backbone.bottom_up"),
    "mask_rcnn_R_50_C4_1x_rambo.py": group_norm("backbone", "roi_heads.res5"),
    "cascade": group_norm("backbone.bottom_up"),
}


def lazy_cascade():
    """As the README says: each of the predictors gets another target."""
    cfg = LazyConfig.load(model_zoo.get_config_file("common/models/cascade_rcnn.py"))
    for layers in cfg.model.roi_heads.box_predictors:
        layers.update(_target_=RamboFastRCNNOutputLayers, test_score_thresh=0.0)
    return cfg


@pytest.mark.parametrize("name", LAZY)
def test_lazy_models_train_and_detect(name):
    path = next((str(path) for path in CONFIGS if path.name == name), None)
    cfg = LazyConfig.apply_overrides(LazyConfig.load(path) if path else lazy_cascade(), LAZY[name])
    model = cfg.model
    model.roi_heads.num_classes = NUM_CLASSES
    model.roi_heads.batch_size_per_image = 16
    model.proposal_generator.post_nms_topk = (50, 30)
    for layers in model.roi_heads.get("box_predictors") or [model.roi_heads.box_predictor]:
        layers.update(lambda_val=20.0, margin=0.0)
    for part in ("mask_in_features", "mask_pooler", "mask_head"):
        model.roi_heads.pop(part, None)
    model = instantiate(model)
    losses, _ = step(model)
    sum(losses.values()).backward()
    assert len(predictors(model)) == (3 if name == "cascade" else 1)
    for layers in predictors(model):
        assert layers.cls_score.weight.grad[:-1].any()
        assert layers.test_score_thresh == 0
    model.eval()
    with torch.no_grad():
        assert len(model(batch())[0]["instances"]) > 0


@pytest.mark.parametrize("options", [{}, {"score_mode": "softmax", "margin": 0.02}])
def test_training_lowers_the_loss(options):
    model = build_model(config(lambda_val=2.0, memory=2, **options))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = batch()
    values = [step(model, optimizer, data)[0]["loss_cls"].item() for _ in range(30)]
    assert np.mean(values[-5:]) < 0.8 * np.mean(values[:5])


def test_a_batch_without_objects_and_one_after_it():
    model = build_model(config())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses, _ = step(model, optimizer, batch((0, 0)))
    assert losses["loss_cls"].item() == 0
    assert step(model, optimizer, batch((2, 1)))[0]["loss_cls"].item() > 0
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_no_proposals_at_all():
    layers = predictor()
    losses = layers.losses((torch.zeros(0, NUM_CLASSES + 1, requires_grad=True), torch.zeros(0, 4 * NUM_CLASSES)), [])
    assert losses["loss_cls"].item() == losses["loss_box_reg"].item() == 0
    losses["loss_cls"].backward()


def test_forward_passes_without_a_gradient_leave_the_memory_alone():
    """As PreciseBN makes them."""
    model = build_model(config())
    with torch.no_grad():
        step(model)
    assert len(predictors(model)[0].rank_loss.memory) == 0


def test_enabled_false_gives_detectron2s_own_predictor_back():
    cfg = config(enabled=False)
    stock = config(head="StandardROIHeads")
    torch.manual_seed(0)
    model = build_model(cfg)
    torch.manual_seed(0)
    other = build_model(stock)
    assert type(model.roi_heads.box_predictor) is FastRCNNOutputLayers
    for (name, mine), theirs in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


# --- detectron2's tools -----------------------------------------------------------------------------------------------

FIELDS = {"proposal_boxes": Boxes, "objectness_logits": torch.Tensor, "pred_boxes": Boxes, "scores": torch.Tensor}
FIELDS |= {"pred_classes": torch.Tensor}


def detections(model, image):
    with torch.no_grad():
        return model.inference([{"image": image}], do_postprocess=False)[0]


@pytest.mark.parametrize(("kind", "mode"), [("FPN", "softmax"), ("cascade", "sigmoid")])
def test_a_traced_model_finds_the_same_in_images_of_another_size(kind, mode):
    model = build_model(
        config(kind, score_mode=mode, **({"test_temperature": 0.5} if mode == "sigmoid" else {}))
    ).eval()
    first, other = batch()[0]["image"], batch(seed=5)[0]["image"][:, :64, :112]
    adapter = TracingAdapter(
        model, [{"image": first}], lambda model, x: [{"instances": one} for one in model.inference(x, None, False)]
    )
    with torch.no_grad():
        traced = torch.jit.trace(adapter.eval(), (first,), check_trace=False)
        found = adapter.outputs_schema(traced(other))[0]["instances"]
    expected = detections(model, other)
    assert 0 < len(expected) != len(detections(model, first))
    torch.testing.assert_close(found.scores, expected.scores)
    torch.testing.assert_close(found.pred_boxes.tensor, expected.pred_boxes.tensor)


def test_a_scripted_model_finds_the_same():
    model = build_model(config()).eval()
    scripted = scripting_with_instances(model, FIELDS)
    image = batch(seed=5)[0]["image"][:, :96, :112]
    found, expected = detections(scripted, image), detections(model, image)
    assert len(expected) > 0
    torch.testing.assert_close(found.scores, expected.scores)


def test_copies_and_pickles_of_a_model_go_on_as_it_does(tmp_path):
    model = build_model(config("cascade", memory=2, lambda_val=3.0))
    step(model)
    torch.save(model, tmp_path / "model.pt")
    copies = [copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)]
    torch.manual_seed(1)
    expected = step(model, data=batch(seed=1))[0]
    for other in copies:
        for mine, theirs in zip(predictors(model), predictors(other), strict=True):
            assert mine.rank_loss is not theirs.rank_loss
            assert len(mine.rank_loss.memory) == 2 * len(theirs.rank_loss.memory) > 0
        torch.manual_seed(1)
        assert step(other, data=batch(seed=1))[0] == expected


def test_averaged_weights_and_batch_norms_statistics_leave_the_memory_alone():
    model = build_model(config(memory=2))
    step(model)
    kept = len(predictors(model)[0].rank_loss.memory)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    assert averaged.state_dict().keys() == {"n_averaged", *(f"module.{name}" for name in model.state_dict())}
    with torch.no_grad(), EventStorage():
        update_bn_stats(model, [batch()], 1)
    assert len(predictors(model)[0].rank_loss.memory) == len(predictors(averaged)[0].rank_loss.memory) == kept > 0


@pytest.mark.parametrize("mode", ["sigmoid", "softmax"])
def test_the_default_predictor_and_test_time_augmentation_give_detectron2s_scores(mode, tmp_path):
    cfg = config(score_mode=mode)
    DetectionCheckpointer(build_model(cfg), str(tmp_path)).save("model")
    cfg.merge_from_list(
        ["MODEL.WEIGHTS", str(tmp_path / "model.pth"), "DATASETS.TEST", (), "TEST.AUG.MIN_SIZES", (96,)]
    )
    stock = cfg.clone()
    stock.merge_from_list(
        ["MODEL.ROI_HEADS.NAME", "StandardROIHeads", "MODEL.ROI_BOX_HEAD.USE_SIGMOID_CE", mode == "sigmoid"]
    )
    image, found = batch()[0]["image"], []
    for one in (cfg, stock):
        predict = DefaultPredictor(one)
        found.append(predict(image.permute(1, 2, 0).numpy())["instances"].scores)
        with torch.no_grad():
            augmented = GeneralizedRCNNWithTTA(one, predict.model)([{"image": image, "height": 128, "width": 128}])
        found.append(augmented[0]["instances"].scores)
    assert all(len(scores) > 0 for scores in found)
    torch.testing.assert_close(found[:2], found[2:])


# --- checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["FPN", "cascade"])
def test_a_checkpoint_of_a_stock_model_loads_without_a_word_about_ours(kind, tmp_path, caplog):
    stock = build_model(config(kind, head="StandardROIHeads" if kind == "FPN" else "CascadeROIHeads"))
    DetectionCheckpointer(stock, str(tmp_path)).save("stock")
    model = build_model(config(kind))
    with caplog.at_level(logging.INFO):
        DetectionCheckpointer(model, rambo=RamboState(model)).load(str(tmp_path / "stock.pth"), checkpointables=[])
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
    for name, value in stock.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, msg=name)


@pytest.mark.parametrize("kind", ["FPN", "cascade"])
def test_a_resumed_run_goes_on_as_the_one_that_was_not_interrupted(kind, tmp_path):
    options = {"memory": 2, "lambda_val": 3.0, "aux_ce_weight": 0.5, "aux_ce_steps": 5}

    def begin():
        torch.manual_seed(0)
        model = build_model(config(kind, **options))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        checkpointer = DetectionCheckpointer(model, str(tmp_path), optimizer=optimizer, rambo=RamboState(model))
        return model, optimizer, checkpointer

    def train(model, optimizer, steps):
        for number in steps:
            torch.manual_seed(number)
            last = step(model, optimizer, batch(seed=number))[0]
        return last

    whole, optimizer, checkpointer = begin()
    train(whole, optimizer, range(3))
    checkpointer.save("after3")
    expected = train(whole, optimizer, range(3, 5))
    resumed, optimizer, checkpointer = begin()
    checkpointer.load(str(tmp_path / "after3.pth"))
    losses = train(resumed, optimizer, range(3, 5))
    assert losses == expected
    for name, value in whole.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value, rtol=0, atol=0, msg=name)
    assert len(predictors(resumed)[0].rank_loss.memory) > 0


def test_a_checkpoint_of_other_predictors_is_refused():
    state = RamboState(build_model(config("cascade"))).state_dict()
    with pytest.raises(ValueError, match=r"of RaMBO predictors \['roi_heads.box_predictor.0', .* the model has"):
        RamboState(build_model(config())).load_state_dict(state)


# --- launcher ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    return detection_data.glyph_scenes(tmp_path_factory.mktemp("scenes"), num_train=8, num_test=3)


def dataset_options(scenes, name):
    splits = {f"{name}_train": scenes.train, f"{name}_test": scenes.test}
    return [word for split, json_file in splits.items() for word in ("--dataset", split, json_file, scenes.images)]


def saved_memory(state, process=0):
    return state["trainer"]["hooks"]["RamboState"]["processes"][process]["roi_heads.box_predictor"]["rank_loss"]


def test_a_run_from_the_command_line_to_the_average_precision(scenes, tmp_path):
    cfg = config(aux_ce_weight=0.3)
    cfg.merge_from_list(
        ["DATASETS.TRAIN", ("yaml_train",), "DATASETS.TEST", ("yaml_test",), "MODEL.ROI_HEADS.NUM_CLASSES", 20,
         "SOLVER.MAX_ITER", 4, "SOLVER.STEPS", (), "SOLVER.CHECKPOINT_PERIOD", 2, "SOLVER.BASE_LR", 0.001,
         "DATALOADER.NUM_WORKERS", 0, "OUTPUT_DIR", str(tmp_path / "run")]
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(cfg.dump())
    command = ["--config-file", str(tmp_path / "config.yaml")]
    results = train_main([*dataset_options(scenes, "yaml"), *command])
    assert 0 <= results["bbox"]["AP50"] <= 100
    state = torch.load(tmp_path / "run" / "model_0000001.pth", weights_only=False)
    assert saved_memory(state)["memory.pushes"] == 2
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.json").read_text().splitlines()]
    logged = {name for line in lines for name in line}
    assert {"rambo/loss_map", "rambo/ap_map", "fast_rcnn/fg_cls_accuracy", "loss_cls", "bbox/AP50"} <= logged
    resumed = train_main([*command, "--resume", "SOLVER.MAX_ITER", "5"])
    assert (tmp_path / "run" / "last_checkpoint").read_text() == "model_final.pth"
    state = torch.load(tmp_path / "run" / "model_final.pth", weights_only=False)
    assert (state["iteration"], saved_memory(state)["memory.pushes"]) == (4, 5)
    weights = str(tmp_path / "run" / "model_final.pth")
    tested = train_main([*command, "--eval-only", "MODEL.WEIGHTS", weights, "OUTPUT_DIR", str(tmp_path / "test")])
    assert json.dumps(tested) == json.dumps(resumed)  # classes without an object have nan


def test_a_lazy_config_from_the_command_line(scenes, tmp_path):
    path = ROOT / "detectron2_configs/COCO-Detection/faster_rcnn_R_50_FPN_1x_rambo.py"
    overrides = [
        "dataloader.train.dataset.names=lazy_train", "dataloader.test.dataset.names=lazy_test", "train.max_iter=2",
        "dataloader.train.total_batch_size=2", "dataloader.train.num_workers=0", "dataloader.test.num_workers=0",
        "model.roi_heads.num_classes=20", "train.init_checkpoint=''", f"train.output_dir={tmp_path}",
        "model.proposal_generator.post_nms_topk=[50,30]", "model.roi_heads.batch_size_per_image=16",
        "dataloader.train.mapper.augmentations.0.short_edge_length=[128]", "train.log_period=1",
        "dataloader.test.mapper.augmentations.0.short_edge_length=128", "train.eval_period=2", "train.device=cpu",
        *LAZY[path.name],
    ]  # fmt: skip
    results = train_main([*dataset_options(scenes, "lazy"), "--config-file", str(path), *overrides])
    assert 0 <= results["bbox"]["AP50"] <= 100
    state = torch.load(tmp_path / "model_final.pth", weights_only=False)
    assert saved_memory(state)["memory.pushes"] == 2
    resumed = train_main(["--config-file", str(path), "--resume", *overrides, "train.max_iter=3"])
    lines = [json.loads(line) for line in (tmp_path / "metrics.json").read_text().splitlines()]
    assert [line["iteration"] for line in lines if "rambo/ap_map" in line] == [0, 1, 2]
    tested = train_main(["--config-file", str(path), "--eval-only", "--resume", *overrides])
    assert json.dumps(tested) == json.dumps(resumed)


def refused(capsys, *command):
    """The line on standard error that a command ends with."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        train_main(list(command))
    assert ended.value.code == 2
    said = capsys.readouterr().err.splitlines()
    assert len([line for line in said if line.startswith("error: ")]) == 1
    assert said[-1].startswith("error: ")
    return said[-1].removeprefix("error: ")


def test_a_config_of_the_model_zoo_by_its_name(scenes, tmp_path, capsys):
    cfg = get_cfg()
    cfg.merge_from_file(model_zoo.get_config_file("COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml"))
    thin = [
        "MODEL.RESNETS.STEM_OUT_CHANNELS",
        "8",
        "MODEL.RESNETS.RES2_OUT_CHANNELS",
        "32",
        "MODEL.RESNETS.WIDTH_PER_GROUP",
        "8",
    ]
    thin += ["MODEL.ROI_BOX_HEAD.FC_DIM", "32", "MODEL.ROI_HEADS.NUM_CLASSES", "20", "MODEL.DEVICE", "cpu"]
    cfg.merge_from_list(thin)
    DetectionCheckpointer(build_model(cfg), str(tmp_path)).save("stock")
    command = [*dataset_options(scenes, "zoo"), "--config-file", "COCO-Detection/faster_rcnn_R_50_FPN_1x.yaml"]
    command += ["--eval-only", "MODEL.WEIGHTS", str(tmp_path / "stock.pth"), "MODEL.ROI_HEADS.NAME", "RamboROIHeads"]
    command += ["DATASETS.TEST", "('zoo_test',)", "OUTPUT_DIR", str(tmp_path), "INPUT.MIN_SIZE_TEST", "64", *thin]
    assert "bbox" in train_main([*command, "DATALOADER.NUM_WORKERS", "0"])
    assert "no_such.yaml not available in Model Zoo" in refused(capsys, "--config-file", "no_such.yaml")


def test_a_training_script_that_knows_nothing_of_us(tmp_path):
    """It has the node, the heads, and a trainer that keeps the memory."""
    program = (
        "from detectron2.config import get_cfg; from detectron2.data import DatasetCatalog; "
        "from detectron2.engine import DefaultTrainer; image = dict(file_name='a.png', image_id=0, height=9, width=9); "
        "box = dict(bbox=[1, 1, 5, 5], bbox_mode=0, category_id=0); cfg = get_cfg(); "
        "DatasetCatalog.register('one', lambda: [dict(image, annotations=[box])]); "
        "cfg.merge_from_list(['MODEL.ROI_HEADS.NAME', 'RamboRes5ROIHeads', 'MODEL.DEVICE', 'cpu', 'DATASETS.TRAIN', "
        "('one',), 'DATALOADER.NUM_WORKERS', 0, 'MODEL.ROI_BOX_HEAD.RAMBO.LAMBDA_VAL', 2.5]); "
        "from detectron2.data import MetadataCatalog; MetadataCatalog.get('one').thing_classes = ['thing']; "
        "trainer = DefaultTrainer(cfg); print(trainer.model.roi_heads.box_predictor.rank_loss); "
        "print([type(hook).__name__ for hook in trainer._hooks])"
    )
    environment = {**os.environ, "DETECTRON2_ENV_MODULE": "rambo_plugins.detectron2.env", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, env=environment, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "lambda_val=2.5" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("['RamboState', ")


def test_two_processes(tmp_path):
    """DistributedDataParallel on gloo, two different batches, a memory that gathers: one state in both."""
    worker = tmp_path / "worker.py"
    worker.write_text(
        """
import os, sys
import torch
import torch.distributed as dist
sys.path.insert(0, os.environ["TESTS"])
from test_detectron2 import batch, build_model, config, predictors, step
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = build_model(config(memory=2, memory_gather=True))
from detectron2.engine.defaults import create_ddp_model
wrapped = torch.nn.parallel.DistributedDataParallel(model, broadcast_buffers=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for number in range(3):
    torch.manual_seed(number + 10 * rank)
    step(wrapped, optimizer, batch(seed=number + 10 * rank))
memory = predictors(model)[0].rank_loss.memory
weights = model.roi_heads.box_predictor.cls_score.weight.detach()
everyone = [torch.zeros_like(weights) for _ in range(2)]
dist.all_gather(everyone, weights)
assert torch.equal(*everyone)
contents = memory.contents()
sizes = torch.tensor([len(contents[0])])
kept = f"kept {len(contents[0])} {contents[0].double().sum().item()}\\n"
os.write(1, kept.encode())  # in one piece: both processes write to the same pipe
dist.barrier()
os._exit(0)
"""
    )
    environment = {**os.environ, "TESTS": str(ROOT / "tests"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")])
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(worker)],
        capture_output=True, text=True, check=False, env=environment, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    kept = [line.split() for line in done.stdout.splitlines() if line.startswith("kept")]
    assert len(kept) == 2
    assert kept[0] == kept[1]
    assert int(kept[0][1]) > 2 * 2 * 32  # two batches of two processes, some 64 boxes each


def test_scores_reach_the_evaluation_on_pascal_voc_in_full(tmp_path):
    """Two scores that three decimals cannot tell apart, the better one right: average precision 1, not by luck."""
    for folder in ("Annotations", "ImageSets/Main"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "Annotations/a.xml").write_text(
        "<annotation><object><name>cat</name><pose>x</pose><truncated>0</truncated><difficult>0</difficult><bndbox>"
        "<xmin>11</xmin><ymin>11</ymin><xmax>50</xmax><ymax>50</ymax></bndbox></object></annotation>"
    )
    (tmp_path / "ImageSets/Main/test.txt").write_text("a\n")
    MetadataCatalog.pop("voc_of_the_test", None)
    MetadataCatalog.get("voc_of_the_test").set(
        dirname=str(tmp_path), split="test", year=2012, thing_classes=["cat"], evaluator_type="pascal_voc"
    )
    for order in ([0.50001, 0.50002], [0.50002, 0.50001]):
        evaluator = PreciseVOCEvaluator("voc_of_the_test")
        evaluator.reset()
        found = Instances((100, 100))
        right = order.index(max(order))
        boxes = torch.tensor([[60.0, 60.0, 90.0, 90.0], [60.0, 60.0, 90.0, 90.0]])
        boxes[right] = torch.tensor([10.0, 10.0, 50.0, 50.0])
        found.pred_boxes, found.scores = Boxes(boxes), torch.tensor(order, dtype=torch.float64)
        found.pred_classes = torch.tensor([0, 0])
        evaluator.process([{"image_id": "a"}], [{"instances": found}])
        assert evaluator.evaluate()["bbox"]["AP50"] == pytest.approx(100)


# --- configs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configs_parse_and_build(path):
    if path.suffix == ".py":
        cfg = LazyConfig.load(str(path))
        assert {"model", "dataloader", "optimizer", "lr_multiplier", "train"} <= set(cfg)
        assert cfg.model.roi_heads.box_predictor._target_ is RamboFastRCNNOutputLayers
        return
    cfg = get_cfg()
    add_rambo_config(cfg)
    cfg.merge_from_file(str(path))
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        model = build_model(cfg)
    layers = predictors(model)
    assert len(layers) == ("_rambo" in path.name) * (3 if "cascade" in path.name else 1)
    for one in layers:
        blend = "blend" in path.name
        assert one.rank_loss.extra_repr() == DetectionLoss(margin=0.02 if blend else 0.15).extra_repr()
        assert one.loss_weight["loss_cls"] * one.aux_ce_weight == blend  # the usual weight of cross-entropy
        assert one.test_score_thresh == 0
    if "_ce" in path.name:
        assert path.with_name(path.name.replace("_ce", "_rambo")).exists()
    if "VOC" in path.parent.name:
        iterations, step = (7517, 5638) if "_07." in path.name else (24827, 18620)
        assert (iterations, (step,), 8) == (cfg.SOLVER.MAX_ITER, cfg.SOLVER.STEPS, cfg.SOLVER.IMS_PER_BATCH)
    elif "_ce" in path.name:
        stock = get_cfg()
        add_rambo_config(stock)
        stock.merge_from_file(model_zoo.get_config_file(f"{path.parent.name}/{path.name.replace('_ce', '')}"))
        cfg.MODEL.DEVICE = stock.MODEL.DEVICE
        assert cfg == stock


def test_the_example_of_the_readme_runs(tmp_path):
    readme = (ROOT / "README.md").read_text()
    section = readme[readme.index("## In detectron2") :]
    blocks = [block.split("```")[0] for block in section.split("```python\n")[1:]]
    script = next(block for block in blocks if "add_rambo_config" in block)
    (tmp_path / "example.py").write_text(script)
    cfg = runpy.run_path(str(tmp_path / "example.py"))["cfg"]
    cfg.MODEL.DEVICE = "meta"
    with torch.device("meta"):
        assert predictors(build_model(cfg))
