"""The one decoder of images, for training, evaluation and panels; and lists of image files, a line each.

``read_image`` makes RGB of 8 bits by rules that are the same for every picture:

| in the file                         | comes out                                                                     |
|-------------------------------------|-------------------------------------------------------------------------------|
| 16 bits, grey or colour             | the high byte of each value: 0 … 65,535 becomes 0 … 255                       |
| transparency                        | laid on white                                                                 |
| grey, 1 bit, palette                | equal R, G and B; the palette's colours                                       |
| CMYK, YCbCr, LAB                    | Pillow's conversion                                                           |
| colour profiles, EXIF's orientation | ignored: the pixels as they are stored, as torchvision's data sets take them  |
| a photograph with previews (MPO)    | the photograph                                                                |

Everything else is refused: 32-bit integers and floats, whose range no file states; 16-bit pictures in which nothing is
above 4,095, of which at most 16 of 256 shades would be left; several frames or pages; and damage.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image


def read_image(file: str | os.PathLike[str] | BinaryIO, name: str | None = None) -> Image.Image:
    """The picture in RGB, by the table at the top of ``rambo_plugins/images.py``.

    Args:
        file: a path, or an open binary file.
        name: how errors call it; by default the path.

    Raises:
        ValueError: no image, a damaged one, or one that RGB of 8 bits cannot show; it is named.
        OSError: what the file system says, such as FileNotFoundError.

    >>> import io
    >>> file = io.BytesIO()
    >>> Image.new("I;16", (1, 1), 40_000).save(file, "png")
    >>> read_image(file).getpixel((0, 0))
    (156, 156, 156)
    """
    name = str(file) if name is None else name
    try:
        with Image.open(file) as image:
            return _rgb(image)
    except Exception as error:  # Pillow raises half a dozen kinds for a damaged file, TypeError too
        if isinstance(error, OSError) and error.errno is not None:  # of the file system; Pillow's own have no number
            raise OSError(error.errno, error.strerror, name) from error
        raise ValueError(f"{name} cannot be read as an image: {error}") from error


def _rgb(image: Image.Image) -> Image.Image:
    frames = getattr(image, "n_frames", 1)
    if frames > 1 and image.format != "MPO":
        raise ValueError(f"expected one picture, got {frames} frames or pages; save the one that counts by itself")
    # A PNG or PPM of mode I has 16 bits: the formats know no more.
    grey_of_16_bits = image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM"))
    codes = [tile[3][0] if isinstance(tile[3], tuple) else tile[3] for tile in getattr(image, "tile", [])]
    colour_of_16_bits = not grey_of_16_bits and any(str(code).endswith((";16B", ";16L", ";16N")) for code in codes)
    if (colour_of_16_bits or grey_of_16_bits) and "transparency" in image.info:
        raise ValueError("a 16-bit picture with a transparent colour; save it with an alpha channel, or as 8 bit")
    if grey_of_16_bits:
        return _high_byte(image)
    if image.mode in ("I", "F"):
        what = "32-bit integers" if image.mode == "I" else "floats"
        raise ValueError(f"{what}, whose range is unknown; save it as 8 bit, or as 16 bit of 0 … 65,535")
    if image.has_transparency_data:
        rgba = image.convert("RGBA")
        rgb = Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    else:
        rgb = image.convert("RGB")
    if colour_of_16_bits and np.asarray(rgb).max() < 16:
        raise ValueError(_TOO_DARK)
    return rgb


_TOO_DARK = (
    "16 bits of which nothing is above 4,095, so that 16 of 256 shades would be left; save it scaled to 0 … 65,535, or "
    "as 8 bit"
)


def _high_byte(image: Image.Image) -> Image.Image:
    if image.format == "TIFF" and image.tag_v2.get(262) == 0:  # type: ignore[attr-defined]  # Pillow turns it at 8 bits
        raise ValueError("a 16-bit TIFF in which 0 is white; save it with 0 as black, or as 8 bit")
    values = np.asarray(image)
    if 0 < values.max() < 4096:
        raise ValueError(_TOO_DARK)
    return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")


def check_paths(paths: Iterable[str]) -> None:
    """Refuses names that cannot be a line of a text file: with a line break in them, or not UTF-8.

    Raises:
        ValueError: names the first.
    """
    for path in paths:
        if path.splitlines() != [path]:
            raise ValueError(f"{path!a}: a name with a line break cannot stand in a list of images; rename it")
        try:
            path.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{path!a}: a name that is not UTF-8 cannot stand in a list; rename it") from error


def write_paths(file: Path, paths: Iterable[str]) -> None:
    """Writes a list of files in UTF-8, one a line, as ``rambo-recall`` reads it.

    Raises:
        ValueError: as ``check_paths``; nothing is written then.
    """
    paths = list(paths)
    check_paths(paths)
    file.write_bytes("".join(f"{path}\n" for path in paths).encode())
