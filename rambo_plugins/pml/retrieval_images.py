"""Images in files, with labels, as a data set for training and testing; and the paper's transforms."""

from __future__ import annotations

import hashlib
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

try:
    from PIL import Image
    from torchvision.transforms import v2

    from rambo_plugins.images import read_image
except ModuleNotFoundError as error:
    raise ImportError(
        'rambo_plugins.pml.datasets needs torchvision and Pillow: pip install "rambo-plugins[retrieval]"',
        name=error.name,
    ) from error


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

    Images are decoded to RGB by the rules of ``rambo_plugins/images.py``, and as they are stored: the EXIF note of how
    the camera was held is ignored, as in torchvision's data sets, so that figures compare.

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
        ValueError: lengths or shapes that do not fit, labels out of range, no image; ``dataset[i]``: a file that is
            damaged or that RGB cannot show, which is named.
        TypeError: labels that are no integers, paths that are no strings.
        FileNotFoundError: ``dataset[i]``: no such file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = f"{folder}/red.png"
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
        if not all(isinstance(path, str) for path in self.paths):
            raise TypeError("paths: expected str or pathlib.Path, got bytes")
        num = len(self.paths)
        self.labels = _labels("labels", labels, num, class_names)
        self.super_labels = None if super_labels is None else _labels("super_labels", super_labels, num, super_names)
        self.class_names = class_names
        self.super_names = super_names
        self.transform = test_transform() if transform is None else transform
        self.seed = seed
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Draw the randomness of this epoch from now on."""
        self.epoch = operator.index(epoch)

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[tuple[Tensor, int]]:
        """What a DataLoader asks for: the images and labels of a batch."""
        indices = [int(index) for index in indices]
        state = hashlib.blake2b(repr((operator.index(self.seed), self.epoch, indices)).encode(), digest_size=8).digest()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(int.from_bytes(state, "big"))  # torch.manual_seed: the GPUs' too
            return [(self.transform(read_image(self.paths[i])), int(self.labels[i])) for i in indices]


def check_images(images: RetrievalImages, *, workers: int = 0, progress: bool = False) -> None:
    """Decodes every image once, so that damage shows before the first step and not in the third epoch.

    Args:
        workers: processes that decode.
        progress: show a bar, which needs tqdm.

    Raises:
        ValueError: images that are missing, damaged, or that RGB cannot show: how many, and the first five.
    """
    # Its own generator, for a DataLoader draws a seed from the global one.
    loader = DataLoader(_Faults(images.paths), 64, num_workers=workers, collate_fn=list, generator=torch.Generator())
    batches: Iterable[list[str]] = loader
    if progress:
        from tqdm import tqdm

        batches = tqdm(loader, "checking images", unit="batch", leave=False, disable=False)
    faults = [fault for batch in batches for fault in batch if fault]
    if faults:
        first = "; ".join(faults[:5]) + ("; …" if len(faults) > 5 else "")
        raise ValueError(f"{len(faults):,} of {len(images):,} images cannot be used: {first}")


class _Faults(Dataset[str]):
    """What is wrong with each file, or ""."""

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> str:
        try:
            read_image(self.paths[index])
        except (ValueError, OSError) as error:
            return str(error)
        return ""


def _labels(name: str, values: Any, num: int, names: Sequence[str] | None) -> Tensor:
    try:
        labels = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise TypeError(f"{name}: expected integers: {error}") from error
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise TypeError(f"{name}: expected integers, got {labels.dtype}")
    if labels.shape != (num,):
        raise ValueError(f"{name}: expected ({num},), one for each path, got {tuple(labels.shape)}")
    labels = labels.long()  # those of uint64 that do not fit become negative
    most = torch.iinfo(torch.int64).max if names is None else len(names) - 1
    if labels.min() < 0 or labels.max() > most:
        raise ValueError(f"{name}: expected 0 to {most}, got {labels.min()} to {labels.max()}")
    return labels
