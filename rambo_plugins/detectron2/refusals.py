"""What keeps ``train.py`` from doing what it was asked for, found before the work: one line each, to be mended."""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from rambo_plugins.detectron2.evaluators import check_evaluator


class ToMend(Exception):
    """Something that the user can mend; ``train.py`` prints the line and ends with 2."""


@contextlib.contextmanager
def to_mend(where: str, *kinds: type[Exception]) -> Iterator[None]:
    """Exceptions of these kinds are the user's to mend."""
    try:
        yield
    except kinds as error:
        text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
        raise ToMend(f"{where}: {' '.join(text.split()) or type(error).__name__}") from error


@dataclass(frozen=True)
class Wanted:
    """What a config asks for, of either kind, with the names that it has there."""

    names: dict[str, str]
    device: str
    output: str
    weights: str
    train: list[str] | None
    test: list[str] | None
    batch_size: int | None
    amp: bool

    @classmethod
    def of(cls, cfg: Any) -> Wanted:
        if isinstance(cfg, CfgNode):
            names = {"device": "MODEL.DEVICE", "output": "OUTPUT_DIR", "weights": "MODEL.WEIGHTS",
                     "train": "DATASETS.TRAIN", "test": "DATASETS.TEST", "batch_size": "SOLVER.IMS_PER_BATCH",
                     "amp": "SOLVER.AMP.ENABLED"}  # fmt: skip
        else:
            names = {"device": "train.device", "output": "train.output_dir", "weights": "train.init_checkpoint",
                     "train": "dataloader.train.dataset.names", "test": "dataloader.test.dataset.names",
                     "batch_size": "dataloader.train.total_batch_size", "amp": "train.amp.enabled"}  # fmt: skip
        found = {name: _select(cfg, key) for name, key in names.items()}
        for name in ("train", "test"):
            found[name] = [found[name]] if isinstance(found[name], str) else found[name] and list(found[name])
        found["weights"] = found["weights"] or ""
        missing = [names[name] for name in ("device", "output", "amp") if found[name] is None]
        if missing:
            raise ToMend(f"the config has no {missing[0]}, which detectron2's own configs have")
        return cls(names, **found)


def check_options(args: argparse.Namespace, defaults: argparse.Namespace) -> None:
    """Options that would do nothing, or that no machine can do."""
    if min(args.num_gpus, args.num_machines) < 1:
        raise ToMend(f"--num-gpus, --num-machines: expected 1 or more, got {args.num_gpus}, {args.num_machines}")
    if not 0 <= args.machine_rank < args.num_machines:
        raise ToMend(
            f"--machine-rank {args.machine_rank}: expected one of the {args.num_machines} of --num-machines, from 0"
        )
    if args.dist_url != defaults.dist_url and args.num_gpus * args.num_machines == 1:
        raise ToMend("--dist-url needs several processes: --num-gpus or --num-machines")


def register(datasets: list[list[str]]) -> None:
    """Registers data sets in COCO's format, of which the files are there."""
    for name, json_file, images in datasets:
        if name in DatasetCatalog.list():
            raise ToMend(f"--dataset {name}: there is a data set of this name; choose another one")
        if not Path(images).is_dir():
            raise ToMend(f"--dataset {name}: the folder of the images, {images}, is not there")
        with to_mend(f"--dataset {name}: {json_file}", OSError, ValueError):
            found = json.loads(Path(json_file).read_bytes())
        try:
            files = [image["file_name"] for image in found["images"]]
            known = {kind["id"] for kind in found["categories"]}
            used = {thing["category_id"] for thing in found.get("annotations", [])}
        except (KeyError, TypeError) as error:
            raise ToMend(f"--dataset {name}: {json_file} is not in COCO's format: {error!r}") from error
        missing = [file for file in files if not Path(images, file).is_file()]
        if not files or missing:
            raise ToMend(
                f"--dataset {name}: {len(missing)} of {len(files)} images are not in {images}: {', '.join(missing[:3])}"
                if missing
                else f"--dataset {name}: {json_file} has no images"
            )
        if used - known:
            raise ToMend(f"--dataset {name}: {json_file} uses categories that it does not list: {sorted(used - known)}")
        register_coco_instances(name, {}, json_file, images)


def check_keys(cfg: Any, overrides: Iterable[str]) -> None:
    """Overrides of a LazyConfig: its parser adds what is not there. Arguments of a call may be new, other keys not."""
    for override in overrides:
        key = override.split("=", 1)[0]
        if key.startswith(("+", "~")):
            continue
        node = cfg
        for part in key.split("."):
            if not hasattr(node, "keys"):
                break  # a list, or nothing to look into
            if part not in node.keys():  # noqa: SIM118  `in` leaves out what has no value yet
                if "_target_" in node:
                    break
                raise ToMend(f"{override}: the config has no {key}; to add it, write +{override}")
            node = node._get_node(part)


