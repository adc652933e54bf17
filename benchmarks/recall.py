"""Time and memory of Recall@K against pytorch-metric-learning's calculator, plain faiss and a top-k of torch.

    python benchmarks/recall.py --folder FOLDER                       # everything; 3 GB of arrays in the folder
    python benchmarks/recall.py --problems sop inshop --repeats 1     # a part of it

Embeddings of unit length made with a seed, 512-d: an SOP-sized test set that searches in itself, also without classes
and with tight ones, which leave more and less to decide exactly, an In-shop-sized query and gallery, a gallery of a
million in a memory map with 10,000 queries, and subsets of the first for the growth with N.
Every run is a process of its own; in each repetition the competitors run one after the other, so that what the table
gives, the ratio of medians, is of one time. Seconds are those of the evaluation, memory is the peak above what the
process held when the embeddings were loaded (``ru_maxrss``). Competitors:

- count: ``recall_at_k``, our default; search: the same by lists of neighbours;
- faiss: ``faiss.knn`` for the largest K plus the query itself, nothing else;
- topk: blocks of 1,024 queries, a matrix product and ``torch.topk`` for as many, then the hits;
- pml: ``AccuracyCalculator()`` as it comes, only where it is expected to fit into half of the memory that is free.

All but pml compute Recall@K for the problem's four or five K. An interrupted run goes on after the last run that ended.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

DIM = 512
SOP_KS = (1, 10, 100, 1000)
PML_BYTES_PER_PAIR = 12  # a float32 distance and an int64 row for each pair, at the least


@dataclass(frozen=True)
class Problem:
    num_queries: int
    num_gallery: int | None  # None: the queries search among themselves
    num_classes: int
    ks: tuple[int, ...]
    methods: tuple[str, ...]
    max_memory: str | None = None
    mapped: bool = False
    noise: float | None = 2.4  # of a row around the centre of its class, each of length √D; None: no centres
    title: str = ""


ALL = ("count", "search", "faiss", "topk", "pml")
PROBLEMS = {
    **{f"self-{num}": Problem(num, None, num // 5, SOP_KS, ALL) for num in (5_000, 10_000, 20_000)},
    "sop": Problem(60_502, None, 11_316, SOP_KS, ALL),
    "sop-random": Problem(60_502, None, 11_316, SOP_KS, ("count", "faiss"), noise=None, title=", no classes"),
    "sop-trained": Problem(60_502, None, 11_316, SOP_KS, ("count", "faiss"), noise=1.0, title=", tight classes"),
    "inshop": Problem(14_218, 12_612, 3_985, (1, 10, 20, 30, 50), ALL),
    "million": Problem(10_000, 1_000_000, 100_000, SOP_KS, ("count", "faiss"), "2G", mapped=True),
    "tiny": Problem(300, 400, 50, (1, 10), ALL, mapped=True),  # to see that all runs
}


def embeddings(labels: np.ndarray, num_classes: int, seed: int, noise: float | None) -> np.ndarray:
    """Unit vectors around a random centre of each class, as far from it as ``noise`` says."""
    centres = np.random.default_rng(0).standard_normal((num_classes, DIM), dtype=np.float32)
    rng = np.random.default_rng(seed)
    rows = np.empty((len(labels), DIM), np.float32)
    for start in range(0, len(labels), 65_536):
        part = labels[start : start + 65_536]
        noisy = rng.standard_normal((len(part), DIM), dtype=np.float32)
        if noise is not None:
            noisy = centres[part] + noise * noisy
        rows[start : start + len(part)] = noisy / np.linalg.norm(noisy, axis=1, keepdims=True)
    return rows


def make(name: str, folder: Path) -> None:
    """The problem's arrays as .npy files."""
    problem = PROBLEMS[name]
    sides = {"query": problem.num_queries} | ({} if problem.num_gallery is None else {"gallery": problem.num_gallery})
    for seed, (side, num) in enumerate(sides.items(), start=1):
        path = folder / f"{name}-{side}.npy"
        if path.exists():
            continue
        labels = np.random.default_rng(seed).permutation(np.arange(num) % problem.num_classes)
        np.save(folder / f"{name}-{side}-labels.npy", labels)
        np.save(path.with_suffix(".unfinished.npy"), embeddings(labels, problem.num_classes, seed, problem.noise))
        path.with_suffix(".unfinished.npy").rename(path)


Arrays = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]


def ours(method: str) -> Callable[[Problem, Arrays], dict[int, float]]:
    def run(problem: Problem, arrays: Arrays) -> dict[int, float]:
        from rambo_plugins.evaluation import recall_at_k

        return recall_at_k(*arrays, problem.ks, method=method, max_memory=problem.max_memory).recall

    return run


