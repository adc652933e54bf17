"""The data sets of the command: what is trained on, what is tested on, and for which K."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from rambo_plugins.demo.data import ImageClasses, load_split
from rambo_plugins.pml.datasets import KS, RetrievalImages, load_images, test_transform, train_transform

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
        ValueError, FileNotFoundError: no ``--root``, or what is there is not the data set.
    """
    if args.data in ("glyphs", "omniglot"):
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


def describe(data: Data) -> str:
    lines = []
    for name, images in {"train": data.train, **data.test}.items():
        supers = "" if images.super_labels is None else f", {len(images.super_labels.unique())} super classes"
        name = {"both": "test"}.get(name, name)
        lines.append(f"{name}: {len(images):,} images of {len(images.labels.unique()):,} classes{supers}")
    return "\n".join(lines)
