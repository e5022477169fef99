"""Dynamic sampling: a group is kept if its rewards differ, and only then."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rlcanary.checks.asserts import assert_true, assert_unchanged
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.contract.adapter import Adapter


def _constant() -> Iterator[Case]:
    for size in (2, 3, 5, 7, 8, 16, 63, 130):
        for reward in (0.9, 0.1, 1.0, 0.0, -0.3, 0.7, 0.95):
            yield Case(f"{size} rewards of {reward}", size=size, reward=reward)


@check("filter.constant_group_is_dropped", needs=("keep_group",), cases=_constant)
def constant_group_is_dropped(adapter: Adapter, size: int, reward: float) -> None:
    """A group with equal rewards is dropped, for any reward and group size.

    Silent because the standard deviation of seven times 0.9 is not zero in float32: under `std > 0` such groups stay,
    carry no signal, and take the place of groups that do. Look for a test of the standard deviation against zero; the
    range (max - min) of equal numbers is exactly zero.
    """
    is_kept = bool(adapter.keep_group(torch.full((size,), reward)))
    assert_true(not is_kept, f"a group of {size} completions that all earned {reward} is kept")


def _varied() -> Iterator[Case]:
    winners = [[float(index == winner) for index in range(4)] for winner in range(4)]
    graded = [[0.5, 0.75], [0.5, 0.501], [-1.0, 1.0], [0.0, 2.0], [-2.0, -1.0, -1.0], [2.0, 3.0], [1000.0, 1000.5]]
    for rewards in ([1.0, 0.0], *winners, [1.0] * 15 + [0.0], *graded):
        yield Case(rewards, rewards_G=torch.tensor(rewards))
    yield Case("130 rewards", rewards_G=torch.tensor([0.0] * 129 + [1.0]))


@check("filter.varied_group_is_kept", needs=("keep_group",), cases=_varied)
def varied_group_is_kept(adapter: Adapter, rewards_G: Tensor) -> None:
    """A group with unequal rewards is kept, for any sign, mean, size and order of them.

    Silent because dropped groups are replaced by others: a filter that requires a mean between 0 and 1 discards groups
    with penalties, bonuses or graded rewards. Look for a filter written for rewards of 0 and 1, and for a threshold
    that is large compared with the differences between rewards. A filter for rewards of 0 and 1 only should decline
    others with `NotProvided`.
    """
    told = f"a group with the rewards {rewards_G.tolist()} is dropped"
    assert_true(bool(adapter.keep_group(rewards_G)), told)


@check("filter.inputs_untouched", severity="hardening", needs=("keep_group",))
def inputs_untouched(adapter: Adapter) -> None:
    """Filtering does not modify the rewards.

    Silent because the rewards are logged and turned into advantages afterwards. Look for `-=`, `sub_` and `sort_`.
    """
    rewards_G = torch.tensor([1.0, 0.0, 0.0, 1.0])
    before_G = rewards_G.clone()
    adapter.keep_group(rewards_G)
    assert_unchanged(rewards_G, before_G, "keep_group changed the rewards in place")