def plain_faiss(problem: Problem, arrays: Arrays) -> dict[int, float]:
    import faiss

    query, _, gallery, _ = arrays
    same = gallery is None
    faiss.knn(query, query if same else gallery, problem.ks[-1] + same, metric=faiss.METRIC_INNER_PRODUCT)
    return {}


def torch_topk(problem: Problem, arrays: Arrays) -> dict[int, float]:
    import torch

    query, query_labels, gallery, gallery_labels = (None if a is None else torch.from_numpy(a) for a in arrays)
    same = gallery is None
    items, item_labels = (query, query_labels) if same else (gallery, gallery_labels)
    hits = torch.zeros(len(problem.ks))
    for start in range(0, len(query), 1024):
        scores = query[start : start + 1024] @ items.T
        if same:
            own = torch.arange(len(scores))
            scores[own, own + start] = -torch.inf
        found = scores.topk(problem.ks[-1], dim=1).indices
        relevant = item_labels[found] == query_labels[start : start + 1024, None]
        hits += torch.stack([relevant[:, :k].any(dim=1).sum() for k in problem.ks])
    return {k: float(hit) / len(query) for k, hit in zip(problem.ks, hits, strict=True)}


def pml(problem: Problem, arrays: Arrays) -> dict[int, float]:
    import torch
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    tensors = [None if array is None else torch.from_numpy(array) for array in arrays]
    return {1: AccuracyCalculator().get_accuracy(*tensors)["precision_at_1"]}


METHODS: dict[str, Callable[[Problem, Arrays], dict[int, float]]] = {
    "count": ours("count"),
    "search": ours("search"),
    "faiss": plain_faiss,
    "topk": torch_topk,
    "pml": pml,
}


def measure(name: str, method: str, folder: Path, threads: int) -> dict[str, Any]:
    """One run, in this process: seconds, bytes of peak memory above that before, before itself, and Recall@K."""
    import faiss
    import torch

    faiss.omp_set_num_threads(threads)
    torch.set_num_threads(threads)
    problem = PROBLEMS[name]
    rng = np.random.default_rng(0)
    small = rng.standard_normal((300, 8), dtype=np.float32), np.arange(300) % 50, None, None
    METHODS[method](Problem(300, None, 50, (1, 10), ()), small)  # imports and starts what the run will use
    imported = peak()

    def load(side: str, mode: Any = None) -> np.ndarray | None:
        path = folder / f"{name}-{side}.npy"
        return np.load(path, mmap_mode=mode) if path.exists() else None

    arrays = (
        load("query"),
        load("query-labels"),
        load("gallery", "r" if problem.mapped else None),
        load("gallery-labels"),
    )
    before, start = peak(), time.perf_counter()
    recall = METHODS[method](problem, arrays)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "above": peak() - before, "above_imports": peak() - imported, "before": before,
            "recall": recall}  # fmt: skip


def peak() -> int:
    """Bytes of the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def fits(name: str, method: str) -> bool:
    problem = PROBLEMS[name]
    pairs = problem.num_queries * (problem.num_gallery or problem.num_queries)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # with what its figures need besides, five times as much was seen
    return method != "pml" or 6 * PML_BYTES_PER_PAIR * pairs < free / 2


def run_apart(name: str, method: str, args: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, __file__, "--measure", name, method, "--folder", args.folder]
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "MKL_NUM_THREADS": str(args.threads)}
    done = subprocess.run(
        [*map(str, command), "--threads", str(args.threads)], capture_output=True, text=True, env=environment
    )
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def summary(runs: list[dict[str, Any]]) -> dict[str, dict[str, dict[str, float]]]:
    """Medians: problem -> method -> seconds, above, above_imports."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name in PROBLEMS:
        for method in METHODS:
            mine = [run for run in runs if (run["problem"], run["method"]) == (name, method) and "error" not in run]
            if mine:
                found.setdefault(name, {})[method] = {
                    figure: statistics.median(run[figure] for run in mine)
                    for figure in ("seconds", "above", "above_imports")
                }
    return found


def extrapolated_pml(medians: dict[str, dict[str, dict[str, float]]]) -> tuple[str, float]:
    """The largest of the problems self-… that pml ran, and the memory it would take at SOP's size, growing with N²."""
    name = max(
        (name for name in medians if name.startswith("self-") and "pml" in medians[name]),
        key=lambda name: PROBLEMS[name].num_queries,
    )
    return name, medians[name]["pml"]["above"] * (PROBLEMS["sop"].num_queries / PROBLEMS[name].num_queries) ** 2


def size_of(name: str) -> str:
    problem = PROBLEMS[name]
    return f"{problem.num_queries:,} × {problem.num_gallery or problem.num_queries:,}{problem.title}"


