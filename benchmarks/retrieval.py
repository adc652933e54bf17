"""RaMBO against pytorch-metric-learning's losses in retrieval: R@1 and MAP@R on classes never met, over seeds.

    python benchmarks/retrieval.py --omniglot FOLDER --bfloat16             # every run; started again, it goes on
    python benchmarks/retrieval.py --omniglot FOLDER --bfloat16 --report    # tables and figure of what is there

1. Sweep. Each loss trains with the same number of configurations of its own (``SWEEP``) on two thirds of the training
   classes and is measured on the last third, the validation classes. The best is the one with the largest mean of R@1
   and MAP@R after the last step.
2. Final. The chosen configuration trains on all training classes, once a seed, and is measured once, after the last
   step, on the test classes: nothing is selected by them.
3. Ablations of the chosen configuration (``ABLATIONS``), measured as in 2.

Of a data set and a seed all runs have the same initial weights and the same batches, so differences between losses are
taken seed by seed. A run leaves a JSON in ``--runs``; ``results/retrieval.json`` gathers them with what was chosen.

The grids of ``SWEEP`` are equal in size, but not in how they came about: those of SmoothAP, ProxyAnchor and the losses
over several margins were set after a look at some single runs on glyphs' validation classes.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import math
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import torch
from matplotlib.figure import Figure
from pytorch_metric_learning import losses, miners
from pytorch_metric_learning.samplers import MPerClassSampler
from scipy import stats
from torch import Tensor, nn
from tqdm import tqdm

from rambo_plugins.demo.data import SPLITS, ImageClasses, load_split
from rambo_plugins.demo.report import raw_pixels, versions
from rambo_plugins.demo.train import conv_net
from rambo_plugins.evaluation import RecallCalculator
from rambo_plugins.pml import RamboAPLoss, RamboRecallLoss

CLASSES, IMAGES = 32, 4  # of a batch; of digits, all the classes there are
DIMENSIONS = 64
LEARNING_RATE = 1e-3
VALIDATION = 3  # one in so many training classes
METRICS = {"recall_at_1": "R@1", "mean_average_precision_at_r": "MAP@R"}


def several_margins(loss_type: type[nn.Module], *, largest: float, count: int, **options: Any) -> nn.Module:
    """A RaMBO loss averaged over ``count`` ≥ 2 margins from 0 to ``largest``, evenly spaced."""
    return loss_type(margin=[largest * number / (count - 1) for number in range(count)], **options)


class SmoothAP(losses.SmoothAPLoss):
    """PML's loss, for batches in which each class is ``IMAGES`` rows in a row.

    PML (2.9) takes the number of images a class for the number of classes: unless the two are equal, it ranks rows of
    several classes as one. It uses the labels for nothing but this number, so it gets the place of each image in its
    class as its label, and these are as many as it should count.
    """

    def forward(self, embeddings: Tensor, labels: Tensor, indices_tuple: tuple[Tensor, ...] | None = None) -> Tensor:
        return super().forward(embeddings, torch.arange(len(labels)) % IMAGES, indices_tuple)


LOSSES = {
    "rambo-recall-log": functools.partial(RamboRecallLoss, weighting="log"),
    "rambo-recall-loglog": functools.partial(RamboRecallLoss, weighting="loglog"),
    "rambo-recall-margins": functools.partial(several_margins, RamboRecallLoss),
    "rambo-ap": RamboAPLoss,
    "rambo-ap-margins": functools.partial(several_margins, RamboAPLoss),
    "multi-similarity": losses.MultiSimilarityLoss,
    "fastap": losses.FastAPLoss,
    "smoothap": SmoothAP,
    "supcon": losses.SupConLoss,
    "triplet": losses.TripletMarginLoss,
    "proxy-anchor": losses.ProxyAnchorLoss,
}
MINERS = {
    "multi-similarity": miners.MultiSimilarityMiner,
    "semihard": functools.partial(miners.TripletMarginMiner, type_of_triplets="semihard"),
    "batch-hard": miners.BatchHardMiner,
}

_ONE_MARGIN: list[dict[str, Any]] = [
    {"lambda_val": 0.2, "margin": 0.02},
    {"lambda_val": 4.0, "margin": 0.02},  # the default
    {"lambda_val": 1.0, "margin": 0.1},
    {"lambda_val": 1.0, "margin": 0.3},
    {"lambda_val": 4.0, "margin": 0.3},
    {"lambda_val": 16.0, "margin": 0.3},
]
_MANY_MARGINS: list[dict[str, Any]] = [
    {"lambda_val": lambda_val, "largest": largest, "count": count}
    for largest, count in ((0.45, 4), (0.7, 8))
    for lambda_val in (1.0, 4.0, 16.0)
]
SWEEP: dict[str, list[dict[str, Any]]] = {
    "rambo-recall-log": _ONE_MARGIN,
    "rambo-recall-loglog": _ONE_MARGIN,
    "rambo-recall-margins": _MANY_MARGINS,
    "rambo-ap": _ONE_MARGIN,
    "rambo-ap-margins": _MANY_MARGINS,
    "multi-similarity": [
        {"alpha": 2.0, "beta": 50.0, "base": 0.5},  # the default
        {"alpha": 2.0, "beta": 50.0, "base": 0.5, "miner": "multi-similarity"},
        {"alpha": 2.0, "beta": 20.0, "base": 0.5},
        {"alpha": 10.0, "beta": 50.0, "base": 0.5},
        {"alpha": 2.0, "beta": 50.0, "base": 0.3},
        {"alpha": 2.0, "beta": 50.0, "base": 0.7},
    ],
    "fastap": [{"num_bins": bins} for bins in (5, 10, 15, 20, 40, 80)],  # 10 is the default
    "smoothap": [{"temperature": t} for t in (0.01, 0.05, 0.1, 0.2, 0.3, 0.5)],  # the first is the default
    "supcon": [{"temperature": t} for t in (0.03, 0.05, 0.07, 0.1, 0.2, 0.4)],  # 0.1
    "triplet": [
        {"margin": 0.05},  # the default: all triplets, the mean over those that the margin reaches
        {"margin": 0.1},
        {"margin": 0.2},
        {"margin": 0.4},
        {"margin": 0.2, "miner": "semihard"},  # with the miner of PML's examples
        {"margin": 0.2, "miner": "batch-hard"},
    ],
    "proxy-anchor": [
        {"margin": 0.1, "alpha": 32.0, "proxy_lr": 1e-2},  # the default, the proxies 10 × as fast as the network
        {"margin": 0.1, "alpha": 32.0, "proxy_lr": 1e-1},
        {"margin": 0.3, "alpha": 16.0, "proxy_lr": 1e-2},
        {"margin": 0.5, "alpha": 16.0, "proxy_lr": 1e-2},
        {"margin": 0.5, "alpha": 32.0, "proxy_lr": 1e-2},
        {"margin": 0.9, "alpha": 16.0, "proxy_lr": 1e-2},
    ],
}
ABLATED = ("rambo-recall-log", "rambo-ap")
ABLATIONS: dict[str, Any] = {
    "no margin": lambda chosen: {**chosen, "margin": 0.0},
    "memory of 3 batches": lambda chosen: {**chosen, "memory": 3},
    "λ / 5": lambda chosen: {**chosen, "lambda_val": chosen["lambda_val"] / 5},
    "λ × 5": lambda chosen: {**chosen, "lambda_val": chosen["lambda_val"] * 5},
    "gradient through rank⁺": lambda chosen: {**chosen, "rank_plus_grad": True},
}


@dataclasses.dataclass(frozen=True)
class Spec:
    """One run. ``split`` is "validation", trained without the validation classes, or "test", trained on all."""

    data: str
    split: str
    loss: str
    options: dict[str, Any]
    seed: int
    steps: int
    every: int  # steps between two evaluations on the validation classes
    bfloat16: bool

    @property
    def file_name(self) -> str:
        parts = [self.data, self.split, self.loss, *name_of(self.options).split(", ")]
        parts += [f"seed={self.seed}", f"steps={self.steps}", "bfloat16" if self.bfloat16 else "float32"]
        return "-".join(parts) + ".json"


def name_of(options: dict[str, Any]) -> str:
    return ", ".join(
        f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}" for key, value in options.items()
    )


@functools.lru_cache
def load_sides(name: str, root: Path | None) -> dict[str, tuple[ImageClasses, ImageClasses]]:
    """Of each split, the images to train on and those to measure on, which share no class."""
    train, test = load_split(name, root)
    shuffled = torch.randperm(len(train.class_names), generator=torch.Generator().manual_seed(0))
    validation = torch.isin(train.labels, shuffled[: round(len(shuffled) / VALIDATION)])
    return {"validation": (part(train, ~validation), part(train, validation)), "test": (train, test)}


def part(data: ImageClasses, of: Tensor) -> ImageClasses:
    """The images where ``of`` (N,) bool is true, and their classes."""
    pixels = (255 * data.images[of, 0]).round().byte().numpy()
    return ImageClasses(
        pixels, data.labels[of].numpy(), data.class_names, data.super_labels[of].numpy(), data.super_names
    )


def embed(model: nn.Sequential, images: Tensor, bfloat16: bool) -> Tensor:
    """Embeddings (B, D) float32. Of the network, the part before the linear layer may run in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
        features = model[:-2](images)
    return model[-2:](features.float())


