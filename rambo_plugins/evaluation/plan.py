"""Sizes of the parts and blocks of an evaluation that keep to the memory it was given."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rambo_plugins.evaluation.embeddings import Embeddings

MEMORY = 512 * 2**20  # bytes, unless max_memory says otherwise
PART = 4 * 10**12  # floating point operations of one part, which a work folder keeps; half a minute on two cores
_BYTES_PER_NEIGHBOUR = 80


@dataclass(frozen=True)
class Plan:
    queries: int  # in a part
    step: int  # of them, and
    block: int  # items of the gallery, at a time


def make_plan(
    query: Embeddings,
    gallery: Embeddings,
    max_memory: int | str | None,
    length: int | None,
    devices: Sequence[torch.device],
) -> Plan:
    """The sizes for counting; for lists of ``length`` neighbours, if that is given.

    Half of the memory is for two matrices of step × block and the pairs that are looked at exactly, half for the
    queries of a part and their lists.

    Raises:
        ValueError: too little memory.
    """
    memory = parse_bytes(max_memory)
    total = query.num + gallery.num
    left = memory - 64 * total  # labels, ids and ranks
    row = 4 * gallery.dim
    pairs = 10 * 8192 * row
    size = 4096
    while size > 64 and 8 * size**2 + 4 * size * row + pairs > left // 2:
        size //= 2
        pairs = min(pairs, 10 * size * row)
    per_query = 2 * row + 64 + (0 if length is None else _BYTES_PER_NEIGHBOUR * length)
    queries = min(left // 2 // per_query, max(1024, PART // max(1, 2 * gallery.num * gallery.dim)))
    if left <= 0 or queries < 1 or 8 * size**2 > left:
        raise ValueError(
            f"max_memory: {memory:,} bytes are too little for {total:,} labels and blocks of embeddings of dimension "
            f"{gallery.dim}; about {64 * total + 4 * (8 * 64**2 + 4 * 64 * row) + 4 * per_query:,} are needed"
        )
    if length is not None:  # faiss has no matrix of ours; in memory, one block is best for it
        whole = gallery.in_memory and [device.type for device in devices] == ["cpu"]
        block = gallery.num if whole else max(64, min(65536, left // 4 // row // len(devices)))
        return Plan(int(queries), int(queries), int(block))
    return Plan(int(queries), size, size)


def parse_bytes(max_memory: int | str | None) -> int:
    """Bytes from a number, or a figure as "800M" or "4G" (powers of 1024); ``MEMORY`` for None."""
    if max_memory is None:
        return MEMORY
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", str(max_memory).strip(), re.IGNORECASE)
    if match is None or isinstance(max_memory, bool):
        raise ValueError(f"max_memory: expected bytes, or a figure as '800M' or '4G', got {max_memory!r}")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))
