"""Saving a state and loading it, so that a run goes on as if it had not stopped."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAME = "checkpoint.pt"


def save_checkpoint(state: Any, folder: Path) -> None:
    """Write all that later updates depend on: weights, the tensors that the optimizer moves, its moments, the schedule.

    The reference model does not change and is not saved.

    Args:
        state: a `TrainState` of the contract.
        folder: an existing folder. A checkpoint that is there already is replaced, whole or not at all.
    """
    content = {
        "model": state.model.state_dict(),
        # Float32 masters of a model in half precision are in no state dict.
        "moved": _moved(state),
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.scheduler.state_dict(),
    }
    unfinished = folder / f"{NAME}.unfinished"
    torch.save(content, unfinished)
    unfinished.replace(folder / NAME)


def load_checkpoint(state: Any, folder: Path) -> Any:
    """Load the checkpoint of a folder into a new state -> that state.

    Args:
        state: a state as a new run makes it, with the same model and settings.
        folder: the folder that `save_checkpoint` was given.

    Raises:
        FileNotFoundError: there is no checkpoint.
        RuntimeError: it is damaged, or of another model.
    """
    content = torch.load(folder / NAME, weights_only=True)
    state.model.load_state_dict(content["model"])
    with torch.no_grad():
        for tensor, saved in zip(_moved(state), content["moved"], strict=True):
            tensor.copy_(saved)
    state.optimizer.load_state_dict(content["optimizer"])
    state.scheduler.load_state_dict(content["scheduler"])
    return state


def _moved(state: Any) -> list[Tensor]:
    return [tensor.detach() for group in state.optimizer.param_groups for tensor in group["params"]]
