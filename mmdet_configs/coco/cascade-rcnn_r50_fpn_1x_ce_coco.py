# The twin of cascade-rcnn_r50_fpn_1x_rambo_coco.py: mmdet's own config.
_base_ = "mmdet::cascade_rcnn/cascade-rcnn_r50_fpn_1x_coco.py"
