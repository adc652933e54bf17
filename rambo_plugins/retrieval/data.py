"""The data sets of the command: what is trained on, what is tested on, and for which K."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from rambo_plugins.demo.data import ImageClasses, load_split
from rambo_plugins.images import check_paths
from rambo_plugins.pml.datasets import KS, RetrievalImages, load_images, test_transform, train_transform
from rambo_plugins.retrieval.errors import CannotGoOn

DRAWN = ("glyphs", "omniglot")
"""Grey images of 28 × 28 in [0, 1]; the others are colour images, normalised by ImageNet's mean and deviation."""

Images = ImageClasses | RetrievalImages
"""N images with ``labels`` (N,) int64 and ``super_labels``, likewise or None."""


@dataclass(frozen=True)
class Data:
    train: Images
    test: dict[str, Images]
    """{"both": images that search each other}, or {"query": …, "gallery": …}."""
    ks: tuple[int, ...]


def load_data(args: argparse.Namespace) -> Data:
    """The splits of ``--data``, with the transforms of ``--size`` and ``--resize``.

    Raises:
        ValueError, FileNotFoundError: no ``--root``, what is there is not the data set, no query has a relevant image,
            or the names of images cannot be listed in ``<split>_images.txt``, where that is asked for.
    """
    data = _load(args)
    _check_test(data)
    if args.save_embeddings:  # with a list of the images
        for images in data.test.values():
            check_paths(map(os.path.abspath, getattr(images, "paths", [])))
    return data


def _load(args: argparse.Namespace) -> Data:
    if args.data in DRAWN:
        train, test = load_split(args.data, root=args.root)
        return Data(train, {"both": test}, tuple(args.ks or KS["folder"]))
    if args.root is None:
        raise ValueError(f"--data {args.data} needs the folder that holds it: give --root")
    splits = load_images(args.data, args.root)
    images = splits.pop("train")
    images.transform, images.seed = train_transform(args.size, args.resize), args.seed
    for other in splits.values():
        other.transform = test_transform(args.size, args.resize)
    named = {"both" if name == "test" else name: other for name, other in splits.items()}
    return Data(images, {**named}, tuple(args.ks or KS[args.data]))


def _check_test(data: Data) -> None:
    if "both" in data.test:
        relevant = int(data.test["both"].labels.bincount().max()) > 1
        missing = "no test image has another one of its class"
    else:
        relevant = bool(torch.isin(data.test["query"].labels, data.test["gallery"].labels).any())
        missing = "no query image has one of its class in the gallery"
    if not relevant:
        raise ValueError(f"{missing}: there is nothing that Recall@K could be of")


def check_pairs(train: Images) -> None:
    """Raises ValueError where no class has two images, for losses that need two."""
    if int(train.labels.bincount().max()) < 2:
        raise ValueError(
            f"no class of the {len(train):,} images to train on has a second image, so nothing is ever relevant: "
            "expected two or more in a class, or a --loss with proxies, which learns from single ones"
        )


def describe(data: Data) -> str:
    lines = []
    for name, images in {"train": data.train, **data.test}.items():
        supers = "" if images.super_labels is None else f", {len(images.super_labels.unique())} super classes"
        name = {"both": "test"}.get(name, name)
        lines.append(f"{name}: {len(images):,} images of {len(images.labels.unique()):,} classes{supers}")
    return "\n".join(lines)


def read_batches(loader: DataLoader[Any]) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a loader.

    Raises:
        CannotGoOn: an image that cannot be read; a worker's traceback is left out.
    """
    batches = iter(loader)
    while True:
        try:
            images, labels = next(batches)
        except StopIteration:
            return
        except (ValueError, OSError) as error:
            text = str(error)
            if text.startswith("Caught "):  # in a worker; the text is its traceback
                text = text.rstrip().splitlines()[-1].partition(": ")[2]
            raise CannotGoOn(f"{text}; --check-images finds all such files before the first step") from error
        yield images, labels
