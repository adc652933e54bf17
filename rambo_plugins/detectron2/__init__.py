"""RaMBO for detectron2: a box predictor with the rank loss, ROI heads that have it, and their node of the config.

yaml: ``add_rambo_config(cfg)``, then ``MODEL.ROI_HEADS.NAME: RamboROIHeads``. LazyConfig:
``model.roi_heads.box_predictor._target_ = RamboFastRCNNOutputLayers``. A stock training script that cannot be changed:
``DETECTRON2_ENV_MODULE=rambo_plugins.detectron2.env``. The memory of a run is kept by the hook ``RamboState``.
"""

try:
    import detectron2  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        'rambo_plugins.detectron2 needs detectron2, which is not on PyPI: pip install "rambo-plugins[detectron2]" '
        "installs what it needs, the README says how to install itself",
        name=error.name,
    ) from error

from rambo_plugins.detectron2.checkpoint import RamboState
from rambo_plugins.detectron2.config import add_rambo_config
from rambo_plugins.detectron2.predictor import RamboFastRCNNOutputLayers
from rambo_plugins.detectron2.roi_heads import RamboCascadeROIHeads, RamboRes5ROIHeads, RamboROIHeads

__all__ = [
    "RamboCascadeROIHeads",
    "RamboFastRCNNOutputLayers",
    "RamboROIHeads",
    "RamboRes5ROIHeads",
    "RamboState",
    "add_rambo_config",
]
