"""Speed of the average-precision loss, forward and backward, against other ways to compute it: Table 6 of the paper.

    python benchmarks/speed.py                              # N from 1,000 to 100 million, 20 minutes
    python benchmarks/speed.py --largest 1e6 --out speed    # writes speed.json and speed.png

All in one run, one after the other on the same scores, median of up to nine repetitions (one, where a run takes longer
than 15 s); what the table gives is the ratio. Competitors: ours without numba (``core/counting.py``); two full sorts
(``core/sorting.py``); a loop over the relevant items, the way AP-loss computes its exact gradient; binary cross-entropy
on the same scores as the floor; PML's FastAP and SmoothAP where the similarity matrix of a batch fits.
Scores are normal; "trained" are those where the relevant items lie 5 standard deviations higher. The peak memory is
that of a process of its own for each N. An interrupted run goes on after the last problem that it measured. At 4,096 ×
65,536 two sorts need 22 GB.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from matplotlib.figure import Figure
from torch.nn.functional import binary_cross_entropy_with_logits
from tqdm import tqdm

from rambo_plugins.core import average_precision_loss, counting, kernels, sorting

SIZES = [10**k for k in range(3, 9)]
SHARES = [1e-4, 1e-3, 1e-2, 1e-1, 0.5]
TRAINED = [(1, 10**6, 10**3), (1, 10**6, 10**4), (1, 10**6, 10**5)]
ROWS = [(128, 128, 3), (128, 512, 12), (256, 65_536, 4), (4096, 65_536, 4), (80, 4096, 50)]
OPTIONS = {"lambda_val": 0.5, "margin": 0.15}
REPEAT_LIMIT = 15.0  # seconds after which a measurement is not repeated
TIME_LIMIT = 10.0  # seconds that the loop over N·P pairs may be expected to take, from its time on the last problem


def problem(
    num_rows: int, num_items: int, num_relevant: int, device: str, higher: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normal scores, relevant items anywhere, their scores ``higher``."""
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(num_rows, num_items, generator=generator)
    relevance = torch.zeros(num_rows, num_items, dtype=torch.bool)
    places = torch.randint(num_items, (num_rows, num_relevant), generator=generator)
    relevance.scatter_(1, places, True)
    if higher:
        scores += higher * relevance
    return scores.to(device).requires_grad_(), relevance.to(device)


def ours(scores: torch.Tensor, relevance: torch.Tensor) -> None:
    average_precision_loss(scores, relevance, **OPTIONS).backward()


def without_numba(scores: torch.Tensor, relevance: torch.Tensor) -> None:
    with mock.patch.object(kernels, "kernel_for", return_value=counting):
        ours(scores, relevance)


def two_sorts(scores: torch.Tensor, relevance: torch.Tensor) -> None:
    with mock.patch.object(kernels, "kernel_for", return_value=sorting):
        ours(scores, relevance)


def cross_entropy(scores: torch.Tensor, relevance: torch.Tensor) -> None:
    binary_cross_entropy_with_logits(scores, relevance.to(scores.dtype)).backward()


def loop_over_relevant(scores: torch.Tensor, relevance: torch.Tensor) -> None:
    """AP-loss's error-driven gradient (Chen et al., CVPR 2019): for each relevant item, those irrelevant within δ."""
    with torch.no_grad():
        delta, grad = OPTIONS["margin"], torch.zeros_like(scores)
        for row, (values, relevant) in enumerate(zip(scores, relevance, strict=True)):
            positive, places = values[relevant], relevant.nonzero()[:, 0]
            irrelevant = ~relevant
            near = irrelevant & (values >= positive.min() - delta)
            candidates, candidate_places = values[near], near.nonzero()[:, 0]
            for value, place in zip(positive.tolist(), places.tolist(), strict=True):
                above_irrelevant = ((candidates - value) / (2 * delta) + 0.5).clamp_(0, 1)
                above_relevant = ((positive - value) / (2 * delta) + 0.5).clamp_(0, 1)
                share = above_irrelevant / (0.5 + above_relevant.sum() + above_irrelevant.sum()) / len(positive)
                grad[row, candidate_places] += share
                grad[row, place] -= share.sum()
        scores.grad = grad


