"""Runs of the detectron2 plugin: what their checkpoints keep, for every process, and what the launcher refuses."""

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

pytest.importorskip("detectron2")

from detectron2.checkpoint import DetectionCheckpointer
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.engine import SimpleTrainer, hooks
from detectron2.modeling import build_model
from detectron2.structures import Boxes, Instances
from test_detectron2 import NUM_CLASSES, config, predictor, proposals, refused

from rambo_plugins.detectron2 import RamboState, add_rambo_config
from rambo_plugins.detectron2.evaluators import PreciseVOCEvaluator, build_evaluator

ROOT = Path(__file__).parent.parent


@pytest.fixture
def log(caplog, monkeypatch):
    """Of our lines, whatever detectron2 has set up before."""
    ours = logging.getLogger("detectron2.rambo_plugins")
    monkeypatch.setattr(ours, "propagate", False)
    ours.addHandler(caplog.handler)
    with caplog.at_level(logging.INFO, logger=ours.name):
        yield caplog
    ours.removeHandler(caplog.handler)


def fails(*arguments):
    raise MemoryError


class Tiny(nn.Module):
    """A box predictor alone; a batch is the number of its seed."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.box_predictor = predictor(memory=2, lambda_val=3.0, aux_ce_weight=0.5, aux_ce_steps=5, **options)

    def forward(self, seed):
        if seed < 0:
            return {"loss_cls": self.box_predictor.cls_score.weight.sum() * float("nan")}
        features = torch.randn(20, 8, generator=torch.Generator().manual_seed(seed))
        losses = self.box_predictor.losses(self.box_predictor(features), proposals(seed=seed)[2])
        return {"loss_cls": losses["loss_cls"], "loss_box_reg": losses["loss_box_reg"]}


class Batches:
    def __init__(self, first, rank=0):
        self.first, self.rank = first, rank

    def __iter__(self):
        yield from range(100 * self.rank + self.first, 100 * self.rank + 99)


def tiny_trainer(folder, first=0, rank=0, data=None, wrap=lambda model: model, **options):
    """Checkpoints every two steps; the hook with the memory is the last, as in a script that adds a line."""
    model = wrap(Tiny(**options))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    trainer = SimpleTrainer(model, Batches(first, rank) if data is None else data, optimizer)
    checkpointer = DetectionCheckpointer(model, str(folder), trainer=trainer)
    if rank == 0:
        trainer.register_hooks([hooks.PeriodicCheckpointer(checkpointer, 2)])
    trainer.register_hooks([RamboState(model)])
    return trainer, checkpointer


def box_predictor(trainer):
    return next(module for module in trainer.model.modules() if hasattr(module, "rank_loss"))


def same(first, second):
    """Weights, steps and memories, to the last bit."""
    for one, other in zip(first.model.state_dict().values(), second.model.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    one, other = box_predictor(first), box_predictor(second)
    assert one.num_steps == other.num_steps
    for mine, theirs in zip(one.rank_loss.memory.contents(), other.rank_loss.memory.contents(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def begin_again(folder, to, checkpoint="model_0000001.pth"):
    """A folder as an interruption after two steps leaves it."""
    to.mkdir()
    shutil.copy(folder / checkpoint, to)
    (to / "last_checkpoint").write_text(checkpoint)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def two_processes(folder):
    """In each: four steps, and two steps resumed from the second; also with a memory that gathers."""
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    for gather in (False, True):
        options = {"wrap": nn.parallel.DistributedDataParallel, "memory_gather": gather}
        mine = folder / f"gather{gather}"
        whole, _ = tiny_trainer(mine, rank=rank, **options)
        if rank == 0:
            mine.mkdir()
        whole.train(0, 4)
        if rank == 0:
            begin_again(mine, folder / f"resumed{gather}")
        torch.distributed.barrier()
        resumed, checkpointer = tiny_trainer(folder / f"resumed{gather}", first=2, rank=rank, **options)
        checkpointer.resume_or_load("", resume=True)
        resumed.train(2, 4)
        same(whole, resumed)
        labels = box_predictor(resumed).rank_loss.memory.contents()[1]
        seeds = range(2) if gather else [rank]
        expected = [proposals(seed=100 * seed + step)[2][0].gt_classes for step in (2, 3) for seed in seeds]
        assert torch.equal(labels, torch.cat(expected))
    os.write(1, b"done\n")
    torch.distributed.barrier()
    os._exit(0)


def test_each_process_resumes_with_its_own_memory_and_one_process_says_that_it_has_none(tmp_path, log):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks")])
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import sys, pathlib; from test_detectron2_runs import two_processes; two_processes(pathlib.Path(sys.argv[1]))"
    )
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", worker, tmp_path],
        capture_output=True, text=True, check=False, env=environment, timeout=300,
    )  # fmt: skip
    assert done.stdout.count("done") == 2, done.stderr[-3000:]
    for gather, known in ((False, 0), (True, 80)):
        alone, checkpointer = tiny_trainer(tmp_path / f"resumed{gather}", memory_gather=gather)
        log.clear()
        checkpointer.resume_or_load("", resume=True)
        assert len(box_predictor(alone).rank_loss.memory) == known
        assert box_predictor(alone).num_steps == 4
        said = [record.getMessage() for record in log.records if "memor" in record.getMessage()]
        expected = "the checkpoint has the memories of 2 of 2 processes, and there are 1: this one begins with an empty"
        assert [line.startswith(expected) for line in said] == ([] if gather else [True])


def test_resuming_restores_the_memory_and_loading_weights_does_not(tmp_path):
    whole, _ = tiny_trainer(tmp_path / "run")
    (tmp_path / "run").mkdir()
    whole.train(0, 4)
    begin_again(tmp_path / "run", tmp_path / "again")
    resumed, checkpointer = tiny_trainer(tmp_path / "again", first=2)
    checkpointer.resume_or_load("", resume=True)
    assert box_predictor(resumed).num_steps == 2
    resumed.train(2, 4)
    same(whole, resumed)
    tuned, checkpointer = tiny_trainer(tmp_path / "tuned")
    checkpointer.resume_or_load(str(tmp_path / "run/model_final.pth"), resume=True)  # nothing to resume
    assert torch.equal(box_predictor(tuned).cls_score.weight, box_predictor(whole).cls_score.weight)
    assert (len(box_predictor(tuned).rank_loss.memory), box_predictor(tuned).num_steps) == (0, 0)


def test_a_resumed_run_without_a_state_says_so_once(tmp_path, log):
    (tmp_path / "run").mkdir()
    trainer, _ = tiny_trainer(tmp_path / "run")
    trainer._hooks.pop()  # a script that does not have the line
    trainer.train(0, 2)
    for resume, expected in ((True, 1), (False, 0)):
        again, checkpointer = tiny_trainer(tmp_path / "run", data=[7, 8, 9, 10])
        again._hooks.clear()
        checkpointer.resume_or_load("", resume=resume)
        log.clear()
        again.train(1237 if resume else 0, 1240 if resume else 3)
        said = [record.getMessage() for record in log.records if "empty memory" in record.getMessage()]
        assert len(said) == expected
    assert not said


def test_the_memory_of_other_classes_is_refused_and_one_switched_off_stays_empty():
    state = RamboState(Tiny()).state_dict()
    state["processes"][0]["box_predictor"]["num_classes"] = 7
    with pytest.raises(ValueError, match="memory in the checkpoint is of 7 classes, the model has 4"):
        RamboState(Tiny()).load_state_dict(state)
    trained = Tiny()
    sum(trained(1).values()).backward()
    off = nn.Module()
    off.box_predictor = predictor(memory=0)
    RamboState(off).load_state_dict(RamboState(trained).state_dict())
    assert (len(off.box_predictor.rank_loss.memory), off.box_predictor.num_steps) == (0, 1)
    RamboState(trained).load_state_dict(RamboState(off).state_dict())
    assert (len(trained.box_predictor.rank_loss.memory), trained.box_predictor.num_steps) == (0, 1)


@pytest.mark.parametrize("broken", ["loss", "weights"])
def test_a_model_with_nan_is_not_written_and_the_last_checkpoint_is_a_good_one(broken, tmp_path):
    data = [0, 1, -1, 3] if broken == "loss" else [0, 1, 2, 3]
    trainer, _ = tiny_trainer(tmp_path, data=data)

    class Break(hooks.HookBase):
        def after_step(self):
            if broken == "weights" and self.trainer.iter == 3:
                with torch.no_grad():
                    box_predictor(self.trainer).cls_score.bias[1] = float("inf")

    trainer._hooks.insert(0, Break())
    trainer._hooks[0].trainer = trainer
    said = "Loss became infinite or NaN" if broken == "loss" else "cls_score.bias is not finite"
    with pytest.raises(FloatingPointError, match=said):
        trainer.train(0, 4)
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["model_0000001.pth"]
    assert (tmp_path / "last_checkpoint").read_text() == "model_0000001.pth"
    saved = torch.load(tmp_path / "model_0000001.pth")["model"]
    assert all(value.isfinite().all() for value in saved.values())


# --- the predictor in a run -------------------------------------------------------------------------------------------


def test_a_call_that_fails_leaves_memory_and_steps_alone(monkeypatch):
    model = Tiny()
    layers = model.box_predictor
    model(1)
    memory = [kept.clone() for kept in layers.rank_loss.memory.contents()]
    for name in ("box_reg_loss", "sigmoid_cross_entropy_loss", "rank_loss"):
        with monkeypatch.context() as patched:
            patched.setitem(layers.__dict__, name, fails)
            with pytest.raises(MemoryError):
                model(2)
    logits, deltas, boxes = proposals()
    with pytest.raises(ValueError, match="NaN"):
        layers.losses((logits * float("nan"), deltas), boxes)
    assert layers.num_steps == 1
    for kept, before in zip(layers.rank_loss.memory.contents(), memory, strict=True):
        assert torch.equal(kept, before)
    before = layers.run_state()  # a failure after the call, as in the backward pass
    model(2)
    layers.restore(before)
    assert layers.num_steps == 1
    for kept, old in zip(layers.rank_loss.memory.contents(), memory, strict=True):
        assert torch.equal(kept, old)


def test_nothing_is_remembered_in_evaluation_mode():
    model = Tiny().eval()
    model(1)
    assert (len(model.box_predictor.rank_loss.memory), model.box_predictor.num_steps) == (0, 0)
    model.train()
    model(1)
    assert (len(model.box_predictor.rank_loss.memory), model.box_predictor.num_steps) == (20, 1)


def test_numbers_of_numpy_are_numbers_and_strings_and_booleans_are_none():
    layers = predictor(
        lambda_val=np.float32(0.5), margin=np.float64(0.25), memory=np.int64(3), memory_warmup=np.int32(1),
        map_weight=np.float32(3), apc_weight=np.int64(1), test_temperature=np.float32(0.5),
        aux_ce_weight=np.float16(0.5), aux_ce_steps=np.int64(7), loss_weight=np.float32(2),
    )  # fmt: skip
    plain = predictor(
        lambda_val=0.5, margin=0.25, memory=3, memory_warmup=1, map_weight=3, apc_weight=1, test_temperature=0.5,
        aux_ce_weight=0.5, aux_ce_steps=7, loss_weight={"loss_cls": 2, "loss_box_reg": 2},
    )  # fmt: skip
    assert layers.rank_loss.extra_repr() == plain.rank_loss.extra_repr()
    assert layers.rank_loss.memory.extra_repr() == plain.rank_loss.memory.extra_repr()
    names = ("test_temperature", "aux_ce_weight", "aux_ce_steps", "loss_weight")
    assert [getattr(layers, name) for name in names] == [getattr(plain, name) for name in names]
    logits, deltas, boxes = proposals()
    assert layers.losses((logits, deltas), boxes)["loss_cls"] == plain.losses((logits, deltas), boxes)["loss_cls"]
    for name in ("lambda_val", "margin", "memory", "map_weight", "test_temperature", "aux_ce_weight", "aux_ce_steps"):
        for value in ("1", True):
            with pytest.raises(ValueError, match=f"must be .*, got {value!r}"):
                predictor(**{"aux_ce_weight": 1.0, name: value})
    for options, message in (
        ({"aux_ce_weight": 1, "aux_ce_steps": 2.5}, "aux_ce_steps must be an integer >= 0, got 2.5"),
        ({"memory_gather": "no"}, "memory_gather must be True or False, got 'no'"),
        ({"rank_plus_grad": 1}, "rank_plus_grad must be True or False, got 1"),
        ({"loss_weight": {"loss_cl": 1.0}}, "loss_weight must be one of 'loss_cls', 'loss_box_reg', got 'loss_cl'"),
        ({"loss_weight": {"loss_cls": "1"}}, "loss_weight of loss_cls must be a finite number >= 0, got '1'"),
    ):
        with pytest.raises(ValueError, match=message):
            predictor(**options)


def test_the_node_is_added_once_and_misspelt_keys_are_errors(tmp_path):
    cfg = config(lambda_val=2.5)
    add_rambo_config(cfg)
    assert cfg.MODEL.ROI_BOX_HEAD.RAMBO.LAMBDA_VAL == 2.5
    (tmp_path / "config.yaml").write_text(
        "MODEL:\n  ROI_BOX_HEAD:\n    RAMBO:\n      LAMBDA_VAL: 1e-3\n"
    )  # yaml's string
    cfg.merge_from_file(str(tmp_path / "config.yaml"))
    assert cfg.MODEL.ROI_BOX_HEAD.RAMBO.LAMBDA_VAL == 0.001
    for name, kind in (("LAMDA_VAL", (KeyError, AssertionError)), ("LAMBDA_VAL", ValueError)):
        with pytest.raises(kind, match=r"Non-existent|Type mismatch"):
            cfg.merge_from_list([f"MODEL.ROI_BOX_HEAD.RAMBO.{name}", "True"])
    cfg.MODEL.ROI_BOX_HEAD.RAMBO.LAMDA_VAL = 3.0
    with pytest.raises(ValueError, match=r"RAMBO: expected the keys .*'LAMBDA_VAL'.*, got .*'LAMDA_VAL'"):
        build_model(cfg)


def test_labels_of_no_class_and_other_numbers_of_proposals_are_refused():
    layers = predictor(aux_ce_weight=1.0)
    logits, deltas, boxes = proposals()
    for wrong in (-1, NUM_CLASSES + 1):
        boxes[0].gt_classes[3] = wrong
        with pytest.raises(ValueError, match=rf"labels must be in \[0, 4\] .*, got {min(wrong, 0)} to {max(wrong, 4)}"):
            layers.losses((logits, deltas), boxes)
    with pytest.raises(ValueError, match="expected one for each of the 19 predictions, got 20"):
        layers.losses((logits[1:], deltas[1:]), boxes)
    assert len(layers.rank_loss.memory) == 0


# --- evaluation -------------------------------------------------------------------------------------------------------


@pytest.fixture
def voc(tmp_path):
    """Two images; a cat in each, a difficult dog in the second, no bird."""
    for folder in ("Annotations", "ImageSets/Main", "JPEGImages"):
        (tmp_path / folder).mkdir(parents=True)
    thing = (
        "<object><name>{}</name><pose>x</pose><truncated>0</truncated><difficult>{}</difficult><bndbox>"
        "<xmin>11</xmin><ymin>11</ymin><xmax>50</xmax><ymax>50</ymax></bndbox></object>"
    )
    for name, things in (("a", [("cat", 0)]), ("b", [("cat", 0), ("dog", 1)])):
        text = "".join(thing.format(*one) for one in things)
        (tmp_path / f"Annotations/{name}.xml").write_text(f"<annotation>{text}</annotation>")
    (tmp_path / "ImageSets/Main/test.txt").write_text("a\nb\n")
    yield tmp_path
    for year in (2007, 2012):
        MetadataCatalog.pop(f"tiny_voc_{year}", None)


def found(kinds, scores):
    instances = Instances((100, 100))
    instances.pred_boxes = Boxes(torch.tensor([[10.0, 10.0, 50.0, 50.0]] * len(kinds)))
    instances.scores, instances.pred_classes = torch.tensor(scores), torch.tensor(kinds)
    return [{"instances": instances}]


@pytest.mark.parametrize("year", [2007, 2012])
def test_the_mean_of_voc_is_over_the_classes_that_have_objects(year, voc, log):
    """The cat of one image is found, that of the other not: 1/2, by the eleven points 6/11. No bird, no easy dog."""
    name = f"tiny_voc_{year}"
    for classes in (["bird", "cat", "dog"], ["bird", "cat"]):
        MetadataCatalog.pop(name, None)
        MetadataCatalog.get(name).set(
            dirname=str(voc), split="test", year=year, thing_classes=classes, evaluator_type="pascal_voc"
        )
        evaluator = build_evaluator(name, "unused")
        assert type(evaluator) is PreciseVOCEvaluator
        evaluator.reset()
        evaluator.process([{"image_id": "a"}], found([1, 0], [0.7, 0.9]))
        evaluator.process([{"image_id": "b"}], found([0], [0.8]))
        expected = 100 * (6 / 11 if year == 2007 else 1 / 2)
        assert evaluator.evaluate()["bbox"]["AP50"] == pytest.approx(expected)
        assert "leaves out classes without an object: bird" in log.text
    evaluator.reset()
    assert evaluator.evaluate()["bbox"]["AP50"] == 0  # objects, but no detections
    with pytest.raises(ValueError, match="image a: expected finite scores, got nan"):
        evaluator.process([{"image_id": "a"}], found([1], [float("nan")]))
    with pytest.raises(ValueError, match="has 2 classes, got a detection of class 2"):
        evaluator.process([{"image_id": "a"}], found([2], [0.5]))


def test_data_sets_name_their_evaluator_or_are_evaluated_as_cocos(tmp_path, log):
    record = {"file_name": "a.png", "image_id": 0, "height": 9, "width": 9, "annotations": []}
    DatasetCatalog.register("of_no_type", lambda: [record])
    MetadataCatalog.get("of_no_type").set(thing_classes=["cat"])
    MetadataCatalog.get("of_another_type").set(evaluator_type="cityscapes")
    try:
        assert type(build_evaluator("of_no_type", str(tmp_path))).__name__ == "COCOEvaluator"
        assert "of_no_type names no evaluator_type: it is evaluated as COCO's" in log.text
        with pytest.raises(
            ValueError, match="expected an evaluator_type of coco, lvis or pascal_voc, got 'cityscapes'"
        ):
            build_evaluator("of_another_type", str(tmp_path))
    finally:
        DatasetCatalog.pop("of_no_type")
        MetadataCatalog.pop("of_no_type")
        MetadataCatalog.pop("of_another_type")


# --- launcher ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A command that would train: a config of a small model, two data sets in COCO's format of one image."""
    from PIL import Image

    cfg = config()
    cfg.merge_from_list(
        ["DATASETS.TRAIN", ("one_train",), "DATASETS.TEST", ("one_test",), "SOLVER.MAX_ITER", 2, "SOLVER.STEPS", (),
         "DATALOADER.NUM_WORKERS", 0, "OUTPUT_DIR", "out"]
    )  # fmt: skip
    (tmp_path / "config.yaml").write_text(cfg.dump())
    (tmp_path / "images").mkdir()
    Image.new("RGB", (128, 128)).save(tmp_path / "images/a.png")
    found = {
        "images": [{"id": 1, "file_name": "a.png", "width": 128, "height": 128}],
        "categories": [{"id": kind + 1, "name": f"kind {kind}"} for kind in range(NUM_CLASSES)],
        "annotations": [{"id": 1, "image_id": 1, "category_id": 2, "bbox": [9, 9, 60, 60], "area": 3600, "iscrowd": 0}],
    }
    (tmp_path / "coco.json").write_text(json.dumps(found))
    monkeypatch.chdir(tmp_path)
    yield ["--config-file", "config.yaml", *data_set("one_train"), *data_set("one_test")]
    forget()


