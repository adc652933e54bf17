"""Scores of queries and items: the inner product, or the negative squared distance.

Matrix products in float32 on any device come first. What their rounding leaves open goes to float64, as products where
it is much, as with a nearly collapsed model, or pair by pair; what float64 leaves open is added up without rounding
(``exact.py``). How far a rounded score can lie from the true one is a bound, not an observation: it holds for every
order of summation, fused or not, and where numbers below 2⁻¹²⁶ are flushed to zero.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch

from rambo_plugins.evaluation.embeddings import lengths
from rambo_plugins.evaluation.exact import exact_scores

METRICS = ("inner_product", "l2")
PAIRS = 8192  # pairs of rows at a time
_CHUNK = 2**18  # numbers of theirs, so that their products stay in the cache
_SMALLEST = float(np.finfo(np.float32).tiny)

logger = logging.getLogger("rambo_plugins")


def rounding(
    query_lengths: np.ndarray, largest: float, dim: int, metric: str, dtype: type[np.floating] = np.float32
) -> np.ndarray:
    r"""How far a score in ``dtype`` can lie from the exact one of the same rows, (B,) float64.

    .. math:: |fl(q \cdot g) - q \cdot g| \le \gamma_D |q| |g|, \qquad \gamma_n = \frac{n u}{1 - n u}

    in any order of summation (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., Section 3.1, and Cauchy-
    Schwarz), u half the distance from 1 to the next number. For the squared distance, as |q|² + |g|² − 2 q·g or as
    Σ (q_d − g_d)², it is γ_{D+4} (|q| + |g|)², in float64, where |g|² is rounded too, γ_{2D+4} (|q| + |g|)². To this
    comes what numbers too small for the format lose. A few roundings more are counted for the lengths and sums here.

    Args:
        query_lengths: (B,) float64, |q|.
        largest: the length of the longest item.
        dim: D, less than 2²².
        metric: a member of ``METRICS``.
        dtype: of the products; the rows are float32 in any case.
    """
    if dim >= 2**22:
        raise ValueError(f"expected embeddings of less than {2**22:,} dimensions, got {dim:,}")
    roundings = dim + 8 if dtype is np.float32 else 2 * dim + 8
    unit = roundings * float(np.finfo(dtype).eps) / 2
    lost = 8 * dim * _SMALLEST + 4 * math.sqrt(dim) * _SMALLEST * (query_lengths + largest)
    return unit / (1 - unit) * _bound(query_lengths, largest, metric) * (1 + 1e-9) + lost


def check_range(query_lengths: np.ndarray, largest: float, metric: str) -> None:
    if 1.01 * _bound(query_lengths, largest, metric).max(initial=0) > np.finfo(np.float32).max:
        raise ValueError("the scores of some embeddings overflow float32; scale them down or pass normalize=True")


def _bound(query_lengths: np.ndarray, largest: float, metric: str) -> np.ndarray:
    """No score of a query is larger in size, (B,) float64."""
    return query_lengths * largest if metric == "inner_product" else (query_lengths + largest) ** 2


def below(values: np.ndarray) -> np.ndarray:
    """The largest float32 numbers that are not above the values."""
    rounded = values.astype(np.float32)
    return np.where(rounded > values, np.nextafter(rounded, np.float32(-np.inf)), rounded)


def above(values: np.ndarray) -> np.ndarray:
    """The smallest float32 numbers that are not below the values."""
    return -below(-values)


class Items:
    """Rows of a gallery, and, once they are asked for, those among them that differ and what they are multiples of."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    @functools.cached_property
    def distinct(self) -> tuple[np.ndarray, np.ndarray]:
        """The distinct rows, and the number of each row among them."""
        return _distinct(self.rows)

    @functools.cached_property
    def grain(self) -> float:
        """See ``grain``."""
        return grain(self.rows)


def grain(rows: np.ndarray) -> float:
    """The largest power of two of which all numbers are multiples; 2¹²⁸ where all are zero."""
    fraction, exponent = np.frexp(rows)
    whole = (fraction * np.float32(2**24)).astype(np.int64)
    lowest = np.frexp((whole & -whole).astype(np.float64))[1] - 25 + exponent
    return 2.0 ** int(lowest.min(initial=128, where=whole != 0))


def wide_is_exact(query_grain: float, query_lengths: np.ndarray, items: Items, largest: float, metric: str) -> bool:
    """Whether scores in float64 have no rounding: integers, codes of ±1, numbers that were half precision.

    All sums are multiples of the grain of the products, and less than 2⁵³ of it.
    """
    unit = query_grain * items.grain
    if metric == "l2":
        unit = min(2 * unit, items.grain**2)
    return bool(_bound(query_lengths, largest, metric).max(initial=0) * 1.01 < unit * 2.0**53)


def wide_scores_of_pairs(query: np.ndarray, items: Items, q: np.ndarray, g: np.ndarray, metric: str) -> np.ndarray:
    """The scores of the pairs (q, g) in float64, (n,), but for |q|² of the squared distance."""
    return _of_pairs(_wide_scores, query, items, q, g, metric)


def exact_scores_of_pairs(query: np.ndarray, items: Items, q: np.ndarray, g: np.ndarray, metric: str) -> np.ndarray:
    """``exact_scores`` of the pairs (q, g), (n, W)."""
    return _of_pairs(exact_scores, query, items, q, g, metric)


