"""detectron2's ROI heads with ``RamboFastRCNNOutputLayers`` as their box predictors, for yaml configs.

LazyConfig needs none of them: there the predictor is an argument of the heads.
"""

from typing import Any

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import ROI_HEADS_REGISTRY
from detectron2.modeling.roi_heads import CascadeROIHeads, FastRCNNOutputLayers, Res5ROIHeads, StandardROIHeads

from rambo_plugins.detectron2.predictor import RamboFastRCNNOutputLayers


class RamboPredictors:
    """Mixin before ROI heads: replaces what they build as ``box_predictor``, of each stage of a cascade."""

    @classmethod
    def from_config(cls, cfg: CfgNode, input_shape: dict[str, ShapeSpec]) -> dict[str, Any]:
        if "RAMBO" not in cfg.MODEL.ROI_BOX_HEAD:
            raise KeyError(f"{cls.__name__} reads MODEL.ROI_BOX_HEAD.RAMBO: call add_rambo_config(cfg) first")
        arguments = super().from_config(cfg, input_shape)  # type: ignore[misc]
        if not cfg.MODEL.ROI_BOX_HEAD.RAMBO.ENABLED:
            return arguments
        if "box_predictors" in arguments:
            arguments["box_predictors"] = [_rambo(cfg, predictor) for predictor in arguments["box_predictors"]]
        else:
            arguments["box_predictor"] = _rambo(cfg, arguments["box_predictor"])
        return arguments


def _rambo(cfg: CfgNode, predictor: FastRCNNOutputLayers) -> RamboFastRCNNOutputLayers:
    shape = ShapeSpec(channels=predictor.cls_score.in_features)
    return RamboFastRCNNOutputLayers(cfg, shape, box2box_transform=predictor.box2box_transform)


@ROI_HEADS_REGISTRY.register()
class RamboROIHeads(RamboPredictors, StandardROIHeads):
    """StandardROIHeads (FPN, C5) with the rank loss."""

    # For TorchScript, as detectron2 annotates the class that this one inherits from; annotations are not inherited.
    mask_on: torch.jit.Final[bool]  # type: ignore[misc]
    keypoint_on: torch.jit.Final[bool]  # type: ignore[misc]


@ROI_HEADS_REGISTRY.register()
class RamboRes5ROIHeads(RamboPredictors, Res5ROIHeads):
    """Res5ROIHeads (C4) with the rank loss."""


@ROI_HEADS_REGISTRY.register()
class RamboCascadeROIHeads(RamboPredictors, CascadeROIHeads):
    """CascadeROIHeads with the rank loss, whose memory each stage has for itself."""
