"""The files that the evaluation reads, and ``rambo-recall``: its figures, its outputs, its errors."""

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("faiss")

from rambo_plugins.evaluation import recall_at_k
from rambo_plugins.evaluation.cli import main
from rambo_plugins.evaluation.files import read_embeddings, read_keys


def write_vecs(path, values):
    with path.open("wb") as file:
        for row in values:
            file.write(np.int32(len(row)).tobytes() + row.tobytes())
    return path


def data(num=60, dim=5, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(num, dim)).astype(np.float32), rng.integers(0, 6, num)


# --- files ------------------------------------------------------------------------------------------------------------


def test_embeddings_come_back_from_each_kind_of_file(tmp_path):
    values, _ = data()
    np.save(tmp_path / "a.npy", values)
    np.savez(tmp_path / "a.npz", values)
    np.testing.assert_array_equal(read_embeddings(tmp_path / "a.npy"), values)
    assert isinstance(read_embeddings(tmp_path / "a.npy"), np.memmap)
    np.testing.assert_array_equal(read_embeddings(tmp_path / "a.npz"), values)
    for suffix, kind in ((".fvecs", np.float32), (".bvecs", np.uint8), (".ivecs", np.int32)):
        expected = (10 * np.abs(values)).astype(kind)
        found = read_embeddings(write_vecs(tmp_path / f"a{suffix}", expected))
        assert found.dtype == kind
        np.testing.assert_array_equal(found, expected)


def test_keys_come_back_from_each_kind_of_file(tmp_path):
    labels = np.array([3, 2**60, -5])
    np.save(tmp_path / "a.npy", labels)
    np.testing.assert_array_equal(read_keys(tmp_path / "a.npy"), labels)
    small = np.array([[4], [7]], dtype=np.int32)
    np.testing.assert_array_equal(read_keys(write_vecs(tmp_path / "a.ivecs", small)), [4, 7])
    (tmp_path / "b.txt").write_text("cat\n7\nhéron\n", encoding="utf-8")
    assert read_keys(tmp_path / "b.txt").tolist() == ["cat", "7", "héron"]


