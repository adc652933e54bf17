"""Readers of the real file formats, on small files made here; images; and each data set's protocol against loops."""

import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, Subset

from rambo_plugins.evaluation import recall_at_k
from rambo_plugins.pml import datasets
from rambo_plugins.pml.datasets import (
    COUNTS,
    KS,
    RetrievalImages,
    check_images,
    load_images,
    read_cub,
    read_folders,
    read_inshop,
    read_sop,
    test_transform,
    train_transform,
)

SIDE = 16


def save_image(path, colours, size=(SIDE, SIDE)):
    """An image of four quadrants, colours (2, 2, 3)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tiny = Image.fromarray(np.asarray(colours, np.uint8).reshape(2, 2, 3))
    tiny.resize(size, Image.Resampling.NEAREST).save(path, quality=95)


class Painter:
    """Images that are like those of their class, some more, some less."""

    def __init__(self, seed=0, spread=60):
        self.generator = np.random.default_rng(seed)
        self.spread = spread
        self.centres = {}

    def paint(self, path, label):
        centre = self.centres.setdefault(label, self.generator.integers(40, 216, (2, 2, 3)))
        noise = self.generator.normal(0, self.spread, (2, 2, 3))
        save_image(path, (centre + noise).clip(0, 255))


SOP_HEADER = "image_id class_id super_class_id path"


def sop_rows(first_image, classes, images_per_class):
    rows = []
    for label in classes:
        super_id, name = [(1, "bicycle_final"), (2, "cabinet_final"), (12, "toaster_final")][label % 3]
        for number in range(images_per_class):
            image_id = first_image + len(rows)
            rows.append((image_id, label, super_id, f"{name}/1110{label:08d}_{number}.JPG"))
    return rows


def write_sop_list(path, rows, header=SOP_HEADER):
    path.write_text("\n".join([header, *(" ".join(map(str, row)) for row in rows)]) + "\n")


@pytest.fixture
def sop(tmp_path):
    """8 training classes, 10 test classes of 4 images; the test list goes on with the numbers, as the real one does."""
    root = tmp_path / "Stanford_Online_Products"
    painter = Painter()
    train, test = sop_rows(1, range(1, 9), 4), sop_rows(33, range(11319, 11329), 4)
    for row in train + test:
        painter.paint(root / row[3], row[1])
    write_sop_list(root / "Ebay_train.txt", train)
    write_sop_list(root / "Ebay_test.txt", test)
    return root, train, test


IN_SHOP_HEADER = "image_name item_id evaluation_status    "


def inshop_row(category, item, number, status):
    return f"img/{category}/id_{item:08d}/{number:02d}_1_front.jpg", f"id_{item:08d}", status


def inshop_rows():
    categories = ["WOMEN/Dresses", "MEN/Denim", "WOMEN/Blouses_Shirts"]
    rows = []
    for item in range(1, 7):
        rows += [inshop_row(categories[item % 3], item, number, "train") for number in range(1, 5)]
    for item in range(40, 49):
        category = categories[item % 2]  # no test item is of the last category
        statuses = ["query", "gallery", "query", "gallery", "gallery"]
        rows += [inshop_row(category, item, number, status) for number, status in enumerate(statuses, 1)]
    rows += [inshop_row(categories[0], 39, number, "gallery") for number in (1, 2)]  # which no query looks for
    np.random.default_rng(3).shuffle(rows)
    return [tuple(row) for row in rows]


def write_inshop_list(path, rows, header=IN_SHOP_HEADER, count=None):
    """Padded with spaces to columns, as the real list is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [str(len(rows) if count is None else count), header]
    lines += [f"{row[0]:<72} {row[1]:<14} {' '.join(row[2:]):<8}" for row in rows]
    path.write_text("\n".join(lines) + "\n")


@pytest.fixture
def inshop(tmp_path):
    root = tmp_path / "inshop"
    painter, rows = Painter(1), inshop_rows()
    for name, item, _ in rows:
        painter.paint(root / "Img" / name, item)
    write_inshop_list(root / "Eval" / "list_eval_partition.txt", rows)
    return root, rows


@pytest.fixture
def cub(tmp_path):
    """Classes 1, 2, 100 for training and 101, 102, 200 for the test."""
    root = tmp_path / "CUB_200_2011"
    painter, rows = Painter(2), []
    for label in (1, 2, 100, 101, 102, 200):
        for number in range(6):
            rows.append((len(rows) + 1, f"{label:03d}.Some_Bird/Some_Bird_{number:04d}_{label}.jpg", label))
    for _, name, label in rows:
        painter.paint(root / "images" / name, label)
    (root / "images.txt").write_text("".join(f"{i} {name}\n" for i, name, _ in rows))
    (root / "image_class_labels.txt").write_text("".join(f"{i} {label}\n" for i, _, label in rows))
    (root / "train_test_split.txt").write_text("".join(f"{i} {i % 2}\n" for i, _, _ in rows))  # another protocol's
    return root, rows


def relative(dataset, folder):
    return [os.path.relpath(path, folder).replace(os.sep, "/") for path in dataset.paths]


def by_name(dataset):
    """(path's name, class name, super name) of each image."""
    names = [dataset.class_names[label] for label in dataset.labels]
    supers = dataset.super_labels
    super_names = [None] * len(names) if supers is None else [dataset.super_names[s] for s in supers]
    return list(zip([os.path.basename(path) for path in dataset.paths], names, super_names, strict=True))


