"""``--fresh``: the run before is kept in ``previous/`` until the new one has a checkpoint and a best network.

``checkpoint.pt`` goes there last, and is the last of it that is deleted, so that an interruption at any point leaves
one of these:

| previous/checkpoint.pt | other files in previous/ | what it is                                               |
|------------------------|--------------------------|----------------------------------------------------------|
| no                     | no                       | nothing was set aside                                    |
| no                     | yes                      | interrupted on the way: all files of the run before are  |
|                        |                          | here or there                                            |
| yes                    | perhaps                  | the run before is there, whole, or has been outlived by  |
|                        |                          | a new ``best.pt`` and ``checkpoint.pt``                  |
"""

from __future__ import annotations

import os

from rambo_plugins.folders import OwnFolder

PREVIOUS = "previous/"
CHECKPOINT, BEST, EVALUATION = "checkpoint.pt", "best.pt", "evaluation.json"


def prepare(folder: OwnFolder, *, fresh: bool) -> bool:
    """The files of the run to go on with are in place afterwards; returns whether there is one.

    With ``fresh`` there is none: what was there is set aside. Without, a run that was set aside for one that came to
    nothing is put back.
    """
    if _aside(folder) and not _is(folder, PREVIOUS + CHECKPOINT):
        _put_back(folder)  # interrupted on the way
    if fresh:
        if _is(folder, CHECKPOINT) and (_is(folder, BEST) or not _is(folder, PREVIOUS + CHECKPOINT)):
            drop(folder)
            _set_aside(folder)
        elif _is(folder, PREVIOUS + CHECKPOINT):  # what is in place never had anything to show
            _remove(folder, _of_a_run(folder))
        return False
    if _is(folder, PREVIOUS + CHECKPOINT) and not _is(folder, CHECKPOINT):
        _remove(folder, _of_a_run(folder))
        _put_back(folder)
    return _is(folder, CHECKPOINT)


def drop(folder: OwnFolder) -> None:
    """Deletes the run before."""
    _remove(folder, _aside(folder))


def _set_aside(folder: OwnFolder) -> None:
    aside = {*_aside(folder), EVALUATION}  # an evaluation says itself what it is of
    names = [name for name in folder.names - aside if _is(folder, name)]
    for name in sorted(names, key=lambda name: (name == CHECKPOINT, name)):
        _move(folder, name, PREVIOUS + name)


def _put_back(folder: OwnFolder) -> None:
    for name in sorted(_aside(folder), key=lambda name: (name != PREVIOUS + CHECKPOINT, name)):
        to = name.removeprefix(PREVIOUS)
        if not _is(folder, name):
            folder.remove(name)
        elif not _is(folder, to):  # it may be of an --evaluate-only since then
            _move(folder, name, to)


def _move(folder: OwnFolder, name: str, to: str) -> None:
    target = folder.own(to)
    target.parent.mkdir(parents=True, exist_ok=True)
    os.replace(folder.path / name, target)
    folder.remove(name)


def _remove(folder: OwnFolder, names: list[str]) -> None:
    if names:
        folder.remove(*sorted(names, key=lambda name: (name == PREVIOUS + CHECKPOINT, name)))


def _of_a_run(folder: OwnFolder) -> list[str]:
    own = (CHECKPOINT, BEST, "metrics.json")
    return [name for name in folder.names if name in own or name.startswith("tensorboard/")]


def _aside(folder: OwnFolder) -> list[str]:
    return [name for name in folder.names if name.startswith(PREVIOUS)]


def _is(folder: OwnFolder, name: str) -> bool:
    return name in folder.names and (folder.path / name).is_file()
