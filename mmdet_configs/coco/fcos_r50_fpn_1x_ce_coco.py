# The twin of fcos_r50_fpn_1x_rambo_coco.py: mmdet's own config.
_base_ = "mmdet::fcos/fcos_r50-caffe_fpn_gn-head_1x_coco.py"