def numbered_from_zero(*all_labels):
    numbers = sorted(set(torch.cat(all_labels).tolist()))
    return numbers == list(range(len(numbers)))


# Reading


class TestSOP:
    def test_every_row_is_an_image_of_its_class_and_super_class_the_first_row_too(self, sop):
        root, *lists = sop
        for dataset, rows in zip(read_sop(root), lists, strict=True):
            assert relative(dataset, root) == [row[3] for row in rows]
            expected = [(os.path.basename(row[3]), str(row[1]), row[3].split("/")[0]) for row in rows]
            assert by_name(dataset) == expected

    def test_classes_count_from_zero_in_each_split_and_super_classes_mean_the_same_in_both(self, sop):
        train, test = read_sop(sop[0])
        assert numbered_from_zero(train.labels)
        assert numbered_from_zero(test.labels)
        assert train.labels.dtype == train.super_labels.dtype == torch.int64
        assert train.super_names == test.super_names == ["bicycle_final", "cabinet_final", "toaster_final"]

    def test_the_root_may_be_the_folder_above(self, sop):
        assert read_sop(sop[0].parent)[1].paths == read_sop(sop[0])[1].paths

    def test_training_images_are_augmented_and_test_images_are_not(self, sop):
        train, test = read_sop(sop[0])
        assert "RandomCrop" in str(train.transform)
        assert "Random" not in str(test.transform)
        assert "CenterCrop" in str(test.transform)

    @pytest.mark.parametrize(
        ("damage", "error", "message"),
        [
            (lambda r: write_sop_list(r / "Ebay_test.txt", [(1, 20000, 1, "bicycle_final/a.JPG")], "id class path"),
             ValueError, r"Ebay_test.txt, line 1: expected the header image_id class_id super_class_id path, got 'id"),
            (lambda r: (r / "Ebay_test.txt").write_text(""), ValueError, "line 1: expected the header"),
            (lambda r: (r / "Ebay_train.txt").write_bytes(b"\x89PNG\xff\x00"), ValueError, "Ebay_train.txt, line 1"),
            (lambda r: (r / "Ebay_train.txt").write_text(SOP_HEADER + "\n"), ValueError, "expected rows of .*, got no"),
            (lambda r: (r / "Ebay_train.txt").write_text(f"{SOP_HEADER}\n1 1 1 a.JPG\n2 1 b.JPG\n"),
             ValueError, r"Ebay_train.txt, line 3: expected 4 columns, .*, got '2 1 b.JPG'"),
            (lambda r: (r / "Ebay_train.txt").write_text(f"{SOP_HEADER}\n1 one 1 a.JPG\n"),
             ValueError, "Ebay_train.txt, line 2: class_id: expected an integer such as 12, got 'one'"),
            (lambda r: (r / "Ebay_train.txt").write_text(f"{SOP_HEADER}\n1 1_0 1 a.JPG\n"),
             ValueError, "line 2: class_id: expected an integer such as 12, got '1_0'"),
            (lambda r: (r / "Ebay_train.txt").write_text(f"{SOP_HEADER}\n1 1 1 a.JPG\n\n2 1 1 b.JPG\n"),
             ValueError, "line 3: expected 4 columns, .*, got ''"),
            (lambda r: (r / "Ebay_train.txt").write_text(f"\ufeff{SOP_HEADER}\n1 1 1 a.JPG\n"),
             ValueError, r"line 1: expected the header .*, got '.ufeffimage_id"),
            (lambda r: (r / "Ebay_train.txt").write_bytes(f"{SOP_HEADER}\n1 1 1 é.JPG\n".encode("latin-1")),
             ValueError, "line 2: expected text in UTF-8"),
            (lambda r: (r / "Ebay_test.txt").unlink(), FileNotFoundError, "no Ebay_test.txt in .*: extract Stanford"),
            (lambda r: (r / "Ebay_train.txt").rename(r / "train.txt"),
             FileNotFoundError, "no Ebay_train.txt or Stanford_Online_Products/Ebay_train.txt in .*: extract Stan"),
            (lambda r: (r / "Ebay_test.txt").write_bytes((r / "Ebay_train.txt").read_bytes()),
             ValueError, "expected other classes in the test than in training, but 1 is in both"),
        ],
    )  # fmt: skip
    def test_a_damaged_list_is_named_with_what_was_expected(self, sop, damage, error, message):
        damage(sop[0])
        with pytest.raises(error, match=message):
            read_sop(sop[0])

    def test_an_image_in_two_rows_is_refused(self, sop):
        root, train, _ = sop
        write_sop_list(root / "Ebay_train.txt", [*train, (99, 8, *train[0][2:])])
        with pytest.raises(ValueError, match=f"expected each image in one row, got {train[0][3]} in several"):
            read_sop(root)

    def test_super_classes_whose_numbers_and_folders_differ_are_refused(self, sop):
        root, train, _ = sop
        write_sop_list(root / "Ebay_train.txt", [(*train[0][:2], 12, train[0][3]), *train[1:]])
        with pytest.raises(ValueError, match="the images of 12 in one folder, got them in cabinet_final and toaster"):
            read_sop(root)

    def test_missing_images_are_counted_and_five_are_named(self, sop):
        root, train, _ = sop
        for row in train[:7]:
            (root / row[3]).unlink()
        with pytest.raises(
            FileNotFoundError, match=r"7 of 72 images are not in .*Stanford_Online_Products.zip"
        ) as caught:
            read_sop(root)
        assert [row[3] in str(caught.value) for row in train[:7]] == [True] * 5 + [False] * 2

    def test_counts_that_are_not_the_published_ones_are_logged(self, sop, caplog):
        with caplog.at_level(logging.WARNING, "rambo_plugins"):
            read_sop(sop[0])
        assert [record.levelname for record in caplog.records] == ["WARNING"] * 2
        assert "train of sop has 32 images of 8 classes" in caplog.text
        assert "results are published 60502 of 11316" in caplog.text

    def test_the_published_counts_are_not_logged(self, sop, caplog, monkeypatch):
        monkeypatch.setitem(COUNTS, "sop", {"train": (32, 8), "test": (40, 10)})
        with caplog.at_level(logging.WARNING, "rambo_plugins"):
            read_sop(sop[0])
        assert not caplog.records


