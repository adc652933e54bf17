# The twin of atss_r50_fpn_1x_rambo_coco.py: mmdet's own config.
_base_ = "mmdet::atss/atss_r50_fpn_1x_coco.py"
