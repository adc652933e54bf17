"""Images for retrieval: Stanford Online Products, In-shop and CUB-200-2011 in their own files, and your own folders.

| name     | read below ``root``, which may also be the folder above the data set's | splits                     |
|----------|------------------------------------------------------------------------|----------------------------|
| `sop`    | ``Ebay_train.txt``, ``Ebay_test.txt``, images as they say              | train, test                |
| `inshop` | ``list_eval_partition.txt`` or ``Eval/…``; ``img`` or ``Img/img``      | train, query, gallery      |
| `cub`    | ``images.txt``, ``image_class_labels.txt``, ``images``                 | train, test (classes 101 …) |
| `folder` | ``train/<class>/*`` and ``test/<class>/*``, or only ``<class>/*``      | train, test                |

The test images of `sop`, `cub` and `folder` search each other, each without itself; the query images of `inshop` search
the gallery. Labels count from 0 in each of the two; those of query and gallery mean the same.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rambo_plugins.images import check_paths
from rambo_plugins.pml.class_folders import SUFFIXES, images_below, say_left_out
from rambo_plugins.pml.lists import read_table
from rambo_plugins.pml.retrieval_images import RetrievalImages, check_images, test_transform, train_transform

__all__ = [
    "COUNTS", "KS", "SUFFIXES", "RetrievalImages", "check_images", "load_images", "read_cub", "read_folders",
    "read_inshop", "read_sop", "test_transform", "train_transform",
]  # fmt: skip

logger = logging.getLogger("rambo_plugins")

COUNTS = {
    "sop": {"train": (59_551, 11_318), "test": (60_502, 11_316)},
    "inshop": {"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)},
    "cub": {"train": (5_864, 100), "test": (5_924, 100)},
}
"""Images and classes of the splits with which results are published."""
KS = {"sop": (1, 10, 100, 1000), "inshop": (1, 10, 20, 30, 50), "cub": (1, 2, 4, 8), "folder": (1, 2, 4, 8)}
"""The K for which Recall@K is published."""

_IN_SHOP = "In-shop Clothes Retrieval Benchmark"
_GET = {
    "sop": "extract Stanford_Online_Products.zip of Stanford Online Products (Oh Song et al., CVPR 2016) there",
    "inshop": f"put list_eval_partition.txt and the extracted img.zip of the {_IN_SHOP} of DeepFashion (Liu et al., "
    "CVPR 2016) there",
    "cub": "extract CUB_200_2011.tgz of Caltech-UCSD Birds-200-2011 (Wah et al., 2011) there",
    "folder": "they were there a moment ago",
}


def load_images(name: str, root: str | os.PathLike[str]) -> dict[str, RetrievalImages]:
    """The splits of a data set by their names: "train" and "test", or "train", "query" and "gallery".

    Args:
        name: "sop", "inshop", "cub" or "folder".
        root: see the table at the top of ``rambo_plugins/pml/datasets.py``.

    Raises:
        ValueError: another name; and what the data set's reader raises.
    """
    readers: dict[str, Callable[..., tuple[RetrievalImages, ...]]] = {
        "sop": read_sop, "inshop": read_inshop, "cub": read_cub, "folder": read_folders
    }  # fmt: skip
    if name not in readers:
        raise ValueError(f"unknown data set {name!r}: expected one of {', '.join(readers)}")
    splits = ("train", "query", "gallery") if name == "inshop" else ("train", "test")
    return dict(zip(splits, readers[name](root), strict=True))


def read_sop(root: str | os.PathLike[str]) -> tuple[RetrievalImages, RetrievalImages]:
    """Stanford Online Products: train and test, with 12 super classes.

    Raises:
        FileNotFoundError: a list or images are missing; it says where they were looked for and how to get them.
        ValueError: a list that is not what it should be, or a class in both splits.
    """
    columns = ("image_id", "class_id", "super_class_id", "path")
    folder = _find(root, ["Ebay_train.txt", "Stanford_Online_Products/Ebay_train.txt"], "sop").parent
    lists = [folder / "Ebay_train.txt", _find(folder, ["Ebay_test.txt"], "sop")]
    tables = [read_table(path, columns, integers=columns[:3]) for path in lists]
    _, classes, supers, paths = (np.concatenate([table[column] for table in tables]) for column in columns)
    train, test = _splits(
        "sop",
        folder,
        paths,
        split=np.repeat(["train", "test"], [len(table["path"]) for table in tables]),
        classes=classes,
        supers=supers,
        super_names=np.array([path.split("/")[0] for path in paths]),
    )
    return train, test


def read_inshop(root: str | os.PathLike[str]) -> tuple[RetrievalImages, RetrievalImages, RetrievalImages]:
    """In-shop: train, query and gallery, with the 23 super classes of the images' paths, such as ``WOMEN/Dresses``.

    Raises:
        FileNotFoundError, ValueError: as ``read_sop``; also a number of images that is not the one in line 1.
    """
    tops = ("", f"{_IN_SHOP}/")
    path = _find(root, [f"{top}{sub}list_eval_partition.txt" for top in tops for sub in ("", "Eval/")], "inshop")
    images = _find(root, [f"{top}{sub}img" for top in tops for sub in ("", "Img/")], "inshop")
    table = read_table(path, ("image_name", "item_id", "evaluation_status"), counted=True)
    names, items, status = table.values()
    parts = [name.split("/") for name in names]
    for line, (side, part) in enumerate(zip(status, parts, strict=True), start=3):
        if side not in ("train", "query", "gallery"):
            raise ValueError(f"{path}, line {line}: evaluation_status: expected train, query or gallery, got {side}")
        if len(part) != 5 or part[0] != "img":
            raise ValueError(
                f"{path}, line {line}: image_name: expected img/<gender>/<category>/<item>/<file>, "
                f"got {'/'.join(part)!r}"
            )
    train, query, gallery = _splits(
        "inshop",
        images.parent,
        names,
        split=status,
        classes=items,
        supers=np.array(["/".join(part[1:3]) for part in parts]),
        order=("train", "query", "gallery"),
    )
    return train, query, gallery


def read_cub(root: str | os.PathLike[str]) -> tuple[RetrievalImages, RetrievalImages]:
    """CUB-200-2011 for retrieval: the classes 1 to 100 for training, 101 to 200 for the test; no super classes.

    Raises:
        FileNotFoundError, ValueError: as ``read_sop``.
    """
    folder = _find(root, ["images.txt", "CUB_200_2011/images.txt"], "cub").parent
    lists = folder / "images.txt", _find(folder, ["image_class_labels.txt"], "cub")
    ids, paths = read_table(lists[0], ("image_id", "path"), integers=("image_id",), header=False).values()
    columns = ("image_id", "class_id")
    ids_of_classes, classes = read_table(lists[1], columns, integers=columns, header=False).values()
    strange = np.flatnonzero((classes < 1) | (classes > 200))
    if len(strange):
        raise ValueError(f"{lists[1]}, line {strange[0] + 1}: class_id: expected 1 to 200, got {classes[strange[0]]}")
    by_id, classes_by_id = np.argsort(ids, kind="stable"), np.argsort(ids_of_classes, kind="stable")
    if not np.array_equal(ids[by_id], ids_of_classes[classes_by_id]) or len(np.unique(ids)) < len(ids):
        raise ValueError(f"{lists[1]}: expected each image_id of {lists[0].name} once, and no other")
    paths, classes = paths[by_id], classes[classes_by_id]
    train, test = _splits(
        "cub",
        folder / "images",
        paths,
        split=np.where(classes <= 100, "train", "test"),
        classes=classes,
        class_names=np.array([path.split("/")[0] for path in paths]),
    )
    return train, test


def read_folders(root: str | os.PathLike[str], *, split_seed: int = 0) -> tuple[RetrievalImages, RetrievalImages]:
    """Your own images, a folder for each class: train and test.

    With the folders ``root/train`` and ``root/test`` these are the splits. Otherwise the classes are split: the first
    half of them (one more, if their number is odd), shuffled by the seed, is for training, and the others, which are
    then new, for the test. ``<class>/*`` may also be ``<super class>/<class>/*`` throughout, which gives super classes.

    Args:
        root: the folder. Links are followed. Files that are not named as images (``SUFFIXES``), names with a leading
            dot, folders without images, and what is beside ``train`` and ``test`` are left out, which is logged.
        split_seed: of the split by classes.

    Raises:
        FileNotFoundError: no image, only one of ``train`` and ``test``, or links to what is not there.
        ValueError: images that are not in folders of one depth, fewer than two classes to split, a folder that is
            there twice by a link, or a name that cannot stand in a list of images (``rambo_plugins.images``).
    """
    root = Path(root)
    if not root.is_dir():
        raise FileNotFoundError(f"{root}: expected a folder with <class>/<image> in it, but it is none")
    sides = [side for side in ("train", "test") if (root / side).is_dir()]
    names = sorted(os.listdir(root))
    if len(sides) == 1:
        raise FileNotFoundError(f"{root} has {sides[0]}: expected both train and test in it, or neither")
    if not sides and {"train", "test"} <= {name.lower() for name in names}:
        raise ValueError(f"{root}: expected train and test in lower case, got {', '.join(names)}")
    beside = [name for name in names if sides and name not in sides]
    say_left_out(root, {"beside train and test": beside} if beside else {})
    found = [
        (side, classes, supers, os.path.join(side, path))
        for side in sides or [""]
        for classes, supers, path in images_below(root / side)
    ]
    split, classes, supers, paths = (np.array(column) for column in zip(*found, strict=True))
    if not sides:
        class_names = np.unique(classes)
        if len(class_names) < 2:
            raise ValueError(f"{root}: expected at least two classes, some for training and some for the test, got one")
        chosen = np.random.default_rng(split_seed).permutation(class_names)[: (len(class_names) + 1) // 2]
        split = np.where(np.isin(classes, chosen), "train", "test")
    if len(set(supers != "")) > 1:
        raise ValueError(f"{root}: expected super classes in both train and test, or in neither")
    train, test = _splits("folder", root, paths, split, classes, supers=supers if supers[0] else None)
    return train, test


def _find(root: str | os.PathLike[str], names: Sequence[str], dataset: str) -> Path:
    """The first of the files or folders that is there."""
    for name in names:
        if Path(root, name).exists():
            return Path(root, name)
    raise FileNotFoundError(f"no {' or '.join(names)} in {os.fspath(root)}: {_GET[dataset]}")


def _splits(
    name: str,
    folder: Path,
    paths: np.ndarray,
    split: np.ndarray,
    classes: np.ndarray,
    *,
    class_names: np.ndarray | None = None,
    supers: np.ndarray | None = None,
    super_names: np.ndarray | None = None,
    order: Sequence[str] = ("train", "test"),
) -> list[RetrievalImages]:
    """The splits in order, from columns (N,) of all images; training and other classes are numbered apart."""
    files = [os.path.join(folder, path) for path in paths]
    missing = [path for path, file in zip(paths, files, strict=True) if not os.path.isfile(file)]
    if missing:
        raise FileNotFoundError(
            f"{len(missing):,} of {len(paths):,} images are not in {folder}, the first are "
            f"{', '.join(missing[:5])}: {_GET[name]}"
        )
    check_paths(files)
    train = split == "train"
    both = np.intersect1d(classes[train], classes[~train])
    if len(both) and name != "folder":
        raise ValueError(f"{folder}: expected other classes in the test than in training, but {both[0]} is in both")
    unique, counts = np.unique(paths, return_counts=True)
    if len(unique) < len(paths):
        raise ValueError(f"{folder}: expected each image in one row, got {unique[counts > 1][0]} in several")
    if len(both):
        logger.warning("%s: %d classes are in train and in test: the test is not of new classes", folder, len(both))

    labels = np.empty(len(paths), np.int64)
    names: dict[str, list[str]] = {}
    for side in (train, ~train):
        own_names = (classes if class_names is None else class_names)[side]
        labels[side], side_names = _numbered(folder, classes[side], own_names)
        names |= dict.fromkeys(np.unique(split[side]).tolist(), side_names)
    super_labels = super_class_names = None
    if supers is not None:
        super_labels, super_class_names = _numbered(folder, supers, supers if super_names is None else super_names)

    images = []
    for which in order:
        rows = np.flatnonzero(split == which)
        if not len(rows):
            raise ValueError(f"{folder}: expected images of the split {which}, got none")
        images.append(
            RetrievalImages(
                [files[row] for row in rows],
                labels[rows],
                None if super_labels is None else super_labels[rows],
                class_names=names[which],
                super_names=super_class_names,
                transform=train_transform() if which == "train" else test_transform(),
            )
        )
        counts = len(rows), len(np.unique(labels[rows]))
        expected = COUNTS.get(name, {}).get(which, counts)
        if counts != expected:
            logger.warning(
                "%s: %s of %s has %d images of %d classes, but those with which results are published %d of %d",
                folder, which, name, *counts, *expected,
            )  # fmt: skip
    return images


def _numbered(folder: Path, numbers: np.ndarray, names: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Classes (N,) numbered from 0, and the name of each."""
    _, first, labels = np.unique(numbers, return_index=True, return_inverse=True)
    wrong = np.flatnonzero(names != names[first][labels])
    if len(wrong):
        number, name, other = numbers[wrong[0]], names[first][labels[wrong[0]]], names[wrong[0]]
        raise ValueError(f"{folder}: expected the images of {number} in one folder, got them in {name} and {other}")
    return labels, names[first].astype(str).tolist()
