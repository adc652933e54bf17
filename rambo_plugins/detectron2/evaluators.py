"""The evaluator that a data set asks for, and detectron2's one for Pascal VOC with its figures in full."""

from __future__ import annotations

import logging
import math
from importlib.util import find_spec
from typing import Any

import torch
from detectron2.data import MetadataCatalog
from detectron2.evaluation import COCOEvaluator, DatasetEvaluator, LVISEvaluator, PascalVOCDetectionEvaluator
from detectron2.evaluation.pascal_voc_evaluation import parse_rec
from detectron2.utils.file_io import PathManager

logger = logging.getLogger("detectron2.rambo_plugins")


def build_evaluator(dataset_name: str, folder: str) -> DatasetEvaluator:
    """By the ``evaluator_type`` of the data set; one without is evaluated as COCO's, and the log says so.

    Args:
        dataset_name: a registered one.
        folder: for the files that the evaluators of COCO and LVIS write.

    Raises:
        ValueError: another type than coco, lvis, pascal_voc, or lvis without its package.
    """
    kind = check_evaluator(dataset_name)
    if kind == "pascal_voc":
        return PreciseVOCEvaluator(dataset_name)
    if kind is None:
        logger.info(f"{dataset_name} names no evaluator_type: it is evaluated as COCO's")
    return (LVISEvaluator if kind == "lvis" else COCOEvaluator)(dataset_name, output_dir=folder)


def check_evaluator(dataset_name: str) -> str | None:
    """The ``evaluator_type``, if there is an evaluator for it; else a ValueError."""
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type", None)
    if kind not in ("coco", "lvis", "pascal_voc", None):
        raise ValueError(f"{dataset_name}: expected an evaluator_type of coco, lvis or pascal_voc, got {kind!r}")
    if kind == "lvis" and find_spec("lvis") is None:
        raise ValueError(f"{dataset_name} is evaluated by the package lvis: pip install lvis")
    return kind


class PreciseVOCEvaluator(PascalVOCDetectionEvaluator):
    """detectron2's evaluation on Pascal VOC with the scores in full, over the classes that have objects.

    detectron2 writes scores with three decimals: a margin of 0.15 among logits keeps most of ours near one half after
    the sigmoid, so that these would tie many. Its mean is over all classes; one without an object has no average
    precision, and makes it nan (2012) or counts as 0 (2007).
    """

    _class_names: list[str]
    _predictions: dict[int, list[str]]

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        """Take in the detections of images.

        Raises:
            ValueError: a score that is not finite, a class that the data set does not have.
        """
        for image, output in zip(inputs, outputs, strict=True):
            found = output["instances"].to("cpu")
            boxes = found.pred_boxes.tensor + torch.tensor([1.0, 1.0, 0.0, 0.0])  # VOC counts pixels from 1
            for box, score, kind in zip(
                boxes.tolist(), found.scores.tolist(), found.pred_classes.tolist(), strict=True
            ):
                if not math.isfinite(score):
                    raise ValueError(f"image {image['image_id']}: expected finite scores, got {score}")
                if not 0 <= kind < len(self._class_names):
                    raise ValueError(
                        f"image {image['image_id']}: {self._dataset_name} has {len(self._class_names)} classes, got a "
                        f"detection of class {kind}"
                    )
                corners = " ".join(f"{x:.1f}" for x in box)
                self._predictions[kind].append(f"{image['image_id']} {score!r} {corners}")

    def evaluate(self) -> dict[str, Any] | None:
        """AP, AP50 and AP75 in percent under "bbox", in the first process.

        Raises:
            ValueError: no class has an object.
        """
        names, with_objects = self._class_names, self._with_objects()
        kept = [kind for kind, name in enumerate(names) if name in with_objects]
        if not kept:
            raise ValueError(f"{self._dataset_name}: no image has an object of its classes that is not difficult")
        if len(kept) < len(names):
            without = ", ".join(name for name in names if name not in with_objects)
            logger.warning(f"{self._dataset_name}: the mean leaves out classes without an object: {without}")
        predictions = self._predictions
        try:
            self._class_names = [names[kind] for kind in kept]
            self._predictions = {place: predictions.get(kind, []) for place, kind in enumerate(kept)}
            return super().evaluate()
        finally:
            self._class_names, self._predictions = names, predictions

    def _with_objects(self) -> set[str]:
        with PathManager.open(self._image_set_path, "r") as lines:
            images = [line.strip() for line in lines]
        objects = [thing for image in images for thing in parse_rec(self._anno_file_template.format(image))]
        return {thing["name"] for thing in objects if not thing["difficult"]}
