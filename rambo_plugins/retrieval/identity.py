"""What decides the figures of a run: its settings and its images. A run goes on only where all of it is the same."""

from __future__ import annotations

import argparse
import hashlib
import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torchvision

from rambo_plugins.core.distributed import num_processes
from rambo_plugins.pml.datasets import RetrievalImages
from rambo_plugins.retrieval.data import Data, Images

# A run may go on with other values of these.
LOOSE = (
    "root",  # where the images are; which they are is told by their names, sizes and labels
    "check_images", "workers",  # a batch's images and their augmentation depend on the step alone
    "epochs",  # the last to train: no rate or batch depends on it; the rates drop after epochs that are counted
    "preset",  # is read into the other settings
    "weights",  # the file's name; its content is told by a digest
    "device",  # other hardware rounds otherwise, as another version of torch does
    "out", "fresh", "checkpoint_every", "log_every", "quiet",  # where and when something is written or shown
    "evaluate_only", "save_embeddings",  # after the training
    "given",  # which options were in the command line
)  # fmt: skip
# Not loose, though the parameters do not depend on them: ks and map_at_r say what an entry of the history holds, and
# the smallest K decides which epoch is the best. Neither are the processes: each augments, and normalises, its part.


WHOLE = 1 << 28
"""So many bytes are read in a second or so; of more, where files would be sought one by one, the sizes must do."""


def settings(args: argparse.Namespace, data: Data) -> dict[str, Any]:
    """All that decides the outcome of a run, in plain values.

    Raises:
        ValueError, OSError: a file of weights that is not there.
    """
    found = {name: value for name, value in vars(args).items() if name not in LOOSE}
    found |= {"weights": _weights(args), "ks": list(data.ks), "processes": num_processes()}
    return found | {f"{name} images": text for name, text in describe_images(data).items()}


def describe_images(data: Data) -> dict[str, str]:
    """Of each split how many images and classes, and a digest of names, labels, super labels and files.

    Of the files it takes the sizes, and the contents too where all of them together have at most ``WHOLE`` bytes.
    """
    splits = {"train": data.train, **{"test" if name == "both" else name: one for name, one in data.test.items()}}
    paths = [path for one in splits.values() if isinstance(one, RetrievalImages) for path in one.paths]
    above = os.path.commonpath([os.path.dirname(path) for path in paths]) if paths else ""
    whole = sum(map(os.path.getsize, paths)) <= WHOLE
    return {
        name: f"{len(one):,} of {len(one.labels.unique()):,} classes, digest {_digest(one, above, whole)}"
        for name, one in splits.items()
    }


def check_agreed(here: dict[str, Any], group: dist.ProcessGroup | None) -> None:
    """Raises ValueError on all processes where one has other settings or images than the first."""
    if num_processes() == 1:
        return
    everywhere: list[Any] = [None] * num_processes()
    dist.all_gather_object(everywhere, here, group=group)
    first = everywhere[0]
    for rank, there in enumerate(everywhere):
        if other := [f"{name} is {there[name]}, there {first[name]}" for name in first if there[name] != first[name]]:
            raise ValueError(f"process {rank} has other settings than process 0: {'; '.join(other)}")


def check_same(there: dict[str, Any], here: dict[str, Any], path: Path) -> None:
    """A run goes on only with what it was started with.

    Raises:
        ValueError: it is something else; it says what.
    """
    changed = [name for name in there | here if there.get(name) != here.get(name)]
    if not changed:
        return
    said = "; ".join(f"{name} was {there.get(name)}, now {here.get(name)}" for name in changed)
    remedy = "Give what it had, name another --out, or start over with --fresh"
    if {"ks", "map_at_r"} & set(changed):
        remedy += f"; --evaluate-only {path.with_name('best.pt')} gives other figures of the network that is there"
    raise ValueError(f"{path} is of a run with other settings: {said}. {remedy}")


def _digest(images: Images, above: str, whole: bool) -> str:
    digest = hashlib.sha256()
    for labels in (images.labels, images.super_labels):
        digest.update(b"none" if labels is None else labels.numpy().tobytes())
    if isinstance(images, RetrievalImages):
        for path in images.paths:
            digest.update(os.fsencode(os.path.relpath(path, above or ".")) + b"\0%d\0" % os.path.getsize(path))
            if whole:
                digest.update(Path(path).read_bytes())
    else:
        digest.update(images.images.numpy().tobytes())
    return digest.hexdigest()[:16]


def _weights(args: argparse.Namespace) -> str:
    if args.weights == "none" or (args.backbone.startswith("timm/") and args.weights == "DEFAULT"):
        return args.weights
    if args.weights == "DEFAULT":
        return str(torchvision.models.get_model_weights(args.backbone).DEFAULT)
    with open(args.weights, "rb") as file:
        return f"a file with the digest {_file_digest(file)}"


def _file_digest(file: Any) -> str:
    digest = hashlib.sha256()
    while block := file.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()[:16]
