"""``RamboFastRCNNOutputLayers``: detectron2's box predictor whose classification loss is ``core.detection``'s.

It has K + 1 outputs whatever the mode, as detectron2's has, so that checkpoints of the model zoo load and the scores of
cascade stages can be averaged. The memory is no part of its state dict, in which such a checkpoint would miss it:
``RamboState`` takes it into a checkpoint of its own.
"""

from __future__ import annotations

from typing import Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec, cat, cross_entropy
from detectron2.modeling.roi_heads import FastRCNNOutputLayers
from detectron2.structures import Instances
from detectron2.utils.events import get_event_storage, has_event_storage
from torch import Tensor, nn

from rambo_plugins.core import checks
from rambo_plugins.core.detection import DetectionLoss, check_score_space, scores_to_rank

Predictions = tuple[Tensor, Tensor]
"""Logits (R, K + 1) and box deltas (R, 4·K or 4)."""


class RamboFastRCNNOutputLayers(FastRCNNOutputLayers):
    r"""Box predictor trained for mean average precision and average precision over all classes (Eqs. 21-23), 2 : 1.

    .. math:: L_{cls} = w \left( \frac{w_{map} L_{mAP} + w_{apc} L_{APC}}{w_{map} + w_{apc}} + a_t L_{CE} \right)

    The ranking part, its λ, memory and shares are ``core.detection.DetectionLoss``; w is ``loss_weight["loss_cls"]``.
    What multiplies the loss, AMP's loss scale among it, changes no λ.

    * ``score_mode="sigmoid"``: the logits of the K classes are ranked, the output of the background is unused; a
      detection's score is sigmoid(logit / test_temperature). A ranking leaves a common shift of all logits free, so the
      usual SCORE_THRESH_TEST of 0.05 has no meaning: test with 0, then choose.
    * ``score_mode="softmax"``: the probabilities of the K classes are ranked; inference is detectron2's.

    Args:
        input_shape: of the features.
        lambda_val, margin, memory, memory_warmup, memory_gather, map_weight, apc_weight, precision_loss,
            rank_plus_grad: see ``DetectionLoss``. The margin is in units of what is ranked: 0.15 is little among
            logits, much among probabilities.
        score_mode: see above.
        score_space: "logits" or "probabilities", what is ranked; default: logits with sigmoid, which allows both.
        test_temperature: T > 0, spreads the scores of detections when below 1, without a change of their order; needs
            sigmoid. detectron2's evaluation on Pascal VOC rounds scores to three decimals.
        aux_ce_weight: a ≥ 0, the weight of cross-entropy as detectron2 computes it: of softmax, or of the K sigmoids.
        aux_ce_steps: a_t falls linearly from a to 0 within so many training steps; 0: it stays a.
        kwargs: those of ``FastRCNNOutputLayers``. ``use_sigmoid_ce`` follows ``score_mode``; the federated loss, which
            samples classes, is refused.

    Raises:
        ValueError: an argument out of its range, or arguments that do not go together.

    ``rank_loss`` is the ``DetectionLoss``. In the event storage, for each step: ``rambo/loss_map``, ``rambo/loss_apc``
    and ``rambo/loss_ce``, which add up to ``loss_cls`` (before them the weight), ``rambo/ap_map``, ``rambo/ap_apc`` and
    ``rambo/share_zero_gradient`` (see ``DetectionLoss``); with sigmoid the accuracy among the boxes with an object,
    ``fast_rcnn/fg_cls_accuracy``, with softmax all that detectron2 has.
    """

    rank_loss: DetectionLoss

    @configurable
    def __init__(
        self,
        input_shape: ShapeSpec,
        *,
        lambda_val: float = 0.5,
        margin: float = 0.15,
        memory: int = 7,
        memory_warmup: int = 0,
        memory_gather: bool = False,
        map_weight: float = 2.0,
        apc_weight: float = 1.0,
        precision_loss: str = "linear",
        score_mode: str = "sigmoid",
        score_space: str | None = None,
        rank_plus_grad: bool = False,
        test_temperature: float = 1.0,
        aux_ce_weight: float = 0.0,
        aux_ce_steps: int = 0,
        **kwargs: Any,
    ) -> None:
        checks.check_choice("score_mode", score_mode, ("sigmoid", "softmax"))
        checks.check_not_negative("aux_ce_weight", aux_ce_weight)
        checks.check_not_negative("aux_ce_steps", aux_ce_steps)
        if aux_ce_steps and not aux_ce_weight:
            raise ValueError("aux_ce_steps needs aux_ce_weight > 0, got 0")
        if kwargs.get("use_fed_loss"):
            raise ValueError("the federated loss samples classes, a ranking needs them all: set USE_FED_LOSS to False")
        if kwargs.get("use_sigmoid_ce") and score_mode == "softmax":
            raise ValueError('use_sigmoid_ce contradicts score_mode="softmax": set USE_SIGMOID_CE to False')
        use_sigmoid = score_mode == "sigmoid"
        score_space = check_score_space(use_sigmoid, score_space, test_temperature)
        super().__init__(input_shape, **{**kwargs, "use_sigmoid_ce": use_sigmoid})
        self.score_space = score_space
        self.test_temperature = test_temperature
        self.aux_ce_weight = aux_ce_weight
        self.aux_ce_steps = aux_ce_steps
        self.num_steps = 0
        loss_fn = DetectionLoss(
            lambda_val=lambda_val,
            margin=margin,
            memory=memory,
            memory_warmup=memory_warmup,
            memory_gather=memory_gather,
            map_weight=map_weight,
            apc_weight=apc_weight,
            precision_loss=precision_loss,
            rank_plus_grad=rank_plus_grad,
        )
        object.__setattr__(self, "rank_loss", loss_fn)  # not as a submodule, whose memory would be in the state dict

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: ShapeSpec) -> dict[str, Any]:
        arguments = super().from_config(cfg, input_shape)
        node = cfg.MODEL.ROI_BOX_HEAD.RAMBO
        options = {key.lower(): value for key, value in node.items() if key not in ("ENABLED", "LOSS_WEIGHT")}
        options["score_space"] = options["score_space"] or None
        arguments["loss_weight"] = {**arguments["loss_weight"], "loss_cls": node.LOSS_WEIGHT}
        return {**arguments, **options}

    def losses(self, predictions: Predictions, proposals: list[Instances]) -> dict[str, Tensor]:
        """``loss_cls`` and ``loss_box_reg`` of proposals with the fields that detectron2's losses expect."""
        logits, deltas = predictions
        gt_classes = cat([p.gt_classes for p in proposals]) if proposals else logits.new_zeros(0, dtype=torch.int64)
        proposed = [p.proposal_boxes.tensor for p in proposals]
        wanted = [(p.gt_boxes if p.has("gt_boxes") else p.proposal_boxes).tensor for p in proposals]
        boxes, gt_boxes = (cat(some) if some else deltas.new_zeros(0, 4) for some in (proposed, wanted))
        parts = self._classification_losses(logits, gt_classes)
        self._log(logits.detach(), gt_classes, parts)
        losses = {
            "loss_cls": sum(parts.values(), start=logits.new_zeros((), dtype=torch.float32)),
            "loss_box_reg": self.box_reg_loss(boxes, gt_boxes, deltas, gt_classes),
        }
        return {name: value * self.loss_weight.get(name, 1.0) for name, value in losses.items()}

    def _classification_losses(self, logits: Tensor, gt_classes: Tensor) -> dict[str, Tensor]:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        ranked = logits[:, :-1] if self.use_sigmoid_ce else logits
        parts = self.rank_loss(scores_to_rank(ranked, self.use_sigmoid_ce, self.score_space), gt_classes)
        losses = {"loss_map": parts.map, "loss_apc": parts.apc}
        if self.aux_ce_weight:
            loss_ce = self.sigmoid_cross_entropy_loss if self.use_sigmoid_ce else cross_entropy
            losses["loss_ce"] = self._aux_factor(logits.requires_grad) * loss_ce(logits, gt_classes)
        return losses

    def _aux_factor(self, needs_grad: bool) -> float:
        if not self.aux_ce_steps:
            return self.aux_ce_weight
        factor = self.aux_ce_weight * max(0.0, 1 - self.num_steps / self.aux_ce_steps)
        if self.training and torch.is_grad_enabled() and needs_grad:
            self.num_steps += 1
        return factor

    def _log(self, logits: Tensor, gt_classes: Tensor, parts: dict[str, Tensor]) -> None:
        if not has_event_storage():
            return
        storage = get_event_storage()
        figures = {**{name: value.detach() for name, value in parts.items()}, **self.rank_loss.statistics}
        for name, value in figures.items():
            storage.put_scalar(f"rambo/{name}", value)
        objects = gt_classes < self.num_classes
        right = (logits if not self.use_sigmoid_ce else logits[:, :-1]).argmax(1) == gt_classes
        num_objects = int(objects.sum())
        if num_objects:
            storage.put_scalar("fast_rcnn/fg_cls_accuracy", (right & objects).sum() / num_objects)
        if not self.use_sigmoid_ce and len(gt_classes):
            storage.put_scalar("fast_rcnn/cls_accuracy", right.float().mean())
            if num_objects:
                missed = (logits.argmax(1) == self.num_classes) & objects
                storage.put_scalar("fast_rcnn/false_negative", missed.sum() / num_objects)

    def predict_probs(self, predictions: Predictions, proposals: list[Instances]) -> tuple[Tensor, ...]:
        """Scores (R_i, K + 1) of each image; with sigmoid the last column, the background, is 0."""
        if not self.use_sigmoid_ce:
            return super().predict_probs(predictions, proposals)
        scores = torch.sigmoid(predictions[0][:, :-1].float() / self.test_temperature)
        return nn.functional.pad(scores, (0, 1)).split([len(p) for p in proposals])
