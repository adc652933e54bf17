"""The retrieval command: data sets in their own files, several processes, interruption, the two-stage step, options."""

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import urllib.error
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image
from torch import nn

from rambo_plugins.evaluation import cli
from rambo_plugins.folders import OwnFolder
from rambo_plugins.pml.datasets import RetrievalImages, load_images
from rambo_plugins.pml.datasets import test_transform as image_transform
from rambo_plugins.retrieval import checkpoint, train
from rambo_plugins.retrieval.__main__ import PURPOSE, main
from rambo_plugins.retrieval.arguments import parse_arguments
from rambo_plugins.retrieval.losses import build_loss
from rambo_plugins.retrieval.models import EmbeddingNet, build_net

ROOT = Path(__file__).parent.parent
SMALL = ["--backbone", "convnet", "--size", "28", "--resize", "32", "--embedding-size", "16", "--lr", "1e-3",
         "--batch-size", "8", "--images-per-class", "2", "--steps-per-epoch", "2",
         "--epochs", "1", "--workers", "0", "--device", "cpu", "--quiet"]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def draw(path, number):
    """Noise around the colour of a class."""
    generator = np.random.default_rng(number)
    colour = np.random.default_rng(number // 100).integers(100, 156, 3)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray((colour + generator.integers(-100, 100, (36, 32, 3))).astype(np.uint8)).save(path)


def make_sop(root):
    for name, classes in (("train", range(1, 7)), ("test", range(7, 11))):
        rows = ["image_id class_id super_class_id path"]
        for c in classes:
            for i in range(3):
                path = f"{'bicycle' if c % 2 else 'chair'}_final/{c}_{i}.JPG"
                draw(root / path, 100 * c + i)
                rows.append(f"{3 * c + i} {c} {1 + c % 2} {path}")
        (root / f"Ebay_{name}.txt").write_text("\n".join(rows) + "\n")


def make_inshop(root):
    rows = []
    for c in range(10):
        kind = "WOMEN/Dresses" if c % 2 else "MEN/Denim"
        for i in range(4):
            path = f"img/{kind}/id_{c:08d}/0{i}_1_front.jpg"
            draw(root / path, 100 * c + i)
            status = "train" if c < 6 else ("query" if i < 1 else "gallery")
            rows.append(f"{path}    id_{c:08d}    {status}")
    lines = [str(len(rows)), "image_name item_id evaluation_status", *rows]
    (root / "list_eval_partition.txt").write_text("\n".join(lines) + "\n")


def make_cub(root):
    images, classes = [], []
    for c in (1, 2, 50, 99, 100, 101, 150, 200):
        for i in range(3):
            path = f"{c:03d}.Bird/Bird_{i}.jpg"
            draw(root / "images" / path, 100 * c + i)
            images.append(f"{len(images) + 1} {path}")
            classes.append(f"{len(classes) + 1} {c}")
    (root / "images.txt").write_text("\n".join(images) + "\n")
    (root / "image_class_labels.txt").write_text("\n".join(classes) + "\n")


def make_folder(root):
    for c in range(8):
        for i in range(4):
            draw(root / f"class {c}" / f"{i}.png", 100 * c + i)


MAKERS = {"sop": make_sop, "inshop": make_inshop, "cub": make_cub, "folder": make_folder}


@pytest.fixture(scope="session")
def roots(tmp_path_factory):
    found = {name: tmp_path_factory.mktemp(name) for name in MAKERS}
    for name, make in MAKERS.items():
        make(found[name])
    return found


def read(folder):
    return json.loads((folder / "metrics.json").read_text())


def recall_at_1(query, query_labels, gallery, gallery_labels, own):
    hits = 0
    for row, (embedding, label) in enumerate(zip(query, query_labels, strict=True)):
        scores = [-2.0 if own and row == i else float(embedding @ other) for i, other in enumerate(gallery)]
        hits += gallery_labels[int(np.argmax(scores))] == label
    return hits / len(query)


KS = {"sop": [1, 10, 100, 1000], "inshop": [1, 10, 20, 30, 50], "cub": [1, 2, 4, 8], "folder": [1, 2, 4, 8]}


@pytest.mark.parametrize("data", MAKERS)
def test_each_data_set_in_its_own_files_is_trained_and_tested(data, roots, tmp_path, capsys):
    backbone = ["--backbone", "resnet18", "--weights", "none"] if data == "cub" else []
    pairs = ["--batches-per-pair", "2"] if data in ("sop", "inshop") else []
    options = ["--data", data, "--root", str(roots[data]), "--out", str(tmp_path), "--save-embeddings"]
    assert main([*SMALL, *options, *backbone, *pairs]) == 0
    outcome = read(tmp_path)
    (epoch,) = outcome["history"]
    assert [name for name in epoch if name.startswith("recall")] == [f"recall_at_{k}" for k in KS[data]]
    assert epoch["loss"] > 0
    assert epoch["seconds"] > 0
    assert epoch["lr"] == 1e-3
    assert outcome["best"] == epoch

    splits = ["query", "gallery"] if data == "inshop" else ["test", "test"]
    files = [np.load(tmp_path / f"{split}_{what}.npy") for split in splits for what in ("embeddings", "labels")]
    np.testing.assert_allclose(np.linalg.norm(files[0], axis=1), 1, atol=1e-5)
    assert epoch["recall_at_1"] == pytest.approx(recall_at_1(*files, own=data != "inshop"))
    paths = (tmp_path / f"{splits[0]}_images.txt").read_text().splitlines()
    assert len(paths) == len(files[0])
    assert all(Path(path).is_file() for path in paths)
    capsys.readouterr()

    other = tmp_path / "again"
    test = [*options, "--workers", "0", "--device", "cpu", "--quiet"]
    assert main([*test, "--out", str(other), "--evaluate-only", str(tmp_path / "best.pt")]) == 0
    again = json.loads((other / "evaluation.json").read_text())
    figures = {name: value for name, value in epoch.items() if name.startswith("recall")}
    assert {name: again[name] for name in figures} == figures
    assert (again["checkpoint"], again["epochs"]) == (str(tmp_path / "best.pt"), 1)
    for split, found in again["images"].items():
        assert outcome["settings"][f"{split} images"] == found
    np.testing.assert_array_equal(np.load(other / f"{splits[0]}_embeddings.npy"), files[0])


def test_rambo_recall_reads_the_embeddings(roots, tmp_path):
    options = ["--data", "folder", "--root", str(roots["folder"]), "--out", str(tmp_path), "--save-embeddings"]
    assert main([*SMALL, *options, "--map-at-r"]) == 0
    query = ["--query", str(tmp_path / "test_embeddings.npy"), "--query-labels", str(tmp_path / "test_labels.npy")]
    assert cli.main([*query, "--ks", "1", "2", "--map-at-r", "--quiet", "--json", str(tmp_path / "recall.json")]) == 0
    recall, best = json.loads((tmp_path / "recall.json").read_text()), read(tmp_path)["best"]
    assert recall["recall"]["1"] == best["recall_at_1"]
    net = checkpoint.restore_net(torch.load(tmp_path / "best.pt")).eval()
    images = load_images("folder", roots["folder"])["test"]
    images.transform = image_transform(28, 32)
    alone = torch.cat([nn.functional.normalize(net(image[None])) for image, _ in images])
    np.testing.assert_allclose(np.load(tmp_path / "test_embeddings.npy"), alone.detach().numpy(), atol=1e-5)
    assert recall["map_at_r"] == pytest.approx(best["mean_average_precision_at_r"])


LOSSES = {
    "rambo-recall": ["--loss-args", "memory=2", "memory_warmup=1", "weighting=loglog"],
    "rambo-ap": ["--miner", "MultiSimilarityMiner", "--miner-args", "epsilon=0.5"],
    "ProxyAnchorLoss": ["--loss-lr", "0.1"],
    "TripletMarginLoss": ["--loss-args", "triplets_per_anchor=3"],  # random triplets
}


def same(one, other):
    """Two checkpoints, but for the seconds."""
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[k], other[k]) for k in one if k != "seconds")
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if torch.is_tensor(one) else one == other


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_resumes_in_the_middle_of_an_epoch(loss, roots, tmp_path, monkeypatch):
    options = [*SMALL, "--data", "folder", "--root", str(roots["folder"]), "--steps-per-epoch", "5", "--epochs", "2"]
    options += [
        "--loss",
        loss,
        *LOSSES[loss],
        "--checkpoint-every",
        "7",
        "--out",
    ]  # in the middle of the sampler's epoch, too
    assert main([*options, str(tmp_path / "whole")]) == 0

    step = train.Run._train_step

    def interrupt(run, *batch):
        if run.step == 8:
            raise KeyboardInterrupt
        return step(run, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "_train_step", interrupt)
        assert main([*options, str(tmp_path / "stopped")]) == 130
    left = torch.load(tmp_path / "stopped" / "checkpoint.pt")
    assert left["step"] == 7
    assert main([*options, str(tmp_path / "stopped")]) == 0
    whole, resumed = (torch.load(tmp_path / name / "checkpoint.pt") for name in ("whole", "stopped"))
    assert same(whole, resumed)
    assert not same(whole["model"], left["model"])
    assert whole["step"] == 10


