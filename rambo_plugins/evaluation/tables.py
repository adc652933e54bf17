"""Vectors and keys from .parquet files, where the columns that are meant are certain or named."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def read_vectors(path: Path, names: Sequence[str] | None) -> np.ndarray:
    """(N, D) from one column of lists, or one column of numbers for each dimension.

    Args:
        path: of the file.
        names: of these columns. None: all but the index of a data frame, which then have to be one of lists, or
            numbered in their order with one prefix: f0, f1, … or 0, 1, …

    Raises:
        ValueError: other columns; values that are missing or no numbers; lists of several lengths.
    """
    with _table(path) as (file, types):
        listed = _but_index(file) if names is None else list(names)
        _check_names(path, file, listed)
        if len(listed) == 1 and _is_list(types[listed[0]]):
            return _rows_of_lists(path, file, listed[0], types[listed[0]])
        if names is None and not _numbered(listed):
            raise ValueError(
                f"{path}: expected one column of lists, or columns of numbers named as f0, f1, … in this order and "
                f"nothing beside them, got {_shown(listed)}; name those of the vectors: --columns, or columns="
            )
        return np.stack([_plain(path, file, name, types[name], "numbers") for name in listed], axis=1)


def read_column(path: Path, name: str | None) -> np.ndarray:
    """(N,) integers or strings from the column of this name, or the only one beside the index of a data frame.

    Raises:
        ValueError: no such column, several columns and no name; values that are missing or neither of these.
    """
    with _table(path) as (file, types):
        listed = _but_index(file) if name is None else [name]
        _check_names(path, file, listed)
        if len(listed) != 1:
            raise ValueError(
                f"{path}: expected one column, got {_shown(listed)}; name it: --label-column, --id-column, or column="
            )
        return _plain(path, file, listed[0], types[listed[0]], "integers or strings")


@contextlib.contextmanager
def _table(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """The file, and the types of its columns by their names."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ImportError(f"{path}: .parquet files need pyarrow: pip install pyarrow") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file, {field.name: field.type for field in file.schema_arrow}
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path}: not a readable .parquet file: {' '.join(str(error).split())}") from error


def _but_index(file: Any) -> list[str]:
    """The columns that are not the index of a data frame: pandas says so beside the table or by its reserved name."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        index = json.loads(file.schema_arrow.metadata[b"pandas"])["index_columns"]
        return [name for name in file.schema_arrow.names if name not in index and not _reserved(name)]
    return [name for name in file.schema_arrow.names if not _reserved(name)]


def _reserved(name: str) -> bool:
    return re.fullmatch(r"__index_level_\d+__", name) is not None


def _numbered(names: list[str]) -> bool:
    first = re.fullmatch(r"((?:.*\D)?)0", names[0], flags=re.DOTALL)
    return first is not None and names == [f"{first[1]}{number}" for number in range(len(names))]


def _check_names(path: Path, file: Any, names: list[str]) -> None:
    present = file.schema_arrow.names
    if not names:
        raise ValueError(f"{path}: expected columns, got none beside the index of a data frame: {_shown(present)}")
    for name in names:
        if present.count(name) != 1:
            raise ValueError(f"{path}: expected one column {name!r}, got {_shown(present)}")
        if names.count(name) != 1:
            raise ValueError(f"{path}: expected each column once, got {name!r} again")


def _rows_of_lists(path: Path, file: Any, name: str, kind: Any) -> np.ndarray:
    import pyarrow.compute

    if not _is_number(kind.value_type):
        raise ValueError(f"{path}, column {name!r}: expected lists of numbers, got {kind}")
    rows, start, dim = [], 0, None
    for chunk in _chunks(path, file, name, kind):
        lengths = pyarrow.compute.list_value_length(chunk).to_numpy(zero_copy_only=False)
        dim = int(lengths[0]) if dim is None and len(lengths) else dim
        wrong = np.flatnonzero(lengths != dim)
        if len(wrong):
            raise ValueError(
                f"{path}, column {name!r}: expected lists of one length, got {dim} values in row 0 and "
                f"{lengths[wrong[0]]} in row {start + wrong[0]}"
            )
        values = chunk.flatten()
        missing = np.flatnonzero(values.is_null().to_numpy(zero_copy_only=False))
        if len(missing):
            raise ValueError(f"{path}, column {name!r}: expected numbers, got null in row {start + missing[0] // dim}")
        if len(chunk):
            rows.append(values.to_numpy(zero_copy_only=False).reshape(len(chunk), dim))
        start += len(chunk)
    return np.concatenate(rows) if rows else np.empty((0, 0))


def _plain(path: Path, file: Any, name: str, kind: Any, expected: str) -> np.ndarray:
    """A column of numbers, or of integers or strings, (N,)."""
    from pyarrow import types

    value = kind.value_type if types.is_dictionary(kind) else kind  # pandas' categories
    strings = expected != "numbers"
    if strings and (types.is_string(value) or types.is_large_string(value)):
        columns = [np.array(_texts(path, name, chunk), dtype=str) for chunk in _chunks(path, file, name, value)]
        return np.concatenate(columns) if columns else np.empty(0, dtype=str)
    if types.is_integer(value) or (not strings and _is_number(kind)):
        columns = [chunk.to_numpy(zero_copy_only=False) for chunk in _chunks(path, file, name, value)]
        return np.concatenate(columns) if columns else np.empty(0, dtype=np.int64)
    raise ValueError(f"{path}, column {name!r}: expected {expected}, got {kind}")


def _texts(path: Path, name: str, chunk: Any) -> list[str]:
    texts = chunk.to_pylist()
    for text in texts:
        if "\0" in text:  # numpy would drop it at the end
            raise ValueError(f"{path}, column {name!r}: expected strings without NUL, got {text!r}")
    return texts


def _chunks(path: Path, file: Any, name: str, kind: Any) -> Iterator[Any]:
    """The parts of a column, of this type, in which nothing is missing."""
    start = 0
    for chunk in file.read([name]).column(name).cast(kind).chunks:
        missing = np.flatnonzero(chunk.is_null().to_numpy(zero_copy_only=False))
        if len(missing):
            raise ValueError(
                f"{path}, column {name!r}: expected a value in each row, got null in row {start + missing[0]}"
            )
        yield chunk
        start += len(chunk)


def _is_list(kind: Any) -> bool:
    from pyarrow import types

    return types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)


def _is_number(kind: Any) -> bool:
    from pyarrow import types

    return types.is_integer(kind) or types.is_floating(kind)


def _shown(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
