"""What a run with ``RamboLoss`` has besides its weights, kept in mmengine's checkpoints and restored by resuming.

Score memories and the steps of ``aux_steps`` are no part of a model's ``state_dict``: ``load_from`` brings none, and
published and averaged models have none. A checkpoint has them under a key of its own, those of every process.

mmdet's runs have the hook by themselves: in mmdet's registry ``RuntimeInfoHook``, a default hook of every runner, is
mmengine's with this one. Where another package's registry is the default scope, a config adds
``custom_hooks = [dict(type="mmdet.RamboStateHook")]``.
"""

from __future__ import annotations

from typing import Any

from mmdet.registry import HOOKS
from mmengine.dist import gather_object, get_rank, get_world_size
from mmengine.hooks import CheckpointHook, Hook, RuntimeInfoHook
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from torch import nn

from rambo_plugins.mmdet.heads import check_heads
from rambo_plugins.mmdet.losses import RamboLoss

KEY = "rambo_state"
"""In a checkpoint: {"processes": their number, "losses": {name in the model: the states of the processes}}."""

States = dict[str, list[dict[str, Any]]]


@HOOKS.register_module()
class RamboStateHook(Hook):
    """Saves and restores the ``run_state`` of each ``RamboLoss`` of the model; checks their heads before training.

    Restored is what was saved at the iteration where the run goes on, by as many processes; else a memory starts empty,
    which the log says. The processes' states are collected whenever a ``CheckpointHook`` may save; a checkpoint saved
    at other times by several processes has the state of the first one alone, and its memory is not restored.
    """

    def __init__(self) -> None:
        self._checked_calls = False
        self._loaded: dict[str, Any] | None = None
        self._collected: tuple[int, States] | None = None

    def before_train(self, runner: Runner) -> None:
        super().before_train(runner)
        check_heads(_model(runner))
        loaded, self._loaded = self._loaded, None
        if loaded is not None and runner.iter and loaded.get("meta", {}).get("iter") == runner.iter:  # it was resumed
            for name, loss in _losses(runner).items():
                lost = _restore(loss, name, loaded.get(KEY))
                if lost is not None:
                    runner.logger.warning(f"{name}: {lost}")
                elif loss.rank_loss.memory.batches:
                    runner.logger.info(f"{name}: the memory goes on with {len(loss.rank_loss.memory)} boxes")

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        super().after_load_checkpoint(runner, checkpoint)
        self._loaded = {key: checkpoint[key] for key in ("meta", KEY) if key in checkpoint}

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        super().before_save_checkpoint(runner, checkpoint)
        losses = _losses(runner)
        if losses:
            states: States = {name: [loss.run_state()] for name, loss in losses.items()}
            if self._collected is not None and self._collected[0] == runner.iter:
                states = self._collected[1]
            checkpoint[KEY] = {"processes": get_world_size(), "losses": states}

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        super().after_train_iter(runner, batch_idx, data_batch, outputs)
        if not self._checked_calls:
            self._checked_calls = True
            for name, loss in _losses(runner).items():
                loss.check_calls(name)
        for hook in runner.hooks:
            if isinstance(hook, CheckpointHook) and not hook.by_epoch:
                due = self.every_n_train_iters(runner, hook.interval, hook.save_begin)
                if due or (hook.save_last and self.is_last_train_iter(runner)):
                    self._collect(runner)

    def after_train_epoch(self, runner: Runner) -> None:
        super().after_train_epoch(runner)
        self._collect(runner)

    def before_val(self, runner: Runner) -> None:
        super().before_val(runner)
        self._collect(runner)

    def _collect(self, runner: Runner) -> None:
        """The states of all processes, to the first one, which saves."""
        losses = _losses(runner)
        if get_world_size() == 1 or not losses:
            return
        # A memory that gathers is the same in all processes.
        same = {name: loss.rank_loss.memory.gather for name, loss in losses.items()}
        own = {name: None if same[name] and get_rank() else loss.run_state() for name, loss in losses.items()}
        every = gather_object(own)
        if every is not None and not get_rank():
            states = {name: [each[name] for each in every if each[name] is not None] for name in own}
            self._collected = runner.iter, states


@HOOKS.register_module(name="RuntimeInfoHook")
class RamboRuntimeInfoHook(RamboStateHook, RuntimeInfoHook):
    """mmengine's ``RuntimeInfoHook``, in mmdet's registry, with ``RamboStateHook``."""

    priority = "VERY_HIGH"


def _model(runner: Runner) -> nn.Module:
    return runner.model.module if is_model_wrapper(runner.model) else runner.model


def _losses(runner: Runner) -> dict[str, RamboLoss]:
    return {name: module for name, module in _model(runner).named_modules() if isinstance(module, RamboLoss)}


def _restore(loss: RamboLoss, name: str, saved: dict[str, Any] | None) -> str | None:
    """Restore the loss as far as it can be; what could not be."""
    if saved is None or name not in saved["losses"]:
        loss.resume(None)
        return "memory and aux_steps start anew, since the checkpoint has no state of this loss"
    states, gather = saved["losses"][name], loss.rank_loss.memory.gather
    processes, running = saved["processes"], get_world_size()
    if gather and len(states) == 1:
        loss.resume(states[0])
    elif len(states) == processes == running:
        loss.resume(states[get_rank()])
    else:
        loss.resume({**states[0], "memory": None})  # the steps are the same in all processes
        return (
            f"the memory starts empty, since the checkpoint has those of {len(states)} of {processes} processes, "
            f"and this run has {running}, with memory_gather={gather}"
        )
    return None
