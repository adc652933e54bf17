"""The demo on a small data set: what it writes, that it resumes bit for bit, and what it says of bad input."""

import errno
import json
import re
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import torch

from rambo_plugins.demo import __main__ as demo
from rambo_plugins.demo import identity as identity_module
from rambo_plugins.demo.__main__ import main
from rambo_plugins.demo.data import ImageClasses, load_split
from rambo_plugins.demo.identity import Settings
from rambo_plugins.demo.report import markdown_table, summary
from rambo_plugins.demo.train import LOSSES, METRICS, Run
from rambo_plugins.folders import LIST, OwnFolder

SMALL = ["--data", "digits", "--seeds", "1", "--epochs", "3", "--steps", "3"]
SETTINGS = Settings(data="digits", epochs=3, steps=3)


def start(data, folder, loss_name="fastap", settings=SETTINGS):
    return Run(loss_name, 0, settings, data, OwnFolder(folder, "runs of the demo"), torch.device("cpu"))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def digits():
    return load_split("digits")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "out"
    assert main([*SMALL, "--out", str(folder)]) == 0
    return folder


def test_it_writes_metrics_curves_and_neighbours(outcome):
    metrics = json.loads((outcome / "metrics.json").read_text())
    assert [run["loss"] for run in metrics["results"]] == ["rambo-recall", "fastap", "contrastive"]
    for run in metrics["results"]:
        assert [epoch["epoch"] for epoch in run["history"]] == [1, 2, 3]
        assert all(0 < epoch[name] <= 1 and epoch["seconds"] > 0 for epoch in run["history"] for name in METRICS)
        assert run["history"][-1]["recall_at_1"] > 0.8  # ten classes: chance is 0.2, raw pixels do better
    assert {"torch", "pytorch-metric-learning", "python", "rambo-plugins"} <= set(metrics["versions"])
    assert metrics["settings"]["steps"] == 3
    test_set = load_split("digits")[1]
    pixels = torch.nn.functional.normalize(test_set.images.flatten(1).double())
    nearest = (pixels @ pixels.T).fill_diagonal_(-1).argmax(1)
    expected = (test_set.labels[nearest] == test_set.labels).double().mean().item()
    assert metrics["raw_pixels"]["recall_at_1"] == pytest.approx(expected)
    for name in ("curves.png", "neighbours.png"):
        image = matplotlib.image.imread(outcome / name)
        assert min(image.shape[:2]) > 300
        assert image[..., :3].std() > 0.05


def test_the_neighbours_are_framed_by_their_class(outcome):
    pixels = (255 * matplotlib.image.imread(outcome / "neighbours.png")[..., :3]).round().astype(int)
    green = (pixels == [0x1A, 0x96, 0x41]).all(-1).sum()
    assert green > 1000  # most neighbours are right


