"""The small Faster R-CNN of ``detection.py`` in detectron2: ResNet-18 of half the width with trained BatchNorm.

Sizes, samplers, thresholds, optimiser and schedule are those of ``detection_mmdet.py``; what the toolkits do otherwise
(initial weights, the normalisation of the box losses, the order of the data) stays theirs. A resumed run begins its
data anew, as detectron2's sampler does.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import detectron2.data.transforms as T
import torch
from detection_data import DetectionData
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.data import (
    DatasetCatalog,
    DatasetMapper,
    MetadataCatalog,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.data.datasets import register_coco_instances
from detectron2.data.samplers import TrainingSampler
from detectron2.engine import SimpleTrainer, hooks
from detectron2.evaluation import COCOEvaluator, inference_on_dataset
from detectron2.layers import ShapeSpec
from detectron2.modeling import FPN, GeneralizedRCNN, ResNet
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.backbone import BasicStem
from detectron2.modeling.backbone.fpn import LastLevelMaxPool
from detectron2.modeling.backbone.resnet import BasicBlock
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.poolers import ROIPooler
from detectron2.modeling.proposal_generator import RPN, StandardRPNHead
from detectron2.modeling.roi_heads import FastRCNNConvFCHead, FastRCNNOutputLayers, StandardROIHeads
from detectron2.utils.env import seed_all_rng
from detectron2.utils.logger import setup_logger
from torch import nn

from rambo_plugins.detectron2 import RamboFastRCNNOutputLayers, RamboState


def train(
    data: DetectionData, loss: dict[str, Any] | None, *, lr: float, seed: int, epochs: int, batch: int, folder: Path
) -> list[dict[str, Any]]:
    """Train and test; leaves ``detections.bbox.json`` in the folder and returns the figures after each third."""
    setup_logger(str(folder))
    names = {split: f"{data.name}_{split}_{folder}" for split in ("train", "test")}
    for split, name in names.items():
        if name not in DatasetCatalog.list():
            register_coco_instances(name, {}, getattr(data, split), data.images)
    width, height = data.scale
    resize = T.Resize((height, width))
    flip = [T.RandomFlip(horizontal=True)] if data.flip else []
    seed_all_rng(seed)
    network = model(len(data.classes), loss)
    dataset = get_detection_dataset_dicts(names["train"])
    loader = build_detection_train_loader(
        dataset,
        mapper=DatasetMapper(is_train=True, augmentations=[resize, *flip], image_format="BGR"),
        sampler=TrainingSampler(len(dataset), seed=seed),
        total_batch_size=batch,
    )
    test_loader = build_detection_test_loader(
        get_detection_dataset_dicts(names["test"], filter_empty=False),
        mapper=DatasetMapper(is_train=False, augmentations=[resize], image_format="BGR"),
    )
    steps = math.ceil(len(dataset) / batch)
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, weight_decay=1e-4)
    total = epochs * steps
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [max(1, epochs * 3 // 4) * steps], gamma=0.1)
    trainer = SimpleTrainer(network, loader, optimizer)
    checkpointer = DetectionCheckpointer(
        network, str(folder), optimizer=optimizer, trainer=trainer, rambo=RamboState(network)
    )
    curve_path = folder / "curve.json"
    classes = MetadataCatalog.get(names["test"]).thing_classes

    def evaluate() -> dict[str, float]:
        evaluator = COCOEvaluator(names["test"], output_dir=str(folder), tasks=("bbox",), use_fast_impl=False)
        figures = inference_on_dataset(network, test_loader, evaluator)["bbox"]
        (folder / "coco_instances_results.json").rename(folder / "detections.bbox.json")
        epoch = min(trainer.iter + 1, total) // steps  # after the last step it is the total
        points = [point for point in read(curve_path) if point["epoch"] < epoch]
        points.append({"epoch": epoch, "AP50": figures["AP50"] / 100, "AP": figures["AP"] / 100})
        curve_path.write_text(json.dumps(points))
        return {name: figures[name] for name in ("AP", "AP50")}

    assert classes == data.classes
    trainer.register_hooks(
        [
            hooks.LRScheduler(optimizer, scheduler),
            hooks.PeriodicCheckpointer(checkpointer, steps, max_to_keep=1),
            hooks.EvalHook(max(1, epochs // 3) * steps, evaluate),
        ]
    )
    checkpointer.resume_or_load("", resume=True)
    trainer.train(trainer.iter + 1 if checkpointer.has_checkpoint() else 0, total)
    for checkpoint in folder.glob("*.pth"):
        checkpoint.unlink()
    return read(curve_path)


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def predictor(fc: int, num_classes: int, loss: dict[str, Any] | None) -> nn.Module:
    """The box predictor with the loss of ``detection.py``, whose options are named as in mmdet."""
    common = {
        "input_shape": ShapeSpec(channels=fc),
        "box2box_transform": Box2BoxTransform(weights=(10, 10, 5, 5)),
        "num_classes": num_classes,
        "test_score_thresh": 0.0,
    }
    loss = dict(loss or {"type": "CrossEntropyLoss", "use_sigmoid": False})
    common["loss_weight"] = {"loss_cls": loss.pop("loss_weight", 1.0)}
    kind, use_sigmoid = loss.pop("type", "RamboLoss"), loss.pop("use_sigmoid", True)
    if kind == "CrossEntropyLoss":
        return FastRCNNOutputLayers(**common, use_sigmoid_ce=use_sigmoid)
    options = {name.replace("aux_", "aux_ce_"): value for name, value in loss.items()}
    return RamboFastRCNNOutputLayers(**common, score_mode="sigmoid" if use_sigmoid else "softmax", **options)


def model(num_classes: int, loss: dict[str, Any] | None, channels: int = 64, fc: int = 256) -> nn.Module:
    widths = [32, 64, 128, 256]
    stages = [
        ResNet.make_stage(
            BasicBlock, 2, stride_per_block=[stride, 1], in_channels=before, out_channels=width, norm="BN"
        )
        for stride, before, width in zip([1, 2, 2, 2], [32, *widths], widths, strict=False)
    ]
    levels = ["res2", "res3", "res4", "res5"]
    body = ResNet(BasicStem(out_channels=32, norm="BN"), stages, out_features=levels)
    pooled = ["p2", "p3", "p4", "p5"]
    return GeneralizedRCNN(
        backbone=FPN(body, levels, channels, top_block=LastLevelMaxPool()),
        proposal_generator=RPN(
            in_features=[*pooled, "p6"],
            head=StandardRPNHead(in_channels=channels, num_anchors=3),
            anchor_generator=DefaultAnchorGenerator(
                sizes=[[16], [32], [64], [128], [256]], aspect_ratios=[0.5, 1.0, 2.0], strides=[4, 8, 16, 32, 64]
            ),
            anchor_matcher=Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=True),
            box2box_transform=Box2BoxTransform(weights=(1.0, 1.0, 1.0, 1.0)),
            batch_size_per_image=64,
            positive_fraction=0.5,
            pre_nms_topk=(500, 500),
            post_nms_topk=(300, 200),
        ),
        roi_heads=StandardROIHeads(
            num_classes=num_classes,
            batch_size_per_image=128,
            positive_fraction=0.25,
            proposal_matcher=Matcher([0.5], [0, 1]),
            box_in_features=pooled,
            box_pooler=ROIPooler(7, [1 / 4, 1 / 8, 1 / 16, 1 / 32], 2, "ROIAlignV2", canonical_box_size=64),
            box_head=FastRCNNConvFCHead(
                ShapeSpec(channels=channels, height=7, width=7), conv_dims=[], fc_dims=[fc] * 2
            ),
            box_predictor=predictor(fc, num_classes, loss),
        ),
        pixel_mean=[103.53, 116.28, 123.675],
        pixel_std=[57.375, 57.12, 58.395],
        input_format="BGR",
    )
