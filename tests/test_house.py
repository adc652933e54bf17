"""What holds the package together: who may import whom, what a missing host says, and that the README is true."""

import ast
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "rambo_plugins"
STANDARD = set(sys.stdlib_module_names)
ALLOWED = {  # what each part may import besides the standard library and itself
    "core": {"torch", "numba", "numpy"},
    "pml": {"torch", "torchvision", "numpy", "PIL", "tqdm", "pytorch_metric_learning", "rambo_plugins.core"},
    "mmdet": {"torch", "mmdet", "mmengine", "rambo_plugins.core"},
    "detectron2": {"torch", "detectron2", "rambo_plugins.core"},
    "evaluation": {"torch", "numpy", "faiss", "tqdm", "matplotlib", "PIL", "pyarrow", "rambo_plugins.core"},
    "retrieval": {
        "torch", "torchvision", "timm", "numpy", "sklearn", "PIL", "matplotlib", "tqdm", "faiss",
        "pytorch_metric_learning", "rambo_plugins.core", "rambo_plugins.pml", "rambo_plugins.evaluation",
        "rambo_plugins.demo",
    },
    "demo": {
        "torch", "numpy", "scipy", "sklearn", "PIL", "matplotlib", "tqdm", "faiss", "pytorch_metric_learning",
        "rambo_plugins.core", "rambo_plugins.pml", "rambo_plugins.evaluation",
    },
}  # fmt: skip


# For whoever writes files, of the standard library alone; for whoever reads images, of numpy and Pillow.
SHARED = {"rambo_plugins.command_line", "rambo_plugins.folders", "rambo_plugins.images"}


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module


@pytest.mark.parametrize("part", sorted(p.name for p in PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"))
def test_parts_import_the_core_and_one_host(part):
    for path in (PACKAGE / part).rglob("*.py"):
        for module in imports_of(path):
            top = module.split(".")[0]
            if top == "rambo_plugins":
                owner = ".".join(module.split(".")[:2])
                if owner in SHARED:
                    continue
                assert owner in ALLOWED[part] | {f"rambo_plugins.{part}"}, f"{path} imports {module}"
            elif top not in STANDARD:
                assert top in ALLOWED[part], f"{path} imports {module}"


@pytest.mark.parametrize(
    ("part", "host", "message"),
    [
        ("pml", "pytorch_metric_learning", 'needs pytorch-metric-learning: pip install "rambo-plugins[pml]"'),
        ("mmdet", "mmdet", 'needs mmdet: pip install "rambo-plugins[mmdet]"'),
        ("detectron2", "detectron2", 'not on PyPI: pip install "rambo-plugins[detectron2]" installs what it needs'),
        ("evaluation", "faiss", 'pip install "rambo-plugins[faiss-cpu]"'),
        ("retrieval", "torchvision", 'needs torchvision: pip install "rambo-plugins[retrieval]"'),
        ("demo", "matplotlib", 'pip install "rambo-plugins[demo]"'),
    ],
)  # fmt: skip
def test_a_missing_host_is_named_with_the_remedy(part, host, message):
    program = f"import sys; sys.modules[{host!r}] = None; import rambo_plugins.{part}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert message in done.stderr.splitlines()[-1]
    assert f"ImportError: rambo_plugins.{part} needs" in done.stderr


def test_the_core_runs_without_any_host():
    hosts = ["pytorch_metric_learning", "faiss", "matplotlib", "sklearn", "tqdm", "mmdet", "detectron2"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({hosts})); import torch; from rambo_plugins.core import *; "
        "print(recall_loss(torch.tensor([0., 1.]), torch.tensor([True, False]), lambda_val=1.0).item())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert float(done.stdout) == pytest.approx(0.6931, abs=1e-4)


README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.strip().splitlines()[-1][:40])
def test_code_of_the_readme_runs_and_prints_what_it_says(block):
    """Each block runs by itself; what it prints is the comments that start with ``# ->``, in order."""
    if "detectron2" in block:
        pytest.importorskip("detectron2")
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == re.findall(r"# -> (.*)", block)


def test_the_readme_has_code():
    assert len(BLOCKS) >= 3


def test_the_tables_of_the_readme_are_the_results_that_are_committed():
    from rambo_plugins.demo.report import markdown_table

    for name in re.findall(r"<!-- table: (.*?) -->", README):
        outcome = json.loads((ROOT / name).read_text())
        assert markdown_table(outcome["summary"]) in README, f"{name}: the table of README.md is another one"
    assert "<!-- table: benchmarks/results/demo.json -->" in README
    pixels = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text())["raw_pixels"]
    figures = (100 * pixels[name] for name in ("recall_at_1", "mean_average_precision_at_r"))
    assert "by raw pixels: R@1 {:.1f}, MAP@R {:.1f}.".format(*figures) in README


