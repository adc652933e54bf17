"""``RamboLoss``: ``core.detection.DetectionLoss`` as a classification loss that the heads of mmdet can call."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from mmdet.models.losses import accuracy
from mmdet.registry import MODELS
from mmengine.logging import print_log
from torch import Tensor, nn

from rambo_plugins.core import checks
from rambo_plugins.core.detection import DetectionLoss, check_score_space, scores_to_rank

CHANNELS_REMEDY = (
    "a head that hard-codes K + 1 channels (SABL, Double-Head) needs use_sigmoid=False; a dense head needs "
    "use_sigmoid=True written in the config of loss_cls"
)

Level = tuple[Tensor, Tensor, Tensor | None, float | Tensor | None]
"""The arguments of one call: cls_score, label, weight, avg_factor."""


@MODELS.register_module()
class RamboLoss(nn.Module):
    r"""Mean average precision and average precision over all classes as a head's ``loss_cls`` (Eqs. 21-23), 2 : 1.

    .. math:: L = w \left( \frac{w_{map} L_{mAP} + w_{apc} L_{APC}}{w_{map} + w_{apc}} + a_t L_{aux} \right)

    The ranking part, its λ, memory and shares are ``core.detection.DetectionLoss``; loss weights, stage weights, AMP's
    loss scale and gradient accumulation multiply it without a change of λ.

    * ``use_sigmoid=True``: K channels, one a class and none for the background. The logits are ranked; a detection's
      score is sigmoid(logit / test_temperature). The head's hooks for custom losses are set, and a RoI head gets its K
      channels by itself. A ranking leaves a common shift of all logits free, so ``score_thr=0.05`` has no meaning: test
      with 0, then choose.
    * ``use_sigmoid=False``: K + 1 channels, softmax, the probabilities of the K classes are ranked; all else is as for
      cross-entropy, also in heads that hard-code K + 1 channels. Softmax changes the order between boxes, which is why
      the logits cannot be ranked.

    Args:
        use_sigmoid: see above. Dense heads read it in the config: state it there.
        loss_weight: w, what the whole loss is multiplied with.
        lambda_val: λ > 0.
        margin: α ≥ 0, in units of what is ranked: 0.15 is little among logits, much among probabilities.
        memory: τ, the batches (calls of the loss) that are ranked together with the current one; 0 for heads that call
            one loss several times a step.
        memory_warmup: batches that are kept before they are ranked.
        memory_gather: rank the scores of all processes together.
        map_weight, apc_weight: w_map : w_apc.
        precision_loss: "linear", the average precisions, or "log", see ``DetectionLoss``.
        score_space: "logits" or "probabilities", what is ranked; default: logits with sigmoid, which allows both.
        rank_plus_grad: see ``core.rank_loss``.
        test_temperature: T > 0, spreads the scores of detections when below 1; needs sigmoid. It does not change the
            order of the boxes, unless the head multiplies the scores with another figure (centerness).
        aux_weight: a ≥ 0, the weight of a further classification loss on the same channels.
        aux_steps: a_t falls linearly from a to 0 within so many calls in training; 0: it stays a.
        aux_loss: the config of that loss; default: cross-entropy of the same activation.
        return_dict: return the parts and figures as a dict; only RoI heads that are ``BBoxHead``s, and this package's
            one-stage heads, take one.

    Raises:
        TypeError, ValueError: an argument of the wrong type or out of its range, or arguments that do not go together.

    ``rank_loss`` is the ``DetectionLoss``. Its memory and the steps of ``aux_steps`` belong to a run and not to the
    weights: they are no part of the ``state_dict``, so that weights start a run anew. ``run_state`` and ``resume`` save
    and restore them, which ``RamboStateHook`` does in mmdet's runs.

    >>> loss_fn = RamboLoss(memory=0)
    >>> cls_score, label = torch.tensor([[2.0, -1.0], [1.0, -2.0], [-3.0, 0.5]]), torch.tensor([2, 0, 1])
    >>> loss_fn(cls_score, label)  # the first box is background
    tensor(0.3056)
    """

    rank_loss: DetectionLoss

    def __init__(
        self,
        use_sigmoid: bool = True,
        loss_weight: float = 1.0,
        lambda_val: float = 0.5,
        margin: float = 0.15,
        memory: int = 7,
        memory_warmup: int = 0,
        memory_gather: bool = False,
        map_weight: float = 2.0,
        apc_weight: float = 1.0,
        precision_loss: str = "linear",
        score_space: str | None = None,
        rank_plus_grad: bool = False,
        test_temperature: float = 1.0,
        aux_weight: float = 0.0,
        aux_steps: int = 0,
        aux_loss: dict[str, Any] | None = None,
        return_dict: bool = False,
    ) -> None:
        super().__init__()
        aux_weight = checks.check_not_negative("aux_weight", aux_weight)
        aux_steps = checks.check_integer("aux_steps", aux_steps, 0)
        if not aux_weight and (aux_loss is not None or aux_steps):
            raise ValueError("aux_loss and aux_steps need aux_weight > 0, got 0")
        self.use_sigmoid = use_sigmoid = checks.check_flag("use_sigmoid", use_sigmoid)
        self.loss_weight = checks.check_not_negative("loss_weight", loss_weight)
        self.score_space = check_score_space(use_sigmoid, score_space, test_temperature)
        self.test_temperature = float(test_temperature)
        self.aux_weight = aux_weight
        self.aux_steps = aux_steps
        self.return_dict = checks.check_flag("return_dict", return_dict)
        rank_loss = DetectionLoss(
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
        object.__setattr__(self, "rank_loss", rank_loss)  # not as a submodule, whose memory would be in the state dict
        if aux_weight:
            self.aux_loss = MODELS.build(aux_loss or {"type": "CrossEntropyLoss", "use_sigmoid": use_sigmoid})
        self.num_steps = 0
        # The contract of a custom loss in mmdet. With softmax nothing is custom.
        self.custom_cls_channels = self.custom_activation = self.custom_accuracy = use_sigmoid
        self.num_classes: int | None = None  # of a RoI head, which asks for its channels
        self._checked_channels = False
        self._num_calls: int | None = 0  # None: they are no longer counted
        self._levels: list[Level] | None = None

    def get_cls_channels(self, num_classes: int) -> int:
        """Channels of a RoI head's classifier, called while the head is built (with sigmoid): ``num_classes``."""
        self.num_classes = num_classes
        return num_classes

    def get_activation(self, cls_score: Tensor) -> Tensor:
        """Scores (N, K + 1) of a RoI head, whose last column, the background, is 0; (N, K) of a dense head."""
        scores = torch.sigmoid(cls_score.float() / self.test_temperature)
        return scores if self.num_classes is None else nn.functional.pad(scores, (0, 1))

    def get_accuracy(self, cls_score: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """For the log: accuracy in % among the boxes with an object, and the ``figures`` of the last call."""
        objects = labels < cls_score.shape[1]
        return {"acc_classes": accuracy(cls_score[objects], labels[objects]), **self.figures()}

    def figures(self) -> dict[str, Tensor]:
        """``ap_map``, ``ap_apc``, ``share_zero_gradient`` of the last call, see ``DetectionLoss.statistics``."""
        return dict(self.rank_loss.statistics)

    def run_state(self) -> dict[str, Any]:
        """What a run has besides its weights, for ``resume``: tensors on the CPU, and numbers."""
        memory = {name: value.cpu() for name, value in self.rank_loss.memory.state_dict().items()}
        return {"memory": memory or None, "num_steps": self.num_steps}

    def resume(self, state: dict[str, Any] | None) -> None:
        """Go on from a ``run_state``; what it does not hold, or None, starts anew.

        Raises:
            RuntimeError: a state that is none.
        """
        self.rank_loss.memory.reset()
        self.num_steps = state["num_steps"] if state else 0
        if state and state["memory"] and self.rank_loss.memory.batches:
            self.rank_loss.memory.load_state_dict(state["memory"])

    def train(self, mode: bool = True) -> RamboLoss:
        self.rank_loss.train(mode)
        return super().train(mode)

    @torch.compiler.disable  # it counts its steps and its memory grows: each would be compiled anew
    def forward(
        self,
        cls_score: Tensor,
        label: Tensor,
        weight: Tensor | None = None,
        avg_factor: float | Tensor | None = None,
        reduction_override: str | None = None,
    ) -> Tensor | dict[str, Tensor]:
        """The loss of the boxes of a batch.

        Args:
            cls_score: (N, K) float, or (N, K + 1) with softmax.
            label: (N,) integer in [0, K]; K is the background.
            weight: (N,) float; 0: the box is neither ranked nor remembered. All others are ranked alike; the fractions
                count in the auxiliary loss alone.
            avg_factor: for the auxiliary loss; average precision is a mean already and takes no notice.
            reduction_override: None or "mean".

        Returns:
            A scalar; with ``return_dict`` ``loss_cls_map``, ``loss_cls_apc`` and, with an auxiliary loss,
            ``loss_cls_aux``, which add up to it, and the ``figures``.

        Raises:
            TypeError, ValueError: what is not supported: a loss per box (OHEM and other samplers that mine by it),
                quality targets (GFL, TOOD), a head with K + 1 channels where sigmoid needs K; wrong shapes or labels.
        """
        if reduction_override not in (None, "mean"):
            raise ValueError(
                f"RamboLoss has one value for all boxes, got reduction_override={reduction_override!r}: samplers that "
                "mine boxes by their loss (OHEMSampler, ScoreHLRSampler) need another; use RandomSampler"
            )
        if isinstance(label, (tuple, list)):
            raise TypeError(
                f"RamboLoss takes class labels (N,), got a {type(label).__name__} of {len(label)}: heads with quality "
                "targets (GFL, TOOD) are not supported; RamboATSSHead, RamboRetinaHead and FCOSHead are"
            )
        if self._levels is not None:
            self._levels.append((cls_score, label, weight, avg_factor))
            return cls_score.new_zeros(())
        self._check_channels(cls_score, label)
        training = self.training and torch.is_grad_enabled() and cls_score.requires_grad
        with torch.autocast(cls_score.device.type, enabled=False):
            logits = cls_score if cls_score.dtype == torch.float64 else cls_score.float()
            if self.aux_weight:
                aux = self.aux_loss(logits, label, weight, avg_factor=avg_factor)
            # Last, since it changes the memory: a call that fails can be repeated.
            parts = self.rank_loss(scores_to_rank(logits, self.use_sigmoid, self.score_space), label, weight)
        losses = {"loss_cls_map": self.loss_weight * parts.map, "loss_cls_apc": self.loss_weight * parts.apc}
        if self.aux_weight:
            left = max(0.0, 1 - self.num_steps / self.aux_steps) if self.aux_steps else 1.0
            losses["loss_cls_aux"] = self.loss_weight * self.aux_weight * left * aux
        if training:
            self.num_steps += 1
            self._num_calls = None if self._num_calls is None else self._num_calls + 1
        if self.return_dict:
            return losses | self.figures()
        return sum(losses.values(), start=cls_score.new_zeros((), dtype=logits.dtype))

    def _check_channels(self, cls_score: Tensor, label: Tensor) -> None:
        num_channels = cls_score.shape[1] if cls_score.dim() == 2 else None
        if num_channels is None:
            raise ValueError(f"cls_score must have shape (N, channels), got {tuple(cls_score.shape)}")
        if self.use_sigmoid and self.num_classes is not None and num_channels != self.num_classes:
            raise ValueError(
                f"expected {self.num_classes} channels for as many classes, got {num_channels}: {CHANNELS_REMEDY}"
            )
        if self.use_sigmoid and self.num_classes is None and not self._checked_channels:
            # Once, since it synchronises with the device. A batch can look like this rightly, so it is no error; before
            # a run ``check_heads`` knows. A label of the background says that the last channel is not the background.
            self._checked_channels = True
            if (2 * (label == num_channels - 1).sum() > len(label)) and not (label == num_channels).any():
                print_log(
                    f"RamboLoss: most boxes have the last label of {num_channels} channels and none is background. If "
                    f"that label is the background, there is one channel too many: {CHANNELS_REMEDY}",
                    logger="current",
                    level=logging.WARNING,
                )

    def check_calls(self, name: str) -> None:
        """After the first step of a run: warn, with the loss's name in the model, where it was not called once."""
        num_calls, self._num_calls = self._num_calls, None
        if num_calls == 0:
            said = "was not called in the first step: its head does not use it, or there were no boxes"
        elif num_calls is not None and num_calls > 1:
            said = (
                f"was called {num_calls} times in the first step: each call ranks its own boxes and is one of the "
                f"memory={self.rank_loss.memory.batches} batches. RamboRetinaHead and RamboATSSHead rank all levels "
                "together; for others take memory=0"
            )
        else:
            return
        print_log(f"{name} {said}", logger="current", level=logging.WARNING)

    @contextmanager
    def collect_levels(self) -> Iterator[list[Level]]:
        """Calls within are put on the list, and give 0."""
        levels: list[Level] = []
        self._levels = levels
        try:
            yield levels
        finally:
            self._levels = None

    def extra_repr(self) -> str:
        names = ("use_sigmoid", "loss_weight", "score_space", "test_temperature", "aux_weight", "aux_steps")
        own = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{own}, {self.rank_loss.extra_repr()}, {self.rank_loss.memory.extra_repr()}"