KILLED = """
import os, signal, sys
from rambo_plugins.pml.datasets import RetrievalImages, load_images
from rambo_plugins.pml.datasets import test_transform as image_transform
from rambo_plugins.retrieval import checkpoint, train
from rambo_plugins.retrieval.__main__ import main

step = train.Run._train_step

def kill(run, *batch):
    if run.step == 4:
        os.kill(os.getpid(), signal.SIGKILL)
    return step(run, *batch)

train.Run._train_step = kill
main(sys.argv[1:])
"""


def test_a_killed_run_started_again_ends_as_one_that_was_not(roots, tmp_path):
    """Dropout in the network, crops and flips in a worker, score memory; killed in the second epoch."""
    options = [*SMALL, "--data", "folder", "--root", str(roots["folder"]), "--backbone", "mobilenet_v3_small"]
    options += ["--weights", "none", "--workers", "1", "--steps-per-epoch", "3", "--epochs", "2"]
    options += ["--loss-args", "memory=2", "--checkpoint-every", "1", "--out"]
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, *options, str(tmp_path / "killed")],
        check=False, timeout=120, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL
    assert torch.load(tmp_path / "killed" / "checkpoint.pt")["step"] == 4
    assert len(read(tmp_path / "killed")["history"]) == 1
    for name in ("killed", "whole"):
        assert main([*options, str(tmp_path / name)]) == 0
    assert same(*(torch.load(tmp_path / name / "checkpoint.pt") for name in ("killed", "whole")))
    assert same(*(torch.load(tmp_path / name / "best.pt") for name in ("killed", "whole")))
    assert same(*(read(tmp_path / name) for name in ("killed", "whole")))