COMPETITORS: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "ours": ours,
    "without numba": without_numba,
    "two sorts": two_sorts,
    "loop over relevant": loop_over_relevant,
    "cross-entropy": cross_entropy,
}


def seconds(run: Callable[[], None], device: str) -> float:
    """Median of up to nine repetitions, after one that does not count, as many as fit into ``REPEAT_LIMIT``."""
    times: list[float] = []
    while len(times) < 10 and sum(times) < REPEAT_LIMIT:
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:] or times)


def measure(
    num_rows: int, num_items: int, num_relevant: int, device: str, seconds_a_pair: float, higher: float = 0.0
) -> dict[str, float]:
    """Seconds of each competitor; of the loop only where its ``seconds_a_pair`` promise an end."""
    scores, relevance = problem(num_rows, num_items, num_relevant, device, higher)
    times = {}
    for name, run in COMPETITORS.items():
        pairs = num_rows * num_items * num_relevant
        if run is loop_over_relevant and (pairs * seconds_a_pair > TIME_LIMIT or num_rows > 1000):
            continue
        if run is without_numba and (device != "cpu" or not counting.is_faster(scores, relevance)):
            continue  # it would sort twice

        def once(run: Callable[[torch.Tensor, torch.Tensor], None] = run) -> None:
            scores.grad = None
            run(scores, relevance)

        times[name] = seconds(once, device)
    return times


