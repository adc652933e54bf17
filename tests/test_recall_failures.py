"""``rambo-recall`` where something fails: the same figures, no finished work lost, nothing of the user's touched.

What the user can mend is one line and the exit code 2; what is ours keeps its traceback.
"""

import contextlib
import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("faiss")
pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from rambo_plugins.evaluation import cli, plan, recall, recall_at_k
from rambo_plugins.evaluation import work as work_module
from rambo_plugins.evaluation.work import PARTS, WorkFolder
from rambo_plugins.folders import LIST

FULL = OSError(errno.ENOSPC, "No space left on device")


def data(num=2500, dim=4, seed=0):
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, num // 4, num)
    return (rng.normal(size=(num, dim))[labels] + 0.3 * rng.normal(size=(num, dim))).astype(np.float32), labels


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """q.npy and l.npy here, of which a part takes 1,024 queries."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(plan, "PART", 1)
    rows, labels = data()
    np.save("q.npy", rows)
    np.save("l.npy", labels)
    return tmp_path


def run(*options):
    given = [str(option) for option in options]
    return cli.main(["--query", "q.npy", "--query-labels", "l.npy", "--ks", "1", "5", "--quiet", *given])


def line(capsys, *words, code="error: "):
    """The one line on standard error, with these words, and what is on standard output."""
    out, err = capsys.readouterr()
    assert err.startswith(f"rambo-recall: {code}"), err
    assert err.count("\n") == 1, err
    for word in words:
        assert word in err
    return out


def listing(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def figures(path="a.json"):
    return json.loads(Path(path).read_text())["recall"]


@pytest.fixture(scope="module")
def expected():
    rows, labels = data()
    return recall_at_k(rows, labels, ks=(1, 5)).to_dict()["recall"]


# --- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--parameters nprobe=4", "--parameters: does nothing by itself, expected --index with it"),
        ("--check 50", "--check: does nothing by itself, expected --index with it"),
        ("--seed 3", "--seed: does nothing by itself, expected --sample or --index or --panel with it"),
        ("--gallery-labels l.npy", "--gallery-labels: does nothing by itself, expected --gallery with it"),
        ("--gallery q.npy", "--gallery: expected --gallery-labels with it"),
        ("--query-ids l.npy", "--query-ids: does nothing by itself, expected --gallery-ids with it"),
        ("--gallery-ids l.npy", "--gallery-ids: does nothing by itself, expected --query-ids with it"),
        ("--query-ids l.npy --gallery-ids l.npy", "--query-ids: does nothing by itself, expected --gallery with it"),
        ("--query-images i.txt", "--query-images: does nothing by itself, expected --panel with it"),
        ("--gallery-images i.txt", "--gallery-images: does nothing by itself, expected --panel with it"),
        ("--image-root .", "--image-root: does nothing by itself, expected --panel with it"),
        ("--panel-queries 3", "--panel-queries: does nothing by itself, expected --panel with it"),
        ("--panel-neighbours 3", "--panel-neighbours: does nothing by itself, expected --panel with it"),
        ("--panel p.png", "--panel: expected --query-images with it"),
        ("--panel p.png --query-images i.txt --gallery-images i.txt", "--gallery-images: does nothing by itself"),
        ("--panel p.png --query-images i.txt --panel-queries 401", "--panel-queries: expected at most 400"),
        ("--panel p.png --query-images i.txt --panel-neighbours 0", "--panel-neighbours: expected a positive number"),
        ("--columns f0", "--columns: does nothing by itself, expected a .parquet for --query or --gallery"),
        ("--label-column x", "expected a .parquet for --query-labels or --gallery-labels"),
        ("--id-column x", "expected a .parquet for --query-ids or --gallery-ids"),
        ("--index Flat --map-at-r", "--index: goes neither with --map-at-r nor with --sample"),
        ("--index Flat --sample 5", "--index: goes neither with --map-at-r nor with --sample"),
        ("--index Flat --check 0", "--check: expected a positive number of queries, got 0"),
        ("--sample -1", "--sample: expected a positive number of queries, got -1"),
        ("--sample 5 --seed -1", "seed: expected an integer of at least 0, got -1"),
        ("--json a.json --json b.json", "--json: expected once, got it again"),
        ("--ks 1", "--ks: expected once, got it again"),
        ("--norm", "unrecognized arguments: --norm"),
        ("--columns", "argument --columns: expected at least one argument"),
        ("--metric cosine", "argument --metric: invalid choice: 'cosine'"),
        ("--sample x", "argument --sample: invalid int value: 'x'"),
        ("--device gpu", "device: expected 'cpu', 'cuda', 'cuda:1' and so on, got ['gpu']"),
        ("--device meta", "device: meta cannot be used here: "),
        ("--max-memory much", "max_memory: expected bytes"),
        ("--plot p.xyz", "--plot: expected a name that ends in "),
        ("--plot p", "--plot: expected a name that ends in "),
        ("--json .", "--json: expected a file to write, got "),
        ("--json /dev/null", "--json: expected a file to write, got '/dev/null'"),
        ("--json q.npy", "--json: expected another file than --query, got "),
        ("--json ./x/../l.npy", "--json: expected another file than --query-labels, got "),
        ("--json a.png --plot a.png", "--json: expected another file than --plot, got "),
        ("--json q.npy/a.json", "--json: "),
        ("--json /proc/a.json", "--json: '/proc/a.json' cannot be written: "),
    ],
)
def test_a_command_line_that_makes_no_sense_ends_before_the_work(folder, options, said, capsys, monkeypatch):
    monkeypatch.setattr(cli, "recall_at_k", None)
    monkeypatch.setattr(cli, "approximate_recall_at_k", None)
    if "max_memory" in said:
        monkeypatch.undo()
        os.chdir(folder)
    before = listing(folder)
    assert run(*options.split()) == 2
    assert line(capsys, said) == ""
    assert listing(folder) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA")
def test_cuda_where_there_is_none_is_one_line(folder, capsys):
    assert run("--device", "cuda") == 2
    assert line(capsys, "device: cuda cannot be used here: ") == ""


def test_columns_of_a_table_are_named(folder, expected):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows, labels = data()
    columns = {"name": labels, "z": rows[:, 0], "y": rows[:, 1], "x": rows[:, 2], "w": rows[:, 3]}
    parquet.write_table(pyarrow.table(columns), "t.parquet")
    options = ["--query", "t.parquet", "--query-labels", "t.parquet", "--ks", "1", "5", "--quiet", "--json", "a.json"]
    assert cli.main([*options, "--columns", "x", "y", "z", "w", "--label-column", "name"]) == 0
    assert figures() == expected


# --- reading and searching --------------------------------------------------------------------------------------------


def failing(function, error, at=0):
    """``function``, which raises at this call."""
    calls = []

    def called(*arguments, **options):
        calls.append(1)
        if len(calls) == at + 1:
            raise error
        return function(*arguments, **options)

    return called


OUT_OF_MEMORY = [MemoryError(), torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nmore")]


@pytest.mark.parametrize(
    "error", [*OUT_OF_MEMORY, RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")]
)
def test_too_little_memory_is_one_line_with_the_remedy(folder, error, capsys, monkeypatch):
    for name in ("read_embeddings", "recall_at_k"):
        with monkeypatch.context() as patch:
            patch.setattr(cli, name, failing(None, error))
            assert run("--json", "a.json") == 2
        assert line(capsys, "out of memory: ", "; lower --max-memory") == ""
        assert not Path("a.json").exists()


@pytest.mark.parametrize("stage", ["search", "save", "interrupt", "read"])
def test_a_run_that_failed_goes_on_from_its_finished_parts(folder, stage, expected, capsys, monkeypatch):
    code = 2
    with monkeypatch.context() as patch:
        if stage == "search":
            patch.setattr(recall, "_count", failing(recall._count, OUT_OF_MEMORY[1], at=2))
            words = ("out of memory: CUDA out of memory. Tried to allocate 2 GiB; lower --max-memory",)
        elif stage == "save":
            patch.setattr(Path, "write_bytes", half_written(Path.write_bytes, at=2))
            words = ("part-000002: No space left on device",)
        elif stage == "read":  # in the middle of the blocks of the third part
            mapped = np.lib.format.open_memmap("q.npy", mode="r")
            patch.setattr(cli, "read_embeddings", lambda *_: Reader(mapped))
            words = ("q.npy: Input/output error",)
        else:
            patch.setattr(recall, "_count", failing(recall._count, KeyboardInterrupt(), at=2))
            words, code = ("interrupted; with --work FOLDER the same command goes on",), 130
        assert run("--work", "parts", "--json", "a.json") == code
    assert line(capsys, *words, code="" if code == 130 else "error: ") == ""
    done = sum(path.name.startswith("part-") for path in Path("parts").iterdir())
    assert done == 2
    assert not list(Path("parts").glob(".*"))
    count, counted = recall._count, []
    monkeypatch.setattr(recall, "_count", lambda *rest: counted.append(1) or count(*rest))
    assert run("--work", "parts", "--json", "a.json") == 0
    assert len(counted) == 1
    assert figures() == expected
    assert not Path("parts").exists()


def half_written(write, at):
    calls = []

    def called(path, contents):
        calls.append(path)
        if len(calls) == at + 1:
            write(path, contents[: len(contents) // 2])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(path, contents)

    return called


class Reader:
    """Blocks of a file, of which one in the middle cannot be read as soon as two parts are finished."""

    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        for start in range(0, len(self.rows), 500):
            if start == 1000 and len(list(Path("parts").glob("part-*"))) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO), "q.npy")
            yield np.array(self.rows[start : start + 500])


def test_a_fault_of_ours_keeps_its_traceback(folder, capsys, monkeypatch):
    def broken(*arguments, **options):
        return np.zeros(3) + np.zeros(4)

    for fault, error in (
        (broken, ValueError),
        (lambda **_: json.loads("{"), ValueError),
        (lambda **_: {}["x"], KeyError),
        (lambda: None, TypeError),
    ):
        monkeypatch.setattr(cli, "recall_at_k", fault)
        with pytest.raises(error):
            run()
        assert capsys.readouterr().err == ""


# --- what is written at the end ---------------------------------------------------------------------------------------


@pytest.fixture
def images(folder):
    """i.txt names an image for each query, in bytes that are no UTF-8 and with blanks."""
    from PIL import Image

    names = [b"\xff.png", b" two  words.png"]
    for name in names:
        Image.new("RGB", (4, 4), "red").save(os.fsdecode(name))
    Path("i.txt").write_bytes(b"".join(names[row % 2] + b"\n" for row in range(2500)))
    return ("--panel", "out/p.png", "--query-images", "i.txt", "--panel-queries", 2, "--panel-neighbours", 2)


OUTPUTS = ("--json", "out/a.json", "--plot", "out/c.png", "--work", "parts")


def test_names_that_are_no_text_do_not_matter(images, capsys, expected):
    assert run(*images, *OUTPUTS) == 0
    assert figures("out/a.json") == expected
    assert sorted(path.name for path in Path("out").iterdir()) == ["a.json", "c.png", "p.png"]
    Path(os.fsdecode(b"\xff.png")).unlink()
    assert run(*images, "--seed", 3) == 2
    line(capsys, r"\udcff.png: no such image")


def half_drawn(draw, which, error):
    def called(figure, path, **options):
        if Path(path).name.endswith(which):
            Path(path).write_bytes(b"half")
            raise error
        return draw(figure, path, **options)

    return called


@pytest.mark.parametrize("error", [FULL, MemoryError()], ids=["disk", "memory"])
@pytest.mark.parametrize("name", ["a.json", "c.png", "p.png"])
def test_an_output_that_fails_takes_nothing_else_with_it(images, name, error, expected, capsys, monkeypatch):
    Path("out").mkdir()
    Path("out", name).write_bytes(b"of an earlier run")
    with monkeypatch.context() as patch:
        if name == "a.json":
            patch.setattr(cli.json, "dumps", failing(json.dumps, error, at=99))
            patch.setattr(cli, "save", half_saved(error))
        else:
            patch.setattr(Figure, "savefig", half_drawn(Figure.savefig, name, error))
        assert run(*images, *OUTPUTS) == 2
    kind = {"a.json": "JSON", "c.png": "plot", "p.png": "panel"}[name]
    out = line(capsys, f"the figures are right, but there is no {kind}: ")
    assert f"R@1 {100 * expected['1']:.2f}" in out
    assert Path("out", name).read_bytes() == b"of an earlier run"
    assert sorted(path.name for path in Path("out").iterdir()) == ["a.json", "c.png", "p.png"]
    assert all(path.stat().st_size > 100 for path in Path("out").iterdir() if path.name != name)
    assert Path("parts").exists()  # the search need not be done again
    monkeypatch.setattr(recall, "_count", None)
    assert run(*images, *OUTPUTS) == 0
    assert not Path("parts").exists()
    assert figures("out/a.json") == expected


def half_saved(error):
    def called(result, path):
        with cli.whole(path) as unfinished:
            unfinished.write_text("half")
            raise error

    return called


def test_a_fault_of_ours_in_one_output_leaves_the_others(images, monkeypatch, expected):
    monkeypatch.setattr(cli, "draw", lambda *_: {}["x"])
    with pytest.raises(KeyError):
        run(*images, *OUTPUTS)
    assert figures("out/a.json") == expected
    assert Path("out/p.png").exists()
    assert not Path("out/c.png").exists()


def test_a_standard_output_that_is_full_does_not_lose_the_json(folder, capsys, monkeypatch, expected):
    with open("/dev/full", "w") as full, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", full)
        assert run("--json", "a.json") == 2
        with contextlib.suppress(OSError):
            full.close()
    line(capsys, "there is no line of them: ", "No space left on device")
    assert figures() == expected


def test_a_cutoff_far_beyond_the_gallery_can_be_drawn(folder):
    assert run("--ks", 1) == 2  # given before
    options = ["--query", "q.npy", "--query-labels", "l.npy", "--quiet", "--plot", "c.png"]
    assert cli.main([*options, "--ks", "1", "1000000000000"]) == 0


def test_an_output_by_a_link_goes_where_it_leads(folder, expected):
    Path("real").mkdir()
    Path("link.json").symlink_to("real/a.json")
    assert run("--json", "link.json") == 0
    assert Path("link.json").is_symlink()
    assert figures("real/a.json") == expected


# --- the folder of finished parts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), ("--index", "Flat")], ids=["parts", "index"])
def test_a_folder_of_the_users_is_refused_and_left_as_it_is(folder, options, capsys):
    for name in ("part-000000", "part-00000.parquet", "shard-0.npy", "problem.json", "part-1.unfinished"):
        Path(name).write_text("theirs")
    before = listing(folder)
    assert run("--work", ".", *options) == 2
    assert line(capsys, "and without rambo_files.json", "name another folder") == ""
    assert listing(folder) == before


def interrupted(monkeypatch, at=2, *options):
    with monkeypatch.context() as patch:
        patch.setattr(recall, "_count", failing(recall._count, KeyboardInterrupt(), at=at))
        assert run("--work", "parts", *options) == 130


def test_files_that_come_later_are_left(folder, monkeypatch, capsys):
    interrupted(monkeypatch)
    for name in ("part-000007", "notes.txt", "part-1.parquet"):
        Path("parts", name).write_text("theirs")
    assert run("--work", "parts") == 0
    assert sorted(path.name for path in Path("parts").iterdir()) == ["notes.txt", "part-000007", "part-1.parquet"]


def test_a_file_in_the_place_of_a_part_is_not_taken_for_it(folder, monkeypatch, capsys):
    interrupted(monkeypatch, 1)
    capsys.readouterr()
    Path("parts", "part-000002").write_text("theirs")
    assert run("--work", "parts") == 2
    line(capsys, "part-000002: is there, but was not written by us")
    assert Path("parts", "part-000002").read_text() == "theirs"


@pytest.mark.parametrize("change", ["row", "label", "ks", "normalize"])
def test_parts_of_anything_else_are_refused(folder, change, monkeypatch, capsys):
    interrupted(monkeypatch)
    rows, labels = data()
    capsys.readouterr()
    if change == "row":  # one number of one row
        rows[1234, 2] = np.nextafter(rows[1234, 2], 9, dtype=np.float32)
    if change == "label":
        labels[1234] = labels[1235] + 1
    np.save("q.npy", rows)
    np.save("l.npy", labels)
    before = listing(folder / "parts")
    options = {"ks": ("--map-at-r",), "normalize": ("--normalize",)}.get(change, ())
    assert run("--work", "parts", *options) == 2
    named = {
        "row": "query, gallery;",
        "label": "labels and ids",
        "ks": "method, map_at_r",
        "normalize": "query, gallery;",
    }
    line(capsys, "parts: holds parts of another evaluation, which differs in ", named[change])
    assert listing(folder / "parts") == before


@pytest.mark.parametrize(
    "damage", [lambda text: text[:-1], lambda text: b"", lambda text: text[:50] + b"\7" + text[51:]]
)
def test_a_damaged_part_is_computed_again(folder, damage, monkeypatch, capsys, expected, caplog):
    interrupted(monkeypatch)
    for path in Path("parts").glob("part-*"):
        path.write_bytes(damage(path.read_bytes()))
    assert run("--work", "parts", "--json", "a.json") == 0
    assert figures() == expected
    assert caplog.text.count("is damaged, and is computed again") == 2


@pytest.mark.parametrize("name", ["problem.json", LIST])
@pytest.mark.parametrize("text", [b"", b"{", b"[1]", b"3", b"\xff"])
def test_a_damaged_description_is_refused(folder, name, text, monkeypatch, capsys):
    interrupted(monkeypatch)
    capsys.readouterr()
    Path("parts", name).write_bytes(text)
    assert run("--work", "parts") == 2
    line(capsys, f"parts/{name}: ", "another")


@pytest.mark.parametrize("options", [(), ("--index", "Flat")], ids=["parts", "index"])
def test_a_folder_is_used_by_one_evaluation_at_a_time(folder, options, capsys):
    Path("parts").mkdir()
    handle = os.open("parts", os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert run("--work", "parts", *options) == 2
    line(capsys, "parts: is in use by another evaluation")
    os.close(handle)
    assert run("--work", "parts", *options) == 0
    assert run("--work", "parts", *options) == 0


def test_a_folder_is_let_go_after_an_error(folder):
    with pytest.raises(ZeroDivisionError):
        WorkFolder("parts", PARTS, lambda: {"a": 1 / 0})
    with pytest.raises(ZeroDivisionError), WorkFolder("parts", PARTS, lambda: {"a": 1}) as kept:
        raise ZeroDivisionError
    with pytest.raises(ValueError, match="differs in a"):
        WorkFolder("parts", PARTS, lambda: {"a": 2})
    WorkFolder("parts", PARTS, lambda: {"a": 1}).close()
    assert kept.path == Path("parts")  # as a traceback keeps what it passed


def test_a_file_system_without_locks_is_used_all_the_same(folder, monkeypatch, caplog, expected):
    def flock(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(work_module.fcntl, "flock", flock)
    assert run("--work", "parts", "--json", "a.json") == 0
    assert "cannot be locked" in caplog.text
    assert figures() == expected


KILLED = """
import json, os, shutil, sys
from rambo_plugins.evaluation import cli, plan
plan.PART = 1
options = sys.argv[1:]
replace = os.replace

