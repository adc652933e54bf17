"""Runs of the retrieval command: what they go on with, what they keep, and what is said where they cannot go on."""

import errno
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torchvision
from test_retrieval import SMALL, draw, make_folder, one_thread, read, same

from rambo_plugins.folders import OwnFolder
from rambo_plugins.pml.datasets import RetrievalImages
from rambo_plugins.retrieval import checkpoint, fresh, identity, processes, train
from rambo_plugins.retrieval import errors as command_errors
from rambo_plugins.retrieval.__main__ import PURPOSE, main
from rambo_plugins.retrieval.errors import CannotGoOn
from rambo_plugins.retrieval.watch import Watch

ROOT = Path(__file__).parent.parent
one_thread = one_thread


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    make_folder(root)
    return root


def options(root, out, *more):
    return [*SMALL, "--data", "folder", "--root", str(root), "--out", str(out), *more]


@pytest.fixture(scope="module")
def finished(images, tmp_path_factory):
    """A run of one epoch; copy it before something is written there."""
    out = tmp_path_factory.mktemp("finished") / "run"
    assert main(options(images, out)) == 0
    return out


@pytest.fixture
def run(finished, tmp_path):
    return shutil.copytree(finished, tmp_path / "run")


def contents(folder, *, but=()):
    files = (path for path in Path(folder).rglob("*") if path.is_file())
    found = {str(path.relative_to(folder)): path.read_bytes() for path in files}
    return {name: data for name, data in found.items() if not name.startswith(but)} if but else found


def one_line(capsys):
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


# What a run goes on with


def add_class(root):
    draw(root / "class 9" / "0.png", 900)
    draw(root / "class 9" / "1.png", 901)


def other_content(root):
    draw(root / "class 0" / "0.png", 12345)


def other_class(root):
    (root / "class 1" / "0.png").rename(root / "class 0" / "other.png")


@pytest.mark.parametrize("change", [add_class, other_content, other_class])
def test_a_run_does_not_go_on_with_other_images(change, images, run, tmp_path, capsys):
    root = shutil.copytree(images, tmp_path / "other")
    change(root)
    before = contents(run)
    assert main(options(root, run, "--epochs", "2")) == 2
    assert "images was" in one_line(capsys)
    assert contents(run) == before


def test_a_run_goes_on_with_the_same_images_elsewhere(images, run, tmp_path):
    root = shutil.copytree(images, tmp_path / "moved" / "deep")
    assert main(options(root, run, "--epochs", "2")) == 0
    assert len(read(run)["history"]) == 2


def test_of_large_data_the_sizes_of_files_are_told(images, tmp_path, monkeypatch):
    paths = [tmp_path / f"{i}.bmp" for i in range(2)]
    digests = []
    for data in ([b"a", b"b"], [b"c", b"b"], [b"aa", b"b"]):
        for path, one in zip(paths, data, strict=True):
            path.write_bytes(one)
        digests.append(
            [identity._digest(RetrievalImages(paths, [0, 0]), str(tmp_path), whole) for whole in (True, False)]
        )
    assert len({whole for whole, _ in digests}) == 3
    assert digests[0][1] == digests[1][1] != digests[2][1]


def test_other_labels_of_the_same_files_are_other_images(images):
    paths = [str(images / "class 0" / f"{i}.png") for i in range(4)]
    digests = {identity._digest(RetrievalImages(paths, labels, supers), str(images), False)
               for labels in ([0, 0, 1, 1], [0, 1, 0, 1]) for supers in (None, [0, 0, 0, 0])}  # fmt: skip
    assert len(digests) == 4


@pytest.mark.parametrize(
    "change",
    ["--ks 1", "--ks 1 2 4", "--map-at-r", "--amp bf16", "--chunk 4", "--seed 1", "--lr 2e-3", "--lr-steps 5",
     "--loss rambo-ap", "--loss-args margin=0.1", "--freeze-bn", "--weight-decay 0", "--images-per-class 4",
     "--steps-per-epoch 3", "--embedding-lr 1", "--miner MultiSimilarityMiner"],
)  # fmt: skip
def test_what_decides_the_figures_cannot_change(change, images, run, capsys):
    before = contents(run)
    assert main(options(images, run, *change.split())) == 2
    line = one_line(capsys)
    assert f"{change.split()[0][2:].replace('-', '_')} was" in line
    assert ("--evaluate-only" in line) == (change.split()[0] in ("--ks", "--map-at-r"))
    assert contents(run) == before