def evaluate(model: nn.Sequential, data: ImageClasses, bfloat16: bool) -> dict[str, float]:
    model.eval()
    with torch.no_grad():
        embeddings = torch.cat([embed(model, images, bfloat16) for images in data.images.split(128)])
    model.train()
    accuracies = RecallCalculator(ks=(1,), normalize=True).get_accuracy(embeddings, data.labels)
    return {name: round(float(accuracies[name]), 5) for name in METRICS}


def train(spec: Spec, sides: tuple[ImageClasses, ImageClasses]) -> dict[str, Any]:
    """Train by the spec: the metrics after the last step, the seconds, and on the validation classes the curve.

    Raises:
        FloatingPointError: the loss is not finite.
    """
    train_set, held_out = sides
    num_classes = len(train_set.class_names)
    torch.manual_seed(spec.seed)
    np.random.seed(spec.seed)  # noqa: NPY002 - PML's samplers draw from it
    batch = IMAGES * min(CLASSES, num_classes)
    sampler = MPerClassSampler(train_set.labels, IMAGES, batch, length_before_new_iter=batch * spec.steps)
    batches = torch.tensor(list(sampler)).view(-1, batch)
    model = conv_net(DIMENSIONS)

    options = dict(spec.options)
    miner = MINERS[options.pop("miner")]() if "miner" in options else None
    proxy_lr = options.pop("proxy_lr", None)
    if proxy_lr is not None:
        options |= {"num_classes": num_classes, "embedding_size": DIMENSIONS}
    loss_fn = LOSSES[spec.loss](**options)
    optimizers = [torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)]
    if proxy_lr is not None:
        optimizers.append(torch.optim.Adam(loss_fn.parameters(), lr=proxy_lr))

    curve, seen, seconds, began = [], [], 0.0, time.perf_counter()
    for step, rows in enumerate(batches, 1):
        embeddings, labels = embed(model, train_set.images[rows], spec.bfloat16), train_set.labels[rows]
        loss = loss_fn(embeddings, labels, miner(embeddings, labels) if miner is not None else None)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()} at step {step}")
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        seen.append(loss.item())
        if step == spec.steps or (spec.split == "validation" and step % spec.every == 0):
            seconds += time.perf_counter() - began
            metrics = evaluate(model, held_out, spec.bfloat16)
            curve.append({"step": step, "loss": float(f"{np.mean(seen):.5g}"), **metrics})
            seen, began = [], time.perf_counter()
    return {**dataclasses.asdict(spec), **metrics, "seconds": round(seconds, 1), "curve": curve}


