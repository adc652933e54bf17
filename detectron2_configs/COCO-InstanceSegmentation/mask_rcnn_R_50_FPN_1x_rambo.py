"""Mask R-CNN with the rank loss as a LazyConfig."""

from detectron2.model_zoo import get_config

from rambo_plugins.detectron2 import RamboFastRCNNOutputLayers

config = get_config("COCO-InstanceSegmentation/mask_rcnn_R_50_FPN_1x.py")
dataloader, lr_multiplier, optimizer, train = (
    config[name] for name in ("dataloader", "lr_multiplier", "optimizer", "train")
)
model = config.model
model.roi_heads.box_predictor._target_ = RamboFastRCNNOutputLayers
model.roi_heads.box_predictor.test_score_thresh = 0.0
