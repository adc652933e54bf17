"""The gradient of embeddings that other processes gathered from this one: ``distributed_grad`` of the losses."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rambo_plugins.core.distributed import num_processes


def connect_gathered(embeddings: Tensor, gathered: Tensor) -> Tensor:
    """The gathered embeddings, such that the backward pass sums over the processes the gradient of each one's own.

    Args:
        embeddings: (B, D), those of this process.
        gathered: (processes · B, D) as pytorch-metric-learning gathers them: this process's first, then the others' in
            the order of their ranks.

    Raises:
        ValueError: no process group, or another number of gathered embeddings.
    """
    expected = num_processes() * len(embeddings)
    if num_processes() == 1 or len(gathered) != expected:
        raise ValueError(
            "distributed_grad is for DistributedLossWrapper(efficient=True) on several processes with equal batches; "
            f"got {num_processes()} process(es), a batch of {len(embeddings)} and {len(gathered)} references"
        )
    return _ConnectGathered.apply(embeddings, gathered.detach())


class _ConnectGathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, embeddings: Tensor, gathered: Tensor) -> Tensor:
        return gathered.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rank, own_first = dist.get_rank(), list(grad.chunk(dist.get_world_size()))
        by_rank = own_first[1 : rank + 1] + own_first[:1] + own_first[rank + 1 :]
        summed = torch.stack(by_rank)
        dist.all_reduce(summed)
        return summed[rank], None
