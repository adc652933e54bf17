"""Options that would do nothing are refused, with the name of what they need."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

from torch import nn

from rambo_plugins.retrieval.data import DRAWN, Data, check_pairs
from rambo_plugins.retrieval.models import EmbeddingNet

EVALUATION = {
    "data", "root", "workers", "check_images", "ks", "map_at_r", "amp", "device", "out", "evaluate_only",
    "save_embeddings", "quiet",
}  # fmt: skip
"""What ``--evaluate-only`` looks at; network, size of images and, if not given, ``--amp`` are the checkpoint's."""


def check_options(args: argparse.Namespace, processes: int) -> None:
    """Raises ValueError for options that do not fit together; ``args.given`` has the names of those that were given."""
    for text in _misfits(args, processes):
        raise ValueError(text)


def _misfits(args: argparse.Namespace, processes: int) -> Iterator[str]:
    given = args.given
    if args.evaluate_only is not None and given - EVALUATION:
        yield f"--evaluate-only tests a network as it is: leave out {_names(given - EVALUATION)}"
    if args.data in DRAWN:
        if given & {"size", "resize"}:
            yield f"{_names(given & {'size', 'resize'})}: the images of {args.data} have 28 × 28 pixels"
        if args.check_images:
            yield f"--check-images: the images of {args.data} are all read before the first step as it is"
    if args.data == "glyphs" and "root" in given:
        yield "--root: glyphs is drawn, and read from no folder"
    if "miner_args" in given and args.miner is None:
        yield "--miner-args needs --miner"
    if "lr_gamma" in given and not args.lr_steps:
        yield "--lr-gamma needs --lr-steps, the epochs after which learning rates drop"
    if len(set(args.lr_steps)) < len(args.lr_steps):
        yield f"--lr-steps: expected each epoch once, got {' '.join(map(str, args.lr_steps))}"
    if args.lr == args.embedding_lr == 0 and not args.loss_lr:
        yield "--lr 0: nothing would be trained; with --embedding-lr the embedding layer is, alone"
    if args.sync_bn and processes == 1:
        yield "--sync-bn needs several processes (torchrun)"
    if args.sync_bn and args.freeze_bn:
        yield "--sync-bn: with --freeze-bn there are no statistics to have in common"
    if args.sync_bn and args.device.type != "cuda":
        yield "--sync-bn: SyncBatchNorm works on CUDA only; with --freeze-bn processes need no common statistics"
    if args.amp == "fp16" and args.device.type != "cuda":
        yield "--amp fp16: expected with --device cuda; on the CPU there is bf16"
    if args.device.index is not None and "LOCAL_RANK" in os.environ:
        yield f"--device {args.device}: torchrun gives each process a GPU of its own; expected cuda"
    part = args.batch_size // processes
    if args.chunk is not None and args.chunk >= part:
        yield f"--chunk {args.chunk}: a process embeds {part} images of a batch; expected fewer"


def check_run(
    args: argparse.Namespace, data: Data, net: EmbeddingNet, loss_fn: nn.Module, steps: int, processes: int
) -> None:
    """The same of options that are judged by the data, the network or the loss."""
    for text in _misfits_of_run(args, data, net, loss_fn, steps, processes):
        raise ValueError(text)
    if not any(True for _ in loss_fn.parameters()):
        check_pairs(data.train)


def _misfits_of_run(
    args: argparse.Namespace, data: Data, net: EmbeddingNet, loss_fn: nn.Module, steps: int, processes: int
) -> Iterator[str]:
    given, supers = args.given, data.train.super_labels
    if "batches_per_pair" in given and (supers is None or len(supers.unique()) < 2):
        yield "--batches-per-pair needs images of several super classes, which these do not have"
    if "loss_lr" in given and not any(True for _ in loss_fn.parameters()):
        yield f"--loss-lr: {args.loss} has no parameters"
    if args.checkpoint_every is not None and (
        args.checkpoint_every % steps == 0 or args.checkpoint_every > args.epochs * steps
    ):
        yield (
            f"--checkpoint-every {args.checkpoint_every}: every epoch of {steps} steps ends with a checkpoint, "
            f"and there are {args.epochs * steps} steps; expected fewer, and no multiple of {steps}"
        )
    if not net.norms():
        for name in ("freeze_bn", "sync_bn"):
            if name in given and getattr(args, name):
                yield f"{_names([name])}: {args.backbone} has no batch norm"
    elif args.chunk is not None and not args.freeze_bn:
        part = args.batch_size // processes
        if (part % args.chunk or args.chunk) == 1:
            yield (
                f"--chunk {args.chunk}: the last chunk of {part} images is one image, of which batch norm has no "
                "statistics; choose another --chunk, or --freeze-bn"
            )


def _names(options: set[str] | list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in sorted(options))
