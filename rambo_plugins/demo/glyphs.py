"""Letters of five scripts, drawn with matplotlib's own typefaces: images for retrieval without a download.

A class is a letter of the Latin, Greek, Cyrillic, Georgian or Armenian script, its images are its renderings in up to
16 faces (DejaVu Sans, Sans Mono and Serif, STIX General; upright, bold, italic, both), its super class is the script.
No image may carry a wrong label, so letters that look the same (Latin A, Greek Α, Cyrillic А) are one class.

"Looks the same" is measured on the bitmaps a, b of two letters in one face: |a − b|² / min(|a|², |b|²), the share of
the ink that differs. Two letters are as near as a threshold if at least half of the faces that have both say so.
"""

import hashlib
import logging
import os
import tempfile
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import PIL
from matplotlib.ft2font import FT2Font
from PIL import Image, ImageDraw, ImageFont, features
from scipy.sparse.csgraph import connected_components  # type: ignore[import-untyped]
from tqdm.auto import tqdm

logger = logging.getLogger("rambo_plugins")

SCRIPTS = ("Latin", "Greek", "Cyrillic", "Georgian", "Armenian")
TRAIN_SCRIPTS = 2  # the first two: letters of the others are met in the test alone
_SANS = ("", "-Bold", "-Oblique", "-BoldOblique")
FACES = (
    *(f"DejaVuSans{style}" for style in _SANS),
    *(f"DejaVuSansMono{style}" for style in _SANS),
    *(f"DejaVuSerif{style}" for style in ("", "-Bold", "-Italic", "-BoldItalic")),
    *(f"STIXGeneral{style}" for style in ("", "Bol", "Italic", "BolIta")),
)
SIZE = 28  # pixels a side
EM = 23  # pixels of one em: 99 of 100 letters fit, with their diacritics
OVERSAMPLING = 8
SAME = 0.02  # letters nearer than this are one class: Ф and Armenian Փ are at 0.019
ALIKE = 0.1  # test letters as near as this to a training letter are left out: я and Latin ᴙ are at 0.099
MIN_IMAGES = 8
VERSION = 2  # of this module's output and of the cache file's format; part of the cache file's name
STORED = ("images", "labels", "scripts", "faces", "class_names")


@dataclass(frozen=True)
class Glyphs:
    """Rendered letters. N images of C classes; sorted by class, then face; classes by script, then code point.

    images (N, 28, 28) uint8, ink 255 on 0; labels (N,) int64 in [0, C); scripts (N,) int64, indices into
    ``script_names``; faces (N,) int64, indices into ``face_names``; class_names: C strings, a class's characters.
    """

    images: np.ndarray
    labels: np.ndarray
    scripts: np.ndarray
    faces: np.ndarray
    class_names: list[str]
    script_names: tuple[str, ...] = SCRIPTS
    face_names: tuple[str, ...] = FACES


def script_of(character: str) -> int | None:
    """Index into ``SCRIPTS`` if the character is a letter (Lu, Ll, Lo) of one of them, else None.

    Forms that Unicode itself calls variants of other letters (ligatures, ϑ for θ, the Ångström sign) are none.
    """
    script = unicodedata.name(character, "-").split()[0].capitalize()
    if script not in SCRIPTS or unicodedata.category(character) not in ("Lu", "Ll", "Lo"):
        return None
    return SCRIPTS.index(script) if unicodedata.normalize("NFKC", character) == character else None


def font_path(face: str) -> Path:
    """The font file of a face. Raises FileNotFoundError where matplotlib was installed without it."""
    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"{face}.ttf")
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: expected the typefaces that matplotlib's wheels bring")
    return path


def letters(face: str) -> list[str]:
    """The letters of the five scripts for which the face has a glyph, by script, then by code point."""
    charmap = FT2Font(str(font_path(face))).get_charmap()
    known = ((script_of(chr(code)), chr(code)) for code, glyph in charmap.items() if glyph != 0)  # 0 is .notdef
    return [character for _, character in sorted((script, char) for script, char in known if script is not None)]