PROCESSES = """
import os, sys
import torch
import torch.distributed as dist
from rambo_plugins.demo.data import load_split
from rambo_plugins.retrieval import data, train
from rambo_plugins.retrieval.__main__ import main

train_set, test_set = load_split("glyphs")
for images, keep in ((train_set, train_set.labels % 20 == 0), (test_set, test_set.labels % 10 == 0)):
    images.labels = images.labels[keep].unique(return_inverse=True)[1]
    images.images, images.super_labels = images.images[keep], images.super_labels[keep]
data.load_split = lambda *args, **kwargs: (train_set, test_set)
build = train.build_net
train.build_net = lambda *args, **kwargs: build(*args, **kwargs).double()
torch.set_num_threads(1)
processes = int(os.environ.get("WORLD_SIZE", 1))
if processes > 1:
    dist.init_process_group("gloo")
common = ["--data", "glyphs", "--batch-size", "16", "--images-per-class", "2", "--batches-per-pair", "4"]
common += ["--epochs", "2"]
common += ["--steps-per-epoch", "3", "--embedding-size", "8", "--freeze-bn", "--device", "cpu", "--quiet"]
chunk = ["--chunk", "3"] if processes > 1 else []
recall = ["--loss-args", "lambda_val=4", "margin=0.3", "memory=2", *chunk]
proxies = ["--loss", "ProxyAnchorLoss", "--miner", "MultiSimilarityMiner", "--map-at-r", "--save-embeddings"]
assert main([*common, *recall, "--out", sys.argv[1] + "/recall"]) == 0
assert main([*common, *proxies, "--out", sys.argv[1] + "/proxies"]) == 0
if processes > 1:  # random triplets are the same on all processes
    losses, step = [], train.Run._train_step
    train.Run._train_step = lambda *args: losses.append(step(*args)) or losses[-1]
    triplets = ["--loss", "TripletMarginLoss", "--loss-args", "triplets_per_anchor=2", "--epochs", "1"]
    assert main([*common, *triplets, "--out", sys.argv[1] + "/triplets"]) == 0
    everywhere = [None, None]
    dist.all_gather_object(everywhere, [loss.item() for loss in losses])
    assert everywhere[0] == everywhere[1]
    dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)
"""


