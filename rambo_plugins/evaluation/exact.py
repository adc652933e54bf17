"""Exact scores of pairs of float32 rows, for what no rounded score can decide.

The product of two float32 numbers is exact in float64, so a score is a sum of float64 numbers: of q_d·g_d for the inner
product, of 2·q_d·g_d and −g_d² for the squared distance, −|q − g|² but for |q|², which is the same for all items of a
query. ``exact_scores`` brings the sum without any error to the form hi + lo + …: hi is the sum rounded to float64, lo
what is left, rounded, and so on. Equal sums have equal forms, and the larger sum has the larger form, column by column.
"""

from __future__ import annotations

import math

import numpy as np

_TERMS = 2**17  # at a time, so that they stay in the cache


def exact_scores(query: np.ndarray, items: np.ndarray, metric: str) -> np.ndarray:
    """The score of each pair of rows, both (n, D) float32, without rounding: (n, W) float64, see the module.

    W is 2, or more where numbers of very different size meet.
    """
    step = max(1, _TERMS // max(1, query.shape[1]))
    parts = [slice(start, start + step) for start in range(0, max(1, len(query)), step)]
    return joined([_sums(_terms(query[part], items[part], metric)) for part in parts])


def joined(scores: list[np.ndarray]) -> np.ndarray:
    """Several as one, rounded ones (n,) or exact ones (n, W)."""
    if scores[0].ndim == 2:
        width = max(part.shape[1] for part in scores)
        scores = [_widened(part, width) for part in scores]
    return np.concatenate(scores)


def compare(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """1, 0 or −1 where the first exact score is larger than, equal to or smaller than the second: (n,) int64."""
    width = max(first.shape[1], second.shape[1])
    first, second = _widened(first, width), _widened(second, width)
    column = (first != second).argmax(axis=1)[:, None]
    a, b = np.take_along_axis(first, column, 1)[:, 0], np.take_along_axis(second, column, 1)[:, 0]
    return (a > b).astype(np.int64) - (a < b)


def raise_to(best: np.ndarray, at: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """``best``, (B, W), with each row of ``at``, (n,), raised to the largest of its ``scores``, (n, W).

    Written to in place where it is wide enough; the result has the rows in any case.
    """
    best = _widened(best, scores.shape[1])
    order = np.lexsort([*scores.T[::-1], at])
    last = order[np.append(at[order][1:] != at[order][:-1], True)] if len(order) else order
    better = last[compare(scores[last], best[at[last]]) > 0]
    best[at[better]] = _widened(scores[better], best.shape[1])
    return best


def _terms(query: np.ndarray, items: np.ndarray, metric: str) -> np.ndarray:
    if metric == "inner_product":
        return np.multiply(query, items, dtype=np.float64)
    return np.concatenate([2 * np.multiply(query, items, dtype=np.float64), -np.square(items, dtype=np.float64)], 1)


def _sums(terms: np.ndarray) -> np.ndarray:
    """The form of the sum of each row, (n, W)."""
    total, errors = _added(terms)
    rest, errors = _added(errors)
    hi, lo = _two_sum(total, rest)
    left = np.flatnonzero(errors.any(axis=1))  # rare: numbers of very different size
    if not len(left):
        return np.stack([hi, lo], axis=1)
    forms = [_form(row) for row in terms[left].tolist()]
    sums = np.zeros((len(terms), max(2, *map(len, forms))))
    sums[:, 0], sums[:, 1] = hi, lo
    for row, form in zip(left, forms, strict=True):
        sums[row] = 0
        sums[row, : len(form)] = form
    return sums


def _form(terms: list[float]) -> list[float]:
    form = [math.fsum(terms)]
    while form[-1]:
        terms.append(-form[-1])
        form.append(math.fsum(terms))
    return form


def _added(terms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The rounded sum of each row, (n,), and the errors, (n, M − 1), that together with it are the exact one."""
    errors = [np.zeros((len(terms), 0))]
    while terms.shape[1] > 1:
        half = terms.shape[1] // 2
        total, error = _two_sum(terms[:, :half], terms[:, half : 2 * half])
        errors.append(error)
        terms = total if 2 * half == terms.shape[1] else np.concatenate([total, terms[:, 2 * half :]], axis=1)
    return terms[:, 0] if terms.shape[1] else np.zeros(len(terms)), np.concatenate(errors, axis=1)


def _two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """a + b, rounded, and its error, which float64 holds exactly (Knuth, TAOCP 2, 4.2.2)."""
    total = a + b
    other = total - a
    return total, (a - (total - other)) + (b - other)


def _widened(scores: np.ndarray, width: int) -> np.ndarray:
    return scores if scores.shape[1] >= width else np.pad(scores, ((0, 0), (0, width - scores.shape[1])))
