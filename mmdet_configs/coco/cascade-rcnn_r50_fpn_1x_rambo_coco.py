# Each stage has its own RamboLoss, and with it its own memory.
_base_ = "./cascade-rcnn_r50_fpn_1x_ce_coco.py"

custom_imports = dict(imports=["rambo_plugins.mmdet"], allow_failed_imports=False)
model = dict(
    roi_head=dict(
        bbox_head=[{**head, "loss_cls": dict(type="RamboLoss")} for head in _base_.model.roi_head.bbox_head],
    ),
    test_cfg=dict(rcnn=dict(score_thr=0.0)),
)
