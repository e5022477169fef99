"""Assemble trajectories that end one by one into groups.

A group is the set of samples of one item in one epoch. Two items with the same prompt are two groups, as two epochs
are.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Self

from rlcanary.contract.batch import Completion, Group


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


class GroupAssembler:
    """Keeps trajectories until their group is complete. One thread at a time."""

    def __init__(self, group_size: int) -> None:
        """Start empty.

        Args:
            group_size: completions per item and epoch.

        Raises:
            ValueError: the size is below 1.
        """
        if group_size < 1:
            raise ValueError(f"group_size={group_size} has to be at least 1")
        self._size = group_size
        self._waiting: dict[tuple[Hashable, int], list[Trajectory]] = {}

    def add(self, trajectory: Trajectory) -> Group | None:
        """Add a trajectory -> the group that it completes, rows in order of arrival; None while others are missing.

        A reward of the group is the sum over the steps of a trajectory.

        Raises:
            ValueError: earlier trajectories of this item and epoch had another prompt.
        """
        key = (trajectory.item_id, trajectory.epoch)
        members = self._waiting.setdefault(key, [])
        if members and list(members[0].prompt_ids) != list(trajectory.prompt_ids):
            raise ValueError(f"item {trajectory.item_id!r} of epoch {trajectory.epoch} was sampled from two prompts")
        members.append(trajectory)
        if len(members) < self._size:
            return None
        del self._waiting[key]
        first = members[0]
        return Group(
            first.prompt_ids,
            [member.completion for member in members],
            [float(sum(member.step_rewards)) for member in members],
            item_id=first.item_id,
            policy_version=min(member.policy_version for member in members),
            dataset=first.dataset,
        )

    def waiting(self) -> dict[tuple[Hashable, int], int]:
        """Count the waiting trajectories by item and epoch."""
        return {key: len(members) for key, members in self._waiting.items()}

    def clear(self) -> list[Trajectory]:
        """Give up all incomplete groups -> their trajectories, so that the caller can account for them."""
        left = [trajectory for members in self._waiting.values() for trajectory in members]
        self._waiting.clear()
        return left
