"""What a run must keep besides its weights to go on exactly: the memories of the box predictors, of every process."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from detectron2.engine import DefaultTrainer, HookBase
from detectron2.engine.hooks import BestCheckpointer, PeriodicCheckpointer
from detectron2.utils import comm
from torch import nn

from rambo_plugins.detectron2.predictor import RamboFastRCNNOutputLayers

logger = logging.getLogger("detectron2.rambo_plugins")


class RamboState(HookBase):
    """The memory and the steps of each RaMBO predictor of a model, in the checkpoints of a run; not in its weights.

    A hook of detectron2's trainers, in every process: ``trainer.register_hooks([RamboState(trainer.model)])``. Where a
    checkpoint is due, it brings the memories of all processes to the first one, which writes the checkpoint, with the
    rest of the trainer's state. A loop without a trainer: ``DetectionCheckpointer(model, folder,
    rambo=RamboState(model))``, which knows the memory of the first process alone.

    Each process gets its own memory back, or, with ``memory_gather``, the one that all have. Where there is none for
    it, with another number of processes, or from a checkpoint that was due to no hook, it begins with an empty memory,
    and the log says so. Loading weights alone leaves the memory as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._predictors = {
            name.removeprefix("module."): module
            for name, module in model.named_modules()
            if isinstance(module, RamboFastRCNNOutputLayers)
        }
        self._periods: set[int] = set()
        self._gathered: list[dict[str, Any]] = []

    def before_train(self) -> None:
        others = [hook for hook in self.trainer._hooks if hook is not self]
        self.trainer._hooks = [self, *others]  # before the hooks that write
        periods = {hook.period for hook in others if isinstance(hook, PeriodicCheckpointer)}
        periods |= {hook._period for hook in others if isinstance(hook, BestCheckpointer)}
        self._periods = {period for some in comm.all_gather(periods) for period in some if period > 0}

    def before_step(self) -> None:
        self._gathered = []

    def after_step(self) -> None:
        done = self.trainer.iter + 1
        if done >= self.trainer.max_iter or any(done % period == 0 for period in self._periods):
            self._gathered = comm.gather(self._own())

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint is to hold.

        Raises:
            FloatingPointError: a weight of the model is not finite; so that no such model is written.
        """
        for name, value in self._model.state_dict().items():
            if torch.is_tensor(value) and value.is_floating_point() and not value.isfinite().all():
                raise FloatingPointError(f"{name} is not finite: the model is not saved, the last checkpoint is good")
        if not self._predictors:
            return {}
        rank, size = comm.get_rank(), comm.get_world_size()
        alone = [self._own() if other == rank else None for other in range(size)]
        return {"processes": self._gathered or alone}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state.

        Raises:
            ValueError: it is that of other predictors, or of scores of another number of classes.
        """
        processes = state["processes"]
        rank, size = comm.get_rank(), comm.get_world_size()
        some = next(own for own in processes if own is not None)
        own = processes[rank] if len(processes) == size else None
        if some.keys() != self._predictors.keys():
            raise ValueError(
                f"the checkpoint is of RaMBO predictors {sorted(some)}, the model has {sorted(self._predictors)}"
            )
        for name, predictor in self._predictors.items():
            predictor.restore(some[name] if own is None else own[name], own is None)
        if own is None and any(not predictor.rank_loss.memory.gather for predictor in self._predictors.values()):
            known = sum(one is not None for one in processes)
            logger.warning(
                f"the checkpoint has the memories of {known} of {len(processes)} processes, and there are {size}: this "
                "one begins with an empty memory"
            )

    def _own(self) -> dict[str, Any]:
        return {name: predictor.run_state() for name, predictor in self._predictors.items()}


def with_memory(build_hooks: Callable[[DefaultTrainer], list[HookBase]]) -> Callable[[DefaultTrainer], list[HookBase]]:
    """The method ``build_hooks`` of a ``DefaultTrainer``, with a ``RamboState`` among its hooks."""

    @functools.wraps(build_hooks)
    def build(trainer: DefaultTrainer) -> list[HookBase]:
        hooks = build_hooks(trainer)
        known = any(isinstance(hook, RamboState) for hook in hooks)
        return hooks if known else [RamboState(trainer.model), *hooks]

    return build
