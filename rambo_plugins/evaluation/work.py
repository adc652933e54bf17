"""Finished parts of an evaluation on disk, so that one that was interrupted goes on where it stopped."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np


class WorkFolder:
    """One file for each finished part; ``problem.json`` says what they are parts of.

    Args:
        path: made if it is not there.
        problem: everything that decides the outcome.

    Raises:
        ValueError: the folder holds parts of another problem.
    """

    def __init__(self, path: str | Path, problem: Mapping[str, object]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        described = self.path / "problem.json"
        if described.exists():
            found = json.loads(described.read_text())
            other = [name for name in problem if found.get(name) != problem[name]]
            if other:
                raise ValueError(
                    f"{self.path}: holds parts of another evaluation, which differs in {', '.join(other)}; choose "
                    "another folder or remove it"
                )
        else:
            _write(described, (json.dumps(problem, indent=1) + "\n").encode())

    def load(self, part: int, num: int) -> list[np.ndarray] | None:
        """The arrays of a part, each of ``num`` entries; None if it is not finished."""
        path = self.path / f"part-{part:06d}.npy"
        if not path.exists():
            return None
        arrays = np.load(path, allow_pickle=False)
        if arrays.shape[1] != num:
            raise ValueError(f"{path}: expected {num} queries, got {arrays.shape[1]}; remove the folder")
        return list(arrays)

    def save(self, part: int, arrays: list[np.ndarray]) -> None:
        contents = io.BytesIO()
        np.save(contents, np.stack(arrays))
        _write(self.path / f"part-{part:06d}.npy", contents.getvalue())


def remove(folder: Path) -> None:
    """What a ``WorkFolder`` has written there, and the folder if it holds nothing else."""
    for path in [*folder.glob("part-*"), folder / "problem.json"]:
        path.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()


def digest(*arrays: np.ndarray) -> str:
    """A fingerprint of the contents."""
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(str((array.dtype, array.shape)).encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def _write(path: Path, contents: bytes) -> None:
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_bytes(contents)
    os.replace(unfinished, path)
