"""Embeddings, labels and ids from files: .npy (memory mapped), .npz, .fvecs, .bvecs, .ivecs, .parquet; keys also .txt.

Nothing is guessed: what is not understood is an error that names the file, the place and what was expected.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from rambo_plugins.evaluation.tables import read_column, read_vectors


def read_embeddings(path: str | Path, columns: Sequence[str] | None = None) -> np.ndarray:
    """(N, D) integers or floats from .npy, .npz with one array, .fvecs, .bvecs, .ivecs or .parquet.

    .npy and the .vecs files are memory mapped. ``columns`` names those of a .parquet: one of lists, or one of numbers
    for each dimension, in this order. Without it the table has to be nothing but vectors: one column of lists, or
    columns of numbers of one name, numbered in their order, as f0, f1, … or 0, 1, …; what pandas marks as the index of
    its data frame is left out.

    Raises:
        ValueError: another kind of file; one that is damaged, not of this shape, or holds more or something else.
        OSError: a file that cannot be opened.
    """
    readers = {".npy": _npy, ".npz": _npz, **_VECS, ".parquet": lambda path: read_vectors(path, columns)}
    if columns is not None and Path(path).suffix != ".parquet":
        raise ValueError(f"{path}: expected a .parquet, which has columns with names, to take {list(columns)} from")
    values = _read(path, readers)
    if values.ndim != 2:
        raise ValueError(f"{path}: expected embeddings of shape (N, D), got shape {values.shape}")
    if 0 in values.shape:
        raise ValueError(f"{path}: expected at least one embedding and one dimension, got shape {values.shape}")
    if values.dtype.kind not in "iuf":
        raise ValueError(f"{path}: expected real numbers, got dtype {values.dtype}")
    return values


def read_keys(path: str | Path, column: str | None = None) -> np.ndarray:
    """Labels or ids, (N,) integers or strings: .npy, .npz with one array, .ivecs of length 1, .parquet, .txt.

    Each line of a .txt, in UTF-8, is one of them, and a string whatever it looks like: 1 is not 01. ``column`` names
    that of a .parquet, which otherwise has one beside the index of a data frame.

    Raises:
        ValueError: as ``read_embeddings``; floats; a line of a .txt that is empty, or begins or ends with a blank.
        OSError: a file that cannot be opened.
    """
    readers = {
        ".npy": _npy, ".npz": _npz, ".ivecs": _VECS[".ivecs"], ".parquet": lambda path: read_column(path, column),
        ".txt": _txt,
    }  # fmt: skip
    if column is not None and Path(path).suffix != ".parquet":
        raise ValueError(f"{path}: expected a .parquet, which has columns with names, to take {column!r} from")
    keys = _read(path, readers)
    if keys.ndim == 2 and keys.shape[1] == 1:
        keys = keys[:, 0]
    if keys.ndim != 1:
        raise ValueError(f"{path}: expected labels or ids of shape (N,), got shape {keys.shape}")
    if keys.dtype.kind not in "iuU":
        raise ValueError(f"{path}: expected integers or strings, got dtype {keys.dtype}")
    return keys


def read_paths(path: str | Path) -> list[Path]:
    """The names of files in the lines of a .txt, in the bytes that the file system has, which need not be UTF-8.

    Raises:
        ValueError: a line that is empty or holds a NUL.
        OSError: a file that cannot be opened.
    """
    return [Path(os.fsdecode(line)) for line in _lines(Path(path), "the name of a file")]


def _read(path: str | Path, readers: dict[str, Callable[[Path], np.ndarray]]) -> np.ndarray:
    path = Path(path)
    reader = readers.get(path.suffix)
    if reader is None:
        raise ValueError(f"{path}: expected a file of the kind {', '.join(readers)}, got {path.suffix or 'no suffix'}")
    with path.open("rb"):  # an error of the system names the file; those of the readers' libraries do not always
        pass
    return reader(path)


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    """What numpy says of a damaged file."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:  # of all kinds, by the place of the damage
        raise ValueError(f"{path}: not a readable {path.suffix} file: {error}") from error


def _npy(path: Path) -> np.ndarray:
    with _damage(path):
        array = np.lib.format.open_memmap(path, mode="r")
    extra = path.stat().st_size - array.offset - array.nbytes if array.size else 0
    if extra > 0:
        raise ValueError(f"{path}: expected one array, got one of shape {array.shape} and {extra} more bytes")
    return array


def _npz(path: Path) -> np.ndarray:
    with path.open("rb") as file:
        if file.read(4) not in (b"PK\3\4", b"PK\5\6"):
            raise ValueError(f"{path}: not a readable .npz file: not an archive of arrays")
    with _damage(path), np.load(path, allow_pickle=False) as arrays:
        names = arrays.files
        array = arrays[names[0]] if len(names) == 1 else None
    if not isinstance(array, np.ndarray):  # several, none, or a file of another kind
        raise ValueError(f"{path}: expected one array, got {len(names)}: {', '.join(names)}")
    return array


def _vecs(dtype: type[np.generic]) -> Callable[[Path], np.ndarray]:
    """Rows of an int32 length and as many values, little-endian, as the public ANN data sets come."""

    def read(path: Path) -> np.ndarray:
        size = path.stat().st_size
        if size < 4:
            raise ValueError(f"{path}: {size} bytes, expected at least the length of one row")
        dim = int(np.fromfile(path, "<i4", 1)[0])
        width = 4 + dim * np.dtype(dtype).itemsize
        if dim < 1:
            raise ValueError(f"{path}: the first row says that it has {dim} values")
        if size % width:
            raise ValueError(f"{path}: {size} bytes are no whole number of rows of {width} bytes, {dim} values each")
        row = np.dtype([("dim", "<i4"), ("values", np.dtype(dtype).newbyteorder("<"), (dim,))])
        rows = np.memmap(path, row, mode="r")
        wrong = np.flatnonzero(rows["dim"] != dim)
        if len(wrong):
            raise ValueError(
                f"{path}: row {wrong[0]} says that it has {rows['dim'][wrong[0]]} values, row 0 that it has {dim}"
            )
        return rows["values"]

    return read


_VECS = {".fvecs": _vecs(np.float32), ".bvecs": _vecs(np.uint8), ".ivecs": _vecs(np.int32)}


def _txt(path: Path) -> np.ndarray:
    keys = []
    for number, line in enumerate(_lines(path, "a label or id"), 1):
        try:
            key = line.decode()
        except UnicodeDecodeError as error:
            raise ValueError(f"{path}, line {number}: expected UTF-8, got the bytes {line[:40]!r}") from error
        if key != key.strip():
            raise ValueError(f"{path}, line {number}: expected no blank before or after a label or id, got {key!r}")
        keys.append(key)
    return np.array(keys, dtype=str)


_MARK = b"\xef\xbb\xbf"
_NOWHERE = {b"\0": "a NUL", b"\r": r"a \r that ends no line", _MARK: "a byte order mark, which is for the first line"}


def _lines(path: Path, what: str) -> Iterator[bytes]:
    """Without their ends, \\n or \\r\\n, which the last may lack, and without a byte order mark."""
    text = path.read_bytes().removeprefix(_MARK)
    lines = text.removesuffix(b"\n").split(b"\n") if text else []
    for number, line in enumerate(lines, 1):
        line = line.removesuffix(b"\r")
        if not line.strip():
            raise ValueError(f"{path}, line {number}: expected {what}, got an empty line")
        for some, name in _NOWHERE.items():
            if some in line:
                raise ValueError(f"{path}, line {number}: expected {what}, got {line[:40]!r} with {name}")
        yield line
