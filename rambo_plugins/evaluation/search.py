"""Exact nearest neighbours in one pass over a gallery in blocks, by faiss on the CPU and by torch on GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import faiss
import numpy as np
import torch

from rambo_plugins.evaluation.embeddings import lengths
from rambo_plugins.evaluation.scores import (
    check_range,
    full_precision,
    in_steps,
    item_part,
    product,
    query_part,
    to_device,
)

_FAISS = {"inner_product": faiss.METRIC_INNER_PRODUCT, "l2": faiss.METRIC_L2}
_SCORES = 2**22  # at a time, by torch


def nearest(
    query: np.ndarray,
    own: np.ndarray,
    blocks: Iterable[tuple[int, np.ndarray]],
    k: int,
    metric: str,
    devices: Sequence[torch.device] = (torch.device("cpu"),),
    report: Callable[[int], object] = lambda pairs: None,
    wide: bool = False,
) -> tuple[np.ndarray, np.ndarray, float]:
    """The ``k`` nearest gallery rows of each query other than the query itself, up to the rounding of the products.

    Args:
        query: (B, D) float32.
        own: (B,) int64, the gallery row that is the query itself, −1 where there is none.
        blocks: the gallery, of N rows: first row, rows (n, D) float32.
        k: neighbours wanted; the whole gallery when k ≥ N.
        metric: "inner_product" or "l2".
        devices: which search; blocks go to them in turns.
        report: is told the number of pairs after each block.
        wide: products in float64, by torch.

    Returns:
        the scores, (B, L) float32, or float64 if ``wide``, best first, higher is better (L2: the negative squared
        distance); the gallery rows, (B, L) int64; the length of the longest gallery row. L = min(k, N). A query that is
        itself in the gallery has only N − 1 others: if k ≥ N its list ends in a score of −inf and a row of −1.

    Raises:
        ValueError: scores beyond the range of float32.
    """
    size, largest, total = lengths(query), 0.0, 0
    scores: np.ndarray = np.empty((len(query), 0), np.float64 if wide else np.float32)
    rows: np.ndarray = np.empty((len(query), 0), np.int64)

    def search(device: torch.device, block: tuple[int, np.ndarray]) -> tuple[np.ndarray, np.ndarray, float]:
        start, items = block
        longest = float(lengths(items).max())
        check_range(size, longest, metric)
        length = min(k + 1, len(items))
        if device.type == "cpu" and not wide:
            found, at = _by_faiss(query, items, length, metric)
        else:
            found, at = _by_torch(query, items, length, metric, device, torch.float64 if wide else torch.float32)
        return found, at + start, longest

    blocks = iter(blocks)
    with full_precision(devices[0]), ThreadPoolExecutor(len(devices)) as pool:
        while turn := list(itertools.islice(blocks, len(devices))):
            for more, at, longest in (
                pool.map(search, devices, turn) if len(turn) > 1 else [search(devices[0], turn[0])]
            ):
                largest = max(largest, longest)
                if scores.shape[1]:
                    more, at = np.concatenate([scores, more], axis=1), np.concatenate([rows, at], axis=1)
                    best = np.argsort(-more, axis=1, kind="stable")[:, : k + 1]
                    more, at = np.take_along_axis(more, best, 1), np.take_along_axis(at, best, 1)
                scores, rows = more, at
            seen = sum(len(items) for _, items in turn)
            total += seen
            report(len(query) * seen)
    if k >= total:  # the list holds all there is: a query that is not in it must not lose its last neighbour
        scores = np.pad(scores, ((0, 0), (0, 1)), constant_values=-np.inf)
        rows = np.pad(rows, ((0, 0), (0, 1)), constant_values=-1)
    drop = (rows == own[:, None]) & (own >= 0)[:, None]
    drop[~drop.any(axis=1), -1] = True
    shape = (len(rows), rows.shape[1] - 1)
    return scores[~drop].reshape(shape), rows[~drop].reshape(shape), largest


def as_devices(device: str | torch.device | Sequence[str | torch.device] | None) -> list[torch.device]:
    """The devices that ``device`` names; the current CUDA device if there is one, else the CPU, for None."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    listed = [device] if isinstance(device, str | torch.device) else list(device)
    if not listed:
        raise ValueError("device: expected at least one, got none")
    try:
        devices = [torch.device(one) for one in listed]
    except RuntimeError as error:
        raise ValueError(f"device: expected 'cpu', 'cuda', 'cuda:1' and so on, got {device!r}") from error
    for one in devices:
        try:
            torch.zeros(1, device=one).cpu()
        except torch.cuda.OutOfMemoryError:
            raise
        except (AssertionError, RuntimeError) as error:  # torch's ways to say that there is none
            raise ValueError(f"device: {one} cannot be used here: {str(error).splitlines()[0]}") from error
    return devices


def _by_faiss(query: np.ndarray, items: np.ndarray, k: int, metric: str) -> tuple[np.ndarray, np.ndarray]:
    scores, rows = faiss.knn(query, items, k, metric=_FAISS[metric])
    return (-scores if metric == "l2" else scores), rows


def _by_torch(
    query: np.ndarray, items: np.ndarray, k: int, metric: str, device: torch.device, dtype: torch.dtype
) -> tuple[np.ndarray, np.ndarray]:
    scores = np.empty((len(query), k), np.float32 if dtype == torch.float32 else np.float64)
    rows = np.empty((len(query), k), np.int64)
    on_device = item_part(items, metric, device, dtype)

    def search(part: slice) -> None:
        mine = to_device(query[part], device).to(dtype)
        found = product(query_part(mine, metric), on_device)
        if metric == "l2":
            found -= mine.square().sum(dim=1)[:, None]
        values, at = found.topk(k, dim=1)
        scores[part], rows[part] = values.cpu().numpy(), at.cpu().numpy()

    in_steps(search, len(query), max(1, _SCORES // len(items)), device)
    return scores, rows
