"""The processes of one command: they join, and where one fails all end, with one line."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from rambo_plugins.core.distributed import num_processes
from rambo_plugins.retrieval.errors import CannotGoOn, refusals

WAIT = timedelta(hours=1)
"""How long a process waits for the others: while the first computes MAP@R or looks at all images, for example."""


def expected_processes() -> int:
    """How many there are, or will be once they have joined."""
    return num_processes() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", 1))


def first() -> bool:
    return num_processes() == 1 or dist.get_rank() == 0


@contextlib.contextmanager
def joined(args: argparse.Namespace) -> Iterator[dist.ProcessGroup | None]:
    """Joins the processes that torchrun started, if it did; gives a group of gloo, or None on one process.

    Raises:
        CannotGoOn: fewer GPUs than processes; without a text where another process has failed before, and says why.
    """
    if args.device.type == "cuda" and "LOCAL_RANK" in os.environ:
        local, there = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
        if local >= there:
            raise CannotGoOn(f"process {local} of this machine needs a GPU of its own, but there are {there}")
        args.device = torch.device("cuda", local)
        torch.cuda.set_device(args.device)
    if dist.is_initialized() or expected_processes() == 1:
        yield dist.new_group(backend="gloo", timeout=WAIT) if num_processes() > 1 else None
        return
    backend = "nccl" if args.device.type == "cuda" else "gloo"
    with refusals():  # what of the environment is missing
        store, rank, count = next(rendezvous("env://", timeout=WAIT))
    dist.init_process_group(
        backend, store=dist.PrefixStore("group", store), rank=rank, world_size=count, timeout=WAIT
    )  # fmt: skip
    try:
        yield dist.new_group(backend="gloo", timeout=WAIT)
    except BaseException as error:
        if backend == "gloo":  # nccl would wait for what the other processes will not do any more
            dist.destroy_process_group()
        if isinstance(error, Exception) and not _first_to_fail(store):
            raise CannotGoOn("") from error
        raise
    dist.destroy_process_group()


def _first_to_fail(store: dist.Store) -> bool:
    """Whether no other process has failed before; what follows from its end is not worth a line."""
    try:
        return store.add("failed", 1) == 1
    except RuntimeError:  # the process that holds the store has ended
        return False
