"""What decides the figures of a run: the settings, the data, and what computes."""

from __future__ import annotations

import dataclasses
import platform
from importlib.metadata import version
from typing import Any

import torch

from rambo_plugins.demo.data import ImageClasses


@dataclasses.dataclass(frozen=True)
class Settings:
    """What all the runs of a comparison share."""

    data: str = "glyphs"
    epochs: int = 4
    steps: int = 100
    """Steps an epoch; the test set is evaluated after each."""
    classes_per_batch: int = 32
    images_per_class: int = 4
    learning_rate: float = 2e-3
    dimensions: int = 64


def identity(settings: Settings, data: tuple[ImageClasses, ImageClasses], device: torch.device) -> dict[str, Any]:
    """Runs with the same of these have the same figures; plain values, which checkpoints hold."""
    return {
        **dataclasses.asdict(settings),
        "training images": data[0].digest,
        "test images": data[1].digest,
        "device": device.type,
        "threads": torch.get_num_threads(),
        **versions(),
    }


def versions() -> dict[str, str]:
    """Of what the figures may depend on."""
    packages = ("rambo-plugins", "torch", "pytorch-metric-learning", "faiss-cpu", "numpy", "matplotlib", "pillow")
    return {"python": platform.python_version(), **{name: _version(name) for name in packages}}


def _version(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:  # faiss-gpu in place of faiss-cpu
        return "not installed"
