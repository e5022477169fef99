"""Bugs in the buffer between sampler and trainer."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import Group
from rlcanary.contract.records.buffering import Taken


class PreparedCountsAsTrained(Bug):
    id = "open-instruct.prepared-counts-as-trained"
    source = "open-instruct c5fada0f0, #1523"
    effect = (
        "a checkpoint counts the groups that were prepared and not those that were trained: a resumed run skips some"
    )

    def save_buffer(self, buffer: Any, folder: Path) -> None:
        saved = copy.copy(buffer)
        saved.waiting = []
        super().save_buffer(saved, folder)


class LogprobsNotFiltered(Bug):
    id = "trl.logprobs-not-filtered"
    source = "TRL 941fb332c, #4454, survey T23"
    effect = "completions and rewards of a group are put in another order, its logprobs are not: ratios of other tokens"

    def put_groups(self, buffer: Any, groups: list[Group]) -> int:
        def by_reward(group: Group) -> Group:
            best = sorted(range(len(group.rewards)), key=lambda row: group.rewards[row])
            completions = [
                replace(group.completions[row], logprobs=completion.logprobs)
                for row, completion in zip(best, group.completions, strict=True)
            ]
            return replace(group, completions=completions, rewards=[group.rewards[row] for row in best])

        return super().put_groups(buffer, [by_reward(group) for group in groups])


class ToolMarksForgotten(Bug):
    id = "trl.tool-marks-forgotten"
    source = "TRL, #6439"
    effect = "groups come back from the replay buffer without their tool mask: what tools wrote is trained"

    def take_groups(self, buffer: Any, trainer_version: int) -> Taken:
        taken = super().take_groups(buffer, trainer_version)
        unmarked = [
            replace(group, completions=[replace(completion, sampled=None) for completion in group.completions])
            for group in taken.groups
        ]
        return replace(taken, groups=unmarked)
