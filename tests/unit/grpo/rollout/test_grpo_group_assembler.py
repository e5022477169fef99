"""Groups are complete or not there, and are told apart by item and epoch."""

import math

import pytest
import torch

from rlcanary.contract.batch import Completion
from rlcanary.contract.presets import DR_GRPO, GRPO
from rlcanary.grpo.rollout.group_assembler import AssembledGroup, GroupAssembler, Trajectory
from rlcanary.reference import advantages

PROMPT = [5, 6]


def trajectory(
    item: str, *rewards: float, epoch: int = 0, lengths: tuple[int, ...] = (), version: int = 0
) -> Trajectory:
    tokens = list(range(sum(lengths) or 2))
    return Trajectory(item, PROMPT, Completion(tokens), rewards, lengths, epoch, policy_version=version)


def assembled(assembler: GroupAssembler, *trajectories: Trajectory) -> AssembledGroup:
    *missing, last = [assembler.add(each) for each in trajectories]
    assert missing == [None] * len(missing)
    assert last is not None
    return last


def test_group_comes_with_its_last_trajectory_and_the_references_advantages() -> None:
    rewards = [1.0, 0.0, 0.0, 0.5]
    whole = assembled(GroupAssembler(4), *(trajectory("a", reward) for reward in rewards))
    expected = advantages(torch.tensor(rewards).double(), torch.zeros(4), GRPO).tolist()
    assert whole.advantages == [[value, value] for value in expected]
    assert list(whole.group.rewards) == rewards
    assert whole.group.item_id == "a"


def test_items_with_the_same_prompt_do_not_share_a_group() -> None:
    # torchrl keys its queues by the prompt.
    assembler = GroupAssembler(2)
    for item in ("a", "b"):
        assert assembler.add(trajectory(item, 1.0)) is None
    group = assembler.add(trajectory("b", 0.0))
    assert group is not None
    assert (group.group.item_id, list(group.group.rewards)) == ("b", [1.0, 0.0])
    assert assembler.waiting() == {("a", 0): 1}


def test_epochs_of_an_item_do_not_share_a_group() -> None:
    assembler = GroupAssembler(2)
    assembler.add(trajectory("a", 1.0, epoch=0))
    assert assembler.add(trajectory("a", 0.0, epoch=1)) is None
    group = assembler.add(trajectory("a", 0.5, epoch=1))
    assert group is not None
    assert (group.epoch, list(group.group.rewards)) == (1, [0.0, 0.5])


def test_incomplete_groups_are_handed_over_when_they_are_given_up() -> None:
    assembler = GroupAssembler(3)
    kept = [trajectory("a", 1.0), trajectory("b", 0.0), trajectory("a", 0.5)]
    for each in kept:
        assembler.add(each)
    assert sorted(assembler.clear(), key=kept.index) == kept
    assert assembler.waiting() == {}
    assert assembler.add(trajectory("a", 1.0)) is None


def test_constant_rewards_get_exactly_zero() -> None:
    whole = assembled(GroupAssembler(3), *(trajectory("a", 0.9) for _ in range(3)))
    assert whole.advantages == [[0.0, 0.0]] * 3


def test_trajectory_level_compares_sums_and_gives_all_tokens_the_same() -> None:
    group = assembled(
        GroupAssembler(2, DR_GRPO), trajectory("a", 0.25, 0.75, lengths=(1, 2)), trajectory("a", 0.0, lengths=(2,))
    )
    assert list(group.group.rewards) == [1.0, 0.0]
    assert group.advantages == [[0.5] * 3, [-0.5] * 2]


def test_step_level_compares_steps_and_gives_each_its_tokens() -> None:
    group = assembled(
        GroupAssembler(2, DR_GRPO, level="step"),
        trajectory("a", 0.0, 3.0, lengths=(1, 2)),
        trajectory("a", 1.0, 0.0, lengths=(2, 0)),
    )
    assert group.advantages == [[-1.0, 2.0, 2.0], [0.0, 0.0]]
    assert list(group.group.rewards) == [3.0, 1.0]


def test_group_is_as_old_as_its_oldest_trajectory() -> None:
    group = assembled(GroupAssembler(2), trajectory("a", 1.0, version=3), trajectory("a", 0.0, version=2))
    assert group.group.policy_version == 2


def test_unscored_trajectory_is_an_error_that_later_groups_do_not_inherit_or_is_left_out() -> None:
    assembler = GroupAssembler(2)
    assembler.add(trajectory("a", math.nan))
    with pytest.raises(ValueError, match="is NaN"):
        assembler.add(trajectory("a", 1.0))
    assert assembled(assembler, trajectory("a", 1.0), trajectory("a", 0.0)).advantages[0][0] > 0
    lenient = GroupAssembler(3, GRPO.replace(nan_reward="exclude"))
    group = assembled(lenient, trajectory("a", math.nan), trajectory("a", 1.0), trajectory("a", 0.0))
    assert group.advantages[0] == [0.0, 0.0]


def test_what_makes_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size=0"):
        GroupAssembler(0)
    with pytest.raises(ValueError, match="'token'"):
        GroupAssembler(2, level="token")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="without a step"):
        trajectory("a")
    with pytest.raises(ValueError, match=r"\[2\] .* 2 rewards to 2 tokens"):
        trajectory("a", 1.0, 0.0)
    assembler = GroupAssembler(2)
    assembler.add(trajectory("a", 1.0))
    with pytest.raises(ValueError, match="from two prompts"):
        assembler.add(Trajectory("a", [7], Completion([1]), [1.0]))