def test_two_processes_train_and_test_as_one_with_the_whole_batch(tmp_path):
    """The first run ranks a memory too, and its two processes take the two-stage step: one network all the same."""
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    children = [
        subprocess.Popen([sys.executable, *how, script, tmp_path / name], env=env, cwd=ROOT)
        for name, how in (("one", []), ("two", launch))
    ]
    assert [child.wait(timeout=200) for child in children] == [0, 0]
    for name in ("recall", "proxies"):
        one, two = (torch.load(tmp_path / number / name / "checkpoint.pt") for number in ("one", "two"))
        for part in ("model", "loss"):
            assert set(one[part]) == set(two[part])
            for key, value in one[part].items():
                if "memory.field" in key:  # the same rows, in the order of the processes
                    value, two[part][key] = (rows.sort(0).values for rows in (value, two[part][key]))
                torch.testing.assert_close(two[part][key], value, rtol=1e-7, atol=1e-9)
        for epoch, other in zip(one["history"], two["history"], strict=True):
            assert other["loss"] == pytest.approx(epoch["loss"], rel=1e-9)
            assert {k: v for k, v in epoch.items() if "_at_" in k} == {k: v for k, v in other.items() if "_at_" in k}
    assert any("memory.field" in key for key in torch.load(tmp_path / "one" / "recall" / "checkpoint.pt")["loss"])
    ones, twos = (np.load(tmp_path / number / "proxies" / "test_embeddings.npy") for number in ("one", "two"))
    np.testing.assert_allclose(twos, ones, atol=1e-6)


class Keeps(nn.Module):
    """Multiplies by a constant that the backward pass needs, and counts how many of these are alive."""

    def __init__(self):
        super().__init__()
        self.alive = self.most = self.rows = 0

    def forward(self, features):
        factor = np.full(features.shape, 2.0)
        self.alive += 1
        self.most, self.rows = max(self.most, self.alive), max(self.rows, len(features))
        weakref.finalize(factor, self.gone)
        return features * torch.from_numpy(factor)

    def gone(self):
        self.alive -= 1


def small_net(dropout=0.0, *, chunk=None, freeze_bn=True):
    torch.manual_seed(1)
    layers = [nn.Flatten(), nn.Linear(12, 20), nn.BatchNorm1d(20), nn.Tanh(), nn.Dropout(dropout), Keeps()]
    trunk = nn.Sequential(*layers)
    trunk[2].running_mean.normal_()
    return EmbeddingNet(trunk, nn.Linear(20, 5), 3, freeze_bn=freeze_bn, chunk=chunk).double().train()


def gradients(net, embed, images, labels):
    loss_fn = build_loss("rambo-recall", {"margin": 0.3}, num_classes=3, embedding_size=5)
    torch.manual_seed(2)
    loss = loss_fn(embed(images), labels)
    loss.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in net.parameters())
    return loss.item(), [parameter.grad for parameter in net.parameters()]


IMAGES = torch.randn(10, 3, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1, 2, 0])


def test_the_two_stage_step_has_the_gradient_of_the_whole_batch():
    direct, staged = small_net(), small_net(chunk=4)
    expected_loss, expected = gradients(direct, direct, IMAGES, LABELS)
    loss, grads = gradients(staged, staged, IMAGES, LABELS)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    torch.testing.assert_close(grads, expected)
    assert direct.trunk[-1].rows == 10
    assert staged.trunk[-1].rows == 4


