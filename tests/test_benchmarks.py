"""The benchmarks run, on the smallest of their problems."""

import json
import subprocess
import sys
from pathlib import Path

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