def test_what_does_not_decide_them_may_change(images, run, monkeypatch):
    monkeypatch.setattr(train.Run, "_train_step", lambda *_: pytest.fail("trained again"))
    steps = read(run)["history"]
    for change in ("--workers 1", "--checkpoint-every 1", "--log-every 7", "--ks 8 1 4 2 1", "--steps-per-epoch 2"):
        assert main(options(images, run, *change.split())) == 0, change
        assert read(run)["history"] == steps


def test_an_epoch_of_all_batches_is_the_same_given_or_not(images, tmp_path):
    """16 images to train on, batches of 8."""
    whole = [one for one in options(images, tmp_path) if one not in ("--steps-per-epoch",)]
    del whole[whole.index("2")]
    assert main(whole) == 0
    assert main([*whole, "--steps-per-epoch", "2"]) == 0


def test_weights_are_told_by_the_content_of_their_file(images, tmp_path, capsys):
    state = torchvision.models.resnet18(num_classes=3).state_dict()
    torch.save(state, tmp_path / "a.pth")
    command = options(images, tmp_path / "run", "--backbone", "resnet18")
    assert main([*command, "--weights", str(tmp_path / "a.pth")]) == 0
    (tmp_path / "a.pth").rename(tmp_path / "b.pth")
    assert main([*command, "--weights", str(tmp_path / "b.pth")]) == 0
    state["conv1.weight"] += 1
    torch.save(state, tmp_path / "b.pth")
    capsys.readouterr()
    assert main([*command, "--weights", str(tmp_path / "b.pth")]) == 2
    assert "weights was a file with the digest" in one_line(capsys)


def test_another_number_of_processes_is_another_run(images, run, capsys, monkeypatch):
    monkeypatch.setattr(identity, "num_processes", lambda: 2)
    monkeypatch.setattr(train, "check_agreed", lambda *_: None)
    assert main(options(images, run)) == 2
    assert "processes was 1, now 2" in one_line(capsys)


def test_the_best_epoch_is_that_of_the_smallest_k_in_any_order(images, tmp_path, monkeypatch):
    figures = iter([{"recall_at_1": 0.5, "recall_at_4": 0.6}, {"recall_at_1": 0.4, "recall_at_4": 0.9}])
    monkeypatch.setattr(train, "evaluate", lambda *_: next(figures))
    assert main(options(images, tmp_path, "--ks", "4", "1", "4", "--epochs", "2")) == 0
    assert len(torch.load(tmp_path / "best.pt")["history"]) == 1
    assert read(tmp_path)["best"]["epoch"] == 1
    assert read(tmp_path)["settings"]["ks"] == [1, 4]


def test_fewer_epochs_than_there_are_is_said(images, run, capsys):
    assert main(options(images, run, "--epochs", "2")) == 0
    capsys.readouterr()
    assert main(options(images, run, "--epochs", "1")) == 0
    assert "holds 2 epochs already, more than --epochs 1" in capsys.readouterr().out


def test_embeddings_of_an_earlier_network_are_said(images, tmp_path, capsys, monkeypatch):
    figures = iter([{"recall_at_1": 0.5}, {"recall_at_1": 0.4}, {"recall_at_1": 0.6}])
    monkeypatch.setattr(train, "evaluate", lambda *_: next(figures))
    assert main(options(images, tmp_path, "--ks", "1", "--save-embeddings")) == 0
    assert main(options(images, tmp_path, "--ks", "1", "--epochs", "2")) == 0
    assert "earlier network" not in capsys.readouterr().out
    assert main(options(images, tmp_path, "--ks", "1", "--epochs", "3")) == 0
    assert "test_embeddings.npy is of an earlier network than best.pt" in capsys.readouterr().out


def test_rates_that_drop_after_the_last_epoch_are_said(images, tmp_path, capsys):
    assert main(options(images, tmp_path, "--lr-steps", "1", "2")) == 0
    assert "learning rates drop after epoch 2 too, but --epochs 1 is the last" in capsys.readouterr().out
    assert main(options(images, tmp_path, "--lr-steps", "1", "2", "--epochs", "3")) == 0
    assert "rates drop" not in capsys.readouterr().out


# What is kept of a run that breaks


