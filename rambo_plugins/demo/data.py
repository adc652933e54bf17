"""The demo's data sets as open-set splits: the test's classes are never met in training.

| name       | train                                              | test                                  |
|------------|----------------------------------------------------|---------------------------------------|
| `glyphs`   | Latin and Greek letters                            | Cyrillic, Georgian, Armenian letters  |
| `omniglot` | Balinese, Early Aramaic, Greek, Korean, Latin      | Japanese (katakana), Sanskrit, Tagalog |
| `digits`   | handwritten 0 to 4                                 | 5 to 9                                |

Each glyph is seen askew: a fixed random rotation, shear, stretch and shift of its own. Upright, the nearest neighbour
of a letter is the same letter in the next weight of its typeface, and any loss finds it.
"""

import functools
import hashlib
import io
import json
import logging
import math
import os
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import Dataset

from rambo_plugins.demo.glyphs import SCRIPTS, SIZE, TRAIN_SCRIPTS, load_glyphs
from rambo_plugins.images import read_image

logger = logging.getLogger("rambo_plugins")

SPLITS = ("glyphs", "omniglot", "digits")
# Of each side: the alphabets, and the archives or folders that can hold them, the first that is there is read.
OMNIGLOT = (
    (("Balinese", "Early_Aramaic", "Greek", "Korean", "Latin"), "small1"),
    (("Japanese", "Sanskrit", "Tagalog"), "small2"),
)
OMNIGLOT_COUNTS = {"small1": 136, "small2": 106}  # characters, of 20 drawings each
OMNIGLOT_SIDE = 105  # pixels a side of Omniglot's drawings


class ImageClasses(Dataset[tuple[Tensor, int]]):
    """N grey images of C classes, and of the super classes that these belong to. ``dataset[i]`` is (image, label).

    Args:
        images: (N, 28, 28) uint8, ink 255 on 0; kept as ``images`` (N, 1, 28, 28) float32 in [0, 1].
        classes: (N,) integers, any numbering that ``class_names`` follows; kept as ``labels`` (N,) int64, renumbered
            0 … C−1 without the numbers that do not occur, and so are ``class_names``, C strings.
        super_classes, super_names: likewise; kept as ``super_labels`` (N,) int64 and ``super_names``.

    Raises:
        ValueError: the shapes or the dtype are others.
    """

    def __init__(
        self,
        images: np.ndarray,
        classes: np.ndarray,
        class_names: Sequence[str],
        super_classes: np.ndarray,
        super_names: Sequence[str],
    ) -> None:
        if images.dtype != np.uint8 or images.shape[1:] != (SIZE, SIZE):
            raise ValueError(f"images: got {images.dtype} of {images.shape}, expected uint8 of (N, {SIZE}, {SIZE})")
        if not len(images) == len(classes) == len(super_classes):
            raise ValueError(
                f"expected one class and one super class an image, got {len(classes)} and {len(super_classes)} "
                f"for {len(images)} images"
            )
        self.images = torch.from_numpy(images).unsqueeze(1).float() / 255
        self.labels, self.class_names = _renumber(classes, class_names)
        self.super_labels, self.super_names = _renumber(super_classes, super_names)

    @functools.cached_property
    def digest(self) -> str:
        """The same for the same images, labels and names."""
        state = hashlib.blake2b(digest_size=16)
        for values in (self.images, self.labels, self.super_labels):
            state.update(repr((values.dtype, values.shape)).encode() + values.numpy().tobytes())
        state.update(json.dumps([self.class_names, self.super_names]).encode())
        return state.hexdigest()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


def load_split(
    name: str, root: str | os.PathLike[str] | None = None, cache_dir: str | os.PathLike[str] | None = None
) -> tuple[ImageClasses, ImageClasses]:
    """The train and the test side of a data set.

    Args:
        name: one of ``SPLITS``.
        root: of Omniglot, the folder that holds ``omniglot_small1.zip`` and ``omniglot_small2.zip``, or
            ``images_background_small1`` and ``images_background_small2``, or ``images_background``, each as a zip or
            extracted, there or in the sub folder ``omniglot-py`` (where torchvision puts them).
        cache_dir: of glyphs, see ``load_glyphs``.

    Raises:
        ValueError: an unknown name, Omniglot without a root, or a file that is not what it should be (it is named).
        FileNotFoundError: Omniglot is not below the root.
    """
    if name == "glyphs":
        glyphs = load_glyphs(cache_dir)
        return _sides(
            askew(glyphs.images),
            (glyphs.labels, glyphs.class_names),
            (glyphs.scripts, SCRIPTS),
            train=glyphs.scripts < TRAIN_SCRIPTS,
        )
    if name == "omniglot":
        if root is None:
            raise ValueError("omniglot needs the folder that holds it: give --root (root=...)")
        return _omniglot_side(Path(root), *OMNIGLOT[0]), _omniglot_side(Path(root), *OMNIGLOT[1])
    if name == "digits":
        images, digits = load_digits(return_X_y=True)
        pixels = (images.reshape(-1, 8, 8) * (255 / 16)).round().astype(np.uint8)
        resized = np.stack([_resize(Image.fromarray(p), Image.Resampling.BICUBIC) for p in pixels])
        names = [str(digit) for digit in range(10)]
        return _sides(resized, (digits, names), (np.zeros_like(digits), ["digits"]), train=digits < 5)
    raise ValueError(f"unknown data set {name!r}: expected one of {', '.join(SPLITS)}")


