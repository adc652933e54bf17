"""Labels, ids and options of an evaluation, checked and brought to one form; embeddings are in ``embeddings``."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

ArrayLike: TypeAlias = np.ndarray | torch.Tensor | Sequence[Any]


def as_keys(values: ArrayLike, name: str, length: int | None = None) -> np.ndarray:
    """``values`` (N,), labels or ids, as int64 or strings; never by way of floats. ``length``: N, if known."""
    if isinstance(values, torch.Tensor):
        if values.is_floating_point() or values.is_complex():
            raise TypeError(f"{name}: expected integers or strings, got dtype {values.dtype}")
        values = values.detach().cpu().numpy()
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected shape ({'N' if length is None else length},), got shape {array.shape}")
    if length is not None and len(array) != length:
        raise ValueError(f"{name}: expected one entry for each of the {length} embeddings, got {len(array)}")
    if array.dtype.kind == "U" or (array.dtype == object and all(isinstance(value, str) for value in array)):
        return array.astype(str)
    if array.dtype.kind not in "iub" and len(array):  # an empty list has numpy's default dtype
        raise TypeError(f"{name}: expected integers or strings, got dtype {array.dtype}")
    if array.dtype == np.uint64 and len(array) and array.max() > np.iinfo(np.int64).max:
        raise ValueError(f"{name}: expected integers that fit int64, got {array.max()}")
    return array.astype(np.int64)


def joint_codes(first: np.ndarray, second: np.ndarray, names: str) -> tuple[np.ndarray, np.ndarray]:
    """The same keys in both arrays as the same small integers, counted from 0."""
    if first.dtype.kind != second.dtype.kind:
        raise TypeError(f"{names}: expected both integers or both strings, got {first.dtype} and {second.dtype}")
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
    if not ks or not all(isinstance(k, int | np.integer) and not isinstance(k, bool) and k > 0 for k in ks):
        raise ValueError(f"ks: expected one or more positive integers, got {ks!r}")
    return tuple(sorted({int(k) for k in ks}))


def check_choice(value: str, name: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