def one_thread() -> None:
    torch.set_num_threads(1)
    faiss.omp_set_num_threads(1)
    warnings.filterwarnings("ignore", category=UserWarning, module="pytorch_metric_learning")


def run(spec: Spec, root: Path | None, folder: Path) -> None:
    """Train in this process and write the file of the run."""
    outcome = train(spec, load_sides(spec.data, root)[spec.split])
    path = folder / spec.file_name
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(outcome, ensure_ascii=False) + "\n")
    unfinished.replace(path)


def run_missing(title: str, specs: list[Spec], args: argparse.Namespace, pool: ProcessPoolExecutor) -> int:
    """All runs that have no file yet. One that fails is named and the others go on; how many failed."""
    missing = list({spec.file_name: spec for spec in specs if not (args.runs / spec.file_name).is_file()}.values())
    futures = {pool.submit(run, spec, args.omniglot, args.runs): spec for spec in missing}
    failed = 0
    with tqdm(total=len(missing), desc=title, disable=not missing) as bar:
        for future in as_completed(futures):
            error = future.exception()
            if error is not None:
                failed += 1
                bar.write(f"failed: {futures[future].file_name}: {type(error).__name__}: {error}", file=sys.stderr)
            bar.update()
    return failed


def read(spec: Spec, folder: Path) -> dict[str, Any] | None:
    path = folder / spec.file_name
    return json.loads(path.read_text()) if path.is_file() else None


