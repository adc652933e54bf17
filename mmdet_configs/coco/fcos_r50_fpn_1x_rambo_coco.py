# All levels ranked together; without memory, which would hold some 100,000 boxes a step.
_base_ = "./fcos_r50_fpn_1x_ce_coco.py"

custom_imports = dict(imports=["rambo_plugins.mmdet"], allow_failed_imports=False)
model = dict(
    bbox_head=dict(loss_cls=dict(_delete_=True, type="RamboLoss", use_sigmoid=True, memory=0, test_temperature=0.1)),
    test_cfg=dict(score_thr=0.0),
)
