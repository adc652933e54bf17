"""Folders that the commands write into: a list says what is ours there, and nothing else is overwritten or deleted."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

LIST = "rambo_files.json"


class OwnFolder:
    """A folder with the list of the files that we wrote in it, ``rambo_files.json``.

    A name is on the list before its file is there, so that an interruption leaves nothing of ours unlisted. What is
    not on the list is the user's. One process writes at a time.

    Args:
        path: made if it is not there.
        purpose: what it holds, such as "a training run"; a folder of another purpose is not taken over.

    Raises:
        ValueError: no folder; a folder with other things in it and no list; a list of another purpose.

    >>> import tempfile
    >>> folder = OwnFolder(Path(tempfile.mkdtemp()) / "run", "a training run")
    >>> with folder.writing("metrics.json") as path:
    ...     _ = path.write_text("{}")
    >>> sorted(folder.names)
    ['metrics.json']
    """

    def __init__(self, path: str | os.PathLike[str], purpose: str) -> None:
        self.path, self.purpose = Path(path), purpose
        self.names: set[str] = set()
        if self.path.exists() and not self.path.is_dir():
            raise ValueError(f"{self.path}: expected a folder for {purpose}, got a file")
        if (self.path / LIST).exists():
            found = _read(self.path / LIST)
            if found["purpose"] != purpose:
                raise ValueError(f"{self.path}: expected a folder for {purpose}, got one for {found['purpose']}")
            self.names = set(found["files"])
            return
        names = {entry.name for entry in self.path.iterdir()} if self.path.exists() else set()
        others = sorted(names - {_unfinished(self.path / LIST).name})  # which a kill has left, before anything else
        if others:
            shown = ", ".join(map(ascii, others[:3])) + (", …" if len(others) > 3 else "")
            raise ValueError(
                f"{self.path}: expected a new or empty folder, or one for {purpose} from before, got one with {shown} "
                f"and without {LIST}, the list of what was written by us; name another folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        self._save()

    def own(self, name: str) -> Path:
        """The path of a file or folder of ours, listed from now on; ``name`` may have slashes.

        Raises:
            ValueError: something is there that is not ours.
        """
        path = self.path / name
        if name not in self.names:
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts or name == LIST:
                raise ValueError(f"name: expected one inside the folder, got {name!r}")
            if os.path.lexists(path):
                raise ValueError(f"{path}: is there, but was not written by us; move it, or name another folder")
            self.names.add(name)
            self._save()
        return path

    def adopt(self, name: str) -> None:
        """Lists a file that was just made for us, by a writer that chooses names itself.

        Raises:
            ValueError: there is none.
        """
        if not (self.path / name).is_file():
            raise ValueError(f"{self.path / name}: expected a file that was just written")
        self.names.add(name)
        self._save()

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Path]:
        """A path to write to, which becomes the file ``name`` whole, or not at all if the block raises."""
        path = self.own(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as unfinished:
            yield unfinished

    def remove(self, *names: str) -> None:
        """Deletes these files of ours, or all with the list, and the folders that are empty then. None need exist."""
        for name in names or sorted(self.names, reverse=True):
            if name not in self.names:
                raise ValueError(f"{self.path / name}: was not written by us")
            path = self.path / name
            for file in (path, _unfinished(path)):
                if file.is_dir() and not file.is_symlink():
                    with contextlib.suppress(OSError):  # it holds something of the user's
                        file.rmdir()
                else:
                    file.unlink(missing_ok=True)
            for parent in list(path.parents)[: len(PurePosixPath(name).parts) - 1]:
                with contextlib.suppress(OSError):
                    parent.rmdir()
            self.names.discard(name)
        if names:
            self._save()
            return
        (self.path / LIST).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _save(self) -> None:
        with whole(self.path / LIST) as path:
            path.write_text(json.dumps({"purpose": self.purpose, "files": sorted(self.names)}, indent=1) + "\n")


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A path beside ``path`` to write to, which takes its place at the end; deleted if the block raises."""
    unfinished = _unfinished(path)
    try:
        yield unfinished
        os.replace(unfinished, path)
    except BaseException as error:
        unfinished.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None and error.filename is None:
            error.filename = str(path)  # a full disk does not say where
        raise


def _unfinished(path: Path) -> Path:
    return path.with_name(f".unfinished-{path.name}")  # the suffix stays, since some writers go by it


def _read(path: Path) -> dict[str, list[str] | str]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(found["purpose"], str) and all(isinstance(name, str) for name in found["files"]):
            return found
    except (ValueError, KeyError, TypeError):
        pass
    raise ValueError(f"{path}: expected the list of what was written by us, got something else; name another folder")
