"""``python -m rambo_plugins.retrieval``: train, test, resume; see ``arguments.py`` for the options.

python -m rambo_plugins.retrieval --data glyphs
python -m rambo_plugins.retrieval --data sop --root FOLDER --preset paper --out runs/sop
torchrun --nproc-per-node 4 -m rambo_plugins.retrieval --data folder --root FOLDER --loss MultiSimilarityLoss
python -m rambo_plugins.retrieval --data folder --root FOLDER --evaluate-only runs/sop/best.pt --save-embeddings
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from rambo_plugins.core.distributed import num_processes
from rambo_plugins.folders import OwnFolder
from rambo_plugins.pml.datasets import RetrievalImages, check_images
from rambo_plugins.retrieval import checkpoint
from rambo_plugins.retrieval.arguments import parse_arguments
from rambo_plugins.retrieval.data import DRAWN, Data, describe, load_data
from rambo_plugins.retrieval.errors import CannotGoOn, line_of, refusals
from rambo_plugins.retrieval.evaluate import embedding_files, evaluate, save_embeddings, shown
from rambo_plugins.retrieval.identity import describe_images
from rambo_plugins.retrieval.models import EmbeddingNet
from rambo_plugins.retrieval.processes import expected_processes, first, joined
from rambo_plugins.retrieval.train import Run

PURPOSE = "a run of rambo_plugins.retrieval"


def main(arguments: Sequence[str] | None = None) -> int:
    rank = int(os.environ.get("RANK", 0)) if expected_processes() > 1 else 0
    with contextlib.redirect_stderr(io.StringIO()) if rank else contextlib.nullcontext():  # said by the first process
        args = parse_arguments(arguments)
    logging.basicConfig(level=logging.ERROR if rank else logging.WARNING, format="%(name)s: %(message)s")
    try:
        with joined(args) as group:
            (_train if args.evaluate_only is None else _test)(args, group)
    except KeyboardInterrupt:
        goes_on = "; the same command, without --fresh, goes on from the last checkpoint"
        print(f"\ninterrupted{goes_on if args.evaluate_only is None else ''}", file=sys.stderr)
        return 130
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        if line:
            print(f"error: {line}", file=sys.stderr)
        return 2
    return 0


def _train(args: argparse.Namespace, group: dist.ProcessGroup | None) -> None:
    with refusals():
        folder = OwnFolder(args.out, PURPOSE) if first() else None
        data = _load(args)
        run = Run(args, data, folder, group)
        _own(folder, ["checkpoint.pt", "best.pt", "metrics.json"], args, data)
    if folder is not None:
        print(describe(data), flush=True)
        if len(run.history) > args.epochs:
            print(f"{args.out} holds {len(run.history)} epochs already, more than --epochs {args.epochs}")
        if "lr_steps" in args.given and args.lr_steps and args.lr_steps[-1] >= args.epochs:
            print(f"learning rates drop after epoch {args.lr_steps[-1]} too, but --epochs {args.epochs} is the last")
    run.train()
    if folder is not None:
        unlearnt = "" if run.learnt else "; no step had a gradient, so this is the network as it was at the start"
        print(f"best: {shown(run.best)}{unlearnt}; {args.out} holds metrics.json, best.pt and checkpoint.pt")
        old = [name for split in data.test for name in embedding_files(split)[:1] if _older(folder, name, "best.pt")]
        if old and not args.save_embeddings:
            print(f"{', '.join(old)} is of an earlier network than best.pt; --save-embeddings writes it anew")
    if args.save_embeddings:
        if num_processes() > 1:
            dist.barrier(group)  # the first process has written it
        with refusals():
            net = checkpoint.restore_net(checkpoint.read(args.out / "best.pt"))
        _save_embeddings(net, data, args, folder)


def _older(folder: OwnFolder, name: str, than: str) -> bool:
    paths = [folder.path / one for one in (name, than)]
    return all(path.exists() for path in paths) and paths[0].stat().st_mtime_ns < paths[1].stat().st_mtime_ns


def _test(args: argparse.Namespace, group: dist.ProcessGroup | None) -> None:
    """Evaluates the network of a checkpoint, on images of the kind that it was trained with."""
    with refusals():
        folder = OwnFolder(args.out, PURPOSE) if first() else None
        saved = checkpoint.read(args.evaluate_only)
        there: dict[str, Any] = saved["settings"]
        if (there["data"] in DRAWN) != (args.data in DRAWN):
            raise ValueError(
                f"{args.evaluate_only} was trained on {there['data']}, whose images are "
                f"{'grey ones in [0, 1]' if there['data'] in DRAWN else 'normalised colours'}; --data {args.data} is "
                "of another kind"
            )
        for name in ("backbone", "embedding_size", "size", "resize"):
            setattr(args, name, there[name])
        if "amp" not in args.given:
            args.amp = there["amp"]
        if args.amp == "fp16" and args.device.type != "cuda":
            raise ValueError(
                f"{args.evaluate_only} was trained with --amp fp16; on {args.device} give --amp none or bf16"
            )
        net = checkpoint.restore_net(saved)
        data = _load(args)
        _own(folder, ["evaluation.json"], args, data)
    if folder is not None:
        print(describe(data), flush=True)
    figures = evaluate(net.to(args.device), data, args, group)
    if folder is not None:
        print(shown(figures), flush=True)
        found = {"checkpoint": str(args.evaluate_only), "epochs": len(saved["history"]), "amp": args.amp}
        with folder.writing("evaluation.json") as path:
            path.write_text(json.dumps(found | {"images": describe_images(data)} | figures, indent=1) + "\n")
    if args.save_embeddings:
        _save_embeddings(net, data, args, folder)


def _load(args: argparse.Namespace) -> Data:
    data = load_data(args)
    if args.check_images and first():
        for images in (data.train, *data.test.values()) if args.evaluate_only is None else data.test.values():
            if isinstance(images, RetrievalImages):  # others were drawn, and are in memory
                check_images(images, workers=args.workers, progress=not args.quiet)
    return data


def _own(folder: OwnFolder | None, names: list[str], args: argparse.Namespace, data: Data) -> None:
    """Raises ValueError before the work where a file of the user's is in the way of one of ours."""
    if folder is not None:
        embeddings = [name for split in data.test for name in embedding_files(split)] if args.save_embeddings else []
        for name in (*names, *embeddings):
            folder.own(name)


def _save_embeddings(net: EmbeddingNet, data: Data, args: argparse.Namespace, folder: OwnFolder | None) -> None:
    try:
        written = save_embeddings(net.to(args.device), data, args, folder)
    except Exception as error:
        line = line_of(error)
        if line is None:
            raise
        raise CannotGoOn(f"the figures are saved, but the embeddings are not: {line}") from error
    for path in written:
        print(path)


if __name__ == "__main__":
    sys.exit(main())
