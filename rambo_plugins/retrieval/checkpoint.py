"""Checkpoints of the command: written whole or not at all, and read with a clear word if they are something else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rambo_plugins.folders import OwnFolder
from rambo_plugins.retrieval.models import EmbeddingNet, build_net, load_file

NEEDED = ("backbone", "embedding_size", "size", "resize", "amp", "data")


def write(saved: dict[str, Any], folder: OwnFolder, name: str) -> None:
    """Raises OSError where the disk is full."""
    with folder.writing(name) as path:
        try:
            torch.save(saved, path)
        except RuntimeError as error:  # what torch makes of a disk that is full
            raise OSError(f"{folder.path / name} could not be written: {str(error).splitlines()[0]}") from error


def read(path: Path) -> dict[str, Any]:
    """What ``write`` wrote, on the CPU.

    Raises:
        ValueError: no file, or not a checkpoint of this command.
    """
    saved = load_file(path, "checkpoint")
    kinds = {"settings": dict, "model": dict, "history": list, "step": int}
    if not isinstance(saved, dict) or not all(isinstance(saved.get(name), kind) for name, kind in kinds.items()):
        raise ValueError(f"{path} is not a checkpoint of this command")
    missing = [name for name in NEEDED if name not in saved["settings"]]
    if missing:
        raise ValueError(f"{path} is not a checkpoint of this command: its settings lack {', '.join(missing)}")
    return saved


def restore_net(saved: dict[str, Any]) -> EmbeddingNet:
    """The network of a checkpoint, on the CPU.

    Raises:
        ValueError: its parameters are those of another network.
    """
    net = build_net(saved["settings"]["backbone"], saved["settings"]["embedding_size"])
    try:
        net.load_state_dict(saved["model"])
    except RuntimeError as error:
        raise ValueError(f"the checkpoint's parameters are of another network: {str(error)[:200]}") from error
    return net


def not_finite(state: Any, at: str = "") -> str | None:
    """Where a state dict has a number that is none, by its path; None where all are finite."""
    if isinstance(state, Tensor):
        broken = (state.is_floating_point() or state.is_complex()) and not bool(state.isfinite().all())
        return at if broken else None
    entries = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list | tuple) else ()
    found = (not_finite(value, f"{at}.{key}" if at else str(key)) for key, value in entries)
    return next((path for path in found if path is not None), None)


def check_space(saved: dict[str, Any], folder: OwnFolder, more: int = 0) -> None:
    """Whether there is room for ``checkpoint.pt``, ``best.pt`` and one of them unfinished, and ``more`` bytes.

    The optimizer's two moments of each parameter are reckoned in, which come with the first step.

    Raises:
        OSError: the disk has less.
    """
    size = _bytes({name: saved[name] for name in ("model", "loss")}) * 3
    there = sum((folder.path / name).stat().st_size for name in ("checkpoint.pt", "best.pt") if name in folder.names
                and os.path.isfile(folder.path / name))  # fmt: skip
    needed, free = max(3 * size - there, 0) + more, shutil.disk_usage(folder.path).free
    if free < needed:
        raise OSError(
            f"{folder.path}: the checkpoints need {needed / 1e9:.2f} GB, but the disk has {free / 1e9:.2f} GB; make "
            "room, or name another --out"
        )


def _bytes(state: Any) -> int:
    if isinstance(state, Tensor):
        return state.numel() * state.element_size()
    return sum(map(_bytes, state.values())) if isinstance(state, dict) else 0
