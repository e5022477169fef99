"""Advantages: relative to the right group, on the declared scale, and zero where there is nothing to learn."""

import copy
import math
from collections.abc import Iterator
from itertools import product
from typing import Any, get_args

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, assert_true, assert_unchanged, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check, other_values
from rlcanary.checks.worlds import groups, inputs
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Baseline, Conventions, NanReward, Scale, SingletonGroup


def _has_no_baseline(conventions: Conventions) -> str | None:
    return "rewards are not centred" if conventions.advantage_baseline == "none" else _has_own_baseline(conventions)


def _has_own_baseline(conventions: Conventions) -> str | None:
    return "the baseline is one's own" if conventions.is_own("advantage_baseline") else None


def _is_not_scaled(conventions: Conventions) -> str | None:
    return _has_own_baseline(conventions) if conventions.advantage_scale != "none" else "advantages are not scaled"


def _advantages(adapter: Adapter, rewards_B: Tensor, group_ids_B: Tensor) -> Tensor:
    """Compute advantages from copies of the rewards and group ids, no more exact than the rewards are."""
    advantages_B = torch.as_tensor(adapter.advantages(rewards_B.clone(), group_ids_B.clone())).detach()
    return advantages_B.to(rewards_B.dtype) if advantages_B.dtype == torch.float64 else advantages_B


def _within_the_clip(conventions: Conventions, largest: float) -> float:
    """Return the factor for rewards up to the largest that keeps them inside the clip of rewards."""
    return 1.0 if conventions.reward_clip is None else min(1.0, conventions.reward_clip / largest)


