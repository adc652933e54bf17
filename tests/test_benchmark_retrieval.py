"""The retrieval benchmark: an honest choice of configurations, the statistics of its tables, and a tiny study."""

import dataclasses
import json
import math

import matplotlib.image
import numpy as np
import pytest
import retrieval
import torch
from pytorch_metric_learning.losses import ProxyAnchorLoss
from scipy import stats

from rambo_plugins.demo.data import load_split
from rambo_plugins.pml import RamboAPLoss, RamboRecallLoss

TINY = ["--data", "digits", "--losses", "rambo-ap", "fastap", "--steps", "4", "--seeds", "0", "1", "--sweep-steps", "2",
        "--sweep-seeds", "7", "--ablation-seeds", "0", "--every", "1", "--jobs", "1"]  # fmt: skip


@pytest.fixture(scope="module")
def digits():
    return retrieval.load_sides("digits", None)


@pytest.fixture(autouse=True)
def few_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def arguments(folder, *more):
    return [*TINY, "--runs", str(folder / "runs"), "--out", str(folder / "out" / "retrieval.json"), *more]


def spec(loss="fastap", options=None, split="validation", seed=0, steps=3):
    return retrieval.Spec("digits", split, loss, options or {}, seed, steps, 1, False)


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    """A finished study: its folder."""
    folder = tmp_path_factory.mktemp("retrieval")
    assert retrieval.main(arguments(folder)) == 0
    return folder


def outcome_of(folder):
    return json.loads((folder / "out" / "retrieval.json").read_text())


def test_every_loss_has_as_many_configurations_and_they_differ():
    assert set(retrieval.SWEEP) == set(retrieval.LOSSES)
    assert {len(configurations) for configurations in retrieval.SWEEP.values()} == {6}
    for loss, configurations in retrieval.SWEEP.items():
        assert len({retrieval.name_of(options) for options in configurations}) == 6, loss


def test_the_sweep_holds_the_defaults_of_each_loss():
    defaults = {
        "multi-similarity": {"alpha": 2, "beta": 50, "base": 0.5}, "fastap": {"num_bins": 10},
        "smoothap": {"temperature": 0.01}, "supcon": {"temperature": 0.1}, "triplet": {"margin": 0.05},
        "proxy-anchor": {"margin": 0.1, "alpha": 32, "proxy_lr": 0.01},
        **{name: {"lambda_val": 4, "margin": 0.02} for name in ("rambo-recall-log", "rambo-recall-loglog", "rambo-ap")},
    }  # fmt: skip
    for loss, options in defaults.items():
        assert options in retrieval.SWEEP[loss]
        made = dict(options)
        if made.pop("proxy_lr", None):
            made |= {"num_classes": 3, "embedding_size": 2}
        default = retrieval.LOSSES[loss](**{k: v for k, v in made.items() if k in ("num_classes", "embedding_size")})
        for name, value in options.items():
            assert name == "proxy_lr" or getattr(default, name) == value


@pytest.mark.parametrize("name", ["digits", "glyphs"])
def test_training_validation_and_test_classes_are_disjoint(name):
    sides = retrieval.load_sides(name, None)
    (rest, validation), (train, test) = sides["validation"], sides["test"]
    names = [set(data.class_names) for data in (rest, validation, test)]
    assert all(names)
    assert not names[0] & names[1]
    assert not (names[0] | names[1]) & names[2]
    assert names[0] | names[1] == set(train.class_names)
    assert len(names[1]) == round(len(train.class_names) / 3)
    assert len(rest) + len(validation) == len(train)
    whole_train, whole_test = load_split(name)
    assert (train.class_names, test.class_names) == (whole_train.class_names, whole_test.class_names)


def test_a_part_has_the_images_and_names_of_its_classes(digits):
    train = digits["test"][0]
    for data in digits["validation"]:
        for number, name in enumerate(data.class_names):
            of_class = train.images[train.labels == train.class_names.index(name)]
            torch.testing.assert_close(data.images[data.labels == number], of_class, rtol=0, atol=1e-6)


def test_the_sweep_measures_on_validation_classes_and_the_rest_on_test_classes(study, digits):
    outcome = outcome_of(study)
    sweep = [run for run in outcome["runs"] if run["split"] == "validation"]
    rest = [run for run in outcome["runs"] if run["split"] == "test"]
    assert len(sweep) == 12
    assert {run["steps"] for run in sweep} == {2}
    assert {run["seed"] for run in sweep} == {7}
    assert all([point["step"] for point in run["curve"]] == [1, 2] for run in sweep)
    assert {run["steps"] for run in rest} == {4}
    assert all([point["step"] for point in run["curve"]] == [4] for run in rest)  # once, after the last step
    assert {run["seed"] for run in rest} == {0, 1}
    for run in (sweep[0], rest[0]):
        fields = {field.name: run[field.name] for field in dataclasses.fields(retrieval.Spec)}
        here = retrieval.train(retrieval.Spec(**fields), digits[run["split"]])
        assert {**here, "seconds": 0} == {**run, "seconds": 0}


