"""Checkpoints of the command: written whole or not at all, and read with a clear word if they are something else."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from rambo_plugins.retrieval.models import EmbeddingNet, build_net, load_file


def write(saved: dict[str, Any], path: Path) -> None:
    unfinished = path.with_name(f"{path.name}.tmp")
    torch.save(saved, unfinished)
    os.replace(unfinished, path)


def read(path: Path) -> dict[str, Any]:
    """What ``write`` wrote, on the CPU.

    Raises:
        ValueError: no file, or not a checkpoint of this command.
    """
    saved = load_file(path, "checkpoint")
    if not isinstance(saved, dict) or not {"settings", "model", "history"} <= set(saved):
        raise ValueError(f"{path} is not a checkpoint of this command")
    return saved


def check_settings(there: dict[str, Any], here: dict[str, Any], path: Path) -> None:
    """A run goes on only with the settings that it was started with.

    Raises:
        ValueError: they are others; it says which.
    """
    changed = [f"{k} was {there.get(k)}, now {here.get(k)}" for k in there | here if there.get(k) != here.get(k)]
    if changed:
        raise ValueError(
            f"{path} is of a run with other settings: {'; '.join(changed)}. Choose another --out, or start over with "
            "--fresh"
        )


def restore_net(saved: dict[str, Any]) -> EmbeddingNet:
    """The network of a checkpoint, on the CPU."""
    net = build_net(saved["settings"]["backbone"], saved["settings"]["embedding_size"])
    net.load_state_dict(saved["model"])
    return net
