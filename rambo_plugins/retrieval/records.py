"""What a run writes besides its checkpoints: ``metrics.json``, and the curves of TensorBoard."""

from __future__ import annotations

import json
import os
from typing import Any

from rambo_plugins.demo.report import versions
from rambo_plugins.folders import OwnFolder

EVENTS = ".rambo"
"""How the names of our TensorBoard files end."""


def write_metrics(
    folder: OwnFolder, settings: dict[str, Any], history: list[dict[str, Any]], best: dict[str, Any]
) -> None:
    outcome = {"settings": settings, "history": history, "best": best, "versions": versions()}
    with folder.writing("metrics.json") as path:
        path.write_text(json.dumps(outcome, indent=1) + "\n")


def tensorboard(folder: OwnFolder, step: int) -> Any:
    """A writer of curves from ``step`` on, whose file is on the folder's list; None where TensorBoard is missing."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError:
        return None
    logs = folder.path / "tensorboard"
    before = set(os.listdir(logs)) if logs.exists() else set()
    writer = SummaryWriter(str(logs), purge_step=step, filename_suffix=EVENTS)
    for name in set(os.listdir(logs)) - before:
        if name.endswith(EVENTS):
            folder.adopt(f"tensorboard/{name}")
    return writer