def test_the_lines_on_speed_in_the_readme_are_the_results_that_are_committed():
    speed = runpy.run_path(str(ROOT / "benchmarks" / "speed.py"))
    points = json.loads((ROOT / "benchmarks" / "results" / "speed.json").read_text())["points"]
    lines = re.findall(r"^\| \S+ × \S+, \S+ \|.*", README, flags=re.MULTILINE)
    assert len(lines) > 5
    assert set(lines) <= set(speed["markdown"](points).splitlines())


def test_the_lines_on_detection_in_the_readme_are_the_results_that_are_committed():
    pytest.importorskip("pycocotools")
    detection = runpy.run_path(str(ROOT / "benchmarks" / "detection.py"))
    results = json.loads((ROOT / "benchmarks" / "results" / "detection.json").read_text())
    lines = re.findall(r"^\| (?:glyphs|bccd) \| .*", README, flags=re.MULTILINE)
    assert len(lines) > 5
    assert set(lines) <= set(detection["markdown"](results).splitlines())
    step = json.loads((ROOT / "benchmarks" / "results" / "detection_step.json").read_text())
    assert "{:.0f} ms of {:.1f} s".format(1000 * step["seconds"]["loss rambo"], step["seconds"]["step ce"]) in README


@pytest.mark.parametrize("readme", ["README.md", "benchmarks/README.md"])
def test_the_lines_on_recall_are_the_results_that_are_committed(readme):
    recall = runpy.run_path(str(ROOT / "benchmarks" / "recall.py"))
    results = json.loads((ROOT / "benchmarks" / "results" / "recall.json").read_text())
    text = (ROOT / readme).read_text()
    printed = recall["markdown"](results)
    lines = re.findall(r"^\| [\d,]+ × [\d,]+[^|]* \| .*s, .*GB.*", text, flags=re.MULTILINE)
    assert len(lines) > 3
    assert set(lines) <= set(printed.splitlines())
    assert re.search(r"by N² from 10,000 × 10,000: \d+ GB, \d+×", printed).group() in text
    assert re.search(r"[\d.]+ GiB(?= above the interpreter)", printed).group() in text


def test_the_lines_of_the_retrieval_study_are_the_results_that_are_committed():
    study = runpy.run_path(str(ROOT / "benchmarks" / "retrieval.py"))
    outcome = json.loads((ROOT / "benchmarks" / "results" / "retrieval.json").read_text())
    assert study["summary"](outcome) in README
    assert study["markdown"](outcome) in (ROOT / "benchmarks" / "README.md").read_text()
    rows = {(row["data"], row["loss"]): row for row in outcome["rows"] if not row["change"]}
    for metric, said in (
        ("mean_average_precision_at_r", "1.5 ± 0.9 and 1.0 ± 0.8"),
        ("recall_at_1", "0.4 ± 0.6 and 1.4 ± 1.4"),
    ):
        gains = []
        for data in outcome["data"]:
            best = study["best_of_pml"](outcome["rows"], data, metric)
            gains.append(study["percent"](study["paired"](rows[data, "rambo-ap-margins"], best, metric)))
        assert " and ".join(gains) == said
        assert said in README


def test_the_test_command_of_the_readme_is_what_ci_runs():
    assert "make test" in README
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "make test"


@pytest.mark.slow
def test_an_installed_wheel_carries_everything(tmp_path):
    """The wheel, installed alone beside the environment's packages, runs the demo."""
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, ROOT], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    target = tmp_path / "site"
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, wheel], check=True, cwd=tmp_path
    )
    assert (target / "rambo_plugins" / "py.typed").exists()
    program = (
        f"import sys; sys.path.insert(0, {str(target)!r}); import rambo_plugins; "
        f"assert rambo_plugins.__file__.startswith({str(target)!r}); from rambo_plugins.demo.__main__ import main; "
        "sys.exit(main(['--data', 'digits', '--seeds', '1', '--epochs', '1', '--steps', '2']))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    assert (tmp_path / "runs" / "demo" / "metrics.json").exists()
