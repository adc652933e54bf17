"""The outcome of an evaluation: figures, counts and the rank of each query's first relevant item."""

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

    @property
    def num_lone(self) -> int:
        return len(self.lone_queries)

    def __str__(self) -> str:
        figures = [f"R@{k} {100 * value:.2f}" for k, value in self.recall.items()]
        if self.map_at_r is not None:
            figures.append(f"MAP@R {100 * self.map_at_r:.2f}")
        sampled = f"{self.num_sampled:,} sampled of " if self.num_sampled < self.num_queries else ""
        return (
            f"{'  '.join(figures)}  (%; {sampled}{self.num_queries:,} queries, {self.num_gallery:,} in the gallery, "
            f"{self.num_lone:,} lone, {self.num_tied:,} tied; {self.backend}, {self.seconds:.1f} s)"
        )

    def to_dict(self) -> dict[str, Any]:
        """The figures and counts, ready for JSON: K as strings, None for nan. The arrays stay out."""

        def figure(value: float | None) -> float | None:
            return None if value is None or math.isnan(value) else value

        return {
            "recall": {str(k): figure(value) for k, value in self.recall.items()},
            "recall_optimistic": {str(k): figure(value) for k, value in self.recall_optimistic.items()},
            "interval": {str(k): [figure(bound) for bound in bounds] for k, bounds in self.interval.items()},
            "map_at_r": figure(self.map_at_r),
            "r_precision": figure(self.r_precision),
            "num_queries": self.num_queries,
            "num_sampled": self.num_sampled,
            "num_averaged": self.num_averaged,
            "num_gallery": self.num_gallery,
            "num_lone": self.num_lone,
            "num_tied": self.num_tied,
            "ks": list(self.ks),
            "backend": self.backend,
            "exact": self.exact,
            "seconds": self.seconds,
        }


def wilson_interval(share: float, num: int) -> tuple[float, float]:
    """The 95 % score interval of a share seen in ``num`` independent trials (Wilson, JASA 1927); nan without any."""
    if not num:
        return math.nan, math.nan
    z = 1.959963984540054
    middle = (share + z**2 / (2 * num)) / (1 + z**2 / num)
    half = z / (1 + z**2 / num) * math.sqrt(share * (1 - share) / num + z**2 / (4 * num**2))
    return max(0.0, middle - half), min(1.0, middle + half)
