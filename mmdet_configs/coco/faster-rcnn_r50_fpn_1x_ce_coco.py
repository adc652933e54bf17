# The twin of faster-rcnn_r50_fpn_1x_rambo_coco.py: mmdet's own config.
_base_ = "mmdet::faster_rcnn/faster-rcnn_r50_fpn_1x_coco.py"
