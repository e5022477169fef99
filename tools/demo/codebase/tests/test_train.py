import math

from tinygrpo.config import GRPOConfig
from tinygrpo.train import train


def mean(history, name):
    return sum(step[name] for step in history) / len(history)


def test_reward_rises(train_seed, keep):
    history = train(GRPOConfig(steps=20, seed=train_seed))
    assert all(math.isfinite(value) for step in history for value in step.values())
    assert mean(history[-4:], "reward") > mean(history[:4], "reward")
    for name in ("reward", "advantage_abs_mean", "grad_norm"):
        keep(name, mean(history, name))
