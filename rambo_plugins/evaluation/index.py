"""A faiss index by its factory string, trained on a gallery and filled block by block, kept in a folder if asked."""

from __future__ import annotations

import contextlib
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from rambo_plugins.evaluation.embeddings import Embeddings
from rambo_plugins.evaluation.index_files import has_plain_lists, merge_shards, read_index, said, write_index
from rambo_plugins.evaluation.progress import bar
from rambo_plugins.evaluation.work import INDEX, WorkFolder, digest, digest_of_all

TRAINING = 65536  # rows to train on, or
PER_CENTROID = 64  # times the centroids, if that is more
CHECKPOINT = 600  # seconds of adding after which an index that is filled in memory is written to the folder
_FEWEST = 39  # rows a centroid that faiss asks for

logger = logging.getLogger("rambo_plugins")


class Index:
    """A faiss index of the gallery: made and checked at once, filled by ``build``.

    In a folder: ``trained.index``; then ``shard-{n}.index``, rows up to n of an IVF index, which ``build`` merges; or
    ``filled.index`` with the first rows, written again and again. At the end only ``filled.index`` is left, and the
    file of inverted lists that it refers to. ``close`` lets the folder go, which no other process has until then.
    """

    def __init__(
        self, factory: str, parameters: str, metric: str, gallery: Embeddings, training: int | None, seed: int,
        memory: int, folder: str | Path | None, progress: bool,
    ) -> None:  # fmt: skip
        if not isinstance(factory, str) or not isinstance(parameters, str):
            raise TypeError(f"index, parameters: expected strings, got {factory!r}, {parameters!r}")
        self.factory, self.parameters, self.metric, self.gallery = factory, parameters, metric, gallery
        self.seed, self.memory, self.progress = seed, memory, progress
        self.block = max(64, min(65536, memory // 8 // (4 * gallery.dim)))
        with self._errors("make"):
            kind = faiss.METRIC_L2 if metric == "l2" else faiss.METRIC_INNER_PRODUCT
            self.index = faiss.index_factory(gallery.dim, factory, kind)
        if isinstance(self.index, faiss.IndexIDMap | faiss.IndexIDMap2 | faiss.IndexNSG):
            raise ValueError(f"index: expected one that takes rows block by block, in their order, got {factory!r}")
        self._set_parameters()
        self.num_training = 0 if self.index.is_trained else self._training_size(training)
        self.folder: WorkFolder | None = None
        if folder is not None:
            self.folder = WorkFolder(Path(folder).resolve(), INDEX, lambda: self._described(training))
            # named for its contents, so that a copied index never reads the lists of another one
            self.lists = f"lists-{digest(np.array(str(self._problem)))}.ivf"

    def close(self) -> None:
        if self.folder is not None:
            self.folder.close()

    def build(self) -> None:
        """Trains and fills the index, or reads it."""
        if self.folder is None:
            self._train()
            self._add()
        else:
            if not self._has("filled.index"):
                if self._has("trained.index"):
                    self.index = self._read("trained.index")
                else:
                    self._train()
                    self._write("trained.index")
                if has_plain_lists(self.index):
                    self._fill_shards()
                    self._merge()
            if self._has("filled.index"):
                self.index = self._read("filled.index")
            if self.index.ntotal < self.gallery.num:
                self._add("filled.index")
                self._write("filled.index")
            done = {"trained.index", *self._shards()} & self.folder.files.names
            if done:
                self.folder.files.remove(*done)
        self._set_parameters()

    def search(self, rows: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores, best first, higher is better, and gallery rows, −1 where there are no more: (B, k) each."""
        with self._errors("search"):
            scores, found = self.index.search(rows, k)
        return -scores if self.metric == "l2" else scores, found

    def _described(self, training: int | None) -> dict[str, object]:
        """What decides what is in the folder."""
        rows = self.gallery
        self._problem: dict[str, object] = {
            "index": self.factory,
            "metric": self.metric,
            "gallery": [rows.num, rows.dim, digest_of_all(rows, self.block, self.progress)],
            "training rows": training,
            "seed": self.seed,
        }
        return self._problem

    def _set_parameters(self) -> None:
        if not self.parameters:
            return
        wrong = [
            part
            for part in self.parameters.split(",")
            if not re.fullmatch(r"\s*\w+=\d+(\.\d*)?\s*", part) or float(part.split("=")[1]) <= 0
        ]
        if wrong:
            raise ValueError(
                "parameters: expected positive numbers as 'nprobe=16' or 'nprobe=16,quantizer_efSearch=64', "
                f"got {wrong[0]!r}"
            )
        space: Any = faiss.ParameterSpace()
        try:
            space.set_index_parameters(self.index, self.parameters)
        except RuntimeError as error:
            raise ValueError(
                f"parameters: {self.factory!r} does not take {self.parameters!r}: {said(error)}"
            ) from error

    def _training_size(self, asked: int | None) -> int:
        ivf = faiss.try_extract_index_ivf(self.index)
        centroids = 0 if ivf is None else ivf.nlist
        if ivf is not None and isinstance(faiss.downcast_index(ivf.quantizer), faiss.MultiIndexQuantizer):
            centroids = 0  # products of few
        wanted = min(asked or max(TRAINING, PER_CENTROID * centroids), self.gallery.num)
        fits = self.memory // (2 * 4 * self.gallery.dim)  # faiss may copy them
        if wanted < centroids:
            raise ValueError(
                f"index: {self.factory!r} has {centroids:,} centroids, which need as many rows to train on, better "
                f"{PER_CENTROID} times as many, got {wanted:,} of a gallery of {self.gallery.num:,}"
            )
        if fits < centroids:
            raise ValueError(
                f"max_memory: {self.memory:,} bytes hold {fits:,} rows to train on, but {self.factory!r} needs "
                f"{centroids:,}"
            )
        if fits < wanted:
            logger.warning(
                "training %s on %d rows, as max_memory allows, instead of %d; faiss asks for %d a centroid",
                self.factory, fits, wanted, _FEWEST,
            )  # fmt: skip
        return min(wanted, fits)

    def _train(self) -> None:
        if self.index.is_trained:
            return
        rng = np.random.default_rng(self.seed)
        rows = self.gallery.take(np.sort(rng.choice(self.gallery.num, self.num_training, replace=False)))
        with bar(self.progress, "train", len(rows), "row") as report, self._errors("train"):
            self.index.train(rows)
            report(len(rows))

    def _add(self, filled: str | None = None) -> None:
        """The rows that the index lacks; now and then it is written to ``filled``."""
        written = time.monotonic()
        for _, rows in self._missing(self.index.ntotal):
            with self._errors("add to"):
                self.index.add(rows)
            if filled is not None and time.monotonic() - written > CHECKPOINT:
                self._write(filled)
                written = time.monotonic()

    def _fill_shards(self) -> None:
        """The rows that the shards lack, in more of them, each of a quarter of the memory: lists grow by doubling."""
        done = max((int(name.split("-")[1].split(".")[0]) for name in self._shards()), default=0)
        most = self.memory // 4 // (faiss.extract_index_ivf(self.index).code_size + 8)
        for start, rows in self._missing(done):
            stop = start + len(rows)
            with self._errors("add to"):
                self.index.add_with_ids(rows, np.arange(start, stop))
            if self.index.ntotal >= most or stop == self.gallery.num:
                self._write(f"shard-{stop:012d}.index")
                self.index.reset()

    def _merge(self) -> None:
        """The index with the lists of all shards, which stay on disk."""
        assert self.folder is not None
        shards = [self.folder.path / name for name in self._shards()]
        merge_shards(self.index, shards, self.folder.files.own(self.lists))
        if self.index.ntotal != self.gallery.num:
            raise ValueError(
                f"{self.folder.path}: its shards have {self.index.ntotal:,} of {self.gallery.num:,} rows; remove it"
            )
        self._write("filled.index")

    def _has(self, name: str) -> bool:
        assert self.folder is not None
        return self.folder.files.own(name).exists()

    def _shards(self) -> list[str]:
        """Those of our list that are there, in order."""
        assert self.folder is not None
        names = sorted(name for name in self.folder.files.names if name.startswith("shard-"))
        return [name for name in names if self._has(name)]

    def _read(self, name: str) -> Any:
        assert self.folder is not None
        path = self.folder.path / name
        index = read_index(path)
        if index.d != self.gallery.dim or index.ntotal > self.gallery.num:
            raise ValueError(
                f"{path}: has {index.ntotal:,} rows of {index.d} dimensions, of a gallery of {self.gallery.num:,} of "
                f"{self.gallery.dim}; remove the folder"
            )
        return index

    def _write(self, name: str) -> None:
        assert self.folder is not None
        with self.folder.files.writing(name) as path:
            write_index(self.index, path)

    def _missing(self, done: int) -> Iterator[tuple[int, np.ndarray]]:
        """The gallery but for the first ``done`` rows, in blocks."""
        if done == self.gallery.num:
            return
        with bar(self.progress, "add", self.gallery.num, "row") as report:
            for start, rows in self.gallery.blocks(self.block):
                if start + len(rows) > done:
                    skipped = max(0, done - start)
                    yield start + skipped, rows[skipped:]
                report(len(rows))

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise ValueError(f"index: faiss cannot {doing} {self.factory!r}: {said(error)}") from error