def data_set(name, json_file="coco.json", images="images"):
    return ["--dataset", name, json_file, images]


def forget():
    for name in [name for name in DatasetCatalog.list() if name.startswith("one_")]:
        DatasetCatalog.pop(name)
        MetadataCatalog.pop(name)


def refusal(capsys, *command):
    forget()
    return refused(capsys, *map(str, command))


def test_options_that_would_do_nothing_are_refused(run, capsys):
    for options, said in (
        (["--machine-rank", 1], "--machine-rank 1: expected one of the 1 of --num-machines, from 0"),
        (["--dist-url", "tcp://x:1"], "--dist-url needs several processes: --num-gpus or --num-machines"),
        (["--num-gpus", 0], "--num-gpus, --num-machines: expected 1 or more, got 0, 1"),
        (["--num-gpus", 2], "--num-gpus, --num-machines: several processes need GPUs, MODEL.DEVICE is cpu"),
        (["--num-gpus", "two"], "argument --num-gpus: invalid int value: 'two'"),
    ):
        assert refusal(capsys, *options, *run) == said
    assert refusal(capsys) == "--config-file is required"
    assert not Path("out").exists()


def test_what_is_wrong_in_a_config_is_refused(run, capsys):
    Path("bad.yaml").write_text("MODEL: [")
    assert refusal(capsys, "--config-file", "bad.yaml").startswith("bad.yaml: while parsing")
    Path("bad.yaml").write_text("MODEL:\n  ROI_BOX_HEAD:\n    RAMBO:\n      LAMDA_VAL: 1.0\n")
    assert "Non-existent config key: MODEL.ROI_BOX_HEAD.RAMBO.LAMDA_VAL" in refusal(capsys, "--config-file", "bad.yaml")
    node = "MODEL.ROI_BOX_HEAD.RAMBO"
    for overrides, said in (
        ([f"{node}.LAMDA_VAL", "1.0"], f"overrides: Non-existent key: {node}.LAMDA_VAL"),
        ([f"{node}.LAMBDA_VAL"], "overrides: Override list has odd length"),
        ([f"{node}.LAMBDA_VAL", "True"], "overrides: Type mismatch"),
        ([f"{node}.LAMBDA_VAL", "-1.0"], "the config: lambda_val must be a finite number > 0, got -1.0"),
        (
            [f"{node}.SCORE_MODE", "margins"],
            "the config: score_mode must be one of 'sigmoid', 'softmax', got 'margins'",
        ),
        (["MODEL.ROI_HEADS.NAME", "RamboHeads"], "the config: No object named 'RamboHeads' found in 'ROI_HEADS'"),
        (["MODEL.DEVICE", "cuda"], "MODEL.DEVICE is cuda, and no GPU is visible; to use the CPU: MODEL.DEVICE cpu"),
        (["SOLVER.AMP.ENABLED", "True"], "SOLVER.AMP.ENABLED: detectron2's mixed precision needs a GPU"),
        (["SOLVER.IMS_PER_BATCH", "0"], "SOLVER.IMS_PER_BATCH: expected a multiple of the 1 processes, got 0"),
        (["MODEL.WEIGHTS", "none.pth"], "MODEL.WEIGHTS: none.pth is not there"),
        (["DATASETS.TRAIN", "()"], "DATASETS.TRAIN names no data set"),
        (["DATASETS.TEST", "('ones',)"], "DATASETS.TEST: there is no data set ones; --dataset registers one"),
        (["DATASETS.TRAIN", "('voc_2007_test',)"], "DATASETS.TRAIN: of voc_2007_test, datasets/VOC2007/Annotations is"),
        (["OUTPUT_DIR", "config.yaml/out"], "OUTPUT_DIR config.yaml/out cannot be written: "),
        (["OUTPUT_DIR", "''"], "OUTPUT_DIR: expected a folder, got nothing"),
    ):
        assert refusal(capsys, *run, *overrides).startswith(said)


