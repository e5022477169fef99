import torch

from tinygrpo.advantages import group_advantages

GROUPS = torch.tensor([0, 0, 0, 1, 1, 1])


def test_better_than_the_group_is_positive():
    advantages = group_advantages(torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0, 1.0]), GROUPS)
    assert (advantages > 0).tolist() == [True, False, False, False, False, True]


def test_same_reward_for_all_is_zero():
    assert group_advantages(torch.full((6,), 0.5), GROUPS).abs().max() < 1e-6
