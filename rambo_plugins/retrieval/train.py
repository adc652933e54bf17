"""The training loop, resumed where it stopped, on one process or several.

Nothing depends on where a run was interrupted. The number of a step says which batch it takes
(``SuperLabelBatchSampler``) and how the images are augmented (``RetrievalImages``), and it seeds the random numbers of
the network, and then those of the miner and the loss. So a checkpoint holds the number, and the states of network,
optimizer, scaler and loss.

On several processes each embeds its part of the batch, and computes the loss of all embeddings. Its gradients, averaged
as DistributedDataParallel does, are those of one process with the whole batch (``core.distributed.gather_rows``), if
batch norm is frozen, synchronised (CUDA only) or not there. Augmentation is drawn anew for another number of processes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import time
from collections.abc import Generator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm

from rambo_plugins.core.distributed import gather_rows, num_processes
from rambo_plugins.demo.report import versions
from rambo_plugins.pml.datasets import RetrievalImages
from rambo_plugins.pml.samplers import SuperLabelBatchSampler
from rambo_plugins.retrieval import checkpoint
from rambo_plugins.retrieval.arguments import settings
from rambo_plugins.retrieval.data import Data
from rambo_plugins.retrieval.evaluate import AMP, evaluate, shown
from rambo_plugins.retrieval.losses import build_loss, build_miner
from rambo_plugins.retrieval.models import build_net


class Run:
    """A training run in the folder ``args.out``; ``train`` goes on from its ``checkpoint.pt``, if there is one.

    The folder gets ``checkpoint.pt``, ``best.pt`` (the epoch of the best R@1), ``metrics.json`` and, if TensorBoard is
    installed, ``tensorboard/``. The first process alone writes.

    Raises:
        ValueError: arguments that do not fit together, or a folder with a run of other settings.
    """

    def __init__(self, args: argparse.Namespace, data: Data) -> None:
        self.args, self.data = args, data
        self.rank = dist.get_rank() if num_processes() > 1 else 0
        self.group = dist.new_group(backend="gloo") if num_processes() > 1 else None
        self.sampler = SuperLabelBatchSampler(
            data.train.labels,
            data.train.super_labels,
            images_per_class=args.images_per_class,
            batch_size=args.batch_size,
            batches_per_pair=args.batches_per_pair,
            seed=args.seed,
        )
        self.steps = args.steps_per_epoch or len(self.sampler)
        torch.manual_seed(args.seed)
        self.net = build_net(
            args.backbone, args.embedding_size, args.weights, freeze_bn=args.freeze_bn, chunk=args.chunk
        )
        self.loss_fn = build_loss(
            args.loss, args.loss_args, num_classes=int(data.train.labels.max()) + 1, embedding_size=args.embedding_size
        ).to(args.device)
        self.miner = build_miner(args.miner, args.miner_args) if args.miner else None
        several_gpus = num_processes() > 1 and args.device.type == "cuda"
        if several_gpus if args.sync_bn is None else args.sync_bn:
            self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)
        self.net.to(args.device)
        self.optimizer = torch.optim.Adam(
            [
                {"params": list(self.net.trunk.parameters()), "lr": args.lr},
                {"params": list(self.net.embedding.parameters()), "lr": args.embedding_lr},
                {"params": list(self.loss_fn.parameters()), "lr": args.loss_lr, "weight_decay": 0.0},
            ],
            weight_decay=args.weight_decay,
        )
        self.scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp == "fp16")
        self.step = 0
        self.history: list[dict[str, Any]] = []
        """An entry an epoch: mean loss, learning rate, seconds of training, and the figures of the test."""
        self.loss_sum, self.seconds = torch.zeros((), device=args.device), 0.0  # of the epoch so far
        self._resume()
        self.model: nn.Module = self.net
        if num_processes() > 1:
            self.model = DistributedDataParallel(
                self.net, device_ids=[args.device] if args.device.type == "cuda" else None
            )

    def train(self) -> None:
        args, total = self.args, self.args.epochs * self.steps
        self.logs = self._tensorboard()
        self._write_metrics()
        self.bar = tqdm(total=total, initial=min(self.step, total), disable=args.quiet or self.rank > 0)
        self.model.train()
        batches = self._batches()
        while True:
            if self.step == self.steps * (len(self.history) + 1):
                self._finish_epoch()
            if self.step >= total:
                break
            start = time.perf_counter()
            loss = self._train_step(*next(batches))
            self.loss_sum += loss
            self.step += 1
            if self.logs and self.step % args.log_every == 0:
                self.logs.add_scalar("loss", loss.item(), self.step)
                self.logs.add_scalar("lr", self.optimizer.param_groups[0]["lr"], self.step)
            self.seconds += time.perf_counter() - start
            self.bar.update()
            if self.step % self.steps == 0 or (args.checkpoint_every and self.step % args.checkpoint_every == 0):
                self._save("checkpoint.pt")
        batches.close()
        self.bar.close()
        if self.logs:
            self.logs.close()

    @property
    def best(self) -> dict[str, Any]:
        """The entry of the best R@1, the first of them."""
        first = f"recall_at_{min(self.data.ks)}"
        return max(self.history, key=lambda entry: entry[first] if entry.get(first) is not None else -1.0)

    def _batches(self) -> Generator[tuple[Tensor, Tensor], None, None]:
        """The batches of this step and all that follow, through as many epochs of the sampler as it takes."""
        step, device = self.step, self.args.device
        while True:
            epoch, start = divmod(step, len(self.sampler))
            if isinstance(self.data.train, RetrievalImages):
                self.data.train.set_epoch(epoch)
            self.sampler.set_epoch(epoch, start)
            loader = DataLoader(
                self.data.train,
                batch_sampler=self.sampler,
                num_workers=self.args.workers,
                pin_memory=device.type == "cuda",
            )
            for images, labels in loader:
                yield images.to(device, next(self.net.parameters()).dtype, non_blocking=True), labels.to(device)
                step += 1

    def _train_step(self, images: Tensor, labels: Tensor) -> Tensor:
        args, dtype = self.args, AMP[self.args.amp]
        drop = args.lr_gamma ** sum(self.step // self.steps >= epoch for epoch in args.lr_steps)
        for group, lr in zip(self.optimizer.param_groups, (args.lr, args.embedding_lr, args.loss_lr), strict=True):
            group["lr"] = lr * drop
        _seed(args.seed, self.step, 1 + self.rank)
        with torch.autocast(args.device.type, dtype, enabled=dtype is not None):
            embeddings = self.model(images)
        embeddings, labels = gather_rows(embeddings.to(torch.promote_types(embeddings.dtype, torch.float32)), labels)
        _seed(args.seed, self.step, 0)  # miners and losses draw alike on all processes
        tuples = self.miner(embeddings, labels) if self.miner else None
        loss = self.loss_fn(embeddings, labels, tuples)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if num_processes() > 1:  # equal but for the order of additions on a GPU: kept equal
            for parameter in self.loss_fn.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= num_processes()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def _finish_epoch(self) -> None:
        mean, lr = self.loss_sum.item() / self.steps, self.optimizer.param_groups[0]["lr"]
        if not math.isfinite(mean):
            raise FloatingPointError(f"the loss of epoch {len(self.history) + 1} is {mean}; try a smaller --lr")
        figures = evaluate(self.net, self.data, self.args, self.group)
        entry = {"epoch": len(self.history) + 1, "loss": mean, "lr": lr, **figures, "seconds": self.seconds}
        self.history.append(entry)
        self.loss_sum, self.seconds = torch.zeros_like(self.loss_sum), 0.0
        if self.best is entry:
            self._save("best.pt")
        self._save("checkpoint.pt")
        self._write_metrics()
        if self.logs:
            for name, value in figures.items():
                if value is not None:
                    self.logs.add_scalar(name, value, self.step)
        if self.rank == 0:
            tqdm.write(f"epoch {entry['epoch']}: loss {mean:.4f}  {shown(figures)}")

    def _parts(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer, "scaler": self.scaler, "loss": self.loss_fn}

    def _save(self, name: str) -> None:
        if self.rank > 0:
            return
        saved: dict[str, Any] = {part: value.state_dict() for part, value in self._parts().items()}
        saved |= {"settings": settings(self.args), "step": self.step, "history": self.history}
        saved |= {"loss_sum": self.loss_sum, "seconds": self.seconds}
        checkpoint.write(saved, self.args.out / name)

    def _resume(self) -> None:
        """Goes on from the checkpoint, if there is one, or makes room for a fresh run."""
        path = self.args.out / "checkpoint.pt"
        if self.args.fresh:
            if self.rank == 0:
                for name in ("checkpoint.pt", "best.pt", "metrics.json"):
                    (self.args.out / name).unlink(missing_ok=True)
                shutil.rmtree(self.args.out / "tensorboard", ignore_errors=True)
            return
        if not path.exists():
            return
        saved = checkpoint.read(path)
        checkpoint.check_settings(saved["settings"], settings(self.args), path)
        for name, part in self._parts().items():
            part.load_state_dict(saved[name])
        self.step, self.history, self.seconds = saved["step"], saved["history"], saved["seconds"]
        self.loss_sum = saved["loss_sum"].to(self.args.device)

    def _write_metrics(self) -> None:
        if self.rank > 0 or not self.history:
            return
        outcome = {"settings": settings(self.args), "history": self.history, "best": self.best}
        outcome["versions"] = versions()
        unfinished = self.args.out / "metrics.json.tmp"
        unfinished.write_text(json.dumps(outcome, indent=1) + "\n")
        os.replace(unfinished, self.args.out / "metrics.json")

    def _tensorboard(self) -> Any:
        if self.rank > 0:
            return None
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ModuleNotFoundError:
            return None
        return SummaryWriter(str(self.args.out / "tensorboard"), purge_step=self.step + 1)


def _seed(*numbers: int) -> None:
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - some of PML draws from it
    random.seed(seed)
