"""Losses and miners by the names that the command line gives."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from pytorch_metric_learning import losses, miners
from torch import Tensor, nn

from rambo_plugins.pml import RamboAPLoss, RamboRecallLoss

RAMBO: dict[str, Callable[..., nn.Module]] = {"rambo-recall": RamboRecallLoss, "rambo-ap": RamboAPLoss}


def build_loss(name: str, arguments: dict[str, Any], *, num_classes: int, embedding_size: int) -> nn.Module:
    """A loss of (embeddings, labels, tuples of a miner or None).

    The number of classes and the size of embeddings are given to the losses that need them, proxies for example.

    Raises:
        ValueError: an unknown name or argument, or one that the loss refuses.
    """
    loss_type = RAMBO.get(name) or _find(losses, losses.BaseMetricLossFunction, "--loss", name, list(RAMBO))
    known = {"num_classes": num_classes, "embedding_size": embedding_size, "descriptors_dim": embedding_size}
    needed = _required(loss_type)
    return _make(loss_type, f"--loss {name}", {**{k: v for k, v in known.items() if k in needed}, **arguments})


def build_miner(name: str, arguments: dict[str, Any]) -> nn.Module:
    """A miner: (embeddings, labels) to a tuple of indices. Raises as ``build_loss``."""
    return _make(_find(miners, miners.BaseMiner, "--miner", name, []), f"--miner {name}", arguments)


def _find(module: ModuleType, base: type, option: str, name: str, others: list[str]) -> Callable[..., nn.Module]:
    names = [
        one
        for one, found in vars(module).items()
        if inspect.isclass(found) and issubclass(found, base) and found is not base
    ]
    if name not in names:
        choices = [*others, *sorted(names)]
        raise ValueError(f"{option} {name}: expected one of {', '.join(choices)}")
    return getattr(module, name)


def _required(loss_type: Any) -> set[str]:
    """Arguments without a default, also those that are only passed on to a base class."""
    signatures = [inspect.signature(base.__init__) for base in loss_type.__mro__ if "__init__" in vars(base)]
    return {
        name for one in signatures for name, value in one.parameters.items() if value.default is inspect.Parameter.empty
    }


def try_out(
    loss_fn: nn.Module, miner: nn.Module | None, labels: Tensor, *, embedding_size: int, device: torch.device, what: str
) -> None:
    """Two steps of copies of loss and miner on random embeddings (B, D) with the labels (B,) of a batch.

    Raises:
        ValueError: the loop cannot run them: they ask for more than embeddings and labels, or keep a graph.
    """
    loss_fn, miner = copy.deepcopy(loss_fn), copy.deepcopy(miner)
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            for _ in range(2):
                drawn = torch.randn(len(labels), embedding_size, generator=generator)
                embeddings = torch.nn.functional.normalize(drawn).to(device).requires_grad_()
                tuples = miner(embeddings, labels) if miner else None
                loss = loss_fn(embeddings, labels, tuples)
                if loss.dim() or not loss.requires_grad:
                    raise ValueError(f"expected one number with a gradient, got {tuple(loss.shape)}")
                loss.backward()
        except Exception as error:  # whatever a loss says of a call that it does not know
            said = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise ValueError(
                f"{what}: cannot be trained here, where a loss gets a batch's embeddings and labels and a miner's "
                f"tuples, step after step: {said}"
            ) from error


def _make(kind: Callable[..., nn.Module], option: str, arguments: dict[str, Any]) -> nn.Module:
    signatures = [inspect.signature(base.__init__) for base in kind.__mro__ if "__init__" in vars(base)]  # type: ignore[attr-defined]
    defaults = {name: one.default for signature in signatures[::-1] for name, one in signature.parameters.items()}
    for name, value in arguments.items():
        if isinstance(value, str) and isinstance(defaults.get(name), bool | int | float):
            raise ValueError(f"{option}: {name}: expected {type(defaults[name]).__name__}, got {value!r}")
    try:
        return kind(**arguments)
    except (TypeError, ValueError, AssertionError) as error:  # PML asserts
        raise ValueError(f"{option}: {error}") from error
