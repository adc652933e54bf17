"""Train or evaluate a detectron2 config, yaml or LazyConfig, with RaMBO's config node, heads and resumable memory.

The options are those of detectron2's own scripts: ``--resume``, ``--eval-only``, ``--num-gpus`` and overrides of the
config at the end. ``--config-file`` is a file or the name of one in detectron2's model zoo. ``--dataset`` registers
data in COCO's format, which the config then names. What you can mend is one line on standard error and the exit code
2. A folder that has a run's checkpoints is not begun anew; without a GPU the config must say so, ``MODEL.DEVICE cpu``.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path
from typing import Any, NoReturn

from detectron2 import model_zoo
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode, LazyConfig, get_cfg, instantiate
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
from detectron2.evaluation import DatasetEvaluator, inference_on_dataset, print_csv_format
from detectron2.utils import comm
from torch import nn
from torch.multiprocessing import ProcessExitedException

from rambo_plugins.detectron2 import RamboState, add_rambo_config
from rambo_plugins.detectron2.checkpoint import with_memory
from rambo_plugins.detectron2.evaluators import build_evaluator
from rambo_plugins.detectron2.refusals import (
    ToMend,
    Wanted,
    WholeCheckpointer,
    check_keys,
    check_options,
    check_run,
    register,
    to_mend,
)

logger = logging.getLogger("detectron2.rambo_plugins")


class RamboTrainer(DefaultTrainer):
    """DefaultTrainer whose checkpoints hold the memories, with the evaluator that each data set asks for."""

    build_hooks = with_memory(DefaultTrainer.build_hooks)

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        with to_mend("the config", KeyError, ValueError):  # what no registry has, what no argument may be
            return super().build_model(cfg)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        return build_evaluator(dataset_name, f"{cfg.OUTPUT_DIR}/inference/{dataset_name}")


def main(argv: list[str] | None = None) -> Any:
    """Train, or evaluate with ``--eval-only``; in one process, returns the figures of the last evaluation."""
    try:
        args = _parse(argv)
        register(args.dataset)
        check_run(Wanted.of(_config(args)), args)
        if args.num_gpus * args.num_machines == 1:
            return _run(args)
        return launch(  # without a result
            _child,
            args.num_gpus,
            num_machines=args.num_machines,
            machine_rank=args.machine_rank,
            dist_url=args.dist_url,
            args=(args,),
        )
    except ToMend as error:
        _refuse(str(error))
    except ProcessExitedException as error:
        if error.exit_code != 2:
            raise
        sys.exit(2)  # it has said why


def _refuse(line: str) -> NoReturn:
    print(f"error: {line}", file=sys.stderr)
    sys.exit(2)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = default_argument_parser(epilog=str(__doc__).replace("``", ""))
    parser.prog = "python -m rambo_plugins.detectron2.train"
    parser.error = _refuse
    parser.add_argument(
        "--dataset", nargs=3, action="append", default=[], metavar=("NAME", "ANNOTATIONS", "IMAGES"),
        help="register a data set: COCO annotations and the folder of the images; may be repeated",
    )  # fmt: skip
    args = parser.parse_args(argv)
    check_options(args, parser.parse_args([]))
    if not args.config_file:
        raise ToMend("--config-file is required")
    if not Path(args.config_file).is_file():
        with to_mend(f"--config-file: no such file: {args.config_file}; and", RuntimeError):
            args.config_file = model_zoo.get_config_file(args.config_file)
    return args


def _config(args: argparse.Namespace) -> Any:
    """The config with the overrides, of either kind."""
    if args.config_file.endswith(".py"):
        with to_mend(args.config_file, OSError, SyntaxError):
            cfg = LazyConfig.load(args.config_file)
        check_keys(cfg, args.opts)
        with to_mend("overrides", Exception):  # hydra's parser has a kind of its own
            return LazyConfig.apply_overrides(cfg, args.opts)
    cfg = get_cfg()
    add_rambo_config(cfg)
    with to_mend(args.config_file, Exception):  # yacs asserts, yaml has kinds of its own
        cfg.merge_from_file(args.config_file)
    with to_mend("overrides", AssertionError, KeyError, ValueError):
        cfg.merge_from_list(args.opts)
    cfg.freeze()
    return cfg


def _child(args: argparse.Namespace) -> None:
    try:
        register(args.dataset)
        _run(args)
    except ToMend as error:
        if comm.is_main_process():
            _refuse(str(error))
        sys.exit(2)


def _run(args: argparse.Namespace) -> Any:
    cfg = _config(args)
    default_setup(cfg, args)
    wanted = Wanted.of(cfg)
    if args.resume and not args.eval_only and not Path(wanted.output, "last_checkpoint").exists():
        logger.warning(f"--resume: {wanted.output} has no checkpoint, so the run begins")
    return (_run_yaml if isinstance(cfg, CfgNode) else _run_lazy)(cfg, args, f"{wanted.names['weights']}")


def _run_yaml(cfg: CfgNode, args: argparse.Namespace, weights: str) -> Any:
    if args.eval_only:
        model = RamboTrainer.build_model(cfg)
        with to_mend(weights, OSError):
            WholeCheckpointer(model, cfg.OUTPUT_DIR).resume_or_load(cfg.MODEL.WEIGHTS, resume=args.resume)
        return RamboTrainer.test(cfg, model)
    trainer = RamboTrainer(cfg)
    with to_mend(weights, OSError, ValueError):
        trainer.resume_or_load(resume=args.resume)
    trainer.train()
    return getattr(trainer, "_last_eval_results", None)


def _run_lazy(cfg: Any, args: argparse.Namespace, weights: str) -> Any:
    with to_mend("the config", TypeError, ValueError):  # arguments that there are not, among them
        model = instantiate(cfg.model).to(cfg.train.device)
    if args.eval_only:
        with to_mend(weights, OSError):
            WholeCheckpointer(model, cfg.train.output_dir).resume_or_load(cfg.train.init_checkpoint, resume=args.resume)
        return _evaluate_lazy(cfg, model)

    cfg.optimizer.params.model = model
    optimizer = instantiate(cfg.optimizer)
    model = create_ddp_model(model, **cfg.train.ddp)
    trainer = (AMPTrainer if cfg.train.amp.enabled else SimpleTrainer)(
        model, instantiate(cfg.dataloader.train), optimizer
    )
    checkpointer = DetectionCheckpointer(model, cfg.train.output_dir, trainer=trainer)
    evaluated: dict[str, Any] = {}

    def evaluate() -> dict[str, Any]:
        evaluated.update(_evaluate_lazy(cfg, model))
        return evaluated

    evaluation = hooks.EvalHook(cfg.train.eval_period, evaluate)
    scheduler = hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier))
    every = [RamboState(model), hooks.IterationTimer(), scheduler, evaluation]
    if comm.is_main_process():
        every.insert(3, hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer))
        every.append(
            hooks.PeriodicWriter(default_writers(cfg.train.output_dir, cfg.train.max_iter), cfg.train.log_period)
        )
    trainer.register_hooks(every)
    with to_mend(weights, OSError, ValueError):
        checkpointer.resume_or_load(cfg.train.init_checkpoint, resume=args.resume)
    resumed = args.resume and checkpointer.has_checkpoint()
    trainer.train(trainer.iter + 1 if resumed else 0, cfg.train.max_iter)
    return evaluated


def _evaluate_lazy(cfg: Any, model: nn.Module) -> Any:
    results = inference_on_dataset(model, instantiate(cfg.dataloader.test), instantiate(cfg.dataloader.evaluator))
    print_csv_format(results)
    return results


if __name__ == "__main__":
    main()
