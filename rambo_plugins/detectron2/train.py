"""Train or evaluate a detectron2 config, yaml or LazyConfig, with RaMBO's config node, heads and resumable memory.

The options are those of detectron2's own scripts: ``--resume``, ``--eval-only``, ``--num-gpus`` and overrides of the
config at the end. ``--config-file`` is a file or the name of one in detectron2's model zoo. ``--dataset`` registers
data in COCO's format, which the config then names. Without a GPU the CPU is used.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import Any

import torch
from detectron2 import model_zoo
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode, LazyConfig, get_cfg, instantiate
from detectron2.data import MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import (
    AMPTrainer,
    DefaultTrainer,
    SimpleTrainer,
    default_argument_parser,
    default_setup,
    default_writers,
    hooks,
    launch,
)
from detectron2.engine.defaults import create_ddp_model
from detectron2.evaluation import (
    COCOEvaluator,
    DatasetEvaluator,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
    inference_on_dataset,
    print_csv_format,
)
from detectron2.utils import comm
from torch import nn

from rambo_plugins.detectron2 import RamboState, add_rambo_config

logger = logging.getLogger("detectron2.rambo_plugins")


class RamboTrainer(DefaultTrainer):
    """DefaultTrainer whose checkpoints hold the memory, with the evaluator that each data set asks for."""

    def __init__(self, cfg: CfgNode) -> None:
        super().__init__(cfg)
        self.checkpointer.add_checkpointable("rambo", RamboState(self.model))

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        kind = MetadataCatalog.get(dataset_name).get("evaluator_type", "coco")
        if kind == "pascal_voc":
            return PreciseVOCEvaluator(dataset_name)
        evaluator = {"coco": COCOEvaluator, "lvis": LVISEvaluator}.get(kind)
        if evaluator is None:
            raise NotImplementedError(f"no evaluator for {dataset_name} of the type {kind!r}: coco, lvis, pascal_voc")
        return evaluator(dataset_name, output_dir=f"{cfg.OUTPUT_DIR}/inference")


class PreciseVOCEvaluator(PascalVOCDetectionEvaluator):
    """detectron2's evaluation on Pascal VOC with the scores in full; detectron2 writes three decimals.

    A margin of 0.15 among logits keeps most scores near one half after the sigmoid, so that these would tie many.
    """

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        for image, output in zip(inputs, outputs, strict=True):
            found = output["instances"].to("cpu")
            boxes = found.pred_boxes.tensor + torch.tensor([1.0, 1.0, 0.0, 0.0])  # VOC counts pixels from 1
            for box, score, kind in zip(
                boxes.tolist(), found.scores.tolist(), found.pred_classes.tolist(), strict=True
            ):
                corners = " ".join(f"{x:.1f}" for x in box)
                self._predictions[kind].append(f"{image['image_id']} {score!r} {corners}")


def main(argv: list[str] | None = None) -> Any:
    """Train, or evaluate with ``--eval-only``; in one process, returns the figures of the last evaluation."""
    parser = default_argument_parser(epilog=__doc__)
    parser.prog = "python -m rambo_plugins.detectron2.train"
    parser.add_argument(
        "--dataset", nargs=3, action="append", default=[], metavar=("NAME", "ANNOTATIONS", "IMAGES"),
        help="register a data set: COCO annotations and the folder of the images; may be repeated",
    )  # fmt: skip
    args = parser.parse_args(argv)
    if not args.config_file:
        parser.error("--config-file is required")
    if not Path(args.config_file).exists():
        args.config_file = model_zoo.get_config_file(args.config_file)
    if args.num_gpus * args.num_machines <= 1:
        return _run(args)
    return launch(  # without a result
        _run,
        args.num_gpus,
        num_machines=args.num_machines,
        machine_rank=args.machine_rank,
        dist_url=args.dist_url,
        args=(args,),
    )


def _run(args: argparse.Namespace) -> Any:
    for name, json_file, image_root in args.dataset:
        register_coco_instances(name, {}, json_file, image_root)
    return (_run_lazy if args.config_file.endswith(".py") else _run_yaml)(args)


def _run_yaml(args: argparse.Namespace) -> Any:
    cfg = get_cfg()
    add_rambo_config(cfg)
    cfg.merge_from_file(args.config_file)
    cfg.merge_from_list(args.opts)
    cfg.MODEL.DEVICE = _device(cfg.MODEL.DEVICE)
    cfg.freeze()
    default_setup(cfg, args)
    if args.eval_only:
        model = RamboTrainer.build_model(cfg)
        DetectionCheckpointer(model, cfg.OUTPUT_DIR).resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        return RamboTrainer.test(cfg, model)
    trainer = RamboTrainer(cfg)
    trainer.resume_or_load(resume=args.resume)
    trainer.train()
    return getattr(trainer, "_last_eval_results", None)


def _run_lazy(args: argparse.Namespace) -> Any:
    cfg = LazyConfig.apply_overrides(LazyConfig.load(args.config_file), args.opts)
    cfg.train.device = _device(cfg.train.device)
    default_setup(cfg, args)
    model = instantiate(cfg.model).to(cfg.train.device)
    if args.eval_only:
        DetectionCheckpointer(model, cfg.train.output_dir).resume_or_load(cfg.train.init_checkpoint, resume=args.resume)
        return _evaluate_lazy(cfg, model)

    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    model = create_ddp_model(model, **cfg.train.ddp)
    trainer = (AMPTrainer if cfg.train.amp.enabled else SimpleTrainer)(
        model, instantiate(cfg.dataloader.train), optimizer
    )
    checkpointer = DetectionCheckpointer(
        model, cfg.train.output_dir, optimizer=optimizer, trainer=trainer, rambo=RamboState(model)
    )
    evaluated: dict[str, Any] = {}

    def evaluate() -> dict[str, Any]:
        evaluated.update(_evaluate_lazy(cfg, model))
        return evaluated

    evaluation = hooks.EvalHook(cfg.train.eval_period, evaluate)
    every = [hooks.IterationTimer(), hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)), evaluation]
    if comm.is_main_process():
        every.insert(2, hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer))
        every.append(
            hooks.PeriodicWriter(default_writers(cfg.train.output_dir, cfg.train.max_iter), cfg.train.log_period)
        )
    trainer.register_hooks(every)
    checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=args.resume)
    resumed = args.resume and checkpointer.has_checkpoint()
    trainer.train(trainer.iter + 1 if resumed else 0, cfg.train.max_iter)
    return evaluated


def _evaluate_lazy(cfg: Any, model: nn.Module) -> Any:
    results = inference_on_dataset(model, instantiate(cfg.dataloader.test), instantiate(cfg.dataloader.evaluator))
    print_csv_format(results)
    return results


def _device(wanted: str) -> str:
    if not wanted.startswith("cuda") or torch.cuda.is_available():
        return wanted
    logger.warning("no GPU is visible: training on the CPU")
    return "cpu"


if __name__ == "__main__":
    main()
