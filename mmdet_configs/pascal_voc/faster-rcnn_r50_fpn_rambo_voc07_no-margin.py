# Ablation (Table 8): without a margin; AP50 74.6 in the paper, 75.7 with it.
_base_ = "./faster-rcnn_r50_fpn_rambo_voc07.py"

model = dict(roi_head=dict(bbox_head=dict(loss_cls=dict(margin=0.0))))