def finite(state):
    if isinstance(state, dict | list):
        return all(map(finite, state.values() if isinstance(state, dict) else state))
    return not torch.is_tensor(state) or not state.is_floating_point() or bool(state.isfinite().all())


POISONS = {
    "network": lambda run: next(run.net.parameters()).data.view(-1)[3:4].fill_(float("nan")),
    "statistics of batch norm": lambda run: next(run.net.buffers()).fill_(float("inf")),
    "optimizer": lambda run: run.optimizer.state[next(run.net.parameters())]["exp_avg"].fill_(float("inf")),
    "loss": lambda run: next(run.loss_fn.parameters()).data.fill_(float("nan")),
    "embeddings": lambda run: run.net.embedding[0].weight.data.fill_(1e38),
}


@pytest.mark.parametrize("what", POISONS)
def test_a_state_that_is_not_finite_is_never_saved(what, images, tmp_path, capsys, monkeypatch):
    step = train.Run._train_step

    def poisoned(run, *batch):
        loss = step(run, *batch)
        if run.step == 2:
            POISONS[what](run)
        return loss

    monkeypatch.setattr(train.Run, "_train_step", poisoned)
    more = ["--steps-per-epoch", "5", "--checkpoint-every", "1", "--log-every", "100", "--loss", "ProxyAnchorLoss"]
    assert main(options(images, tmp_path, *more)) == 2
    line = one_line(capsys)
    assert "error: step 3: " in line
    assert "the state of step 2 is kept" in line
    left = torch.load(tmp_path / "checkpoint.pt")
    assert left["step"] == 2
    assert finite(left)


DIVERGES = ["--epochs", "3", "--lr-steps", "1", "--lr-gamma"]


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("ContrastiveLoss", "epoch 2: the loss or the embeddings of 1 of 2 steps are not finite numbers"),
        ("rambo-recall", "step 4: the embeddings are not finite numbers any more"),
    ],
)
def test_the_remedies_for_training_that_diverges_work(loss, said, images, tmp_path, capsys):
    command = options(images, tmp_path / "run", "--loss", loss, *DIVERGES)
    assert main([*command, "1e33"]) == 2
    line = one_line(capsys)
    assert f"{said}; the state of step 2 is kept" in line
    kept = tmp_path / "run" / "checkpoint.pt"
    assert f"--weights {kept}" in line
    assert "--fresh" in line
    assert torch.load(kept)["step"] == 2
    other = ["--out", str(tmp_path / "other"), "--weights", str(kept)]
    assert main([*command, "0.5", *other]) == 0
    assert main([*command, "0.5", "--fresh"]) == 0
    assert len(read(tmp_path / "run")["history"]) == 3


def test_embeddings_that_are_not_finite_are_seen_where_the_loss_is(images, tmp_path, capsys, monkeypatch):
    """As where Python's -O switches the losses' own check off."""
    monkeypatch.setattr(train.Run, "_loss", lambda run, embeddings, labels: embeddings.nan_to_num(0).sum())
    assert main(options(images, tmp_path, *DIVERGES, "1e33")) == 2
    assert "epoch 2: the loss or the embeddings of 1 of 2 steps" in capsys.readouterr().err


def test_a_loss_that_leaves_the_numbers_is_seen_before_the_epoch_ends(images, tmp_path, capsys, monkeypatch):
    step, taken = train.Run._train_step, []

    def broken(run, images, labels):
        taken.append(run.step)
        return step(run, images * (float("nan") if run.step >= 3 else 1.0), labels)

    monkeypatch.setattr(train.Run, "_train_step", broken)
    more = ["--steps-per-epoch", "50", "--log-every", "5", "--loss", "ContrastiveLoss"]
    assert main(options(images, tmp_path, *more)) == 2
    said = "epoch 1: the loss or the embeddings of 2 of 5 steps are not finite numbers; nothing was saved"
    assert said in one_line(capsys)
    assert len(taken) == 5


def test_steps_that_the_gradient_scaler_skips_are_no_failure():
    losses = [torch.tensor(value) for value in (1.0, float("inf"), 3.0)]
    for skips in (True, False):
        watch = Watch(torch.device("cpu"), skips=skips)
        for loss in losses:
            watch.add(loss, torch.ones(2, 2), torch.tensor([0, 0]))
        if skips:
            assert watch.check(3, 1, "", whole=True) == 2.0
        else:
            with pytest.raises(CannotGoOn, match="1 of 3 steps"):
                watch.check(3, 1, "")
    all_skipped = Watch(torch.device("cpu"), skips=True)
    all_skipped.add(losses[1], torch.ones(2, 2), torch.tensor([0, 0]))
    assert all_skipped.check(1, 1, "") == 0.0
    with pytest.raises(CannotGoOn, match="1 of 1 steps"):
        all_skipped.check(1, 1, "", whole=True)


