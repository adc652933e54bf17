"""For training scripts that know nothing of this package: ``DETECTRON2_ENV_MODULE=rambo_plugins.detectron2.env``.

detectron2 calls ``setup_environment`` when it is imported first; from then on ``get_cfg()`` has the RaMBO node and the
registry the heads.
"""

from __future__ import annotations

from rambo_plugins.detectron2 import add_rambo_config


def setup_environment() -> None:
    from detectron2.config.defaults import _C

    add_rambo_config(_C)
