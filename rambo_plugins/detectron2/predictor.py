"""``RamboFastRCNNOutputLayers``: detectron2's box predictor whose classification loss is ``core.detection``'s.

It has K + 1 outputs whatever the mode, as detectron2's has, so that checkpoints of the model zoo load and the scores of
cascade stages can be averaged. The memory is no part of its state dict, in which such a checkpoint would miss it:
``RamboState`` takes it into a checkpoint of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from detectron2.config import CfgNode, configurable
from detectron2.layers import ShapeSpec, cat, cross_entropy
from detectron2.modeling.roi_heads import FastRCNNOutputLayers
from detectron2.structures import Instances
from detectron2.utils.events import get_event_storage, has_event_storage
from detectron2.utils.logger import log_first_n
from torch import Tensor, nn

from rambo_plugins.core import checks
from rambo_plugins.core.detection import DetectionLoss, check_score_space, scores_to_rank
from rambo_plugins.detectron2.config import rambo_node

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

    if TYPE_CHECKING:  # else TorchScript would try to compile what is annotated
        rank_loss: DetectionLoss
        score_space: str
        test_temperature: float
        aux_ce_weight: float
        aux_ce_steps: int
        num_steps: int
        _begun: bool

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
        if not isinstance(aux_ce_steps, Integral) or isinstance(aux_ce_steps, bool) or aux_ce_steps < 0:
            raise ValueError(f"aux_ce_steps must be an integer >= 0, got {aux_ce_steps!r}")
        for name, switch in (("memory_gather", memory_gather), ("rank_plus_grad", rank_plus_grad)):
            if not isinstance(switch, bool):
                raise ValueError(f"{name} must be True or False, got {switch!r}")
        if aux_ce_steps and not aux_ce_weight:
            raise ValueError("aux_ce_steps needs aux_ce_weight > 0, got 0")
        if kwargs.get("use_fed_loss"):
            raise ValueError("the federated loss samples classes, a ranking needs them all: set USE_FED_LOSS to False")
        if kwargs.get("use_sigmoid_ce") and score_mode == "softmax":
            raise ValueError('use_sigmoid_ce contradicts score_mode="softmax": set USE_SIGMOID_CE to False')
        use_sigmoid = score_mode == "sigmoid"
        score_space = check_score_space(use_sigmoid, score_space, test_temperature)
        kwargs["loss_weight"] = _loss_weights(kwargs.get("loss_weight", 1.0))
        super().__init__(input_shape, **{**kwargs, "use_sigmoid_ce": use_sigmoid})
        self.score_space = score_space
        self.test_temperature = float(test_temperature)
        self.aux_ce_weight = float(aux_ce_weight)
        self.aux_ce_steps = int(aux_ce_steps)
        self.num_steps = 0
        self._begun = False
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
        known = rambo_node().keys()
        if node.keys() != known:
            raise ValueError(f"MODEL.ROI_BOX_HEAD.RAMBO: expected the keys {sorted(known)}, got {sorted(node)}")
        options = {key.lower(): value for key, value in node.items() if key not in ("ENABLED", "LOSS_WEIGHT")}
        options["score_space"] = options["score_space"] or None
        arguments["loss_weight"] = {**arguments["loss_weight"], "loss_cls": node.LOSS_WEIGHT}
        return {**arguments, **options}

    def train(self, mode: bool = True) -> RamboFastRCNNOutputLayers:
        self.rank_loss.train(mode)
        return super().train(mode)

    def losses(self, predictions: Predictions, proposals: list[Instances]) -> dict[str, Tensor]:
        """``loss_cls`` and ``loss_box_reg`` of proposals with the fields that detectron2's losses expect.

        The memory takes the batch in at the end, so a call that fails can be repeated. To repeat a step that failed
        later, in the backward pass, keep ``run_state()`` of before and ``restore`` it.

        Raises:
            ValueError: other numbers of predictions and proposals, labels of no class (on a GPU: an assertion).
        """
        logits, deltas = predictions
        gt_classes = cat([p.gt_classes for p in proposals]) if proposals else logits.new_zeros(0, dtype=torch.int64)
        proposed = [p.proposal_boxes.tensor for p in proposals]
        wanted = [(p.gt_boxes if p.has("gt_boxes") else p.proposal_boxes).tensor for p in proposals]
        none = deltas.new_zeros(0, len(self.box2box_transform.weights))
        boxes, gt_boxes = (cat(some) if some else none for some in (proposed, wanted))
        self._check_labels(logits, gt_classes)
        counts = self.training and torch.is_grad_enabled() and logits.requires_grad
        if counts and not self._begun:
            self._say_what_is_missing()
        box_loss = self.box_reg_loss(boxes, gt_boxes, deltas, gt_classes)
        parts = self._classification_losses(logits, gt_classes)
        self._log(logits.detach(), gt_classes, parts)
        if counts:
            self._begun = True
            self.num_steps += 1
        losses = {
            "loss_cls": sum(parts.values(), start=logits.new_zeros((), dtype=torch.float32)),
            "loss_box_reg": box_loss,
        }
        return {name: value * self.loss_weight.get(name, 1.0) for name, value in losses.items()}

    def run_state(self) -> dict[str, Any]:
        """The steps taken and the memory, on the CPU: what a run needs besides the weights to go on exactly."""
        memory = {name: value.cpu() for name, value in self.rank_loss.state_dict().items()}
        return {"num_steps": self.num_steps, "num_classes": self.num_classes, "rank_loss": memory}

    def restore(self, state: dict[str, Any], of_another_process: bool = False) -> None:
        """Take over a ``run_state``; from one of another process the steps, and the memory if it is common to all.

        Raises:
            ValueError: the state is of another number of classes.
        """
        if state["num_classes"] != self.num_classes:
            raise ValueError(
                f"the memory in the checkpoint is of {state['num_classes']} classes, the model has {self.num_classes}"
            )
        self._begun = True
        self.num_steps = state["num_steps"]
        self.rank_loss.memory.reset()
        both = self.rank_loss.memory.batches and state["rank_loss"]  # that run and this one have a memory
        if both and (self.rank_loss.memory.gather or not of_another_process):
            self.rank_loss.load_state_dict(state["rank_loss"])

    def _check_labels(self, logits: Tensor, gt_classes: Tensor) -> None:
        if gt_classes.shape != logits.shape[:1]:
            raise ValueError(
                f"proposals: expected one for each of the {len(logits)} predictions, got {len(gt_classes)}"
            )
        right = ((gt_classes >= 0) & (gt_classes <= self.num_classes)).all()
        if gt_classes.device.type != "cpu":
            torch._assert_async(right, f"rambo_plugins: a label outside of [0, {self.num_classes}]")
        elif not right:
            raise ValueError(
                f"labels must be in [0, {self.num_classes}] for {self.num_classes} classes, the last one the "
                f"background, got {int(gt_classes.min())} to {int(gt_classes.max())}"
            )

    def _say_what_is_missing(self) -> None:
        iteration = get_event_storage().iter if has_event_storage() else 0
        begins = ["an empty memory"] if self.rank_loss.memory.batches else []
        begins += ["aux_ce_steps from 0"] if self.aux_ce_steps else []
        if iteration and begins:
            log_first_n(
                logging.WARNING,
                f"training goes on at iteration {iteration} with {' and '.join(begins)}: the checkpoint has no state "
                "of RaMBO, see rambo_plugins.detectron2.RamboState",
                name="detectron2.rambo_plugins",
                key="message",
            )

    def _classification_losses(self, logits: Tensor, gt_classes: Tensor) -> dict[str, Tensor]:
        logits = logits if logits.dtype == torch.float64 else logits.float()
        losses = {}
        if self.aux_ce_weight:
            loss_ce = self.sigmoid_cross_entropy_loss if self.use_sigmoid_ce else cross_entropy
            losses["loss_ce"] = self._aux_factor() * loss_ce(logits, gt_classes)
        ranked = logits[:, :-1] if self.use_sigmoid_ce else logits
        parts = self.rank_loss(scores_to_rank(ranked, self.use_sigmoid_ce, self.score_space), gt_classes)
        return {"loss_map": parts.map, "loss_apc": parts.apc, **losses}

    def _aux_factor(self) -> float:
        if not self.aux_ce_steps:
            return self.aux_ce_weight
        return self.aux_ce_weight * max(0.0, 1 - self.num_steps / self.aux_ce_steps)

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

    def predict_probs(self, predictions: Predictions, proposals: list[Instances]) -> list[Tensor]:
        """Scores (R_i, K + 1) of each image; with sigmoid the last column, the background, is 0."""
        logits = predictions[0]
        if self.use_sigmoid_ce:
            scores = nn.functional.pad(torch.sigmoid(logits[:, :-1].float() / self.test_temperature), (0, 1))
        else:
            scores = nn.functional.softmax(logits, dim=-1)
        # The length of a tensor, not of the proposals: of these a trace would keep the number of its example.
        return scores.split([p.proposal_boxes.tensor.shape[0] for p in proposals])


def _loss_weights(given: float | dict[str, float]) -> dict[str, float]:
    """As a dict with the names of both losses or fewer."""
    names = ("loss_cls", "loss_box_reg")
    weights = dict(given) if isinstance(given, Mapping) else dict.fromkeys(names, given)
    for name, value in weights.items():
        checks.check_choice("a name in loss_weight", name, names)
        checks.check_not_negative(f"loss_weight of {name}", value)
    return {name: float(value) for name, value in weights.items()}