@pytest.mark.parametrize("loss_name", LOSSES)
def test_a_stopped_run_resumes_and_ends_bit_identical(loss_name, digits, tmp_path, monkeypatch):
    whole = start(digits, tmp_path / "whole", loss_name)
    whole.train("whole")

    def interrupt(run):
        save(run)
        if len(run.history) == 2:
            raise KeyboardInterrupt

    save = Run._save
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            start(digits, tmp_path / "stopped", loss_name).train("stopped")
    torch.manual_seed(99)  # whatever happens in between
    resumed = start(digits, tmp_path / "stopped", loss_name)
    assert len(resumed.history) == 2
    resumed.train("resumed")
    for one, other in zip(whole.model.state_dict().values(), resumed.model.state_dict().values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(whole.history, resumed.history, strict=True):
        assert {k: v for k, v in one.items() if k != "seconds"} == {k: v for k, v in other.items() if k != "seconds"}


def test_a_finished_run_is_not_trained_again(outcome, monkeypatch):
    monkeypatch.setattr(Run, "_train_epoch", lambda *_: pytest.fail("trained again"))
    before = json.loads((outcome / "metrics.json").read_text())["results"]
    assert main([*SMALL, "--out", str(outcome)]) == 0
    assert json.loads((outcome / "metrics.json").read_text())["results"] == before


@pytest.fixture
def small(digits, monkeypatch):
    """A tenth of the digits, and plots that take no time."""
    parts = [
        ImageClasses(
            (data.images[::10, 0] * 255).round().byte().numpy(),
            data.labels[::10].numpy(),
            data.class_names,
            np.zeros(len(data.labels[::10]), np.int64),
            ["digits"],
        )
        for data in digits
    ]
    monkeypatch.setattr(demo, "load_split", lambda name, root: tuple(parts))
    monkeypatch.setattr(demo, "draw_curves", lambda results, path: path.write_bytes(b"curves"))
    monkeypatch.setattr(demo, "draw_neighbours", lambda run, path: path.write_bytes(b"neighbours"))


QUICK = ["--data", "digits", "--seeds", "1", "--epochs", "2", "--steps", "1", "--losses", "fastap"]


@pytest.mark.usefixtures("small")
def test_other_settings_are_refused_unless_fresh(capsys, tmp_path):
    arguments = [*QUICK, "--steps", "2", "--out", str(tmp_path)]
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    before = contents(tmp_path)
    assert main(arguments) == 2
    assert re.search(
        r"fastap-0.pt was trained with other settings .*'steps': \(1, 2\).*--fresh", capsys.readouterr().err
    )
    assert contents(tmp_path) == before
    assert main([*arguments, "--fresh"]) == 0
    assert json.loads((tmp_path / "metrics.json").read_text())["settings"]["steps"] == 2
    assert not (tmp_path / "old").exists()


@pytest.fixture
def trained(digits, tmp_path):
    """A folder with a finished run, and its checkpoint."""
    start(digits, tmp_path, settings=Settings(data="digits", epochs=1, steps=1)).train("run")
    return tmp_path, tmp_path / "checkpoints" / "fastap-0.pt"


def again(data, folder):
    return start(data, folder, settings=Settings(data="digits", epochs=1, steps=1))


def test_a_run_goes_on_only_with_the_data_that_it_was_started_with(digits, trained):
    assert len(again(digits, trained[0]).history) == 1
    train, test = digits
    pixels = (test.images[:, 0] * 255).round().byte().numpy()
    pixels[0, 0, 0] ^= 1
    names, zeros = test.class_names, np.zeros(len(test), np.int64)
    other = train, ImageClasses(pixels, test.labels.numpy(), names, zeros, ["digits"])
    with pytest.raises(ValueError, match=r"trained with other settings .*'test images'"):
        again(other, trained[0])
    labels = test.labels.numpy().copy()
    labels[3] = (labels[3] + 1) % 5
    other = train, ImageClasses((test.images[:, 0] * 255).round().byte().numpy(), labels, names, zeros, ["digits"])
    with pytest.raises(ValueError, match=r"trained with other settings .*'test images'"):
        again(other, trained[0])


def test_a_run_goes_on_only_by_the_versions_that_it_was_started_by(digits, trained, monkeypatch):
    monkeypatch.setattr(identity_module, "version", lambda package: "0.0")
    with pytest.raises(ValueError, match=r"trained with other settings .*'torch': \('\d.*', '0.0'\)"):
        again(digits, trained[0])


def test_a_damaged_checkpoint_is_refused_and_stays(digits, trained):
    folder, path = trained
    good = path.read_bytes()
    history = again(digits, folder).history
    generator = np.random.default_rng(0)
    flips = [(int(place), good[place] ^ 64) for place in generator.integers(0, len(good), 25)]
    bad = [good[:place] + bytes([value]) + good[place + 1 :] for place, value in flips]
    refused = 0
    for content in [*bad, good[:-100], good[: len(good) // 2], b"", b"weights"]:
        path.write_bytes(content)
        try:
            assert again(digits, folder).history == history  # a byte between the parts, which no one reads
        except ValueError as error:
            refused += 1
            assert re.search(r"fastap-0.pt is damaged, or no checkpoint of the demo: .*; delete it", str(error))  # noqa: PT017
        assert path.read_bytes() == content
    assert refused > 20
    torch.save({"model": {}}, path)
    with pytest.raises(ValueError, match=r"no checkpoint of the demo: parts are missing"):
        again(digits, folder)


def test_a_folder_with_other_things_is_refused_and_left_as_it_is(tmp_path, capsys):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "my_resnet.pt").write_text("weights")
    before = contents(tmp_path)
    for arguments in ([], ["--fresh"]):
        assert main([*QUICK, *arguments, "--out", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "expected a new or empty folder" in error
        assert contents(tmp_path) == before


@pytest.mark.usefixtures("small")
def test_files_of_the_users_in_our_folder_stay_and_are_not_overwritten(tmp_path, capsys):
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    (tmp_path / "checkpoints" / "mine.pt").write_text("weights")
    (tmp_path / "checkpoints" / "contrastive-0.pt").write_text("theirs")
    assert main([*QUICK, "--out", str(tmp_path), "--fresh"]) == 0
    assert (tmp_path / "checkpoints" / "mine.pt").read_text() == "weights"
    assert main([*QUICK, "--losses", "contrastive", "--out", str(tmp_path)]) == 2
    assert "contrastive-0.pt: is there, but was not written by us" in capsys.readouterr().err
    assert (tmp_path / "checkpoints" / "contrastive-0.pt").read_text() == "theirs"


def not_finite(run, epoch, bar):
    with torch.no_grad():
        run.model[0].weight[0] = torch.nan
    return 1.0


@pytest.mark.usefixtures("small")
def test_fresh_keeps_the_runs_of_before_until_the_new_ones_are_finished(tmp_path, monkeypatch, capsys):
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    before = {name: content for name, content in contents(tmp_path).items() if name != LIST}
    fresh = [*QUICK, "--learning-rate", "0.01", "--fresh", "--out", str(tmp_path)]
    for _ in range(2):  # what failed and is begun afresh does not take the place of what was finished
        with monkeypatch.context() as patch:
            patch.setattr(Run, "_train_epoch", not_finite)
            assert main(fresh) == 2
        assert contents(tmp_path / "old") == before
        assert f"the runs of before are in {tmp_path / 'old'} until" in capsys.readouterr().out
    assert main(fresh[:-3] + fresh[-2:]) == 0
    assert json.loads((tmp_path / "metrics.json").read_text())["settings"]["learning_rate"] == 0.01
    assert set(contents(tmp_path)) == {*before, LIST}


@pytest.mark.usefixtures("small")
def test_new_runs_that_were_finished_are_those_of_before_for_the_next_fresh(tmp_path, monkeypatch):
    def interrupted(results, path):
        raise KeyboardInterrupt

    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    with monkeypatch.context() as patch:
        patch.setattr(demo, "draw_curves", interrupted)  # metrics.json is there, and what was before is not yet gone
        assert main([*QUICK, "--steps", "2", "--fresh", "--out", str(tmp_path)]) == 130
    assert (tmp_path / "old" / "metrics.json").exists()
    new = (tmp_path / "metrics.json").read_bytes()
    monkeypatch.setattr(Run, "_train_epoch", not_finite)
    assert main([*QUICK, "--fresh", "--out", str(tmp_path)]) == 2
    assert (tmp_path / "old" / "metrics.json").read_bytes() == new


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("what", ["network", "loss"])
def test_what_is_not_finite_is_not_saved_over_the_last_good_epoch(what, tmp_path, monkeypatch, capsys):
    def later(run, epoch, bar):
        if what == "network":
            return train_epoch(run, 1, bar) if epoch == 1 else not_finite(run, epoch, bar)
        if epoch == 2:
            run.loss_fn.register_forward_hook(lambda module, inputs, loss: loss * torch.nan)
        return train_epoch(run, epoch, bar)

    train_epoch = Run._train_epoch
    monkeypatch.setattr(Run, "_train_epoch", later)
    assert main([*QUICK, "--out", str(tmp_path)]) == 2
    said = {"network": "the network of epoch 2", "loss": "the loss of step 1 of epoch 2"}[what]
    assert f"error: fastap, seed 0: {said} is not finite" in capsys.readouterr().err
    saved = torch.load(tmp_path / "checkpoints" / "fastap-0.pt", weights_only=True)
    assert len(saved["history"]) == 1
    assert all(value.isfinite().all() for value in saved["model"].values())
    assert not (tmp_path / "metrics.json").exists()


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("name", ["fastap-0.pt", "metrics.json", "curves.png", "neighbours.png"])
def test_a_full_disk_is_said_in_a_line_and_costs_no_finished_work(name, tmp_path, monkeypatch, capsys):
    def full(path, content, **options):
        before = path.parent / name  # the first epoch's checkpoint still fits
        if path.name == f".unfinished-{name}" and (name != "fastap-0.pt" or before.exists()):
            write_bytes(path, b"half of i")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write_bytes(path, content if isinstance(content, bytes) else content.encode())

    write_bytes = Path.write_bytes
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        patch.setattr(Path, "write_text", full)
        assert main([*QUICK, "--out", str(tmp_path)]) == 2
    said = capsys.readouterr()
    (error,) = [line for line in said.err.splitlines() if line.startswith("error")]
    assert "No space left on device" in error
    assert ("| fastap |" in said.out) == (name != "fastap-0.pt")  # the figures are shown before they are written
    assert not (tmp_path / name).exists()
    assert not list(tmp_path.rglob(".unfinished*"))
    saved = torch.load(tmp_path / "checkpoints" / "fastap-0.pt", weights_only=True)
    assert len(saved["history"]) == (1 if name == "fastap-0.pt" else 2)
    assert main([*QUICK, "--out", str(tmp_path)]) == 0
    assert (tmp_path / "neighbours.png").exists()


def test_a_file_that_a_kill_left_half_written_is_not_read(digits, trained):
    folder, path = trained
    (path.parent / f".unfinished-{path.name}").write_bytes(b"half")
    assert len(again(digits, folder).history) == 1


@pytest.mark.usefixtures("small")
def test_interrupted_it_says_so_and_keeps_what_is_finished(tmp_path, monkeypatch, capsys):
    def interrupted(run, epoch, bar):
        if epoch == 2:
            raise KeyboardInterrupt
        return train_epoch(run, epoch, bar)

    train_epoch = Run._train_epoch
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_train_epoch", interrupted)
        assert main([*QUICK, "--out", str(tmp_path), "--fresh"]) == 130
    assert "interrupted; the same command without --fresh goes on" in capsys.readouterr().err
    monkeypatch.setattr(
        Run, "_train_epoch", lambda run, epoch, bar: train_epoch(run, epoch if epoch == 2 else 1 / 0, bar)
    )
    assert main([*QUICK, "--out", str(tmp_path)]) == 0


def test_bad_arguments_are_named(tmp_path, capsys):
    assert main(["--data", "omniglot", "--out", str(tmp_path)]) == 2
    assert "--root" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    for out in ("file", "file/below"):
        assert main([*SMALL, "--out", str(tmp_path / out)]) == 2
        assert capsys.readouterr().err.count("\n") == 1
    for arguments in (
        ["--losses", "rambo"], ["--seeds", "0"], ["--seeds", "٣"], ["--seeds", "1_0"], ["--device", "gpu"],
        ["--device", "meta"], ["--device", "cuda:99"], ["--data", "sop"], ["--learning-rate", "nan"],
        ["--learning-rate", "0"], ["--learning-rate", "inf"], ["--learning-rate", "1_0"], ["--threads", "9999999999"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 2
        assert arguments[1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "digits", "--root", "x"], "--root: expected with --data omniglot alone, got --data digits"),
        (["--root", "x"], "--root: expected with --data omniglot alone, got --data glyphs"),
        (["--losses", "fastap", "contrastive", "fastap"], "--losses: expected each once"),
        (["--seed", "3"], "unrecognized arguments: --seed"),
    ],
)
def test_options_that_would_do_nothing_or_something_else_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["--device", "cuda"])
    assert "argument --device: 'cuda': " in capsys.readouterr().err


def test_the_table_is_the_mean_and_deviation_of_the_last_epochs():
    def run(loss, *values):
        return {"loss": loss, "history": [dict.fromkeys((*METRICS, "seconds"), value) for value in values]}

    table = markdown_table(summary([run("a", 0.1, 0.5), run("a", 0.9, 0.7), run("b", 0.25)]))
    assert table.splitlines()[2:] == [
        "| a | " + " | ".join(["60.0 ± 14.1"] * 5) + " |",
        "| b | " + " | ".join(["25.0 ± 0.0"] * 5) + " |",
    ]