class TestInShop:
    def test_every_row_is_an_image_of_its_split_the_first_row_too(self, inshop):
        root, rows = inshop
        for dataset, split in zip(read_inshop(root), ("train", "query", "gallery"), strict=True):
            own = [row for row in rows if row[2] == split]
            assert relative(dataset, root / "Img") == [row[0] for row in own]
            expected = [(os.path.basename(row[0]), row[1], "/".join(row[0].split("/")[1:3])) for row in own]
            assert by_name(dataset) == expected

    def test_query_and_gallery_share_their_numbers_and_training_has_its_own(self, inshop):
        train, query, gallery = read_inshop(inshop[0])
        assert query.class_names == gallery.class_names
        assert not set(train.class_names) & set(query.class_names)
        assert numbered_from_zero(train.labels)
        assert numbered_from_zero(query.labels, gallery.labels)
        assert train.super_names == query.super_names == ["MEN/Denim", "WOMEN/Blouses_Shirts", "WOMEN/Dresses"]

    @pytest.mark.parametrize("layout", ["flat", "benchmark"])
    def test_the_list_and_the_images_are_found_where_the_archives_put_them(self, inshop, layout):
        root, _ = inshop
        expected = [os.path.basename(path) for path in read_inshop(root)[0].paths]
        if layout == "flat":
            (root / "Img" / "img").rename(root / "img")
            (root / "Eval" / "list_eval_partition.txt").rename(root / "list_eval_partition.txt")
        else:
            root = root.rename(root.parent / "In-shop Clothes Retrieval Benchmark").parent
        assert [os.path.basename(path) for path in read_inshop(root)[0].paths] == expected

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"count": 70}, "line 1 says '70' images, but 71 follow"),
            ({"count": "image_name"}, "line 1 says 'image_name' images, but 71 follow"),
            ({"header": "image_name item_id"}, "line 2: expected the header image_name item_id evaluation_status, got"),
            ({"rows": [("img/MEN/Denim/id_00000001/01.jpg", "id_00000001")]}, "line 3: expected 3 columns, image_name"),
            ({"rows": [("img/MEN/Denim/id_00000001/01.jpg", "id_00000001", "val")]},
             "line 3: evaluation_status: expected train, query or gallery, got val"),
            ({"rows": [("img/id_00000001/01.jpg", "id_00000001", "train")]}, "line 3: image_name: expected img/<ge"),
        ],
    )  # fmt: skip
    def test_a_damaged_list_is_named_with_what_was_expected(self, inshop, change, message):
        root, rows = inshop
        write_inshop_list(root / "Eval" / "list_eval_partition.txt", **{"rows": rows, **change})
        with pytest.raises(ValueError, match=f"list_eval_partition.txt.*{message}"):
            read_inshop(root)

    def test_a_truncated_list_is_refused(self, inshop):
        path = inshop[0] / "Eval" / "list_eval_partition.txt"
        path.write_text("\n".join(path.read_text().splitlines()[:-1]) + "\n")
        with pytest.raises(ValueError, match="line 1 says '71' images, but 70 follow"):
            read_inshop(inshop[0])

    def test_an_item_in_training_and_test_is_refused(self, inshop):
        root, rows = inshop
        rows = [(name, item, "train" if name.endswith("01_1_front.jpg") else status) for name, item, status in rows]
        write_inshop_list(root / "Eval" / "list_eval_partition.txt", rows)
        with pytest.raises(ValueError, match="id_00000039 is in both"):
            read_inshop(root)

    def test_a_split_without_images_is_refused(self, inshop):
        root, rows = inshop
        rows = [row for row in rows if row[2] != "query"]
        write_inshop_list(root / "Eval" / "list_eval_partition.txt", rows)
        with pytest.raises(ValueError, match="expected images of the split query, got none"):
            read_inshop(root)

    def test_images_that_were_not_extracted_are_asked_for(self, inshop):
        (inshop[0] / "Img" / "img").rename(inshop[0] / "Img" / "images")
        with pytest.raises(FileNotFoundError, match=r"no img or Img/img or .* in .*: put .* the extracted img.zip"):
            read_inshop(inshop[0])


