"""Bugs in the state that a run starts from."""

from dataclasses import replace
from typing import Any

from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.building import RunSettings


class WarmupSubtractedTwice(Bug):
    id = "areal.warmup-subtracted-twice"
    source = "AReaL b4387877b, #1289"
    effect = "the schedule is shorter than the run by its warm-up: the rate arrives at its end so much too early"

    def build(self, settings: RunSettings, model: Any) -> Any:
        return super().build(replace(settings, total_updates=settings.total_updates - settings.warmup_updates), model)
