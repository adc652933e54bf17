# Cross-entropy on VOC07: the first of the two data sets of VOC07+12.
_base_ = "./faster-rcnn_r50_fpn_ce_voc0712.py"

train_dataloader = dict(
    dataset=dict(dataset=dict(datasets=[_base_.train_dataloader.dataset.dataset.datasets[0]])),
)
