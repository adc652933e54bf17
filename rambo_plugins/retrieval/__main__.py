"""``python -m rambo_plugins.retrieval``: train, test, resume; see ``arguments.py`` for the options.

python -m rambo_plugins.retrieval --data glyphs
python -m rambo_plugins.retrieval --data sop --root FOLDER --preset paper --out runs/sop
torchrun --nproc-per-node 4 -m rambo_plugins.retrieval --data folder --root FOLDER --loss MultiSimilarityLoss
python -m rambo_plugins.retrieval --data folder --root FOLDER --evaluate-only runs/sop/best.pt --save-embeddings
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from rambo_plugins.core.distributed import num_processes
from rambo_plugins.retrieval import checkpoint
from rambo_plugins.retrieval.arguments import parse_arguments
from rambo_plugins.retrieval.data import Data, describe, load_data
from rambo_plugins.retrieval.evaluate import evaluate, save_embeddings, shown
from rambo_plugins.retrieval.train import Run


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    with _processes(args):
        first = num_processes() == 1 or dist.get_rank() == 0
        try:
            args.out.mkdir(parents=True, exist_ok=True)
            saved = None if args.evaluate_only is None else checkpoint.read(args.evaluate_only)
            if saved is not None:
                for name in ("backbone", "embedding_size", "size", "resize"):
                    setattr(args, name, saved["settings"][name])
            data = load_data(args)
            run = Run(args, data) if saved is None else None
        except (ValueError, TypeError, OSError, ImportError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if first:
            print(describe(data), flush=True)
        if run is not None:
            try:
                run.train()
            except KeyboardInterrupt:
                print("\ninterrupted; the same command goes on from the last checkpoint", file=sys.stderr)
                return 130
            if first:
                print(f"best: {shown(run.best)}; {args.out} holds metrics.json, best.pt and checkpoint.pt")
        if run is not None and args.save_embeddings:
            if num_processes() > 1:
                dist.barrier(run.group)  # the first process has written it
            saved = checkpoint.read(args.out / "best.pt")
        if saved is not None:
            _test(saved, data, args, first)
    return 0


def _test(saved: dict, data: Data, args: argparse.Namespace, first: bool) -> None:
    """Evaluates the network of a checkpoint if that is all to do, and writes its embeddings if asked."""
    net = checkpoint.restore_net(saved).to(args.device)
    if args.evaluate_only is not None:
        group = dist.new_group(backend="gloo") if num_processes() > 1 else None
        figures = evaluate(net, data, args, group)
        if first:
            print(shown(figures))
            (args.out / "evaluation.json").write_text(json.dumps(figures, indent=1) + "\n")
    if args.save_embeddings:
        for path in save_embeddings(net, data, args):
            print(path)


@contextlib.contextmanager
def _processes(args: argparse.Namespace) -> Iterator[None]:
    """Joins the processes that torchrun started, if it did."""
    if args.device.type == "cuda" and "LOCAL_RANK" in os.environ:
        args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(args.device)
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or dist.is_initialized():
        yield
        return
    # An hour: while the first process computes MAP@R, the others wait.
    dist.init_process_group("nccl" if args.device.type == "cuda" else "gloo", timeout=timedelta(hours=1))
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
