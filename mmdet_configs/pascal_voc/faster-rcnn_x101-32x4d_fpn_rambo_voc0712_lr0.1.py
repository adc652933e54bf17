# The learning rate that the paper states, 20 times what mmdet's scales to: compare both.
_base_ = "./faster-rcnn_x101-32x4d_fpn_rambo_voc0712.py"

optim_wrapper = dict(optimizer=dict(lr=0.1))