class TestCUB:
    def test_classes_to_100_are_for_training_whatever_the_other_split_file_says(self, cub):
        root, rows = cub
        for dataset, own in zip(
            read_cub(root), ([r for r in rows if r[2] <= 100], [r for r in rows if r[2] > 100]), strict=True
        ):
            assert relative(dataset, root / "images") == [row[1] for row in own]
            assert by_name(dataset) == [(os.path.basename(r[1]), os.path.dirname(r[1]), None) for r in own]
            assert dataset.labels.tolist() == [i // 6 for i in range(18)]
            assert dataset.super_labels is None

    def test_labels_go_by_the_image_id_not_by_the_line(self, cub):
        root, rows = cub
        (root / "image_class_labels.txt").write_text("".join(f"{i} {label}\n" for i, _, label in reversed(rows)))
        train, test = read_cub(root)
        assert train.labels.tolist() == test.labels.tolist() == [i // 6 for i in range(18)]

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda lines: lines[:-1], "expected each image_id of images.txt once, and no other"),
            (lambda lines: [*lines[:-1], lines[0]], "expected each image_id of images.txt once, and no other"),
            (lambda lines: [*lines[:-1], "36 201"], "line 36: class_id: expected 1 to 200, got 201"),
            (lambda lines: [*lines[:-1], "36 0"], "line 36: class_id: expected 1 to 200, got 0"),
            (lambda lines: [*lines[:-1], "36"], "line 36: expected 2 columns, image_id class_id, got '36'"),
            *[
                (
                    lambda lines, text=text: [*lines[:-1], f"36 {text}"],
                    "line 36: class_id: expected an integer such as 12",
                )
                for text in ("x", "2_0_0", "+200", "0200", "٢٠٠", "nan", "200.0", "9" * 19)
            ],
        ],
    )
    def test_a_damaged_list_is_named_with_what_was_expected(self, cub, change, message):
        path = cub[0] / "image_class_labels.txt"
        path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")
        with pytest.raises(ValueError, match=f"image_class_labels.txt.*{message}"):
            read_cub(cub[0])

    def test_a_class_with_images_in_two_folders_is_refused(self, cub):
        path = cub[0] / "image_class_labels.txt"
        path.write_text(path.read_text().replace("1 1\n", "1 2\n", 1))
        with pytest.raises(ValueError, match=r"the images of 2 in one folder, got them in 001.Some_Bird and 002.Some_"):
            read_cub(cub[0])

    def test_lists_with_line_ends_of_windows_are_the_same(self, cub):
        expected = [(data.paths, data.labels.tolist()) for data in read_cub(cub[0])]
        for name in ("images.txt", "image_class_labels.txt"):
            (cub[0] / name).write_bytes((cub[0] / name).read_bytes().replace(b"\n", b"\r\n"))
        assert [(data.paths, data.labels.tolist()) for data in read_cub(cub[0])] == expected

    def test_a_missing_list_is_asked_for(self, cub):
        (cub[0] / "image_class_labels.txt").unlink()
        with pytest.raises(FileNotFoundError, match=r"no image_class_labels.txt in .*: extract CUB_200_2011.tgz"):
            read_cub(cub[0].parent)


