"""Tables in text files, as the public data sets bring them: rows of columns, separated by spaces."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np


def read_table(
    path: Path, columns: Sequence[str], *, integers: Sequence[str] = (), header: bool = True, counted: bool = False
) -> dict[str, np.ndarray]:
    """The columns of a list, (N,) each: int64 those of ``integers``, strings the others.

    Args:
        header: the first line, or the one after the number, names the columns.
        counted: line 1 is the number of rows.

    Raises:
        ValueError: names the file, the line, what was expected there and what came.
    """
    content = path.read_bytes()
    try:
        lines = content.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        number = content[: error.start].count(b"\n") + 1
        raise ValueError(f"{path}, line {number}: expected text in UTF-8: {error}") from error
    skip = counted + header
    if header:
        found = lines[counted].split() if len(lines) > counted else []
        if found != list(columns):
            raise ValueError(f"{path}, line {skip}: expected the header {' '.join(columns)}, got {' '.join(found)!r}")
    rows = [line.split() for line in lines[skip:]]
    if not any(rows):
        raise ValueError(f"{path}: expected rows of {' '.join(columns)}, got none")
    for number, row in enumerate(rows, start=skip + 1):
        if len(row) != len(columns):
            raise ValueError(
                f"{path}, line {number}: expected {len(columns)} columns, {' '.join(columns)}, got {' '.join(row)!r}"
            )
        for column, value in zip(columns, row, strict=True):
            if column in integers and not re.fullmatch("0|[1-9][0-9]{0,17}", value, re.ASCII):
                raise ValueError(f"{path}, line {number}: {column}: expected an integer such as 12, got {value!r}")
    if counted and lines[0].strip() != str(len(rows)):
        raise ValueError(f"{path}: line 1 says {lines[0].strip()!r} images, but {len(rows)} follow")
    return {
        column: np.array(values, dtype=np.int64 if column in integers else str)
        for column, values in zip(columns, zip(*rows, strict=True), strict=True)
    }
