"""One-stage heads that call their classification loss once for all levels of the pyramid, so that all are ranked."""

from __future__ import annotations

from typing import Any

from mmdet.models.dense_heads import ATSSHead, RetinaHead
from mmdet.registry import MODELS

from rambo_plugins.mmdet.losses import RamboLoss


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
        loss_cls = levels.loss()
        losses.update(loss_cls if isinstance(loss_cls, dict) else {"loss_cls": loss_cls, **self.loss_cls.figures()})
        return losses


@MODELS.register_module()
class RamboRetinaHead(AllLevels, RetinaHead):
    """RetinaHead for ``RamboLoss``: its classification loss ranks the anchors of all levels together."""


@MODELS.register_module()
class RamboATSSHead(AllLevels, ATSSHead):
    """ATSSHead for ``RamboLoss``: its classification loss ranks the anchors of all levels together."""