def render(face: str, characters: list[str]) -> np.ndarray:
    """Draw characters in one face at one point size, bounding boxes centred; those too large are shrunk to fit.

    Returns (len(characters), 28, 28) uint8, ink 255 on 0. The same bytes every time.
    """
    side = SIZE * OVERSAMPLING
    path = str(font_path(face))
    images = np.zeros((len(characters), SIZE, SIZE), np.uint8)
    full_size = ImageFont.truetype(path, EM * OVERSAMPLING, layout_engine=ImageFont.Layout.BASIC)
    for image, character in zip(images, characters, strict=True):
        ink = _ink(full_size, character)
        while max(ink.size) > side:
            ink = _ink(full_size.font_variant(size=int(full_size.size * side / max(ink.size)) - 1), character)
        canvas = Image.new("L", (side, side))
        canvas.paste(ink, ((side - ink.width) // 2, (side - ink.height) // 2))
        image[:] = np.asarray(canvas.reduce(OVERSAMPLING))
    return images


def _ink(font: ImageFont.FreeTypeFont, character: str) -> Image.Image:
    """The character cropped to its ink; Pillow's own bounding boxes span the advance width too."""
    canvas = Image.new("L", (4 * SIZE * OVERSAMPLING,) * 2)
    ImageDraw.Draw(canvas).text((SIZE * OVERSAMPLING,) * 2, character, fill=255, font=font)
    return canvas.crop(canvas.getbbox() or (0, 0, 1, 1))  # a blank glyph has no box


def _render_all() -> Glyphs:
    """Render every letter in every face and sort the renderings into classes that are right."""
    by_face = [letters(face) for face in FACES]
    characters = sorted({c for found in by_face for c in found}, key=lambda c: (script_of(c), c))
    index = {character: i for i, character in enumerate(characters)}
    bar = tqdm(zip(FACES, by_face, strict=True), "rendering letters", len(FACES), leave=False, disable=None)
    images = np.concatenate([render(face, found) for face, found in bar])
    letter = np.array([index[c] for found in by_face for c in found])
    faces = np.repeat(np.arange(len(FACES)), [len(found) for found in by_face])
    order = np.lexsort((faces, letter))
    order = order[images[order].any((1, 2))]  # a blank glyph is no image
    images, letter, faces = images[order], letter[order], faces[order]
    script = np.array([script_of(c) for c in characters])

    same, alike, twins = _compare(images, letter, faces, len(characters))
    _, group = connected_components(same, directed=False)
    first = np.array([np.flatnonzero(group == g)[0] for g in range(group.max() + 1)])[group]  # of the letter's class
    seen = script[first] < TRAIN_SCRIPTS
    too_near = np.isin(first, first[~seen & alike[:, seen].any(1)])

    label = first[letter]
    keep = ~too_near[letter]
    # What still looks like another class in this one face (the italic т is an m) is dropped from both.
    twins = twins[keep[twins].all(1) & (label[twins[:, 0]] != label[twins[:, 1]])]
    keep[twins] = False
    keep = _firsts(np.stack([label, faces], 1), keep)  # a class has one rendering a face
    pictures = np.unique(images.reshape(len(images), -1), axis=0, return_inverse=True)[1].ravel()
    keep = _firsts(np.stack([label, pictures], 1), keep)
    keep &= (np.bincount(pictures[keep], minlength=len(images)) == 1)[pictures]
    keep &= (np.bincount(label[keep], minlength=len(characters)) >= MIN_IMAGES)[label]

    rows = np.flatnonzero(keep)
    rows = rows[np.lexsort((faces[rows], label[rows]))]
    kept, labels = np.unique(label[rows], return_inverse=True)
    names = ["".join(np.array(characters)[first == k].tolist()) for k in kept]
    return Glyphs(images[rows], labels.astype(np.int64), script[kept][labels], faces[rows].astype(np.int64), names)


def _compare(
    images: np.ndarray, letter: np.ndarray, faces: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(count, count) bool: letters that are the same, that are alike; (M, 2): images of one face that are the same."""
    both, same, alike = (np.zeros((count, count), np.int16) for _ in range(3))
    twins = []
    for face in range(len(FACES)):
        at = np.flatnonzero(faces == face)
        pixels = images[at].reshape(len(at), -1).astype(np.float64)  # sums of products of bytes are exact in float64
        gram = pixels @ pixels.T
        ink = np.diagonal(gram)
        distance = (ink[:, None] + ink - 2 * gram) / np.minimum(ink[:, None], ink)
        cells = np.ix_(letter[at], letter[at])
        both[cells] += 1
        same[cells] += distance <= SAME
        alike[cells] += distance <= ALIKE
        twins.append(at[np.argwhere(distance <= SAME)])
    return (same > 0) & (2 * same >= both), (alike > 0) & (2 * alike >= both), np.concatenate(twins)


def _firsts(keys: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """(N,) bool: of the rows that are kept, the first with each key."""
    rows = np.flatnonzero(keep)
    firsts = np.zeros_like(keep)
    firsts[rows[np.unique(keys[rows], axis=0, return_index=True)[1]]] = True
    return firsts


def cache_path(cache_dir: str | os.PathLike[str] | None = None) -> Path:
    """Where the rendered letters are kept; the name changes with the fonts, FreeType, Pillow, Unicode and VERSION."""
    state = hashlib.sha256()
    versions = VERSION, features.version("freetype2"), PIL.__version__, unicodedata.unidata_version
    state.update(repr((versions, SIZE, EM, OVERSAMPLING, SAME, ALIKE, MIN_IMAGES)).encode())
    for face in FACES:
        state.update(font_path(face).read_bytes())
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "rambo_plugins")
    return Path(cache_dir, f"glyphs-{state.hexdigest()[:16]}.npz")


def load_glyphs(cache_dir: str | os.PathLike[str] | None = None) -> Glyphs:
    """The letters, from the cache file or rendered (a few seconds) and written there.

    Args:
        cache_dir: folder of the cache file; default ``$XDG_CACHE_HOME/rambo_plugins`` or ``~/.cache/rambo_plugins``.
            A file there that is damaged, or was not written by us, is left alone and done without, and so is a folder
            that cannot be written; both with a warning.

    Raises:
        FileNotFoundError: matplotlib was installed without its typefaces.
    """
    path = cache_path(cache_dir)
    if os.path.lexists(path):
        try:
            return _read(path)
        except Exception as error:  # numpy, zipfile and zlib raise a dozen kinds for a damaged file
            logger.warning("%s is damaged, or not ours: rendering the letters anew; delete it (%s)", path, error)
            return _render_all()
    glyphs = _render_all()
    try:
        _write(path, glyphs)
    except OSError as error:
        logger.warning("cannot keep the rendered letters in %s (%s): they are rendered at every start", path, error)
    return glyphs


def _digest(path: Path, arrays: dict[str, Any]) -> str:
    """Of the contents and of the name, which says what they were made by."""
    state = hashlib.sha256(path.name.encode())
    for name in STORED:
        state.update(repr((name, arrays[name].dtype.str, arrays[name].shape)).encode() + arrays[name].tobytes())
    return state.hexdigest()


def _read(path: Path) -> Glyphs:
    with np.load(path, allow_pickle=False) as stored:
        arrays = {name: stored[name] for name in STORED}
        digest = str(stored["digest"])
    if digest != _digest(path, arrays):
        raise ValueError("its digest is another")
    return Glyphs(**arrays | {"class_names": arrays["class_names"].tolist()})


def _write(path: Path, glyphs: Glyphs) -> None:
    """Whole or not at all, and never over what is there; several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Any] = {name: np.asarray(getattr(glyphs, name)) for name in STORED}
    handle, name = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            np.savez_compressed(file, **arrays, digest=np.array(_digest(path, arrays)))
        if not os.path.lexists(path):
            os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