def _reward_groups(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    for rewards_B, group_ids_B in inputs.reward_groups(rng):
        yield Case(rewards_B, rewards_B=rewards_B, group_ids_B=group_ids_B)
    if conventions.reward_clip is not None:
        rewards_B = torch.tensor([0.9, 1.1, -0.9, -1.1, 3.0, 0.0]) * conventions.reward_clip
        yield Case(rewards_B, rewards_B=rewards_B, group_ids_B=torch.zeros(6, dtype=torch.long))


def _other_formulas(conventions: Conventions) -> list[dict[str, Any]]:
    """List the declarations that differ in one field."""
    choices = {"advantage_ddof": (0, 1), "advantage_scale": get_args(Scale), "advantage_baseline": get_args(Baseline)}
    return other_values(conventions, choices)


def _drawn(rng: Generator, size: int) -> Case:
    rewards_B, group_ids_B = groups.rewards(rng, size)
    return Case(rewards_B=rewards_B, group_ids_B=group_ids_B)


@check(
    "advantage.declared_formula",
    needs=("advantages",),
    cases=_reward_groups,
    alternatives=_other_formulas,
    draws=_drawn,
)
def declared_formula(adapter: Adapter, rewards_B: Tensor, group_ids_B: Tensor) -> None:
    """Advantages equal the formula that the conventions declare: baseline, scale, ddof and epsilon.

    Silent because any centred numbers train: if the scale is missing, or taken over the batch or the wrong axis, easy
    and hard prompts get the wrong weight and the loss curve looks normal. Look at the branches on the scaling option,
    at the axis and the reshape into groups, and at ddof.
    """
    expected_B = reference.advantages(rewards_B.double(), group_ids_B, adapter.conventions)
    told = f"advantages differ from {_formula(adapter.conventions)}"
    assert_close(_advantages(adapter, rewards_B, group_ids_B), expected_B, told, scale=float(rewards_B.abs().max()))


def _formula(conventions: Conventions) -> str:
    centred = {"mean": "reward - mean of its group", "leave_one_out": "reward - mean of the others", "none": "reward"}
    formula = centred.get(str(conventions.advantage_baseline), "reward - baseline of one's own")
    if conventions.advantage_scale == "none":
        return formula
    scope = {"group": "its group", "batch": "the batch"}[conventions.advantage_scale]
    eps = {"add": "+", "clamp": "clamped at", "skip": "where above zero, +"}[conventions.advantage_eps_mode]
    return f"({formula}) / (std of {scope}, ddof {conventions.advantage_ddof}, {eps} {conventions.advantage_eps:g})"


LEAVE_ONE_OUT: dict[str, Any] = {"advantage_baseline": "leave_one_out"}
NO_EPSILON: dict[str, Any] = {"advantage_eps": 0.0}


def _constant_rewards() -> Iterator[Case]:
    for size in (2, 3, 5, 7, 8, 16):
        for reward in (0.9, 0.1, 1.0, 0.0, -0.3, 0.7, 0.95):
            yield Case(f"{size} rewards of {reward}", size=size, reward=reward)
    for size, changes in product((3, 6, 7), (NO_EPSILON, NO_EPSILON | LEAVE_ONE_OUT)):
        for reward in (0.1, 0.7):
            label = f"{size} float64 rewards of {reward}"
            yield Case(label, changes, changes=changes, size=size, reward=reward, dtype=torch.float64)


@check("advantage.constant_reward_is_zero", needs=("advantages",), cases=_constant_rewards, applies=_has_no_baseline)
def constant_reward_is_zero(adapter: Adapter, size: int, reward: float, dtype: torch.dtype = torch.float32) -> None:
    """A group with equal rewards gets advantage zero, for any reward and group size.

    Silent because the mean of equal float32 numbers is not always that number, and the rounding error is then divided
    by an epsilon: groups without a signal push the policy in a random direction. Look at float32 means and at a tiny
    epsilon; subtract in float64, or set the advantage to zero when the rewards' range is zero.
    """
    advantages_B = _advantages(adapter, torch.full((size,), reward, dtype=dtype), torch.zeros(size, dtype=torch.long))
    largest = float(advantages_B.abs().max())
    told = f"{size} completions with reward {reward} each get an advantage of {largest:.2g} instead of 0"
    assert_true(largest <= 1e-5, told, quantity="value", magnitude=largest)


def _six_rewards(rng: Generator) -> Iterator[Case]:
    yield Case(rewards_B=inputs.uniform(rng, 6, low=0, high=1), group_ids_B=torch.tensor([0, 0, 0, 1, 1, 1]))


@check("advantage.row_order", needs=("advantages",), cases=_six_rewards, draws=_drawn)
def row_order(adapter: Adapter, rewards_B: Tensor, group_ids_B: Tensor) -> None:
    """Shuffling the rows shuffles the advantages with them: groups are defined by their ids, not by position.

    Silent because a reshape to [groups, size] accepts any order, and asynchronous rollouts arrive in any order: rewards
    are then compared across prompts. Look for `view(-1, group_size)` on data that is not sorted by group.
    """
    # Rows of the first half and of the second in turn.
    order = torch.arange(2 * ((len(rewards_B) + 1) // 2)).view(2, -1).flip(0).T.flatten()
    order = order[order < len(rewards_B)]
    before_B = _advantages(adapter, rewards_B, group_ids_B)
    advantages_B = _advantages(adapter, rewards_B[order], group_ids_B[order])
    assert_close(advantages_B, before_B[order], "advantages of shuffled rows are not the shuffled advantages")


def _six_rewards_unless_scaled_by_the_batch(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    changes = {"advantage_scale": "none"} if conventions.advantage_scale == "batch" else {}
    for case in _six_rewards(rng):
        yield Case(changes=changes, **case.inputs)


def _drawn_unless_scaled_by_the_batch(conventions: Conventions, rng: Generator, size: int) -> Case:
    changes = {"advantage_scale": "none"} if conventions.advantage_scale == "batch" else {}
    return Case(changes=changes, **_drawn(rng, size).inputs)


@check(
    "advantage.groups_are_separate",
    needs=("advantages",),
    cases=_six_rewards_unless_scaled_by_the_batch,
    draws=_drawn_unless_scaled_by_the_batch,
)
def groups_are_separate(adapter: Adapter, rewards_B: Tensor, group_ids_B: Tensor) -> None:
    """Shifting the rewards of one prompt does not change the advantages of other prompts.

    Silent because statistics over the whole batch look like statistics: easy prompts end up positive throughout and hard
    ones negative. Look for a mean without the group axis. (Scaling by the batch's standard deviation, where it is
    declared, is taken into account.)
    """
    unit, is_first_B = _within_the_clip(adapter.conventions, 8), group_ids_B == group_ids_B.min()
    before_B = _advantages(adapter, rewards_B * unit, group_ids_B)
    advantages_B = _advantages(adapter, (rewards_B + 7.0 * ~is_first_B) * unit, group_ids_B)
    told = f"adding {7 * unit:g} to the rewards of the other prompts changed the advantages of the first"
    assert_close(advantages_B, before_B, told, where=is_first_B, scale=8)


def _four_rewards(rng: Generator) -> Iterator[Case]:
    yield Case(rewards_B=inputs.uniform(rng, 4, low=0, high=1))


@check("advantage.shift", needs=("advantages",), cases=_four_rewards, applies=_has_no_baseline)
def shift(adapter: Adapter, rewards_B: Tensor) -> None:
    """Adding a constant to all rewards changes no advantage.

    Silent because a reward with an offset (a format bonus, a length penalty) is common and only shifts the curve. Look
    for a baseline that is not subtracted, or is computed before the bonus was added.
    """
    unit, group_ids_B = _within_the_clip(adapter.conventions, 4), torch.tensor([0, 0, 1, 1])
    before_B = _advantages(adapter, rewards_B * unit, group_ids_B)
    advantages_B = _advantages(adapter, (rewards_B + 3.0) * unit, group_ids_B)
    assert_close(advantages_B, before_B, f"adding {3 * unit:g} to every reward changed the advantages", scale=4)


def _eight_rewards(rng: Generator) -> Iterator[Case]:
    yield Case(rewards_B=inputs.uniform(rng, 8, low=0, high=10, decimals=1))


@check("advantage.scale", needs=("advantages",), cases=_eight_rewards, applies=_has_own_baseline)
def scale(adapter: Adapter, rewards_B: Tensor) -> None:
    """Rewards ten times as large give equal advantages with scaling, and ten times as large ones without.

    Silent because the factor hides in the learning rate. Look for the option that switches the scaling: which value of
    it divides by the standard deviation, and is it the one that the config documents? A clip of rewards is declared as
    `reward_clip`.
    """
    unit, group_ids_B = _within_the_clip(adapter.conventions, 100), torch.arange(8) // 4
    before_B = _advantages(adapter, rewards_B * unit, group_ids_B)
    advantages_B = _advantages(adapter, rewards_B * unit * 10, group_ids_B)
    scaled_by = adapter.conventions.advantage_scale
    if scaled_by == "none":
        told = "advantages declared as not scaled do not grow with the rewards"
        assert_close(advantages_B, before_B * 10, told, scale=100)
        return
    difference = float((advantages_B - before_B).abs().max())
    told = (
        f"advantages declared as scaled by the {scaled_by}'s standard deviation change by {difference:.3g} "
        "when all rewards are ten times as large"
    )
    bound = 10 * adapter.conventions.advantage_eps / unit + 1e-3
    assert_true(difference <= bound, told, quantity="value", magnitude=difference)


def _patterns() -> Iterator[Case]:
    for size in (2, 3, 4):
        for pattern in range(1, 2**size - 1):
            rewards = [float(pattern >> bit & 1) for bit in range(size)]
            yield Case(rewards, rewards=rewards)


@check("advantage.bounded", needs=("advantages",), cases=_patterns, applies=_is_not_scaled)
def bounded(adapter: Adapter, rewards: list[float]) -> None:
    """No pattern of right and wrong completions gives an advantage above the group's size.

    Silent because one sample in a thousand then dominates its update and shows as a spike of the gradient norm. Look for
    a division by a standard deviation that can be zero while the numerator is not, as with leave-one-out statistics.
    """
    advantages_B = _advantages(adapter, torch.tensor(rewards), torch.zeros(len(rewards), dtype=torch.long))
    largest = float(advantages_B.abs().max())
    told = f"rewards {rewards} give an advantage of {largest:.4g}"
    assert_true(largest <= len(rewards), told, quantity="value", magnitude=largest)


def _single_completions() -> Iterator[Case]:
    yield Case()
    for baseline, scale in product(get_args(Baseline), get_args(Scale)):
        formula = {"advantage_baseline": baseline, "advantage_scale": scale}
        for name in get_args(SingletonGroup):
            changes = {**formula, "singleton_group": name}
            yield Case(changes, changes=changes)


@check("advantage.single_completion", needs=("advantages",), cases=_single_completions)
def single_completion(adapter: Adapter) -> None:
    """A prompt with a single completion gets the declared advantage, also in a batch with other prompts.

    Silent because the standard deviation of one number is NaN with ddof 1, and a NaN-aware sum drops the row or a clamp
    turns it into the raw reward, which teaches the policy that everything is good. Look at groups that filtering left
    with one member.
    """
    rewards_B, group_ids_B = torch.tensor([0.7, 1.0, 0.0]), torch.tensor([0, 1, 1])
    expected_B = reference.advantages(rewards_B.double(), group_ids_B, adapter.conventions)
    told = f"a group of one does not get the declared advantage, {adapter.conventions.singleton_group!r}"
    where = torch.tensor([True, False, False])
    assert_close(_advantages(adapter, rewards_B, group_ids_B), expected_B, told, where=where)


def _nan_rewards(conventions: Conventions) -> Iterator[Case]:
    for name in dict.fromkeys((conventions.nan_reward, *get_args(NanReward))):
        for rewards in (
            [1.0, math.nan, 0.0, 0.5, 1.0, 0.0, 0.0, 2.0],
            [1.0, 0.0, 0.0, 0.5, math.nan, math.nan, 1.0, math.nan],
            [1.0, 0.0, 0.0, 0.5, math.nan, math.nan, math.nan, math.nan],
        ):
            label = f"{sum(map(math.isnan, rewards))} NaN", *[name] * (name != conventions.nan_reward)
            given = {"rewards_B": torch.tensor(rewards), "group_ids_B": torch.arange(8) // 4}
            yield Case(*label, changes={"nan_reward": name}, **given)
    changes = {"nan_reward": "exclude", "advantage_scale": "batch"}
    yield Case(changes, changes=changes, **given)


def _drawn_with_nan(rng: Generator, size: int) -> Case:
    rewards_B, group_ids_B = groups.rewards(rng, size)
    rewards_B[torch.rand(len(rewards_B), generator=rng) < 0.4] = math.nan
    return Case(rewards_B=rewards_B, group_ids_B=group_ids_B)


@check("advantage.nan_reward", needs=("advantages",), cases=_nan_rewards, draws=_drawn_with_nan)
def nan_reward(adapter: Adapter, rewards_B: Tensor, group_ids_B: Tensor) -> None:
    """A NaN reward is handled as declared: it is an error, or its row is left out and gets advantage zero.

    Silent because a completion without a verdict gets one: NaN as 0 is a wrong answer, and a NaN-aware mean moves the
    others. Look for `nan_to_num`, `nanmean` and `nansum`, and for a NaN that is compared with a threshold.
    """
    if adapter.conventions.nan_reward == "exclude":
        expected_B = reference.advantages(rewards_B.double(), group_ids_B, adapter.conventions)
        told = "rows with a NaN reward are declared as left out, with advantage zero"
        scale = float(rewards_B.nan_to_num().abs().max())
        assert_close(_advantages(adapter, rewards_B, group_ids_B), expected_B, told, scale=scale)
        return
    advantages_B = unless_raised(adapter.advantages, rewards_B.clone(), group_ids_B)
    if advantages_B is not None:
        told = "a NaN reward is declared as an error, and its row has an advantage"
        assert_close(advantages_B, torch.full_like(rewards_B, math.nan), told, where=rewards_B.isnan())


@check("advantage.inputs_untouched", severity="hardening", needs=("advantages",))
def inputs_untouched(adapter: Adapter) -> None:
    """Computing advantages does not modify the rewards.

    Silent because the rewards are logged afterwards: the dashboard then shows centred rewards around zero. Look for
    `-=` and `/=`.
    """
    given = torch.tensor([1.0, 0.0, 0.5, 2.0]), torch.tensor([0, 0, 1, 1])
    before = copy.deepcopy(given)
    adapter.advantages(*given)
    assert_unchanged(given, before, "advantages changed its input in place")
