"""What the rank loss costs in a training step of mmdet's Faster R-CNN R50-FPN: 8 images, 8 × 512 boxes, 20 classes.

    python benchmarks/detection_step.py                         # one core needs some 3 minutes, and 12 GB
    python benchmarks/detection_step.py --size 1333 800 --device cuda

The same step with cross-entropy and with RaMBO, in turns, and the classification losses alone, forward and backward, on
random scores of that size. RaMBO's memory is full: τ = 7. Images and boxes are random, weights too, the same in both
models: how many proposals NMS has to look at depends on them. Smaller images make the loss a larger share of the step.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmdet.registry import MODELS
from mmdet.structures import DetDataSample
from mmdet.utils import register_all_modules
from mmengine.config import Config
from mmengine.structures import InstanceData

CONFIGS = Path(__file__).parent.parent / "mmdet_configs" / "pascal_voc"
IMAGES, BOXES, CLASSES, OBJECTS = 8, 512, 20, 5


def build(name: str, device: str) -> torch.nn.Module:
    config = Config.fromfile(CONFIGS / f"faster-rcnn_r50_fpn_{name}_voc07.py")
    config.model.backbone.init_cfg = None
    return MODELS.build(config.model).to(device).train()


def batch(width: int, height: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(IMAGES):
        corner = torch.rand(OBJECTS, 2, generator=generator) * torch.tensor([width - 100.0, height - 100.0])
        sides = 32 + 68 * torch.rand(OBJECTS, 2, generator=generator)
        labels = torch.randint(CLASSES, (OBJECTS,), generator=generator)
        objects = InstanceData(bboxes=torch.cat([corner, corner + sides], 1), labels=labels)
        shape = (height, width)
        sample = DetDataSample(
            metainfo={"img_shape": shape, "ori_shape": shape, "pad_shape": shape, "batch_input_shape": shape}
        )
        sample.gt_instances, sample.ignored_instances = (
            objects,
            InstanceData(bboxes=torch.zeros(0, 4), labels=labels[:0]),
        )
        samples.append(sample)
    images = [torch.randint(256, (3, height, width), generator=generator, dtype=torch.uint8) for _ in range(IMAGES)]
    return {"inputs": images, "data_samples": samples}


def fill_memory(model: torch.nn.Module, device: str) -> None:
    """τ batches, so that the next call of the loss ranks as many boxes as any later one."""
    loss_cls = model.roi_head.bbox_head.loss_cls
    generator = torch.Generator().manual_seed(1)
    for _ in range(loss_cls.rank_loss.memory.batches):
        loss_cls(*scores_and_labels(CLASSES, generator, device))


def scores_and_labels(channels: int, generator: torch.Generator, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A quarter of the boxes hold an object."""
    scores = torch.randn(IMAGES * BOXES, channels, generator=generator)
    labels = torch.randint(CLASSES, (IMAGES * BOXES,), generator=generator)
    labels[torch.rand(len(labels), generator=generator) < 0.75] = CLASSES
    return scores.to(device).requires_grad_(), labels.to(device)


def seconds(run: Callable[[], None], device: str) -> float:
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs=2, type=int, default=[480, 320], metavar=("WIDTH", "HEIGHT"))
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "detection_step.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    register_all_modules()
    torch.manual_seed(0)
    models = {name: build(name, args.device) for name in ("ce", "rambo")}
    shared = {k: v for k, v in models["ce"].state_dict().items() if "fc_cls" not in k}  # so that proposals are the same
    models["rambo"].load_state_dict(shared, strict=False)
    fill_memory(models["rambo"], args.device)
    data = batch(*args.size)
    num_boxes = []
    for model in models.values():
        model.roi_head.bbox_head.loss_cls.register_forward_pre_hook(lambda _, inputs: num_boxes.append(len(inputs[0])))

    def step(name: str) -> None:
        model = models[name]
        model.zero_grad()
        torch.manual_seed(0)
        np.random.seed(0)  # noqa: NPY002  mmdet's samplers draw from it
        losses = model(**model.data_preprocessor(data, training=True), mode="loss")
        model.parse_losses(losses)[0].backward()

    def loss_alone(name: str) -> Callable[[], None]:
        loss_cls = models[name].roi_head.bbox_head.loss_cls
        tensors = scores_and_labels(CLASSES + (name == "ce"), torch.Generator().manual_seed(2), args.device)
        return lambda: loss_cls(*tensors).backward()

    times: dict[str, list[float]] = {f"{what} {name}": [] for what in ("step", "loss") for name in models}
    for _ in range(args.repetitions + 1):  # the first does not count
        for name in models:
            times[f"step {name}"].append(seconds(lambda name=name: step(name), args.device))
    for name in models:
        run = loss_alone(name)
        times[f"loss {name}"] = [seconds(run, args.device) for _ in range(8 * args.repetitions + 1)]
    median = {name: statistics.median(values[1:]) for name, values in times.items()}
    outcome = {
        "device": args.device if args.device == "cpu" else torch.cuda.get_device_name(),
        "threads": args.threads,
        "size": args.size,
        "boxes": num_boxes[0],
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "numba", "onedl-mmdetection")},
        },
        "seconds": median,
        "all_seconds": times,
        "loss_share_of_the_step": (median["loss rambo"] - median["loss ce"]) / median["step ce"],
        "step_ratio": median["step rambo"] / median["step ce"],
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(outcome, indent=1) + "\n")
    print(json.dumps({k: v for k, v in outcome.items() if k != "all_seconds"}, indent=1))


if __name__ == "__main__":
    main()