def test_a_full_disk_at_any_write_loses_nothing(images, tmp_path, capsys, monkeypatch):
    """Each write of the command fails once; the same command then ends as the one that never failed."""
    more = ["--steps-per-epoch", "3", "--checkpoint-every", "2", "--save-embeddings"]
    writing, names = OwnFolder.writing, []

    def counted(folder, name):
        names.append(name)
        if len(names) == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder.path / name))
        return writing(folder, name)

    monkeypatch.setattr(OwnFolder, "writing", counted)
    full = None
    assert main(options(images, tmp_path / "whole", *more)) == 0
    total, expected = len(names), contents(tmp_path / "whole", but=("tensorboard", "rambo_files"))
    assert set(names) == set(expected)
    for number in range(1, total + 1):
        names.clear()
        full, out = number, tmp_path / str(number)
        capsys.readouterr()
        assert main(options(images, out, *more)) == 2
        assert "No space left on device" in one_line(capsys)
        full = None
        assert main(options(images, out, *more)) == 0
        for name in ("checkpoint.pt", "best.pt"):
            assert same(torch.load(out / name), torch.load(tmp_path / "whole" / name))
        assert same(read(out), read(tmp_path / "whole"))
        for name in ("test_embeddings.npy", "test_labels.npy", "test_images.txt"):
            assert (out / name).read_bytes() == expected[name]


def test_what_torch_says_of_a_full_disk_is_one_line(images, tmp_path, capsys, monkeypatch):
    def full(saved, path):
        Path(path).write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 576 vs 534")

    monkeypatch.setattr(torch, "save", full)
    assert main(options(images, tmp_path)) == 2
    assert f"{tmp_path}/checkpoint.pt could not be written" in one_line(capsys)
    assert "checkpoint.pt" not in contents(tmp_path)


def test_embeddings_that_cannot_be_written_leave_the_figures(images, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(np, "save", full)
    assert main(options(images, tmp_path, "--save-embeddings")) == 2
    printed = capsys.readouterr()
    assert "best: R@1" in printed.out
    assert "error: the figures are saved, but the embeddings are not: " in printed.err
    assert len(read(tmp_path)["history"]) == 1
    test = ["--data", "folder", "--root", str(images), "--out", str(tmp_path), "--device", "cpu", "--save-embeddings"]
    assert main([*test, "--evaluate-only", str(tmp_path / "best.pt")]) == 2
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1].startswith("R@1 ")
    assert "evaluation.json" in contents(tmp_path)


def test_a_disk_without_room_for_checkpoints_is_refused_before_the_first_step(images, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.Run, "_train_step", lambda *_: pytest.fail("trained"))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert main(options(images, tmp_path)) == 2
    assert "the checkpoints need 0.00 GB, but the disk has 0.00 GB" in one_line(capsys)


def test_the_room_that_is_asked_for_is_what_the_checkpoints_take(images, run):
    sizes = [(run / name).stat().st_size for name in ("checkpoint.pt", "best.pt")]
    saved = torch.load(run / "checkpoint.pt")
    size = 3 * checkpoint._bytes({"model": saved["model"], "loss": saved["loss"]})
    assert size == pytest.approx(max(sizes), rel=0.5)


