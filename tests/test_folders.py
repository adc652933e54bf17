"""A folder of ours: nothing that is not on its list is overwritten, deleted or taken over."""

import errno
import json

import pytest

from rambo_plugins.folders import LIST, OwnFolder, whole


def write(folder, name, text="ours"):
    with folder.writing(name) as path:
        path.write_text(text)


def test_a_new_and_an_empty_folder_are_taken_and_found_again(tmp_path):
    (tmp_path / "empty").mkdir()
    for name in ("empty", "new/deep"):
        write(OwnFolder(tmp_path / name, "a run"), "sub/metrics.json")
        assert OwnFolder(tmp_path / name, "a run").names == {"sub/metrics.json"}


def test_a_folder_with_other_things_is_not_taken_over(tmp_path):
    (tmp_path / "checkpoint.pt").write_text("theirs")
    with pytest.raises(ValueError, match=r"got one with 'checkpoint.pt' and without rambo_files.json"):
        OwnFolder(tmp_path, "a run")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("theirs")
    with pytest.raises(ValueError, match="expected a folder for a run, got a file"):
        OwnFolder(tmp_path / "file", "a run")


def test_a_folder_of_another_purpose_is_refused(tmp_path):
    OwnFolder(tmp_path, "a run")
    with pytest.raises(ValueError, match="expected a folder for parts, got one for a run"):
        OwnFolder(tmp_path, "parts")


@pytest.mark.parametrize(
    "text", ["", "[]", '{"purpose": 1, "files": []}', '{"purpose": "a run", "files": [1]}', "\x00"]
)
def test_a_list_that_is_something_else_is_refused(tmp_path, text):
    (tmp_path / LIST).write_text(text)
    with pytest.raises(ValueError, match="expected the list of what was written by us"):
        OwnFolder(tmp_path, "a run")
    assert (tmp_path / LIST).read_text() == text


@pytest.mark.parametrize("act", [lambda folder: folder.own("mine.txt"), lambda folder: write(folder, "mine.txt")])
def test_a_file_of_the_users_is_not_overwritten(tmp_path, act):
    folder = OwnFolder(tmp_path, "a run")
    (tmp_path / "mine.txt").write_text("theirs")
    with pytest.raises(ValueError, match=r"mine.txt: is there, but was not written by us"):
        act(folder)
    assert (tmp_path / "mine.txt").read_text() == "theirs"


def test_a_file_that_another_library_named_is_adopted_and_removed_with_ours(tmp_path):
    folder = OwnFolder(tmp_path / "run", "a run")
    (tmp_path / "run/tensorboard").mkdir()
    for name in ("events.ours", "events.theirs"):
        (tmp_path / "run/tensorboard" / name).write_text("curves")
    folder.adopt("tensorboard/events.ours")
    OwnFolder(tmp_path / "run", "a run").remove()
    assert [path.name for path in (tmp_path / "run/tensorboard").iterdir()] == ["events.theirs"]


def test_removing_leaves_what_is_not_on_the_list(tmp_path):
    folder = OwnFolder(tmp_path / "run", "a run")
    for name in ("a.pt", "sub/b.pt", "gone/c.pt"):
        write(folder, name)
    folder.own("parts").mkdir()
    for name in ("sub/theirs.pt", "parts/theirs.pt", "theirs.pt"):
        (tmp_path / "run" / name).write_text("theirs")
    folder.remove()
    left = sorted(str(path.relative_to(tmp_path / "run")) for path in (tmp_path / "run").rglob("*") if path.is_file())
    assert left == ["parts/theirs.pt", "sub/theirs.pt", "theirs.pt"]
    assert not (tmp_path / "run" / "gone").exists()


def test_removing_all_removes_the_folder_that_is_empty_then(tmp_path):
    folder = OwnFolder(tmp_path / "run", "a run")
    write(folder, "a/b/c.pt")
    folder.remove()
    assert not (tmp_path / "run").exists()


def test_removing_one_keeps_the_others(tmp_path):
    folder = OwnFolder(tmp_path, "a run")
    write(folder, "a.pt")
    write(folder, "b.pt")
    folder.remove("a.pt")
    assert OwnFolder(tmp_path, "a run").names == {"b.pt"}
    assert (tmp_path / "b.pt").exists()
    assert not (tmp_path / "a.pt").exists()
    with pytest.raises(ValueError, match="was not written by us"):
        folder.remove("theirs.pt")


def test_a_name_is_listed_before_its_file_is_there(tmp_path):
    folder = OwnFolder(tmp_path, "a run")

    def interrupted():
        with folder.writing("a.pt") as path:
            path.write_text("half")
            assert "a.pt" in json.loads((tmp_path / LIST).read_text())["files"]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert sorted(path.name for path in tmp_path.iterdir()) == [LIST]


def test_a_list_that_was_interrupted_is_no_other_thing(tmp_path):
    (tmp_path / f".unfinished-{LIST}").write_text("{")
    assert OwnFolder(tmp_path, "a run").names == set()
    assert [path.name for path in tmp_path.iterdir()] == [LIST]


def test_a_full_disk_says_which_file(tmp_path):
    def fails():
        with whole(tmp_path / "a.json"):
            raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: '\S+/a.json'"):
        fails()


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/../../x", LIST])
def test_names_stay_inside(tmp_path, name):
    with pytest.raises(ValueError, match="expected one inside the folder"):
        OwnFolder(tmp_path, "a run").own(name)


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")

    def fails():
        with whole(path) as unfinished:
            unfinished.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        fails()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
