"""Bugs in the buffer between sampler and trainer."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import Group


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
