"""The command line of ``python -m rambo_plugins.retrieval``, and the recipes that fill in what it leaves open."""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rambo_plugins.command_line import Parser
from rambo_plugins.pml import PAPER_PRESETS
from rambo_plugins.retrieval.data import DRAWN
from rambo_plugins.retrieval.processes import expected_processes
from rambo_plugins.retrieval.refusals import check_options

DATA = ("sop", "inshop", "cub", "omniglot", "glyphs", "folder")

GENERAL: dict[str, Any] = {
    "backbone": "resnet50", "embedding_size": 512, "size": 224, "resize": 256, "batch_size": 128,
    "images_per_class": 4, "batches_per_pair": 10, "epochs": 20, "lr": 1e-5, "weight_decay": 4e-4, "lr_steps": [],
    "lr_gamma": 0.3, "workers": min(4, os.cpu_count() or 1), "loss_args": {}, "miner_args": {}, "root": None,
    "check_images": False, "ks": None, "weights": None, "freeze_bn": False, "sync_bn": None, "loss": "rambo-recall",
    "miner": None, "preset": None, "steps_per_epoch": None, "embedding_lr": None, "loss_lr": None, "amp": "none",
    "chunk": None, "seed": 0, "device": torch.device("cuda" if torch.cuda.is_available() else "cpu"),
    "out": Path("runs/retrieval"), "fresh": False, "checkpoint_every": None, "log_every": 20, "map_at_r": False,
    "evaluate_only": None, "save_embeddings": False, "quiet": False,
}  # fmt: skip
_SMALL: dict[str, Any] = {
    "backbone": "convnet", "size": 28, "resize": 28, "embedding_size": 64, "epochs": 6, "steps_per_epoch": 100,
    "lr": 2e-3, "weight_decay": 0.0, "workers": 0,
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


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line, complete: what it leaves open is from the preset, the data set's recipe or ``GENERAL``.

    ``given`` has the names of the options that it does not leave open.
    """
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    data, evaluation = given["data"], "evaluate_only" in given
    recipe = {**GENERAL, **RECIPES.get(data, {})}
    if "preset" in given:
        if data not in PAPER:
            parser.error(f"--preset {given['preset']}: expected --data {', '.join(PAPER)}, got {data}")
        recipe |= {**PAPER[data], "loss_args": PAPER_PRESETS[data]}
    args = argparse.Namespace(**{**recipe, **given}, given=frozenset(given))
    args.loss_args = {**recipe["loss_args"]} if args.loss in ("rambo-recall", "rambo-ap") else {}
    if args.loss == "rambo-ap":
        args.loss_args.pop("weighting", None)
    args.loss_args |= _pairs(parser, "--loss-args", given.get("loss_args", []))
    args.miner_args = _pairs(parser, "--miner-args", given.get("miner_args", []))
    args.ks = sorted(set(args.ks)) if args.ks else None
    args.lr_steps = sorted(args.lr_steps)
    if args.weights is None:
        args.weights = "none" if args.backbone == "convnet" else "DEFAULT"
    if args.embedding_lr is None:
        args.embedding_lr = args.lr if args.weights == "none" else 10 * args.lr
    if args.loss_lr is None:
        args.loss_lr = args.embedding_lr
    processes = expected_processes()
    try:
        check_options(args, processes)
    except ValueError as error:
        parser.error(str(error))
    if args.sync_bn is None:
        args.sync_bn = processes > 1 and args.device.type == "cuda" and not args.freeze_bn
    if data not in DRAWN and not evaluation:
        if args.size > args.resize:
            parser.error(f"--size {args.size}: expected at most --resize {args.resize}")
        if args.backbone == "convnet" and args.size != 28:
            parser.error(f"--backbone convnet: expected --size 28, got {args.size}")
    return args


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m rambo_plugins.retrieval",
        usage="%(prog)s --data NAME [--root FOLDER] [--loss NAME] [options]; --help lists them",
        description="Train a network for image retrieval and measure Recall@K on classes never seen. Started again "
        "with the same arguments, it goes on from the last checkpoint. torchrun starts it on several processes. What "
        "is in (brackets) holds for what is not given, unless --data or --preset has a recipe that says otherwise.",
        argument_default=argparse.SUPPRESS,
    )
    data = parser.add_argument_group("data")
    data.add_argument("--data", choices=DATA, required=True, help="folder: your own images, a folder for each class")
    data.add_argument("--root", type=Path, help="the folder that holds the data set")
    data.add_argument("--size", type=_positive, help="of the crop in pixels (224; glyphs and omniglot have 28)")
    data.add_argument("--resize", type=_positive, help="shorter side before the crop (256)")
    data.add_argument("--workers", type=_natural, help="processes that decode images, of each process (4)")
    data.add_argument("--check-images", action="store_true", help="read every image before the first step, and name "
                      "all that are damaged")  # fmt: skip
    data.add_argument("--ks", type=_positive, nargs="+", action="extend", metavar="K",
                      help="of Recall@K (as published; 1 2 4 8); best.pt is best at the smallest")  # fmt: skip

    model = parser.add_argument_group("network")
    model.add_argument("--backbone", help="convnet, a model of torchvision.models, or timm/NAME (resnet50)")
    model.add_argument("--weights", help="none, DEFAULT (pretrained, downloaded), or a file with a state dict")
    model.add_argument("--embedding-size", type=_positive, help="(512)")
    model.add_argument("--freeze-bn", action="store_true", help="batch norm keeps its statistics")
    model.add_argument("--sync-bn", action=argparse.BooleanOptionalAction,
                       help="batch norm over all processes (by default with several on CUDA)")  # fmt: skip

    loss = parser.add_argument_group("loss")
    loss.add_argument("--loss", help="rambo-recall (the default), rambo-ap, or a class of "
                      "pytorch_metric_learning.losses")  # fmt: skip
    loss.add_argument("--loss-args", nargs="+", action="extend", metavar="NAME=VALUE",
                      help="lambda_val=4 margin=0.02: numbers, words, Python's lists, True, False, None")  # fmt: skip
    loss.add_argument("--miner", help="a class of pytorch_metric_learning.miners")
    loss.add_argument("--miner-args", nargs="+", action="extend", metavar="NAME=VALUE", help="likewise, of --miner")

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
    training.add_argument("--lr-gamma", type=_above_zero, help="the factor by which they drop (0.3)")
    training.add_argument("--amp", choices=("none", "bf16", "fp16"), help="mixed precision (none)")
    training.add_argument("--chunk", type=_positive, metavar="IMAGES", help="two-stage step: embed so many images at a "
                          "time, and again for their gradient; memory is that of a chunk, batch norm too")  # fmt: skip
    training.add_argument("--seed", type=_seed, help="(0)")
    training.add_argument("--device", type=_device, help="(cuda if there is a GPU, else cpu)")

    output = parser.add_argument_group("output")
    output.add_argument("--out", type=Path, help="a folder of its own for the run (runs/retrieval)")
    output.add_argument("--fresh", action="store_true", help="start over; the run that --out holds is kept in its "
                        "folder previous until the new one has finished an epoch")  # fmt: skip
    output.add_argument("--checkpoint-every", type=_positive, metavar="STEPS", help="besides after every epoch")
    output.add_argument("--log-every", type=_positive, metavar="STEPS",
                        help="between looks at the loss, which TensorBoard gets too (20)")  # fmt: skip
    output.add_argument("--map-at-r", action="store_true", help="compute MAP@R too, in one process")
    output.add_argument("--evaluate-only", type=Path, metavar="CHECKPOINT", help="test this network, do not train; "
                        "the size of its images is that of its training, and so is --amp if not given")  # fmt: skip
    output.add_argument("--save-embeddings", action="store_true",
                        help="write the best network's embeddings of the test images to --out")  # fmt: skip
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    return parser


def _pairs(parser: argparse.ArgumentParser, option: str, texts: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE as keyword arguments: VALUE a Python literal, or else a word."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            parser.error(f"{option}: expected NAME=VALUE, got {text!r}")
        if name in values:
            parser.error(f"{option}: expected {name} once, got it again as {text!r}")
        try:
            values[name] = ast.literal_eval(value)
            json.dumps(values[name], allow_nan=False)  # what the files of a run can hold
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", value) or value.lower() in _NOT_WORDS:
                parser.error(
                    f"{option}: {name}: expected a number, a word, True, False, None, or a list of these as Python "
                    f"writes it, got {value!r}"
                )
            values[name] = value
    return values


_NOT_WORDS = ("true", "false", "none", "null", "nan", "inf", "infinity")


def _positive(text: str) -> int:
    return _integer(text, 1)


def _natural(text: str) -> int:
    return _integer(text, 0)


def _integer(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer >= {least}, got {text!r}")
    return int(text)


def _seed(text: str) -> int:
    if (seed := _natural(text)) >= 2**63:
        raise argparse.ArgumentTypeError(f"expected less than 2**63, got {text}")
    return seed


def _above_zero(text: str) -> float:
    if (value := _at_least_zero(text)) == 0:
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


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
        torch.zeros(0, device=text)
        return torch.device(text)
    except (RuntimeError, AssertionError) as error:  # torch names no narrower kinds
        raise argparse.ArgumentTypeError(f"{text!r}: {str(error).splitlines()[0]}") from error
