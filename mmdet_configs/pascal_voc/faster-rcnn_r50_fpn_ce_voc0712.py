# Cross-entropy on VOC07+12: mmdet's own config, at the paper's batch of 8 images on one GPU.
# An epoch repeats the data 3 times: 4 epochs, a tenth of the learning rate after 3, are the paper's 12 and 9.
_base_ = "mmdet::pascal_voc/faster-rcnn_r50_fpn_1x_voc0712.py"

train_dataloader = dict(batch_size=8)
optim_wrapper = dict(optimizer=dict(lr=0.005))  # mmdet's 0.01 is for 16 images
auto_scale_lr = dict(base_batch_size=8)
