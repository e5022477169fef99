"""Bugs in the resumption of a run."""

import copy
from pathlib import Path
from typing import Any

import torch

from rlcanary.bugs.museum import Bug


class ScheduleNotResumed(Bug):
    id = "slime.schedule-not-resumed"
    source = "slime 68c21dd8b, #1152"
    effect = "after a resume the learning rate starts again, warm-up included"

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        schedule, rates = copy.deepcopy(state.scheduler.state_dict()), [g["lr"] for g in state.optimizer.param_groups]
        resumed = super().load_checkpoint(state, folder)
        resumed.scheduler.load_state_dict(schedule)
        for group, rate in zip(resumed.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        return resumed


class ScheduleAdvancedTwice(Bug):
    id = "slime.schedule-advanced-twice"
    source = "slime f9f7b566c, #1775"
    effect = "a schedule that the checkpoint restores is advanced again: the learning rate decays twice as fast"

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        resumed = super().load_checkpoint(state, folder)
        for _ in range(resumed.scheduler.last_epoch):
            resumed.scheduler.step()
        return resumed


class UnmatchedNamesSkipped(Bug):
    id = "skyrl.unmatched-names-skipped"
    source = "SkyRL 675851c09, #1224, survey S50"
    effect = "weights whose names the file spells otherwise are skipped: those of the experts stay random"

    def load_checkpoint(self, state: Any, folder: Path) -> Any:
        start = copy.deepcopy(dict(state.model.named_parameters()))
        resumed = super().load_checkpoint(state, folder)
        with torch.no_grad():
            for name, parameter in resumed.model.named_parameters():
                if "mlp." in name:
                    parameter.copy_(start[name])
        return resumed
