"""Labels, ids and options of an evaluation, checked and brought to one form; embeddings are in ``embeddings``."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

ArrayLike: TypeAlias = np.ndarray | torch.Tensor | Sequence[Any]


def as_keys(values: ArrayLike, name: str, length: int | None = None) -> np.ndarray:
    """``values`` (N,), labels or ids, as int64 or strings; never by way of floats. ``length``: N, if known.

    Integers are those of Python, numpy and torch, without booleans, which are no names of things; strings are compared
    as they are. Floats are refused, since large numbers become one in them, and so are lists of both kinds, of which
    numpy would make strings.
    """
    if isinstance(values, torch.Tensor):
        if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
            raise TypeError(f"{name}: expected integers or strings, got dtype {values.dtype}")
        values = values.detach().cpu().numpy()
    try:
        array = np.asarray(values)
    except ValueError:  # bytes beside strings, lists of unequal length
        array = np.empty(len(values), object)
        array[:] = values
    if array.ndim != 1:
        raise ValueError(f"{name}: expected shape ({'N' if length is None else length},), got shape {array.shape}")
    if length is not None and len(array) != length:
        raise ValueError(f"{name}: expected one entry for each of the {length} embeddings, got {len(array)}")
    if not len(array):  # an empty list has numpy's default dtype
        return array.astype(str if array.dtype.kind == "U" else np.int64)
    if array.dtype.kind not in "iuUOT":
        raise TypeError(f"{name}: expected integers or strings, got dtype {array.dtype}")
    if array.dtype.kind in "OT":
        return _of_objects(array.tolist(), name)
    if not isinstance(values, np.ndarray) and isinstance(values, Sequence):  # which numpy has brought to one kind
        return _of_objects(list(values), name)
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: expected integers that fit int64, got {array.max()}")
    return array.astype(str if array.dtype.kind == "U" else np.int64)


def _of_objects(values: list[Any], name: str) -> np.ndarray:
    """int64 or strings of Python's or numpy's objects, or of tensors of one entry."""
    values = [value.item() if isinstance(value, torch.Tensor | np.ndarray) else value for value in values]
    kind: Any = str if isinstance(values[0], str) else (int, np.integer)
    for place, value in enumerate(values):
        if not isinstance(value, kind) or isinstance(value, bool):
            before = f" after {values[0]!r}" if place else ""
            raise TypeError(f"{name}: expected integers or strings, all of one kind, got {value!r} at {place}{before}")
        if isinstance(value, str) and value.endswith("\0"):
            raise ValueError(f"{name}: expected no NUL at the end, which numpy drops, got {value!r} at {place}")
    try:
        return np.array(values, dtype=str if kind is str else np.int64)
    except OverflowError as error:
        wrong = next(value for value in values if not -(2**63) <= value < 2**63)
        raise ValueError(f"{name}: expected integers that fit int64, got {wrong}") from error


def joint_codes(first: np.ndarray, second: np.ndarray, names: str) -> tuple[np.ndarray, np.ndarray]:
    """The same keys in both arrays as the same small integers, counted from 0."""
    if first.dtype.kind != second.dtype.kind:
        kinds = " and ".join("strings" if array.dtype.kind == "U" else "integers" for array in (first, second))
        raise TypeError(
            f"{names}: expected both integers or both strings, which are never equal to each other, got {kinds}; the "
            "lines of a .txt are strings, and so are integers after labels.astype(str)"
        )
    codes = np.unique(np.concatenate([first, second]), return_inverse=True)[1]
    return codes[: len(first)], codes[len(first) :]


def find_own_rows(
    query_ids: ArrayLike | None, gallery_ids: ArrayLike | None, num_queries: int, num_gallery: int
) -> np.ndarray:
    """The gallery row that is the query itself, (Q,) int64, −1 where there is none."""
    if query_ids is None and gallery_ids is None:
        return np.full(num_queries, -1)
    if query_ids is None or gallery_ids is None:
        given, missing = ("gallery_ids", "query_ids") if query_ids is None else ("query_ids", "gallery_ids")
        raise ValueError(f"ids: expected query_ids and gallery_ids together, got {given} without {missing}")
    gallery_keys = as_keys(gallery_ids, "gallery_ids", num_gallery)
    query_codes, gallery_codes = joint_codes(
        as_keys(query_ids, "query_ids", num_queries), gallery_keys, "query_ids and gallery_ids"
    )
    repeated = np.bincount(gallery_codes)[gallery_codes] > 1
    if repeated.any():
        raise ValueError(
            f"gallery_ids: expected each id once, got {gallery_keys[repeated][:5].tolist()} and so on more than once"
        )
    row_of = np.full(max(query_codes.max(), gallery_codes.max()) + 1, -1)
    row_of[gallery_codes] = np.arange(num_gallery)
    return row_of[query_codes]


def check_ks(ks: Iterable[int]) -> tuple[int, ...]:
    """The cutoffs K, ascending, each once."""
    if not isinstance(ks, Iterable) or isinstance(ks, str):
        raise TypeError(f"ks: expected a sequence of positive integers, got {ks!r}")
    ks = tuple(ks)
    if not ks or not all(_is_integer(k) and 0 < k < 2**62 for k in ks):  # ranks are int64
        raise ValueError(f"ks: expected one or more positive integers, got {ks!r}")
    return tuple(sorted({int(k) for k in ks}))


def check_number(value: Any, name: str, expected: str, least: int = 1) -> int:
    """An integer of Python or numpy of at least ``least``; no boolean. ``expected``: what errors call it."""
    if not _is_integer(value) or value < least:
        raise ValueError(f"{name}: expected {expected}, got {value!r}")
    return int(value)


def check_seed(seed: Any) -> int:
    return check_number(seed, "seed", "an integer of at least 0", 0)


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_choice(value: str, name: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
