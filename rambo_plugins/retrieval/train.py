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
import random
import time
from collections.abc import Generator, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from tqdm import tqdm

from rambo_plugins.core.distributed import gather_rows, num_processes
from rambo_plugins.folders import OwnFolder
from rambo_plugins.pml.datasets import RetrievalImages
from rambo_plugins.pml.samplers import SuperLabelBatchSampler
from rambo_plugins.retrieval import checkpoint, fresh, losses, models
from rambo_plugins.retrieval.data import Data, read_batches
from rambo_plugins.retrieval.errors import CannotGoOn
from rambo_plugins.retrieval.evaluate import AMP, evaluate, shown
from rambo_plugins.retrieval.identity import check_agreed, check_same, settings
from rambo_plugins.retrieval.losses import RAMBO, build_loss, build_miner
from rambo_plugins.retrieval.models import build_net
from rambo_plugins.retrieval.records import tensorboard, write_metrics
from rambo_plugins.retrieval.refusals import check_run
from rambo_plugins.retrieval.watch import Watch


class Run:
    """A training run in the folder ``args.out``; ``train`` goes on from its ``checkpoint.pt``, if there is one.

    The folder gets ``checkpoint.pt``, ``best.pt`` (the epoch of the best R@K of the smallest K), ``metrics.json`` and,
    if TensorBoard is installed, ``tensorboard/``. A state that is not finite is not written. The first process alone
    writes.

    Args:
        folder: that of ``args.out`` on the first process, None on others.
        group: of gloo, with several processes.

    Raises:
        ValueError: arguments that do not fit together, or a folder with a run of other settings or images.
        OSError: no room for the checkpoints.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        data: Data,
        folder: OwnFolder | None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.args, self.data, self.folder, self.group = args, data, folder, group
        self.rank = dist.get_rank() if num_processes() > 1 else 0
        self.sampler = SuperLabelBatchSampler(
            data.train.labels,
            data.train.super_labels,
            images_per_class=args.images_per_class,
            batch_size=args.batch_size,
            batches_per_pair=args.batches_per_pair,
            seed=args.seed,
        )
        self.steps = args.steps_per_epoch = args.steps_per_epoch or len(self.sampler)
        torch.manual_seed(args.seed)
        self.net = build_net(
            args.backbone, args.embedding_size, args.weights, freeze_bn=args.freeze_bn, chunk=args.chunk
        )
        self.loss_fn = build_loss(
            args.loss, args.loss_args, num_classes=int(data.train.labels.max()) + 1, embedding_size=args.embedding_size
        ).to(args.device)
        self.miner = build_miner(args.miner, args.miner_args) if args.miner else None
        check_run(args, data, self.net, self.loss_fn, self.steps, num_processes())
        self.settings = settings(args, data)
        check_agreed(self.settings, group)
        if args.sync_bn:
            self.net = nn.SyncBatchNorm.convert_sync_batchnorm(self.net)
        self.net.to(args.device)
        self._try_out()
        self.optimizer = torch.optim.Adam(
            [
                {"params": list(self.net.trunk.parameters()), "lr": args.lr},
                {"params": list(self.net.embedding.parameters()), "lr": args.embedding_lr},
                {"params": list(self.loss_fn.parameters()), "lr": args.loss_lr, "weight_decay": 0.0},
            ],
            weight_decay=args.weight_decay,
        )
        self.scaler = torch.amp.GradScaler(args.device.type, enabled=args.amp == "fp16")
        self.step = self.saved_step = 0
        self.history: list[dict[str, Any]] = []
        """An entry an epoch: mean loss, learning rate, seconds of training, steps with a gradient, and the figures of
        the test."""
        self.watch, self.seconds = Watch(args.device, skips=args.amp == "fp16"), 0.0  # of the epoch so far
        self.images: Tensor | None = None  # some of the last batch
        self._resume()
        if folder is not None:
            test_rows = sum(map(len, data.test.values())) if args.save_embeddings else 0
            checkpoint.check_space(self._state(), folder, 4 * args.embedding_size * test_rows)
        self.model: nn.Module = self.net
        if num_processes() > 1:
            self.model = DistributedDataParallel(
                self.net, device_ids=[args.device] if args.device.type == "cuda" else None
            )

    def train(self) -> None:
        total = self.args.epochs * self.steps
        self.logs = None if self.folder is None else tensorboard(self.folder, self.step + 1)
        if self.folder is not None and self.history:
            write_metrics(self.folder, self.settings, self.history, self.best)
        batches = self._batches()
        with tqdm(total=total, initial=min(self.step, total), disable=self.args.quiet or self.rank > 0) as bar:
            try:
                self._train(batches, bar, total)
            finally:
                batches.close()
                if self.logs:
                    self.logs.close()

    def _train(self, batches: Iterator[tuple[Tensor, Tensor]], bar: tqdm, total: int) -> None:
        args = self.args
        self.model.train()
        while True:
            if self.step == self.steps * (len(self.history) + 1):
                self._finish_epoch()
            if self.step >= total:
                break
            start = time.perf_counter()
            loss = self._train_step(*next(batches))
            self.step += 1
            if self.step % args.log_every == 0:
                self._mean_loss()
                if self.logs:
                    self.logs.add_scalar("loss", loss.item(), self.step)
                    self.logs.add_scalar("lr", self.optimizer.param_groups[0]["lr"], self.step)
            self.seconds += time.perf_counter() - start
            bar.update()
            if self.step % self.steps == 0 or (args.checkpoint_every and self.step % args.checkpoint_every == 0):
                self._save("checkpoint.pt")

    @property
    def best(self) -> dict[str, Any]:
        """The entry of the best R@K of the smallest K, the first of them."""
        return max(self.history, key=lambda entry: entry[f"recall_at_{min(self.data.ks)}"])

    @property
    def learnt(self) -> bool:
        """Whether any step had a gradient."""
        return any(entry["steps_with_gradient"] for entry in self.history)

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
            for images, labels in read_batches(loader):
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
        embeddings.retain_grad()
        _seed(args.seed, self.step, 0)  # miners and losses draw alike on all processes
        loss = self._loss(embeddings, labels)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        if num_processes() > 1:  # equal but for the order of additions on a GPU: kept equal
            for parameter in self.loss_fn.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= num_processes()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.images = images[:8]
        self.watch.add(loss.detach(), embeddings, labels)
        return loss.detach()

    def _loss(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        try:
            tuples = self.miner(embeddings, labels) if self.miner else None
            return self.loss_fn(embeddings, labels, tuples)
        except (ValueError, AssertionError) as error:  # what PML says of a batch that it does not take
            if not embeddings.isfinite().all():
                what = f"step {self.step + 1}: the embeddings are not finite numbers any more"
                raise CannotGoOn(f"{what}; {self._remedy()}") from error
            if self.args.loss in RAMBO and self.miner is None:
                raise
            raise CannotGoOn(f"--loss {self.args.loss}, step {self.step + 1}: {error}") from error

    def _mean_loss(self, *, whole: bool = False) -> float:
        """Of the epoch so far. Raises CannotGoOn where it has left the numbers."""
        steps = self.step - self.steps * len(self.history)
        return self.watch.check(steps, len(self.history) + 1, self._remedy(), whole=whole)

    def _remedy(self) -> str:
        path = self.args.out / "checkpoint.pt"
        kept = f"the state of step {self.saved_step} is kept in {path}" if self.saved_step else "nothing was saved"
        return (
            f"{kept}. A smaller --lr, or other settings of the loss, make another run: name another --out"
            + (f" (with --weights {path} it starts from there)" if self.saved_step else "")
            + ", or add --fresh"
        )

    def _finish_epoch(self) -> None:
        mean, lr, epoch = self._mean_loss(whole=True), self.optimizer.param_groups[0]["lr"], len(self.history) + 1
        figures = evaluate(self.net, self.data, self.args, self.group)
        moved = self.watch.finish(
            epoch, mean, rambo=self.args.loss in RAMBO, pairs_only=not any(True for _ in self.loss_fn.parameters())
        )
        entry = {"epoch": epoch, "loss": mean, "lr": lr, **figures}
        entry |= {"seconds": self.seconds, "steps_with_gradient": moved}
        self.history.append(entry)
        self.seconds = 0.0
        if self.rank == 0:  # before what may fail
            tqdm.write(f"epoch {epoch}: loss {mean:.4f}  {shown(figures)}")
        if self.best is entry:
            self._save("best.pt")
        self._save("checkpoint.pt")
        if self.folder is not None:
            fresh.drop(self.folder)
            write_metrics(self.folder, self.settings, self.history, self.best)
        if self.logs:
            for name, value in figures.items():
                if value is not None:
                    self.logs.add_scalar(name, value, self.step)

    def _parts(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer, "scaler": self.scaler, "loss": self.loss_fn}

    def _state(self) -> dict[str, Any]:
        saved: dict[str, Any] = {part: value.state_dict() for part, value in self._parts().items()}
        saved |= {"settings": self.settings, "step": self.step, "history": self.history}
        return saved | {"sums": self.watch.sums, "seconds": self.seconds}

    def _save(self, name: str) -> None:
        saved = self._state()
        self._check_state(saved)
        if self.folder is not None:
            checkpoint.write(saved, self.folder, name)
        if name == "checkpoint.pt":
            self.saved_step = self.step

    def _check_state(self, saved: dict[str, Any]) -> None:
        """Raises CannotGoOn where the state is not finite, or gives embeddings that are not."""
        if self.step > self.steps * len(self.history):
            self._mean_loss()
        broken = checkpoint.not_finite({name: saved[name] for name in ("model", "optimizer", "loss")})
        if broken is None and self.images is not None:
            self.net.eval()
            with torch.no_grad():
                finite = bool(self.net(self.images).isfinite().all())
            self.net.train()
            broken = None if finite else "the network's embeddings"
        if broken is not None:
            raise CannotGoOn(f"step {self.step}: {broken} is not finite any more; {self._remedy()}")

    def _try_out(self) -> None:
        args = self.args
        image, _ = self.data.train[0]
        models.try_out(self.net, image, f"--backbone {args.backbone}")
        self.sampler.set_epoch(0)
        labels = self.data.train.labels[next(iter(self.sampler))].to(args.device)
        what = f"--loss {args.loss}" + (f" with --miner {args.miner}" if args.miner else "")
        losses.try_out(
            self.loss_fn, self.miner, labels, embedding_size=args.embedding_size, device=args.device, what=what
        )  # fmt: skip

    def _resume(self) -> None:
        """Goes on from the checkpoint, if there is one, or makes room for a fresh run."""
        found = [self.folder is not None and fresh.prepare(self.folder, fresh=self.args.fresh)]
        if num_processes() > 1:
            dist.broadcast_object_list(found, src=0, group=self.group)
        if not found[0]:
            return
        path = self.args.out / "checkpoint.pt"
        saved = checkpoint.read(path)
        check_same(saved["settings"], self.settings, path)
        for name, part in self._parts().items():
            part.load_state_dict(saved[name])
        self.step, self.history, self.seconds = saved["step"], saved["history"], saved["seconds"]
        self.saved_step = self.step
        self.watch.sums = saved["sums"].to(self.args.device)


def _seed(*numbers: int) -> None:
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    torch.manual_seed(seed)
    np.random.seed(seed)  # noqa: NPY002 - some of PML draws from it
    random.seed(seed)