class TestFolders:
    @pytest.fixture
    def root(self, tmp_path):
        painter = Painter()
        for label in ["ant", "bee", "cow", "dog", "eel"]:
            for number in range(3):
                painter.paint(tmp_path / "own" / label / f"{number}.{['jpg', 'PNG', 'jpeg'][number]}", label)
        return tmp_path / "own"

    def test_classes_are_split_by_the_seed_the_odd_one_goes_to_training(self, root):
        train, test = read_folders(root)
        assert (len(train), len(test)) == (9, 6)
        assert sorted(train.class_names + test.class_names) == ["ant", "bee", "cow", "dog", "eel"]
        for dataset in (train, test):
            assert numbered_from_zero(dataset.labels)
            folders = [os.path.basename(os.path.dirname(path)) for path in dataset.paths]
            assert [dataset.class_names[label] for label in dataset.labels] == folders
        assert read_folders(root)[0].paths == train.paths
        assert len({tuple(read_folders(root, split_seed=seed)[0].class_names) for seed in range(8)}) > 2

    def test_folders_train_and_test_are_the_splits(self, root):
        for label in ["ant", "bee", "cow", "dog", "eel"]:
            side = "train" if label in ("bee", "eel") else "test"
            (root / side).mkdir(exist_ok=True)
            (root / label).rename(root / side / label)
        train, test = read_folders(root)
        assert train.class_names == ["bee", "eel"]
        assert test.class_names == ["ant", "cow", "dog"]
        assert len(train) + len(test) == 15

    def test_a_relative_root_is_one_from_here(self, root, monkeypatch):
        monkeypatch.chdir(root.parent)
        for one in ("own", Path("own")):
            train, test = read_folders(one)
            images = [dataset[0][0] for dataset in (train, test)]
            assert [image.shape for image in images] == [(3, 224, 224)] * 2
            assert all(path.startswith(f"own{os.sep}") for path in train.paths + test.paths)

    def test_classes_in_train_and_test_are_logged(self, root, caplog):
        (root / "train").mkdir()
        for label in ["ant", "bee", "cow", "dog", "eel"]:
            (root / label).rename(root / "train" / label)
        Painter().paint(root / "test" / "cow" / "9.jpg", "cow")
        with caplog.at_level(logging.WARNING, "rambo_plugins"):
            _, test = read_folders(root)
        assert "1 classes are in train and in test" in caplog.text
        assert test.class_names == ["cow"]

    def test_folders_above_the_classes_are_super_classes(self, root):
        (root / "insects").mkdir()
        (root / "others").mkdir()
        for label in ["ant", "bee", "cow", "dog", "eel"]:
            (root / label).rename(root / ("insects" if label in ("ant", "bee") else "others") / label)
        train, test = read_folders(root)
        assert train.super_names == ["insects", "others"]
        for dataset in (train, test):
            for _, class_name, super_name in by_name(dataset):
                assert class_name.split("/")[0] == super_name

    def test_hidden_names_and_other_files_are_left_out_and_counted_in_one_line(self, root, caplog):
        before = [dataset.paths for dataset in read_folders(root)]
        assert not caplog.records
        for name in ("notes.txt", "5.gif", "a.heic", "b\nc"):
            (root / "ant" / name).write_text("no image")
        (root / "ant" / "._0.jpg").write_text("no image")
        Painter().paint(root / ".cache" / "0.jpg", 0)
        (root / "fox").mkdir()
        os.mkfifo(root / "ant" / "pipe.png")
        assert [dataset.paths for dataset in read_folders(root)] == before
        (record,) = caplog.records
        assert record.getMessage() == (
            f"{root}: left out 2 hidden ('.cache', 'ant/._0.jpg'); 4 not named as images ('ant/5.gif', 'ant/a.heic', "
            "'ant/b\\nc', …); 1 neither files nor folders ('ant/pipe.png'); 1 folders without images ('fox')"
        )

    def test_what_is_beside_train_and_test_is_said(self, root, caplog):
        for side, label in (("train", "ant"), ("test", "bee"), ("val", "cow")):
            (root / side).mkdir()
            (root / label).rename(root / side / label)
        for label in ("dog", "eel"):
            (root / label).rename(root / "train" / label)
        train, test = read_folders(root)
        assert (train.class_names, test.class_names) == (["ant", "dog", "eel"], ["bee"])
        assert "left out 1 beside train and test ('val')" in caplog.text

    def test_classes_and_images_that_are_links_are_read_as_if_they_were_there(self, root, tmp_path):
        expected = [dataset.class_names for dataset in read_folders(root)]
        (root / "cow").rename(tmp_path / "store")
        (root / "cow").symlink_to(tmp_path / "store")
        (root / "eel" / "0.jpg").rename(tmp_path / "picture.jpg")
        (root / "eel" / "0.jpg").symlink_to(tmp_path / "picture.jpg")
        found = read_folders(root)
        assert [dataset.class_names for dataset in found] == expected
        assert sum(len(dataset) for dataset in found) == 15

    def test_broken_links_are_named(self, root):
        (root / "fox").symlink_to(root / "nowhere")
        (root / "ant" / "9.jpg").symlink_to(root / "nowhere.jpg")
        with pytest.raises(FileNotFoundError, match=r"2 links to what is not there \('ant/9.jpg', 'fox'\)"):
            read_folders(root)

    @pytest.mark.parametrize("target", ["ant", "."])
    def test_a_folder_that_is_there_twice_is_refused_and_a_loop_too(self, root, target):
        (root / "bee" / "again").symlink_to(root / target)
        with pytest.raises(ValueError, match=r"own/bee/again is the folder .* again, by a link"):
            read_folders(root)

    @pytest.mark.parametrize("name", [b"a\nb.png", b"a\xff.png", "a\u2028b.png".encode(), b"a\rb.png"])
    def test_names_that_cannot_stand_in_a_list_are_refused(self, root, name):
        Image.new("RGB", (8, 8)).save(root / "new.png")
        (root / "new.png").rename(os.fsdecode(os.path.join(os.fsencode(root), b"ant", name)))
        with pytest.raises(ValueError, match=r"own/ant/a.*png': a name .* cannot stand in a list") as caught:
            read_folders(root)
        str(caught.value).encode()
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize(
        ("change", "error", "message"),
        [
            (lambda root: Painter().paint(root / "0.jpg", 0), ValueError, "expected all images of"),
            (lambda root: Painter().paint(root / "zoo" / "yak" / "0.jpg", 0), ValueError, "or all as <super class>/"),
            (lambda root: Painter().paint(root / "train" / "yak" / "0.jpg", 0), FileNotFoundError, "has train: expect"),
            (lambda root: [(root / name).rename(root.parent / name) for name in ("bee", "cow", "dog", "eel")],
             ValueError, "expected at least two classes, some for training and some for the test, got one"),
            (lambda root: [(root / side).mkdir() or (root / label).rename(root / side / label)
                           for side, label in (("Train", "ant"), ("Test", "bee"))],
             ValueError, "expected train and test in lower case, got Test, Train, cow, dog, eel"),
            (lambda root: [(root / side).mkdir(parents=True) or (root / label).rename(root / side / label)
                           for side, label in (("train", "ant"), ("test/insects", "bee"))],
             ValueError, "expected super classes in both train and test, or in neither"),
            (lambda root: root.rename(root.parent / "away"),
             FileNotFoundError, "own: expected a folder with <class>/<image> in"),
        ],
    )  # fmt: skip
    def test_what_cannot_be_split_is_refused(self, root, change, error, message):
        change(root)
        with pytest.raises(error, match=message):
            read_folders(root)


