"""The demo on a small data set: what it writes, that it resumes bit for bit, and what it says of bad input."""

import json
import re

import matplotlib.image
import pytest
import torch

from rambo_plugins.demo.__main__ import main
from rambo_plugins.demo.data import load_split
from rambo_plugins.demo.report import markdown_table, summary
from rambo_plugins.demo.train import LOSSES, METRICS, Run, Settings

SMALL = ["--data", "digits", "--seeds", "1", "--epochs", "3", "--steps", "3"]
SETTINGS = Settings(data="digits", epochs=3, steps=3)


@pytest.fixture(scope="module")
def digits():
    return load_split("digits")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
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
    (tmp_path / "whole").mkdir()
    (tmp_path / "stopped").mkdir()
    whole = Run(loss_name, 0, SETTINGS, digits, tmp_path / "whole", torch.device("cpu"))
    whole.train("whole")

    def interrupt(run):
        save(run)
        if len(run.history) == 2:
            raise KeyboardInterrupt

    save = Run._save
    with monkeypatch.context() as patch:
        patch.setattr(Run, "_save", interrupt)
        with pytest.raises(KeyboardInterrupt):
            Run(loss_name, 0, SETTINGS, digits, tmp_path / "stopped", torch.device("cpu")).train("stopped")
    torch.manual_seed(99)  # whatever happens in between
    resumed = Run(loss_name, 0, SETTINGS, digits, tmp_path / "stopped", torch.device("cpu"))
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


def test_other_settings_are_refused_unless_fresh(outcome, capsys, tmp_path):
    arguments = [*SMALL[:-1], "2", "--out", str(tmp_path), "--losses", "fastap"]
    assert main([*SMALL, "--out", str(tmp_path), "--losses", "fastap"]) == 0
    assert main(arguments) == 2
    assert re.search(
        r"fastap-0.pt was trained with other settings .*'steps': \(3, 2\).*--fresh", capsys.readouterr().err
    )
    assert main([*arguments, "--fresh"]) == 0


def test_bad_arguments_are_named(tmp_path, capsys):
    assert main(["--data", "omniglot", "--out", str(tmp_path)]) == 2
    assert "--root" in capsys.readouterr().err
    (tmp_path / "file").write_text("")
    assert main([*SMALL, "--out", str(tmp_path / "file")]) == 2
    for arguments in (["--losses", "rambo"], ["--seeds", "0"], ["--device", "gpu"], ["--data", "sop"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert arguments[1] in capsys.readouterr().err


def test_the_table_is_the_mean_and_deviation_of_the_last_epochs():
    def run(loss, *values):
        return {"loss": loss, "history": [dict.fromkeys((*METRICS, "seconds"), value) for value in values]}

    table = markdown_table(summary([run("a", 0.1, 0.5), run("a", 0.9, 0.7), run("b", 0.25)]))
    assert table.splitlines()[2:] == [
        "| a | " + " | ".join(["60.0 ± 14.1"] * 5) + " |",
        "| b | " + " | ".join(["25.0 ± 0.0"] * 5) + " |",
    ]
