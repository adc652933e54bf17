"""Batches of hard negatives: images of two super classes, several of each class."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import BatchSampler

from rambo_plugins.core.distributed import num_processes

logger = logging.getLogger("rambo_plugins")


class SuperLabelBatchSampler(BatchSampler):
    """Batches that are one half of one super class and one half of another, in chunks of ``images_per_class`` images.

    The procedure of FastAP (Cakir et al., CVPR 2019), which RaMBO's retrieval results use. In each epoch:

    1. The images of each class are shuffled and cut into chunks of m = ``images_per_class``; the last chunk is filled
       up with the first images of the same shuffle. A class with fewer than m images is one shorter chunk: an image is
       never repeated within a chunk, where it would be an easy positive of itself.
    2. The chunks of each super class are shuffled and put in a row. (A class of two super classes has chunks in both.)
    3. The pairs of super classes are shuffled. Each gives ``batches_per_pair`` batches in succession; a half is the
       next ``batch_size / 2`` images of the super class's row, from where the last half ended, and from the start again
       after its end. All rows start anew with the epoch.

    So the halves hold whole chunks, unless the super class has classes with fewer than m images. An image is twice in a
    batch where two chunks of one class meet, or where a super class has fewer than ``batch_size / 2`` images.

    An image alone in its class has no other to be near to, and batches of such images teach a loss nothing, unless it
    has proxies. How many there are is logged as a warning.

    Without super labels, or with one only, batches are the next ``batch_size`` images of the one row, and an epoch is
    once through it; the last batch is filled up from the start.

    Each iteration draws one epoch, and the next iteration the next, unless ``set_epoch`` says which. An epoch's batches
    depend on ``seed`` and the epoch alone: no other random numbers are drawn, and all processes agree on them.

    As a ``BatchSampler`` it is the ``batch_sampler=`` of a DataLoader and the ``sampler=`` of
    pytorch-metric-learning's trainers, which then leave their own ``batch_size`` unused.

    Args:
        labels: (N,) integers, the classes; a tensor, array or list.
        super_labels: (N,) integers, the super classes; None for data without.
        images_per_class: m ≥ 2. The paper: 4 for SOP and CUB, 8 for In-shop.
        batch_size: images in a batch, of all processes together; a multiple of processes · m, times 2 with super
            classes.
        batches_per_pair: b ≥ 1. FastAP: 10 for SOP, whose 12 super classes make 66 pairs and 660 batches; 4 for
            In-shop, whose 23 make 253 pairs and 1,012 batches. Unused without super classes.
        seed: ≥ 0.
        num_replicas, rank: processes, and which one this is; by default those of ``torch.distributed``, if it is
            initialised. Each process gets its part of each half: together they see the batches of one process.

    Raises:
        TypeError: labels that are no integers.
        ValueError: other shapes, or an argument out of range.

    >>> sampler = SuperLabelBatchSampler([0, 0, 1, 1, 2, 2], [0, 0, 0, 0, 1, 1], images_per_class=2, batch_size=4,
    ...                                  batches_per_pair=2)
    >>> first, second = sampler
    >>> first, second  # the images 4 and 5 are all of the super class 1
    ([0, 1, 5, 4], [2, 3, 5, 4])
    >>> sampler.set_epoch(0, start_batch=1)
    >>> list(sampler) == [second]
    True
    """

    def __init__(
        self,
        labels: Tensor | np.ndarray | Sequence[int],
        super_labels: Tensor | np.ndarray | Sequence[int] | None = None,
        *,
        images_per_class: int = 4,
        batch_size: int = 128,
        batches_per_pair: int = 10,
        seed: int = 0,
        num_replicas: int | None = None,
        rank: int | None = None,
    ) -> None:
        classes = _integers("labels", labels)
        supers = np.zeros_like(classes) if super_labels is None else _integers("super_labels", super_labels)
        if len(classes) == 0 or len(supers) != len(classes):
            raise ValueError(f"expected a super label for each of N ≥ 1 labels, got {len(supers)} for {len(classes)}")
        if (num_replicas is None) != (rank is None):
            raise ValueError(f"expected num_replicas and rank together, got {num_replicas} and {rank}")
        self.num_replicas = num_processes() if num_replicas is None else _at_least(1, "num_replicas", num_replicas)
        self.rank = (dist.get_rank() if self.num_replicas > 1 else 0) if rank is None else _at_least(0, "rank", rank)
        if self.rank >= self.num_replicas:
            raise ValueError(f"rank: expected less than the {self.num_replicas} processes, got {rank}")
        self.images_per_class = _at_least(2, "images_per_class", images_per_class)
        self.batch_size = _at_least(1, "batch_size", batch_size)
        self.batches_per_pair = _at_least(1, "batches_per_pair", batches_per_pair)
        self.seed = _at_least(0, "seed", seed)
        self.drop_last = False  # an attribute of every BatchSampler

        # For each super class the images of each of its classes, all in ascending order.
        order = np.lexsort((classes, supers))
        _, first = np.unique(np.stack([supers, classes])[:, order], axis=1, return_index=True)
        by_class = np.split(order, first[1:])
        self._images = [list(group) for _, group in itertools.groupby(by_class, key=lambda images: supers[images[0]])]
        self._pairs: list[tuple[int, ...]] = list(itertools.combinations(range(len(self._images)), 2)) or [(0,)]
        self._check_positives(classes)
        parts = len(self._pairs[0])
        unit = parts * self.num_replicas * self.images_per_class
        if self.batch_size % unit:
            raise ValueError(
                f"batch_size: expected a multiple of {unit} ({parts} super class(es) in a batch × {self.num_replicas} "
                f"process(es) × images_per_class={images_per_class}), got {batch_size}"
            )
        if parts == 1:
            chunks = (_chunk_sizes(len(images), self.images_per_class) for images in self._images[0])
            self._batches_per_pair = -(-sum(map(sum, chunks)) // self.batch_size)
        else:
            self._batches_per_pair = self.batches_per_pair
        self._next = (0, 0)

    def set_epoch(self, epoch: int, start_batch: int = 0) -> None:
        """Make the next iteration draw this epoch, from this batch on: the rest of an epoch that was interrupted.

        Count the batches that were trained on where the training is: the workers of a DataLoader fetch ahead.

        Raises:
            ValueError: a negative epoch, or ``start_batch`` beyond the batches of an epoch.
        """
        epoch, start_batch = _at_least(0, "epoch", epoch), _at_least(0, "start_batch", start_batch)
        if start_batch > len(self):
            raise ValueError(f"start_batch: expected at most the {len(self)} batches of an epoch, got {start_batch}")
        self._next = (epoch, start_batch)

    def _check_positives(self, classes: np.ndarray) -> None:
        """Says how many images have no other of their class, and which batches teach a loss of pairs nothing."""
        names, counts = np.unique(classes, return_counts=True)
        if counts.max() == 1:
            logger.warning("each of %d classes has a single image: a loss without proxies learns nothing", len(names))
            return
        if counts.min() == 1:
            logger.warning(
                "%d of %d classes have a single image: it never has another of its class in a batch",
                sum(counts == 1),
                len(names),
            )
        several = [any(len(images) > 1 for images in groups) for groups in self._images]
        single = [{int(classes[images[0]]) for images in groups if len(images) == 1} for groups in self._images]
        idle = sum(not any(several[s] for s in pair) and not set.intersection(*(single[s] for s in pair))
                   for pair in self._pairs)  # fmt: skip
        if idle:
            logger.warning(
                "%d of %d pairs of super classes have no class with two images: only proxies learn from their batches",
                idle, len(self._pairs),
            )  # fmt: skip

    def __len__(self) -> int:
        """Batches of a whole epoch, wherever the next iteration starts."""
        return len(self._pairs) * self._batches_per_pair

    def __iter__(self) -> Iterator[list[int]]:
        # Reached with the first batch, not with iter(): DataLoaders with workers make an iterator that they never use.
        epoch, start_batch = self._next
        self._next = (epoch + 1, 0)
        for batch in itertools.islice(self._epoch(epoch), start_batch, None):
            yield batch.tolist()

    def _epoch(self, epoch: int) -> Iterator[np.ndarray]:
        generator = np.random.default_rng([self.seed, epoch])
        rows = [self._row(classes, generator) for classes in self._images]
        pointers = [0] * len(rows)
        size = self.batch_size // len(self._pairs[0])
        own = slice(self.rank * size // self.num_replicas, (self.rank + 1) * size // self.num_replicas)
        for pair in generator.permutation(len(self._pairs)):
            for _ in range(self._batches_per_pair):
                parts = []
                for s in self._pairs[pair]:
                    at = (pointers[s] + np.arange(size)) % len(rows[s])
                    pointers[s] = (pointers[s] + size) % len(rows[s])
                    parts.append(rows[s][at][own])
                yield np.concatenate(parts)

    def _row(self, classes: list[np.ndarray], generator: np.random.Generator) -> np.ndarray:
        """The images of a super class in the order of its shuffled chunks."""
        chunks = []
        for images in classes:
            sizes = _chunk_sizes(len(images), self.images_per_class)
            shuffled = np.resize(generator.permutation(images), sum(sizes))
            chunks += np.split(shuffled, np.cumsum(sizes)[:-1])
        return np.concatenate([chunks[i] for i in generator.permutation(len(chunks))])


def _chunk_sizes(num: int, images_per_class: int) -> list[int]:
    return [min(num, images_per_class)] * -(-num // images_per_class)


def _integers(name: str, values: Any) -> np.ndarray:
    array = values.cpu().numpy() if torch.is_tensor(values) else np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name}: expected the shape (N,), got {array.shape}")
    if len(array) and array.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integers, got {array.dtype}")
    return array.astype(np.int64)


def _at_least(least: int, name: str, value: int) -> int:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}: expected an integer of at least {least}, got {value!r}")
    return int(value)
