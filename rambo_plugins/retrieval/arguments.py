"""The command line of ``python -m rambo_plugins.retrieval``, and the recipes that fill in what it leaves open."""

from __future__ import annotations

import argparse
import ast
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rambo_plugins.pml import PAPER_PRESETS

DATA = ("sop", "inshop", "cub", "omniglot", "glyphs", "folder")

GENERAL: dict[str, Any] = {
    "backbone": "resnet50", "embedding_size": 512, "size": 224, "resize": 256, "batch_size": 128,
    "images_per_class": 4, "batches_per_pair": 10, "epochs": 20, "lr": 1e-5, "weight_decay": 4e-4, "lr_steps": [],
    "lr_gamma": 0.3, "workers": min(4, os.cpu_count() or 1), "loss_args": {},
}  # fmt: skip
_SMALL: dict[str, Any] = {
    "backbone": "convnet", "embedding_size": 64, "epochs": 6, "steps_per_epoch": 100, "lr": 2e-3, "weight_decay": 0.0,
    "workers": 0,
    "loss_args": {"lambda_val": 4.0, "margin": [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]},
}  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {"glyphs": _SMALL, "omniglot": _SMALL}

_PAPER: dict[str, Any] = {
    "backbone": "resnet50", "weights": "DEFAULT", "embedding_size": 512, "size": 224, "resize": 256,
    "batch_size": 128, "weight_decay": 4e-4, "epochs": 80, "lr_steps": [35], "lr_gamma": 0.3,
}  # fmt: skip
PAPER = {
    "sop": {**_PAPER, "lr": 3e-6, "images_per_class": 4, "batches_per_pair": 10},
    "inshop": {**_PAPER, "lr": 1e-5, "images_per_class": 8, "batches_per_pair": 4},
    "cub": {**_PAPER, "lr": 5e-6, "images_per_class": 4},
}
"""``--preset paper``; with a RaMBO loss also λ, margin, memory and weighting, ``rambo_plugins.pml.PAPER_PRESETS``."""

