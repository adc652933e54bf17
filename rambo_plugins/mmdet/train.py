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
from mmengine.runner import Runner

import rambo_plugins.mmdet  # noqa: F401  registers RamboLoss, also for configs without custom_imports


def main(argv: list[str] | None = None) -> Runner:
    """Train, or test with ``--test``; returns the runner that did it."""
    args = _parse(argv)
    cfg = Config.fromfile(args.config)
    if args.cfg_options:
        cfg.merge_from_dict(args.cfg_options)
    cfg.work_dir = args.work_dir or cfg.get("work_dir") or str(Path("work_dirs", Path(args.config).stem))
    cfg.launcher = args.launcher
    if args.amp:
        cfg.optim_wrapper.update(type="AmpOptimWrapper", loss_scale="dynamic")
    if args.auto_scale_lr:
        cfg.setdefault("auto_scale_lr", {}).update(enable=True)
    if args.test or args.resume not in (None, "auto"):
        cfg.load_from = args.test or args.resume
    cfg.resume = args.resume is not None
    if args.launcher == "pytorch" and not torch.cuda.is_available():
        # mmengine asks for a GPU in each process.
        torch.distributed.init_process_group("gloo")
        cfg.model_wrapper_cfg = {"type": "MMDistributedDataParallel", "device_ids": None, "broadcast_buffers": False}
    runner = Runner.from_cfg(cfg)
    if args.test:
        runner.test()
    else:
        runner.train()
    return runner


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m rambo_plugins.mmdet.train", description=__doc__)
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
    parser.add_argument("--launcher", choices=["none", "pytorch", "slurm", "mpi"], default="none")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.test and args.resume:
        parser.error("--test and --resume exclude each other")
    os.environ.setdefault("LOCAL_RANK", str(args.local_rank))
    return args


if __name__ == "__main__":
    main()
