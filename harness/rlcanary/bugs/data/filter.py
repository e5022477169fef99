"""Bugs in dynamic sampling."""

from torch import Tensor

from rlcanary.bugs.museum import Bug


class DeviationAboveZero(Bug):
    id = "std-above-zero"
    source = "NeMo RL dynamic sampling, std != 0: float32 deviations of equal rewards, measured"
    effect = "groups that all earned 0.9 are kept, because their standard deviation is 6e-8"

    def keep_group(self, rewards: Tensor) -> bool:
        return bool(rewards.std() > 0)