# A run may go on with other values of these: they do not change what is trained.
LOOSE = (
    "root", "workers", "ks", "map_at_r", "preset", "epochs", "out", "fresh", "checkpoint_every", "log_every",
    "evaluate_only", "save_embeddings", "device", "quiet",
)  # fmt: skip


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, complete: what it leaves open is from the preset, the data set's recipe or ``GENERAL``."""
    parser = _parser()
    given = parser.parse_args(arguments)
    recipe = {**GENERAL, **RECIPES.get(given.data, {})}
    rambo = given.loss in ("rambo-recall", "rambo-ap")
    if given.preset is not None:
        if given.data not in PAPER:
            parser.error(f"--preset {given.preset}: expected --data {', '.join(PAPER)}, got {given.data}")
        recipe |= {**PAPER[given.data], "loss_args": PAPER_PRESETS[given.data]}
    rambo_args = recipe.pop("loss_args")
    loss_args = {**rambo_args} if rambo else {}
    if given.loss == "rambo-ap":
        loss_args.pop("weighting", None)
    parser.set_defaults(**recipe)
    args = parser.parse_args(arguments)
    args.loss_args = {**loss_args, **_pairs(parser, "--loss-args", args.loss_args)}
    args.miner_args = _pairs(parser, "--miner-args", args.miner_args)
    if args.weights is None:
        args.weights = "none" if args.backbone == "convnet" else "DEFAULT"
    if args.embedding_lr is None:
        args.embedding_lr = args.lr if args.weights == "none" else 10 * args.lr
    if args.loss_lr is None:
        args.loss_lr = args.embedding_lr
    if args.data not in ("glyphs", "omniglot"):
        if args.size > args.resize:
            parser.error(f"--size {args.size}: expected at most --resize {args.resize}")
        if args.backbone == "convnet" and args.size != 28:
            parser.error(f"--backbone convnet: expected --size 28, got {args.size}")
    if args.sync_bn and args.device.type != "cuda":
        parser.error(
            "--sync-bn: SyncBatchNorm works on CUDA only; with --freeze-bn processes need no common statistics"
        )
    if args.amp == "fp16" and args.device.type != "cuda":
        parser.error("--amp fp16: expected with --device cuda; on the CPU there is bf16")
    return args


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """What decides the outcome of a run, in plain values."""
    return {name: value for name, value in vars(args).items() if name not in LOOSE}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m rambo_plugins.retrieval",
        usage="%(prog)s --data NAME [--root FOLDER] [--loss NAME] [options]; --help lists them",
        description="Train a network for image retrieval and measure Recall@K on classes never seen. Started again "
        "with the same arguments, it goes on from the last checkpoint. torchrun starts it on several processes.",
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", choices=DATA, required=True)
    data.add_argument("--root", type=Path, help="folder of the data set; a folder of class folders for --data folder")
    data.add_argument("--size", type=_positive, help="of the crop in pixels (224; glyphs and omniglot have 28)")
    data.add_argument("--resize", type=_positive, help="shorter side before the crop (256)")
    data.add_argument("--workers", type=_natural, help="processes that decode images, of each process (4)")
    data.add_argument("--ks", type=_positive, nargs="+", metavar="K", help="of Recall@K (as published; 1 2 4 8)")

    model = parser.add_argument_group("network")
    model.add_argument("--backbone", help="convnet, a model of torchvision.models, or timm/NAME (resnet50)")
    model.add_argument("--weights", help="none, DEFAULT (pretrained, downloaded), or a file with a state dict")
    model.add_argument("--embedding-size", type=_positive, help="(512)")
    model.add_argument("--freeze-bn", action="store_true", help="batch norm keeps its statistics")
    model.add_argument("--sync-bn", action=argparse.BooleanOptionalAction,
                       help="batch norm over all processes (by default with several on CUDA)")  # fmt: skip

    loss = parser.add_argument_group("loss")
    loss.add_argument("--loss", default="rambo-recall",
                      help="rambo-recall, rambo-ap, or a class of pytorch_metric_learning.losses")  # fmt: skip
    loss.add_argument("--loss-args", nargs="+", default=[], metavar="NAME=VALUE", help="lambda_val=4 margin=0.02")
    loss.add_argument("--miner", help="a class of pytorch_metric_learning.miners")
    loss.add_argument("--miner-args", nargs="+", default=[], metavar="NAME=VALUE")

    training = parser.add_argument_group("training")
    training.add_argument("--preset", choices=("paper",), help="the paper's recipe for sop, inshop or cub; what is "
                          "given explicitly wins")  # fmt: skip
    training.add_argument("--epochs", type=_positive, help="(20)")
    training.add_argument("--steps-per-epoch", type=_positive, help="(as many batches as the sampler has in an epoch)")
    training.add_argument("--batch-size", type=_positive, help="of all processes together (128)")
    training.add_argument("--images-per-class", type=_positive, help="in a batch (4)")
    training.add_argument("--batches-per-pair", type=_positive, help="of super classes (10)")
    training.add_argument("--lr", type=_at_least_zero, help="of Adam, for the backbone (1e-5)")
    training.add_argument("--embedding-lr", type=_at_least_zero, help="of the embedding layer (10 × --lr if the "
                          "backbone is pretrained, else the same)")  # fmt: skip
    training.add_argument("--loss-lr", type=_at_least_zero, help="of the loss's parameters (as --embedding-lr)")
    training.add_argument("--weight-decay", type=_at_least_zero, help="(4e-4)")
    training.add_argument("--lr-steps", type=_positive, nargs="*", metavar="EPOCH",
                          help="epochs after which learning rates drop")  # fmt: skip
    training.add_argument("--lr-gamma", type=_at_least_zero, help="the factor by which they drop (0.3)")
    training.add_argument("--amp", choices=("none", "bf16", "fp16"), default="none", help="mixed precision")
    training.add_argument("--chunk", type=_positive, metavar="IMAGES", help="two-stage step: embed so many images at a "
                          "time, and again for their gradient; memory is that of a chunk, batch norm too")  # fmt: skip
    training.add_argument("--seed", type=_natural, default=0)
    training.add_argument("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu")

    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, default=Path("runs/retrieval"), help="(runs/retrieval)")
    output.add_argument("--fresh", action="store_true", help="start over, whatever --out holds")
    output.add_argument("--checkpoint-every", type=_positive, metavar="STEPS", help="besides after every epoch")
    output.add_argument("--log-every", type=_positive, default=20, metavar="STEPS", help="to TensorBoard (20)")
    output.add_argument("--map-at-r", action="store_true", help="compute MAP@R too, in one process")
    output.add_argument("--evaluate-only", type=Path, metavar="CHECKPOINT", help="test this network, do not train")
    output.add_argument("--save-embeddings", action="store_true",
                        help="write the best network's embeddings of the test images to --out")  # fmt: skip
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _pairs(parser: argparse.ArgumentParser, option: str, texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE as keyword arguments: VALUE a Python literal, or else a string."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            parser.error(f"{option}: expected NAME=VALUE, got {text!r}")
        try:
            values[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            values[name] = value
    return values


def _positive(text: str) -> int:
    return _integer(text, 1)


def _natural(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")
    return int(text)


def _at_least_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number >= 0, got {text!r}")
    return value


def _device(text: str) -> torch.device:
    try:
        return torch.zeros(0, device=text).device
    except (RuntimeError, AssertionError) as error:  # torch names no narrower kinds
        raise argparse.ArgumentTypeError(f"{text!r}: {str(error).splitlines()[0]}") from error