def test_the_two_stage_step_draws_the_same_dropout_twice():
    direct, staged = small_net(0.5), small_net(0.5, chunk=4)

    def by_chunks(images):
        return torch.cat([direct.embedding(direct.trunk(part)) for part in images.split(4)])

    expected_loss, expected = gradients(direct, by_chunks, IMAGES, LABELS)
    loss, grads = gradients(staged, staged, IMAGES, LABELS)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    torch.testing.assert_close(grads, expected)
    assert loss != gradients(small := small_net(0.0), small, IMAGES, LABELS)[0]


def test_the_two_stage_step_keeps_the_activations_of_one_chunk():
    direct, staged = small_net(chunk=None), small_net(chunk=2)
    gradients(direct, lambda images: torch.cat([direct._embed(part) for part in images.split(2)]), IMAGES, LABELS)
    gradients(staged, staged, IMAGES, LABELS)
    assert direct.trunk[-1].most == 5
    assert staged.trunk[-1].most == 1
    assert staged.trunk[-1].alive == 0


def test_the_two_stage_step_updates_the_statistics_of_batch_norm_once():
    direct, staged = small_net(freeze_bn=False), small_net(freeze_bn=False, chunk=5)
    for part in IMAGES.split(5):
        direct(part)
    gradients(staged, staged, IMAGES, LABELS)
    norm, expected = staged.trunk[2], direct.trunk[2]
    torch.testing.assert_close(norm.running_mean, expected.running_mean)
    torch.testing.assert_close(norm.running_var, expected.running_var)
    assert norm.momentum == 0.1


def test_frozen_batch_norm_keeps_its_statistics_and_learns_its_weight():
    for frozen in (True, False):
        net = small_net(freeze_bn=frozen)
        before = net.trunk[2].running_mean.clone()
        gradients(net, net, IMAGES, LABELS)
        assert torch.equal(net.trunk[2].running_mean, before) == frozen
        assert net.trunk[4].training


PAPER = {  # the paper's table; FastAP's schedule of batches, and its ten times larger rate for the embedding layer
    "sop": {"lr": 3e-6, "embedding_lr": 3e-5, "images_per_class": 4, "batches_per_pair": 10,
            "loss_args": {"lambda_val": 4.0, "margin": 0.02, "memory": 3, "weighting": "loglog"}},
    "inshop": {"lr": 1e-5, "embedding_lr": 1e-4, "images_per_class": 8, "batches_per_pair": 4,
               "loss_args": {"lambda_val": 0.2, "margin": 0.05, "memory": 3, "weighting": "log"}},
    "cub": {"lr": 5e-6, "embedding_lr": 5e-5, "images_per_class": 4,
            "loss_args": {"lambda_val": 0.2, "margin": 0.02, "memory": 3, "weighting": "loglog"}},
}  # fmt: skip


@pytest.mark.parametrize("data", PAPER)
def test_the_preset_is_the_table_of_the_paper(data):
    args = vars(parse_arguments(["--data", data, "--preset", "paper"]))
    common = {"backbone": "resnet50", "weights": "DEFAULT", "embedding_size": 512, "size": 224, "resize": 256,
              "batch_size": 128, "epochs": 80, "weight_decay": 4e-4, "lr_steps": [35], "lr_gamma": 0.3,
              "loss": "rambo-recall"}  # fmt: skip
    for name, value in (common | PAPER[data]).items():
        assert args[name] == (pytest.approx(value) if isinstance(value, float) else value), name


def test_what_is_given_explicitly_wins_over_the_preset():
    given = ["--data", "sop", "--preset", "paper", "--lr", "1e-4", "--epochs", "3", "--loss-args", "margin=0.1"]
    args = parse_arguments(given)
    assert (args.lr, args.embedding_lr, args.epochs, args.batch_size) == (1e-4, pytest.approx(1e-3), 3, 128)
    assert args.loss_args == {"lambda_val": 4.0, "margin": 0.1, "memory": 3, "weighting": "loglog"}
    assert parse_arguments([*given[:4], "--loss", "MultiSimilarityLoss"]).loss_args == {}
    assert "weighting" not in parse_arguments([*given[:4], "--loss", "rambo-ap"]).loss_args