def check_run(wanted: Wanted, args: argparse.Namespace) -> bool:
    """Whether the run goes on from a checkpoint of its folder; raises ``ToMend`` for what it lacks."""
    _check_devices(wanted, args)
    _check_data(wanted, args)
    if not wanted.output:
        raise ToMend(f"{wanted.names['output']}: expected a folder, got nothing")
    resumes = False
    if "://" not in wanted.output:
        with to_mend(f"{wanted.names['output']} {wanted.output} cannot be written", OSError):
            Path(wanted.output).mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=wanted.output):
                pass
        resumes = _check_resume(wanted, args)
    weights = wanted.weights
    if not weights and args.eval_only and not resumes:
        raise ToMend(f"--eval-only needs weights: {wanted.names['weights']}, or --resume for the last checkpoint")
    if weights and not resumes and "://" not in weights and not Path(weights.split("?")[0]).is_file():
        raise ToMend(f"{wanted.names['weights']}: {weights} is not there")
    return resumes


def _check_resume(wanted: Wanted, args: argparse.Namespace) -> bool:
    last = Path(wanted.output, "last_checkpoint")
    if not last.exists():
        if args.resume and args.eval_only:
            raise ToMend(f"--eval-only --resume: {wanted.output} has no last_checkpoint")
        return False
    if args.resume:
        file = Path(wanted.output, last.read_text().strip())
        if not file.is_file():
            raise ToMend(f"--resume: {last} names {file.name}, which is not there")
    elif not args.eval_only:
        raise ToMend(
            f"{wanted.names['output']} {wanted.output} has the checkpoints of a run: go on with --resume, or name "
            "another folder"
        )
    return args.resume


def _check_devices(wanted: Wanted, args: argparse.Namespace) -> None:
    gpus, name = torch.cuda.device_count(), wanted.names["device"]
    if wanted.device.startswith("cuda"):
        needed = max(args.num_gpus, 1 + int(wanted.device.partition(":")[2] or 0))
        if not gpus:
            raise ToMend(f"{name} is {wanted.device}, and no GPU is visible; to use the CPU: {_override(name, 'cpu')}")
        if needed > gpus:
            raise ToMend(f"{needed} GPUs are asked for by --num-gpus and {name}, {gpus} are visible")
    elif args.num_gpus * args.num_machines > 1:
        raise ToMend(f"--num-gpus, --num-machines: several processes need GPUs, {name} is {wanted.device}")
    if wanted.amp and not wanted.device.startswith("cuda") and not args.eval_only:
        raise ToMend(f"{wanted.names['amp']}: detectron2's mixed precision needs a GPU, {name} is {wanted.device}")
    processes = args.num_gpus * args.num_machines
    if (
        wanted.batch_size is not None
        and not args.eval_only
        and (wanted.batch_size % processes or not wanted.batch_size)
    ):
        raise ToMend(
            f"{wanted.names['batch_size']}: expected a multiple of the {processes} processes, got {wanted.batch_size}"
        )


def _check_data(wanted: Wanted, args: argparse.Namespace) -> None:
    for part, needed in (("train", not args.eval_only), ("test", args.eval_only)):
        datasets, key = getattr(wanted, part), wanted.names[part]
        if datasets is not None and not datasets and needed:
            raise ToMend(f"{key} names no data set")
        for name in datasets or [] if needed or part == "test" else []:
            if name not in DatasetCatalog.list():
                raise ToMend(f"{key}: there is no data set {name}; --dataset registers one in COCO's format")
            found = MetadataCatalog.get(name)
            paths = [found.get("json_file", None), found.get("image_root", None)]
            if found.get("evaluator_type", None) == "pascal_voc":
                paths = [f"{found.dirname}/{part}" for part in ("Annotations", "JPEGImages", "ImageSets/Main")]
            for path in paths:
                if path is not None and "://" not in path and not Path(path).exists():
                    raise ToMend(f"{key}: of {name}, {path} is not there")
            if key == "DATASETS.TEST":  # a LazyConfig has its evaluator
                with to_mend(key, ValueError):
                    check_evaluator(name)


class WholeCheckpointer(DetectionCheckpointer):
    """For evaluation: a checkpoint that lacks weights of the model, or has others, is refused."""

    def _log_incompatible_keys(self, incompatible: Any) -> None:
        lacking = {name: "missing" for name in incompatible.missing_keys if not name.endswith("num_batches_tracked")}
        lacking |= {name: f"{tuple(got)}, not {tuple(own)}" for name, got, own in incompatible.incorrect_shapes}
        if lacking:
            shown = "; ".join(f"{name}: {text}" for name, text in list(lacking.items())[:2])
            raise ToMend(f"the weights do not fit the model, {len(lacking)} of its tensors would be random: {shown}")
        super()._log_incompatible_keys(incompatible)


def _override(name: str, value: str) -> str:
    return f"{name}={value}" if name.startswith("train.") else f"{name} {value}"


def _select(cfg: Any, key: str) -> Any:
    for part in key.split("."):
        if not hasattr(cfg, "keys") or part not in cfg:
            return None
        cfg = cfg[part]
    return cfg
