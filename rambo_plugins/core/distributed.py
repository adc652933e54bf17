"""The rows of all processes as one batch, with the gradient that one big batch would have."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor


def num_processes() -> int:
    """Processes of the default group, 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_rows(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The rows of every process, in the order of the ranks; the number of rows may differ between them.

    The own rows stay in the graph, and their gradient is multiplied by the number of processes; the others' rows are
    constants. So, where every process computes one loss of all rows and the gradients of the parameters are averaged
    over the processes, as DistributedDataParallel does, the average is the gradient of that loss.

    Args:
        tensors: (B, ...) of one B, of any dtype; the same shapes (but for B) and dtypes on all processes.

    Returns:
        For each tensor (sum of all B, ...); without a process group the tensors themselves.
    """
    num = num_processes()
    if num == 1:
        return tensors
    own = dist.get_rank()
    length = torch.tensor([len(tensors[0])], device=tensors[0].device)
    lengths = [torch.empty_like(length) for _ in range(num)]
    dist.all_gather(lengths, length)
    return tuple(_gather(tensor, [int(length) for length in lengths], own) for tensor in tensors)


def _gather(tensor: Tensor, lengths: list[int], own: int) -> Tensor:
    # As bytes: not every backend knows every dtype.
    rows = tensor.detach().reshape(len(tensor), math.prod(tensor.shape[1:])).contiguous().view(torch.uint8)
    padded = rows.new_zeros(max(lengths), rows.shape[1])
    padded[: len(rows)] = rows
    gathered = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(gathered, padded)
    parts = [
        part[:length].view(tensor.dtype).reshape(length, *tensor.shape[1:])
        for part, length in zip(gathered, lengths, strict=True)
    ]
    if tensor.requires_grad:
        parts[own] = tensor.clone()
        parts[own].register_hook(lambda grad: grad * len(lengths))
    return torch.cat(parts)
