"""One training run of the demo: a small ConvNet, a loss, a seed; PML's trainer and tester; resumed where it stopped."""

from __future__ import annotations

import io
import math
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pytorch_metric_learning import losses, samplers, testers, trainers
from torch import nn
from tqdm import tqdm

from rambo_plugins.demo.data import ImageClasses
from rambo_plugins.demo.identity import Settings, identity
from rambo_plugins.evaluation import RecallCalculator
from rambo_plugins.folders import OwnFolder
from rambo_plugins.pml import RamboAPLoss, RamboRecallLoss

# RaMBO's λ and margin were chosen by training on Latin and testing on Greek; PML's losses have their defaults.
LOSSES: dict[str, Callable[[], nn.Module]] = {
    "rambo-recall": lambda: RamboRecallLoss(lambda_val=4.0, margin=0.3),
    "rambo-ap": lambda: RamboAPLoss(lambda_val=16.0, margin=0.3),
    "fastap": losses.FastAPLoss,
    "multi-similarity": losses.MultiSimilarityLoss,
    "contrastive": losses.ContrastiveLoss,
}
KS = (1, 2, 4, 8)
METRICS = (*(f"recall_at_{k}" for k in KS), "mean_average_precision_at_r")


class Run:
    """A loss and a seed on a data set; ``train`` goes on from the checkpoint in ``folder``, if there is one.

    Raises:
        ValueError: the checkpoint is damaged, or of a run with other settings, on other data, or by other versions.
        FloatingPointError: ``train``: a loss or a network that is not finite; the last checkpoint stays.
    """

    def __init__(
        self,
        loss_name: str,
        seed: int,
        settings: Settings,
        data: tuple[ImageClasses, ImageClasses],
        folder: OwnFolder,
        device: torch.device,
    ) -> None:
        self.loss_name, self.seed, self.settings, self.device = loss_name, seed, settings, device
        self.train_set, self.test_set = data
        self.identity = identity(settings, data, device)
        self.folder, self.name = folder, f"checkpoints/{loss_name}-{seed}.pt"
        checkpoint = folder.own(self.name)
        torch.manual_seed(seed)
        self.model = conv_net(settings.dimensions).to(device)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=settings.learning_rate)
        self.loss_fn = LOSSES[loss_name]()
        self.tester = testers.GlobalEmbeddingSpaceTester(
            batch_size=512,
            dataloader_num_workers=0,
            data_device=device,
            accuracy_calculator=RecallCalculator(ks=KS),
            end_of_testing_hook=lambda tester: None,
        )
        self.history: list[dict[str, float]] = []
        """An entry an epoch: the mean training loss, the seconds of training and the metrics on the test set."""
        if checkpoint.exists():
            self._load(checkpoint)

    def train(self, description: str) -> None:
        """The epochs that are still missing, each seeded by itself, so that a resumed run draws the same batches."""
        total, done = self.settings.epochs * self.settings.steps, len(self.history) * self.settings.steps
        with tqdm(total=total, initial=done, desc=description, disable=False, leave=True) as bar:
            for epoch in range(len(self.history) + 1, self.settings.epochs + 1):
                start = time.perf_counter()
                loss = self._train_epoch(epoch, bar)
                seconds = time.perf_counter() - start
                if not all(value.isfinite().all() for value in self.model.state_dict().values()):
                    raise FloatingPointError(self._not_finite(epoch, "the network"))
                accuracies = self.tester.test({"test": self.test_set}, epoch, self.model)["test"]
                metrics = {name: float(accuracies[f"{name}_level0"]) for name in METRICS}
                self.history.append({"epoch": epoch, "loss": loss, "seconds": seconds, **metrics})
                self._save()
                bar.set_postfix_str(f"R@1 {100 * metrics['recall_at_1']:.1f} %")

    def test_embeddings(self) -> torch.Tensor:
        """Unit embeddings (N, D) of the test images."""
        embeddings, _ = self.tester.get_all_embeddings(self.test_set, self.model)
        return embeddings.cpu()

    def _train_epoch(self, epoch: int, bar: tqdm) -> float:
        torch.manual_seed(1000 * self.seed + epoch)
        np.random.seed(1000 * self.seed + epoch)  # noqa: NPY002 - PML's samplers draw from it
        num_classes = len(self.train_set.class_names)
        classes = min(self.settings.classes_per_batch, num_classes)
        images = self.settings.classes_per_batch * self.settings.images_per_class // classes
        batch_size, seen = classes * images, []

        def after_step(trainer: trainers.MetricLossOnly) -> None:
            seen.append(float(trainer.losses["total_loss"].detach()))
            if not math.isfinite(seen[-1]):
                raise FloatingPointError(self._not_finite(epoch, f"the loss of step {len(seen)}"))
            bar.update()

        trainer = trainers.MetricLossOnly(
            models={"trunk": self.model, "embedder": nn.Identity()},
            optimizers={"trunk_optimizer": self.optimizer},
            batch_size=batch_size,
            loss_funcs={"metric_loss": self.loss_fn},
            dataset=self.train_set,
            sampler=samplers.MPerClassSampler(
                self.train_set.labels, images, batch_size, length_before_new_iter=batch_size * self.settings.steps
            ),
            dataloader_num_workers=0,
            data_device=self.device,
            end_of_iteration_hook=after_step,
        )
        trainer.train(start_epoch=epoch, num_epochs=epoch)
        return float(np.mean(seen))

    def _state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "loss": self.loss_fn}

    def _not_finite(self, epoch: int, what: str) -> str:
        return f"{self.loss_name}, seed {self.seed}: {what} of epoch {epoch} is not finite; try a smaller learning rate"

    def _save(self) -> None:
        saved = {name: part.state_dict() for name, part in self._state().items()}
        saved |= {"identity": self.identity, "history": self.history}
        content = io.BytesIO()
        torch.save(saved, content)  # to a file, a full disk would be a RuntimeError without a name
        with self.folder.writing(self.name) as path:
            path.write_bytes(content.getvalue())

    def _load(self, path: Path) -> None:
        saved = _read(path, self.device)
        there = saved["identity"]
        changed = {k: (there.get(k), v) for k, v in self.identity.items() if there.get(k) != v}
        if changed:
            raise ValueError(
                f"{path} was trained with other settings (there, now): {changed}; choose another --out, or start over "
                "with --fresh"
            )
        for name, part in self._state().items():
            part.load_state_dict(saved[name])
        self.history = saved["history"]


