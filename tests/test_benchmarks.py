"""The benchmarks run, on the smallest of their problems."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def test_speed(tmp_path):
    command = [sys.executable, BENCHMARKS / "speed.py", "--largest", "1e3", "--out", tmp_path / "speed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "speed.json").read_text())
    assert {point["items"] for point in outcome["points"]} == {1000}
    for point in outcome["points"]:
        assert set(point["seconds"]) == {"ours", "two sorts", "loop over relevant", "cross-entropy"}
    assert set(outcome["metric_learning"]) == {"128", "512"}
    assert 0 < outcome["peak_memory"]["1000"] < 2**32
    assert (tmp_path / "speed.png").stat().st_size > 10_000


def test_recall(tmp_path):
    command = [sys.executable, BENCHMARKS / "recall.py", "--problems", "tiny", "--repeats", "1", "--threads", "1"]
    command += ["--folder", tmp_path, "--out", tmp_path / "recall", "--methods", "count", "faiss", "topk", "pml"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "recall.json").read_text())
    runs = {run["method"]: run for run in outcome["runs"]}
    assert set(runs) == {"count", "faiss", "topk", "pml"}
    assert runs["count"]["recall"] == pytest.approx(runs["topk"]["recall"])
    assert runs["count"]["recall"]["1"] == pytest.approx(runs["pml"]["recall"]["1"])
    assert 0 < runs["count"]["recall"]["1"] < runs["count"]["recall"]["10"] <= 1
    assert all(0 < run["seconds"] < 60 and 0 <= run["above"] < 2**30 for run in runs.values())
    assert "| 300 × 400 |" in done.stdout
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "recall.json").read_text()) == outcome  # nothing was run again


@pytest.mark.parametrize("toolkit", ["mmdet", "detectron2"])
def test_detection(tmp_path, toolkit):
    pytest.importorskip(toolkit)
    command = [sys.executable, BENCHMARKS / "detection.py", "--pages", "8", "4", "--epochs", "1", "--out", tmp_path]
    command += ["--toolkit", toolkit, "--variants", "ce", "rambo"]
    command += ["--draw", f"{toolkit}-ce-lr0.001-seed0", f"{toolkit}-rambo-lr0.001-seed0"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert {result["variant"] for result in results} == {"ce", "rambo"}
    for result in results:
        assert 0 <= result["AP50"] <= 1
        assert len(result["AP50_per_class"]) == 20
        assert [point["epoch"] for point in result["curve"]] == [1]
    for name in ("glyphs.jpg", "glyphs_classes.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    assert f"| glyphs | {toolkit} | rambo | 0.001 | 1 |" in done.stdout
    before = (tmp_path / "results.json").stat().st_mtime_ns
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stderr
    assert (tmp_path / "results.json").stat().st_mtime_ns > before
    assert json.loads((tmp_path / "results.json").read_text()) == results  # nothing was run again


def test_unlabelled_letters_lack_their_boxes_in_training_alone(tmp_path):
    import detection_data

    whole = detection_data.glyph_scenes(tmp_path / "whole", 30, 10)
    part = detection_data.glyph_scenes(tmp_path / "part", 30, 10, "glyphs-unlabelled", 0.25)
    boxes = {}
    for data in (whole, part):
        for split in ("train", "test"):
            annotations = json.loads(Path(getattr(data, split)).read_text())["annotations"]
            boxes[data.name, split] = [tuple(a["bbox"]) for a in annotations]
    assert boxes["glyphs", "test"] == boxes["glyphs-unlabelled", "test"]
    assert set(boxes["glyphs-unlabelled", "train"]) < set(boxes["glyphs", "train"])
    assert 0.65 < len(boxes["glyphs-unlabelled", "train"]) / len(boxes["glyphs", "train"]) < 0.85


def test_detection_data_of_voc_folders(tmp_path):
    """BCCD's layout: a box without area is left out, train and val become train."""
    import detection_data

    for folder in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (tmp_path / folder).mkdir(parents=True)
    boxes = {"a": (1, 2, 11, 22), "b": (5, 5, 5, 9), "c": (0, 0, 4, 4)}
    for name, (x0, y0, x1, y1) in boxes.items():
        (tmp_path / f"Annotations/{name}.xml").write_text(
            "<annotation><size><width>64</width><height>48</height></size><object><name>WBC</name><bndbox>"
            f"<xmin>{x0}</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox></object></annotation>"
        )
    for split, name in (("train", "a"), ("val", "b"), ("test", "c")):
        (tmp_path / f"ImageSets/Main/{split}.txt").write_text(name + "\n")
    data = detection_data.bccd(tmp_path, tmp_path / "coco")
    train, test = (json.loads(Path(path).read_text()) for path in (data.train, data.test))
    assert [image["file_name"] for image in train["images"]] == ["a.jpg", "b.jpg"]
    assert [(a["bbox"], a["category_id"]) for a in train["annotations"]] == [([1, 2, 10, 20], 1)]
    assert [a["bbox"] for a in test["annotations"]] == [[0, 0, 4, 4]]


@pytest.mark.slow
def test_detection_step(tmp_path):
    pytest.importorskip("mmdet")
    command = [sys.executable, BENCHMARKS / "detection_step.py", "--size", "192", "128", "--repetitions", "1"]
    done = subprocess.run([*command, "--out", tmp_path / "step.json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads((tmp_path / "step.json").read_text())
    assert set(outcome["seconds"]) == {"step ce", "step rambo", "loss ce", "loss rambo"}
    assert outcome["seconds"]["loss rambo"] < outcome["seconds"]["step rambo"]
