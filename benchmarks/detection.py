"""Cross-entropy against RaMBO in a detector small enough for a CPU, trained from scratch: mean AP over seeds.

``python benchmarks/detection.py --data glyphs --variants ce rambo --lrs 5e-4 1e-3 2e-3 --seeds 0 1 2``

Each run (data, toolkit, variant, learning rate, seed) writes ``OUT/DATA/TOOLKIT-VARIANT-lrLR-seedSEED/result.json``;
one that is there is not run again, one that was interrupted goes on from its last epoch. ``--report`` only collects.
The data are glyph scenes, drawn here, or BCCD (``--data bccd --bccd PATH``), see ``detection_data.py``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import statistics
import time
from pathlib import Path
from typing import Any

import detection_data
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

BLEND = {"use_sigmoid": False, "margin": 0.02, "loss_weight": 10.0, "aux_weight": 0.1}  # cross-entropy has weight 1
VARIANTS: dict[str, dict[str, Any] | None] = {
    "ce": None,  # the toolkit's own cross-entropy
    "ce-weight3": {"type": "CrossEntropyLoss", "use_sigmoid": False, "loss_weight": 3.0},
    "rambo": {},
    "rambo-probabilities": {"score_space": "probabilities"},
    "rambo-probabilities-margin0.02": {"score_space": "probabilities", "margin": 0.02},
    "rambo-softmax": {"use_sigmoid": False},
    "rambo-lambda0.1": {"lambda_val": 0.1},
    "rambo-lambda2.5": {"lambda_val": 2.5},
    "rambo-lambda4-margin1": {"lambda_val": 4.0, "margin": 1.0},
    "rambo-no-margin": {"margin": 0.0},
    "rambo-no-memory": {"memory": 0},
    "rambo-weight4": {"loss_weight": 4.0},
    "rambo-weight30": {"loss_weight": 30.0},
    "rambo-log": {"precision_loss": "log"},
    "rambo-log-softmax": {"precision_loss": "log", "use_sigmoid": False, "margin": 0.02},
    "rambo-log-blend": {"precision_loss": "log", "use_sigmoid": False, "margin": 0.02, "aux_weight": 1.0},
    "rambo-log-aux": {"precision_loss": "log", "aux_weight": 1.0},
    "rambo-aux": {"aux_weight": 1.0},
    "rambo-aux-fading": {"aux_weight": 1.0, "aux_steps": 300},
    "rambo-blend10": BLEND,
    "rambo-blend10-lambda0.1": {**BLEND, "lambda_val": 0.1},
    "rambo-blend10-lambda2.5": {**BLEND, "lambda_val": 2.5},
    "rambo-blend10-no-memory": {**BLEND, "memory": 0},
}


def evaluate(data: detection_data.DetectionData, detections: Path) -> dict[str, Any]:
    """AP (IoU 0.5 to 0.95), AP50, and both per class, in [0, 1], of detections in COCO's result format."""
    truth = COCO(data.test)
    evaluation = COCOeval(truth, truth.loadRes(str(detections)), "bbox")
    evaluation.evaluate()
    evaluation.accumulate()
    precision = evaluation.eval["precision"][:, :, :, 0, -1]  # (IoU thresholds, recalls, classes), -1: no such object

    def mean(values: Any) -> float:
        return float(values[values > -1].mean())

    return {
        "AP": mean(precision),
        "AP50": mean(precision[0]),
        "AP_per_class": {name: mean(precision[:, :, k]) for k, name in enumerate(data.classes)},
        "AP50_per_class": {name: mean(precision[0, :, k]) for k, name in enumerate(data.classes)},
    }


def run(data: detection_data.DetectionData, args: argparse.Namespace, variant: str, lr: float, seed: int) -> None:
    folder = args.out / data.name / f"{args.toolkit}-{variant}-lr{lr:g}-seed{seed}"
    if (folder / "result.json").exists():
        return
    start = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    train = importlib.import_module(f"detection_{args.toolkit}").train
    curve = train(data, VARIANTS[variant], lr=lr, seed=seed, epochs=args.epochs, batch=args.batch, folder=folder)
    outcome = {
        "data": data.name, "toolkit": args.toolkit, "variant": variant, "lr": lr, "seed": seed, "epochs": args.epochs,
        "batch": args.batch, "loss": VARIANTS[variant], "seconds": time.perf_counter() - start, "curve": curve,
        **evaluate(data, folder / "detections.bbox.json"),
    }  # fmt: skip
    (folder / "result.json").write_text(json.dumps(outcome, indent=1) + "\n")
    print(f"{folder.name}: AP50 {outcome['AP50']:.3f}, AP {outcome['AP']:.3f}, {outcome['seconds']:.0f} s", flush=True)


