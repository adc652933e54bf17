_base_ = "./faster-rcnn_r50_fpn_rambo_voc0712.py"

model = dict(
    backbone=dict(
        type="ResNeXt",
        depth=101,
        groups=32,
        base_width=4,
        init_cfg=dict(type="Pretrained", checkpoint="open-mmlab://resnext101_32x4d"),
    ),
)
