r"""Losses of rank metrics that grade the items, on ``rank_loss``: NDCG of gains, Spearman's correlation with a target.

Each is one minus the metric, as a function and as a module, like those of ``losses.py``; the conventions (λ, margin,
ties, masks) are at the top of ``ranking.py``. Among equal scores the worse item ranks first. Rows whose metric is not
defined, without a gain or with one target value alone, have loss 0 and do not count in the mean.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

from rambo_plugins.core import checks
from rambo_plugins.core.losses import RankLoss
from rambo_plugins.core.rank_metrics import TEMPERATURE, soft_cutoff
from rambo_plugins.core.ranking import ItemLoss, rank_loss
from rambo_plugins.core.rows import DenseRows, SegmentRows
from rambo_plugins.core.sorting import order_of, positions


def ndcg_loss(
    scores: Tensor,
    gains: Tensor,
    *,
    lambda_val: float,
    cutoff: int | None = None,
    temperature: float = TEMPERATURE,
    **options: Any,
) -> Tensor:
    r"""One minus the normalised discounted cumulative gain (Järvelin & Kekäläinen, TOIS 2002).

    .. math:: L = 1 - \frac{DCG}{IDCG}, \quad DCG = \sum_i \frac{g_i}{\log_2(1 + rank_i)}

    IDCG is the largest DCG of the row. The relevant items are those with a gain above 0.

    Args:
        gains: (..., N) float ≥ 0, finite, also their sum; those of items that do not exist are not read. They enter as
            they are; for the exponential gain pass 2**relevance - 1.
        cutoff: k, for NDCG@k: the discount, also that of IDCG, is multiplied with the relaxed [rank ≤ k] of
            ``rank_metrics.py``, so a perfect ranking has loss 0 all the same.
        temperature: T > 0 of the cutoff.

    The ``options``, what is returned and the errors are those of ``rank_loss``, except ``item_weights`` and ``grades``,
    whose place the gains take: ValueError.

    >>> scores, gains = torch.tensor([0.9, 0.5, 0.1]), torch.tensor([1.0, 0.0, 3.0])
    >>> ndcg_loss(scores, gains, lambda_val=1.0)  # 1 - (1 + 3 / 2) / (3 + 1 / log2(3))
    tensor(0.3115)
    >>> ndcg_loss(scores, gains, lambda_val=1.0, cutoff=1, temperature=1e-3)  # 1 - 1 / 3
    tensor(0.6667)
    """
    item_loss = ndcg_item_loss(cutoff, temperature)
    relevance, grades = _gain_grades(scores, gains, _cutoff(cutoff, temperature), options)
    loss, _ = rank_loss(scores, relevance, item_loss, lambda_val=lambda_val, **options | {"grades": grades})
    return loss


def ndcg_item_loss(cutoff: int | None = None, temperature: float = TEMPERATURE) -> ItemLoss:
    """1 - grade · discount(rank); where the grades are g_i · P / IDCG its mean over the relevant items is 1 - NDCG."""
    return functools.partial(_ndcg_item_loss, **_cutoff(cutoff, temperature))


def _ndcg_item_loss(
    rank: Tensor, rank_plus: Tensor, num_relevant: Tensor, grade: Tensor, *, cutoff: int | None, temperature: float
) -> Tensor:
    return 1 - grade * _discount(rank, cutoff, temperature)


def _cutoff(cutoff: int | None, temperature: float) -> dict[str, Any]:
    return {
        "cutoff": None if cutoff is None else checks.check_integer("cutoff", cutoff, 1),
        "temperature": checks.check_positive("temperature", temperature),
    }


def _discount(rank: Tensor, cutoff: int | None, temperature: float) -> Tensor:
    """What NDCG multiplies the gain of an item of this rank with."""
    discount = 1 / torch.log2(1 + rank)
    return discount if cutoff is None else discount * soft_cutoff(rank, cutoff, temperature)


def spearman_loss(scores: Tensor, target: Tensor, *, lambda_val: float, **options: Any) -> Tensor:
    r"""One minus Spearman's rank correlation of the scores and the target (Spearman, Am. J. Psychol. 1904).

    .. math:: L = 1 - \rho = \frac1N \sum_i \frac12 \left(\frac{rank_i - \mu}{\sigma} - \frac{t_i - \mu}{\sigma_t}
              \right)^2, \quad \mu = \frac{N + 1}2

    t_i is the rank of the target, equal targets share their average rank; σ and σ_t are the standard deviations of 1..N
    and of t. Without ties in the target this is the textbook's 6 Σ (rank_i - t_i)² / (N (N² - 1)). Every item that
    exists is relevant.

    Args:
        target: (..., N) float, higher is better, ±inf allowed, not NaN. A row of one item, or of equal targets, has no
            correlation: loss 0, and it does not count as a row.

    The ``options``, what is returned and the errors are those of ``rank_loss``, except ``grades``: ValueError. With
    ``item_weights`` the mean over the items is a weighted one; ranks, σ and σ_t stay as they are. A ``margin`` moves
    all items alike.

    >>> scores, target = torch.tensor([0.9, 0.5, 0.1]), torch.tensor([20.0, 30.0, 10.0])
    >>> spearman_loss(scores, target, lambda_val=1.0)  # ranks 1, 2, 3 and 2, 1, 3: 6 · (1 + 1) / (3 · 8)
    tensor(0.5000)
    """
    relevance, grades = _target_grades(scores, target, options)
    loss, _ = rank_loss(scores, relevance, spearman_item_loss, lambda_val=lambda_val, **options | {"grades": grades})
    return loss


def spearman_item_loss(rank: Tensor, rank_plus: Tensor, num_relevant: Tensor, grade: Tensor) -> Tensor:
    """Half the squared distance of the standardised rank and target rank; the grade is the latter's negative."""
    deviation = ((num_relevant**2 - 1) / 12).clamp(min=0.25).sqrt()  # 0.25 is that of two items
    return ((rank - (num_relevant + 1) / 2) / deviation + grade) ** 2 / 2