def collect(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*/*/result.json"))]


def markdown(results: list[dict[str, Any]]) -> str:
    """One line for each data set, toolkit, loss and learning rate: mean ± standard deviation over the seeds, in %."""
    lines = ["| data | toolkit | loss | lr | seeds | AP50 | AP | AP50 by epoch |", "|---|---|---|---|---|---|---|---|"]
    keys = ("data", "toolkit", "variant", "lr")
    for group in sorted({tuple(result[key] for key in keys) for result in results}):
        runs = [result for result in results if tuple(result[key] for key in keys) == group]

        def spread(values: list[float]) -> str:
            text = f"{100 * statistics.mean(values):.1f}"
            return f"{text} ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else text

        steps = zip(*(result["curve"] for result in runs), strict=False)
        curve = ", ".join(f"{100 * statistics.mean(p['AP50'] for p in points):.1f}" for points in steps)
        name, toolkit, variant, lr = group
        figures = " | ".join(spread([result[metric] for result in runs]) for metric in ("AP50", "AP"))
        lines.append(f"| {name} | {toolkit} | {variant} | {lr:g} | {len(runs)} | {figures} | {curve} |")
    return "\n".join(lines)


def draw(data: detection_data.DetectionData, folders: dict[str, Path], path: Path, images: int = 4) -> None:
    """The same test images with the detections of each run: as many boxes as there are objects, the best ones."""
    truth = json.loads(Path(data.test).read_text())
    figure = Figure(figsize=(3.2 * images, 3.2 * (len(folders) + 1)), layout="constrained")
    grid = figure.subplots(len(folders) + 1, images)
    found = {name: json.loads((folder / "detections.bbox.json").read_text()) for name, folder in folders.items()}
    for row, (name, boxes) in enumerate({"truth": truth["annotations"], **found}.items()):
        for axes, image in zip(grid[row], truth["images"][:images], strict=True):
            axes.imshow(Image.open(Path(data.images, image["file_name"])))
            axes.axis("off")
            mine = sorted((b for b in boxes if b["image_id"] == image["id"]), key=lambda b: -b.get("score", 0))
            objects = sum(a["image_id"] == image["id"] for a in truth["annotations"])
            for box in mine[:objects]:
                x, y, width, height = box["bbox"]
                axes.add_patch(Rectangle((x, y), width, height, fill=False, color="red", linewidth=1.2))
                axes.text(x, y, data.classes[box["category_id"]], color="red", fontsize=9, va="bottom")
        grid[row][0].set_title(name, loc="left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)


def draw_classes(results: list[dict[str, Any]], path: Path) -> None:
    """AP of each class, the mean over the seeds, of each toolkit and loss of one data set at its best learning rate."""
    best: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for group in {(r["toolkit"], r["variant"], r["lr"]) for r in results}:
        runs = [r for r in results if (r["toolkit"], r["variant"], r["lr"]) == group]
        others = best.get(group[:2])
        if others is None or _mean_ap(runs) > _mean_ap(others):
            best[group[:2]] = runs
    figure = Figure(figsize=(9, 3.5), layout="constrained")
    axes = figure.subplots()
    classes = list(results[0]["AP_per_class"])
    width = 0.8 / len(best)
    for number, ((toolkit, variant), runs) in enumerate(sorted(best.items())):
        heights = [100 * statistics.mean(run["AP_per_class"][name] for run in runs) for name in classes]
        places = [k + (number - (len(best) - 1) / 2) * width for k in range(len(classes))]
        axes.bar(places, heights, width, label=f"{toolkit} {variant}, lr {runs[0]['lr']:g}, n = {len(runs)}")
    axes.set(xticks=range(len(classes)), xticklabels=classes, ylabel="AP in %", xlabel="class, the frequent ones first")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=80)


def _mean_ap(runs: list[dict[str, Any]]) -> float:
    return statistics.mean(run["AP"] for run in runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--toolkit", default="mmdet", choices=["mmdet", "detectron2"])
    parser.add_argument("--data", default="glyphs", choices=["glyphs", "glyphs-unlabelled", "bccd"],
                        help="-unlabelled: a quarter of the training letters lacks its box")  # fmt: skip
    parser.add_argument("--bccd", type=Path, help="the folder of BCCD: Annotations, ImageSets, JPEGImages")
    parser.add_argument("--variants", nargs="+", default=["ce", "rambo"], choices=list(VARIANTS), metavar="VARIANT",
                        help=", ".join(VARIANTS))  # fmt: skip
    parser.add_argument("--lrs", nargs="+", type=float, default=[1e-3])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--pages", nargs=2, type=int, default=[480, 240], help="glyph pages to train on, to test on")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/detection"))
    parser.add_argument("--report", action="store_true", help="run nothing, collect what is there")
    parser.add_argument("--draw", nargs=2, metavar="RUN", help="two run folders' names whose detections to draw")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.data == "bccd" and args.bccd is None:
        parser.error("--data bccd needs --bccd PATH")
    if args.data == "bccd":
        data = detection_data.bccd(args.bccd.resolve(), args.out.resolve() / "data" / "bccd")
    else:
        unlabelled = 0.25 if args.data == "glyphs-unlabelled" else 0.0
        data = detection_data.glyph_scenes(args.out.resolve() / "data" / args.data, *args.pages, args.data, unlabelled)
    for seed in args.seeds:
        for lr in args.lrs:
            for variant in args.variants:
                if not args.report:
                    run(data, args, variant, lr, seed)
    results = collect(args.out)
    (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    table = markdown(results)
    (args.out / "results.md").write_text(table + "\n")
    print(table)
    for name in {result["data"] for result in results}:
        draw_classes([result for result in results if result["data"] == name], args.out / f"{name}_classes.png")
    if args.draw:
        folders = {name: args.out / data.name / name for name in args.draw}
        draw(data, folders, args.out / f"{data.name}.jpg")


if __name__ == "__main__":
    main()
