"""Command line of the demo: trains each loss with each seed and writes what came out to ``runs/demo``.

Interrupted and started again with the same arguments, it goes on from the last finished epoch. With ``--fresh`` it
starts over; the runs of before are in the folder ``old`` until the new ones are finished.
"""

from __future__ import annotations

import os

os.environ.setdefault("TQDM_DISABLE", "1")  # PML's bars, one an epoch and an evaluation; ours say disable=False

import argparse
import json
import logging
import math
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from rambo_plugins.command_line import Parser
from rambo_plugins.demo.data import SPLITS, load_split
from rambo_plugins.demo.identity import Settings
from rambo_plugins.demo.report import draw_curves, draw_neighbours, markdown_table, metrics
from rambo_plugins.demo.train import LOSSES, Run
from rambo_plugins.folders import OwnFolder


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    defaults = Settings()
    parser = Parser(
        prog="python -m rambo_plugins.demo",
        description="Train RaMBO and losses of pytorch-metric-learning on real images, test on classes never seen.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", choices=SPLITS, default=defaults.data, help="letters in the typefaces of matplotlib, "
                        "those of Omniglot's archives, or the digits of scikit-learn")  # fmt: skip
    parser.add_argument("--root", type=Path, help="folder of the Omniglot archives, for --data omniglot")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=DEFAULT_LOSSES, metavar="LOSS",
                        help=f"of {', '.join(LOSSES)}")  # fmt: skip
    parser.add_argument("--seeds", type=_positive, default=3, help="how many")
    parser.add_argument("--epochs", type=_positive, default=defaults.epochs, help="each ends with a test")
    parser.add_argument("--steps", type=_positive, default=defaults.steps, help="steps an epoch")
    parser.add_argument("--learning-rate", type=_rate, default=defaults.learning_rate, help="of Adam")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="a folder of its own for what is written")
    parser.add_argument("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu",
                        help="cpu, cuda, cuda:1")  # fmt: skip
    parser.add_argument("--threads", type=_positive, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--fresh", action="store_true", help="start over; the runs that --out holds are kept in "
                        "its folder old until the new ones are finished")  # fmt: skip
    args = parser.parse_args(arguments)
    if args.root is not None and args.data != "omniglot":
        parser.error(f"--root: expected with --data omniglot alone, got --data {args.data}, which brings its images")
    if len(set(args.losses)) < len(args.losses):
        parser.error(f"--losses: expected each once, got {' '.join(args.losses)}")
    return args


OUTPUTS = ("metrics.json", "curves.png", "neighbours.png")
DEFAULT_LOSSES = ["rambo-recall", "fastap", "contrastive"]


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**31):
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = math.nan if "_" in text else float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number > 0, got {text!r}")
    return value


def _device(text: str) -> torch.device:
    try:
        probe = torch.zeros(1, device=text)
        probe.cpu()  # of "meta" there is nothing to compute
        return probe.device
    except (RuntimeError, AssertionError) as error:  # torch names no narrower kinds
        raise argparse.ArgumentTypeError(f"{text!r}: {str(error).splitlines()[0]}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    warnings.filterwarnings("ignore", category=UserWarning, module="pytorch_metric_learning")
    logging.getLogger("PML").setLevel(logging.ERROR)  # it warns of every optional part that is not given
    torch.set_num_threads(args.threads)
    try:
        _run(args)
    except (ValueError, OSError, FloatingPointError, MemoryError, torch.cuda.OutOfMemoryError) as error:
        print(f"error: {error}".replace("\n", " "), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        again = "the same command without --fresh" if args.fresh else "the same command"
        print(f"\ninterrupted; {again} goes on from the last finished epoch", file=sys.stderr)
        return 130
    return 0


def _run(args: argparse.Namespace) -> None:
    settings = Settings(data=args.data, epochs=args.epochs, steps=args.steps, learning_rate=args.learning_rate)
    data = load_split(args.data, root=args.root)
    for side, images in zip(("train", "test"), data, strict=True):
        names = ", ".join(images.super_names)
        print(f"{side}: {len(images):,} images of {len(images.class_names):,} classes ({names})")
    folder = OwnFolder(args.out, "runs of the demo")
    with tempfile.TemporaryFile(dir=folder.path):  # can it be written to?
        pass
    if args.fresh:
        _put_aside(folder)
    for name in OUTPUTS:
        folder.own(name)
    runs = [Run(loss, seed, settings, data, folder, args.device) for seed in range(args.seeds) for loss in args.losses]
    for number, run in enumerate(runs, 1):
        run.train(f"[{number}/{len(runs)}] {run.loss_name:16} seed {run.seed}")

    runs.sort(key=lambda run: args.losses.index(run.loss_name))
    outcome = metrics(runs, args.threads)
    print(f"\nOn classes never seen, %, mean ± standard deviation over {args.seeds} seed(s):\n")
    print(markdown_table(outcome["summary"]))
    pixels = outcome["raw_pixels"]
    print(f"\nNearest neighbours by raw pixels: R@1 {100 * pixels['recall_at_1']:.1f}", end=", ")
    print(f"MAP@R {100 * pixels['mean_average_precision_at_r']:.1f}.", flush=True)
    text = json.dumps(outcome, indent=1, allow_nan=False) + "\n"
    with folder.writing("metrics.json") as path:
        path.write_text(text, encoding="utf-8")
    with folder.writing("curves.png") as path:
        draw_curves(outcome["results"], path)
    with folder.writing("neighbours.png") as path:
        draw_neighbours(runs[0], path)
    if old := _old(folder):
        folder.remove(*old)
    print(f"\n{folder.path}: {', '.join(OUTPUTS)}, checkpoints/")


def _put_aside(folder: OwnFolder) -> None:
    """The files of before go to ``old``. Where some are there already, the others are of a new run: deleted, unless it
    is finished and takes their place."""
    if _old(folder) and (folder.path / "metrics.json").exists():
        folder.remove(*_old(folder))
    names = sorted(folder.names - _old(folder))
    if not _old(folder):
        moves = [(folder.path / name, folder.own(f"old/{name}")) for name in names if (folder.path / name).exists()]
        for path, aside in moves:
            aside.parent.mkdir(parents=True, exist_ok=True)
            os.replace(path, aside)
    if names:
        folder.remove(*names)
    if _old(folder):
        print(f"the runs of before are in {folder.path / 'old'} until the new ones are finished")


def _old(folder: OwnFolder) -> set[str]:
    return {name for name in folder.names if name.startswith("old/")}


if __name__ == "__main__":
    sys.exit(main())
