# Cross-entropy, with its usual weight of 1, and 10 times the rank loss of the probabilities: the recipe for a
# detector from scratch.
_base_ = "./faster-rcnn_r50_fpn_rambo_voc07.py"

model = dict(
    roi_head=dict(
        bbox_head=dict(loss_cls=dict(use_sigmoid=False, margin=0.02, loss_weight=10.0, aux_weight=0.1)),
    ),
)