def _of_pairs(
    scores: Callable[[np.ndarray, np.ndarray, str], np.ndarray], query: np.ndarray, items: Items, q: np.ndarray,
    g: np.ndarray, metric: str,
) -> np.ndarray:  # fmt: skip
    """Once for each pair of distinct rows where many rows are the same."""
    if len(q) > PAIRS:
        used_q, q_at = np.unique(q, return_inverse=True)
        distinct_q, of_q = _distinct(query[used_q])
        distinct_g, of_g = items.distinct
        if 4 * len(distinct_q) * len(distinct_g) < len(q):
            a, b = np.indices((len(distinct_q), len(distinct_g))).reshape(2, -1)
            table = scores(distinct_q[a], distinct_g[b], metric)
            return table[of_q[q_at] * len(distinct_g) + of_g[g]]
    parts = [
        scores(query[q[at : at + PAIRS]], items.rows[g[at : at + PAIRS]], metric) for at in range(0, len(q), PAIRS)
    ]
    width = max((part.shape[1] for part in parts if part.ndim == 2), default=0)
    if width:
        parts = [np.pad(part, ((0, 0), (0, width - part.shape[1]))) for part in parts]
    return np.concatenate(parts) if parts else scores(query[:0], items.rows[:0], metric)


def _wide_scores(query: np.ndarray, items: np.ndarray, metric: str) -> np.ndarray:
    found = np.empty(len(query))
    step = max(1, _CHUNK // query.shape[1])
    for start in range(0, len(query), step):
        part = slice(start, start + step)
        np.multiply(query[part], items[part], dtype=np.float64).sum(axis=1, out=found[part])
        if metric == "l2":
            found[part] = 2 * found[part] - np.square(items[part], dtype=np.float64).sum(axis=1)
    return found


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    rows = np.ascontiguousarray(rows)
    keys = rows.view(np.dtype((np.void, rows.shape[1] * rows.itemsize)))[:, 0]
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return rows[first], inverse


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    if not array.flags.writeable:  # torch would warn, though nothing writes to it
        array = array.copy()
    return torch.from_numpy(array).to(device)


def query_part(rows: torch.Tensor, metric: str) -> torch.Tensor:
    return rows if metric == "inner_product" else 2 * rows


def item_part(
    rows: np.ndarray, metric: str, device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor | None]:
    items = to_device(rows, device).to(dtype)
    if metric == "inner_product":
        return items.T, None
    if dtype == torch.float64:
        return items.T, -items.square().sum(dim=1)
    return items.T, to_device(-np.square(lengths(rows)).astype(np.float32), device)  # rounded once


def product(
    query: torch.Tensor, items: tuple[torch.Tensor, torch.Tensor | None], out: torch.Tensor | None = None
) -> torch.Tensor:
    """The inner product, or the negative squared distance but for |query|², which is the same in a row."""
    rows, bias = items
    return torch.mm(query, rows, out=out) if bias is None else torch.addmm(bias, query, rows, out=out)


def wide_product(query: np.ndarray, items: np.ndarray, metric: str, device: torch.device) -> torch.Tensor:
    """``product`` of float32 rows in float64."""
    return product(
        query_part(to_device(query, device).double(), metric), item_part(items, metric, device, torch.float64)
    )


@contextlib.contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Products in float32, whatever the caller has allowed: no autocast, no TF32 or bfloat16 inside.

    The settings are the process's: enter it once around threads, which start without autocast, not in each.

    Raises:
        RuntimeError: the device multiplies with fewer digits all the same, as environment variables can make it do.
    """
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        if not hasattr(torch.backends.cuda.matmul, "fp32_precision"):  # torch < 2.9
            allowed = torch.get_float32_matmul_precision()
            torch.set_float32_matmul_precision("highest")
            try:
                _check_products(device)
                yield
            finally:
                torch.set_float32_matmul_precision(allowed)
            return
        backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        before = [backend.fp32_precision for backend in backends]
        try:
            for backend in backends:
                backend.fp32_precision = "ieee"
            _check_products(device)
            yield
        finally:
            for backend, precision in zip(backends, before, strict=True):
                backend.fp32_precision = precision


def _check_products(device: torch.device) -> None:
    """(1 + 2⁻¹²)² is 1 where inputs are rounded to the 11 digits of TF32 or the 8 of bfloat16."""
    rows = torch.full((64, 64), 1 + 2.0**-12, dtype=torch.float32, device=device)
    if float(torch.mm(rows, rows)[0, 0]) < 64 * (1 + 1.5 * 2.0**-12):
        raise RuntimeError(
            f"{device}: expected products of float32 numbers, got ones of fewer digits; look for settings of cuBLAS or "
            "oneDNN in the environment, such as NVIDIA_TF32_OVERRIDE or ONEDNN_DEFAULT_FPMATH_MODE"
        )


def in_steps(
    run: Callable[[slice], None],
    num: int,
    step: int,
    device: torch.device,
    release: Callable[[], None] = lambda: None,
) -> int:
    """``run`` for ``step`` of ``num`` rows at a time, halved where the GPU is out of memory; the step in the end."""
    at = 0
    while at < num:
        try:
            run(slice(at, min(at + step, num)))
        except torch.cuda.OutOfMemoryError:
            if step == 1:
                raise
            release()
            step //= 2
            logger.warning("%s is out of memory: going on with %d queries at a time", device, step)
        else:
            at += step
    return step