def test_a_gpu_that_is_not_there_is_refused(run, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for options, said in (
        (["--num-gpus", 3, *run, "MODEL.DEVICE", "cuda"], "3 GPUs are asked for by --num-gpus and MODEL.DEVICE, 2 are"),
        ([*run, "MODEL.DEVICE", "cuda:2"], "3 GPUs are asked for by --num-gpus and MODEL.DEVICE, 2 are visible"),
        (
            ["--num-gpus", 2, *run, "MODEL.DEVICE", "cuda", "SOLVER.IMS_PER_BATCH", 3],
            "SOLVER.IMS_PER_BATCH: expected a",
        ),
    ):
        assert refusal(capsys, *options).startswith(said)


def test_a_data_set_that_is_not_whole_is_refused(run, capsys):
    command = ["--config-file", "config.yaml"]
    Path("text.json").write_text("[1, 2]")
    Path("no.json").write_text("{")
    found = json.loads(Path("coco.json").read_text())
    Path("more.json").write_text(json.dumps(found | {"images": [*found["images"], {"id": 2, "file_name": "b.png"}]}))
    Path("kinds.json").write_text(json.dumps(found | {"categories": found["categories"][:1]}))
    for options, said in (
        (data_set("coco_2017_val"), "there is a data set of this name; choose another one"),
        (data_set("one_a") + data_set("one_a"), "there is a data set of this name; choose another one"),
        (data_set("one_a", images="none"), "the folder of the images, none, is not there"),
        (data_set("one_a", "none.json"), "none.json: [Errno 2] No such file or directory: 'none.json'"),
        (data_set("one_a", "no.json"), "no.json: Expecting property name"),
        (data_set("one_a", "text.json"), "text.json is not in COCO's format: "),
        (data_set("one_a", "more.json"), "1 of 2 images are not in images: b.png"),
        (data_set("one_a", "kinds.json"), "kinds.json uses categories that it does not list: [2]"),
    ):
        assert refusal(capsys, *command, *options).startswith(f"--dataset {options[1]}: {said}")


def test_a_run_is_begun_once_and_weights_that_do_not_fit_are_not_evaluated(run, capsys, log):
    from rambo_plugins.detectron2.train import main

    said = refusal(capsys, "--eval-only", *run)
    assert said == "--eval-only needs weights: MODEL.WEIGHTS, or --resume for the last checkpoint"
    assert refusal(capsys, "--eval-only", "--resume", *run) == "--eval-only --resume: out has no last_checkpoint"
    forget()
    main(["--resume", *run, "SOLVER.MAX_ITER", "1"])
    assert "--resume: out has no checkpoint, so the run begins" in log.text
    written = Path("out/model_final.pth").read_bytes()
    said = "OUTPUT_DIR out has the checkpoints of a run: go on with --resume, or name another folder"
    assert refusal(capsys, *run) == said
    weights = ["MODEL.WEIGHTS", "out/model_final.pth", "OUTPUT_DIR", "tested", "MODEL.ROI_HEADS.NUM_CLASSES", "3"]
    said = refusal(capsys, "--eval-only", *run, *weights)
    assert said.startswith(
        "the weights do not fit the model, 4 of its tensors would be random: roi_heads.box_predictor"
    )
    forget()
    assert "bbox" in main(["--eval-only", *run, *weights[:4]])
    assert sorted(path.name for path in Path("tested/inference").iterdir()) == ["one_test"]
    assert Path("out/model_final.pth").read_bytes() == written
    Path("out/model_final.pth").unlink()
    said = "--resume: out/last_checkpoint names model_final.pth, which is not there"
    assert refusal(capsys, "--resume", *run) == said


def test_lazy_overrides_that_would_do_nothing_are_refused(run, tmp_path, capsys):
    path = ROOT / "detectron2_configs/COCO-Detection/faster_rcnn_R_50_FPN_1x_rambo.py"
    for override, said in (
        ("train.max_itr=5", "train.max_itr=5: the config has no train.max_itr; to add it, write +train.max_itr=5"),
        ("trian.device=cpu", "trian.device=cpu: the config has no trian.device; to add it, write +trian.device=cpu"),
        ("train.device", "overrides: "),
        (
            f"train.output_dir={tmp_path}",
            "train.device is cuda, and no GPU is visible; to use the CPU: train.device=cpu",
        ),
    ):
        assert refused(capsys, "--config-file", str(path), override).startswith(said)
    names = ["dataloader.train.dataset.names=one_train", "dataloader.test.dataset.names=one_test"]
    command = ["--config-file", str(path), *run[2:], *names, "train.device=cpu", "train.init_checkpoint=''"]
    said = refusal(capsys, *command, "model.roi_heads.box_predictor.lamda_val=3", f"train.output_dir={tmp_path}/new")
    assert said.startswith("the config: ")
    assert "unexpected keyword argument 'lamda_val'" in said
    Path(tmp_path / "bad.py").write_text("model = (")
    assert refused(capsys, "--config-file", str(tmp_path / "bad.py")).startswith(f"{tmp_path}/bad.py: ")
