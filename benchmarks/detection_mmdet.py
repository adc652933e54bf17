"""The small Faster R-CNN of ``detection.py`` in mmdet: ResNet-18 of half the width with trained BatchNorm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from detection_data import DetectionData
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.runner import Runner

import rambo_plugins.mmdet  # noqa: F401  registers RamboLoss


class Curve(Hook):
    """Keeps the figures of each validation in a file, so that a resumed run has those before."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        points = [point for point in read(self.path) if point["epoch"] < runner.epoch]
        points.append({"epoch": runner.epoch, "AP50": metrics["coco/bbox_mAP_50"], "AP": metrics["coco/bbox_mAP"]})
        self.path.write_text(json.dumps(points))


def read(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text()) if path.exists() else []


def train(
    data: DetectionData, loss: dict[str, Any] | None, *, lr: float, seed: int, epochs: int, batch: int, folder: Path
) -> list[dict[str, Any]]:
    """Train and test; leaves ``detections.bbox.json`` in the folder and returns the figures after each third."""
    runner = Runner.from_cfg(config(data, loss, lr, seed, epochs, batch, folder))
    curve = Curve(folder / "curve.json")
    runner.register_hook(curve)
    runner.train()
    if not (folder / "detections.bbox.json").exists():  # interrupted between the last epoch and its validation
        runner.val_loop.run()
    for checkpoint in folder.glob("*.pth"):
        checkpoint.unlink()
    return read(curve.path)


def config(
    data: DetectionData, loss: dict[str, Any] | None, lr: float, seed: int, epochs: int, batch: int, folder: Path
) -> Config:
    third = max(1, epochs // 3)
    resize = {"type": "Resize", "scale": data.scale, "keep_ratio": True}
    load = {"type": "LoadImageFromFile"}
    keys = ("img_id", "img_path", "ori_shape", "img_shape", "scale_factor")
    train_pipeline = [load, {"type": "LoadAnnotations", "with_bbox": True}, resize]
    if data.flip:
        train_pipeline.append({"type": "RandomFlip", "prob": 0.5})
    train_pipeline.append({"type": "PackDetInputs"})
    test_pipeline = [load, resize, {"type": "PackDetInputs", "meta_keys": keys}]

    def loader(annotations: str, training: bool) -> dict[str, Any]:
        return {
            "batch_size": batch,
            "num_workers": 0,
            "sampler": {"type": "DefaultSampler", "shuffle": training},
            "dataset": {
                "type": "CocoDataset",
                "ann_file": annotations,
                "data_prefix": {"img": data.images},
                "metainfo": {"classes": tuple(data.classes)},
                "pipeline": train_pipeline if training else test_pipeline,
                "test_mode": not training,
                **({"filter_cfg": {"filter_empty_gt": True}} if training else {}),
            },
        }

    return Config(
        {
            "default_scope": "mmdet",
            "custom_imports": {"imports": ["rambo_plugins.mmdet"], "allow_failed_imports": False},
            "work_dir": str(folder),
            "randomness": {"seed": seed},
            "resume": True,
            "log_level": "WARNING",
            "model": model(len(data.classes), loss),
            "train_dataloader": loader(data.train, True),
            "val_dataloader": loader(data.test, False),
            "val_evaluator": {
                "type": "CocoMetric",
                "ann_file": data.test,
                "metric": "bbox",
                "outfile_prefix": str(folder / "detections"),
            },
            "train_cfg": {"type": "EpochBasedTrainLoop", "max_epochs": epochs, "val_interval": third},
            "val_cfg": {"type": "ValLoop"},
            "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": lr, "weight_decay": 1e-4}},
            "param_scheduler": [{"type": "MultiStepLR", "milestones": [max(1, epochs * 3 // 4)], "gamma": 0.1}],
            "default_hooks": {
                "checkpoint": {"type": "CheckpointHook", "interval": 1, "max_keep_ckpts": 1},
                "logger": {"type": "LoggerHook", "interval": 20},
            },
        }
    )


def model(num_classes: int, loss: dict[str, Any] | None, channels: int = 64, fc: int = 256) -> dict[str, Any]:
    coder = {"type": "DeltaXYWHBBoxCoder"}
    box_loss = {"type": "L1Loss"}
    sampler = {"type": "RandomSampler", "neg_pos_ub": -1}
    assigner = {"type": "MaxIoUAssigner", "ignore_iof_thr": -1}
    nms = {"type": "nms", "iou_threshold": 0.7}
    cross_entropy = {"type": "CrossEntropyLoss", "use_sigmoid": False}
    return {
        "type": "FasterRCNN",
        "data_preprocessor": {
            "type": "DetDataPreprocessor",
            "mean": [123.675, 116.28, 103.53],
            "std": [58.395, 57.12, 57.375],
            "bgr_to_rgb": True,
            "pad_size_divisor": 32,
        },
        "backbone": {
            "type": "ResNet",
            "depth": 18,
            "base_channels": 32,
            "frozen_stages": -1,
            "norm_eval": False,
        },
        "neck": {"type": "FPN", "in_channels": [32, 64, 128, 256], "out_channels": channels, "num_outs": 5},
        "rpn_head": {
            "type": "RPNHead",
            "in_channels": channels,
            "feat_channels": channels,
            "anchor_generator": {
                "type": "AnchorGenerator",
                "scales": [4],
                "ratios": [0.5, 1.0, 2.0],
                "strides": [4, 8, 16, 32, 64],
            },
            "bbox_coder": {**coder, "target_means": [0.0] * 4, "target_stds": [1.0] * 4},
            "loss_cls": {"type": "CrossEntropyLoss", "use_sigmoid": True},
            "loss_bbox": box_loss,
        },
        "roi_head": {
            "type": "StandardRoIHead",
            "bbox_roi_extractor": {
                "type": "SingleRoIExtractor",
                "roi_layer": {"type": "RoIAlign", "output_size": 7, "sampling_ratio": 2},
                "out_channels": channels,
                "featmap_strides": [4, 8, 16, 32],
                "finest_scale": 16,
            },
            "bbox_head": {
                "type": "Shared2FCBBoxHead",
                "in_channels": channels,
                "fc_out_channels": fc,
                "num_classes": num_classes,
                "bbox_coder": {**coder, "target_means": [0.0] * 4, "target_stds": [0.1, 0.1, 0.2, 0.2]},
                "loss_cls": cross_entropy if loss is None else {"type": "RamboLoss", **loss},
                "loss_bbox": box_loss,
            },
        },
        "train_cfg": {
            "rpn": {
                "assigner": {**assigner, "pos_iou_thr": 0.7, "neg_iou_thr": 0.3, "min_pos_iou": 0.3},
                "sampler": {**sampler, "num": 64, "pos_fraction": 0.5, "add_gt_as_proposals": False},
                "allowed_border": -1,
                "pos_weight": -1,
            },
            "rpn_proposal": {"nms_pre": 500, "max_per_img": 300, "nms": nms, "min_bbox_size": 0},
            "rcnn": {
                "assigner": {
                    **assigner, "pos_iou_thr": 0.5, "neg_iou_thr": 0.5, "min_pos_iou": 0.5, "match_low_quality": False,
                },
                "sampler": {**sampler, "num": 128, "pos_fraction": 0.25, "add_gt_as_proposals": True},
                "pos_weight": -1,
            },
        },
        "test_cfg": {
            "rpn": {"nms_pre": 500, "max_per_img": 200, "nms": nms, "min_bbox_size": 0},
            "rcnn": {"score_thr": 0.0, "nms": {"type": "nms", "iou_threshold": 0.5}, "max_per_img": 100},
        },
    }  # fmt: skip