class Study:
    """What is to be run, given the arguments, and what has come out so far in the folder of the runs."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.cases = list(itertools.product(args.data, args.losses))

    def _spec(self, data: str, loss: str, options: dict[str, Any], seed: int, split: str = "test") -> Spec:
        steps = self.args.steps if split == "test" else self.args.sweep_steps
        return Spec(data, split, loss, options, seed, steps, self.args.every, self.args.bfloat16)

    def sweep_specs(self, data: str, loss: str, options: dict[str, Any]) -> list[Spec]:
        return [self._spec(data, loss, options, seed, "validation") for seed in self.args.sweep_seeds]

    def sweep(self) -> list[Spec]:
        return [
            spec
            for number in range(max(map(len, SWEEP.values())))
            for data, loss in self.cases
            for spec in self.sweep_specs(data, loss, SWEEP[loss][number])
        ]

    def swept(self, data: str, loss: str) -> list[dict[str, Any]]:
        """Each configuration with its mean over the seeds, None where a run is missing."""
        outcomes = []
        for options in SWEEP[loss]:
            runs = [read(spec, self.args.runs) for spec in self.sweep_specs(data, loss, options)]
            whole = [run for run in runs if run is not None]
            means = {name: _mean(run[name] for run in whole) if whole == runs else None for name in METRICS}
            outcomes.append({"options": options, **means})
        return outcomes

    def chosen(self, data: str, loss: str) -> dict[str, Any] | None:
        """The best configuration on the validation classes; None until all have been tried, so that none has fewer."""
        outcomes = self.swept(data, loss)
        if any(outcome[name] is None for outcome in outcomes for name in METRICS):
            return None
        return max(outcomes, key=lambda outcome: _mean(outcome[name] for name in METRICS))["options"]

    def final(self) -> list[Spec]:
        chosen = {case: self.chosen(*case) for case in self.cases}
        return [
            self._spec(*case, options, seed)
            for seed in self.args.seeds
            for case, options in chosen.items()
            if options is not None
        ]

    def ablated(self) -> list[tuple[str, Spec]]:
        """What was changed, and the run."""
        chosen = {case: self.chosen(*case) for case in self.cases if case[1] in ABLATED}
        return [
            (change, self._spec(*case, changed(options), seed))
            for seed in self.args.ablation_seeds
            for case, options in chosen.items()
            if options is not None
            for change, changed in ABLATIONS.items()
        ]

    def ablations(self) -> list[Spec]:
        return [spec for _, spec in self.ablated()]

    def outcome(self) -> dict[str, Any]:
        """All of it for the JSON."""
        args = self.args
        ablated = self.ablated()
        specs = [*self.sweep(), *self.final(), *(spec for _, spec in ablated)]
        runs = {spec.file_name: read(spec, args.runs) for spec in specs}
        groups = [("", self.final())]
        groups += [(change, [spec for other, spec in ablated if other == change]) for change in ABLATIONS]
        rows = []
        for (data, loss), (change, group) in itertools.product(self.cases, groups):
            found = [runs[spec.file_name] for spec in group if (spec.data, spec.loss) == (data, loss)]
            found = [run for run in found if run is not None]
            if found:
                rows.append({"data": data, "loss": loss, "change": change, "options": found[0]["options"],
                             "seconds": round(_mean(run["seconds"] for run in found), 1),
                             "seeds": [run["seed"] for run in found],
                             **{name: [run[name] for run in found] for name in METRICS}})  # fmt: skip
        return {
            "settings": {
                "steps": args.steps, "seeds": args.seeds, "sweep_steps": args.sweep_steps,
                "sweep_seeds": args.sweep_seeds, "every": args.every, "bfloat16": args.bfloat16, "jobs": args.jobs,
                "classes": CLASSES, "images": IMAGES, "dimensions": DIMENSIONS, "learning_rate": LEARNING_RATE,
            },
            "versions": versions(),
            "data": {name: _describe(name, args.omniglot) for name in args.data},
            "sweep": [
                {"data": data, "loss": loss, "chosen": self.chosen(data, loss), "tried": self.swept(data, loss)}
                for data, loss in self.cases
            ],
            "rows": rows,
            "missing": sorted(name for name, run in runs.items() if run is None),
            "runs": [run for run in runs.values() if run is not None],
        }  # fmt: skip


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _describe(name: str, root: Path | None) -> dict[str, Any]:
    """Counts of each side, and what the nearest neighbours by pixels reach on the test classes."""
    sides = load_sides(name, root)
    (rest, validation), (_, test) = sides["validation"], sides["test"]
    counted = {"rest of the training": rest, "validation": validation, "test": test}
    pixels = raw_pixels(test)
    return {
        "sides": {side: {"images": len(data), "classes": len(data.class_names)} for side, data in counted.items()},
        "raw_pixels": {metric: round(pixels[metric], 5) for metric in METRICS},
    }


def interval(values: Sequence[float], confidence: float = 0.95) -> float:
    r"""Half the width of Student's interval of the mean, :math:`t_{n-1} s / \sqrt n`; NaN of fewer than two."""
    if len(values) < 2:
        return math.nan
    quantile = stats.t.ppf((1 + confidence) / 2, len(values) - 1)
    return float(quantile * np.std(values, ddof=1) / math.sqrt(len(values)))


