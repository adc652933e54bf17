"""The one decoder of images: each kind of picture against what its pixels mean, or refused by name; lists of files."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rambo_plugins.evaluation.files import read_paths
from rambo_plugins.images import check_paths, read_image, write_paths

COLOURS = np.random.default_rng(0).integers(0, 256, (5, 4, 3), np.uint8)
SHADES = np.random.default_rng(1).integers(0, 65536, (5, 4), np.uint16)


def decoded(content):
    image = read_image(io.BytesIO(content), "picture")
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def png_of_16_bits(pixels, colour_type, transparent=b""):
    """A PNG by the specification, since Pillow writes no colours of 16 bits."""

    def chunk(name, content):
        return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))

    head = struct.pack(">IIBBBBB", pixels.shape[1], pixels.shape[0], 16, colour_type, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in pixels)
    colour = chunk(b"tRNS", transparent) if transparent else b""
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + colour + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    )


def high_bytes(values):
    return [[[int(value) // 256] * 3 for value in row] for row in values]


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "JPEG2000"])
def test_16_bit_greys_come_out_as_their_high_byte(kind):
    assert decoded(encoded(Image.fromarray(SHADES), kind)).tolist() == high_bytes(SHADES)


def test_greys_of_a_portable_graymap_come_out_by_the_range_that_it_states():
    for top in (65535, 1000):
        values = SHADES.astype(int) % (top + 1)
        shown = decoded(b"P5 4 5 %d\n" % top + values.astype(">u2").tobytes())
        assert abs(shown - values[..., None] * (256 / (top + 1))).max() <= 1


def test_16_bit_greys_of_either_byte_order_come_out_alike():
    big = encoded(Image.fromarray(SHADES.astype(">u2")), "TIFF")
    assert big[:2] == b"MM"
    assert decoded(big).tolist() == high_bytes(SHADES)


def test_16_bit_colours_come_out_as_their_high_byte_as_greys_do():
    colours = np.random.default_rng(2).integers(0, 65536, (3, 4, 3))
    assert decoded(png_of_16_bits(colours, 2)).tolist() == (colours // 256).tolist()
    greys = SHADES.astype(int)
    assert decoded(png_of_16_bits(np.stack([greys] * 3, 2), 2)).tolist() == decoded(png_of_16_bits(greys, 0)).tolist()


def test_8_bits_stored_in_16_come_out_as_they_were():
    for spread in (256, 257):
        stored = (COLOURS[..., 0].astype(np.uint16)) * spread
        assert (decoded(encoded(Image.fromarray(stored), "PNG"))[..., 0] == COLOURS[..., 0]).all()


@pytest.mark.parametrize("top", [1, 255, 4095])
def test_16_bits_of_which_nothing_would_be_left_are_refused(top):
    pixels = np.zeros((4, 4), np.uint16)
    pixels[1, 1] = top
    contents = encoded(Image.fromarray(pixels), "PNG"), png_of_16_bits(np.stack([pixels] * 3, 2), 2)
    for content in contents:
        with pytest.raises(ValueError, match="16 bits of which nothing is above 4,095"):
            decoded(content)


def test_a_black_picture_of_16_bits_is_black_and_one_of_4096_is_not_refused():
    assert decoded(encoded(Image.fromarray(np.zeros((4, 4), np.uint16)), "PNG")).max() == 0
    assert decoded(encoded(Image.fromarray(np.full((4, 4), 4096, np.uint16)), "PNG")).max() == 16


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (encoded(Image.new("I", (4, 4), 300), "TIFF"), "32-bit integers, whose range is unknown"),
        (encoded(Image.new("F", (4, 4), 0.5), "TIFF"), "floats, whose range is unknown"),
        (encoded(Image.fromarray(SHADES), "TIFF", tiffinfo={262: 0}), "0 is white"),
        (png_of_16_bits(SHADES, 0, b"\1\2"), "a 16-bit picture with a transparent colour"),
        (b"", "cannot identify"),
        (b"no picture", "cannot identify"),
        (encoded(Image.fromarray(COLOURS), "PNG")[:-30], "truncated"),
        *[
            (
                encoded(Image.fromarray(COLOURS), kind, save_all=True, append_images=[Image.new("RGB", (4, 5))]),
                "expected one picture, got 2 frames",
            )
            for kind in ("TIFF", "PNG", "WEBP", "GIF")
        ],
    ],
)
def test_what_cannot_be_shown_faithfully_is_refused_by_name(content, message):
    with pytest.raises(ValueError, match=f"^picture cannot be read as an image: .*{message}"):
        decoded(content)


def test_a_photograph_with_a_preview_is_the_photograph():
    photograph, preview = Image.new("RGB", (16, 16), (200, 0, 0)), Image.new("RGB", (8, 8))
    content = encoded(photograph, "MPO", save_all=True, append_images=[preview])
    assert abs(decoded(content) - [200, 0, 0]).max() < 3


def test_transparency_is_laid_on_white():
    alpha = np.random.default_rng(3).integers(0, 256, (5, 4), np.uint8)
    alpha[0] = 0, 255, 0, 255
    shown = decoded(encoded(Image.fromarray(np.dstack([COLOURS, alpha])), "PNG"))
    share = alpha[..., None] / 255
    assert abs(shown - (COLOURS * share + 255 * (1 - share))).max() <= 1
    assert (shown[0, ::2] == 255).all()
    assert (shown[0, 1::2] == COLOURS[0, 1::2]).all()


def test_transparent_greys_and_palettes_are_laid_on_white_too():
    grey = np.dstack([np.full((2, 2), 40, np.uint8), np.array([[0, 255], [255, 0]], np.uint8)])
    assert decoded(encoded(Image.fromarray(grey), "PNG"))[..., 0].tolist() == [[255, 40], [40, 255]]
    palette = Image.fromarray(np.array([[0, 1]], np.uint8)).convert("P")
    palette.putpalette([10, 20, 30, 40, 50, 60])
    assert decoded(encoded(palette, "PNG")).tolist() == [[[10, 20, 30], [40, 50, 60]]]
    assert decoded(encoded(palette, "PNG", transparency=0)).tolist() == [[[255, 255, 255], [40, 50, 60]]]


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "BMP", "PPM"])
def test_opaque_pictures_come_out_as_they_are(kind):
    assert (decoded(encoded(Image.fromarray(COLOURS), kind)) == COLOURS).all()
    grey = COLOURS[..., 0]
    assert (decoded(encoded(Image.fromarray(grey), kind)) == grey[..., None]).all()
    black_and_white = grey > 99
    assert (decoded(encoded(Image.fromarray(black_and_white), kind)) == 255 * black_and_white[..., None]).all()


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")
def test_damage_of_any_kind_names_the_file():
    generator = np.random.default_rng(0)
    for kind, image in (("PNG", COLOURS), ("TIFF", SHADES), ("JPEG", COLOURS), ("WEBP", COLOURS), ("PPM", COLOURS)):
        good = encoded(Image.fromarray(image), kind)
        for _ in range(60):
            bad = bytearray(good)
            for place in generator.integers(0, min(len(good), 150), 3):
                bad[place] = generator.integers(256)
            assert said(bytes(bad)).startswith(("picture cannot be read as an image: ", "nothing"))


def said(content):
    try:
        decoded(content)
    except ValueError as error:
        return str(error)
    return "nothing"


def test_a_picture_too_large_is_refused(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9)
    with pytest.raises(ValueError, match=r"picture cannot be read as an image: .*decompression bomb"):
        decoded(encoded(Image.fromarray(COLOURS), "PNG"))


def test_what_the_file_system_says_stays_what_it_is(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"gone\.png"):
        read_image(tmp_path / "gone.png")
    with pytest.raises(IsADirectoryError):
        read_image(tmp_path)


# Lists


def test_lists_are_read_back_as_they_were_written(tmp_path):
    paths = ["a b.png", " spaces ", "é/ü.png", "#x", "C:\\y.png", "'\"", "日本.png"]
    write_paths(tmp_path / "list.txt", paths)
    assert list(map(str, read_paths(tmp_path / "list.txt"))) == paths
    assert (tmp_path / "list.txt").read_text(encoding="utf-8").splitlines() == paths


@pytest.mark.parametrize("name", ["a\nb", "a\rb", "a\u2028b", "a\x85b", "a\x0cb", "", "a\udcffb"])
def test_names_that_are_no_line_are_refused_before_anything_is_written(tmp_path, name):
    with pytest.raises(ValueError, match=f"^{name!a}: a name ".replace("\\", "\\\\")):
        check_paths(["good", name])
    with pytest.raises(ValueError, match="a name "):
        write_paths(tmp_path / "list.txt", ["good", name])
    assert not list(Path(tmp_path).iterdir())