def _read(path: Path, device: torch.device) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch.load does not look at the checksums
        if damaged:
            raise ValueError(f"the checksum of {damaged} is another")
        saved = torch.load(path, map_location=device, weights_only=True)
        if not {"identity", "history", "model", "optimizer", "loss"} <= set(saved):
            raise ValueError("parts are missing")
    except OSError:
        raise
    except Exception as error:  # zipfile, pickle and torch raise a dozen kinds
        what = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{path} is damaged, or no checkpoint of the demo: {what}; delete it, or start over with --fresh"
        ) from error
    return saved


def conv_net(dimensions: int) -> nn.Sequential:
    """Images (B, 1, 28, 28) to embeddings (B, ``dimensions``): three blocks of convolution, a linear layer, a norm."""
    layers: list[nn.Module] = []
    for channels_in, channels in ((1, 32), (32, 64), (64, 128)):
        layers += [
            nn.Conv2d(channels_in, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    # Without the last norm a fresh network embeds everything in one direction, and a margin is larger than the spread.
    head = nn.Linear(128 * 9, dimensions), nn.BatchNorm1d(dimensions, affine=False)
    net = nn.Sequential(*layers, nn.Flatten(), *head)
    # A third faster on a CPU; the overload is missing from torch's annotations.
    return net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
