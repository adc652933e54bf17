"""The demo's data sets: no image has a wrong label, no test class is met in training, readers check what they read."""

import io
import logging
import os
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

pytest.importorskip("matplotlib", reason="the demo's letters are drawn with matplotlib's typefaces")
pytest.importorskip("sklearn", reason="the demo's digits come with scikit-learn")

from rambo_plugins.demo import glyphs as glyphs_module
from rambo_plugins.demo.data import OMNIGLOT, SPLITS, ImageClasses, askew, load_split
from rambo_plugins.demo.glyphs import FACES, MIN_IMAGES, SCRIPTS, Glyphs, cache_path, letters, load_glyphs, render

ALPHABETS = {
    "small1": ("Balinese", "Early_Aramaic", "Greek", "Korean", "Latin"),
    "small2": ("Greek", "Japanese_(katakana)", "Latin", "Sanskrit", "Tagalog"),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def glyphs(cache: Path) -> Glyphs:
    return load_glyphs(cache)


def class_of(glyphs: Glyphs, character: str) -> int:
    (found,) = [k for k, name in enumerate(glyphs.class_names) if character in name]
    return found


def assert_same_glyphs(a: Glyphs, b: Glyphs) -> None:
    for name in ("images", "labels", "scripts", "faces"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(x, y, err_msg=name)
    assert a.class_names == b.class_names
    assert (a.script_names, a.face_names) == (b.script_names, b.face_names)


# --- rendering ---


def test_rendering_is_deterministic() -> None:
    some = letters(FACES[0])[::20]
    np.testing.assert_array_equal(render(FACES[0], some), render(FACES[0], some))


def test_letters_are_centred_and_keep_their_relative_size() -> None:
    small, large = render("DejaVuSans", ["o", "O"])
    offsets: list[int] = []
    for image in render("DejaVuSansMono-Oblique", letters("DejaVuSansMono-Oblique")[::5]):
        rows, columns = np.flatnonzero(image.any(1)), np.flatnonzero(image.any(0))
        offsets += [rows[0] - (27 - rows[-1]), columns[0] - (27 - columns[-1])]
    assert np.abs(offsets).max() <= 2  # a faint outermost pixel may be on one side alone
    assert np.abs(offsets).mean() < 0.3
    assert small.any(1).sum() <= large.any(1).sum() - 4


def test_a_letter_too_large_is_shrunk_without_cutting() -> None:
    wide, tall = render("DejaVuSerif-Bold", ["Ѭ", "ᾖ"])
    assert 26 <= wide.any(0).sum() <= 28
    assert 26 <= tall.any(1).sum() <= 28
    assert wide.any(1).sum() < 22  # it kept its proportions
    assert wide[:, [0, -1]].mean() < wide.mean()  # thin serifs, no stem, at the edge


def test_only_letters_that_the_face_has() -> None:
    assert "ა" in letters("DejaVuSans")
    assert "ა" not in letters("STIXGeneral")
    assert not set("1.ʰªﬁℵ") & set(letters("DejaVuSans"))


def test_a_blank_glyph_is_a_blank_image() -> None:
    assert not render("DejaVuSans", [" "]).any()


def test_a_missing_typeface_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"NoSuchFace\.ttf is missing"):
        letters("NoSuchFace")


# --- classes ---


def test_shapes_and_dtypes(glyphs: Glyphs) -> None:
    count = len(glyphs.images)
    assert glyphs.images.shape == (count, 28, 28)
    assert glyphs.images.dtype == np.uint8
    for values in (glyphs.labels, glyphs.scripts, glyphs.faces):
        assert values.shape == (count,)
        assert values.dtype == np.int64
    np.testing.assert_array_equal(np.unique(glyphs.labels), np.arange(len(glyphs.class_names)))
    assert glyphs.script_names == SCRIPTS
    assert len(glyphs.class_names) > 1200
    assert count > 15_000


def test_every_image_is_the_rendering_of_a_character_of_its_class(glyphs: Glyphs) -> None:
    for i in np.random.default_rng(0).choice(len(glyphs.images), 60, replace=False):
        face = FACES[glyphs.faces[i]]
        name = glyphs.class_names[glyphs.labels[i]]
        assert (render(face, list(name)) == glyphs.images[i]).all((1, 2)).any(), f"{name} in {face}"


def test_every_class_has_enough_images_one_a_face(glyphs: Glyphs) -> None:
    assert np.bincount(glyphs.labels).min() >= MIN_IMAGES
    assert len(np.unique(np.stack([glyphs.labels, glyphs.faces]), axis=1).T) == len(glyphs.labels)


def test_a_class_has_one_super_class(glyphs: Glyphs) -> None:
    for label in range(len(glyphs.class_names)):
        scripts = np.unique(glyphs.scripts[glyphs.labels == label])
        assert scripts.tolist() == [min(glyphs_module.script_of(c) for c in glyphs.class_names[label])]


def test_no_two_images_are_the_same(glyphs: Glyphs) -> None:
    assert len(np.unique(glyphs.images.reshape(len(glyphs.images), -1), axis=0)) == len(glyphs.images)


def test_no_image_looks_like_another_class_in_the_same_face(glyphs: Glyphs) -> None:
    for face in range(len(FACES)):
        at = glyphs.faces == face
        pixels = glyphs.images[at].reshape(at.sum(), -1).astype(np.float64)
        ink = (pixels**2).sum(1)
        differs = ink[:, None] + ink - 2 * pixels @ pixels.T
        np.fill_diagonal(differs, np.inf)
        assert (differs / np.minimum(ink[:, None], ink)).min() > 0.02, FACES[face]


@pytest.mark.parametrize("same", ["AΑА", "BΒВ", "oοоօ", "eе", "HΗН", "ÄӒ", "ëё", "hһ", "nո", "FϜ", "ФՓ", "IІ"])
def test_look_alikes_are_one_class(glyphs: Glyphs, same: str) -> None:
    assert len({class_of(glyphs, character) for character in same}) == 1


@pytest.mark.parametrize("different", ["oO", "ИЙ", "eé", "ШЩ", "иѝ", "ЙӢ", "şs", "ცძ", "ԱՍ", "öő", "cC", "ЁЕ", "ГҐ"])
def test_different_letters_are_different_classes(glyphs: Glyphs, different: str) -> None:
    assert len({class_of(glyphs, character) for character in different}) == len(different)


def test_merging_makes_no_long_chains(glyphs: Glyphs) -> None:
    assert max(map(len, glyphs.class_names)) <= 5


def test_test_letters_are_not_met_in_training(cache: Path, glyphs: Glyphs) -> None:
    train, test = load_split("glyphs", cache_dir=cache)
    assert len(train) + len(test) == len(glyphs.images)
    assert not set("".join(train.class_names)) & set("".join(test.class_names))
    assert all(glyphs_module.script_of(c) >= 2 for name in test.class_names for c in name)
    assert not set("АоеՕցш" + "язкп") & set("".join(test.class_names))  # those of a class with Latin, those like ᴙɜᴋᴨ
    assert train.super_names == ["Latin", "Greek"]
    assert test.super_names == ["Cyrillic", "Georgian", "Armenian"]


def test_letters_are_seen_askew_within_the_stated_limits(cache: Path, glyphs: Glyphs) -> None:
    upright, seen = glyphs.images.astype(float), askew(glyphs.images)
    assert np.array_equal(seen, askew(glyphs.images))
    assert not np.array_equal(seen, askew(glyphs.images, seed=1))
    assert seen.dtype == np.uint8
    train, test = load_split("glyphs", cache_dir=cache)
    shown = torch.cat([train.images, test.images])[:, 0].numpy()
    assert np.array_equal((shown * 255).round().astype(np.uint8), seen)  # the classes are in the order of the scripts
    inside = (upright[:, [0, -1], :].sum((1, 2)) == 0) & (upright[:, :, :6].sum((1, 2)) == 0)
    inside &= upright[:, :, -6:].sum((1, 2)) == 0  # slim letters, which stay inside the picture
    area = seen[inside].sum((1, 2)) / upright[inside].sum((1, 2))
    assert np.percentile(area, [1, 99]) == pytest.approx([1 / 1.21, 1.21], abs=0.05)
    rows = np.arange(28)
    moved = [(x.sum(2) * rows).sum(1) / x.sum((1, 2)) for x in (seen[inside].astype(float), upright[inside])]
    assert 1.0 < np.abs(moved[0] - moved[1]).max() < 4.0  # two pixels, stretched, and sheared off centre


# --- the cache ---


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, glyphs: Glyphs) -> list[int]:
    """Rendering stands still: it takes what was rendered before, and counts."""
    calls: list[int] = []

    def render_all() -> Glyphs:
        calls.append(1)
        return glyphs

    monkeypatch.setattr(glyphs_module, "_render_all", render_all)
    return calls


