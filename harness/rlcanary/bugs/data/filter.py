"""Bugs in dynamic sampling."""

from torch import Tensor

from rlcanary.bugs.museum import Bug


class DeviationAboveZero(Bug):
    id = "nemo-rl.std-above-zero"
    source = "slime dd6888d5a, #1674, survey L37; NeMo RL dynamic sampling, std != 0, measured"
    effect = "groups whose rewards all equal 0.9 are kept: their standard deviation is 6e-8"

    def keep_group(self, rewards: Tensor) -> bool:
        return bool(rewards.std() > 0)
