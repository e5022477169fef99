"""Mistakes in saving and resuming a run that no shipped bug in the museum trips."""

import copy
from pathlib import Path
from typing import Any

import torch

from rlcanary.adapters.reference import ReferenceAdapter


class MomentsNotLoaded(ReferenceAdapter):
    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        resumed = super().load_checkpoint(state, folder)
        resumed.optimizer.state.clear()
        return resumed


class OptimizerOfTheOldModel(ReferenceAdapter):
    """The model is made anew after the optimizer was built, which goes on moving the old one."""

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        resumed = super().load_checkpoint(state, folder)
        resumed.model = copy.deepcopy(resumed.model)
        return resumed


class SavedInHalfPrecision(ReferenceAdapter):
    def save_checkpoint(self, state: Any, folder: Path) -> None:
        rounded = copy.deepcopy(state)
        with torch.no_grad():
            for parameter in rounded.model.parameters():
                parameter.copy_(parameter.bfloat16())
        super().save_checkpoint(rounded, folder)


class OptimizerEmptiedToSave(ReferenceAdapter):
    def save_checkpoint(self, state: Any, folder: Path) -> None:
        super().save_checkpoint(state, folder)
        state.optimizer.state.clear()


class FirstCheckpointStays(ReferenceAdapter):
    def save_checkpoint(self, state: Any, folder: Path) -> None:
        if not any(folder.iterdir()):
            super().save_checkpoint(state, folder)


class SortedAsText(ReferenceAdapter):
    """Each checkpoint has a folder of its own, and `step-10` comes before `step-9`."""

    def save_checkpoint(self, state: Any, folder: Path) -> None:
        step = folder / f"step-{state.scheduler.last_epoch}"
        step.mkdir(exist_ok=True)
        super().save_checkpoint(state, step)

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        return super().load_checkpoint(state, max(folder.iterdir()))


class ReferenceIsThePolicyAtTheStop(ReferenceAdapter):
    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        resumed = super().load_checkpoint(state, folder)
        if resumed.ref_model is not None:
            resumed.ref_model = copy.deepcopy(resumed.model).eval()
        return resumed


class MissingPartsKeepTheirStart(ReferenceAdapter):
    """The optimizer has a file of its own, which is loaded if it can be."""

    def save_checkpoint(self, state: Any, folder: Path) -> None:
        torch.save(state.model.state_dict(), folder / "model.pt")
        torch.save([state.optimizer.state_dict(), state.scheduler.state_dict()], folder / "optimizer.pt")

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        state.model.load_state_dict(torch.load(folder / "model.pt"))
        if (folder / "optimizer.pt").exists():
            optimizer, scheduler = torch.load(folder / "optimizer.pt")
            state.optimizer.load_state_dict(optimizer)
            state.scheduler.load_state_dict(scheduler)
        return state


class CountsPreparedItems(ReferenceAdapter):
    def resumed_order(self, n_items: int, consumed: int, count: int, rank: int, world_size: int) -> list[int]:
        return super().resumed_order(n_items, consumed + bool(consumed), count, rank, world_size)


CAUGHT_BY = {
    MomentsNotLoaded: "checkpoint.training_goes_on",
    OptimizerOfTheOldModel: "checkpoint.training_goes_on",
    SavedInHalfPrecision: "checkpoint.training_goes_on",
    OptimizerEmptiedToSave: "checkpoint.saving_changes_nothing",
    FirstCheckpointStays: "checkpoint.latest_is_loaded",
    SortedAsText: "checkpoint.latest_is_loaded",
    ReferenceIsThePolicyAtTheStop: "checkpoint.reference_model_stays",
    MissingPartsKeepTheirStart: "checkpoint.damage_is_reported",
    CountsPreparedItems: "order.resumed",
}
CHECKPOINT_MUTANTS = list(CAUGHT_BY)
