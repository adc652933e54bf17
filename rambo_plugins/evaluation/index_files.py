"""faiss indexes in files: an error for what faiss cannot read or write whole, never an index that lacks rows."""

from __future__ import annotations

import errno
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import faiss
from faiss.contrib.ondisk import merge_ondisk


def read_index(path: Path) -> Any:
    """Inverted lists that are in a file of their own stay there, and are read as needed."""
    try:
        try:
            index = faiss.read_index(str(path), faiss.IO_FLAG_READ_ONLY)
        except RuntimeError:  # the folder was moved
            index = faiss.read_index(str(path), faiss.IO_FLAG_READ_ONLY | faiss.IO_FLAG_ONDISK_SAME_DIR)
    except RuntimeError as error:
        raise ValueError(f"{path}: faiss cannot read it: {said(error)}; remove the folder") from error
    ivf = faiss.try_extract_index_ivf(index)
    if ivf is not None and isinstance(_lists(ivf), getattr(faiss, "OnDiskInvertedLists", ())):
        _lists(ivf).prefetch_nthread = faiss.omp_get_max_threads()
    return index


def write_index(index: Any, path: Path) -> None:
    """By a file of Python, which says so when the disk is full also at the last bytes."""
    failed: list[OSError] = []
    swig: Any = faiss  # whose stubs lack this class

    def write(some: bytes) -> int:
        try:
            return file.write(some)
        except OSError as error:
            failed.append(error)
            return 0

    with path.open("wb") as file:
        try:
            faiss.write_index(index, swig.PyCallbackIOWriter(write))
        except RuntimeError as error:
            raise OSError(f"{path}: faiss cannot write it: {said(error)}") from error
        finally:
            if failed:
                raise failed[0]


def merge_shards(index: Any, shards: Sequence[Path], lists: Path) -> None:
    """Gives ``index`` the inverted lists of the shards, in a file each of whose lists is in one piece.

    Raises:
        ValueError: a shard that is damaged.
        OSError: too little room on the disk.
    """
    needed, free = sum(path.stat().st_size for path in shards), shutil.disk_usage(lists.parent).free
    if free < needed:  # the file is mapped: a full disk would end the process
        reason = f"merging the lists takes {needed:,} bytes, and {free:,} are free"
        raise OSError(errno.ENOSPC, reason, str(lists.parent))
    try:
        merge_ondisk(index, [str(path) for path in shards], str(lists))
    except RuntimeError as error:
        raise ValueError(f"{lists.parent}: faiss cannot merge the shards: {said(error)}; remove the folder") from error


def has_plain_lists(index: Any) -> bool:
    """Whether it is an IVF index whose lists can be merged on disk, and holds nothing beside them."""
    while isinstance(index, faiss.IndexPreTransform):
        index = faiss.downcast_index(index.index)
    if not isinstance(index, faiss.IndexIVF) or isinstance(index, faiss.IndexIVFPQR):
        return False
    return isinstance(_lists(index), faiss.ArrayInvertedLists) and hasattr(faiss, "OnDiskInvertedLists")  # not Windows


def said(error: RuntimeError) -> str:
    """faiss's message without the place in its source."""
    return re.sub(r"^Error in .*? at \S+:\d+: (Error: )?", "", str(error), flags=re.DOTALL)


def _lists(ivf: Any) -> Any:
    return faiss.downcast_InvertedLists(ivf.invlists)