def test_the_run_trains_and_measures_on_the_images_of_its_split(digits, monkeypatch):
    """The network sees no pixel of the test classes in a sweep, and none of them in the training of a final run."""
    seen = []
    embed = retrieval.embed

    def spy(model, images, bfloat16):
        seen.append((model.training, {image.numpy().tobytes() for image in images}))
        return embed(model, images, bfloat16)

    monkeypatch.setattr(retrieval, "embed", spy)
    test_images = {image.numpy().tobytes() for image in digits["test"][1].images}
    validation_images = {image.numpy().tobytes() for image in digits["validation"][1].images}
    for split in ("validation", "test"):
        seen.clear()
        retrieval.train(spec(split=split), digits[split])
        trained = set().union(*(images for training, images in seen if training))
        measured = set().union(*(images for training, images in seen if not training))
        assert not trained & test_images
        assert measured == (validation_images if split == "validation" else test_images)
        assert bool(trained & validation_images) == (split == "test")


def test_all_losses_of_a_seed_start_alike_and_see_the_same_batches(digits, monkeypatch):
    seen = []
    embed = retrieval.embed

    def spy(model, images, bfloat16):
        if model.training:
            seen[-1].append((images, None if seen[-1] else [p.detach().clone() for p in model.parameters()]))
        return embed(model, images, bfloat16)

    monkeypatch.setattr(retrieval, "embed", spy)
    for loss, options in (("fastap", {}), ("proxy-anchor", {"proxy_lr": 0.01}), ("rambo-ap", {"margin": 0.1})):
        for seed in (0, 1):
            seen.append([])
            retrieval.train(spec(loss, options, seed=seed), digits["validation"])
    first, other_seed = seen[:2]
    for run in seen[2::2]:
        assert all(torch.equal(a[0], b[0]) for a, b in zip(first, run, strict=True))
        assert all(torch.equal(a, b) for a, b in zip(first[0][1], run[0][1], strict=True))
    assert not torch.equal(first[0][0], other_seed[0][0])
    assert not torch.equal(first[0][1][0], other_seed[0][1][0])


def test_every_configuration_of_every_loss_trains(digits, monkeypatch):
    monkeypatch.setattr(retrieval, "evaluate", lambda *_: {})
    for loss, configurations in retrieval.SWEEP.items():
        for options in configurations:
            run = retrieval.train(spec(loss, options, steps=1), digits["validation"])
            assert run["curve"][0]["loss"] > 0, (loss, options)
            assert run["options"] == options


def test_the_proxies_move_at_a_learning_rate_of_their_own(digits, monkeypatch):
    made = []

    def proxy_anchor(**options):
        made.append(ProxyAnchorLoss(**options))
        made.append(made[-1].proxies.detach().clone())
        return made[-2]

    monkeypatch.setitem(retrieval.LOSSES, "proxy-anchor", proxy_anchor)
    retrieval.train(spec("proxy-anchor", {"proxy_lr": 0.5}, steps=1), digits["validation"])
    moved = (made[0].proxies - made[1]).abs()
    assert moved.max().item() == pytest.approx(0.5, rel=1e-2)  # Adam's first step is the learning rate


def test_the_chosen_configuration_has_the_largest_mean_of_both_metrics(tmp_path):
    args = retrieval.parse_arguments(arguments(tmp_path))
    args.runs.mkdir()
    study = retrieval.Study(args)
    figures = [(0.9, 0.1), (0.5, 0.4), (0.6, 0.5), (0.7, 0.3), (0.2, 0.7), (0.0, 0.9)]
    for options, (recall, precision) in zip(retrieval.SWEEP["fastap"], figures, strict=True):
        assert study.chosen("digits", "fastap") is None  # not before all have been tried
        (one,) = study.sweep_specs("digits", "fastap", options)
        run = {"recall_at_1": recall, "mean_average_precision_at_r": precision}
        (args.runs / one.file_name).write_text(json.dumps(run))
    assert study.chosen("digits", "fastap") == retrieval.SWEEP["fastap"][2]
    assert study.chosen("digits", "rambo-ap") is None
    assert {s.loss for s in study.final()} == {"fastap"}
    assert study.ablations() == []


