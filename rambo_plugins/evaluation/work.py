"""Finished parts of an evaluation on disk, so that one that was interrupted goes on where it stopped."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from rambo_plugins.evaluation.embeddings import Embeddings
from rambo_plugins.evaluation.progress import bar
from rambo_plugins.folders import OwnFolder

try:
    import fcntl
except ModuleNotFoundError:  # Windows
    fcntl = None  # type: ignore[assignment]

PARTS = "the finished parts of an evaluation"
INDEX = "an index"
_DIGEST = 16  # bytes

logger = logging.getLogger("rambo_plugins")


class WorkFolder:
    """Files of one evaluation in a folder of ours; ``problem.json`` says of which. Held until it is closed.

    Args:
        path: made if it is not there.
        purpose: ``PARTS`` or ``INDEX``.
        problem: everything that decides the outcome, by names; asked for when the folder is known to be ours.

    Raises:
        ValueError: the folder is not ours, of another evaluation, or held by another process at this time.
    """

    def __init__(self, path: str | Path, purpose: str, problem: Callable[[], Mapping[str, object]]) -> None:
        self.path = Path(path)
        with contextlib.ExitStack() as stack:
            self.files = stack.enter_context(held(self.path, purpose))
            self._check(problem())
            self.close = stack.pop_all().close

    def __enter__(self) -> WorkFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def load(self, part: int, num: int) -> list[np.ndarray] | None:
        """The arrays of a part, each of ``num`` entries; None if it is not finished, or damaged, which is logged."""
        path = self.files.own(_name(part))
        if not path.exists():
            return None
        contents = path.read_bytes()
        if _hash(contents[:-_DIGEST]) != contents[-_DIGEST:]:
            logger.warning("%s: is damaged, and is computed again", path)
            return None
        arrays = np.load(io.BytesIO(contents), allow_pickle=False)
        if arrays.shape[1] != num:
            raise ValueError(f"{path}: expected {num} queries, got {arrays.shape[1]}; remove the folder")
        return list(arrays)

    def save(self, part: int, arrays: list[np.ndarray]) -> None:
        contents = io.BytesIO()
        np.save(contents, np.stack(arrays))
        with self.files.writing(_name(part)) as path:
            path.write_bytes(contents.getvalue() + _hash(contents.getvalue()))

    def _check(self, problem: Mapping[str, object]) -> None:
        path = self.files.own("problem.json")
        if not path.exists():
            with self.files.writing("problem.json") as unfinished:
                unfinished.write_text(json.dumps(problem, indent=1) + "\n", encoding="utf-8")
            return
        try:
            found = dict(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: is damaged; remove the folder, or choose another") from error
        other = [name for name in problem if found.get(name) != problem[name]]
        if other:
            raise ValueError(
                f"{self.path}: holds parts of another evaluation, which differs in {', '.join(other)}; choose another "
                "folder or remove it"
            )


@contextlib.contextmanager
def held(path: Path, purpose: str) -> Iterator[OwnFolder]:
    """A folder of ours that no other process has at the same time; the system lets it go when a process is killed."""
    if fcntl is None or (path.exists() and not path.is_dir()):
        yield OwnFolder(path, purpose)
        return
    path.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{path}: is in use by another evaluation; wait, or choose another folder") from error
        except OSError as error:  # a file system without locks
            logger.warning("%s: cannot be locked (%s); use it in one evaluation at a time", path, error)
        yield OwnFolder(path, purpose)
    finally:
        os.close(handle)


def remove(path: Path) -> None:
    """The parts of an evaluation that are on the list, and the folder if it holds nothing else."""
    with held(path, PARTS) as files:
        files.remove()


def digest(*arrays: np.ndarray) -> str:
    """A fingerprint of the contents."""
    found = hashlib.blake2b(digest_size=16)
    for array in arrays:
        found.update(str((array.dtype, array.shape)).encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def digest_of_all(rows: Embeddings, size: int, progress: bool) -> str:
    """A fingerprint of all embeddings as they are searched, in float32, read in blocks of ``size`` rows."""
    found = hashlib.blake2b(str((rows.num, rows.dim)).encode(), digest_size=16)
    with bar(progress, "compare", rows.num, "row") as report:
        for _, block in rows.blocks(size):
            found.update(np.ascontiguousarray(block).data)
            report(len(block))
    return found.hexdigest()


def _name(part: int) -> str:
    return f"part-{part:06d}"


def _hash(contents: bytes) -> bytes:
    return hashlib.blake2b(contents, digest_size=_DIGEST).digest()
