"""Assemble trajectories that end one by one into groups, and compute their Monte-Carlo advantages.

A group is the set of samples of one item in one epoch. Two items with the same prompt are two groups, as two epochs
are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch

from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO
from rlcanary.reference.objective.advantages import advantages

Level = Literal["trajectory", "step"]


@dataclass(frozen=True)
class Trajectory:
    """One completion with the rewards of its steps.

    Attributes:
        item_id: the dataset item; groups are told apart by it and never by the prompt.
        prompt_ids: the prompt that the sampler saw.
        completion: all tokens after the prompt.
        step_rewards: one reward per step, at least one.
        step_lengths: tokens of each step, in order, which add up to the completion; () for a single step.
        epoch: the epoch in which the item was sampled.
        dataset: the dataset of the item.
        policy_version: the number of weight syncs that the sampler had seen.
    """

    item_id: Hashable
    prompt_ids: Sequence[int]
    completion: Completion
    step_rewards: Sequence[float]
    step_lengths: Sequence[int] = ()
    epoch: int = 0
    dataset: str = "unknown"
    policy_version: int = 0

    def __post_init__(self) -> None:
        if not self.step_rewards:
            raise ValueError(f"item {self.item_id!r}: a trajectory without a step has no reward")
        if self.item_id is None:
            raise ValueError("a trajectory without an item id belongs to no group")
        lengths = self.lengths
        if len(lengths) != len(self.step_rewards) or sum(lengths) != len(self.completion.token_ids) or min(lengths) < 0:
            raise ValueError(
                f"item {self.item_id!r}: step_lengths {list(lengths)} do not give {len(self.step_rewards)} rewards to "
                f"{len(self.completion.token_ids)} tokens"
            )

    @classmethod
    def of(cls, group: Group, epoch: int) -> Self:
        """Convert a group of one completion."""
        (completion,) = group.completions
        identity = group.item_id, group.prompt_ids, completion
        return cls(*identity, group.rewards, epoch=epoch, dataset=group.dataset, policy_version=group.policy_version)

    @property
    def lengths(self) -> Sequence[int]:
        """Number of tokens of each step."""
        return self.step_lengths or (len(self.completion.token_ids),)


@dataclass(frozen=True)
class AssembledGroup:
    """A complete group.

    Attributes:
        group: its rewards are the sums over each trajectory's steps.
        advantages: per completion, one advantage for each of its tokens.
        epoch: the epoch in which it was sampled.
    """

    group: Group
    advantages: list[list[float]]
    epoch: int


class GroupAssembler:
    """Keeps trajectories until their group is complete. One thread at a time."""

    def __init__(self, group_size: int, conventions: Conventions = GRPO, level: Level = "trajectory") -> None:
        """Start empty.

        Args:
            group_size: completions per item and epoch.
            conventions: the conventions of advantages.
            level: "trajectory" compares the sums over the steps of each trajectory, and all its tokens get one advantage;
                "step" compares all steps of the group with each other, and a step's tokens get the step's.

        Raises:
            ValueError: the size is below 1, or the level is neither of the two.
        """
        if group_size < 1 or level not in ("trajectory", "step"):
            raise ValueError(f"group_size={group_size} has to be at least 1, level={level!r} 'trajectory' or 'step'")
        self._size, self._conventions, self._level = group_size, conventions, level
        self._waiting: dict[tuple[Hashable, int], list[Trajectory]] = {}

    def add(self, trajectory: Trajectory) -> AssembledGroup | None:
        """Add a trajectory -> the group that it completes, rows in order of arrival; None while others are missing.

        Raises:
            ValueError: earlier trajectories of this item and epoch had another prompt; or as for
                `rlcanary.reference.objective.advantages`.
        """
        key = (trajectory.item_id, trajectory.epoch)
        members = self._waiting.setdefault(key, [])
        if members and list(members[0].prompt_ids) != list(trajectory.prompt_ids):
            raise ValueError(f"item {trajectory.item_id!r} of epoch {trajectory.epoch} was sampled from two prompts")
        members.append(trajectory)
        if len(members) < self._size:
            return None
        # Taken out before anything can fail, so that a group that cannot be compared does not come back with the next.
        del self._waiting[key]
        return self._assemble(members)

    def waiting(self) -> dict[tuple[Hashable, int], int]:
        """Count the waiting trajectories by item and epoch."""
        return {key: len(members) for key, members in self._waiting.items()}

    def clear(self) -> list[Trajectory]:
        """Give up all incomplete groups -> their trajectories, so that the caller can account for them."""
        left = [trajectory for members in self._waiting.values() for trajectory in members]
        self._waiting.clear()
        return left

    def _assemble(self, members: Sequence[Trajectory]) -> AssembledGroup:
        first = members[0]
        returns = [float(sum(member.step_rewards)) for member in members]
        compared = [reward for member in members for reward in member.step_rewards]
        values = torch.tensor(returns if self._level == "trajectory" else compared, dtype=torch.float64)
        per_value = iter(advantages(values, torch.zeros(len(values), dtype=torch.long), self._conventions).tolist())
        per_token = []
        for member in members:
            lengths = [len(member.completion.token_ids)] if self._level == "trajectory" else member.lengths
            per_token.append([value for length in lengths for value in [next(per_value)] * length])
        group = Group(
            first.prompt_ids,
            [member.completion for member in members],
            returns,
            item_id=first.item_id,
            policy_version=min(member.policy_version for member in members),
            dataset=first.dataset,
        )
        return AssembledGroup(group, per_token, first.epoch)