def test_the_final_runs_have_the_chosen_configuration_and_the_ablations_change_one_thing(study):
    outcome = outcome_of(study)
    chosen = {case["loss"]: case["chosen"] for case in outcome["sweep"]}
    finals = [row for row in outcome["rows"] if not row["change"]]
    assert {row["loss"]: row["options"] for row in finals} == chosen
    assert all(row["seeds"] == [0, 1] for row in finals)
    changed = {row["change"]: row["options"] for row in outcome["rows"] if row["change"]}
    base = chosen["rambo-ap"]
    assert changed == {
        "no margin": {**base, "margin": 0.0},
        "memory of 3 batches": {**base, "memory": 3},
        "λ / 5": {**base, "lambda_val": base["lambda_val"] / 5},
        "λ × 5": {**base, "lambda_val": base["lambda_val"] * 5},
        "gradient through rank⁺": {**base, "rank_plus_grad": True},
    }
    assert all(row["seeds"] == [0] and row["loss"] == "rambo-ap" for row in outcome["rows"] if row["change"])


def test_it_writes_the_json_the_tables_and_the_figure(study, capsys):
    outcome = outcome_of(study)
    assert outcome["missing"] == []
    assert len(outcome["runs"]) == 12 + 4 + 5
    assert outcome["settings"]["steps"] == 4
    assert {"torch", "pytorch-metric-learning", "rambo-plugins"} <= set(outcome["versions"])
    sides = outcome["data"]["digits"]["sides"]
    assert {side: about["classes"] for side, about in sides.items()} == {
        "rest of the training": 3, "validation": 2, "test": 5,
    }  # fmt: skip
    assert matplotlib.image.imread(study / "out" / "retrieval.png")[..., :3].std() > 0.05
    assert retrieval.main(arguments(study, "--report")) == 0
    printed = capsys.readouterr().out.strip()
    assert printed == retrieval.summary(outcome) + "\n\n" + retrieval.markdown(outcome)
    assert {line.split(" |")[0] for line in printed.splitlines()[2:4]} == {"| fastap", "| rambo-ap"}  # a line a loss


def test_a_finished_study_runs_nothing_again(study, monkeypatch):
    before = outcome_of(study)
    monkeypatch.setattr(retrieval.ProcessPoolExecutor, "submit", lambda *_: pytest.fail("ran again"))
    assert retrieval.main(arguments(study)) == 0
    assert outcome_of(study) == before


def test_a_study_that_lacks_a_run_runs_that_one_alone_and_a_failure_leaves_the_others(study, tmp_path, capsys):
    args = retrieval.parse_arguments(arguments(study))
    lost, blocked = (s.file_name for s in retrieval.Study(args).final()[:2])
    folder = tmp_path / "runs"
    folder.mkdir()
    for path in (study / "runs").glob("*.json"):
        if path.name not in (lost, blocked):
            (folder / path.name).write_text(path.read_text())
    (folder / blocked / "in the way").mkdir(parents=True)
    kept = {path.name: path.stat().st_mtime_ns for path in folder.glob("*.json") if path.is_file()}
    assert retrieval.main(arguments(tmp_path, "--phase", "final")) == 1
    assert f"failed: {blocked}: " in capsys.readouterr().err
    again, first = (json.loads((path / lost).read_text()) for path in (folder, study / "runs"))
    assert {**again, "seconds": 0} == {**first, "seconds": 0}  # bit for bit
    assert outcome_of(tmp_path)["missing"] == [blocked]
    assert all((folder / name).stat().st_mtime_ns == when for name, when in kept.items())


def test_a_loss_that_is_not_finite_is_an_error_that_names_the_step(digits, monkeypatch):
    monkeypatch.setitem(retrieval.LOSSES, "fastap", lambda: lambda embeddings, *_: embeddings.sum() * math.nan)
    with pytest.raises(FloatingPointError, match="nan at step 1"):
        retrieval.train(spec(), digits["validation"])


def test_runs_of_other_settings_have_other_files():
    base = spec()
    others = [dataclasses.replace(base, **change) for change in (
        {"data": "glyphs"}, {"split": "test"}, {"loss": "rambo-ap"}, {"options": {"num_bins": 5}}, {"seed": 1},
        {"steps": 4}, {"bfloat16": True},
    )]  # fmt: skip
    assert len({one.file_name for one in (base, *others)}) == 8


@pytest.mark.parametrize("values", [[0.81, 0.79, 0.84, 0.80, 0.82], [0.5, 0.7], [0.1, 0.2, 0.1]])
def test_the_interval_is_students(values):
    low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    assert retrieval.interval(values) == pytest.approx((high - low) / 2, abs=1e-12)


def test_the_interval_of_one_value_is_not_known():
    assert math.isnan(retrieval.interval([0.5]))
    assert retrieval.percent([0.5]) == "50.0"


