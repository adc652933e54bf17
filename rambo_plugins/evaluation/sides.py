"""What searches what: queries and gallery with their labels, and which item of the gallery each query is itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from rambo_plugins.evaluation.embeddings import Embeddings
from rambo_plugins.evaluation.inputs import ArrayLike, as_keys, find_own_rows, joint_codes


@dataclass(frozen=True)
class Sides:
    query: Embeddings
    query_codes: np.ndarray  # (Q,) integers, equal for equal labels, as
    gallery_codes: np.ndarray  # (N,)
    own_rows: np.ndarray  # (Q,) int64, the gallery row that is the query itself, −1 where there is none
    num_relevant: np.ndarray  # (Q,) relevant items of each query, without itself
    gallery: Embeddings

    def labelled_blocks(self, size: int) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        for start, rows in self.gallery.blocks(size):
            yield start, rows, self.gallery_codes[start : start + len(rows)]


def as_sides(
    query: ArrayLike | Iterable[ArrayLike],
    query_labels: ArrayLike,
    gallery: ArrayLike | Iterable[ArrayLike] | None,
    gallery_labels: ArrayLike | None,
    query_ids: ArrayLike | None,
    gallery_ids: ArrayLike | None,
    normalize: bool,
) -> Sides:
    """The arguments of ``recall_at_k``, checked. Raises as it does."""
    query_keys = as_keys(query_labels, "query_labels")
    query_rows = Embeddings(query, "query", len(query_keys), normalize)
    if gallery is None:
        if gallery_labels is not None or query_ids is not None or gallery_ids is not None:
            raise ValueError("gallery_labels, query_ids and gallery_ids go with a gallery, but gallery is None")
        gallery_rows, gallery_keys = query_rows, query_keys
        own_rows = np.arange(query_rows.num)
    else:
        if gallery_labels is None:
            raise ValueError("gallery: expected gallery_labels with it, got None")
        gallery_keys = as_keys(gallery_labels, "gallery_labels")
        gallery_rows = Embeddings(gallery, "gallery", len(gallery_keys), normalize)
        own_rows = find_own_rows(query_ids, gallery_ids, query_rows.num, gallery_rows.num)
    if query_rows.dim != gallery_rows.dim:
        raise ValueError(
            f"query and gallery: expected the same D, got shapes {(query_rows.num, query_rows.dim)} and "
            f"{(gallery_rows.num, gallery_rows.dim)}"
        )
    query_codes, gallery_codes = joint_codes(query_keys, gallery_keys, "query_labels and gallery_labels")
    num_relevant = np.bincount(gallery_codes, minlength=query_codes.max() + 1)[query_codes]
    num_relevant -= (own_rows >= 0) & (gallery_codes[own_rows] == query_codes)
    return Sides(query_rows, query_codes, gallery_codes, own_rows, num_relevant, gallery_rows)