def test_the_images_are_augmented_anew_in_every_epoch_of_the_sampler(roots, tmp_path, monkeypatch):
    epochs = []
    monkeypatch.setattr(RetrievalImages, "set_epoch", lambda images, epoch: epochs.append((images.seed, epoch)))
    options = [*SMALL, "--data", "folder", "--root", str(roots["folder"]), "--epochs", "3", "--out", str(tmp_path)]
    assert main([*options, "--seed", "5"]) == 0
    assert epochs[:3] == [(5, 0), (5, 1), (5, 2)]  # 16 images: two batches an epoch


def test_learning_rates_drop_after_the_epochs_that_are_given(roots, tmp_path):
    options = [*SMALL, "--data", "folder", "--root", str(roots["folder"]), "--epochs", "4", "--lr-steps", "1", "3"]
    assert main([*options, "--lr-gamma", "0.5", "--embedding-lr", "0.01", "--out", str(tmp_path)]) == 0
    assert [epoch["lr"] for epoch in read(tmp_path)["history"]] == [1e-3, 5e-4, 5e-4, 2.5e-4]
    groups = torch.load(tmp_path / "checkpoint.pt")["optimizer"]["param_groups"]
    assert [group["lr"] for group in groups] == [2.5e-4, 2.5e-3, 2.5e-3]
    assert [len(group["params"]) for group in groups] == [
        9,
        2,
        0,
    ]  # three convolutions with their norms; a linear layer


def test_the_epoch_of_the_best_recall_is_kept(roots, tmp_path, monkeypatch):
    figures = iter([0.5, 0.9, 0.7, 0.9])
    monkeypatch.setattr(train, "evaluate", lambda *_: {"recall_at_1": next(figures)})
    options = [*SMALL, "--data", "folder", "--root", str(roots["folder"]), "--epochs", "4", "--out", str(tmp_path)]
    assert main(options) == 0
    assert torch.load(tmp_path / "best.pt")["step"] == 4
    assert read(tmp_path)["best"]["epoch"] == 2


def test_more_epochs_go_on_and_other_settings_are_refused_unless_fresh(roots, tmp_path, capsys, monkeypatch):
    options = [*SMALL, "--data", "folder", "--root", str(roots["folder"]), "--out", str(tmp_path)]
    assert main(options) == 0
    first = read(tmp_path)["history"]
    assert main([*options, "--epochs", "2", "--workers", "1"]) == 0
    assert read(tmp_path)["history"][:1] == first
    assert len(read(tmp_path)["history"]) == 2
    with monkeypatch.context() as patch:
        patch.setattr(train.Run, "_train_step", lambda *_: pytest.fail("trained again"))
        assert main(options) == 0
    capsys.readouterr()
    assert main([*options, "--lr", "0.1", "--loss-args", "margin=0.5"]) == 2
    error = capsys.readouterr().err
    assert "lr was 0.001, now 0.1" in error
    assert "loss_args was {}, now {'margin': 0.5}" in error
    assert "--fresh" in error
    assert len(error.splitlines()) == 1
    assert main([*options, "--lr", "0.1", "--fresh"]) == 0
    assert [epoch["lr"] for epoch in read(tmp_path)["history"]] == [0.1]


def test_bf16_trains_and_leaves_the_parameters_in_float32(roots, tmp_path):
    options = [*SMALL, "--data", "folder", "--root", str(roots["folder"]), "--amp", "bf16", "--out", str(tmp_path)]
    assert main([*options, "--backbone", "resnet18", "--weights", "none"]) == 0
    assert all(v.dtype != torch.bfloat16 for v in torch.load(tmp_path / "checkpoint.pt")["model"].values())
    assert 0 <= read(tmp_path)["best"]["recall_at_1"] <= 1


