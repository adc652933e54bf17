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

import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

try:
    from PIL import Image
    from torchvision.transforms import v2
except ModuleNotFoundError as error:
    raise ImportError(
        'rambo_plugins.pml.datasets needs torchvision and Pillow: pip install "rambo-plugins[retrieval]"',
        name=error.name,
    ) from error

logger = logging.getLogger("rambo_plugins")

COUNTS = {
    "sop": {"train": (59_551, 11_318), "test": (60_502, 11_316)},
    "inshop": {"train": (25_882, 3_997), "query": (14_218, 3_985), "gallery": (12_612, 3_985)},
    "cub": {"train": (5_864, 100), "test": (5_924, 100)},
}
"""Images and classes of the splits with which results are published."""
KS = {"sop": (1, 10, 100, 1000), "inshop": (1, 10, 20, 30, 50), "cub": (1, 2, 4, 8), "folder": (1, 2, 4, 8)}
"""The K for which Recall@K is published."""
SUFFIXES = (".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp")

_IN_SHOP = "In-shop Clothes Retrieval Benchmark"
_GET = {
    "sop": "extract Stanford_Online_Products.zip of Stanford Online Products (Oh Song et al., CVPR 2016) there",
    "inshop": f"put list_eval_partition.txt and the extracted img.zip of the {_IN_SHOP} of DeepFashion (Liu et al., "
    "CVPR 2016) there",
    "cub": "extract CUB_200_2011.tgz of Caltech-UCSD Birds-200-2011 (Wah et al., 2011) there",
    "folder": "they were there a moment ago",
}


def train_transform(size: int = 224, resize: int | tuple[int, int] = 256) -> v2.Compose:
    """The paper's augmentation: resize, random crop, horizontal flip; then ImageNet's mean and standard deviation.

    Args:
        size: of the crop, in pixels.
        resize: of the shorter side, or (height, width), which distorts.

    Returns:
        a function from a PIL image to (3, size, size) float32.

    >>> train_transform()(Image.new("RGB", (300, 400))).shape
    torch.Size([3, 224, 224])
    """
    return v2.Compose([v2.Resize(resize), v2.RandomCrop(size), v2.RandomHorizontalFlip(), *_to_tensor()])


def test_transform(size: int = 224, resize: int | tuple[int, int] = 256) -> v2.Compose:  # noqa: PT028
    """``train_transform`` without chance: the crop is the centre, and there is no flip."""
    return v2.Compose([v2.Resize(resize), v2.CenterCrop(size), *_to_tensor()])


test_transform.__test__ = False  # type: ignore[attr-defined]  # pytest takes it for a test where it is imported


def _to_tensor() -> list[v2.Transform]:
    return [
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225]),
        v2.ToPureTensor(),
    ]