def test_the_table_takes_differences_to_the_best_of_pml_seed_by_seed():
    def row(loss, recall, precision, change="", data="digits", seeds=(0, 1, 2)):
        return {"data": data, "loss": loss, "change": change, "options": {"margin": 0.1}, "seconds": 1.0,
                "seeds": list(seeds), "recall_at_1": recall, "mean_average_precision_at_r": precision}  # fmt: skip

    rows = [
        row("rambo-ap", [0.90, 0.80, 0.70], [0.60, 0.50, 0.40]),
        row("fastap", [0.80, 0.80, 0.50], [0.40, 0.45, 0.38]),
        row("supcon", [0.70, 0.60, 0.40], [0.55, 0.45, 0.44]),
        row("supcon", [0.99, 0.99, 0.99], [0.99, 0.99, 0.99], data="glyphs"),  # of other data: no mark to beat here
        row("rambo-ap", [0.60, 0.95], [0.30, 0.55], "no margin", seeds=(2, 0)),
    ]
    outcome = {"rows": rows, "data": {}, "sweep": [{"data": "digits", "loss": "fastap", "chosen": {"num_bins": 5},
               "tried": [{"options": {"num_bins": n}, "recall_at_1": r, "mean_average_precision_at_r": r}
                         for n, r in ((5, 0.5), (10, None))]}]}  # fmt: skip

    def text(values, sign=""):
        half = stats.t.interval(0.95, len(values) - 1, scale=stats.sem(values))[1]
        return f"{np.mean(values):{sign}.1f} ± {half:.1f}"

    lines = retrieval.markdown(outcome).splitlines()
    figures = f"{text([90, 80, 70])} | {text([60, 50, 40])}"
    assert (
        f"| digits | rambo-ap | margin=0.1 | 3 | {figures} | {text([10, 0, 20], '+')} | {text([5, 5, -4], '+')} |"
        in (lines)
    )
    (fastap,) = (line for line in lines if line.startswith("| digits | fastap | margin"))
    assert fastap.endswith(f" |  | {text([-15, 0, -6], '+')} |")  # the best of PML in R@1, not in MAP@R
    assert "| digits | fastap | num_bins=5: **50.0 / 50.0**; num_bins=10: – |" in lines
    change = f"| {text([-10, 5], '+')} | {text([-10, -5], '+')} |"
    (ablation,) = (line for line in lines if "| no margin |" in line)
    assert ablation.endswith(change)


def test_smoothap_ranks_the_images_of_each_class_by_its_definition():
    """Its loss and gradient by loops; as PML calls it, eight classes of four are taken for four of eight."""
    labels = torch.arange(8).repeat_interleave(4)
    embeddings = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    scores = torch.nn.functional.normalize(embeddings)
    scores = scores @ scores.T
    precisions = []
    for query in range(32):
        for relevant in range(32):
            if labels[relevant] == labels[query]:
                above = torch.sigmoid((scores[query] - scores[query, relevant]) / 0.05)
                others = torch.arange(32) != relevant
                rank, rank_plus = (1 + above[others & of].sum() for of in (labels > -1, labels == labels[query]))
                precisions.append(rank_plus / rank)
    expected = 1 - torch.stack(precisions).mean()
    loss = retrieval.LOSSES["smoothap"](temperature=0.05)(embeddings, labels)
    torch.testing.assert_close(loss, expected)
    grads = [torch.autograd.grad(value, embeddings)[0] for value in (loss, expected)]
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("loss_type", [RamboAPLoss, RamboRecallLoss])
def test_several_margins_are_the_mean_of_the_losses_and_of_their_gradients(loss_type):
    labels = torch.arange(12) % 4
    embeddings = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss = retrieval.several_margins(loss_type, largest=0.45, count=4, lambda_val=4.0)(embeddings, labels)
    (grad,) = torch.autograd.grad(loss, embeddings)
    total, total_grad = 0.0, torch.zeros(12, 5)
    for margin in (0.0, 0.15, 0.3, 0.45):
        term = loss_type(lambda_val=4.0, margin=margin)(embeddings, labels)
        total += term.item() / 4
        total_grad += torch.autograd.grad(term, embeddings)[0] / 4
    assert loss.item() == pytest.approx(total)
    torch.testing.assert_close(grad, total_grad)


def test_the_part_in_bfloat16_gives_nearly_the_same_embeddings_in_float32(digits):
    torch.manual_seed(0)
    model = retrieval.conv_net(64)
    images = digits["test"][0].images[:64]
    exact, rounded = (retrieval.embed(model, images, bfloat16) for bfloat16 in (False, True))
    assert exact.dtype == rounded.dtype == torch.float32
    torch.testing.assert_close(exact, model(images))
    assert 0 < (exact - rounded).abs().max() < 0.2


def test_omniglot_without_its_folder_is_refused(capsys):
    with pytest.raises(SystemExit):
        retrieval.main(["--data", "omniglot"])
    assert "--omniglot" in capsys.readouterr().err