class NDCGLoss(RankLoss):
    """Module of ``ndcg_loss``, called with scores and gains. The ``options`` are those of ``RankLoss``.

    >>> loss_fn = NDCGLoss(lambda_val=1.0)
    >>> loss_fn(torch.tensor([0.9, 0.5, 0.1]), torch.tensor([1.0, 0.0, 3.0]))
    tensor(0.3115)
    """

    def __init__(
        self, *, lambda_val: float, cutoff: int | None = None, temperature: float = TEMPERATURE, **options: Any
    ) -> None:
        super().__init__(ndcg_item_loss(cutoff, temperature), lambda_val=lambda_val, **options)
        self.cutoff = _cutoff(cutoff, temperature)

    def forward(  # type: ignore[override]  # the second argument is called what it is
        self, scores: Tensor, gains: Tensor, mask: Tensor | None = None, weights: Tensor | None = None, **of_items: Any
    ) -> Tensor:
        """As ``RankLoss.forward``, with gains; neither ``item_weights`` nor ``grades``."""
        relevance, grades = _gain_grades(scores, gains, self.cutoff, {"mask": mask, "weights": weights, **of_items})
        return super().forward(scores, relevance, mask, weights, **of_items | {"grades": grades})


class SpearmanLoss(RankLoss):
    """Module of ``spearman_loss``, called with scores and target. The ``options`` are those of ``RankLoss``.

    >>> loss_fn = SpearmanLoss(lambda_val=1.0)
    >>> loss_fn(torch.tensor([0.9, 0.5, 0.1]), torch.tensor([20.0, 30.0, 10.0]))
    tensor(0.5000)
    """

    def __init__(self, *, lambda_val: float, **options: Any) -> None:
        super().__init__(spearman_item_loss, lambda_val=lambda_val, **options)

    def forward(  # type: ignore[override]  # the second argument is called what it is
        self, scores: Tensor, target: Tensor, mask: Tensor | None = None, weights: Tensor | None = None, **of_items: Any
    ) -> Tensor:
        """As ``RankLoss.forward``, with a target; no ``grades``."""
        relevance, grades = _target_grades(scores, target, {"mask": mask, "weights": weights, **of_items})
        return super().forward(scores, relevance, mask, weights, **of_items | {"grades": grades})


