"""Embeddings of the test images, on one process or several: Recall@K, MAP@R, and files of them."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.data import DataLoader

from rambo_plugins.core.distributed import gather_rows, num_processes
from rambo_plugins.evaluation import recall_at_k
from rambo_plugins.evaluation.distributed import RecallMetric
from rambo_plugins.folders import OwnFolder
from rambo_plugins.images import write_paths
from rambo_plugins.pml.datasets import RetrievalImages
from rambo_plugins.retrieval.data import Data, Images, read_batches
from rambo_plugins.retrieval.errors import CannotGoOn
from rambo_plugins.retrieval.models import EmbeddingNet

AMP = {"none": None, "bf16": torch.bfloat16, "fp16": torch.float16}
BATCH = 128


def embed(net: EmbeddingNet, images: Images, args: argparse.Namespace) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Unit embeddings (B, D), labels (B,) and indices (B,), batch by batch, of every processes-th image."""
    rank = dist.get_rank() if num_processes() > 1 else 0
    own = range(rank, len(images), num_processes())
    dtype = AMP[args.amp]
    parameter = next(net.parameters())
    was_training = net.training
    net.eval()
    start = 0
    loader = DataLoader(images, BATCH, sampler=own, num_workers=args.workers)
    for batch, labels in read_batches(loader):
        with torch.no_grad(), torch.autocast(parameter.device.type, dtype, enabled=dtype is not None):
            embeddings = net(batch.to(parameter.device, parameter.dtype))
        if not embeddings.isfinite().all():
            raise CannotGoOn("the network's embeddings of test images are not all finite numbers")
        indices = torch.tensor(own[start : start + len(batch)])
        start += len(batch)
        yield normalize(embeddings.float()), labels, indices
    net.train(was_training)


def embed_all(net: EmbeddingNet, images: Images, args: argparse.Namespace) -> Tensor:
    """Unit embeddings (N, D) of all images on every process, on the CPU."""
    parts = [(embeddings, indices.to(embeddings.device)) for embeddings, _, indices in embed(net, images, args)]
    size = (0, args.embedding_size)
    device = next(net.parameters()).device
    own = torch.cat([torch.empty(size, device=device), *(embeddings for embeddings, _ in parts)])
    at = torch.cat([torch.empty(0, dtype=torch.int64, device=device), *(indices for _, indices in parts)])
    embeddings, at = gather_rows(own, at)
    return embeddings[at.argsort()].cpu()


def evaluate(
    net: EmbeddingNet, data: Data, args: argparse.Namespace, group: dist.ProcessGroup | None = None
) -> dict[str, float | None]:
    """``recall_at_<K>`` for each K, and ``mean_average_precision_at_r`` with ``--map-at-r``; the same on all processes.

    Args:
        group: with several processes, one of gloo.
    """
    if args.map_at_r:
        figures = [_with_map_at_r(net, data, args)]
        if num_processes() > 1:
            dist.broadcast_object_list(figures, src=0, group=group)
        return figures[0]
    metric = RecallMetric(data.ks, normalize=True, group=group, device=next(net.parameters()).device)
    first = 0
    for split, images in data.test.items():
        for embeddings, labels, indices in embed(net, images, args):
            metric.update(embeddings, labels, indices + first, split=split)
        first += len(images)
    return _figures(metric.compute().recall)


def _with_map_at_r(net: EmbeddingNet, data: Data, args: argparse.Namespace) -> dict[str, float | None]:
    rows = {split: embed_all(net, images, args) for split, images in data.test.items()}
    if num_processes() > 1 and dist.get_rank() > 0:
        return {}
    query = "query" if "query" in rows else "both"
    gallery, gallery_labels = (rows["gallery"], data.test["gallery"].labels) if "gallery" in rows else (None, None)
    result = recall_at_k(
        rows[query], data.test[query].labels, gallery, gallery_labels, data.ks, map_at_r=True, device=args.device
    )
    return _figures(result.recall) | {"mean_average_precision_at_r": _number(result.map_at_r)}


def _figures(recall: dict[int, float]) -> dict[str, float | None]:
    return {f"recall_at_{k}": _number(value) for k, value in recall.items()}


def _number(value: float | None) -> float | None:
    return None if value is None or math.isnan(value) else value  # no query with a relevant image


def shown(figures: dict[str, Any]) -> str:
    """R@K and MAP@R in percent."""
    names = {"recall_at_": "R@", "mean_average_precision_at_r": "MAP@R"}
    texts = []
    for name, value in figures.items():
        for long, short in names.items():
            if name.startswith(long) and value is not None:
                texts.append(f"{name.replace(long, short)} {100 * value:.2f}")
    return "  ".join(texts) + " (%)"


def embedding_files(split: str) -> list[str]:
    stem = "test" if split == "both" else split
    return [f"{stem}_embeddings.npy", f"{stem}_labels.npy", f"{stem}_images.txt"]


def save_embeddings(net: EmbeddingNet, data: Data, args: argparse.Namespace, folder: OwnFolder | None) -> list[Path]:
    """Writes ``<split>_embeddings.npy``, ``<split>_labels.npy`` and, of image files, ``<split>_images.txt``.

    Files from before are deleted first: an interruption leaves none that belong to others.

    Args:
        folder: None on all processes but the first.
    """
    written: list[Path] = []
    for split, images in data.test.items():
        embeddings = embed_all(net, images, args)
        if folder is None:
            continue
        names = embedding_files(split)
        if old := folder.names & set(names):
            folder.remove(*sorted(old))
        for name, array in zip(names, (embeddings, images.labels), strict=False):
            with folder.writing(name) as path, path.open("wb") as file:
                np.save(file, array.numpy())
        if isinstance(images, RetrievalImages):
            with folder.writing(names[2]) as path:
                write_paths(path, map(os.path.abspath, images.paths))
        written += [folder.path / name for name in names if (folder.path / name).exists()]
    return written