def killed_while_saving(command, name, number):
    save, count = torch.save, 0

    def half(saved, path):
        nonlocal count
        save(saved, path)
        if Path(path).name.endswith(name):
            count += 1
            if count == number:
                os.truncate(path, os.path.getsize(path) // 2)
                os.kill(os.getpid(), signal.SIGKILL)

    torch.save = half
    main(command)


@pytest.mark.parametrize(("name", "number"), [("checkpoint.pt", 1), ("checkpoint.pt", 3), ("best.pt", 2)])
def test_a_run_killed_while_it_saves_ends_as_one_that_was_not(name, number, images, tmp_path, monkeypatch):
    """In epoch 1 before there is anything, in the middle of epoch 2, and at its end."""
    finish = train.Run._finish_epoch

    def better(run):  # each epoch than the one before
        monkeypatch.setattr(train, "evaluate", lambda *_: {"recall_at_1": 0.1 + 0.1 * len(run.history)})
        finish(run)

    monkeypatch.setattr(train.Run, "_finish_epoch", better)
    more = ["--epochs", "2", "--steps-per-epoch", "3", "--checkpoint-every", "2", "--ks", "1"]
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    child = multiprocessing.get_context("fork").Process(
        target=killed_while_saving, args=(options(images, killed, *more), name, number)
    )
    child.start()
    child.join(60)
    assert child.exitcode == -signal.SIGKILL
    for out in (killed, whole):
        assert main(options(images, out, *more)) == 0
    for one in ("checkpoint.pt", "best.pt"):
        assert same(torch.load(killed / one), torch.load(whole / one))
    assert len(torch.load(killed / "best.pt")["history"]) == 2
    assert same(read(killed), read(whole))


@pytest.mark.parametrize("workers", ["0", "1"])
def test_a_damaged_image_is_named_in_one_line_and_the_checkpoint_is_kept(workers, images, tmp_path, capsys):
    root = shutil.copytree(images, tmp_path / "damaged")
    out, more = tmp_path / "run", ["--steps-per-epoch", "6", "--checkpoint-every", "1", "--workers", workers]
    step, bad = train.Run._train_step, []

    def damage(run, *batch):
        if run.step == 2:
            bad.extend(run.data.train.paths)
            for path in bad:
                os.truncate(path, 60)
        return step(run, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "_train_step", damage)
        assert main(options(root, out, *more)) == 2
    line = one_line(capsys)
    assert any(path in line for path in bad)
    assert "--check-images" in line
    assert "Traceback" not in line
    assert torch.load(out / "checkpoint.pt")["step"] >= 3


def test_a_damaged_test_image_is_named(images, tmp_path, capsys):
    root = shutil.copytree(images, tmp_path / "damaged")
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        evaluate = train.evaluate

        def damaged(net, data, *rest):
            os.truncate(data.test["both"].paths[5], 60)
            return evaluate(net, data, *rest)

        patch.setattr(train, "evaluate", damaged)
        assert main(options(root, out)) == 2
    assert ".png cannot be read as an image" in one_line(capsys)
    assert torch.load(out / "checkpoint.pt")["step"] == 2


MENDABLE = {
    "CUDA out of memory. Tried to allocate": torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
    "out of memory: [enforce": RuntimeError(
        "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"
    ),
    "out of memory: ": MemoryError(),
    "fewer --workers": RuntimeError("DataLoader worker (pid 5) is killed by signal: Killed."),
    "a check on the GPU failed": RuntimeError("CUDA error: device-side assert triggered"),
    "another process has ended": RuntimeError("gloo/transport/tcp/pair.cc:547] Connection closed by peer"),
}


@pytest.mark.parametrize("said", MENDABLE)
def test_what_the_user_can_mend_is_one_line(said, images, run, capsys, monkeypatch):
    def fails(*_):
        raise MENDABLE[said]

    monkeypatch.setattr(train.Run, "_train_step", fails)
    before = torch.load(run / "checkpoint.pt")
    assert main(options(images, run, "--epochs", "2")) == 2
    assert said in one_line(capsys)
    assert same(torch.load(run / "checkpoint.pt"), before)


@pytest.mark.parametrize("error", [RuntimeError("ours"), ValueError("ours"), KeyError("ours"), AssertionError()])
def test_what_is_ours_keeps_its_traceback(error, images, run, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr(train.Run, "_train_step", fails)
    with pytest.raises(type(error)):
        main(options(images, run, "--epochs", "2"))


# --fresh, and what is not ours


def interrupted_fresh(images, run, *, step, more=()):
    train_step = train.Run._train_step

    def interrupt(one, *batch):
        if one.step == step:
            raise KeyboardInterrupt
        return train_step(one, *batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train.Run, "_train_step", interrupt)
        assert main(options(images, run, "--fresh", "--lr", "0.1", *more)) == 130


def theirs(run):
    for name in ("tensorboard/another_run/events", "tensorboard/notes.txt", "notes.txt", "previous/notes.txt"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(name)
    return {
        str(path.relative_to(run)): path.read_bytes() for path in run.rglob("*") if path.name in ("events", "notes.txt")
    }


def test_a_fresh_run_keeps_the_one_before_until_it_has_finished_an_epoch(images, run):
    mine, before = theirs(run), contents(run)
    old = set(json.loads((run / "rambo_files.json").read_text())["files"])
    interrupted_fresh(images, run, step=1)
    now = contents(run)
    assert {f"previous/{name}": before[name] for name in old}.items() <= now.items()
    assert mine.items() <= now.items()
    assert main(options(images, run)) == 0  # the command of the run before: it is put back
    now = contents(run)
    assert {name: before[name] for name in ("checkpoint.pt", "best.pt")}.items() <= now.items()
    assert same(json.loads(now["metrics.json"]), json.loads(before["metrics.json"]))
    assert [name for name in now if name.startswith("previous")] == ["previous/notes.txt"]
    assert mine.items() <= now.items()
    assert main(options(images, run, "--fresh", "--lr", "0.1")) == 0
    assert [epoch["lr"] for epoch in read(run)["history"]] == [0.1]
    now = contents(run)
    assert [name for name in now if name.startswith("previous")] == ["previous/notes.txt"]
    assert mine.items() <= now.items()
    assert sum("tfevents" in name for name in now) == 1


def test_a_fresh_run_goes_on_from_its_own_checkpoint(images, run):
    before = contents(run)
    every = ["--checkpoint-every", "1"]
    interrupted_fresh(images, run, step=1, more=every)
    assert torch.load(run / "checkpoint.pt")["step"] == 1
    assert contents(run)["previous/best.pt"] == before["best.pt"]
    interrupted_fresh(images, run, step=1, more=every)  # fresh again: the good one is still the one that is kept
    assert contents(run)["previous/best.pt"] == before["best.pt"]
    assert main(options(images, run, "--lr", "0.1", *every)) == 0
    assert [epoch["lr"] for epoch in read(run)["history"]] == [0.1]
    assert not (run / "previous").exists()


def test_what_was_evaluated_meanwhile_stays(images, finished, run):
    test = ["--data", "folder", "--root", str(images), "--out", str(run), "--device", "cpu", "--quiet"]
    other = ["--evaluate-only", str(finished / "best.pt"), "--save-embeddings"]
    assert main(options(images, run, "--save-embeddings")) == 0
    interrupted_fresh(images, run, step=1)
    assert main([*test, *other, "--ks", "1"]) == 0
    evaluated = contents(run)
    assert main(options(images, run)) == 0
    for name in ("evaluation.json", "test_embeddings.npy", "test_labels.npy", "test_images.txt"):
        assert contents(run)[name] == evaluated[name]
    assert main(options(images, run, "--fresh")) == 0
    assert contents(run)["evaluation.json"] == evaluated["evaluation.json"]


class Stopped(BaseException):
    pass


def stop_at(number, act, *args, **kwargs):
    """Acts, but is killed at the change of this number that it makes in files; returns whether it was."""
    count = 0

    def counted(change):
        def wrapped(*args, **kwargs):
            nonlocal count
            count += 1
            if count == number:
                raise Stopped
            return change(*args, **kwargs)

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", counted(os.replace))
        patch.setattr(Path, "unlink", counted(Path.unlink))
        patch.setattr(Path, "write_text", counted(Path.write_text))
        try:
            act(*args, **kwargs)
        except Stopped:
            return True
    return False


FILES = ("checkpoint.pt", "best.pt", "tensorboard/events.rambo")


def small_run(path, text):
    folder = OwnFolder(path, PURPOSE)
    for name in FILES:
        with folder.writing(name) as file:
            file.write_text(f"{text} {name}")
    return folder


def test_an_interruption_at_any_point_of_setting_aside_and_putting_back_loses_nothing(tmp_path):
    for number in range(1, 100):
        path = tmp_path / str(number)
        small_run(path, "old")
        expected = {name: f"old {name}".encode() for name in FILES}
        stopped = stop_at(number, fresh.prepare, OwnFolder(path, PURPOSE), fresh=True)
        for again in range(1, 100):
            copy = shutil.copytree(path, tmp_path / f"{number}-{again}")
            still = stop_at(again, fresh.prepare, OwnFolder(copy, PURPOSE), fresh=False)
            assert fresh.prepare(OwnFolder(copy, PURPOSE), fresh=False)
            assert contents(copy, but=("rambo_files", ".unfinished")) == expected
            shutil.rmtree(copy)
            if not still:
                break
        if not stopped:
            break
    assert number > 10
    assert again > 10


def test_an_interruption_at_any_point_of_dropping_the_run_before_leaves_the_new_one(tmp_path):
    for number in range(1, 100):
        path = tmp_path / str(number)
        small_run(path, "old")
        fresh.prepare(OwnFolder(path, PURPOSE), fresh=True)
        folder = small_run(path, "new")
        stopped = stop_at(number, fresh.drop, folder)
        expected = {name: f"new {name}".encode() for name in FILES}
        again = shutil.copytree(path, tmp_path / f"{number}-fresh")
        assert fresh.prepare(OwnFolder(path, PURPOSE), fresh=False)
        assert {name: contents(path)[name] for name in FILES} == expected
        assert not fresh.prepare(OwnFolder(again, PURPOSE), fresh=True)
        assert {name: contents(again)[f"previous/{name}"] for name in FILES} == expected
        if not stopped:
            break
    assert number > 4


@pytest.mark.parametrize("more", [[], ["--fresh"], ["--evaluate-only", "x.pt"]])
def test_a_folder_with_other_things_is_refused_before_anything_is_done(more, images, tmp_path, capsys):
    (tmp_path / "tensorboard" / "another_run").mkdir(parents=True)
    (tmp_path / "tensorboard" / "another_run" / "events").write_text("curves")
    (tmp_path / "best.pt").write_text("weights")
    before = contents(tmp_path)
    data = ["--data", "folder", "--root", str(images), "--out", str(tmp_path)]
    assert main([*data, *more]) == 2
    assert "without rambo_files.json" in one_line(capsys)
    assert contents(tmp_path) == before


def test_a_file_of_the_users_in_the_folder_is_not_overwritten(images, run, capsys):
    (run / "test_labels.npy").write_text("theirs")
    assert main(options(images, run, "--save-embeddings")) == 2
    assert "was not written by us" in capsys.readouterr().err
    assert (run / "test_labels.npy").read_text() == "theirs"


def test_files_of_embeddings_are_of_one_network_or_not_there(images, run, monkeypatch):
    assert main(options(images, run, "--save-embeddings")) == 0
    save = np.save

    def fails(file, array):
        if array.ndim == 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(file, array)

    monkeypatch.setattr(np, "save", fails)
    assert main(options(images, run, "--save-embeddings", "--epochs", "2")) == 2
    assert [name for name in contents(run) if name.startswith("test_")] == ["test_embeddings.npy"]


# Several processes


def test_a_group_of_gloo_waits_as_long_as_the_others(monkeypatch):
    made = []
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "num_processes", lambda: 2)
    monkeypatch.setattr(dist, "new_group", lambda **kwargs: made.append(kwargs))
    with processes.joined(train.argparse.Namespace(device=torch.device("cpu"))):
        pass
    assert made == [{"backend": "gloo", "timeout": processes.WAIT}]
    assert processes.WAIT.total_seconds() == 3600


def test_processes_with_other_images_are_refused(images, tmp_path, capsys, monkeypatch):
    def gather(everywhere, own, group):
        everywhere[:] = [own, own | {"test images": "others"}]

    monkeypatch.setattr(identity, "num_processes", lambda: 2)
    monkeypatch.setattr(dist, "all_gather_object", gather)
    assert main(options(images, tmp_path)) == 2
    assert "process 1 has other settings than process 0: test images is others, there 16 of 4" in one_line(capsys)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["one", "all"])
def test_a_process_that_fails_ends_all_soon_with_one_line(what, images, tmp_path):
    root = shutil.copytree(images, tmp_path / "images")
    more = ["--loss", "ContrastiveLoss", *DIVERGES, "1e33"] if what == "all" else []
    if what == "one":  # both processes meet damaged images at other times
        for number, path in enumerate(sorted(root.rglob("*.png"))):
            if number % 3 == 1:
                os.truncate(path, 60)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "rambo_plugins.retrieval"]
    done = subprocess.run(
        [sys.executable, *launch, *options(root, tmp_path / "run", *more)],
        capture_output=True, text=True, check=False, timeout=300, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode != 0
    said = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1, done.stderr
    assert ("cannot be read as an image" if what == "one" else "are not finite numbers") in said[0]
    assert command_errors.__file__ not in done.stderr