def test_parquet(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    values, labels = data()
    columns = {f"x{k}": values[:, k] for k in range(values.shape[1])}
    parquet.write_table(pyarrow.table(columns), tmp_path / "columns.parquet")
    parquet.write_table(pyarrow.table({"x": list(values)}), tmp_path / "lists.parquet")
    parquet.write_table(pyarrow.table({"label": labels}), tmp_path / "labels.parquet")
    for name in ("columns", "lists"):
        np.testing.assert_array_equal(read_embeddings(tmp_path / f"{name}.parquet"), values)
    np.testing.assert_array_equal(read_keys(tmp_path / "labels.parquet"), labels)


# --- command line -----------------------------------------------------------------------------------------------------


@pytest.fixture
def files(tmp_path):
    values, labels = data()
    np.save(tmp_path / "q.npy", values)
    np.save(tmp_path / "ql.npy", labels)
    return {"--query": tmp_path / "q.npy", "--query-labels": tmp_path / "ql.npy"}


def run(options, *more):
    return main([*(str(word) for pair in options.items() for word in pair), *map(str, more), "--quiet"])


def test_the_figures_are_those_of_the_function(files, tmp_path, capsys):
    values, labels = data()
    outputs = ("--json", tmp_path / "new" / "a.json", "--plot", tmp_path / "a.png")
    assert run(files, "--ks", 1, 5, 20, "--normalize", "--map-at-r", *outputs) == 0
    expected = recall_at_k(values, labels, ks=(1, 5, 20), normalize=True, map_at_r=True)
    written = json.loads((tmp_path / "new" / "a.json").read_text())
    assert {k: v for k, v in written.items() if k != "seconds"} == {
        k: v for k, v in expected.to_dict().items() if k != "seconds"
    }
    assert (tmp_path / "a.png").stat().st_size > 5000
    assert f"R@1 {100 * expected.recall[1]:.2f}" in capsys.readouterr().out


def test_a_gallery_and_ids(files, tmp_path):
    values, labels = data()
    other, _ = data(num=20, seed=1)
    gallery, gallery_labels = np.concatenate([values, other]), np.concatenate([labels, np.arange(20) % 6])
    write_vecs(tmp_path / "g.fvecs", gallery)
    np.save(tmp_path / "gl.npy", gallery_labels)
    np.save(tmp_path / "ids.npy", np.arange(80))
    np.save(tmp_path / "qids.npy", np.arange(60))
    options = files | {"--gallery": tmp_path / "g.fvecs", "--gallery-labels": tmp_path / "gl.npy"}
    options |= {"--query-ids": tmp_path / "qids.npy", "--gallery-ids": tmp_path / "ids.npy"}
    assert run(options, "--ks", 1, 3, "--lone", "miss", "--metric", "l2", "--json", tmp_path / "a.json") == 0
    expected = recall_at_k(
        values, labels, gallery, gallery_labels, ks=(1, 3), query_ids=np.arange(60), gallery_ids=np.arange(80),
        metric="l2", lone="miss",
    )  # fmt: skip
    assert json.loads((tmp_path / "a.json").read_text())["recall"] == expected.to_dict()["recall"]


def test_an_approximate_index_is_used_again_and_says_what_it_is(files, tmp_path, capsys):
    values, labels = data()
    options = ("--index", "IVF4,Flat", "--parameters", "nprobe=4", "--ks", 1, 5, "--check", 20)
    outputs = ("--work", tmp_path / "index", "--json", tmp_path / "a.json")
    for _ in range(2):
        assert run(files, *options, *outputs) == 0
        assert "approximate: R@1" in capsys.readouterr().out
        assert (tmp_path / "index" / "filled.index").exists()
        written = json.loads((tmp_path / "a.json").read_text())
        assert written["exact"] is False
        assert written["check"]["num_queries"] == 20
        assert written["recall"] == recall_at_k(values, labels, ks=(1, 5)).to_dict()["recall"]  # all lists are probed
    assert run(files, *options, "--map-at-r") == 2
    assert capsys.readouterr().err == "rambo-recall: error: --index: goes neither with --map-at-r nor with --sample\n"


def save_images(folder, colours):
    from matplotlib.image import imsave

    for number, colour in enumerate(colours):
        imsave(folder / f"{number}.png", np.tile(np.uint8(colour), (4, 4, 1)))
    (folder / "paths.txt").write_text("".join(f"{number}.png\n" for number in range(len(colours))))
    return ("--query-images", folder / "paths.txt", "--image-root", folder)


def test_a_panel_shows_queries_with_their_nearest(files, tmp_path, monkeypatch):
    from rambo_plugins.evaluation import panel

    values, labels = data()
    images = save_images(tmp_path, [(number, 100, 200) for number in range(60)])
    shown = []
    monkeypatch.setattr(panel, "draw_neighbours", lambda *arguments: shown.append(arguments))
    options = ("--panel", tmp_path / "p.png", "--panel-queries", 5, "--panel-neighbours", 3, "--seed", 4)
    assert run(files, *options, *images) == 0
    ((path, queries, neighbours, relevant, _),) = shown
    assert path == tmp_path / "p.png"
    rows = [int(query.stem) for query in queries]
    assert len(set(rows)) == 5
    assert rows == sorted(rows)
    for row, found, right in zip(rows, neighbours, relevant, strict=True):
        scores = values.astype(float) @ values[row].astype(float)
        scores[row] = -np.inf
        expected = np.argsort(-scores)[:3]
        assert [int(item.stem) for item in found] == expected.tolist()
        assert right.tolist() == (labels[expected] == labels[row]).tolist()


def test_the_panel_frames_what_is_relevant(files, tmp_path, capsys):
    from matplotlib.image import imread

    images = save_images(tmp_path, [(250, 250, 0)] * 60)
    options = ("--panel", tmp_path / "p.png", "--panel-queries", 3, "--panel-neighbours", 70)
    assert run(files, *options, *images) == 0
    drawn = (255 * imread(tmp_path / "p.png")[..., :3]).round()
    for frame in ((44, 160, 44), (214, 39, 40)):  # tab:green, tab:red
        assert (drawn == frame).all(axis=2).sum() > 300
    (tmp_path / "7.png").write_text("no image")
    assert run(files, *options, *images, "--json", tmp_path / "a.json") == 2
    assert "the figures are right, but there is no panel" in capsys.readouterr().err
    assert json.loads((tmp_path / "a.json").read_text())["num_queries"] == 60


def test_a_panel_without_its_images_ends_before_the_search(files, tmp_path, capsys):
    images = save_images(tmp_path, [(1, 2, 3)] * 60)
    (tmp_path / "few.txt").write_text("0.png\n")
    gallery = ("--gallery", tmp_path / "q.npy", "--gallery-labels", tmp_path / "ql.npy")
    for more, message in (
        ((), "--panel: expected --query-images with it"),
        (("--query-images", tmp_path / "few.txt"), "few.txt: expected 60 lines, as labels, got 1"),
        (images[:2], "no such image; paths are taken from --image-root ."),
        ((*images, *gallery), "--panel: expected --gallery-images with it"),
    ):
        assert run(files, "--panel", tmp_path / "p.png", *more) == 2
        captured = capsys.readouterr()
        assert message in captured.err
        assert captured.out == ""


def garbage(tmp_path):
    """What is passed beside the good files, and what the one line on it must say."""
    values, labels = data()
    whole = (tmp_path / "q.npy").read_bytes()
    (tmp_path / "cut.npy").write_bytes(whole[:-8])
    (tmp_path / "head.npy").write_bytes(whole[:20])
    (tmp_path / "cut.fvecs").write_bytes(write_vecs(tmp_path / "a.fvecs", values).read_bytes()[:-3])
    (tmp_path / "mixed.fvecs").write_bytes(np.array([1, 7, 2, 7], dtype=np.int32).tobytes())
    (tmp_path / "empty.fvecs").write_bytes(b"")
    (tmp_path / "a.npz").write_bytes(b"no zip file")
    np.savez(tmp_path / "two.npz", values, values)
    np.save(tmp_path / "words.npy", np.array([["a", "b"]]))
    np.save(tmp_path / "objects.npy", np.array([{}, 1], dtype=object))
    np.save(tmp_path / "short.npy", labels[:-1])
    np.save(tmp_path / "nan.npy", np.where(np.arange(len(values))[:, None] == 7, np.nan, values))
    np.save(tmp_path / "none.npy", values[:0])
    np.save(tmp_path / "fractions.npy", labels / 2)
    gallery = {"--gallery-labels": tmp_path / "ql.npy"}
    return [
        ({"--query": tmp_path / "cut.npy"}, "cut.npy: not a readable .npy file"),
        ({"--query": tmp_path / "head.npy"}, "head.npy: not a readable .npy file"),
        ({"--query": tmp_path / "cut.fvecs"}, "are no whole number of rows of 24 bytes, 5 values each"),
        ({"--query": tmp_path / "mixed.fvecs"}, "row 1 says that it has 2 values, row 0 that it has 1"),
        ({"--query": tmp_path / "empty.fvecs"}, "0 bytes, expected at least"),
        ({"--query": tmp_path / "a.npz"}, "a.npz: not a readable .npz file"),
        ({"--query": tmp_path / "two.npz"}, "expected one array, got 2: arr_0, arr_1"),
        ({"--query": tmp_path / "words.npy"}, "words.npy: expected real numbers, got dtype"),
        ({"--query": tmp_path / "objects.npy"}, "objects.npy: not a readable .npy file"),
        ({"--query": tmp_path / "nan.npy"}, "1 of 60 rows have NaN or inf as float32, the first at [7]"),
        ({"--query": tmp_path / "q.csv"}, "q.csv: expected a file of the kind .npy, .npz"),
        ({"--query": tmp_path / "missing.npy"}, "missing.npy"),
        ({"--query-labels": tmp_path / "short.npy"}, "one entry for each of the 60 embeddings, got 59"),
        ({"--query-labels": tmp_path / "fractions.npy"}, "fractions.npy: expected integers or strings, got dtype"),
        ({"--gallery": tmp_path / "none.npy", **gallery}, "none.npy: expected at least one embedding"),
        ({"--gallery": tmp_path / "q.npy"}, "--gallery: expected --gallery-labels with it"),
        ({"--json": tmp_path / "q.npy" / "a.json"}, "q.npy"),
        ({"--ks": 0}, "ks: expected one or more positive integers"),
    ]  # fmt: skip


def test_garbage_gives_one_line_and_exit_code_2(files, tmp_path, capsys):
    for options, message in garbage(tmp_path):
        assert run(files | options) == 2
        error = capsys.readouterr().err
        assert error.startswith("rambo-recall: error: ")
        assert error.count("\n") == 1, error
        assert message in error


def test_the_command_runs_as_a_module(files):
    command = [sys.executable, "-m", "rambo_plugins.evaluation.cli", *(str(w) for pair in files.items() for w in pair)]
    environment = {name: value for name, value in os.environ.items() if name != "TQDM_DISABLE"}
    done = subprocess.run([*command, "--ks", "1"], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("R@1 ")
    assert "recall: 100%" in done.stderr  # the progress bar


KILLED = """
import os, signal, sys
from rambo_plugins.evaluation import cli, plan, recall
plan.PART = 1  # 1,024 queries a part
count, saved = recall._count, []
def noted(problem, at, *rest):
    if len(saved) == int(sys.argv[1]):
        os.kill(os.getpid(), signal.SIGKILL)
    saved.append(len(at))
    return count(problem, at, *rest)
recall._count = noted
code = cli.main(sys.argv[2:])
print("parts", len(saved))
sys.exit(code)
"""


def test_a_killed_run_goes_on_where_it_was(tmp_path):
    values, labels = data(num=5000)
    np.save(tmp_path / "q.npy", values)
    np.save(tmp_path / "ql.npy", labels)
    options = ["--query", tmp_path / "q.npy", "--query-labels", tmp_path / "ql.npy", "--ks", 1, 10, "--quiet"]
    options = [*map(str, options), "--work", str(tmp_path / "work"), "--json", str(tmp_path / "a.json")]

    def start(kill_after):
        command = [sys.executable, "-c", KILLED, str(kill_after), *options]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert start(3).returncode == -signal.SIGKILL
    assert len(list((tmp_path / "work").glob("part-*"))) == 3
    done = start(99)
    assert done.returncode == 0, done.stderr
    assert "parts 2" in done.stdout  # of 5
    assert not (tmp_path / "work").exists()
    expected = recall_at_k(values, labels, ks=(1, 10))
    assert json.loads((tmp_path / "a.json").read_text())["recall"] == expected.to_dict()["recall"]


def test_memory_sample_and_device(files, tmp_path, capsys):
    values, labels = data()
    assert run(files, "--ks", 1, "--sample", 20, "--seed", 5, "--max-memory", "16M", "--device", "cpu", "cpu") == 0
    expected = recall_at_k(values, labels, ks=(1,), sample=20, seed=5)
    out = capsys.readouterr().out
    assert f"R@1 {100 * expected.recall[1]:.2f}" in out
    assert "20 sampled of 60 queries" in out
    assert run(files, "--max-memory", "1K") == 2
    assert "max_memory: 1,024 bytes are too little" in capsys.readouterr().err
