"""Whether a training trains: sums of an epoch on the device, which no step waits for, and what is said of them."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from rambo_plugins.retrieval.errors import CannotGoOn

logger = logging.getLogger("rambo_plugins")


class Watch:
    """The sums of the epoch so far: the loss, steps that were finite, with a gradient, and with a pair of one class.

    With ``skips`` a step whose gradient is not finite is skipped by the GradScaler, and is no failure.
    """

    def __init__(self, device: torch.device, *, skips: bool) -> None:
        self.skips = skips
        self.sums = torch.zeros(4, device=device)
        self.warned: set[str] = set()

    def add(self, loss: Tensor, embeddings: Tensor, labels: Tensor) -> None:
        """A step: its loss (), its embeddings (B, D) with their gradient, and their labels (B,)."""
        finite, gradient = loss.isfinite() & embeddings.detach().isfinite().all(), embeddings.grad
        moves = torch.zeros_like(finite) if gradient is None else gradient.isfinite().all() & gradient.any()
        pairs = (labels.sort().values.diff() == 0).any()
        self.sums += torch.stack(
            [value.to(self.sums) for value in (torch.where(finite, loss, 0), finite, moves, pairs)]
        )  # fmt: skip

    def check(self, steps: int, epoch: int, remedy: str, *, whole: bool = False) -> float:
        """The mean loss of the ``steps`` of this epoch so far, or all of them if ``whole``.

        Raises:
            CannotGoOn: the loss has left the numbers.
        """
        total, finite = self.sums[:2].tolist()
        if finite == steps or (self.skips and (finite or not whole)):
            return total / finite if finite else 0.0
        bad = f"the loss or the embeddings of {steps - int(finite)} of {steps} steps are not finite numbers"
        raise CannotGoOn(f"epoch {epoch}: {bad}; {remedy}")

    def finish(self, epoch: int, mean: float, *, rambo: bool, pairs_only: bool) -> int:
        """Warns of an epoch that taught nothing, once a kind; returns the steps with a gradient, and starts anew.

        Args:
            mean: the mean loss.
            rambo: the loss has a λ.
            pairs_only: the loss learns of pairs, and not of proxies.
        """
        _, _, gradients, pairs = (int(value) for value in self.sums.tolist())
        self.sums = torch.zeros_like(self.sums)
        if not pairs:
            learns = ", of which this loss learns" if pairs_only else ""
            self._warn("pairs", f"epoch {epoch}: no batch had two images of one class{learns}")
        if gradients:
            return gradients
        if self.skips:
            why = "fp16 skipped every step, as no gradient was finite; --amp bf16 has the range of float32"
        elif mean:
            small = "; λ is too small for any item to move: give --loss-args a larger lambda_val"
            why = f"every gradient was zero{small if rambo else ''}"
        else:
            why = "the loss of every step was 0"
        self._warn("gradients", f"epoch {epoch}: nothing was learnt: {why}")
        return 0

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self.warned:
            self.warned.add(kind)
            logger.warning("%s", text)
