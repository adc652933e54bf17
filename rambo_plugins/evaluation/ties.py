"""Ranks from the top of a ranked list, with ties broken against the relevant item.

A list holds the L best scores of a query, (B, L), best first, and which of the items are ``relevant``, (B, L) bool.
``settled``, (B,) bool, are the queries whose outcome does not depend on what is missing from their list.
"""

import numpy as np


def first_ranks(
    scores: np.ndarray, relevant: np.ndarray, floor: np.ndarray, limit: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rank of the first relevant item, pessimistic and optimistic, (B,) int64 with limit + 1 for all beyond; settled.

    1 + #{irrelevant, s ≥ s*} and 1 + #{irrelevant, s > s*}, s* the best relevant score. What is missing from a list
    scores no more than its ``floor``, (B,), which is −inf where nothing is. Every query has a relevant item, which may
    be missing.
    """
    found = relevant.any(axis=1)
    best = np.where(found, scores[np.arange(len(scores)), relevant.argmax(axis=1)], -np.inf)
    bound = np.maximum(best, floor)[:, None]  # s* is no better
    optimistic = 1 + (scores > bound).sum(axis=1)
    pessimistic = 1 + (~relevant & (scores >= bound)).sum(axis=1)
    settled = (best > floor) | (optimistic > limit) | ((best == floor) & (pessimistic > limit))
    return np.minimum(pessimistic, limit + 1), np.minimum(optimistic, limit + 1), settled


def precisions_at_r(scores: np.ndarray, relevant: np.ndarray, r: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average precision and precision at R, (1/R) Σ rank⁺_i / rank_i and (1/R) Σ 1 over relevant i with rank_i ≤ R.

    (B,) float64 each; ``r``, (B,) int64, is R ≥ 1. rank_i = #{irrelevant, s ≥ s_i} + rank⁺_i, rank⁺_i the rank among
    the relevant. A list of 2R items or more settles it: R of them are irrelevant, so a relevant item that ties with the
    last one is beyond R already.
    """
    length = scores.shape[1]
    rank_plus = relevant.cumsum(axis=1, dtype=np.int32)
    irrelevant = np.arange(1, length + 1, dtype=np.int32) - rank_plus
    group_end = np.ones(scores.shape, dtype=bool)
    np.not_equal(scores[:, :-1], scores[:, 1:], out=group_end[:, :-1])
    # the irrelevant items down to the end of each item's group of equal scores
    at_end = np.where(group_end, irrelevant, np.int32(length))
    rank = np.minimum.accumulate(at_end[:, ::-1], axis=1)[:, ::-1] + rank_plus
    hit = relevant & (rank <= r[:, None])
    return np.where(hit, rank_plus / rank, 0).sum(axis=1) / r, hit.sum(axis=1) / r


def certain(
    scores: np.ndarray, relevant: np.ndarray, whole: bool, needed: np.ndarray, tolerance: np.ndarray
) -> np.ndarray:
    """Whether the order of relevant and irrelevant items among the first ``needed``, (B,) int64, is beyond rounding.

    ``whole``: no item is missing. Two scores of a row that lie no more than its ``tolerance``, (B,), apart may be equal
    or in either order.
    """
    floor = (scores[np.arange(len(scores)), needed - 1] - tolerance)[:, None]
    mixed = relevant[:, :-1] != relevant[:, 1:]
    close = mixed & (scores[:, :-1] - scores[:, 1:] <= tolerance[:, None]) & (scores[:, 1:] >= floor)
    return ~close.any(axis=1) & (whole | (scores[:, -1] < floor[:, 0]))
