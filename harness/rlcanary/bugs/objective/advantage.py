"""Bugs in advantages."""

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.bugs.museum import Bug


class PermutedScale(Bug):
    id = "trl.permuted-scale"
    source = "TRL 35702ce37, #3992, survey T17"
    effect = "the default, scaling by the group, does not scale; 'none' scales"

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        permuted = {"group": "none", "batch": "group", "none": "group"}
        swapped = self.conventions.replace(advantage_scale=permuted[self.conventions.advantage_scale])
        return reference.advantages(rewards, group_ids, swapped)


class LeaveOneOutDivision(Bug):
    id = "nemo-rl.leave-one-out-zero-spread"
    source = "NeMo RL 775fc3486, #1519, survey N12"
    effect = "one winner of four is divided by the zero spread of the others: an advantage of a million"

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        careless = self.conventions.replace(
            advantage_baseline="leave_one_out", advantage_scale="group", advantage_eps_mode="add"
        )
        return reference.advantages(rewards, group_ids, careless)


class BatchInsteadOfGroup(Bug):
    id = "rlvr.batch-instead-of-group"
    source = "rlvr-experiments 54c837e, survey H07"
    effect = "all advantages of easy prompts are positive, those of hard ones negative"

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return reference.advantages(rewards, torch.zeros_like(group_ids), self.conventions)


class ReshapedGroups(Bug):
    id = "advantage.groups-by-position"
    source = "the class of TRL 941fb332c, #4454: groups by position after the rows moved"
    effect = "rewards are compared across prompts unless the rows are sorted by group"

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return reference.advantages(rewards, group_ids.sort().values, self.conventions)


class RoundedConstantReward(Bug):
    id = "advantage.constant-reward-rounded"
    source = "measured in six codebases: float32 means of equal rewards"
    effect = "a group whose rewards all equal 0.9 gets advantages of up to 0.98 instead of 0"

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        result = torch.zeros_like(rewards)
        for group_id in group_ids.unique():
            rows = group_ids == group_id
            group = rewards[rows]
            if len(group) > 1:
                centred = group - group.sum() / len(group)
                result[rows] = centred / (group.std() + self.conventions.advantage_eps)
        return result


class GroupsOfFixedSize(Bug):
    id = "areal.groups-of-fixed-size"
    source = "AReaL bbc10f0e9, #1454"
    effect = (
        "groups are slices of one size: a failed rollout shifts all later rows into the statistics of another prompt"
    )

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        size = int(group_ids.unique(return_counts=True)[1].max())
        return reference.advantages(rewards, torch.arange(len(rewards)) // size, self.conventions)


class StatisticsOfOneRollout(Bug):
    id = "pipelinerl.statistics-of-one-rollout"
    source = "PipelineRL f90d0efcd"
    effect = "a group's mean is the reward of its first rollout and its deviation 0: advantages are in the thousands"

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        first_of_group = {int(group): float(rewards[group_ids == group][0]) for group in group_ids.unique()}
        means_B = torch.tensor([first_of_group[int(group)] for group in group_ids], dtype=rewards.dtype)
        return (rewards - means_B) / 1e-4


class SingleRewardErased(Bug):
    id = "areal.single-reward-erased"
    source = "AReaL d99124ec1, #1474, survey A08"
    effect = "groups of one are centred although they are to keep their reward: nothing is learned"

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return reference.advantages(rewards, group_ids, self.conventions.replace(singleton_group="zero"))


class NormalisedTwice(Bug):
    id = "gem.normalised-twice"
    source = "GEM, #113"
    effect = "advantages of groups are normalised again over the batch: their size depends on which groups share it"

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        advantages = super().advantages(rewards, group_ids)
        return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)
