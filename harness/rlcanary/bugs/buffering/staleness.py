"""Bugs in the limit of staleness."""

from dataclasses import replace
from typing import Any

from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import Group
from rlcanary.contract.records.buffering import BufferSettings


class StaleResultsTrained(Bug):
    id = "open-instruct.stale-results-trained"
    source = "open-instruct 78d1e5aa3, #1738"
    effect = "results that are older than the allowed number of steps are trained: the lag has no bound"

    def new_buffer(self, settings: BufferSettings) -> Any:
        return super().new_buffer(replace(settings, max_staleness=10**6))


class AcceptedCountStartsAgain(Bug):
    id = "areal.accepted-count-starts-again"
    source = "AReaL 6a84d4ed6, #1345"
    effect = (
        "behind a recovery the count of accepted groups is 0 while the version is high: a burst of groups is started"
    )

    def new_buffer(self, settings: BufferSettings) -> Any:
        buffer = super().new_buffer(settings)
        buffer.accepted = 0
        return buffer

    def put_groups(self, buffer: Any, groups: list[Group]) -> int:
        taken = super().put_groups(buffer, groups)
        buffer.accepted += taken
        return taken

    def groups_to_start(self, buffer: Any, trainer_version: int, running: int) -> int:
        updates = trainer_version + buffer.settings.max_staleness + 1
        most: int = updates * buffer.settings.groups_per_batch - buffer.accepted - running
        return max(0, most)
