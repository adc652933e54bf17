"""The node ``MODEL.ROI_BOX_HEAD.RAMBO`` of detectron2's yaml config."""

from __future__ import annotations

from detectron2.config import CfgNode


def add_rambo_config(cfg: CfgNode) -> None:
    """Add the node with its defaults, the paper's, to a config of ``get_cfg()``; a config that has it stays as it is.

    The keys are the arguments of ``RamboFastRCNNOutputLayers``, where they are explained, in capitals; ENABLED False
    gives the Rambo heads detectron2's own predictor back, LOSS_WEIGHT is the weight of ``loss_cls``.

    >>> from detectron2.config import get_cfg
    >>> cfg = get_cfg()
    >>> add_rambo_config(cfg)
    >>> cfg.MODEL.ROI_BOX_HEAD.RAMBO.LAMBDA_VAL
    0.5
    """
    if "RAMBO" not in cfg.MODEL.ROI_BOX_HEAD:
        cfg.MODEL.ROI_BOX_HEAD.RAMBO = rambo_node()


def rambo_node() -> CfgNode:
    """The node with its defaults."""
    node = CfgNode()
    node.ENABLED = True
    node.LOSS_WEIGHT = 1.0
    node.SCORE_MODE = "sigmoid"
    node.SCORE_SPACE = ""  # empty: logits with sigmoid, probabilities with softmax
    node.LAMBDA_VAL = 0.5
    node.MARGIN = 0.15
    node.MEMORY = 7
    node.MEMORY_WARMUP = 0
    node.MEMORY_GATHER = False
    node.MAP_WEIGHT = 2.0
    node.APC_WEIGHT = 1.0
    node.PRECISION_LOSS = "linear"
    node.RANK_PLUS_GRAD = False
    node.TEST_TEMPERATURE = 1.0
    node.AUX_CE_WEIGHT = 0.0
    node.AUX_CE_STEPS = 0
    return node
