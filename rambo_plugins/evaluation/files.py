"""Embeddings, labels and ids from files: .npy (memory mapped), .npz, .fvecs, .bvecs, .ivecs, .parquet; keys also .txt.

An error names the file and what is wrong with it.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np


def read_embeddings(path: str | Path) -> np.ndarray:
    """(N, D) from .npy, .npz with one array, .fvecs, .bvecs, .ivecs, or .parquet with columns of numbers or of lists.

    .npy and the .vecs files are memory mapped.

    Raises:
        ValueError: another kind of file, or one that is damaged or not of one shape.
        OSError: a file that cannot be opened.
    """
    return _read(path, {".npy": _npy, ".npz": _npz, ".parquet": _parquet, **_VECS})


def read_keys(path: str | Path) -> np.ndarray:
    """Labels or ids (N,): .npy, .npz with one array, .ivecs of length 1, .parquet with one column, .txt with lines.

    Lines of a .txt are integers if all are, else strings.

    Raises:
        ValueError, OSError: as ``read_embeddings``.
    """
    keys = _read(path, {".npy": _npy, ".npz": _npz, ".parquet": _parquet, ".ivecs": _VECS[".ivecs"], ".txt": _txt})
    return keys[:, 0] if keys.ndim == 2 and keys.shape[1] == 1 else keys


def _read(path: str | Path, readers: dict[str, Callable[[Path], np.ndarray]]) -> np.ndarray:
    path = Path(path)
    reader = readers.get(path.suffix)
    if reader is None:
        raise ValueError(
            f"{path}: expected a file of the kind {', '.join(readers)}, got {path.suffix or 'no suffix'!r}"
        )
    try:
        return reader(path)
    except (ValueError, EOFError) as error:  # what numpy says of a damaged file
        raise ValueError(f"{path}: not a readable {path.suffix} file: {error}") from error


def _npy(path: Path) -> np.ndarray:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _npz(path: Path) -> np.ndarray:
    import zipfile

    try:
        with np.load(path, allow_pickle=False) as arrays:
            if len(arrays.files) != 1:
                raise ValueError(f"expected one array, got {len(arrays.files)}: {', '.join(arrays.files)}")
            return arrays[arrays.files[0]]
    except zipfile.BadZipFile as error:
        raise ValueError(str(error)) from error


def _vecs(dtype: type[np.generic]) -> Callable[[Path], np.ndarray]:
    """Rows of an int32 length and as many values, as the public ANN data sets come."""

    def read(path: Path) -> np.ndarray:
        size = path.stat().st_size
        if size < 4:
            raise ValueError(f"{size} bytes, expected at least the length of one row")
        dim = int(np.fromfile(path, np.int32, 1)[0])
        if dim < 1:
            raise ValueError(f"the first row says that it has {dim} values")
        row = np.dtype([("dim", np.int32), ("values", dtype, (dim,))])
        if size % row.itemsize:
            raise ValueError(f"{size} bytes are no whole number of rows of {row.itemsize} bytes, {dim} values each")
        rows = np.memmap(path, row, mode="r")
        wrong = np.flatnonzero(rows["dim"] != dim)
        if len(wrong):
            raise ValueError(f"row {wrong[0]} says that it has {rows['dim'][wrong[0]]} values, row 0 that it has {dim}")
        return rows["values"]

    return read


_VECS = {".fvecs": _vecs(np.float32), ".bvecs": _vecs(np.uint8), ".ivecs": _vecs(np.int32)}


def _parquet(path: Path) -> np.ndarray:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ImportError(f"{path}: .parquet files need pyarrow: pip install pyarrow") from error
    try:
        table = pyarrow.parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(str(error)) from error
    columns = [column.to_numpy() for column in table.columns]
    if len(columns) == 1:
        (column,) = columns
        return np.stack(list(column)) if len(column) and isinstance(column[0], np.ndarray) else column
    return np.stack(columns, axis=1)


def _txt(path: Path) -> np.ndarray:
    lines = path.read_text(encoding="utf-8").splitlines()
    try:
        return np.array([int(line) for line in lines], dtype=np.int64)
    except (ValueError, OverflowError):
        return np.array(lines, dtype=str)