def test_tensorboard_gets_the_curves(roots, tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    options = [*SMALL, "--data", "folder", "--root", str(roots["folder"]), "--log-every", "1", "--out", str(tmp_path)]
    assert main(options) == 0
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2]
    assert events.Scalars("recall_at_1")[0].value == pytest.approx(read(tmp_path)["best"]["recall_at_1"])


@pytest.mark.parametrize("name", ["resnet18", "mobilenet_v3_small", "vit_b_16", "squeezenet1_0"])
def test_backbones_of_torchvision_lose_their_classifier(name):
    if name == "squeezenet1_0":
        with pytest.raises(ValueError, match="one output"):
            build_net(name, 7)
        return
    with torch.device("meta"):
        net = build_net(name, 7)
        whole = torchvision.models.get_model(name)
        size = 224 if name == "vit_b_16" else 64
        assert net(torch.zeros(2, 1, size, size)).shape == (2, 7)  # grey images as well
    classifier = [module for module in whole.modules() if isinstance(module, nn.Linear)][-1]
    assert net.embedding.in_features == classifier.in_features
    assert len(net.trunk.state_dict()) == len(whole.state_dict()) - 2


def test_weights_of_a_file_are_the_backbone_or_a_checkpoint(tmp_path, roots):
    whole = torchvision.models.resnet18(num_classes=3)  # a classifier of any size is left out
    torch.save(whole.state_dict(), tmp_path / "resnet18.pth")
    net = build_net("resnet18", 7, str(tmp_path / "resnet18.pth"))
    assert torch.equal(net.trunk.layer4[1].conv2.weight, whole.layer4[1].conv2.weight)
    options = [*SMALL, "--data", "folder", "--root", str(roots["folder"]), "--out", str(tmp_path / "run")]
    assert main(options) == 0
    best = torch.load(tmp_path / "run" / "best.pt")["model"]
    assert same(dict(build_net("convnet", 16, str(tmp_path / "run" / "best.pt")).state_dict()), dict(best))


def test_pretrained_weights_without_network_are_a_clear_error(monkeypatch):
    def unreachable(*args, **kwargs):
        raise urllib.error.URLError("no route")

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", unreachable)
    with pytest.raises(ValueError, match=r"no weights of resnet18 .*no route.*give a file"):
        build_net("resnet18", 7, "DEFAULT")


BAD = {
    "--data sop": "--data sop needs the folder that holds it: give --root",
    "--data sop --root nowhere": "no Ebay_train.txt",
    "--data glyphs --preset paper": "--preset paper: expected --data sop, inshop, cub, got glyphs",
    "--data cifar": "invalid choice",
    "--data glyphs --loss Triplet": "--loss Triplet: expected one of rambo-recall, rambo-ap, .*TripletMarginLoss",
    "--data glyphs --loss reducers": "--loss reducers: expected one of",
    "--data glyphs --loss-args lambda=4": "--loss rambo-recall: .*unexpected keyword argument 'lambda'",
    "--data glyphs --loss-args lambda_val=-1": "--loss rambo-recall: lambda_val",
    "--data glyphs --loss ContrastiveLoss --loss-args margin=1": "--loss ContrastiveLoss: .*'margin'",
    "--data glyphs --loss CrossBatchMemory": "--loss CrossBatchMemory: expected one of",
    "--data glyphs --loss-args margin": "--loss-args: expected NAME=VALUE, got 'margin'",
    "--data glyphs --miner Hard": "--miner Hard: expected one of .*BatchHardMiner",
    "--data glyphs --batch-size 10": "batch_size: expected a multiple of 8",
    "--data glyphs --batch-size 0": "expected an integer >= 1, got '0'",
    "--data glyphs --lr -1": "expected a number >= 0, got '-1'",
    "--data glyphs --lr nan": "expected a number >= 0, got 'nan'",
    "--data glyphs --backbone resnet5": "--backbone resnet5: .*resnet50",
    "--data glyphs --backbone inception_v3": "one output",
    "--data glyphs --weights DEFAULT": "none for convnet",
    "--data glyphs --weights nowhere.pth": "--weights nowhere.pth: no such file",
    "--data glyphs --evaluate-only nowhere.pt": "nowhere.pt: no such checkpoint",
    "--data glyphs --amp fp16 --device cpu": "--amp fp16: expected with --device cuda",
    "--data glyphs --sync-bn --device cpu": "--sync-bn",
    "--data glyphs --device gpu": "'gpu'",
    "--data sop --root . --backbone convnet": "--backbone convnet: expected --size 28, got 224",
    "--data sop --root . --size 300": "--size 300: expected at most --resize 256",
}  # fmt: skip