def test_load_images_names_the_splits(sop, inshop, cub, tmp_path):
    assert list(load_images("sop", sop[0])) == ["train", "test"]
    splits = load_images("inshop", inshop[0])
    assert {name: len(dataset) for name, dataset in splits.items()} == {"train": 24, "query": 18, "gallery": 29}
    assert list(load_images("cub", cub[0])) == ["train", "test"]
    assert list(load_images("folder", cub[0] / "images")) == ["train", "test"]
    with pytest.raises(ValueError, match="unknown data set 'inshop2': expected one of sop, inshop, cub, folder"):
        load_images("inshop2", tmp_path)


@pytest.mark.parametrize("name", list(COUNTS))
def test_the_real_lists_have_the_published_counts(name):
    """Set RAMBO_SOP_ROOT, RAMBO_INSHOP_ROOT or RAMBO_CUB_ROOT to the folder of the real data set."""
    root = os.environ.get(f"RAMBO_{name.upper()}_ROOT")
    if root is None:
        pytest.skip(f"RAMBO_{name.upper()}_ROOT is not set")
    splits = load_images(name, root)
    assert {split: (len(data), len(data.labels.unique())) for split, data in splits.items()} == COUNTS[name]
    supers = splits["train"].super_labels
    assert (None if supers is None else len(supers.unique())) == {"sop": 12, "inshop": 23, "cub": None}[name]


# Images