def test_a_cache_hit_equals_a_fresh_rendering(cache: Path, glyphs: Glyphs, quick: list[int]) -> None:
    assert_same_glyphs(load_glyphs(cache), glyphs)
    assert not quick
    assert [p.name for p in cache.iterdir()] == [cache_path(cache).name]  # no temporary file left


def test_two_whole_renderings_are_equal(glyphs: Glyphs) -> None:
    assert_same_glyphs(glyphs_module._render_all(), glyphs)


@pytest.mark.parametrize(
    "damage", ["garbage", "truncated", "empty", "flipped", "other arrays", "other labels", "of other versions"]
)
def test_a_cache_that_is_damaged_or_not_ours_is_left_alone_and_done_without(
    tmp_path: Path, cache: Path, glyphs: Glyphs, quick: list[int], damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    path, good = cache_path(tmp_path), cache_path(cache).read_bytes()
    middle = len(good) // 2
    with np.load(cache_path(cache)) as stored:
        arrays = dict(stored)
    if damage == "other arrays":
        np.savez(path, images=glyphs.images)
    elif damage == "other labels":
        np.savez(path, **arrays | {"labels": glyphs.labels[::-1]})
    elif damage == "of other versions":
        other = path.with_name("glyphs-0123456789abcdef.npz")
        glyphs_module._write(other, glyphs)
        other.rename(path)
    else:
        content = {
            "garbage": b"not an archive",
            "truncated": good[:middle],
            "empty": b"",
            "flipped": good[:middle] + bytes(64) + good[middle + 64 :],
        }
        path.write_bytes(content[damage])
    before = path.read_bytes()
    for start in (1, 2):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "rambo_plugins"):
            assert_same_glyphs(load_glyphs(tmp_path), glyphs)
        assert len(quick) == start
        assert "is damaged, or not ours: rendering the letters anew; delete it" in caplog.text
        assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(path.name, before)]
    path.unlink()
    caplog.clear()
    for _ in range(2):
        assert_same_glyphs(load_glyphs(tmp_path), glyphs)
    assert len(quick) == 3
    assert not caplog.text


