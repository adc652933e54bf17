"""What a checkpoint must hold besides the weights for a run to go on exactly: the memories of the box predictors."""

from __future__ import annotations

from typing import Any

from torch import nn

from rambo_plugins.detectron2.predictor import RamboFastRCNNOutputLayers


class RamboState:
    """A checkpointable of ``DetectionCheckpointer``: the memory and the steps of each RaMBO predictor of a model.

    ``DetectionCheckpointer(model, folder, rambo=RamboState(model))``, or for a trainer
    ``trainer.checkpointer.add_checkpointable("rambo", RamboState(trainer.model))``. detectron2 saves in the first
    process alone, so after a resume all processes start with the memory of that one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._predictors = {
            name.removeprefix("module."): module
            for name, module in model.named_modules()
            if isinstance(module, RamboFastRCNNOutputLayers)
        }

    def state_dict(self) -> dict[str, Any]:
        return {
            name: {"num_steps": predictor.num_steps, "rank_loss": dict(predictor.rank_loss.state_dict())}
            for name, predictor in self._predictors.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over a state; a ValueError where it is that of other predictors."""
        if state.keys() != self._predictors.keys():
            raise ValueError(
                f"the checkpoint is of RaMBO predictors {sorted(state)}, the model has {sorted(self._predictors)}"
            )
        for name, predictor in self._predictors.items():
            predictor.num_steps = state[name]["num_steps"]
            predictor.rank_loss.load_state_dict(state[name]["rank_loss"])
