"""One-stage heads that call their classification loss once for all levels of the pyramid, so that all are ranked."""

from __future__ import annotations

from typing import Any

import torch
from mmdet.models.dense_heads import ATSSHead, RetinaHead
from mmdet.models.dense_heads.anchor_head import AnchorHead
from mmdet.models.detectors import SoftTeacher
from mmdet.registry import MODELS
from torch import nn

from rambo_plugins.mmdet.losses import CHANNELS_REMEDY, RamboLoss


class AllLevels:
    """Mixin before a dense head that calls ``loss_cls`` for each level: ``RamboLoss`` is called once, with all levels.

    The other losses of the head stay what they are.

    Raises:
        TypeError: a ``loss_cls`` that is not a ``RamboLoss``.
    """

    loss_cls: RamboLoss

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.loss_cls, RamboLoss):
            raise TypeError(
                f"{type(self).__name__} ranks with RamboLoss, got loss_cls of type {type(self.loss_cls).__name__}: "
                f"use the stock head for it"
            )

    def loss_by_feat(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Arguments and the dict of losses are those of the head."""
        with self.loss_cls.collect_levels() as levels:
            losses = super().loss_by_feat(*args, **kwargs)  # type: ignore[misc]
        del losses["loss_cls"]
        scores, labels, weights, avg_factors = zip(*levels, strict=True)
        weight = None if weights[0] is None else torch.cat(weights)
        loss_cls = self.loss_cls(torch.cat(scores), torch.cat(labels), weight, avg_factor=avg_factors[-1])
        losses.update(loss_cls if isinstance(loss_cls, dict) else {"loss_cls": loss_cls, **self.loss_cls.figures()})
        return losses


@MODELS.register_module()
class RamboRetinaHead(AllLevels, RetinaHead):
    """RetinaHead for ``RamboLoss``: its classification loss ranks the anchors of all levels together."""


@MODELS.register_module()
class RamboATSSHead(AllLevels, ATSSHead):
    """ATSSHead for ``RamboLoss``: its classification loss ranks the anchors of all levels together."""


def check_heads(model: nn.Module) -> None:
    """What is certain before a run: whether the heads of a model that have a ``RamboLoss`` can be trained with it.

    Raises:
        ValueError: a head with another number of channels than the loss ranks; one of mmdet's that calls its loss for
            each level; SoftTeacher with sigmoid or a memory.
    """
    for name, head in model.named_modules():
        loss = getattr(head, "loss_cls", None)
        if not isinstance(loss, RamboLoss):
            continue
        named = f"{name} ({type(head).__name__})"
        # SABL's classifier has more channels than its cls_out_channels.
        num_channels = getattr(getattr(head, "fc_cls", None), "out_features", getattr(head, "cls_out_channels", None))
        num_classes = getattr(head, "num_classes", None)
        if num_channels and num_classes and num_channels != num_classes + (not loss.use_sigmoid):
            raise ValueError(
                f"{named}: expected {num_classes + (not loss.use_sigmoid)} channels for {num_classes} classes with "
                f"use_sigmoid={loss.use_sigmoid}, got {num_channels}: {CHANNELS_REMEDY}"
            )
        by_level = (AnchorHead.loss_by_feat, ATSSHead.loss_by_feat)
        if isinstance(head, AnchorHead) and type(head).loss_by_feat in by_level and head.prior_generator.num_levels > 1:
            raise ValueError(
                f"{named} calls its loss for each level, and RamboLoss has to rank them together: take "
                "RamboRetinaHead or RamboATSSHead"
            )
        if isinstance(model, SoftTeacher) and (loss.use_sigmoid or loss.rank_loss.memory.batches):
            raise ValueError(
                f"{named}: SoftTeacher needs use_sigmoid=False, since it weighs boxes with the teacher's score of the "
                "background, which K sigmoids do not have, and memory=0, since it calls the loss for boxes that it "
                f"does not classify; got use_sigmoid={loss.use_sigmoid}, memory={loss.rank_loss.memory.batches}"
            )
