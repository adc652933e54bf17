"""Command line of the demo: trains each loss with each seed and writes what came out to ``runs/demo``.

Interrupted and started again with the same arguments, it goes on from the last finished epoch.
"""

from __future__ import annotations

import os

os.environ.setdefault("TQDM_DISABLE", "1")  # PML's bars, one an epoch and an evaluation; ours say disable=False

import argparse
import json
import logging
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch

from rambo_plugins.demo.data import SPLITS, load_split
from rambo_plugins.demo.report import draw_curves, draw_neighbours, markdown_table, metrics
from rambo_plugins.demo.train import LOSSES, Run, Settings


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    defaults = Settings()
    parser = argparse.ArgumentParser(
        prog="python -m rambo_plugins.demo",
        description="Train RaMBO and losses of pytorch-metric-learning on real images, test on classes never seen.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--data", choices=SPLITS, default=defaults.data)
    parser.add_argument("--root", type=Path, help="folder of the Omniglot archives, for --data omniglot")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=DEFAULT_LOSSES, metavar="LOSS",
                        help=f"of {', '.join(LOSSES)}")  # fmt: skip
    parser.add_argument("--seeds", type=_positive, default=3, help="how many")
    parser.add_argument("--epochs", type=_positive, default=defaults.epochs)
    parser.add_argument("--steps", type=_positive, default=defaults.steps, help="steps an epoch")
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--device", type=_device, default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=_positive, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--fresh", action="store_true", help="start over, whatever --out holds of these runs")
    return parser.parse_args(arguments)


DEFAULT_LOSSES = ["rambo-recall", "fastap", "contrastive"]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def _device(text: str) -> torch.device:
    try:
        return torch.zeros(0, device=text).device
    except (RuntimeError, AssertionError) as error:  # torch names no narrower kinds
        raise argparse.ArgumentTypeError(f"{text!r}: {str(error).splitlines()[0]}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    warnings.filterwarnings("ignore", category=UserWarning, module="pytorch_metric_learning")
    logging.getLogger("PML").setLevel(logging.ERROR)  # it warns of every optional part that is not given
    torch.set_num_threads(args.threads)
    settings = Settings(data=args.data, epochs=args.epochs, steps=args.steps, learning_rate=args.learning_rate)
    folder = args.out
    try:
        (folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        data = load_split(args.data, root=args.root)
        for side, images in zip(("train", "test"), data, strict=True):
            names = ", ".join(images.super_names)
            print(f"{side}: {len(images):,} images of {len(images.class_names):,} classes ({names})")
        if args.fresh:
            for checkpoint in (folder / "checkpoints").glob("*.pt"):
                checkpoint.unlink()
        runs = [
            Run(loss_name, seed, settings, data, folder / "checkpoints", args.device)
            for seed in range(args.seeds)
            for loss_name in args.losses
        ]
        for number, run in enumerate(runs, 1):
            run.train(f"[{number}/{len(runs)}] {run.loss_name:16} seed {run.seed}")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\ninterrupted; the same command goes on from the last finished epoch", file=sys.stderr)
        return 130

    runs.sort(key=lambda run: args.losses.index(run.loss_name))
    outcome = metrics(runs, args.threads)
    (folder / "metrics.json").write_text(json.dumps(outcome, indent=1) + "\n")
    print(f"\nOn classes never seen, %, mean ± standard deviation over {args.seeds} seed(s):\n")
    print(markdown_table(outcome["summary"]))
    pixels = outcome["raw_pixels"]
    print(f"\nNearest neighbours by raw pixels: R@1 {100 * pixels['recall_at_1']:.1f}", end=", ")
    print(f"MAP@R {100 * pixels['mean_average_precision_at_r']:.1f}.")
    draw_curves(outcome["results"], folder / "curves.png")
    draw_neighbours(runs[0], folder / "neighbours.png")
    print(f"\n{folder}: metrics.json, curves.png, neighbours.png, checkpoints/")
    return 0


if __name__ == "__main__":
    sys.exit(main())
