r"""The rank loss of a detector's classifier, behind every detection toolkit: mean AP and AP over all classes, 2 : 1.

A detector scores R boxes for each of C classes. Each class is a row of R scores, ranked by itself (Eqs. 21, 22), and
all R·C scores are one row (Eq. 23); both together with those of the last τ batches. The conventions are in
``ranking.py``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from rambo_plugins.core import checks
from rambo_plugins.core.losses import average_precision_item_loss, log_precision_item_loss
from rambo_plugins.core.memory import ScoreMemory
from rambo_plugins.core.ranking import ItemLoss, RankStatistics, rank_loss

_PRECISION_LOSSES: dict[str, ItemLoss] = {"linear": average_precision_item_loss, "log": log_precision_item_loss}


def check_score_space(use_sigmoid: bool, score_space: str | None, test_temperature: float = 1.0) -> str:
    """The ``score_space`` of a classifier's options, "logits" or "probabilities"; None: logits with sigmoid.

    Raises:
        ValueError: an unknown one, or options that do not go together.
    """
    score_space = score_space or ("logits" if use_sigmoid else "probabilities")
    checks.check_choice("score_space", score_space, ("logits", "probabilities"))
    checks.check_positive("test_temperature", test_temperature)
    if not use_sigmoid and score_space == "logits":
        raise ValueError('softmax reorders the boxes: with it, score_space must be "probabilities"')
    if not use_sigmoid and test_temperature != 1:
        raise ValueError(f"test_temperature needs sigmoid, got {test_temperature!r} with softmax")
    return score_space


def scores_to_rank(logits: Tensor, use_sigmoid: bool, score_space: str) -> Tensor:
    """What is ranked of logits (R, C), with softmax (R, C + 1), the last one the background: scores (R, C)."""
    if not use_sigmoid:
        return logits.softmax(1)[:, :-1]
    return logits if score_space == "logits" else logits.sigmoid()


class DetectionParts(NamedTuple):
    """The two summands of the unit loss, scalars, their shares inside: the loss is ``map + apc``."""

    map: Tensor
    """s_map · (1 - mean AP of the classes present), or of the logarithms of the precisions."""
    apc: Tensor
    """s_apc · (1 - AP over all classes), or of the logarithms of the precisions."""


class DetectionLoss(nn.Module):
    r"""One minus the mean average precision of the classes and of all classes at once, with a score memory.

    .. math:: L = s_{map} L_{mAP} + s_{apc} L_{APC}, \qquad
              s_p = \frac{w_p}{w_{map} + w_{apc}}, \quad w_{map} : w_{apc} = 2 : 1

    L is the unit loss on which λ acts (see ``ranking.py``), so the shares are inside: what arrives at the ranks of part
    p is s_p · dL_p/drank. With N the items of a row, Algorithm 1 gives

    .. math:: \nabla_y = \sum_p \frac{rk(y + \lambda N s_p\, dL_p/drk) - rk(y)}{\lambda N}
                       = \sum_p s_p\, \frac{rk(y + \lambda_p N\, dL_p/drk) - rk(y)}{\lambda_p N},
              \qquad \lambda_p = \lambda s_p,

    that is, each part is ranked with λ·s_p and multiplied by s_p. What multiplies the whole loss changes no λ. With a
    ``step`` the shares multiply and do nothing else.

    Args:
        lambda_val: λ, in units of normalised ranks of the unit loss, λ·s_p in [1e-30, 1e30]; 0.5 where no ``step`` is
            given either.
        step: δ, in units of the scores, in place of λ, see ``rank_loss``.
        margin: α ≥ 0 (Eq. 14), in units of the scores.
        memory: τ ≥ 0, batches whose scores are ranked together with the current one.
        memory_warmup: batches that are kept before they are ranked.
        memory_gather: rank the scores of all processes together, the current batch and the memory, instead of each
            process its own.
        map_weight, apc_weight: w_map, w_apc ≥ 0, not both 0; only their ratio matters.
        precision_loss: the loss of the precision p at an object that both parts are the mean of: "linear", 1 - p, which
            gives the average precisions; or "log", -log p, whose gradient in the rank is 1/p times as large. Where
            precision is low, with many classes, few objects, a network from scratch, the linear loss is flat.
        rank_plus_grad: see ``rank_loss``.

    Raises:
        ValueError: an argument out of its range.

    ``memory`` is the ``ScoreMemory``, part of the ``state_dict``. ``statistics`` holds, after a forward pass, detached
    scalars for the log: ``ap_map`` and ``ap_apc``, the average precisions of the current batch alone, without margin;
    ``share_zero_gradient``, the share of the relevant items, memory included, that get no gradient from their ranking
    per class, or, with ``map_weight=0``, among all classes (near 1 while the loss is large: λ is too small or the
    margin too large).

    The memory takes a batch in at the end of a forward pass, so one that fails can be repeated. With the check of NaN
    off, boxes with a NaN among their scores are not remembered.

    >>> loss_fn = DetectionLoss(memory=0, margin=0.0)
    >>> scores = torch.tensor([[0.9, 0.5], [0.8, 0.2], [0.1, 0.7]])
    >>> loss_fn(scores, torch.tensor([2, 0, 1]))  # the first box is background; AP 1/2 and 1; ranks 2 and 3 of all
    DetectionParts(map=tensor(0.1667), apc=tensor(0.1389))
    """

    def __init__(
        self,
        *,
        lambda_val: float | None = None,
        step: float | None = None,
        margin: float = 0.15,
        memory: int = 7,
        memory_warmup: int = 0,
        memory_gather: bool = False,
        map_weight: float = 2.0,
        apc_weight: float = 1.0,
        precision_loss: str = "linear",
        rank_plus_grad: bool = False,
    ) -> None:
        super().__init__()
        if lambda_val is None and step is None:
            lambda_val = 0.5
        length, uniform = checks.check_move(lambda_val, step, True, "batch", rank_plus_grad)
        map_weight = checks.check_not_negative("map_weight", map_weight)
        apc_weight = checks.check_not_negative("apc_weight", apc_weight)
        checks.check_choice("precision_loss", precision_loss, _PRECISION_LOSSES)
        if memory_warmup and not memory:
            raise ValueError(
                f"memory_warmup needs memory > 0, got memory_warmup={memory_warmup!r} and memory={memory!r}"
            )
        if not map_weight + apc_weight:
            raise ValueError("map_weight or apc_weight must be > 0, got 0 for both")
        self.lambda_val = None if uniform else length
        self.step = length if uniform else None
        self.margin = checks.check_not_negative("margin", margin)
        self.map_share = map_weight / (map_weight + apc_weight)
        self.apc_share = apc_weight / (map_weight + apc_weight)
        for share in (self.map_share, self.apc_share):
            if self.lambda_val is not None:
                checks.check_lambda(self.lambda_val * (share or 1.0))
        self.precision_loss = precision_loss
        self.rank_plus_grad = checks.check_flag("rank_plus_grad", rank_plus_grad)
        self.memory = ScoreMemory(memory, warmup=memory_warmup, gather=memory_gather)
        self.statistics: dict[str, Tensor] = {}

    @torch.compiler.disable  # the memory grows: each step would be compiled anew
    def forward(self, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> DetectionParts:
        """The two parts of the loss of a batch.

        Args:
            scores: (R, C) float, logits or probabilities of the C foreground classes, higher is better.
            labels: (R,) integer in [0, C]; C is the background.
            weights: (R,) float or bool; 0: the box is ignored, neither ranked nor remembered. Else it counts in full: a
                rank has no fractions.

        Returns:
            The parts; zeros attached to the graph where neither the batch nor the memory has an object.

        Raises:
            TypeError, ValueError: an input of the wrong type, shape or device, NaN scores; on the CPU, labels out of
                range, weights that are negative or NaN.
        """
        _check(scores, labels, weights)
        with torch.autocast(scores.device.type, enabled=False):
            if scores.dtype != torch.float64:
                scores = scores.float()
            if weights is not None:
                kept = weights > 0
                scores, labels = scores[kept], labels[kept]
            with torch.no_grad():
                figures = self._rank(scores, labels, average_precision_item_loss, margin=0.0)
            (scores, labels), batch = self.memory.join(scores, labels)
            ranked = self._rank(scores, labels, _PRECISION_LOSSES[self.precision_loss], margin=self.margin)
        (of_map, _), (of_apc, of_all) = figures
        statistics = ranked[0][1] if self.map_share else ranked[1][1]
        self.statistics = {
            "ap_map": (1 - of_map) * of_all.num_relevant.any(),
            "ap_apc": (1 - of_apc) * of_all.num_relevant.any(),
            "share_zero_gradient": statistics.zero_gradient.sum() / statistics.num_relevant.sum().clamp(min=1),
        }
        if batch is not None:
            self.memory.push(*(batch if checks._check_nan else _without_nan(*batch)))
        return DetectionParts(self.map_share * ranked[0][0], self.apc_share * ranked[1][0])

    def _rank(
        self, scores: Tensor, labels: Tensor, item_loss: ItemLoss, margin: float
    ) -> list[tuple[Tensor, RankStatistics]]:
        """The loss of the mean of the classes and that over all classes, with their statistics."""
        rows = scores.T.contiguous()
        relevance = labels == torch.arange(len(rows), device=labels.device)[:, None]
        return [
            rank_loss(
                items,
                relevant,
                item_loss,
                lambda_val=None if self.lambda_val is None else self.lambda_val * (share or 1.0),
                step=self.step,
                margin=margin,
                rank_plus_grad=self.rank_plus_grad,
            )
            for items, relevant, share in (
                (rows, relevance, self.map_share),
                (rows.flatten(), relevance.flatten(), self.apc_share),
            )
        ]

    def extra_repr(self) -> str:
        names = ("lambda_val", "step", "margin", "map_share", "apc_share", "precision_loss", "rank_plus_grad")
        return ", ".join(f"{name}={getattr(self, name)!r}" for name in names)


def _without_nan(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    kept = ~scores.isnan().any(1)
    return scores[kept], labels[kept]


def _check(scores: Tensor, labels: Tensor, weights: Tensor | None) -> None:
    checks.check_scores(scores)
    if scores.dim() != 2:
        raise ValueError(f"scores must have shape (R, C), got {tuple(scores.shape)}")
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        got = labels.dtype if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(f"labels must be an integer tensor, got {got}")
    if weights is not None and not isinstance(weights, Tensor):
        raise TypeError(f"weights must be a tensor, got {type(weights).__name__}")
    for name, value in (("labels", labels), ("weights", weights)):
        if value is not None and tuple(value.shape) != (len(scores),):
            raise ValueError(
                f"{name} must have shape ({len(scores)},) for scores {tuple(scores.shape)}, got {tuple(value.shape)}"
            )
        if value is not None and value.device != scores.device:
            raise ValueError(f"{name} must be on the device of the scores, {scores.device}, got {value.device}")
    if labels.device.type == "cpu" and len(labels) and not 0 <= labels.min() <= labels.max() <= scores.shape[1]:
        raise ValueError(
            f"labels must be in [0, {scores.shape[1]}] for {scores.shape[1]} classes, the last one the background, "
            f"got {int(labels.min())} to {int(labels.max())}"
        )
    if weights is not None and weights.device.type == "cpu" and not (weights >= 0).all():
        raise ValueError(f"weights must be numbers >= 0, got {float(weights[~(weights >= 0)][0])}")