@pytest.fixture
def images(tmp_path):
    """12 images of 4 classes, 40 × 32 pixels of noise, so that any two crops differ."""
    generator = np.random.default_rng(0)
    paths = [tmp_path / f"{i}.png" for i in range(12)]
    for path in paths:
        Image.fromarray(generator.integers(0, 256, (40, 32, 3), np.uint8)).save(path)
    return RetrievalImages(paths, [i // 3 for i in range(12)], transform=train_transform(24, 32), seed=5)


BATCHES = [[0, 3, 7], [1, 3, 3], [11, 2, 5], [0, 3, 7]]


def epoch_of(dataset, epoch, num_workers=0, batches=BATCHES):
    dataset.set_epoch(epoch)
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=num_workers)
    return [pixels for pixels, _ in loader]


class TestRandomness:
    def test_augmentation_does_not_depend_on_workers_or_on_the_global_generator(self, images):
        alone = epoch_of(images, 3)
        torch.manual_seed(99)
        for workers in (1, 2):
            assert all(map(torch.equal, alone, epoch_of(images, 3, workers)))

    def test_a_resumed_epoch_sees_the_same_images(self, images):
        whole = epoch_of(images, 3)
        rest = epoch_of(images, 3, batches=BATCHES[2:])
        assert all(map(torch.equal, whole[2:], rest))

    def test_epochs_seeds_batches_and_places_in_the_batch_differ(self, images):
        first = epoch_of(images, 3)
        assert not torch.equal(first[0], epoch_of(images, 4)[0])
        assert not torch.equal(first[0][1], first[1][1])  # image 3 in two batches
        assert not torch.equal(first[1][1], first[1][2])  # image 3 twice in one
        images.seed = 6
        assert not torch.equal(first[0], epoch_of(images, 3)[0])

    def test_neither_reading_nor_a_failure_moves_the_global_generator(self, images, tmp_path):
        torch.manual_seed(1)
        expected = torch.rand(3)
        torch.manual_seed(1)
        images[0]
        images.transform = lambda image: torch.rand(1) / 0 if image is None else [][0]
        with pytest.raises(IndexError):
            images[0]
        assert torch.equal(torch.rand(3), expected)

    def test_cuda_generators_are_left_alone(self, images, monkeypatch):
        def refuse(seed):
            raise AssertionError(seed)

        monkeypatch.setattr(torch.cuda, "manual_seed_all", refuse)
        images[0]

    def test_one_image_is_a_batch_of_one_and_subsets_pass_batches_on(self, images):
        pixels, label = images[4]
        assert label == 1
        assert type(label) is int
        assert torch.equal(pixels, images.__getitems__([4])[0][0])
        of_subset = Subset(images, [7, 3, 0]).__getitems__([2, 1, 0])
        assert all(map(torch.equal, epoch_of(images, 0)[0], [pixels for pixels, _ in of_subset]))


class TestImages:
    def test_pixels_are_those_of_the_file_normalised(self, tmp_path):
        save_image(tmp_path / "a.png", [[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (255, 255, 255)]], (8, 8))
        dataset = RetrievalImages([tmp_path / "a.png"], [0], transform=test_transform(8, 8))
        pixels = dataset[0][0]
        assert type(pixels) is torch.Tensor
        assert pixels.dtype == torch.float32
        mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
        for (row, column), colour in {(0, 0): [1, 0, 0], (0, 7): [0, 1, 0], (7, 0): [0, 0, 1]}.items():
            torch.testing.assert_close(pixels[:, row, column], (torch.tensor(colour) - mean) / std)

    def test_images_of_16_bits_keep_what_they_show(self, tmp_path):
        pixels = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
        Image.fromarray(pixels).save(tmp_path / "a.png")
        dataset = RetrievalImages([tmp_path / "a.png"], [0], transform=test_transform(8, 8))
        shown = dataset[0][0][1] * 0.224 + 0.456
        assert (shown * 65535 - torch.from_numpy(pixels.astype(np.float32))).abs().max() < 260  # a 255th

    def test_grey_transparent_palette_and_cmyk_images_become_rgb(self, tmp_path):
        paths = []
        for mode, suffix in [("L", "png"), ("RGBA", "png"), ("P", "png"), ("CMYK", "jpg"), ("1", "png")]:
            paths.append(tmp_path / f"{mode}.{suffix}")
            Image.new(mode, (20, 20)).save(paths[-1])
        dataset = RetrievalImages(paths, range(5), transform=test_transform(8, 8))
        assert [dataset[i][0].shape for i in range(5)] == [(3, 8, 8)] * 5

    def test_the_orientation_of_the_camera_is_ignored(self, tmp_path):
        colours = [[(255, 0, 0), (0, 255, 0)], [(0, 0, 255), (255, 255, 255)]]
        save_image(tmp_path / "a.png", colours)
        with Image.open(tmp_path / "a.png") as image:
            exif = image.getexif()
            exif[0x0112] = 6  # rotate by 90 degrees to show
            image.save(tmp_path / "b.png", exif=exif)
        dataset = RetrievalImages([tmp_path / "a.png", tmp_path / "b.png"], [0, 0], transform=test_transform(8, 8))
        assert torch.equal(dataset[0][0], dataset[1][0])

    def test_test_images_are_resized_and_cut_from_the_centre(self, tmp_path):
        Image.new("RGB", (300, 600), "red").save(tmp_path / "a.png")
        shown = test_transform()
        assert RetrievalImages([tmp_path / "a.png"], [0])[0][0].shape == (3, 224, 224)
        # A cross in the centre of 512 × 256 pixels stays in the centre of the crop.
        image = Image.new("RGB", (256, 512))
        image.putpixel((128, 256), (255, 255, 255))
        bright = shown(image)[0]
        assert (bright == bright.max()).nonzero().tolist() == [[112, 112]]

    def test_training_crops_are_of_the_resized_image_and_half_are_flipped(self):
        ramp = np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (256, 256, 3))
        torch.manual_seed(0)
        crops = [train_transform()(Image.fromarray(ramp))[0, 0] for _ in range(64)]
        flipped = [bool(crop[0] > crop[-1]) for crop in crops]
        assert 16 < sum(flipped) < 48
        left = {round(float((min(crop[0], crop[-1]) * 0.229 + 0.485) * 255)) for crop in crops}
        assert min(left) >= 0
        assert max(left) <= 32
        assert len(left) > 10

    @pytest.mark.parametrize("content", [b"", b"not an image", "truncated"])
    def test_a_damaged_file_is_named_also_from_a_worker(self, tmp_path, content):
        path = tmp_path / "broken.jpg"
        save_image(path, np.zeros((2, 2, 3)), (64, 64))
        path.write_bytes(path.read_bytes()[:-200] if content == "truncated" else content)
        dataset = RetrievalImages([path], [0])
        with pytest.raises(ValueError, match=r"broken\.jpg cannot be read as an image"):
            dataset[0]
        with pytest.raises(ValueError, match=r"broken\.jpg cannot be read as an image"):
            list(DataLoader(dataset, num_workers=1))

    def test_a_missing_file_is_named(self, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"gone\.jpg"):
            RetrievalImages([tmp_path / "gone.jpg"], [0])[0]

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            (([], []), ValueError, "paths: expected at least one image, got none"),
            ((["a"], [0, 1]), ValueError, r"labels: expected \(1,\), one for each path, got \(2,\)"),
            ((["a"], [[0]]), ValueError, r"labels: expected \(1,\), one for each path, got \(1, 1\)"),
            ((["a"], [0.5]), TypeError, "labels: expected integers, got torch.float32"),
            ((["a"], [0], [True]), TypeError, "super_labels: expected integers, got torch.bool"),
            ((["a"], [0], [1, 2]), ValueError, r"super_labels: expected \(1,\)"),
            ((["a"], [float("nan")]), TypeError, "labels: expected integers, got torch.float32"),
            ((["a"], ["0"]), TypeError, "labels: expected integers"),
            ((["a"], [2**70]), TypeError, "labels: expected integers"),
            ((["a"], [-1]), ValueError, "labels: expected 0 to 9223372036854775807, got -1 to -1"),
            ((["a"], np.array([2**63 + 5], np.uint64)), ValueError, "labels: expected 0 to 9223372036854775807, got -"),
            (([b"a"], [0]), TypeError, "paths: expected str or pathlib.Path, got bytes"),
        ],
    )
    def test_what_does_not_fit_is_refused(self, arguments, error, message):
        with pytest.raises(error, match=message):
            RetrievalImages(*arguments)

    def test_labels_without_a_name_are_refused(self):
        RetrievalImages(["a", "b"], np.array([0, 1], np.uint8), class_names=["x", "y"])
        with pytest.raises(ValueError, match="labels: expected 0 to 1, got 0 to 2"):
            RetrievalImages(["a", "b"], [0, 2], class_names=["x", "y"])

    def test_seeds_and_epochs_are_integers(self, images):
        with pytest.raises(TypeError):
            images.set_epoch(1.5)
        images.seed = 0.5
        with pytest.raises(TypeError):
            images[0]

    @pytest.mark.parametrize("workers", [0, 2])
    def test_all_damaged_images_are_reported_at_once(self, images, workers, tmp_path):
        check_images(images, workers=workers)
        for number in (1, 4, 5, 7, 8, 10):
            Path(images.paths[number]).write_bytes(b"")
        Path(images.paths[11]).unlink()
        state = torch.get_rng_state()
        with pytest.raises(ValueError, match="7 of 12 images cannot be used: ") as caught:
            check_images(images, workers=workers, progress=True)
        assert torch.equal(torch.get_rng_state(), state)
        named = [f"{number}.png" in str(caught.value).replace("11.png", "") for number in range(11)]
        assert [number for number in range(11) if named[number]] == [1, 4, 5, 7, 8]

    def test_data_sets_travel_to_spawned_workers(self, images):
        again = pickle.loads(pickle.dumps(images))
        assert torch.equal(again[3][0], images[3][0])