def test_a_link_to_nothing_in_place_of_the_cache_is_left_alone(tmp_path: Path, quick: list[int]) -> None:
    cache_path(tmp_path).symlink_to(tmp_path / "nowhere")
    load_glyphs(tmp_path)
    assert os.readlink(cache_path(tmp_path)) == str(tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()


def test_a_cache_that_another_process_has_written_meanwhile_stays(
    tmp_path: Path, glyphs: Glyphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render_all() -> Glyphs:
        cache_path(tmp_path).write_bytes(b"theirs")
        return glyphs

    monkeypatch.setattr(glyphs_module, "_render_all", render_all)
    load_glyphs(tmp_path)
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [(cache_path(tmp_path).name, b"theirs")]


def test_a_full_disk_leaves_no_half_cache(
    tmp_path: Path, glyphs: Glyphs, quick: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(file: io.BufferedWriter, **arrays: np.ndarray) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    assert_same_glyphs(load_glyphs(tmp_path), glyphs)
    assert "No space left on device" in caplog.text
    assert not list(tmp_path.iterdir())


def test_no_flipped_byte_gets_through(
    tmp_path: Path, cache: Path, glyphs: Glyphs, quick: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(glyphs_module, "_write", lambda path, glyphs: None)
    good, path, rng = cache_path(cache).read_bytes(), cache_path(tmp_path), np.random.default_rng(0)
    places = [*rng.integers(len(good), size=20), *rng.integers(400, size=15), *(len(good) - rng.integers(1, 700, 15))]
    for place in places:
        path.write_bytes(good[:place] + bytes([good[place] ^ int(rng.integers(1, 256))]) + good[place + 1 :])
        assert_same_glyphs(load_glyphs(tmp_path), glyphs)
    assert len(quick) > 25


def test_a_cache_that_cannot_be_written_only_warns(
    tmp_path: Path, glyphs: Glyphs, quick: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING, "rambo_plugins"):
        assert_same_glyphs(load_glyphs(tmp_path / "file"), glyphs)
    assert "cannot keep" in caplog.text


def test_a_changed_input_changes_the_cache_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = cache_path(tmp_path)
    assert cache_path(tmp_path) == before
    monkeypatch.setattr(glyphs_module, "VERSION", glyphs_module.VERSION + 1)
    assert cache_path(tmp_path) != before


def test_the_default_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_path().parent == tmp_path / "rambo_plugins"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_path().parent == tmp_path / ".cache" / "rambo_plugins"


# --- Omniglot ---


def drawing(seed: int, size: int = 105) -> bytes:
    """A PNG like Omniglot's: one bit, white, with a black square."""
    pixels = np.full((size, size), True)
    pixels[30:60, 10 + seed : 40 + seed] = False
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def write_folder(folder: Path, alphabets: tuple[str, ...]) -> None:
    """Two characters of three drawings an alphabet, and the litter that archives come with."""
    for alphabet in alphabets:
        for character in (1, 2):
            place = folder / alphabet / f"character{character:02}"
            place.mkdir(parents=True)
            for k in range(3):
                (place / f"0001_{k:02}.png").write_bytes(drawing(10 * character + k))
        (folder / alphabet / ".DS_Store").write_text("litter")


def write_zip(path: Path, inner: str, folder: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for file in sorted(folder.rglob("*")):
            if file.is_file():
                archive.write(file, f"{inner}/{file.relative_to(folder)}")
        archive.writestr(f"__MACOSX/{inner}/._x", "litter")


LAYOUTS = ("omniglot zips", "torchvision zips", "folders", "omniglot-py folders", "omniglot-py zips", "all", "all zip")


def write_layout(root: Path, layout: str, scratch: Path) -> None:
    place = root / "omniglot-py" if layout.startswith(("omniglot-py", "all")) else root
    place.mkdir(parents=True)
    parts = {f"images_background_{part}": alphabets for part, alphabets in ALPHABETS.items()}
    if layout.startswith("all"):
        parts = {"images_background": tuple(sorted({a for part in ALPHABETS.values() for a in part}))}
    for inner, alphabets in parts.items():
        if "zip" in layout:
            write_folder(scratch / inner, alphabets)
            name = inner.replace("images_background", "omniglot") if layout == "omniglot zips" else inner
            write_zip(place / f"{name}.zip", inner, scratch / inner)
        else:
            write_folder(place / inner, alphabets)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_omniglot_is_read_in_every_layout(tmp_path: Path, layout: str) -> None:
    write_layout(tmp_path / "root", layout, tmp_path / "scratch")
    train, test = load_split("omniglot", root=tmp_path / "root")
    assert train.super_names == list(ALPHABETS["small1"])
    assert test.super_names == ["Japanese_(katakana)", "Sanskrit", "Tagalog"]
    assert test.class_names[:3] == [
        "Japanese_(katakana)/character01",
        "Japanese_(katakana)/character02",
        "Sanskrit/character01",
    ]
    assert train.labels.tolist() == [k for k in range(10) for _ in range(3)]
    assert train.super_labels.tolist() == [k for k in range(5) for _ in range(6)]


def test_omniglot_ink_is_one_on_zero(tmp_path: Path) -> None:
    write_layout(tmp_path / "root", "folders", tmp_path)
    image, label = load_split("omniglot", root=str(tmp_path / "root"))[0][0]
    assert label == 0
    assert image.shape == (1, 28, 28)
    assert image[0, 12, 8] == 1  # inside the square: rows 30 to 60, columns 20 to 50 of 105
    assert image[0, 0, 0] == 0
    assert image.sum() == pytest.approx((30 / 105 * 28) ** 2, rel=0.02)  # the area is kept


def test_omniglot_thin_strokes_keep_their_area(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_layout(root, "folders", tmp_path)
    folder = root / "images_background_small1" / "Balinese" / "character01"
    for k, file in enumerate(sorted(folder.iterdir())):
        pixels = np.full((105, 105), True)
        pixels[:, 50 + k] = False
        Image.fromarray(pixels).save(file)
    train, _ = load_split("omniglot", root=root)
    assert train.images[:3].sum((1, 2, 3)).tolist() == pytest.approx([28 * 28 / 105] * 3, rel=0.03)


def test_omniglot_errors_name_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--root"):
        load_split("omniglot")
    with pytest.raises(
        FileNotFoundError, match=r"no Omniglot in .*nowhere: expected images_background_small1.*torchvi"
    ):
        load_split("omniglot", root=tmp_path / "nowhere")
    root = tmp_path / "root"
    write_layout(root, "folders", tmp_path)
    korean = root / "images_background_small1" / "Korean"

    png = korean / "character02" / "0001_01.png"
    for content, message in (
        (drawing(0)[:-40], "cannot be read as an image"),
        (b"text", "cannot be read as an image"),
        (drawing(0, size=50), r"got \(50, 50\) pixels, expected 105 × 105"),
    ):
        png.write_bytes(content)
        with pytest.raises(ValueError, match=rf"Korean/character02/0001_01\.png.*{message}"):
            load_split("omniglot", root=root)
    for file in (korean / "character02").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match=r"Korean/character02: a class without images"):
        load_split("omniglot", root=root)
    (korean / "character02").rename(korean / "other")
    for file in (korean / "character01").iterdir():
        file.unlink()
    (korean / "character01").rename(korean / "another")
    with pytest.raises(ValueError, match=r"Korean: an alphabet without characters"):
        load_split("omniglot", root=root)
    korean.rename(korean.with_name("Elvish"))
    with pytest.raises(ValueError, match=r"expected one folder named like Korean, got Balinese, .*Elvish"):
        load_split("omniglot", root=root)


def test_drawings_of_16_bits_have_half_the_ink_at_half_the_grey(tmp_path: Path) -> None:
    write_layout(tmp_path / "root", "folders", tmp_path)
    before = load_split("omniglot", root=tmp_path / "root")[0].images
    for file in (tmp_path / "root").rglob("*.png"):
        grey = np.where(np.asarray(Image.open(file)), 65535, 65535 - 102 * 257).astype(np.uint16)
        Image.fromarray(grey).save(file)
    after = load_split("omniglot", root=tmp_path / "root")[0].images
    assert (after - before * 102 / 255).abs().max() < 1.5 / 255


def test_an_omniglot_of_other_counts_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_layout(tmp_path / "root", "folders", tmp_path)
    load_split("omniglot", root=tmp_path / "root")
    assert "10 characters of 3 to 3 drawings, but Omniglot has 136 of 20 in these alphabets" in caplog.text
    assert "6 characters of 3 to 3 drawings, but Omniglot has 106 of 20 in these alphabets" in caplog.text


def test_damage_inside_an_omniglot_archive_is_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_layout(root, "omniglot zips", tmp_path / "scratch")
    archive, file = root / "omniglot_small1.zip", b"Balinese/character01/0001_00.png"
    with zipfile.ZipFile(archive) as whole:
        names = {name: whole.read(name) for name in whole.namelist()}
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as deflated:
        for name, content in names.items():
            deflated.writestr(name, content)
    good = archive.read_bytes()
    start = good.index(file) + len(file)
    for place in range(start, start + 60, 7):
        archive.write_bytes(good[:place] + bytes([good[place] ^ 255]) + good[place + 1 :])
        with pytest.raises(ValueError, match=r"Balinese/character01/0001_00\.png is damaged: (Bad CRC-32|Error -3)"):
            load_split("omniglot", root=root)


def test_a_damaged_omniglot_archive_is_named(tmp_path: Path) -> None:
    root = tmp_path / "root"
    write_layout(root, "omniglot zips", tmp_path / "scratch")
    archive = root / "omniglot_small2.zip"
    archive.write_bytes(archive.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"omniglot_small2\.zip is damaged"):
        load_split("omniglot", root=root)
    with zipfile.ZipFile(archive, "w") as empty:
        empty.writestr("readme.txt", "no images")
    with pytest.raises(ValueError, match=r"omniglot_small2\.zip: expected one folder images_background…, got 0"):
        load_split("omniglot", root=root)


@pytest.mark.skipif(not os.environ.get("RAMBO_OMNIGLOT"), reason="RAMBO_OMNIGLOT names no folder with Omniglot")
def test_the_real_omniglot() -> None:
    train, test = load_split("omniglot", root=os.environ["RAMBO_OMNIGLOT"])
    for side, classes in ((train, 136), (test, 106)):
        assert len(side.class_names) == classes
        assert side.labels.bincount().tolist() == [20] * classes
        assert 0.02 < side.images.mean() < 0.2  # strokes on an empty ground
        assert (side.images.amax((1, 2, 3)) > 0.5).all()
    assert [len(OMNIGLOT[k][0]) for k in (0, 1)] == [len(train.super_names), len(test.super_names)]


# --- every data set ---


@pytest.mark.parametrize("name", ["glyphs", "digits"])
def test_the_two_sides_are_datasets_of_other_classes(cache: Path, name: str) -> None:
    sides = load_split(name, cache_dir=cache)
    assert not set(sides[0].class_names) & set(sides[1].class_names)
    for side in sides:
        image, label = side[len(side) - 1]
        assert image.shape == (1, 28, 28)
        assert image.dtype == side.images.dtype == torch.float32
        assert label == int(side.labels[-1])
        assert side.images.min() == 0
        assert side.images.max() == 1
        assert side.labels.dtype == side.super_labels.dtype == torch.int64
        assert side.labels.unique().tolist() == list(range(len(side.class_names)))
        assert len(side) == len(side.images) == len(side.super_labels)


def test_digits_are_split_by_digit() -> None:
    train, test = load_split("digits")
    assert (train.class_names, test.class_names) == (list("01234"), list("56789"))
    assert len(train) + len(test) == 1797


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ValueError, match="unknown data set 'mnist': expected one of glyphs, omniglot, digits"):
        load_split("mnist")
    assert SPLITS == ("glyphs", "omniglot", "digits")


def test_the_digest_of_a_side_is_that_of_images_labels_and_names() -> None:
    images, numbers, supers = np.zeros((3, 28, 28), np.uint8), np.array([0, 1, 1]), np.zeros(3, np.int64)
    dot = images.copy()
    dot[2, 5, 5] = 1

    def digest(images: np.ndarray, numbers: np.ndarray, names: str = "ab", super_name: str = "c") -> str:
        return ImageClasses(images, numbers, list(names), supers, [super_name]).digest

    others = {
        digest(dot, numbers),
        digest(images, np.array([0, 0, 1])),
        digest(images, numbers, names="ac"),
        digest(images, numbers, super_name="d"),
    }
    assert digest(images, numbers) == digest(images.copy(), numbers.copy())
    assert len(others | {digest(images, numbers)}) == 5


def test_image_classes_checks_its_input() -> None:
    images, zeros = np.zeros((2, 28, 28), np.uint8), np.zeros(2, np.int64)
    with pytest.raises(ValueError, match=r"got float32 of \(2, 28, 28\), expected uint8 of \(N, 28, 28\)"):
        ImageClasses(images.astype(np.float32), zeros, ["a"], zeros, ["b"])
    with pytest.raises(ValueError, match="got 1 and 2 for 2 images"):
        ImageClasses(images, zeros[:1], ["a"], zeros, ["b"])