def markdown(outcome: dict[str, Any]) -> str:
    """A line a problem: seconds and memory of each competitor, and their ratios to counting."""
    medians = summary(outcome["runs"])
    lines = [
        "| queries × gallery (512-d) | " + " | ".join(METHODS) + " |",
        "|---|" + "---|" * len(METHODS),
    ]
    for name, by_method in medians.items():
        base = by_method.get("count")
        cells = []
        for method in METHODS:
            one = by_method.get(method)
            if one is None:
                cells.append("–")
                continue
            cell = f"{one['seconds']:.1f} s, {one['above'] / 1e9:.2f} GB"
            if method != "count" and base:
                cell += f" ({one['seconds'] / base['seconds']:.2f}×, {one['above'] / base['above']:.1f}×)"
            cells.append(cell)
        lines.append(f"| {size_of(name)} | " + " | ".join(cells) + " |")
    if any("pml" in by_method for name, by_method in medians.items() if name.startswith("self-")) and "sop" in medians:
        name, extrapolated = extrapolated_pml(medians)
        times = extrapolated / medians["sop"]["count"]["above"]
        lines += ["", f"pml at 60,502 × 60,502, by N² from {size_of(name)}: {extrapolated / 1e9:.0f} GB, {times:.0f}×"]
    if "million" in medians and "count" in medians["million"]:
        above = medians["million"]["count"]["above_imports"]
        lines += ["", f"1,000,000 from a memory map, max_memory=2G: {above / 2**30:.2f} GiB above the interpreter"]
    return "\n".join(lines)


def draw(outcome: dict[str, Any], path: Path) -> None:
    """Seconds and memory over N, of the searches in themselves."""
    from matplotlib.figure import Figure

    medians = summary(outcome["runs"])
    names = sorted((n for n in medians if n == "sop" or n.startswith("self-")), key=lambda n: PROBLEMS[n].num_queries)
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, key, unit, label in zip(
        figure.subplots(1, 2), ("seconds", "above"), (1, 1e9), ("seconds", "GB above the embeddings"), strict=True
    ):
        for method in METHODS:
            points = [(PROBLEMS[n].num_queries, medians[n][method][key] / unit) for n in names if method in medians[n]]
            if points:
                axes.plot(*zip(*points, strict=True), "o-", label=method)
        axes.set(xscale="log", yscale="log", xlabel="N, each against all others, 512-d", ylabel=label)
        sizes = [PROBLEMS[name].num_queries for name in names]
        axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.legend()
    figure.savefig(path, dpi=120)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--problems", nargs="+", choices=PROBLEMS, default=[name for name in PROBLEMS if name != "tiny"]
    )
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--folder", type=Path, default=Path("runs/recall"), help="for the arrays; may be deleted after")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "recall", help="without suffix")
    parser.add_argument("--report", action="store_true", help="no runs, only the tables and the plot")
    parser.add_argument("--measure", nargs=2, metavar=("PROBLEM", "METHOD"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    if args.measure is not None:
        print(json.dumps(measure(*args.measure, args.folder, args.threads)))
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    results = args.out.with_suffix(".json")
    outcome: dict[str, Any] = {
        "settings": {
            "dimensions": DIM,
            "threads": args.threads,
            "processor": platform.processor() or platform.machine(),
        },
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("torch", "numpy", "faiss-cpu", "pytorch-metric-learning", "rambo-plugins")
        },
        "runs": [],
    }
    if results.exists():
        found = json.loads(results.read_text())
        if any(found[key] != outcome[key] for key in ("settings", "versions")):
            raise SystemExit(
                f"{results} was measured with other settings or versions; choose another --out or remove it"
            )
        outcome = found
    if not args.report:
        have = {(run["problem"], run["method"], run["repeat"]) for run in outcome["runs"]}
        wanted = [
            (name, method, repeat)
            for name in args.problems
            for repeat in range(args.repeats)
            for method in PROBLEMS[name].methods
            if method in args.methods and (name, method, repeat) not in have and fits(name, method)
        ]
        bar = tqdm(wanted, disable=False)
        for name, method, repeat in bar:
            bar.set_description(f"{name} {method}")
            make(name, args.folder)
            run = {"problem": name, "method": method, "repeat": repeat, **run_apart(name, method, args)}
            if "error" in run:
                bar.write(f"{name}, {method}: {run['error']}")
            outcome["runs"].append(run)
            lines = ",\n".join("  " + json.dumps(run) for run in outcome["runs"])
            text = json.dumps({**outcome, "runs": None}, indent=1).replace('"runs": null', f'"runs": [\n{lines}\n ]')
            results.with_suffix(".unfinished").write_text(text + "\n")
            results.with_suffix(".unfinished").replace(results)
    draw(outcome, args.out.with_suffix(".png"))
    print(markdown(outcome))


if __name__ == "__main__":
    main()
