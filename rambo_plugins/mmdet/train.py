"""``python -m rambo_plugins.mmdet.train CONFIG``: train or test an mmdet config where only packages are installed.

The options are those of mmdet's ``tools/train.py``, which pip does not put on the path. Several GPUs:
``torchrun --nproc-per-node 8 -m rambo_plugins.mmdet.train CONFIG --launcher pytorch``.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.registry import RUNNERS
from mmengine.runner import Runner, find_latest_checkpoint

import rambo_plugins.mmdet  # noqa: F401  registers RamboLoss, also for configs without custom_imports
from rambo_plugins.command_line import Parser

STARTED_BY = {"pytorch": ("RANK", "torchrun"), "slurm": ("SLURM_PROCID", "srun"),
              "mpi": ("OMPI_COMM_WORLD_RANK", "mpirun")}  # fmt: skip
"""Launchers, a variable that tells of each, and the command that sets it."""


def main(argv: list[str] | None = None) -> Runner:
    """Train, or test with ``--test``; returns the runner that did it.

    What is wrong with the command, or missing, is a line on stderr and exit status 2.
    """
    parser = _parser()
    try:
        args = parser.parse_args(argv)
    except ValueError:  # of mmengine's DictAction
        parser.error("--cfg-options: expected key.subkey=value")
    _check(parser, args)
    cfg = Config.fromfile(args.config)
    if args.cfg_options:
        cfg.merge_from_dict(args.cfg_options)
    cfg.work_dir = args.work_dir or cfg.get("work_dir") or str(Path("work_dirs", Path(args.config).stem))
    cfg.launcher = args.launcher
    needed = ("test_dataloader", "test_cfg", "test_evaluator") if args.test else ("train_dataloader", "train_cfg")
    for name in needed:
        if not cfg.get(name):
            parser.error(f"{args.config} has no {name}")
    if args.amp:
        kind = cfg.optim_wrapper.get("type", "OptimWrapper")
        if kind not in ("OptimWrapper", "AmpOptimWrapper"):
            parser.error(f"--amp takes the place of OptimWrapper, the config has {kind}")
        cfg.optim_wrapper.update(type="AmpOptimWrapper", loss_scale="dynamic")
    if args.auto_scale_lr:
        if "base_batch_size" not in (cfg.get("auto_scale_lr") or {}):
            parser.error(f"--auto-scale-lr needs auto_scale_lr = dict(base_batch_size=...) in {args.config}")
        cfg.auto_scale_lr.update(enable=True)
    named = Path(cfg.work_dir, "last_checkpoint").is_file()
    earlier = find_latest_checkpoint(cfg.work_dir) if named else None
    if args.test:
        cfg.load_from, cfg.resume = args.test, False
    elif args.resume == "auto":
        if earlier is None:
            parser.error(f"--resume: {cfg.work_dir} has no last_checkpoint; without --resume the run starts")
        _check_file(parser, "--resume", earlier)
        cfg.load_from, cfg.resume = None, True
    elif args.resume:
        cfg.load_from, cfg.resume = args.resume, True
    if cfg.get("load_from"):
        _check_file(parser, "load_from", cfg.load_from)
    if args.launcher == "pytorch" and not torch.cuda.is_available():
        # mmengine asks for a GPU in each process.
        torch.distributed.init_process_group("gloo")
        unused = cfg.get("find_unused_parameters", False)
        wrapper = {"type": "MMDistributedDataParallel", "device_ids": None, "broadcast_buffers": False}
        cfg.setdefault("model_wrapper_cfg", {**wrapper, "find_unused_parameters": unused})
    try:
        runner = RUNNERS.build(cfg) if "runner_type" in cfg else Runner.from_cfg(cfg)
        if earlier is not None and not (cfg.get("resume") or args.test):
            runner.logger.warning(
                f"{cfg.work_dir} has checkpoints of an earlier run, which those of this one replace: --resume goes on "
                "from them, --work-dir names another folder"
            )
        if args.test:
            runner.test()
        else:
            runner.train()
    except FileNotFoundError as error:
        if "\n" in str(error):  # with the traceback of another process
            raise
        parser.error(f"missing data: {error}")
    if args.launcher != "none":
        # Threads of gloo that still hold what the last collective sent would abort the interpreter at its end.
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return runner


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for option in ("resume", "amp", "auto_scale_lr"):
        if args.test and getattr(args, option):
            parser.error(f"--test and --{option.replace('_', '-')} exclude each other")
    _check_file(parser, "config", args.config)
    for option, value in (("--test", args.test), ("--resume", args.resume)):
        if value not in (None, "auto"):
            _check_file(parser, option, value)
    if args.amp and not torch.cuda.is_available():
        parser.error("--amp needs a GPU, and none is visible")
    if args.launcher == "none" and int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error(f"{os.environ['WORLD_SIZE']} processes were started (WORLD_SIZE): add --launcher pytorch")
    if args.launcher != "none":
        variable, command = STARTED_BY[args.launcher]
        if variable not in os.environ:
            parser.error(f"--launcher {args.launcher} needs the processes that {command} starts: {variable} is not set")
    os.environ.setdefault("LOCAL_RANK", str(args.local_rank))


def _check_file(parser: argparse.ArgumentParser, option: str, name: str) -> None:
    """A file that is there; of what is elsewhere (https://, torchvision://) the runner knows."""
    if "://" not in name and not Path(name).is_file() and not (option != "config" and Path(name).is_dir()):
        parser.error(f"{option}: no such file: {name}")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m rambo_plugins.mmdet.train", description=str(__doc__).replace("``", ""))
    parser.add_argument("config", help="the config file")
    parser.add_argument("--work-dir", help="folder of the logs and checkpoints; default: work_dirs/CONFIG")
    parser.add_argument(
        "--resume", nargs="?", const="auto", help="go on from a checkpoint; without one, from the last in the work-dir"
    )
    parser.add_argument("--test", metavar="CHECKPOINT", help="evaluate a checkpoint instead of training")
    parser.add_argument("--amp", action="store_true", help="mixed precision (on a GPU)")
    parser.add_argument(
        "--auto-scale-lr", action="store_true", help="scale the learning rate from the config's base_batch_size"
    )
    parser.add_argument(
        "--cfg-options", nargs="+", action=DictAction, help="settings that override the config's: key.subkey=value ..."
    )
    parser.add_argument("--launcher", choices=["none", *STARTED_BY], default="none")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