def _gain_grades(
    scores: Tensor, gains: Tensor, cutoff: dict[str, Any], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Which items are relevant, and g_i · P / IDCG of each."""
    checks.refuse(options, "item_weights", "grades", because="the gains weigh the items")
    rows, exist, gains = _in_rows("gains", gains, scores, options)
    gains = torch.where(exist, gains, 0).to(_dtype(scores))
    checks.check_weights("gains", gains.view(scores.shape), rows.total(gains))
    relevance = gains > 0
    places = _places(gains, exist, rows, options.get("segments"))
    ideal = rows.total(gains * _discount(places.to(gains.dtype), **cutoff))
    scale = rows.total(relevance) / ideal  # 0 / 0 in a row without a gain, of which no grade is read
    return relevance.reshape(scores.shape), (gains * rows.spread(scale)).reshape(scores.shape)


def _target_grades(scores: Tensor, target: Tensor, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Which items are ranked, and (mean - t_i) / σ_t of each, so that of equal scores the worst target comes first."""
    checks.refuse(options, "grades", because="the target grades the items")
    rows, exist, target = _in_rows("target", target, scores, options)
    target = torch.where(exist, target, 0)
    checks.check_not_nan("target", target.view(scores.shape))
    best_first, worst_first = (
        _places(target, exist, rows, options.get("segments"), descending) for descending in (True, False)
    )
    # Both sorts put equals in the order of their index. The average rank of equals is that of best_first and
    # N + 1 - worst_first, and the mean rank is (N + 1) / 2.
    grades = torch.where(exist, worst_first - best_first, 0).to(_dtype(scores)) / 2
    deviation = (rows.total(grades**2) / rows.total(exist).clamp(min=1)).sqrt()
    grades = grades / rows.spread(deviation)  # 0 / 0 in a row of equals, of which none is read
    return (exist & rows.spread(deviation > 0)).reshape(scores.shape), grades.reshape(scores.shape)


def _in_rows(
    name: str, values: Tensor, scores: Tensor, options: dict[str, Any]
) -> tuple[DenseRows | SegmentRows, Tensor, Tensor]:
    """The rows of ``rank_loss``; in their shape, which items exist, and the values, checked."""
    mask, segments = options.get("mask"), options.get("segments")
    checks.check_scores(scores, mask)
    checks.check_float(name, values, scores, tuple(scores.shape))
    if segments is None:
        rows: DenseRows | SegmentRows = DenseRows(math.prod(scores.shape[:-1]), scores.shape[-1])
    else:
        checks.check_segments(segments, scores)
        weights = options.get("weights")
        rows = SegmentRows(segments, None if weights is None else weights.numel())
    exist = torch.ones_like(scores, dtype=torch.bool) if mask is None else mask
    return rows, exist.reshape(rows.shape), values.reshape(rows.shape)


def _places(
    values: Tensor, exist: Tensor, rows: DenseRows | SegmentRows, segments: Tensor | None, descending: bool = True
) -> Tensor:
    """The place of each value in its row, from 1 for the highest, or the lowest; what does not exist comes last."""
    order = order_of(~exist, order_of(values, descending=descending))
    if isinstance(rows, DenseRows) or segments is None:
        return positions(order)
    return positions(order_of(segments, order)) - rows.spread(rows.lengths.cumsum(0) - rows.lengths)


def _dtype(scores: Tensor) -> torch.dtype:
    """That in which ``rank_loss`` computes."""
    return torch.float64 if scores.dtype == torch.float64 else torch.float32