def run(kill_at):
    child = os.fork()  # before faiss and torch have started threads
    if child == 0:
        calls = []
        def replaced(*paths):
            calls.append(paths)
            if len(calls) == kill_at:
                os._exit(9)
            replace(*paths)
        os.replace = replaced
        os._exit(cli.main(options))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

for kill_at in range(1, 99):
    code = run(kill_at)
    if code == 0:
        break
    assert code == 9, code
    assert run(0) == 0, kill_at
    print(kill_at, json.load(open("a.json"))["recall"])
    os.remove("a.json")
    shutil.rmtree("work", ignore_errors=True)
"""


INDEX = ("--index", "IVF4,Flat", "--parameters", "nprobe=4", "--check", "30")


@pytest.mark.parametrize("options", [(), pytest.param(INDEX, marks=pytest.mark.slow)], ids=["parts", "index"])
def test_killed_at_any_file_the_next_call_goes_on(folder, options):
    rows, labels = data(num=1100)  # two parts
    np.save("q.npy", rows)
    np.save("l.npy", labels)
    expected = recall_at_k(rows, labels, ks=(1, 5)).to_dict()["recall"]
    command = [sys.executable, "-c", KILLED, "--query", "q.npy", "--query-labels", "l.npy", "--ks", "1", "5", "--quiet"]
    command += ["--work", "work", "--json", "a.json", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    lines = [text for text in done.stdout.splitlines() if text[0].isdigit()]
    assert len(lines) > 7
    assert {text.partition(" ")[2] for text in lines} == {str(expected)}
