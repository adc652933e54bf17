"""Options of the retrieval command that would do nothing, losses that cannot run, and training that cannot train."""

import re
import shutil

import pytest
import torch
from test_retrieval import SMALL, draw, make_folder, make_inshop, one_thread, read

import rambo_plugins.retrieval.__main__ as command
from rambo_plugins.pml.datasets import RetrievalImages
from rambo_plugins.retrieval import data, train
from rambo_plugins.retrieval.__main__ import main
from rambo_plugins.retrieval.arguments import parse_arguments
from rambo_plugins.retrieval.losses import build_loss, build_miner, try_out

one_thread = one_thread


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    make_folder(root)
    return root


@pytest.fixture(scope="module")
def checkpoints(images, tmp_path_factory):
    """Of a folder of images, and one that says that it is of glyphs."""
    out = tmp_path_factory.mktemp("runs")
    assert main([*SMALL, "--data", "folder", "--root", str(images), "--out", str(out / "folder"), "--amp", "bf16"]) == 0
    saved = torch.load(out / "folder" / "best.pt")
    saved["settings"]["data"] = "glyphs"
    (out / "glyphs").mkdir()
    torch.save(saved, out / "glyphs" / "best.pt")
    return out


def code_of(command):
    try:
        return main(command)
    except SystemExit as left:
        return left.code


NOTHING = {  # folder of images, 16 to train on; batches of 8, an epoch of 2 steps
    "--miner-args epsilon=1": "--miner-args needs --miner",
    "--lr-gamma 0.3": "--lr-gamma needs --lr-steps",
    "--lr-gamma 0 --lr-steps 1": "expected a number > 0, got '0'",
    "--lr-steps 2 2": "--lr-steps: expected each epoch once, got 2 2",
    "--batches-per-pair 10": "--batches-per-pair needs images of several super classes",
    "--sync-bn": "--sync-bn needs several processes",
    "--chunk 8": "--chunk 8: a process embeds 8 images of a batch; expected fewer",
    "--chunk 7": "--chunk 7: the last chunk of 8 images is one image",
    "--chunk 1": "--chunk 1: the last chunk of 8 images is one image",
    "--loss-lr 0.001": "--loss-lr: rambo-recall has no parameters",
    "--checkpoint-every 2": "--checkpoint-every 2: every epoch of 2 steps ends with a checkpoint",
    "--checkpoint-every 3": "--checkpoint-every 3: every epoch of 2 steps .* there are 2 steps",
    "--lr 0": "--lr 0: nothing would be trained",
    "--preset paper": "--preset paper: expected --data sop, inshop, cub, got folder",
    "--seed 9223372036854775808": "--seed: expected less than 2\\*\\*63",
    "--fre": "unrecognized arguments: --fre",
    "--loss-args margin=0.1 --loss-args margin=0.2": "--loss-args: expected margin once, got it again as 'margin=0.2'",
    "--loss-args margin=np.float64(0.1)": "--loss-args: margin: expected a number, .* got 'np.float64\\(0.1\\)'",
    "--loss-args margin=0,1e": "--loss-args: margin: expected a number",
    "--loss-args margin=.1.": "--loss-args: margin: expected a number",
    "--loss-args margin={0.1}": "--loss-args: margin: expected a number",
    "--loss-args margin=1e999": "--loss-args: margin: expected a number",
    "--loss-args lambda_val=nan": "--loss-args: lambda_val: expected a number",
    "--loss-args normalize=false": "--loss-args: normalize: expected .* got 'false'",
    "--loss-args normalize=no": "--loss rambo-recall: normalize: expected bool, got 'no'",
    "--loss-args lambda_val=four": "--loss rambo-recall: lambda_val: expected float, got 'four'",
    "--loss ContrastiveLoss --loss-args pos_margin=big": "--loss ContrastiveLoss: pos_margin: expected int, got 'big'",
    "--loss-args margin=[0,'a']": "--loss rambo-recall: margin",
    "--loss VICRegLoss": "--loss VICRegLoss: cannot be trained here, .*ValueError: labels",
    "--loss DynamicSoftMarginLoss": "--loss DynamicSoftMarginLoss: cannot be trained here, .*second time",
    "--loss BaseMetricLossFunction": "--loss BaseMetricLossFunction: expected one of",
    "--loss GenericPairLoss": "--loss GenericPairLoss: .*mat_based_loss",
    "--miner EmbeddingsAlreadyPackagedAsTriplets": "--miner EmbeddingsAlreadyPackagedAsTriplets: cannot be trained",
    "--device cuda:99": "--device: 'cuda:99'",
    "--backbone vit_b_16 --weights none": "--backbone vit_b_16: cannot embed images of 28 × 28: Wrong image height",
    "--backbone alexnet --weights none --freeze-bn --size 64 --resize 64": "--freeze-bn: alexnet has no batch norm",
}  # fmt: skip


