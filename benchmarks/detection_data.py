"""Data for ``detection.py`` as COCO files: pages of letters that are drawn here, and the BCCD blood cells.

Glyph scenes: letters of 20 classes, the k-th one with a frequency of about 1/k, in matplotlib's typefaces, 12 to 44
pixels high, rotated, of any contrast, on a page that is no one colour, among letters and digits of no class.
"""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont
from tqdm.auto import tqdm

from rambo_plugins.demo.glyphs import FACES, font_path

CLASSES = "AEKRMTSGBPDHNYLFUCVJ"
OTHERS = "235679@&§¶ßgqmwx?Ж%"
PAGE = 160
VERSION = 1  # of the glyph scenes


@dataclass(frozen=True)
class DetectionData:
    """A data set on the disk. COCO annotations, image file names relative to ``images``; scale (width, height)."""

    name: str
    classes: list[str]
    images: str
    train: str
    test: str
    scale: tuple[int, int]
    flip: bool


def glyph_scenes(
    folder: Path, num_train: int = 480, num_test: int = 240, name: str = "glyphs", unlabelled: float = 0.0
) -> DetectionData:
    """Draw the pages, unless they are there already; the share ``unlabelled`` of the training letters gets no box."""
    done = folder / "data.json"
    settings = {"version": VERSION, "num_train": num_train, "num_test": num_test}
    settings |= {"unlabelled": unlabelled} if unlabelled else {}
    data = DetectionData(
        name, list(CLASSES), str(folder), str(folder / "train.json"), str(folder / "test.json"), (PAGE, PAGE), False
    )
    if done.exists() and json.loads(done.read_text())["settings"] == settings:
        return data
    folder.mkdir(parents=True, exist_ok=True)
    for split, num, seed in (("train", num_train, 1), ("test", num_test, 2)):
        rng = np.random.default_rng(seed)
        images, boxes = [], []
        for image_id in tqdm(range(num), f"drawing {split} pages", leave=False, disable=None):
            page, letters = draw_page(rng)
            file_name = f"{split}{image_id:05d}.png"
            page.save(folder / file_name)
            images.append({"id": image_id, "file_name": file_name, "width": PAGE, "height": PAGE})
            boxes.extend((image_id, *letter) for letter in letters)
        if split == "train" and unlabelled:
            kept = np.random.default_rng(3).random(len(boxes)) >= unlabelled
            boxes = [box for box, keep in zip(boxes, kept, strict=True) if keep]
        _write(folder / f"{split}.json", images, boxes, data.classes)
    done.write_text(json.dumps({"settings": settings, "data": asdict(data)}))
    return data


def draw_page(rng: np.random.Generator) -> tuple[Image.Image, list[tuple[int, tuple[int, int, int, int]]]]:
    """An RGB page and its letters: (class, (x, y, width, height) of the ink)."""
    coarse = Image.fromarray(rng.integers(60, 256, (4, 4, 3), dtype=np.uint8))
    coarse = coarse.resize((PAGE, PAGE), Image.Resampling.BICUBIC)
    frequency = 1 / np.arange(1, len(CLASSES) + 1)
    letters: list[tuple[int, tuple[int, int, int, int]]] = []
    taken: list[tuple[int, int, int, int]] = []
    for _ in range(rng.integers(5, 14)):
        wanted = rng.random() < 0.7
        kind = int(rng.choice(len(CLASSES), p=frequency / frequency.sum())) if wanted else -1
        character = CLASSES[kind] if wanted else str(rng.choice(list(OTHERS)))
        ink = _ink(character, str(rng.choice(FACES)), int(rng.integers(14, 52)), float(rng.uniform(-25, 25)))
        if ink.width >= PAGE or ink.height >= PAGE:
            continue
        x, y = (int(rng.integers(0, PAGE - side)) for side in ink.size)
        box = (x, y, ink.width, ink.height)
        if any(_overlap(box, other) > 0.15 for other in taken):
            continue
        taken.append(box)
        under = np.asarray(coarse.crop((x, y, x + ink.width, y + ink.height))).mean((0, 1))
        colour = np.clip(under + rng.choice([-1, 1]) * rng.uniform(40, 160, 3), 0, 255).astype(np.uint8)
        coarse.paste(tuple(int(c) for c in colour), (x, y), ink)
        if wanted:
            letters.append((kind, box))
    page = np.asarray(coarse.filter(ImageFilter.GaussianBlur(float(rng.uniform(0, 1)))), dtype=np.float64)
    page = page + rng.normal(0, rng.uniform(2, 20), page.shape)
    return Image.fromarray(np.clip(page, 0, 255).astype(np.uint8)), letters


def _ink(character: str, face: str, size: int, angle: float) -> Image.Image:
    """The rotated character, cropped to its ink; a mask."""
    font = ImageFont.truetype(str(font_path(face)), size, layout_engine=ImageFont.Layout.BASIC)
    canvas = Image.new("L", (4 * size, 4 * size))
    ImageDraw.Draw(canvas).text((size, size), character, fill=255, font=font)
    canvas = canvas.rotate(angle, resample=Image.Resampling.BICUBIC)
    return canvas.crop(canvas.point(lambda value: 255 * (value > 64)).getbbox() or (0, 0, 1, 1))


def _overlap(a: tuple[int, int, int, int], b: tuple[int, int, int, int]) -> float:
    """The intersection's share of the smaller box."""
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    return max(width, 0) * max(height, 0) / min(a[2] * a[3], b[2] * b[3])


def bccd(path: Path, folder: Path) -> DetectionData:
    """The blood cells from their Pascal VOC folder: train + val to train, test to test; boxes without area left out."""
    classes = ["RBC", "WBC", "Platelets"]
    folder.mkdir(parents=True, exist_ok=True)
    for split, lists in (("train", ("train", "val")), ("test", ("test",))):
        names = [n for part in lists for n in (path / f"ImageSets/Main/{part}.txt").read_text().split()]
        images, boxes = [], []
        for image_id, name in enumerate(names):
            tree = ElementTree.parse(path / f"Annotations/{name}.xml").getroot()
            width, height = (int(tree.findtext(f"size/{side}") or 0) for side in ("width", "height"))
            images.append({"id": image_id, "file_name": f"{name}.jpg", "width": width, "height": height})
            for thing in tree.iter("object"):
                x0, y0, x1, y1 = (int(thing.findtext(f"bndbox/{k}") or 0) for k in ("xmin", "ymin", "xmax", "ymax"))
                if x1 > x0 and y1 > y0:
                    boxes.append((image_id, classes.index(thing.findtext("name") or ""), (x0, y0, x1 - x0, y1 - y0)))
        _write(folder / f"{split}.json", images, boxes, classes)
    images_folder = str(path / "JPEGImages")
    return DetectionData(
        "bccd", classes, images_folder, str(folder / "train.json"), str(folder / "test.json"), (256, 192), True
    )


def _write(path: Path, images: list[dict], boxes: list[tuple], classes: list[str]) -> None:
    annotations = [
        {
            "id": number + 1,
            "image_id": image_id,
            "category_id": kind,
            "bbox": list(box),
            "area": box[2] * box[3],
            "iscrowd": 0,
        }
        for number, (image_id, kind, box) in enumerate(boxes)
    ]
    categories = [{"id": kind, "name": name} for kind, name in enumerate(classes)]
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))
