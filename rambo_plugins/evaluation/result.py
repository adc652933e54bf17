"""The outcome of an evaluation: figures, counts and the rank of each query's first relevant item."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, eq=False)
class RecallResult:
    """What ``recall_at_k`` found. Figures are fractions in [0, 1], nan where no query could be averaged."""

    recall: dict[int, float]  # K -> Recall@K, ties broken against the relevant item
    recall_optimistic: dict[int, float]  # the same with ties broken for it
    interval: dict[int, tuple[float, float]]  # K -> 95 % interval of Recall@K, the queries taken as a random sample
    map_at_r: float | None  # None if it was not asked for
    r_precision: float | None  # None if MAP@R was not asked for
    first_rank: np.ndarray  # (Q,) int64, rank of the first relevant item; 0: beyond max(ks), none, or not sampled
    lone_queries: np.ndarray  # int64 rows of the queries without a relevant item in the gallery
    num_queries: int
    num_averaged: int  # queries in the mean: not the lone ones if left out, nor those not sampled
    num_gallery: int
    num_tied: int  # queries whose first relevant item ties with irrelevant ones, so that its rank up to max(ks) differs
    ks: tuple[int, ...]
    num_sampled: int  # queries that were searched or found lone; num_queries unless ``sample`` was given
    backend: str
    seconds: float
    exact: bool = True
    check: ApproximationCheck | None = None  # of an approximate search

    @classmethod
    def of_ranks(
        cls, pessimistic: np.ndarray, optimistic: np.ndarray, ks: tuple[int, ...], num_averaged: int,
        *, num_sampled: int | None = None, map_at_r: float | None = None, r_precision: float | None = None,
        **others: Any,
    ) -> RecallResult:  # fmt: skip
        """From the ranks of the first relevant items, (Q,) int64 each, max(ks) + 1 for all beyond or left out."""

        def share(ranks: np.ndarray, k: int) -> float:
            return float((ranks <= k).sum() / num_averaged) if num_averaged else math.nan

        recall = {k: share(pessimistic, k) for k in ks}
        return cls(
            recall=recall,
            recall_optimistic={k: share(optimistic, k) for k in ks},
            interval={k: wilson_interval(value, num_averaged) for k, value in recall.items()},
            map_at_r=map_at_r,
            r_precision=r_precision,
            first_rank=np.where(pessimistic <= ks[-1], pessimistic, 0),
            num_queries=len(pessimistic),
            num_sampled=len(pessimistic) if num_sampled is None else num_sampled,
            num_averaged=num_averaged,
            num_tied=int((pessimistic != optimistic).sum()),
            ks=ks,
            **others,
        )

    @property
    def num_lone(self) -> int:
        return len(self.lone_queries)

    def __str__(self) -> str:
        figures = [f"R@{k} {100 * value:.2f}" for k, value in self.recall.items()]
        if self.map_at_r is not None:
            figures.append(f"MAP@R {100 * self.map_at_r:.2f}")
        sampled = f"{self.num_sampled:,} sampled of " if self.num_sampled < self.num_queries else ""
        return (
            f"{'' if self.exact else 'approximate: '}{'  '.join(figures)}  (%; {sampled}{self.num_queries:,} queries, "
            f"{self.num_gallery:,} in the gallery, {self.num_lone:,} lone, {self.num_tied:,} tied; {self.backend}, "
            f"{self.seconds:.1f} s){'' if self.check is None else f'; {self.check}'}"
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures and counts, ready for JSON: K as strings, None for nan. The arrays stay out."""

        return {
            "recall": _figures(self.recall),
            "recall_optimistic": _figures(self.recall_optimistic),
            "interval": _figures(self.interval),
            "map_at_r": _figures(self.map_at_r),
            "r_precision": _figures(self.r_precision),
            "num_queries": self.num_queries,
            "num_sampled": self.num_sampled,
            "num_averaged": self.num_averaged,
            "num_gallery": self.num_gallery,
            "num_lone": self.num_lone,
            "num_tied": self.num_tied,
            "ks": list(self.ks),
            "backend": self.backend,
            "exact": self.exact,
            "check": None if self.check is None else _figures(vars(self.check)),
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class ApproximationCheck:
    """Approximate and exact Recall@K of the same queries, a random sample of those in the mean; fractions."""

    num_queries: int
    exact: dict[int, float]
    interval: dict[int, tuple[float, float]]  # 95 % interval of the exact Recall@K
    approximate: dict[int, float]
    gap: dict[int, float]  # approximate − exact
    gap_interval: dict[int, tuple[float, float]]  # 95 % interval of the gap, from the pairs

    def __str__(self) -> str:
        def percent(value: float, bounds: tuple[float, float], sign: str = "") -> str:
            low, high = (f"{100 * bound:{sign}.2f}" for bound in bounds)
            return f"{100 * value:{sign}.2f} [{low}, {high}]"

        figures = [
            f"R@{k} exact {percent(value, self.interval[k])}, gap {percent(self.gap[k], self.gap_interval[k], '+')}"
            for k, value in self.exact.items()
        ]
        return f"check on {self.num_queries:,} queries: {'; '.join(figures)}"


def _figures(value: Any) -> Any:
    """As JSON has it: keys as strings, None for nan."""
    if isinstance(value, dict):
        return {str(key): _figures(one) for key, one in value.items()}
    if isinstance(value, tuple):
        return [_figures(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """The 95 % score interval of a share seen in ``num`` independent trials (Wilson, JASA 1927); nan without any."""
    if not num:
        return math.nan, math.nan
    z = 1.959963984540054
    middle = (share + z**2 / (2 * num)) / (1 + z**2 / num)
    half = z / (1 + z**2 / num) * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2))
    return max(0.0, middle - half), min(1.0, middle + half)


def paired_interval(gained: int, lost: int, num: int) -> tuple[float, float]:
    """The 95 % score interval of the difference of two shares, (gained − lost) / num (Tango, Stat. Med. 1998).

    Both are seen in the same ``num`` trials, of which ``gained`` count for the first only and ``lost`` for the second
    only. The δ with (gained − lost − num δ)² ≤ z² num (2q + δ(1 − δ)), q the likeliest probability of a loss given δ;
    without any gain or loss it is ± z² / (num + z²), not zero. nan without a trial.
    """
    if not num:
        return math.nan, math.nan
    z = 1.959963984540054

    def inside(delta: float) -> bool:
        b = (2 * num - gained + lost) * delta - gained - lost
        q = (math.sqrt(max(0, b**2 + 8 * num * lost * delta * (1 - delta))) - b) / (4 * num)
        return (gained - lost - num * delta) ** 2 <= z**2 * num * (2 * q + delta * (1 - delta))

    bounds = []
    for end in (-1.0, 1.0):
        inner, outer = (gained - lost) / num, end
        for _ in range(60):
            middle = (inner + outer) / 2
            inner, outer = (middle, outer) if inside(middle) else (inner, middle)
        bounds.append(inner)
    return bounds[0], bounds[1]
