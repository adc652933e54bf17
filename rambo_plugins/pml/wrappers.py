"""Two wrappers of pytorch-metric-learning that take only the losses on their lists, with ours on them."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning.losses import CrossBatchMemory, SelfSupervisedLoss
from torch import Tensor

_LOSSES = ["RamboAPLoss", "RamboRecallLoss"]


def _refuse_memory(loss: torch.nn.Module, reason: str) -> None:
    memory = getattr(loss, "memory", None)
    if memory is not None and memory.batches:
        raise ValueError(f"{reason}: give the loss memory=0, got memory={memory.batches}")


class RamboCrossBatchMemory(CrossBatchMemory):
    """``CrossBatchMemory`` that accepts the RaMBO losses, and whose checkpoint knows how full the queue is.

    The queue of the host holds the current batch too, as constants: a query's gradient moves the query alone. The
    losses' own ``memory`` keeps the gradient of the current batch's references.
    """

    def __init__(self, loss: torch.nn.Module, embedding_size: int, memory_size: int = 1024, **kwargs: Any) -> None:
        super().__init__(loss, embedding_size, memory_size, **kwargs)
        _refuse_memory(loss, "RamboCrossBatchMemory is a memory itself")

    @staticmethod
    def supported_losses() -> list[str]:
        return [*CrossBatchMemory.supported_losses(), *_LOSSES]

    def get_extra_state(self) -> Tensor:
        return torch.tensor([self.queue_idx, self.has_been_filled], dtype=torch.int64)

    def set_extra_state(self, state: Tensor) -> None:
        queue_idx, has_been_filled = state.tolist()
        self.queue_idx, self.has_been_filled = queue_idx, bool(has_been_filled)


class RamboSelfSupervisedLoss(SelfSupervisedLoss):
    """``SelfSupervisedLoss`` that accepts the RaMBO losses."""

    def __init__(self, loss: torch.nn.Module, symmetric: bool = True, **kwargs: Any) -> None:
        super().__init__(loss, symmetric, **kwargs)
        _refuse_memory(loss, "RamboSelfSupervisedLoss numbers the images of each batch anew")

    @staticmethod
    def supported_losses() -> list[str]:
        return [*SelfSupervisedLoss.supported_losses(), *_LOSSES]
