"""What came out of the demo: the table, metrics.json, the learning curves and the panel of nearest neighbours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from rambo_plugins.demo.data import ImageClasses
from rambo_plugins.demo.identity import versions
from rambo_plugins.demo.train import KS, METRICS, Run
from rambo_plugins.evaluation import RecallCalculator
from rambo_plugins.evaluation.search import nearest

TITLES = dict(zip(METRICS, ("R@1", "R@2", "R@4", "R@8", "MAP@R"), strict=True))
RIGHT, WRONG = "#1a9641", "#d7191c"


def summary(results: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Of each loss, the mean and the sample standard deviation over the seeds, 0 for one seed: the metrics after the
    last epoch, and the seconds of training."""
    table = {}
    for loss_name in dict.fromkeys(result["loss"] for result in results):
        histories = [result["history"] for result in results if result["loss"] == loss_name]
        values = {name: [history[-1][name] for history in histories] for name in METRICS}
        values["seconds"] = [sum(epoch["seconds"] for epoch in history) for history in histories]
        table[loss_name] = {
            name: {"mean": float(np.mean(seeds)), "std": float(np.std(seeds, ddof=min(1, len(seeds) - 1)))}
            for name, seeds in values.items()
        }
    return table


def markdown_table(table: dict[str, dict[str, dict[str, float]]]) -> str:
    """The summary in percent, mean ± standard deviation."""
    lines = [f"| loss | {' | '.join(TITLES.values())} |", f"|---|{'---|' * len(TITLES)}"]
    for loss_name, row in table.items():
        cells = [f"{100 * row[name]['mean']:.1f} ± {100 * row[name]['std']:.1f}" for name in METRICS]
        lines.append(f"| {loss_name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw_curves(results: list[dict[str, Any]], path: Path) -> None:
    """R@1 and MAP@R on the test set by epoch: the mean over the seeds, and their range as a band."""
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, name in zip(figure.subplots(1, 2), ("recall_at_1", "mean_average_precision_at_r"), strict=True):
        for loss_name in dict.fromkeys(result["loss"] for result in results):
            runs = [result["history"] for result in results if result["loss"] == loss_name]
            values = 100 * np.array([[epoch[name] for epoch in history] for history in runs])
            epochs = [epoch["epoch"] for epoch in runs[0]]
            (line,) = axes.plot(epochs, values.mean(0), marker="o", markersize=3, label=loss_name)
            axes.fill_between(epochs, values.min(0), values.max(0), color=line.get_color(), alpha=0.15, linewidth=0)
        axes.set_xlabel("epoch")
        axes.set_title(f"{TITLES[name]} on classes never seen, %")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def draw_neighbours(run: Run, path: Path, rows: int = 8, columns: int = 2, neighbours: int = 5) -> None:
    """Queries drawn with the run's seed, and their nearest neighbours, as in the paper's Fig. 4.

    As many classes as there are take part. A neighbour of the query's class is framed green, any other one red.
    """
    data, embeddings = run.test_set, run.test_embeddings().numpy()
    generator = np.random.default_rng(run.seed)
    classes = np.resize(generator.permutation(len(data.class_names)), rows * columns)
    queries = np.array([generator.choice(np.flatnonzero(data.labels.numpy() == label)) for label in classes])
    _, neighbour_rows, _ = nearest(embeddings[queries], queries, [(0, embeddings)], neighbours, "inner_product")

    figure = Figure(figsize=(columns * (neighbours + 1.6) * 0.62, rows * 0.66), layout="constrained")
    ratios = ([1.0] * (neighbours + 1) + [0.35]) * columns
    grid = figure.subplots(rows, len(ratios), gridspec_kw={"width_ratios": ratios})
    for axes in grid.flat:
        axes.axis("off")
    for place, (query, found) in enumerate(zip(queries, neighbour_rows, strict=True)):
        row, first = place % rows, place // rows * (neighbours + 2)
        _draw_image(grid[row, first], data, query, None)
        for column, item in enumerate(found):
            colour = RIGHT if data.labels[item] == data.labels[query] else WRONG
            _draw_image(grid[row, first + 1 + column], data, item, colour)
    figure.suptitle(f"{run.loss_name}: queries, and their {neighbours} nearest among {len(data):,}", fontsize=9)
    figure.savefig(path, dpi=150)


def _draw_image(axes: Any, data: ImageClasses, item: int, frame: str | None) -> None:
    axes.axis("on")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.imshow(1 - data.images[item, 0].numpy(), cmap="gray", vmin=0, vmax=1)
    for spine in axes.spines.values():
        spine.set_visible(frame is not None)
        spine.set_color(frame)
        spine.set_linewidth(2)


def raw_pixels(data: ImageClasses) -> dict[str, float]:
    """What the nearest neighbours by the cosine of the pixels reach, without any training."""
    return RecallCalculator(ks=KS, normalize=True).get_accuracy(data.images.flatten(1), data.labels)


def metrics(runs: list[Run], threads: int) -> dict[str, Any]:
    """Everything for metrics.json."""
    results = [{"loss": run.loss_name, "seed": run.seed, "history": run.history} for run in runs]
    settings = {**vars(runs[0].settings), "device": str(runs[0].device), "threads": threads}
    sets = {
        side: {"images": len(data), "classes": len(data.class_names), "digest": data.digest}
        for side, data in (("train", runs[0].train_set), ("test", runs[0].test_set))
    }
    return {
        "settings": settings,
        "data": sets,
        "versions": versions(),
        "cuda": torch.version.cuda if runs[0].device.type == "cuda" else None,
        "raw_pixels": raw_pixels(runs[0].test_set),
        "summary": summary(results),
        "results": results,
    }
