"""Losses and miners by the names that the command line gives."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

from pytorch_metric_learning import losses, miners
from torch import nn

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
    names = [one for one, found in vars(module).items() if inspect.isclass(found) and issubclass(found, base)]
    if name not in names:
        choices = [*others, *sorted(one for one in names if not one.startswith("Base"))]
        raise ValueError(f"{option} {name}: expected one of {', '.join(choices)}")
    return getattr(module, name)


def _required(loss_type: Any) -> set[str]:
    """Arguments without a default, also those that are only passed on to a base class."""
    signatures = [inspect.signature(base.__init__) for base in loss_type.__mro__ if "__init__" in vars(base)]
    return {
        name for one in signatures for name, value in one.parameters.items() if value.default is inspect.Parameter.empty
    }


def _make(kind: Callable[..., nn.Module], option: str, arguments: dict[str, Any]) -> nn.Module:
    try:
        return kind(**arguments)
    except (TypeError, ValueError, AssertionError) as error:  # PML asserts
        raise ValueError(f"{option}: {error}") from error
