"""RaMBO for pytorch-metric-learning: losses for its trainers, miners, reducers, its memory and DDP wrappers, a sampler.

``rambo_plugins.pml.datasets``, which needs torchvision, reads the data sets of the paper and folders of images.
"""

try:
    import pytorch_metric_learning  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError(
        'rambo_plugins.pml needs pytorch-metric-learning: pip install "rambo-plugins[pml]"', name=error.name
    ) from error

from rambo_plugins.pml.losses import PAPER_PRESETS, RamboAPLoss, RamboRecallLoss
from rambo_plugins.pml.samplers import SuperLabelBatchSampler
from rambo_plugins.pml.wrappers import RamboCrossBatchMemory, RamboSelfSupervisedLoss

__all__ = [
    "PAPER_PRESETS",
    "RamboAPLoss",
    "RamboCrossBatchMemory",
    "RamboRecallLoss",
    "RamboSelfSupervisedLoss",
    "SuperLabelBatchSampler",
]
