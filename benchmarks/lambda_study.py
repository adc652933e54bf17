"""Does a controller of λ reach, without tuning, what the best fixed λ of a grid reaches?

    python benchmarks/lambda_study.py --omniglot FOLDER     # every run, some 30 s each on one core; resumes
    python benchmarks/lambda_study.py --report              # the tables and lambda.json of the runs that are there

The controller keeps the share of the relevant items that have a gradient at a target. It is here and not in the
package. Both policies, a fixed λ and "auto" with a target, train the demo's ConvNet from the same start on the same
batches and are measured on classes never seen, after the last step. Each run leaves a JSON in ``--runs``, and a run
that is there is not repeated; ``--out`` gathers all of them, with λ and the shares over time. The best λ of a grid is
chosen by the test figures themselves and so is an optimistic mark to reach, the more so the fewer the seeds.

What came out (``results/lambda.json``, 300 steps, a partial grid, one or two seeds): the controller keeps its target,
but over the cases it cannot be told from one fixed λ of 2 or 5 for all of them. So the package has none.
"""

from __future__ import annotations

import os

os.environ.setdefault("TQDM_DISABLE", "1")  # PML's bars; ours says disable=False

import argparse
import dataclasses
import itertools
import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning.samplers import MPerClassSampler
from torch import Tensor
from tqdm import tqdm

from rambo_plugins.demo.data import ImageClasses, load_split
from rambo_plugins.demo.report import versions
from rambo_plugins.demo.train import conv_net
from rambo_plugins.evaluation import RecallCalculator
from rambo_plugins.pml import RamboAPLoss, RamboRecallLoss

LOSSES = {"recall": RamboRecallLoss, "ap": RamboAPLoss}
BATCH = 128
LEARNING_RATE = 1e-3
WINDOW = 10  # steps that a point of the curves is the mean of
METRICS = {"recall_at_1": "R@1", "mean_average_precision_at_r": "MAP@R"}


class LambdaController:
    r"""λ such that a share ``target`` of the relevant items that could move has a gradient: an integral controller.

    .. math:: \lambda \leftarrow \mathrm{clip}\left(\lambda \exp\left(\eta\,\frac{target \cdot I - M}{P}\right)\right)

    P is the number of relevant items of the batch, M of those with a gradient, and I of those with an irrelevant item
    above, which alone can have one. So λ rests where M = target · I, and slows down when I goes to 0 with the loss.
    ``of="all"`` sets I = P, all that ``RankStatistics`` has: then λ rises to its limit when the loss is low.

    Args:
        target: in (0, 1).
        gain: η > 0. The share rises by some 0.3 when λ is multiplied by e; the loop is stable up to η ≈ 6.
        start, lowest, highest: the first λ and its limits.
        of: "imperfect" or "all".
    """

    def __init__(
        self,
        target: float,
        *,
        gain: float = 0.5,
        start: float = 1.0,
        lowest: float = 1e-2,
        highest: float = 1e3,
        of: str = "imperfect",
    ) -> None:
        self.target, self.gain, self.lambda_val = target, gain, start
        self.lowest, self.highest, self.of = lowest, highest, of

    def update(self, num_relevant: float, num_imperfect: float, num_moved: float) -> float:
        """The next λ from the counts of a forward pass."""
        could_move = num_imperfect if self.of == "imperfect" else num_relevant
        error = (self.target * could_move - num_moved) / max(num_relevant, 1)
        self.lambda_val = min(max(self.lambda_val * math.exp(self.gain * error), self.lowest), self.highest)
        return self.lambda_val


@dataclasses.dataclass(frozen=True)
class Spec:
    """One run. ``policy`` is "fixed" with a λ as its ``value``, "auto" or "auto of all" with a target."""

    data: str
    loss: str
    margin: float
    policy: str
    value: float
    seed: int
    steps: int
    images_per_class: int = 4
    gain: float = 0.5
    start: float = 1.0

    @property
    def file_name(self) -> str:
        name = f"{self.data}-{self.loss}-{self.margin:g}-{self.policy.replace(' ', '_')}-{self.value:g}-{self.seed}"
        if self.images_per_class != Spec.images_per_class:
            name += f"-images{self.images_per_class}"
        if (self.gain, self.start) != (Spec.gain, Spec.start):
            name += f"-gain{self.gain:g}-start{self.start:g}"
        return name + ".json"


