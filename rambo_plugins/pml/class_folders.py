"""Which images there are below a folder of class folders, and what is left out there."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

logger = logging.getLogger("rambo_plugins")

SUFFIXES = (".bmp", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")


def images_below(folder: Path) -> list[tuple[str, str, str]]:
    """(class, super class or "", path below the folder) of each image, sorted. Links are followed.

    What is left out is counted in a warning of one line.

    Raises:
        FileNotFoundError: no image; links to what is not there.
        ValueError: images in folders of several depths; a folder that is reached twice, by a link.
        OSError: a folder that cannot be read.
    """
    left_out: dict[str, list[str]] = {}
    found = list(_walk(folder, (), {}, left_out))
    broken = left_out.pop("broken links", [])
    if broken:
        raise FileNotFoundError(f"{folder}: {_said(broken, 'links to what is not there')}; mend or delete them")
    if not found:
        raise FileNotFoundError(f"{folder} has no images ({', '.join(SUFFIXES)}): expected <class>/<image>")
    for parts in found:
        if len(parts) not in (2, 3) or len(parts) != len(found[0]):
            raise ValueError(
                f"{folder.joinpath(*parts)}: expected all images of {folder} as <class>/<image>, or all as "
                "<super class>/<class>/<image>"
            )
    say_left_out(folder, left_out)
    return [("/".join(parts[:-1]), "/".join(parts[:-2]), os.path.join(*parts)) for parts in found]


def say_left_out(folder: Path, left_out: dict[str, list[str]]) -> None:
    """A warning of one line, with the numbers and the first names of each kind."""
    if left_out:
        logger.warning("%s: left out %s", folder, "; ".join(_said(names, kind) for kind, names in left_out.items()))


def _said(names: list[str], kind: str) -> str:
    return f"{len(names):,} {kind} ({', '.join(map(repr, names[:3]))}{', …' if len(names) > 3 else ''})"


def _walk(
    folder: Path, at: tuple[str, ...], seen: dict[tuple[int, int], str], left_out: dict[str, list[str]]
) -> Iterator[tuple[str, ...]]:
    """The images below ``folder/at`` as parts of their paths, sorted; ``seen`` are the folders that it has been in."""
    here = folder.joinpath(*at)
    status = here.stat()
    first = seen.setdefault((status.st_dev, status.st_ino), str(here))
    if first != str(here):
        raise ValueError(f"{here} is the folder {first} again, by a link: its images would be in two classes")
    with os.scandir(here) as entries:
        ordered = sorted(entries, key=lambda entry: entry.name)
    some = not at
    for entry in ordered:
        parts = (*at, entry.name)
        kind = None
        if entry.name.startswith("."):
            kind = "hidden"
        elif entry.is_dir():
            some = True
            yield from _walk(folder, parts, seen, left_out)
        elif not entry.is_file():
            kind = "neither files nor folders" if os.path.exists(entry.path) else "broken links"
        elif os.path.splitext(entry.name)[1].lower() in SUFFIXES:
            some = True
            yield parts
        else:
            kind = "not named as images"
        if kind is not None:
            left_out.setdefault(kind, []).append("/".join(parts))
    if not some:
        left_out.setdefault("folders without images", []).append("/".join(at))
