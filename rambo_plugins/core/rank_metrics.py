r"""Losses of other rank metrics on ``rank_loss``: reciprocal rank, precision at k, recall at given K.

Each is one minus the metric, as a function and as a module, like those of ``losses.py``; the conventions (λ, margin,
ties, masks) are at the top of ``ranking.py``.

A cutoff is a step, without a slope, so it is relaxed. For a rank x and a temperature T > 0

.. math:: [x \le k] \approx \frac1{1 + (x / (k + 1/2))^{1/T}}

T -> 0 is the metric itself, which no gradient moves; a larger T gives slope to the ranks far beyond k, at the price of
a value that is further from the metric: with the default, ``TEMPERATURE``, the rank 1 counts 0.60 for k = 1 and 0.91
for k = 10, the rank 10·k 0.13 and 0.10. So where there is a cutoff the loss of a perfect ranking is above 0.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rambo_plugins.core import checks
from rambo_plugins.core.losses import RankLoss
from rambo_plugins.core.ranking import ItemLoss, rank_loss

TEMPERATURE = 1.0

_ONE_ITEM = "the best relevant item alone counts"
_PLACES = "the first k places count alike"


def reciprocal_rank_loss(scores: Tensor, relevance: Tensor, *, lambda_val: float, **options: Any) -> Tensor:
    r"""One minus the (mean) reciprocal rank of the best relevant item (Voorhees, TREC-8, 1999).

    .. math:: L = 1 - \frac1Q \sum_q \frac1{\min_{i\ relevant} rank_i}

    The ``options``, what is returned and the errors are those of ``rank_loss``, except ``item_weights``, which weigh a
    mean over the relevant items, and here is none: ValueError.

    >>> reciprocal_rank_loss(torch.tensor([0.9, 0.5, 0.1]), torch.tensor([False, True, True]), lambda_val=1.0)
    tensor(0.5000)
    """
    checks.refuse(options, "item_weights", because=_ONE_ITEM)
    loss, _ = rank_loss(scores, relevance, reciprocal_rank_item_loss, lambda_val=lambda_val, **options)
    return loss


def reciprocal_rank_item_loss(rank: Tensor, rank_plus: Tensor, num_relevant: Tensor) -> Tensor:
    """P · (1 - 1 / rank) of the best relevant item, 0 of the others; the plain mean over the P is that of the best."""
    return num_relevant * (rank_plus == 1) * (1 - 1 / rank)


def precision_at_k_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    k: int,
    lambda_val: float,
    temperature: float = TEMPERATURE,
    **options: Any,
) -> Tensor:
    r"""One minus the precision of the first k items, with a relaxed cutoff (see the module).

    .. math:: L = 1 - \frac1k \sum_{i\ relevant} [rank_i \le k]

    A row with P < k relevant items has a precision of P / k at most.

    Args:
        k: ≥ 1.
        temperature: T > 0 of the cutoff (see the module).

    The ``options``, what is returned and the errors are those of ``rank_loss``, except ``item_weights``, which weigh a
    mean over the relevant items; this one is over the first k places: ValueError.

    >>> scores, relevance = torch.tensor([0.9, 0.5, 0.1]), torch.tensor([False, True, True])
    >>> precision_at_k_loss(scores, relevance, k=2, lambda_val=1.0, temperature=1e-3)
    tensor(0.5000)
    """
    checks.refuse(options, "item_weights", because=_PLACES)
    item_loss = precision_at_k_item_loss(k, temperature)
    loss, _ = rank_loss(scores, relevance, item_loss, lambda_val=lambda_val, **options)
    return loss


def precision_at_k_item_loss(k: int, temperature: float = TEMPERATURE) -> ItemLoss:
    """1 - P / k · [rank ≤ k], relaxed; its plain mean over the relevant items is 1 - precision."""
    k = checks.check_integer("k", k, 1)
    return functools.partial(_precision_item_loss, k=k, temperature=checks.check_positive("temperature", temperature))


def _precision_item_loss(
    rank: Tensor, rank_plus: Tensor, num_relevant: Tensor, *, k: int, temperature: float
) -> Tensor:
    return 1 - num_relevant / k * soft_cutoff(rank, k, temperature)


def recall_at_k_loss(
    scores: Tensor,
    relevance: Tensor,
    *,
    ks: int | Sequence[int],
    lambda_val: float,
    temperature: float = TEMPERATURE,
    **options: Any,
) -> Tensor:
    r"""One minus the recall at K as the paper counts it (Eq. 16), with a relaxed cutoff; the mean over several K.

    .. math:: L = 1 - \frac1{|ks|} \sum_{K \in ks} \frac1P \sum_{i\ relevant} [r_i < K], \qquad r_i = rank_i - rank^+_i

    Only irrelevant items above count, so a perfect ranking has a recall of 1 for every K. The relaxed rank is r_i + 1.

    Args:
        ks: K ≥ 1, or several: a sequence, an array or a tensor (M,).
        temperature: T > 0 of the cutoff (see the module).

    The ``options``, what is returned and the errors are those of ``rank_loss``.

    >>> scores, relevance = torch.tensor([0.9, 0.5, 0.1]), torch.tensor([False, True, True])
    >>> recall_at_k_loss(scores, relevance, ks=(1, 2), lambda_val=1.0, temperature=1e-3)  # recall 0 and 1
    tensor(0.5000)
    """
    item_loss = recall_at_k_item_loss(ks, temperature)
    loss, _ = rank_loss(scores, relevance, item_loss, lambda_val=lambda_val, **options)
    return loss


def recall_at_k_item_loss(ks: int | Sequence[int], temperature: float = TEMPERATURE) -> ItemLoss:
    """1 - [r_i < K], relaxed, the mean over the K."""
    several = checks.several(ks, "ks")
    cutoffs = [checks.check_integer("ks", k, 1) for k in ([ks] if several is None else several)]
    if not cutoffs:
        raise ValueError("ks must hold at least one K, got none")
    temperature = checks.check_positive("temperature", temperature)
    return functools.partial(_recall_at_k_item_loss, ks=cutoffs, temperature=temperature)


def _recall_at_k_item_loss(
    rank: Tensor, rank_plus: Tensor, num_relevant: Tensor, *, ks: list[int], temperature: float
) -> Tensor:
    return 1 - torch.stack([soft_cutoff(rank - rank_plus + 1, k, temperature) for k in ks]).mean(0)


def soft_cutoff(rank: Tensor, k: int, temperature: float) -> Tensor:
    """The relaxed [rank ≤ k], see the module."""
    return torch.sigmoid((math.log(k + 0.5) - rank.log()) / temperature)


class ReciprocalRankLoss(RankLoss):
    """Module of ``reciprocal_rank_loss``. The ``options`` are those of ``RankLoss``."""

    def __init__(self, *, lambda_val: float, **options: Any) -> None:
        super().__init__(reciprocal_rank_item_loss, lambda_val=lambda_val, **options)

    def forward(self, *arguments: Any, **of_items: Any) -> Tensor:
        """As ``RankLoss.forward``; no ``item_weights``."""
        checks.refuse(of_items, "item_weights", because=_ONE_ITEM)
        return super().forward(*arguments, **of_items)


class PrecisionAtKLoss(RankLoss):
    """Module of ``precision_at_k_loss``. The ``options`` are those of ``RankLoss``."""

    def __init__(self, *, k: int, lambda_val: float, temperature: float = TEMPERATURE, **options: Any) -> None:
        super().__init__(precision_at_k_item_loss(k, temperature), lambda_val=lambda_val, **options)

    def forward(self, *arguments: Any, **of_items: Any) -> Tensor:
        """As ``RankLoss.forward``; no ``item_weights``."""
        checks.refuse(of_items, "item_weights", because=_PLACES)
        return super().forward(*arguments, **of_items)


class RecallAtKLoss(RankLoss):
    """Module of ``recall_at_k_loss``. The ``options`` are those of ``RankLoss``."""

    def __init__(
        self, *, ks: int | Sequence[int], lambda_val: float, temperature: float = TEMPERATURE, **options: Any
    ) -> None:
        super().__init__(recall_at_k_item_loss(ks, temperature), lambda_val=lambda_val, **options)