def metric_learning(batch: int, device: str) -> dict[str, float]:
    """Seconds of a batch of embeddings through PML's rank losses and ours, the similarity matrix included."""
    from pytorch_metric_learning.losses import FastAPLoss, SmoothAPLoss

    from rambo_plugins.pml import RamboAPLoss

    generator = torch.Generator().manual_seed(0)
    embeddings = torch.randn(batch, 64, generator=generator).to(device).requires_grad_()
    labels = torch.arange(batch // 4).repeat_interleave(4).to(device)
    losses = {"ours": RamboAPLoss(), "FastAP": FastAPLoss()}
    if batch <= 512:  # SmoothAP makes B³ floats
        losses["SmoothAP"] = SmoothAPLoss()
    return {
        name: seconds(lambda loss=loss: loss(embeddings, labels).backward(), device) for name, loss in losses.items()
    }


def peak_memory(num_items: int, num_relevant: int) -> int:
    """Bytes at most resident in a process that makes the problem and computes our loss and its gradient."""
    command = [sys.executable, __file__, "--memory-of", str(num_items), str(num_relevant)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _peak_of_this_process() -> int:
    status = Path("/proc/self/status")  # the counter of getrusage starts at what the parent process had
    if status.exists():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def slope(points: list[dict], name: str) -> float:
    """Least-squares slope of log time over log N, from N = 100,000 on, at P/N = 1 %."""
    chosen = [(p["items"], p["seconds"][name]) for p in points if p["share"] == 0.01 and p["items"] >= 10**5]
    x, y = (torch.tensor(values, dtype=torch.float64).log() for values in zip(*chosen, strict=True))
    return float(((x - x.mean()) * (y - y.mean())).sum() / ((x - x.mean()) ** 2).sum())


def draw(points: list[dict], path: Path) -> None:
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    shares = [share for share in SHARES if any(p["share"] == share for p in points)][-4:]
    for axes, share in zip(figure.subplots(1, len(shares), sharey=True), shares, strict=True):
        for name in COMPETITORS:
            line = [
                (p["items"], 1e3 * p["seconds"][name]) for p in points if p["share"] == share and name in p["seconds"]
            ]
            if not line:
                continue
            axes.loglog(*zip(*line, strict=True), marker="o", markersize=3, label=name)
        axes.set_title(f"P/N = {share:g}")
        axes.set_xlabel("N")
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("forward + backward, ms")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=120)


def markdown(points: list[dict]) -> str:
    """One line a problem: our time, and how many times as long the others take."""
    others = [name for name in COMPETITORS if name != "ours"]
    lines = [f"| rows × N, P | ours | {' | '.join(others)} |", f"|---|---|{'---|' * len(others)}"]
    for p in points:
        own = p["seconds"]["ours"]
        ratios = [f"{p['seconds'][n] / own:.2g} ×" if n in p["seconds"] else "–" for n in others]
        problem_of = f"{p['rows']:,} × {p['items']:,}, {p['relevant']:,}" + ", trained" * p["trained"]
        lines.append(f"| {problem_of} | {1e3 * own:,.2f} ms | {' | '.join(ratios)} |")
    return "\n".join(lines)


def _key(point: dict) -> tuple:
    return tuple(point[name] for name in ("rows", "items", "relevant", "trained"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--largest", type=float, default=1e8, help="N of the longest row")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "speed")
    parser.add_argument("--memory-of", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.memory_of:
        ours(*problem(1, *args.memory_of, "cpu"))
        print(_peak_of_this_process())
        return

    shapes = [(1, n, max(1, round(n * share)), share, 0.0) for share in SHARES for n in SIZES if n <= args.largest]
    shapes = [shape for shape in shapes if shape[1] * shape[3] >= 1]
    shapes += [(*rows, None, 5.0) for rows in TRAINED if rows[1] <= args.largest]
    shapes += [(*rows, None, 0.0) for rows in ROWS if rows[0] * rows[1] <= args.largest * 4]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = args.out.with_suffix(".unfinished.json")
    setting = {
        "device": args.device if args.device == "cpu" else torch.cuda.get_device_name(),
        "threads": args.threads,
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("torch", "pytorch-metric-learning", "numba")},
        },
        "seed": 0,
    }
    before = json.loads(unfinished.read_text()) if unfinished.exists() else {}
    done = {_key(p): p for p in before["points"]} if before.get("setting") == setting else {}
    points: list[dict] = []
    seconds_a_pair = 0.0
    for num_rows, num_items, num_relevant, share, higher in tqdm(shapes):
        point = {
            "rows": num_rows, "items": num_items, "relevant": num_relevant, "share": share, "trained": higher > 0,
        }  # fmt: skip
        times = (
            done[_key(point)]["seconds"]
            if _key(point) in done
            else measure(num_rows, num_items, num_relevant, args.device, seconds_a_pair, higher)
        )
        if "loop over relevant" in times:
            seconds_a_pair = times["loop over relevant"] / (num_rows * num_items * num_relevant)
        points.append(point | {"seconds": times})
        unfinished.write_text(json.dumps({"setting": setting, "points": points}))
    outcome = {
        **setting,
        "points": points,
        "slope": {name: slope(points, name) for name in ("ours", "two sorts", "cross-entropy")}
        if args.largest >= 10**6
        else None,
        "metric_learning": {b: metric_learning(b, args.device) for b in (128, 512, 2048) if b <= args.largest},
        "peak_memory": {n: peak_memory(n, n // 100) for n in SIZES if n <= args.largest and args.device == "cpu"},
    }
    args.out.with_suffix(".json").write_text(json.dumps(outcome, indent=1) + "\n")
    unfinished.unlink()
    draw([p for p in points if p["share"]], args.out.with_suffix(".png"))
    print(markdown(points))
    print(f"log-log slope in N at P/N = 1 %: {outcome['slope']}")
    print(f"peak memory: { ({n: f'{bytes / 2**30:.2f} GiB' for n, bytes in outcome['peak_memory'].items()}) }")
    print(f"batches of embeddings, seconds: {outcome['metric_learning']}")


if __name__ == "__main__":
    main()
