"""For training scripts that know nothing of this package: ``DETECTRON2_ENV_MODULE=rambo_plugins.detectron2.env``.

detectron2 calls ``setup_environment`` when it is imported first; from then on ``get_cfg()`` has the RaMBO node, the
registry the heads, and each ``DefaultTrainer``, that of ``tools/train_net.py``, keeps the memories in its checkpoints.
"""

from __future__ import annotations

from rambo_plugins.detectron2 import add_rambo_config


def setup_environment() -> None:
    from detectron2.config.defaults import _C
    from detectron2.engine import DefaultTrainer

    from rambo_plugins.detectron2.checkpoint import with_memory

    add_rambo_config(_C)
    DefaultTrainer.build_hooks = with_memory(DefaultTrainer.build_hooks)
