_base_ = "./faster-rcnn_r50_fpn_1x_ce_coco.py"

custom_imports = dict(imports=["rambo_plugins.mmdet"], allow_failed_imports=False)
model = dict(
    roi_head=dict(bbox_head=dict(loss_cls=dict(_delete_=True, type="RamboLoss"))),
    test_cfg=dict(rcnn=dict(score_thr=0.0)),
)
