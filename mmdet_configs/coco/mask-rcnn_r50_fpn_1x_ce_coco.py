# The twin of mask-rcnn_r50_fpn_1x_rambo_coco.py: mmdet's own config.
_base_ = "mmdet::mask_rcnn/mask-rcnn_r50_fpn_1x_coco.py"
