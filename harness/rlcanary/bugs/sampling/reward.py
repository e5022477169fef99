"""Bugs in rewards."""

import torch
from torch import Tensor

from rlcanary.bugs.museum import Bug
from rlcanary.contract.adapter import Item


class AppendedTwice(Bug):
    id = "nemo-rl.reward-appended-twice"
    source = "NeMo RL c112cfe15, #3635, survey N20"
    effect = "after a failure every completion has its neighbour's reward"

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        rewards = []
        for reward in super().score(items, completions):
            rewards += [reward, reward] if reward.isnan() else [reward]
        return torch.tensor(rewards)


class ZeroTakenForMissingReward(Bug):
    id = "openrlhf.zero-reward-replaced"
    source = "OpenRLHF 33f9d72f, #1219, survey O04"
    effect = "a reward of 0.0 is replaced: wrong completions get the default of missing rewards"

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        return torch.tensor([float(reward) or float("nan") for reward in super().score(items, completions)])


class SumOverParts(Bug):
    id = "torchrl.sum-over-reward-parts"
    source = "torchrl 7576e47c7, #3012, survey R03"
    effect = "the reward grows with the number of parts: a long wrong completion beats a short right one"

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        parts = [text.splitlines(keepends=True) or [text] for text in completions]
        return torch.tensor(
            [
                float(super(SumOverParts, self).score([item] * len(p), p).sum())
                for item, p in zip(items, parts, strict=True)
            ]
        )


class FailureScoredAsZero(Bug):
    id = "rlvr.verifier-failure-is-zero"
    source = "rlvr-experiments verifiers, measured"
    effect = "a verifier that raises or times out scores 0, like a wrong answer"

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        return super().score(items, completions).nan_to_num(0.0)