def askew(images: np.ndarray, seed: int = 0) -> np.ndarray:
    """Images (N, S, S) uint8, each under an affine map of its own, drawn from the seed.

    Rotation by up to 20°, shear by up to 0.2, either axis stretched or shrunk by up to 1.1 (o and O stay apart: their
    sizes differ by 1.3), shift by up to a fourteenth of the side; uniform (the stretch in its logarithm).
    """
    generator = torch.Generator().manual_seed(seed)
    limits = torch.tensor([math.radians(20), 0.2, math.log(1.1), math.log(1.1), 1 / 7, 1 / 7])
    angle, shear, *stretch, x, y = (limits * (2 * torch.rand(len(images), 6, generator=generator) - 1)).unbind(1)
    across, down = (value.exp() for value in stretch)
    cos, sin = angle.cos(), angle.sin()
    maps = torch.stack(
        [cos * across, (shear * cos - sin) * down, x, sin * across, (shear * sin + cos) * down, y], 1
    ).view(-1, 2, 3)
    pixels = torch.from_numpy(images).unsqueeze(1).float()
    grid = torch.nn.functional.affine_grid(maps, list(pixels.shape), align_corners=False)
    seen = torch.nn.functional.grid_sample(pixels, grid, align_corners=False)
    return seen.round().byte().squeeze(1).numpy()


def _sides(
    images: np.ndarray,
    classes: tuple[np.ndarray, Sequence[str]],
    supers: tuple[np.ndarray, Sequence[str]],
    train: np.ndarray,
) -> tuple[ImageClasses, ImageClasses]:
    first, second = (
        ImageClasses(images[side], classes[0][side], classes[1], supers[0][side], supers[1]) for side in (train, ~train)
    )
    return first, second


def _renumber(numbers: np.ndarray, names: Sequence[str]) -> tuple[Tensor, list[str]]:
    present, labels = np.unique(numbers, return_inverse=True)
    return torch.from_numpy(labels.astype(np.int64)), [names[number] for number in present]


def _omniglot_side(root: Path, alphabets: Sequence[str], part: str) -> ImageClasses:
    source = _omniglot_source(root, part)
    folders = {folder.name: folder for folder in _entries(source) if folder.is_dir()}
    images: list[np.ndarray] = []
    classes: list[int] = []
    class_names: list[str] = []
    supers: list[int] = []
    super_names: list[str] = []
    for alphabet in alphabets:
        match = [name for name in sorted(folders) if alphabet in name]
        if len(match) != 1:
            raise ValueError(f"{source}: expected one folder named like {alphabet}, got {', '.join(sorted(folders))}")
        super_names.append(match[0])
        for character in (entry for entry in _entries(folders[match[0]]) if entry.name.startswith("character")):
            drawings = [_drawing(entry) for entry in _entries(character) if entry.name.endswith(".png")]
            if not drawings:
                raise ValueError(f"{character}: a class without images, expected *.png")
            images += drawings
            classes += [len(class_names)] * len(drawings)
            supers += [len(super_names) - 1] * len(drawings)
            class_names.append(f"{match[0]}/{character.name}")
        if supers[-1:] != [len(super_names) - 1]:
            raise ValueError(f"{folders[match[0]]}: an alphabet without characters, expected folders character01, …")
    counts = np.bincount(classes)
    if len(counts) != OMNIGLOT_COUNTS[part] or (counts != 20).any():
        logger.warning(
            "%s: %d characters of %d to %d drawings, but Omniglot has %d of 20 in these alphabets",
            source, len(counts), counts.min(), counts.max(), OMNIGLOT_COUNTS[part],
        )  # fmt: skip
    return ImageClasses(np.stack(images), np.array(classes), class_names, np.array(supers), super_names)


def _omniglot_source(root: Path, part: str) -> Path | zipfile.Path:
    """The folder of alphabets, on the disk or in an archive."""
    names = (f"images_background_{part}", f"omniglot_{part}", "images_background")
    for folder in (root, root / "omniglot-py"):
        for name in names:
            if (folder / name).is_dir():
                return folder / name
            archive = folder / f"{name}.zip"
            if archive.is_file():
                try:
                    inside = zipfile.Path(archive)
                except zipfile.BadZipFile as error:
                    raise ValueError(f"{archive} is damaged: {error}") from error
                tops = [entry for entry in _entries(inside) if entry.name.startswith("images_background")]
                if len(tops) != 1:
                    raise ValueError(f"{archive}: expected one folder images_background…, got {len(tops)}")
                return tops[0]
    raise FileNotFoundError(
        f"no Omniglot in {root}: expected {' or '.join(names)}, as a folder or a .zip, there or in omniglot-py. "
        "Get it with torchvision.datasets.Omniglot(root, download=True) on a machine with internet access, or put the "
        "archives images_background_small1.zip and images_background_small2.zip "
        "of github.com/brendenlake/omniglot there"
    )


def _entries(folder: Path | zipfile.Path) -> list[Path] | list[zipfile.Path]:
    return sorted(folder.iterdir(), key=lambda entry: entry.name)  # type: ignore[return-value]


def _drawing(file: Path | zipfile.Path) -> np.ndarray:
    """(28, 28) uint8, ink 255 on 0, of a drawing in black on white."""
    try:
        content = file.read_bytes()
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{file} is damaged: {error}") from error
    drawing = read_image(io.BytesIO(content), str(file)).convert("L")
    if drawing.size != (OMNIGLOT_SIDE, OMNIGLOT_SIDE):
        raise ValueError(f"{file}: got {drawing.size} pixels, expected {OMNIGLOT_SIDE} × {OMNIGLOT_SIDE}")
    return 255 - _resize(drawing, Image.Resampling.BILINEAR)  # averages over the area that a pixel covers


def _resize(image: Image.Image, resampling: Image.Resampling) -> np.ndarray:
    return np.asarray(image.resize((SIZE, SIZE), resampling))