def train(spec: Spec, data: tuple[ImageClasses, ImageClasses]) -> dict[str, Any]:
    """Train by the spec, measure on the test classes: the metrics, the seconds and the curves."""
    train_set, test_set = data
    torch.manual_seed(spec.seed)
    np.random.seed(spec.seed)  # noqa: NPY002 - PML's samplers draw from it
    model = conv_net(64)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    fixed = spec.policy == "fixed"
    loss_fn = LOSSES[spec.loss](lambda_val=spec.value if fixed else spec.start, margin=spec.margin, collect_stats=True)
    controller = None
    if not fixed:
        of = "all" if spec.policy == "auto of all" else "imperfect"
        controller = LambdaController(spec.value, gain=spec.gain, start=spec.start, of=of)
    num_imperfect = 0.0
    item_loss = loss_fn.item_loss

    def counted(rank: Tensor, rank_plus: Tensor, num_relevant: Tensor) -> Tensor:
        nonlocal num_imperfect  # items that are not relevant come as rank 1 of 1 and do not count
        num_imperfect = float((rank > rank_plus).sum())
        return item_loss(rank, rank_plus, num_relevant)

    loss_fn.item_loss = counted
    num_relevant = BATCH * (spec.images_per_class - 1)
    sampler = MPerClassSampler(
        train_set.labels, spec.images_per_class, BATCH, length_before_new_iter=BATCH * spec.steps
    )
    points = []
    began = time.perf_counter()
    for batch in torch.tensor(list(sampler)).view(-1, BATCH):
        loss = loss_fn(model(train_set.images[batch]), train_set.labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        num_moved = num_relevant * (1 - loss_fn.share_zero_gradient)
        points.append((loss.item(), loss_fn.lambda_val, num_imperfect, num_moved))
        if controller is not None:
            loss_fn.lambda_val = controller.update(num_relevant, num_imperfect, num_moved)
    seconds = time.perf_counter() - began

    windows = np.array(points)[: len(points) // WINDOW * WINDOW].reshape(-1, WINDOW, 4)
    losses, lambdas, imperfect, moved = windows.transpose(2, 0, 1)
    curves = {
        "loss": losses.mean(1),
        "lambda_val": np.exp(np.log(lambdas).mean(1)),
        "imperfect": imperfect.mean(1) / num_relevant,
        "moved_of_imperfect": moved.sum(1) / np.maximum(imperfect.sum(1), 1),
        "moved_of_all": moved.mean(1) / num_relevant,
    }
    model.eval()
    with torch.no_grad():
        embeddings = torch.cat([model(images) for images in test_set.images.split(512)])
    accuracies = RecallCalculator(ks=(1,), normalize=True).get_accuracy(embeddings, test_set.labels)
    return {
        **dataclasses.asdict(spec),
        **{name: round(float(accuracies[name]), 5) for name in METRICS},
        "seconds": round(seconds, 1),
        "curves": {name: [float(f"{value:.4g}") for value in values] for name, values in curves.items()},
    }


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """All runs of the folder, in a fixed order."""
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    return sorted(runs, key=lambda run: (case_of(run), policy_of(run), run["seed"]))


def case_of(run: dict[str, Any]) -> tuple[str, str, float, int]:
    return run["data"], run["loss"], run["margin"], run["images_per_class"]


def case_name(case: tuple[str, str, float, int]) -> str:
    data, loss, margin, images = case
    return f"{data} {loss} {margin:g}" + (f" {BATCH // images}×{images}" if images != Spec.images_per_class else "")


def policy_of(run: dict[str, Any]) -> tuple[bool, str, float, float, float]:
    return run["policy"] != "fixed", run["policy"], run["value"], run["gain"], run["start"]


def policy_name(policy: tuple[bool, str, float, float, float]) -> str:
    is_auto, name, value, gain, start = policy
    if not is_auto:
        return f"λ = {value:g}"
    return f"{name} {value:g}" + (f", η {gain:g}, start {start:g}" if (gain, start) != (Spec.gain, Spec.start) else "")


def values_of(runs: list[dict[str, Any]], metric: str) -> dict[tuple, dict[tuple, dict[int, float]]]:
    """case -> policy -> seed -> the metric in percent."""
    values: dict[tuple, dict[tuple, dict[int, float]]] = {}
    for run in runs:
        values.setdefault(case_of(run), {}).setdefault(policy_of(run), {})[run["seed"]] = 100 * run[metric]
    return values


def gap_to_best(by_policy: dict[tuple, dict[int, float]], policy: tuple) -> float:
    """The mean of a policy over its seeds, less the best of the fixed λ on the same seeds."""
    seeds = by_policy[policy]
    fixed = [
        np.mean([values[seed] for seed in seeds])
        for other, values in by_policy.items()
        if not other[0] and values.keys() >= seeds.keys()
    ]
    return float(np.mean(list(seeds.values())) - max(fixed, default=math.nan))


def paired(values: dict[tuple, dict[tuple, dict[int, float]]], first: tuple, second: tuple) -> np.ndarray:
    """Differences of two policies on the same case and seed, which share the initial weights and the batches."""
    return np.array(
        [
            by_policy[first][seed] - by_policy[second][seed]
            for by_policy in values.values()
            for seed in sorted(by_policy.get(first, {}).keys() & by_policy.get(second, {}).keys())
        ]
    )


def pooled_deviation(runs: list[dict[str, Any]], metric: str) -> float:
    """Standard deviation over the seeds, in percent, pooled over all cases and policies: the noise. 0 for one seed."""
    squares, degrees = 0.0, 0
    for _, group in itertools.groupby(runs, key=lambda run: (case_of(run), policy_of(run))):
        values = np.array([100 * run[metric] for run in group])
        squares += float(((values - values.mean()) ** 2).sum())
        degrees += len(values) - 1
    return math.sqrt(squares / max(degrees, 1))


def late(run: dict[str, Any], curve: str) -> float:
    """Mean of a curve over the last third of the training."""
    values = run["curves"][curve]
    return float(np.mean(values[-(len(values) // 3) :]))


def tables(runs: list[dict[str, Any]]) -> str:
    """Markdown: the metrics by policy and case, how far each policy is from the best fixed λ, and λ and the shares."""
    policies = sorted({policy_of(run) for run in runs})
    cases = sorted({case_of(run) for run in runs})
    head = f"| policy | {' | '.join(map(case_name, cases))} |"
    rule = f"|---|{'---|' * len(cases)}"
    parts = []
    for metric, title in METRICS.items():
        values = values_of(runs, metric)
        lines = [head + " mean gap | largest gap |", rule + "---|---|"]
        for policy in policies:
            cells, gaps = [], []
            for case in cases:
                seeds = values[case].get(policy)
                if seeds is None:
                    cells.append("–")
                    continue
                gaps.append(gap_to_best(values[case], policy))
                mark = "**" if gaps[-1] == 0 else ""
                cells.append(f"{mark}{np.mean(list(seeds.values())):.1f}{mark} ({len(seeds)})")
            of = "" if len(gaps) == len(cases) else f" of {len(gaps)}"
            cells += [f"{np.mean(gaps):+.1f}{of}", f"{min(gaps):+.1f}"]
            lines.append(f"| {policy_name(policy)} | {' | '.join(cells)} |")
        parts.append(
            f"{title}, %, mean (seeds); the gap is to the best fixed λ on the same seeds, in bold where it is 0; "
            f"standard deviation of a seed {pooled_deviation(runs, metric):.2f}:\n\n" + "\n".join(lines)
        )
        fixed = [policy for policy in policies if not policy[0]]
        lines = [f"| | {' | '.join(map(policy_name, fixed))} |", f"|---|{'---|' * len(fixed)}"]
        for policy in (policy for policy in policies if policy[0]):
            cells = []
            for other in fixed:
                by = paired(values, policy, other)
                error = f" ± {by.std(ddof=1) / math.sqrt(len(by)):.2f}" if len(by) > 1 else ""
                cells.append(f"{by.mean():+.2f}{error} ({len(by)})" if len(by) else "–")
            lines.append(f"| {policy_name(policy)} | {' | '.join(cells)} |")
        parts.append(
            f"{title}, auto less a fixed λ on the same case and seed, mean ± standard error (pairs):\n\n"
            + "\n".join(lines)
        )
    for curve, title in (("moved_of_imperfect", "share that moves"), ("imperfect", "imperfect"), ("lambda_val", "λ")):
        lines = [head, rule]
        for policy in policies:
            if curve == "lambda_val" and not policy[0]:
                continue
            means = []
            for case in cases:
                group = [late(run, curve) for run in runs if (case_of(run), policy_of(run)) == (case, policy)]
                means.append(f"{np.mean(group):.3g}" if group else "–")
            lines.append(f"| {policy_name(policy)} | {' | '.join(means)} |")
        parts.append(f"{title}, mean over the last third of the training:\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--omniglot", type=Path, help="folder of the Omniglot archives; without it glyphs alone")
    parser.add_argument("--data", nargs="*", choices=["glyphs", "omniglot"], default=["glyphs", "omniglot"])
    parser.add_argument("--losses", nargs="*", choices=LOSSES, default=list(LOSSES))
    parser.add_argument("--margins", nargs="*", type=float, default=[0.3, 0.02])
    parser.add_argument("--lambdas", nargs="*", type=float, default=[0.02, 0.1, 0.5, 1, 2, 5, 16, 64], help="fixed λ")
    parser.add_argument("--targets", nargs="*", type=float, default=[0.5, 0.7, 0.9], help="of the controller")
    parser.add_argument("--targets-of-all", nargs="*", type=float, default=[], help="of all the relevant items")
    parser.add_argument("--images-per-class", type=int, default=Spec.images_per_class)
    parser.add_argument("--gain", type=float, default=Spec.gain)
    parser.add_argument("--start", type=float, default=Spec.start, help="the controller's first λ")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=Path, default=Path("runs/lambda"), help="folder of one JSON a run")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "lambda.json")
    parser.add_argument("--report", action="store_true", help="no runs, only what is there")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    warnings.filterwarnings("ignore", category=UserWarning, module="pytorch_metric_learning")
    torch.set_num_threads(args.threads)
    args.runs.mkdir(parents=True, exist_ok=True)
    names = [name for name in args.data if name == "glyphs" or args.omniglot is not None]
    if names != args.data and not args.report:
        print("omniglot is left out: give its folder with --omniglot")
    policies = [("fixed", value) for value in args.lambdas] + [("auto", value) for value in args.targets]
    policies += [("auto of all", value) for value in args.targets_of_all]
    specs = [
        Spec(data, loss, margin, policy, value, seed, args.steps, args.images_per_class)
        if policy == "fixed"
        else Spec(data, loss, margin, policy, value, seed, args.steps, args.images_per_class, args.gain, args.start)
        for seed, margin, data, loss, (policy, value) in itertools.product(
            args.seeds, args.margins, names, args.losses, policies
        )
    ]
    if not args.report:
        missing = [spec for spec in specs if not (args.runs / spec.file_name).exists()]
        splits = {name: load_split(name, args.omniglot) for name in dict.fromkeys(spec.data for spec in missing)}
        bar = tqdm(missing, disable=False)
        for spec in bar:
            run = train(spec, splits[spec.data])
            path = args.runs / spec.file_name
            path.with_suffix(".tmp").write_text(json.dumps(run) + "\n")
            path.with_suffix(".tmp").replace(path)
            bar.set_postfix_str(f"{path.stem}: {', '.join(f'{t} {100 * run[m]:.1f}' for m, t in METRICS.items())}")

    runs = read_runs(args.runs)
    if not runs:
        raise SystemExit(f"no runs in {args.runs}")
    if len({run["steps"] for run in runs}) > 1:
        raise SystemExit(f"{args.runs} holds runs of different lengths, choose another folder")
    have = {(case_of(run), policy_of(run), run["seed"]) for run in runs}
    cases, policies_run, seeds = (sorted(set(keys)) for keys in zip(*have, strict=True))
    absent = [
        f"{case_name(case)}, {policy_name(policy)}, seed {seed}"
        for case, policy, seed in itertools.product(cases, policies_run, seeds)
        if (case, policy, seed) not in have
    ]
    outcome = {
        "settings": {"steps": runs[0]["steps"], "batch": BATCH, "learning_rate": LEARNING_RATE,
                     "threads": args.threads, "window": WINDOW},
        "versions": versions(),
        "seeds": sorted({run["seed"] for run in runs}),
        "deviation_of_a_seed": {metric: round(pooled_deviation(runs, metric), 3) for metric in METRICS},
        "partial": absent,
        "runs": runs,
    }  # fmt: skip
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**outcome, "runs": None}, indent=1, ensure_ascii=False)
    lines = ",\n".join("  " + json.dumps(run) for run in runs)
    args.out.write_text(text.replace('"runs": null', f'"runs": [\n{lines}\n ]') + "\n")
    print(tables(runs))


if __name__ == "__main__":
    main()
