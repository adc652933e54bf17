"""Embeddings in memory, in a memory map or in blocks that are read anew: checked, float32, a block at a time."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rambo_plugins.evaluation.inputs import ArrayLike


def as_embeddings(values: ArrayLike, name: str, normalize: bool = False) -> np.ndarray:
    """``values`` (N, D), any real dtype and device, as finite, contiguous float32; rows of unit length on demand.

    Rows of zeros have no direction and stay zero. The caller's array is never written to.
    """
    array = _as_float32(values, name)
    if array.ndim != 2:
        raise ValueError(f"{name}: expected embeddings of shape (N, D), got shape {tuple(array.shape)}")
    if 0 in array.shape:
        raise ValueError(f"{name}: expected at least one embedding and one dimension, got shape {tuple(array.shape)}")
    _check_finite(array, name, np.arange(len(array)))
    return _normalized(array) if normalize else array


def lengths(rows: np.ndarray) -> np.ndarray:
    """The Euclidean length of each row, (N,) float64."""
    return np.sqrt(np.einsum("nd,nd->n", rows, rows, dtype=np.float64))


class Embeddings:
    """N rows of D dimensions behind one interface, whether or not they fit into memory.

    Arrays and tensors are converted once. Memory maps, and iterables of blocks (n, D), are converted block by block in
    each pass; the pages of a memory map are given back to the system after each block.

    Args:
        values: an array, tensor or nested sequence (N, D), a memory map, or an iterable of such blocks that can be
            iterated more than once: a list of arrays, a data loader, an object with ``__iter__``.
        name: what errors call it.
        num: N, which the number of labels tells.
        normalize: rows of length 1.

    Raises:
        TypeError: a generator, which would be empty in the second pass; no real numbers.
        ValueError: shapes that do not fit, no rows, NaN or inf (for what is read in blocks, in the first pass).
    """

    def __init__(self, values: ArrayLike | Iterable[ArrayLike], name: str, num: int, normalize: bool = False) -> None:
        self.name, self.num, self.normalize = name, num, normalize
        self._array: np.ndarray | None = None
        self._mapped: np.ndarray | None = None
        self._stream: Iterable[ArrayLike] | None = None
        self._checked = 0  # rows, from the first on, that a pass has seen
        if isinstance(values, np.ndarray) and _mapping(values) is not None:
            if values.ndim != 2 or 0 in values.shape or values.dtype.kind not in "fiu":
                as_embeddings(values, name)  # says what is wrong
            self._mapped, self.dim, found = values, values.shape[1], len(values)
        elif _is_stream(values, name):
            self._stream = values
            self.dim, found = _as_blocks(next(iter(values)), name).shape[1], num
        else:
            self._array = as_embeddings(values, name, normalize)  # type: ignore[arg-type]
            found, self.dim = self._array.shape
        if found != num:
            raise ValueError(f"{name}_labels: expected one entry for each of the {found} embeddings, got {num}")

    @property
    def in_memory(self) -> bool:
        return self._array is not None

    def blocks(self, size: int) -> Iterator[tuple[int, np.ndarray]]:
        """The number of the first row and the rows, (n ≤ size, D) float32, until all N are through."""
        if self._array is not None:
            for start in range(0, self.num, size):
                yield start, self._array[start : start + size]
        elif self._mapped is not None:
            for start in range(0, self.num, size):
                yield start, self._converted(self._mapped[start : start + size], start)
                _give_back(self._mapped)
        else:
            yield from self._regrouped(size)

    def take(self, rows: np.ndarray) -> np.ndarray:
        """The rows of these numbers, ascending, (n, D) float32."""
        if self._array is not None:
            return self._array if len(rows) == self.num else self._array[rows]
        if self._mapped is not None:
            taken = np.empty((len(rows), self.dim), np.float32)
            for first in range(0, len(rows), 4096):
                chunk = rows[first : first + 4096]
                found = _as_float32(self._mapped[chunk], self.name)
                _check_finite(found, self.name, chunk)
                taken[first : first + 4096] = _normalized(found) if self.normalize else found
                _give_back(self._mapped)
            return taken
        parts = []
        for start, block in self.blocks(4096):
            first, last = np.searchsorted(rows, (start, start + len(block)))
            parts.append(block[rows[first:last] - start])
        return np.concatenate(parts)

    def _converted(self, values: ArrayLike, start: int) -> np.ndarray:
        block = _as_float32(values, self.name)
        if start + len(block) > self._checked:
            _check_finite(block, self.name, np.arange(start, start + len(block)))
            self._checked = max(self._checked, start + len(block))
        return _normalized(block) if self.normalize else block

    def _regrouped(self, size: int) -> Iterator[tuple[int, np.ndarray]]:
        start, waiting, held = 0, 0, []
        assert self._stream is not None
        for values in self._stream:
            block = _as_blocks(values, self.name)
            if block.shape[1] != self.dim:
                raise ValueError(
                    f"{self.name}: expected blocks of {self.dim} dimensions as the first, got shape {block.shape}"
                )
            if start + waiting + len(block) > self.num:
                raise ValueError(f"{self.name}: expected {self.num} rows in all blocks, as labels, got more")
            held.append(self._converted(block, start + waiting))
            waiting += len(block)
            while waiting >= size:
                whole = np.concatenate(held) if len(held) > 1 else held[0]
                yield start, whole[:size]
                held, waiting, start = [whole[size:]], waiting - size, start + size
        if start + waiting < self.num:
            raise ValueError(f"{self.name}: expected {self.num} rows in all blocks, as labels, got {start + waiting}")
        if waiting:
            yield start, np.concatenate(held)


def _as_float32(values: Any, name: str) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        if values.is_complex() or values.is_quantized or values.dtype == torch.bool or values.layout != torch.strided:
            raise TypeError(f"{name}: expected a dense tensor of real numbers, got {values.dtype}, {values.layout}")
        return np.ascontiguousarray(values.detach().to("cpu", torch.float32).numpy())
    if isinstance(values, np.ma.MaskedArray):
        raise TypeError(f"{name}: expected an array without a mask, got one; fill or leave out what it hides")
    if hasattr(values, "columns"):
        raise TypeError(
            f"{name}: expected an array, got a table with the columns {', '.join(map(str, values.columns))[:200]}; "
            "pass those of the vector, for pandas as table[columns].to_numpy()"
        )
    array = np.asarray(values)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name}: expected real numbers, got dtype {array.dtype}")
    with np.errstate(over="ignore"):  # reported below, with the rows
        return np.ascontiguousarray(array, dtype=np.float32)


def _as_blocks(values: Any, name: str) -> np.ndarray:
    block = _as_float32(values, name)
    if block.ndim != 2 or block.shape[1] == 0:
        raise ValueError(f"{name}: expected blocks of shape (n, D), got shape {block.shape}")
    return block


def _check_finite(array: np.ndarray, name: str, numbers: np.ndarray) -> None:
    bad = ~np.isfinite(array).all(axis=1)
    if bad.any():
        raise ValueError(
            f"{name}: {bad.sum()} of {len(array)} rows have NaN or inf as float32, the first at "
            f"{numbers[bad][:5].tolist()}"
        )


def _normalized(array: np.ndarray) -> np.ndarray:
    length = lengths(array)
    return (array / np.where(length > 0, length, 1)[:, None]).astype(np.float32)


def _is_stream(values: Any, name: str) -> bool:
    if isinstance(values, np.ndarray | torch.Tensor):
        return False
    if isinstance(values, Iterator):
        raise TypeError(
            f"{name}: expected an array, or blocks that can be iterated more than once (a list of arrays, an object "
            f"with __iter__), got {type(values).__name__}, which can be read only once"
        )
    if isinstance(values, Sequence):
        return len(values) > 0 and isinstance(values[0], np.ndarray | torch.Tensor) and values[0].ndim == 2
    return isinstance(values, Iterable) and not hasattr(values, "__array__")


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    base: Any = array
    while isinstance(base, np.ndarray):
        base = base.base
    return base if isinstance(base, mmap.mmap) else None


def _give_back(array: np.ndarray) -> None:
    """Pages that were read leave the process; the system may keep them in its cache.

    Only of maps that nobody can write to: what was written to a private one (``mmap_mode="c"``) is nowhere else.
    """
    mapping = _mapping(array)
    base: Any = array
    while isinstance(base, np.ndarray):
        if base.flags.writeable:
            return
        base = base.base
    if mapping is not None and hasattr(mapping, "madvise"):
        mapping.madvise(mmap.MADV_DONTNEED)