class RetrievalImages(Dataset[tuple[Tensor, int]]):
    """N image files of C classes. ``dataset[i]`` is (image, label), decoded and transformed when it is asked for.

    Images are decoded to RGB as they are stored. The EXIF note of how the camera was held is ignored, as in
    torchvision's data sets, so that figures compare.

    What is random in the transform is a function of ``seed``, the epoch and the batch's indices alone, if it draws from
    torch's global generator, as torchvision's transforms do: the same in any worker, and in a run that was interrupted
    and resumed. The generator is left as it was. Call ``set_epoch`` before the DataLoader's iterator is made: its
    workers have copies of the data set; with ``persistent_workers=True`` these would stay at the first epoch.

    Args:
        paths: N files.
        labels: (N,) integers in 0 … C−1; kept as int64 tensor.
        super_labels: (N,) integers, likewise, or None.
        class_names, super_names: the names of the numbers, or None.
        transform: from a PIL image in RGB to a tensor; by default ``test_transform()``. It can be set later.
        seed: of the transform's randomness. It can be set later.

    Raises:
        ValueError: lengths or shapes that do not fit, no image; ``dataset[i]``: a damaged file, which is named.
        TypeError: labels that are no integers.
        FileNotFoundError: ``dataset[i]``: no such file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "red.png")
    ...     Image.new("RGB", (300, 400), "red").save(path)
    ...     image, label = RetrievalImages([path], [0], transform=test_transform(size=8, resize=8))[0]
    >>> image.shape, label
    (torch.Size([3, 8, 8]), 0)
    """

    def __init__(
        self,
        paths: Sequence[str | os.PathLike[str]],
        labels: Any,
        super_labels: Any = None,
        *,
        class_names: Sequence[str] | None = None,
        super_names: Sequence[str] | None = None,
        transform: Callable[[Image.Image], Tensor] | None = None,
        seed: int = 0,
    ) -> None:
        self.paths = [os.fspath(path) for path in paths]
        if not self.paths:
            raise ValueError("paths: expected at least one image, got none")
        self.labels = _labels("labels", labels, len(self.paths))
        self.super_labels = None if super_labels is None else _labels("super_labels", super_labels, len(self.paths))
        self.class_names = class_names
        self.super_names = super_names
        self.transform = test_transform() if transform is None else transform
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the randomness of this epoch from now on."""
        self.epoch = int(epoch)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """What a DataLoader asks for: the images and labels of a batch."""
        indices = [int(index) for index in indices]
        state = hashlib.blake2b(repr((int(self.seed), self.epoch, indices)).encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(state, "big"))  # torch.manual_seed: the GPUs' too
            return [(self.transform(_decode(self.paths[i])), int(self.labels[i])) for i in indices]


def _decode(path: str) -> Image.Image:
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except FileNotFoundError:
        raise
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:  # what Pillow says of damage
        raise ValueError(f"{path} cannot be read as an image: {error}") from error


def _labels(name: str, values: Any, num: int) -> Tensor:
    labels = torch.as_tensor(values)
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, got {labels.dtype}")
    if labels.shape != (num,):
        raise ValueError(f"{name}: expected ({num},), one for each path, got {tuple(labels.shape)}")
    return labels.long()


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
    tables = [_table(path, columns, integers=columns[:3]) for path in lists]
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
    table = _table(path, ("image_name", "item_id", "evaluation_status"), counted=True)
    names, items, status = table.values()
    strange = sorted(set(status) - {"train", "query", "gallery"})
    if strange:
        raise ValueError(f"{path}: evaluation_status: expected train, query or gallery, got {', '.join(strange[:5])}")
    parts = [name.split("/") for name in names]
    wrong = [name for name, part in zip(names, parts, strict=True) if len(part) != 5 or part[0] != "img"]
    if wrong:
        raise ValueError(f"{path}: image_name: expected img/<gender>/<category>/<item>/<file>, got {wrong[0]!r}")
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
    ids, paths = _table(lists[0], ("image_id", "path"), integers=("image_id",), header=False).values()
    columns = ("image_id", "class_id")
    ids_of_classes, classes = _table(lists[1], columns, integers=columns, header=False).values()
    by_id, classes_by_id = np.argsort(ids, kind="stable"), np.argsort(ids_of_classes, kind="stable")
    if not np.array_equal(ids[by_id], ids_of_classes[classes_by_id]) or len(np.unique(ids)) < len(ids):
        raise ValueError(f"{lists[1]}: expected each image_id of {lists[0].name} once, and no other")
    paths, classes = paths[by_id], classes[classes_by_id]
    if classes.min() < 1 or classes.max() > 200:
        raise ValueError(f"{lists[1]}: class_id: expected 1 to 200, got {classes.min()} to {classes.max()}")
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
        root: the folder. Files that are not named as images (``SUFFIXES``) and names with a leading dot are left out.
        split_seed: of the split by classes.

    Raises:
        FileNotFoundError: no image, or only one of ``train`` and ``test``.
        ValueError: images that are not in folders of one depth, or fewer than two classes to split.
    """
    root = Path(root)
    sides = [side for side in ("train", "test") if (root / side).is_dir()]
    if len(sides) == 1:
        raise FileNotFoundError(f"{root} has {sides[0]}: expected both train and test in it, or neither")
    found = [
        (side, classes, supers, os.path.join(side, path))
        for side in sides or [""]
        for classes, supers, path in _images_below(root / side)
    ]
    split, classes, supers, paths = (np.array(column) for column in zip(*found, strict=True))
    if not sides:
        names = np.unique(classes)
        if len(names) < 2:
            raise ValueError(f"{root}: expected at least two classes, some for training and some for the test, got one")
        chosen = np.random.default_rng(split_seed).permutation(names)[: (len(names) + 1) // 2]
        split = np.where(np.isin(classes, chosen), "train", "test")
    has_supers = bool(supers[0])
    train, test = _splits("folder", root, paths, split, classes, supers=supers if has_supers else None)
    return train, test


def _images_below(folder: Path) -> list[tuple[str, str, str]]:
    """(class, super class or "", path below the folder) of each image, sorted."""
    found: list[tuple[str, ...]] = []
    for path in sorted(folder.rglob("*")):
        parts = path.relative_to(folder).parts
        if path.suffix.lower() not in SUFFIXES or any(part.startswith(".") for part in parts) or not path.is_file():
            continue
        if len(parts) not in (2, 3) or (found and len(parts) != len(found[0])):
            raise ValueError(
                f"{path}: expected all images of {folder} as <class>/<image>, or all as <super class>/<class>/<image>"
            )
        found.append(parts)
    if not found:
        raise FileNotFoundError(f"{folder} has no images ({', '.join(SUFFIXES)}): expected <class>/<image>")
    return [("/".join(parts[:-1]), "/".join(parts[:-2]), os.path.join(*parts)) for parts in found]


def _find(root: str | os.PathLike[str], names: Sequence[str], dataset: str) -> Path:
    """The first of the files or folders that is there."""
    for name in names:
        if Path(root, name).exists():
            return Path(root, name)
    raise FileNotFoundError(f"no {' or '.join(names)} in {os.fspath(root)}: {_GET[dataset]}")


def _table(
    path: Path, columns: Sequence[str], *, integers: Sequence[str] = (), header: bool = True, counted: bool = False
) -> dict[str, np.ndarray]:
    """The columns of a list, separated by spaces. With ``counted``, line 1 is the number of rows."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    skip = counted + header
    if header:
        found = lines[counted].split() if len(lines) > counted else []
        if found != list(columns):
            raise ValueError(f"{path}, line {skip}: expected the header {' '.join(columns)}, got {' '.join(found)!r}")
    rows = [line.split() for line in lines[skip:]]
    for number, row in enumerate(rows, start=skip + 1):
        if len(row) != len(columns):
            raise ValueError(
                f"{path}, line {number}: expected {len(columns)} columns, {' '.join(columns)}, got {' '.join(row)!r}"
            )
    if not rows:
        raise ValueError(f"{path}: expected rows of {' '.join(columns)}, got none")
    if counted and lines[0].strip() != str(len(rows)):
        raise ValueError(f"{path}: line 1 says {lines[0].strip()!r} images, but {len(rows)} follow")
    table = {}
    for column, values in zip(columns, zip(*rows, strict=True), strict=True):
        try:
            table[column] = np.array(values, dtype=np.int64 if column in integers else str)
        except (ValueError, OverflowError) as error:
            raise ValueError(f"{path}: {column}: expected integers: {error}") from error
    return table


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
    train = split == "train"
    both = np.intersect1d(classes[train], classes[~train])
    if len(both) and name != "folder":
        raise ValueError(f"{folder}: expected other classes in the test than in training, but {both[0]} is in both")
    if len(both):
        logger.warning("%s: %d classes are in train and in test: the test is not of new classes", folder, len(both))

    labels = np.empty(len(paths), np.int64)
    names: dict[str, list[str]] = {}
    for side in (train, ~train):
        _, first, labels[side] = np.unique(classes[side], return_index=True, return_inverse=True)
        side_names = (classes if class_names is None else class_names)[side][first].astype(str).tolist()
        names |= dict.fromkeys(np.unique(split[side]).tolist(), side_names)
    super_labels = super_class_names = None
    if supers is not None:
        _, first, super_labels = np.unique(supers, return_index=True, return_inverse=True)
        super_class_names = (supers if super_names is None else super_names)[first].astype(str).tolist()

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