@pytest.mark.parametrize("line", BAD)
def test_bad_arguments_end_with_one_line_and_code_2(line, tmp_path, capsys):
    try:
        code = main([*line.split(), "--out", str(tmp_path)])
    except SystemExit as error:
        code = error.code
    assert code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in last
    assert re.search(BAD[line], last), last


def test_files_that_are_no_checkpoints_are_named(tmp_path, capsys):
    run = OwnFolder(tmp_path / "run", PURPOSE)
    run.own("checkpoint.pt").write_text("no")
    torch.save({"model": {}}, tmp_path / "other.pt")
    torch.save({"settings": {"lr": 1}, "model": {}, "history": [], "step": 1}, tmp_path / "old.pt")
    common = ["--data", "glyphs", "--quiet", "--out", str(tmp_path / "run")]
    assert main([*common, "--device", "cpu"]) == 2
    assert "checkpoint.pt cannot be read as a checkpoint" in capsys.readouterr().err
    assert main([*common, "--evaluate-only", str(tmp_path / "other.pt")]) == 2
    assert "other.pt is not a checkpoint of this command" in capsys.readouterr().err
    assert main([*common, "--evaluate-only", str(tmp_path / "old.pt")]) == 2
    assert "old.pt is not a checkpoint of this command: its settings lack backbone" in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"other.pt: of another network: .* as conv1.weight"):
        build_net("resnet18", 7, str(tmp_path / "other.pt"))


EXAMPLES = {
    "plain_loop.py": (["--steps", "2"], r"R@1 \d"),
    "cross_batch_memory.py": (["--steps", "2"], r"queue of 512: R@1 \d"),
    "pml_trainer.py": (["--steps", "2"], r"'recall_at_1_level0': 0\.\d"),
    "fine_tuning.py": (
        ["FOLDER", "--steps", "2", "--weights", "none", "--size", "28", "--batch-size", "8"],
        r"nearest to .*png: .*png",
    ),
    "evaluation_only.py": (["EMBEDDINGS", "LABELS"], r"R@1: 100.00 %"),
    "lightning_module.py": (["--steps", "2"], "recall_at_1"),
    "train.py": ([*SMALL, "--data", "folder", "--root", "FOLDER", "--out", "OUT"], r"best: R@1 \d"),
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n == "cross_batch_memory.py" else n for n in EXAMPLES]
)
def test_every_example_runs(name, roots, tmp_path, monkeypatch, capsys):
    if name == "lightning_module.py":
        pytest.importorskip("lightning")
    np.save(tmp_path / "e.npy", np.repeat(np.eye(4, dtype=np.float32), 2, axis=0))
    np.save(tmp_path / "l.npy", np.arange(8) // 2)
    files = {
        "FOLDER": roots["folder"],
        "OUT": tmp_path / "out",
        "EMBEDDINGS": tmp_path / "e.npy",
        "LABELS": tmp_path / "l.npy",
    }
    arguments, printed = EXAMPLES[name]
    monkeypatch.setattr(sys, "argv", [name, *(str(files.get(argument, argument)) for argument in arguments)])
    monkeypatch.chdir(tmp_path)
    try:
        runpy.run_path(str(ROOT / "pml_examples" / name), run_name="__main__")
    except SystemExit as done:
        assert done.code == 0  # noqa: PT017
    assert re.search(printed, capsys.readouterr().out)


@pytest.mark.slow
def test_the_example_with_several_processes_runs():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launch, "pml_examples/ddp.py", "--steps", "2"],
        capture_output=True, text=True, check=False, timeout=120, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"R@1 \d.*2 processes", done.stdout)


def test_every_example_is_tested():
    assert set(EXAMPLES) | {"ddp.py"} == {path.name for path in (ROOT / "pml_examples").glob("*.py")}
