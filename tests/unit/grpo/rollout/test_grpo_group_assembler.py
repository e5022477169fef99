"""Groups are complete or not there, and are told apart by item and epoch."""

import pytest

from rlcanary.contract.batch import Completion, Group
from rlcanary.grpo.rollout.group_assembler import GroupAssembler, Trajectory

PROMPT = [5, 6]


def trajectory(
    item: str, *rewards: float, epoch: int = 0, lengths: tuple[int, ...] = (), version: int = 0
) -> Trajectory:
    tokens = list(range(sum(lengths) or 2))
    return Trajectory(item, PROMPT, Completion(tokens), rewards, lengths, epoch, policy_version=version)


def assembled(assembler: GroupAssembler, *trajectories: Trajectory) -> Group:
    *missing, last = [assembler.add(each) for each in trajectories]
    assert missing == [None] * len(missing)
    assert last is not None
    return last


def test_group_comes_with_its_last_trajectory() -> None:
    rewards = [1.0, 0.0, 0.0, 0.5]
    group = assembled(GroupAssembler(4), *(trajectory("a", reward) for reward in rewards))
    assert (group.item_id, list(group.rewards)) == ("a", rewards)


def test_items_with_the_same_prompt_do_not_share_a_group() -> None:
    # torchrl keys its queues by the prompt.
    assembler = GroupAssembler(2)
    for item in ("a", "b"):
        assert assembler.add(trajectory(item, 1.0)) is None
    group = assembler.add(trajectory("b", 0.0))
    assert group is not None
    assert (group.item_id, list(group.rewards)) == ("b", [1.0, 0.0])
    assert assembler.waiting() == {("a", 0): 1}


def test_epochs_of_an_item_do_not_share_a_group() -> None:
    assembler = GroupAssembler(2)
    assembler.add(trajectory("a", 1.0, epoch=0))
    assert assembler.add(trajectory("a", 0.0, epoch=1)) is None
    group = assembler.add(trajectory("a", 0.5, epoch=1))
    assert group is not None
    assert list(group.rewards) == [0.0, 0.5]
    assert assembler.waiting() == {("a", 0): 1}


def test_incomplete_groups_are_handed_over_when_they_are_given_up() -> None:
    assembler = GroupAssembler(3)
    kept = [trajectory("a", 1.0), trajectory("b", 0.0), trajectory("a", 0.5)]
    for each in kept:
        assembler.add(each)
    assert sorted(assembler.clear(), key=kept.index) == kept
    assert assembler.waiting() == {}
    assert assembler.add(trajectory("a", 1.0)) is None


def test_a_reward_is_the_sum_over_the_steps_of_a_trajectory() -> None:
    group = assembled(
        GroupAssembler(2), trajectory("a", 0.25, 0.75, lengths=(1, 2)), trajectory("a", 0.0, lengths=(2,))
    )
    assert list(group.rewards) == [1.0, 0.0]


def test_group_is_as_old_as_its_oldest_trajectory() -> None:
    group = assembled(GroupAssembler(2), trajectory("a", 1.0, version=3), trajectory("a", 0.0, version=2))
    assert group.policy_version == 2


def test_what_makes_no_group_is_refused() -> None:
    with pytest.raises(ValueError, match="group_size=0"):
        GroupAssembler(0)
    with pytest.raises(ValueError, match="without a step"):
        trajectory("a")
    with pytest.raises(ValueError, match=r"\[2\] .* 2 rewards to 2 tokens"):
        trajectory("a", 1.0, 0.0)
    assembler = GroupAssembler(2)
    assembler.add(trajectory("a", 1.0))
    with pytest.raises(ValueError, match="from two prompts"):
        assembler.add(Trajectory("a", [7], Completion([1]), [1.0]))