@pytest.mark.parametrize("line", NOTHING)
def test_what_would_do_nothing_or_cannot_run_ends_with_one_line_before_the_first_step(
    line, images, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(train.Run, "_train_step", lambda *_: pytest.fail("trained"))
    assert code_of([*SMALL, "--data", "folder", "--root", str(images), "--out", str(tmp_path), *line.split()]) == 2
    said = [one for one in capsys.readouterr().err.splitlines() if not one.startswith("usage")]
    assert len(said) == 1
    assert re.search(f"error: .*{NOTHING[line]}", said[0]), said[0]


DRAWN = {
    "--root .": "--root: glyphs is drawn, and read from no folder",
    "--size 28": "--size: the images of glyphs have 28 × 28 pixels",
    "--size 28 --resize 32": "--resize, --size: the images of glyphs",
    "--check-images": "--check-images: the images of glyphs",
}


@pytest.mark.parametrize("line", DRAWN)
def test_images_that_are_drawn_take_no_options_of_files(line, capsys):
    with pytest.raises(SystemExit):
        parse_arguments(["--data", "glyphs", *line.split()])
    assert DRAWN[line] in capsys.readouterr().err


def test_what_is_given_is_not_what_holds_by_default():
    args = parse_arguments(
        ["--data", "sop", "--lr", "1e-5", "--lr-steps", "3", "--loss-args", "margin=1", "--ks", "2", "1"]
    )
    assert args.given == {"data", "lr", "lr_steps", "loss_args", "ks"}
    assert args.ks == [1, 2]


def test_values_of_losses_are_numbers_words_and_lists():
    texts = ["margin=[0,.1]", "lambda_val=4", "weighting=loglog", "normalize=False", "memory=-1", "other=None"]
    args = parse_arguments(["--data", "sop", "--loss-args", *texts[:3], "--loss-args", *texts[3:]])
    assert args.loss_args == {"margin": [0, 0.1], "lambda_val": 4, "weighting": "loglog", "normalize": False,
                              "memory": -1, "other": None}  # fmt: skip


def test_several_margins_train(images, tmp_path):
    options = [*SMALL, "--data", "folder", "--root", str(images), "--out", str(tmp_path)]
    assert main([*options, "--loss-args", "margin=[0,.1]"]) == 0
    assert read(tmp_path)["settings"]["loss_args"] == {"margin": [0, 0.1]}


def test_a_loss_is_tried_without_a_trace():
    """Its memory stays empty, its parameters as they are, and no random number is drawn."""
    memory = build_loss("rambo-recall", {"memory": 2}, num_classes=2, embedding_size=4)
    proxies = build_loss("ProxyAnchorLoss", {}, num_classes=2, embedding_size=4)
    before = proxies.proxies.detach().clone()
    state = torch.random.get_rng_state()
    for loss in (memory, proxies):
        labels = torch.tensor([0, 0, 1, 1])
        try_out(
            loss, build_miner("MultiSimilarityMiner", {}), labels, embedding_size=4, device=torch.device("cpu"), what=""
        )
    assert len(memory.memory) == 0
    assert torch.equal(proxies.proxies, before)
    assert proxies.proxies.grad is None
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_batch_that_a_loss_refuses_later_is_one_line(images, tmp_path, capsys, monkeypatch):
    step = train.Run._train_step
    uneven = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    monkeypatch.setattr(train.Run, "_train_step", lambda run, images, _: step(run, images, uneven))
    options = [*SMALL, "--data", "folder", "--root", str(images), "--out", str(tmp_path), "--loss", "SmoothAPLoss"]
    assert main([*options, "--images-per-class", "4"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --loss SmoothAPLoss, step 1: ")


# --evaluate-only


def test_evaluate_only_takes_no_options_of_training(checkpoints, images, tmp_path, capsys):
    test = ["--data", "folder", "--root", str(images), "--out", str(tmp_path)]
    for more in (
        "--lr 0.1",
        "--epochs 20",
        "--backbone resnet50",
        "--size 28",
        "--fresh",
        "--seed 0",
        "--preset paper",
    ):
        with pytest.raises(SystemExit):
            main([*test, "--evaluate-only", str(checkpoints / "folder" / "best.pt"), *more.split()])
        said = capsys.readouterr().err.splitlines()[-1]
        wrong = "--preset paper: expected" if "preset" in more else f"leave out {more.split()[0]}"
        assert wrong in said
    assert not list(tmp_path.iterdir())


def test_a_network_is_not_tested_on_images_of_another_kind(checkpoints, images, tmp_path, capsys):
    folder = ["--data", "folder", "--root", str(images), "--device", "cpu", "--out", str(tmp_path)]
    assert main([*folder, "--evaluate-only", str(checkpoints / "glyphs" / "best.pt")]) == 2
    assert "was trained on glyphs, whose images are grey ones in [0, 1]; --data folder" in capsys.readouterr().err
    glyphs = ["--data", "glyphs", "--device", "cpu", "--out", str(tmp_path)]
    assert main([*glyphs, "--evaluate-only", str(checkpoints / "folder" / "best.pt")]) == 2
    assert "was trained on folder, whose images are normalised colours; --data glyphs" in capsys.readouterr().err


def test_a_network_is_tested_in_the_precision_of_its_training_unless_another_is_given(
    checkpoints, images, tmp_path, monkeypatch
):
    asked = []
    monkeypatch.setattr(
        "rambo_plugins.retrieval.__main__.evaluate", lambda net, data, args, group: asked.append(args.amp) or {}
    )
    test = ["--data", "folder", "--root", str(images), "--device", "cpu", "--out", str(tmp_path)]
    for more in ([], ["--amp", "none"]):
        assert main([*test, "--evaluate-only", str(checkpoints / "folder" / "best.pt"), *more]) == 0
    assert asked == ["bf16", "none"]


def test_a_checkpoint_whose_parameters_are_of_another_network_is_refused(checkpoints, images, tmp_path, capsys):
    saved = torch.load(checkpoints / "folder" / "best.pt")
    saved["settings"]["embedding_size"] = 5
    torch.save(saved, tmp_path / "other.pt")
    test = ["--data", "folder", "--root", str(images), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main([*test, "--evaluate-only", str(tmp_path / "other.pt")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "the checkpoint's parameters are of another network" in line
    assert main([*test, "--evaluate-only", str(next(images.rglob("*.png")))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot be read as a checkpoint: torch did not save it" in line


# Images


def test_check_images_looks_at_all_before_the_first_step(checkpoints, images, tmp_path, capsys, monkeypatch):
    looked = []

    def check(split, *, workers=0, progress=False):
        looked.append((len(split), progress))
        if len(looked) == 2:
            raise ValueError("a.png, b.png: damaged")

    monkeypatch.setattr(command, "check_images", check)
    monkeypatch.setattr(train.Run, "_train_step", lambda *_: pytest.fail("trained"))
    options = ["--data", "folder", "--root", str(images), "--check-images"]
    assert main([*SMALL, *options, "--out", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == "error: a.png, b.png: damaged\n"
    test = [
        "--evaluate-only",
        str(checkpoints / "folder" / "best.pt"),
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "test"),
    ]
    assert main([*options, *test]) == 0
    assert looked == [(16, False), (16, False), (16, True)]  # without --quiet: with a bar


def test_all_damaged_images_are_named_before_the_first_step(images, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.Run, "_train_step", lambda *_: pytest.fail("trained"))
    root = shutil.copytree(images, tmp_path / "images")
    options = [*SMALL, "--data", "folder", "--root", str(root), "--out", str(tmp_path / "run"), "--check-images"]
    bad = data.load_data(parse_arguments(options)).train.paths[1:9:4]
    for path in bad:
        with open(path, "r+b") as file:
            file.truncate(60)
    assert main(options) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(path in line for path in bad)


def test_a_test_of_nothing_is_refused(images, tmp_path, capsys):
    root = tmp_path / "lone"
    for c in range(4):
        shutil.copytree(images / f"class {c}", root / "train" / f"class {c}")
        draw(root / "test" / f"new {c}" / "0.png", c)
    assert main([*SMALL, "--data", "folder", "--root", str(root), "--out", str(tmp_path / "run")]) == 2
    assert "no test image has another one of its class" in capsys.readouterr().err
    make_inshop(tmp_path / "inshop")
    partition = tmp_path / "inshop" / "list_eval_partition.txt"
    lines = partition.read_text().splitlines()
    kept = [
        line
        for line in lines[2:]
        if "train" in line or ("query" in line) == ("id_00000006" in line or "id_00000007" in line)
    ]
    kept = [
        line
        for line in kept
        if "train" in line or ("gallery" in line) == any(i in line for i in ("00000008", "00000009"))
    ]
    partition.write_text("\n".join([str(len(kept)), lines[1], *kept]) + "\n")
    assert main([*SMALL, "--data", "inshop", "--root", str(tmp_path / "inshop"), "--out", str(tmp_path / "run")]) == 2
    assert "no query image has one of its class in the gallery" in capsys.readouterr().err


def single_images(images, root):
    for c in range(12):
        draw(root / "train" / f"class {c}" / "0.png", 100 * c)
    for c in range(2):
        shutil.copytree(images / f"class {c}", root / "test" / f"new {c}")


def test_single_images_train_losses_with_proxies_and_no_others(images, tmp_path, capsys):
    single_images(images, tmp_path / "single")
    options = [*SMALL, "--data", "folder", "--root", str(tmp_path / "single"), "--out", str(tmp_path / "run")]
    for loss in ("rambo-recall", "ContrastiveLoss"):
        assert main([*options, "--loss", loss]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "no class of the 12 images to train on has a second image" in line
    assert main([*options, "--loss", "ProxyAnchorLoss"]) == 0


@pytest.mark.parametrize("paths", [["a\nb.png"], ["a\u2028b.png"], ["a\r.png"], ["ok.png", "\udcff.png"]])
def test_names_that_the_list_of_images_cannot_hold_are_refused_before_the_work(
    paths, images, tmp_path, capsys, monkeypatch
):
    def load(args):
        test = RetrievalImages([str(images / path) for path in paths] * 2, [0] * 2 * len(paths))
        return data.Data(test, {"both": test}, (1,))

    monkeypatch.setattr(data, "_load", load)
    monkeypatch.setattr(train.Run, "__init__", lambda *_: pytest.fail("began"))
    options = [*SMALL, "--data", "folder", "--root", str(images), "--out", str(tmp_path)]
    assert main([*options, "--save-embeddings"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot stand in a list" in line


def test_the_list_of_images_is_of_use_in_another_folder(images, tmp_path, monkeypatch):
    monkeypatch.chdir(images.parent)
    options = [*SMALL, "--data", "folder", "--root", images.name, "--out", str(tmp_path / "run"), "--save-embeddings"]
    assert main(options) == 0
    monkeypatch.chdir(tmp_path)
    lines = (tmp_path / "run" / "test_images.txt").read_text().splitlines()
    assert len(lines) == 16
    assert all(line.startswith(str(images)) for line in lines)


# Training that does not train


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if "epoch" in record.getMessage()]


def test_a_lambda_that_moves_no_item_is_said_once(images, tmp_path, capsys, caplog):
    options = [*SMALL, "--data", "folder", "--root", str(images), "--out", str(tmp_path), "--epochs", "2"]
    assert main([*options, "--loss-args", "lambda_val=1e-12"]) == 0
    (said,) = warnings(caplog)
    assert said.startswith("epoch 1: nothing was learnt: every gradient was zero; λ is too small")
    assert "no step had a gradient, so this is the network as it was at the start" in capsys.readouterr().out
    assert [epoch["steps_with_gradient"] for epoch in read(tmp_path)["history"]] == [0, 0]
    assert read(tmp_path)["history"][0]["loss"] > 0


def test_a_loss_of_zero_is_said(images, tmp_path, caplog):
    options = [*SMALL, "--data", "folder", "--root", str(images), "--out", str(tmp_path)]
    loss = ["--loss", "TripletMarginLoss", "--loss-args", "margin=-5"]
    assert main([*options, *loss]) == 0
    assert warnings(caplog) == ["epoch 1: nothing was learnt: the loss of every step was 0"]


def test_batches_without_a_pair_are_said(images, tmp_path, caplog):
    """One class of 40 has two images, and an epoch has a step."""
    single_images(images, tmp_path / "images")
    for c in range(12, 40):
        draw(tmp_path / "images" / "train" / f"class {c}" / "0.png", 100 * c)
    draw(tmp_path / "images" / "train" / "class 0" / "1.png", 1)
    options = [*SMALL, "--data", "folder", "--root", str(tmp_path / "images"), "--steps-per-epoch", "1"]
    assert (
        main([*options, "--loss", "ContrastiveLoss", "--out", str(tmp_path / "run"), "--loss-args", "neg_margin=2"])
        == 0
    )
    assert warnings(caplog) == ["epoch 1: no batch had two images of one class, of which this loss learns"]


def test_training_that_trains_is_not_warned_of(images, tmp_path, caplog, capsys):
    options = [*SMALL, "--data", "folder", "--root", str(images), "--epochs", "3"]
    for loss in ("rambo-recall", "rambo-ap", "ContrastiveLoss", "ProxyAnchorLoss"):
        assert main([*options, "--out", str(tmp_path / loss), "--loss", loss]) == 0
        assert [epoch["steps_with_gradient"] for epoch in read(tmp_path / loss)["history"]] == [2, 2, 2]
    assert not warnings(caplog)
    assert "no step had a gradient" not in capsys.readouterr().out


def test_embeddings_of_test_images_that_are_not_finite_are_one_line(checkpoints, images, tmp_path, capsys):
    saved = torch.load(checkpoints / "folder" / "best.pt")
    next(value for name, value in saved["model"].items() if "embedding" in name).fill_(float("nan"))
    torch.save(saved, tmp_path / "nan.pt")
    test = ["--data", "folder", "--root", str(images), "--device", "cpu", "--out", str(tmp_path / "out")]
    assert main([*test, "--evaluate-only", str(tmp_path / "nan.pt")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "error: the network's embeddings of test images are not all finite numbers"
