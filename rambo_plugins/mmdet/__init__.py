"""RaMBO for mmdet: ``RamboLoss`` in place of any RoI head's ``loss_cls``, and the one-stage heads that rank all levels.

A config brings it in with ``custom_imports = dict(imports=["rambo_plugins.mmdet"], allow_failed_imports=False)``.
"""

try:
    import mmdet  # noqa: F401
except ModuleNotFoundError as error:
    raise ImportError('rambo_plugins.mmdet needs mmdet: pip install "rambo-plugins[mmdet]"', name=error.name) from error

from rambo_plugins.mmdet.heads import RamboATSSHead, RamboRetinaHead
from rambo_plugins.mmdet.hooks import RamboStateHook
from rambo_plugins.mmdet.losses import RamboLoss

__all__ = ["RamboATSSHead", "RamboLoss", "RamboRetinaHead", "RamboStateHook"]
