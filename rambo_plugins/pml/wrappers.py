"""Two wrappers of pytorch-metric-learning that take only the losses on their lists, with ours on them."""

from __future__ import annotations

from typing import Any

import torch
from pytorch_metric_learning.losses import CrossBatchMemory, SelfSupervisedLoss
from torch import Tensor

from rambo_plugins.pml.losses import check_labels

_LOSSES = ["RamboAPLoss", "RamboRecallLoss"]


def _refuse_memory(loss: torch.nn.Module, reason: str) -> None:
    memory = getattr(loss, "memory", None)
    if memory is not None and memory.batches:
        raise ValueError(f"{reason}: give the loss memory=0, got memory={memory.batches}")


class RamboCrossBatchMemory(CrossBatchMemory):
    """``CrossBatchMemory`` that accepts the RaMBO losses, and whose checkpoint knows how full the queue is.

    The queue of the host holds the current batch too, as constants: a query's gradient moves the query alone. The
    losses' own ``memory`` keeps the gradient of the current batch's references. Each forward pass fills the queue, in
    evaluation too; one that raises leaves it as it was.

    Raises (in a forward pass):
        TypeError: labels that are no integers.
        ValueError: an ``indices_tuple``. The host takes its places in the batch for places in the queue, where other
            items stand: pass the miner itself, ``miner=``, which sees the queue.
    """

    embedding_memory: Tensor
    label_memory: Tensor
    queue_idx: int
    has_been_filled: bool

    def __init__(self, loss: torch.nn.Module, embedding_size: int, memory_size: int = 1024, **kwargs: Any) -> None:
        super().__init__(loss, embedding_size, memory_size, **kwargs)
        _refuse_memory(loss, "RamboCrossBatchMemory is a memory itself")

    @staticmethod
    def supported_losses() -> list[str]:
        return [*CrossBatchMemory.supported_losses(), *_LOSSES]

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        indices_tuple: tuple[Tensor, ...] | None = None,
        enqueue_mask: Tensor | None = None,
    ) -> Any:
        """The host's: the loss of embeddings (B, D) and labels (B,), which the queue takes in."""
        check_labels("labels", labels)
        if indices_tuple is not None:
            raise ValueError(
                "the places of an indices_tuple are in the batch, those of a CrossBatchMemory in its queue: "
                "give RamboCrossBatchMemory the miner itself, miner=..., got a tuple"
            )
        queue, queue_labels, queue_idx, filled = (
            self.embedding_memory, self.label_memory, self.queue_idx, self.has_been_filled,
        )  # fmt: skip
        next_ones = torch.arange(queue_idx, queue_idx + len(embeddings), device=queue.device) % self.memory_size
        kept, kept_labels = queue[next_ones], queue_labels[next_ones]
        try:
            return super().forward(embeddings, labels.long(), None, enqueue_mask)  # the queue has the dtype of these
        except BaseException:
            queue[next_ones], queue_labels[next_ones] = kept, kept_labels
            self.embedding_memory, self.label_memory = queue, queue_labels
            self.queue_idx, self.has_been_filled = queue_idx, filled
            raise

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