def paired(row: dict[str, Any], other: dict[str, Any], metric: str) -> list[float]:
    """Differences of two rows on the seeds that both have."""
    second = dict(zip(other["seeds"], other[metric], strict=True))
    return [value - second[seed] for seed, value in zip(row["seeds"], row[metric], strict=True) if seed in second]


def percent(values: Sequence[float], sign: str = "") -> str:
    if not values:
        return "–"
    half = interval(values)
    return f"{100 * _mean(values):{sign}.1f}" + ("" if math.isnan(half) else f" ± {100 * half:.1f}")


def best_of_pml(rows: list[dict[str, Any]], data: str, metric: str) -> dict[str, Any] | None:
    """The row of PML's loss with the largest mean on the test classes."""
    candidates = [r for r in rows if r["data"] == data and not r["change"] and not r["loss"].startswith("rambo")]
    return max(candidates, key=lambda row: _mean(row[metric]), default=None)


def markdown(outcome: dict[str, Any]) -> str:
    """The three tables."""
    rows, titles = outcome["rows"], list(METRICS.values())
    lines = [
        "On the test classes, %, mean ± 95 % interval over the seeds, and the difference to PML's best loss there:\n",
        f"| data | loss | chosen | seeds | {' | '.join(titles)} | {' | '.join(f'{t}, difference' for t in titles)} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    finals = [row for row in rows if not row["change"]]
    for row in finals:
        cells = [percent(row[metric]) for metric in METRICS]
        for metric in METRICS:
            best = best_of_pml(rows, row["data"], metric)
            itself = best is None or best["loss"] == row["loss"]
            cells.append("" if itself else percent(paired(row, best, metric), "+"))
        name = name_of(row["options"])
        lines.append(f"| {row['data']} | {row['loss']} | {name} | {len(row['seeds'])} | {' | '.join(cells)} |")
    for data, about in outcome["data"].items():
        cells = [f"{100 * about['raw_pixels'][metric]:.1f}" for metric in METRICS]
        lines.append(f"| {data} | nearest by pixels | | | {' | '.join(cells)} | | |")
    lines += [
        "\nSweep, R@1 / MAP@R on the validation classes, %, the chosen in bold:\n",
        "| data | loss | configurations |",
        "|---|---|---|",
    ]
    for case in outcome["sweep"]:
        cells = []
        for tried in case["tried"]:
            figures = [tried[metric] for metric in METRICS]
            text = "–" if None in figures else " / ".join(f"{100 * figure:.1f}" for figure in figures)
            mark = "**" if tried["options"] == case["chosen"] else ""
            cells.append(f"{name_of(tried['options'])}: {mark}{text}{mark}")
        lines.append(f"| {case['data']} | {case['loss']} | {'; '.join(cells)} |")
    lines += [
        "\nAblations on the test classes, %, and the difference to the chosen configuration on the same seeds:\n",
        f"| data | loss | change | seeds | {' | '.join(titles)} | {' | '.join(f'{t}, difference' for t in titles)} |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if not row["change"]:
            continue
        cells = [percent(row[metric]) for metric in METRICS]
        whole = [r for r in finals if (r["data"], r["loss"]) == (row["data"], row["loss"])]
        cells += [percent(paired(row, whole[0], metric), "+") if whole else "–" for metric in METRICS]
        lines.append(f"| {row['data']} | {row['loss']} | {row['change']} | {len(row['seeds'])} | {' | '.join(cells)} |")
    return "\n".join(lines)


def summary(outcome: dict[str, Any]) -> str:
    """A line a loss, best mean of all figures first: each metric on each data set."""
    finals = [row for row in outcome["rows"] if not row["change"]]
    columns = list(itertools.product(outcome["data"], METRICS))
    by_loss: dict[str, dict[tuple[str, str], list[float]]] = {}
    for row in finals:
        for metric in METRICS:
            by_loss.setdefault(row["loss"], {})[row["data"], metric] = row[metric]
    lines = [
        "| loss | " + " | ".join(f"{data} {METRICS[metric]}" for data, metric in columns) + " |",
        "|---|" + "---|" * len(columns),
    ]
    for loss, figures in sorted(by_loss.items(), key=lambda item: -_mean(map(_mean, item[1].values()))):
        lines.append(f"| {loss} | " + " | ".join(percent(figures.get(column, [])) for column in columns) + " |")
    return "\n".join(lines)


def draw(outcome: dict[str, Any], path: Path) -> None:
    """Mean and interval of each loss, RaMBO's in another colour, a panel for each data set and metric."""
    finals = [row for row in outcome["rows"] if not row["change"]]
    names = list(dict.fromkeys(row["data"] for row in finals))
    if not names:
        return
    figure = Figure(figsize=(4.6 * len(METRICS), 3.6 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), len(METRICS), squeeze=False)
    for (name, (metric, title)), axes in zip(itertools.product(names, METRICS.items()), grid.flat, strict=True):
        rows = sorted((row for row in finals if row["data"] == name), key=lambda row: _mean(row[metric]))
        for place, row in enumerate(rows):
            colour = "#d7191c" if row["loss"].startswith("rambo") else "#2c7bb6"
            values = [100 * value for value in row[metric]]
            half = interval(values)
            axes.plot(values, [place] * len(values), ".", color=colour, alpha=0.35, markersize=4)
            axes.errorbar(_mean(values), place, xerr=0 if math.isnan(half) else half, fmt="o", color=colour, capsize=3)
        axes.set_yticks(range(len(rows)), [row["loss"] for row in rows])
        axes.set_title(f"{name}: {title} on unseen classes, %", fontsize=10)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=120)


def write(outcome: dict[str, Any], path: Path) -> None:
    """The JSON, a run a line, and the figure beside it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**outcome, "runs": None}, indent=1, ensure_ascii=False)
    lines = ",\n".join("  " + json.dumps(run, ensure_ascii=False) for run in outcome["runs"])
    path.write_text(text.replace('"runs": null', f'"runs": [\n{lines}\n ]') + "\n")
    draw(outcome, path.with_suffix(".png"))


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--phase", choices=["sweep", "final", "ablations", "all"], default="all",
                        help="final and ablations need the sweep")  # fmt: skip
    parser.add_argument("--data", nargs="+", choices=SPLITS, default=["glyphs", "omniglot"])
    parser.add_argument("--omniglot", type=Path, help="folder of the Omniglot archives")
    parser.add_argument("--losses", nargs="+", choices=LOSSES, default=list(LOSSES), metavar="LOSS",
                        help=f"of {', '.join(LOSSES)}")  # fmt: skip
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2, 3, 4])
    parser.add_argument("--sweep-steps", type=int, default=300)
    parser.add_argument("--sweep-seeds", nargs="+", type=int, default=[101])
    parser.add_argument("--ablation-seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--every", type=int, default=100, help="steps between two evaluations of the sweep")
    parser.add_argument("--bfloat16", action="store_true",
                        help="convolutions in bfloat16: half the time where the CPU has AVX512-BF16")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=2, help="processes, of one thread each")
    parser.add_argument("--runs", type=Path, default=Path("runs/retrieval"), help="folder of one JSON a run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "retrieval.json")
    parser.add_argument("--report", action="store_true", help="no runs, only what is there")
    args = parser.parse_args(arguments)
    if "omniglot" in args.data and args.omniglot is None:
        parser.error("omniglot needs its folder: give it with --omniglot, or leave it out with --data glyphs")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    args = parse_arguments(arguments)
    args.runs.mkdir(parents=True, exist_ok=True)
    study = Study(args)
    phases = {"sweep": study.sweep, "final": study.final, "ablations": study.ablations}  # each needs the one before
    failed = 0
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=spawn, initializer=one_thread) as pool:
        try:
            for phase in () if args.report else phases if args.phase == "all" else (args.phase,):
                failed += run_missing(phase, phases[phase](), args, pool)
        except KeyboardInterrupt:
            pool.shutdown(cancel_futures=True)
            print("\ninterrupted; the same command goes on", file=sys.stderr)
            return 130
    outcome = study.outcome()
    if not outcome["runs"]:
        print(f"no runs in {args.runs}", file=sys.stderr)
        return 1
    write(outcome, args.out)
    print(summary(outcome) + "\n\n" + markdown(outcome))
    if failed:
        print(f"{failed} runs failed; the same command tries them again", file=sys.stderr)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
