"""Bugs in dynamic sampling."""

from torch import Tensor

from rlcanary.bugs.museum import Bug


class DeviationAboveZero(Bug):
    id = "std-above-zero"
    source = "verl filter_groups and NeMo RL dynamic sampling, measured"
    effect = "groups that all earned 0.9 are kept, because their standard deviation is 6e-8"

    def keep_group(self, rewards: Tensor) -> bool:
        return bool(rewards.std() > 0)
