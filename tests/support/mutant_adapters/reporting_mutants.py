"""Mistakes in the numbers and samples that people look at."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import Group
from rlcanary.contract.records.reporting import EvaluatedItem, LoggedSample, RolloutBatch


class GroupsOfTheFirstSize(ReferenceAdapter):
    """Rewards are cut into groups as large as the first one."""

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        rewards = [reward for group in batch.groups for reward in group.rewards]
        size = len(batch.groups[0].rewards)
        groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
        alike = fmean(min(each) == max(each) for each in groups)
        return super().rollout_metrics(batch, n_ranks) | {"no_signal": alike}


class OneMeanForAllDatasets(ReferenceAdapter):
    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        metrics = super().rollout_metrics(batch, n_ranks)
        return {name: metrics["reward"] if name.startswith("reward/") else value for name, value in metrics.items()}


class MissingRewardLoggedAsZero(ReferenceAdapter):
    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        return super().rollout_metrics(replace(batch, groups=[_filled(each) for each in batch.groups]), n_ranks)


class SpreadAboveZero(ReferenceAdapter):
    """A group has a signal if the standard deviation of its float32 rewards is not 0."""

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        constant = []
        for group in batch.groups:
            rewards = torch.tensor(group.rewards)
            mean = rewards.sum() / len(rewards)
            constant.append(float((rewards - mean).square().sum()) == 0.0)
        return super().rollout_metrics(batch, n_ranks) | {"no_signal": fmean(constant)}


class TruncatedAtTheGreatestLength(ReferenceAdapter):
    """A completion that stops at the length of the longest one counts as truncated."""

    def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
        lengths = [len(each.token_ids) for group in batch.groups for each in group.completions]
        at_limit = fmean(length == max(lengths) for length in lengths)
        return super().rollout_metrics(batch, n_ranks) | {"truncated": at_limit}


class MissingScoreIsWrong(ReferenceAdapter):
    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        return super().evaluation_metrics([_scored(item) for item in items], k, batch_size)


class BestOfAll(ReferenceAdapter):
    """The k of best@k is not passed on."""

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        best = super().evaluation_metrics(items, min(len(item.scores) for item in items), batch_size)
        told = {name: value for name, value in best.items() if name.endswith("best@k")}
        return super().evaluation_metrics(items, k, batch_size) | told


class BiasedPassAtK(ReferenceAdapter):
    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        shares = [fmean(score >= self.conventions.pass_threshold for score in item.scores) for item in items]
        biased = fmean(1 - (1 - share) ** k for share in shares)
        return super().evaluation_metrics(items, k, batch_size) | {"pass@k": biased}


class ItemsOfAllDatasetsById(ReferenceAdapter):
    """Samples are gathered under their item's id, which another dataset has too."""

    def evaluation_metrics(self, items: list[EvaluatedItem], k: int, batch_size: int) -> dict[str, float]:
        joined = [replace(item, scores=_of_id(item, items), answers=None) for item in items]
        return super().evaluation_metrics(joined, k, batch_size)


class RewardsSortedApart(ReferenceAdapter):
    def logged_samples(self, batch: RolloutBatch, n_samples: int) -> list[LoggedSample]:
        rows = super().logged_samples(batch, n_samples)
        best = sorted((row.reward for row in rows), reverse=True)
        return [replace(row, reward=reward) for row, reward in zip(rows, best, strict=True)]


def _filled(group: Group) -> Group:
    return replace(group, rewards=[0.0 if math.isnan(reward) else reward for reward in group.rewards])


def _scored(item: EvaluatedItem) -> EvaluatedItem:
    return replace(item, scores=[0.0 if math.isnan(score) else score for score in item.scores])


def _of_id(item: EvaluatedItem, items: Sequence[EvaluatedItem]) -> list[float]:
    return [score for each in items if each.item_id == item.item_id for score in each.scores]


REPORTING_MUTANTS = [
    GroupsOfTheFirstSize,
    OneMeanForAllDatasets,
    MissingRewardLoggedAsZero,
    SpreadAboveZero,
    TruncatedAtTheGreatestLength,
    MissingScoreIsWrong,
    BestOfAll,
    BiasedPassAtK,
    ItemsOfAllDatasetsById,
    RewardsSortedApart,
]