def test_missing_torchvision_is_named_with_the_remedy():
    program = "import sys; sys.modules['torchvision'] = None; import rambo_plugins.pml.datasets"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "rambo_plugins.pml.datasets needs torchvision and Pillow" in done.stderr.splitlines()[-1]


# The protocols: files in the real formats, read, embedded, evaluated; against the definitions in loops


def embed(dataset):
    """(N, 12) mean colour of each quadrant, of length 1."""
    dataset.transform = test_transform(SIDE, SIDE)
    pixels = torch.cat([batch for batch, _ in DataLoader(dataset, batch_size=7)])
    means = torch.nn.functional.avg_pool2d(pixels.double(), SIDE // 2).flatten(1)
    return torch.nn.functional.normalize(means).float()


def loop_recall(query, query_classes, gallery, gallery_classes, ks, leave_out_self):
    """Recall@K by its definition: an irrelevant image with the score of the best relevant one is above it."""
    hits = dict.fromkeys(ks, 0)
    for q in range(len(query)):
        relevant, irrelevant = [], []
        for g in range(len(gallery)):
            if leave_out_self and g == q:
                continue
            score = sum(float(a) * float(b) for a, b in zip(query[q], gallery[g], strict=True))
            (relevant if query_classes[q] == gallery_classes[g] else irrelevant).append(score)
        rank = 1 + sum(score >= max(relevant) for score in irrelevant)
        for k in ks:
            hits[k] += rank <= k
    return {k: hits[k] / len(query) for k in ks}


@pytest.mark.parametrize("name", ["sop", "cub"])
def test_test_images_search_all_the_others_and_never_themselves(name, request):
    root, *_ = request.getfixturevalue(name)
    test = load_images(name, root)["test"]
    # Four images are copied over images of other classes: themselves would not come first, and would come back.
    for source, target in [(0, 9), (3, 16), (5, 12), (1, 17)]:
        with open(test.paths[source], "rb") as file:
            content = file.read()
        with open(test.paths[target], "wb") as file:
            file.write(content)
    embeddings = embed(test)
    classes = [os.path.basename(path).split("_")[0 if name == "sop" else -1] for path in test.paths]
    ks = KS[name]
    expected = loop_recall(embeddings, classes, embeddings, classes, ks, leave_out_self=True)
    result = recall_at_k(embeddings, test.labels, ks=ks)
    assert result.recall == pytest.approx(expected)
    assert 0.1 < result.recall[1] < 0.95
    assert result.num_lone == 0


def test_query_images_search_the_gallery_and_nothing_is_left_out(inshop):
    splits = load_images("inshop", inshop[0])
    query, gallery = splits["query"], splits["gallery"]
    # A query's file is in the gallery too, as an image of its item: a hit, by this protocol.
    worst = recall_at_k(embed(query), query.labels, embed(gallery), gallery.labels, ks=(1,)).first_rank
    wrong = int(np.argmax(worst != 1))
    same_item = int((gallery.labels == query.labels[wrong]).nonzero()[0])
    with open(query.paths[wrong], "rb") as source, open(gallery.paths[same_item], "wb") as target:
        target.write(source.read())

    query_classes, gallery_classes = (
        [os.path.basename(os.path.dirname(path)) for path in dataset.paths] for dataset in (query, gallery)
    )
    assert KS["inshop"] == (1, 10, 20, 30, 50)
    arrays = embed(query), query_classes, embed(gallery), gallery_classes
    expected = loop_recall(*arrays, KS["inshop"], leave_out_self=False)
    result = recall_at_k(arrays[0], query.labels, arrays[2], gallery.labels, ks=KS["inshop"])
    assert result.recall == pytest.approx(expected)
    assert result.first_rank[wrong] == 1
    assert 0.1 < result.recall[1] < 0.95
    assert result.num_queries == 18
    assert result.num_gallery == 29


def test_the_ks_are_the_papers():
    assert KS == {"sop": (1, 10, 100, 1000), "inshop": (1, 10, 20, 30, 50), "cub": (1, 2, 4, 8), "folder": (1, 2, 4, 8)}
    assert datasets.COUNTS.keys() == KS.keys() - {"folder"}
