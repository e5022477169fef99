"""Advantages: relative to the right group, on the declared scale, and zero where there is nothing to learn."""

from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.check import check
from rlcanary.checks.literal import literal
from rlcanary.checks.subject import Call, Derived, Subject
from rlcanary.checks.worlds import inputs as cases
from rlcanary.contract.conventions import Baseline, Conventions, Scale


def _has_no_baseline(conventions: Conventions) -> str | None:
    return "rewards are not centred" if conventions.advantage_baseline == "none" else None


def _is_not_scaled(conventions: Conventions) -> str | None:
    return None if conventions.advantage_scale != "none" else "advantages are not scaled"


@check("advantage.declared_formula", needs=("advantages",))
def declared_formula(subject: Subject, rng: Generator) -> None:
    """Advantages equal the formula that the conventions declare: baseline, scale, ddof and epsilon.

    Silent because any centred numbers train: if the scale is missing, or taken over the batch or the wrong axis, easy
    and hard prompts get the wrong weight and the loss curve looks normal. Look at the branches on the scaling option,
    at the axis and the reshape into groups, and at ddof.
    """
    for rewards_B, group_ids_B in (*cases.reward_groups(rng), *_beyond_the_clip(subject.conventions)):
        with subject.case(rewards_B):
            call = subject.call("advantages", rewards_B, group_ids_B)
            expected_B = reference.advantages(rewards_B.double(), group_ids_B, subject.conventions)
            magnitude = float(rewards_B.abs().max())
            _weigh_others(call, rewards_B, group_ids_B, magnitude)
            call.expect(expected_B, f"advantages differ from {_formula(subject.conventions)}", scale=magnitude)


def _beyond_the_clip(conventions: Conventions) -> Iterator[tuple[Tensor, Tensor]]:
    """Rewards on both sides of either bound of a clip."""
    if conventions.reward_clip is not None:
        yield torch.tensor([0.9, 1.1, -0.9, -1.1, 3.0, 0.0]) * conventions.reward_clip, torch.zeros(6, dtype=torch.long)


def _within_the_clip(conventions: Conventions, largest: float) -> float:
    """Return the factor for rewards up to the largest that keeps them inside the clip of rewards."""
    return 1.0 if conventions.reward_clip is None else min(1.0, conventions.reward_clip / largest)


def _weigh_others(call: Call, rewards_B: Tensor, group_ids_B: Tensor, scale: float) -> None:
    """Find out which declarations that differ in one field give these advantages."""
    declared = call.subject.conventions
    choices = {
        "advantage_ddof": (0, 1),
        "advantage_scale": get_args(Scale),
        "advantage_baseline": get_args(Baseline),
    }
    others: list[dict[str, Any]] = [
        {name: value} for name, values in choices.items() for value in values if value != getattr(declared, name)
    ]
    exact_B = rewards_B.double()
    call.subject.weigh(others, lambda other: call.gives(reference.advantages(exact_B, group_ids_B, other), scale=scale))


def _formula(conventions: Conventions) -> str:
    centred = {"mean": "reward - mean of its group", "leave_one_out": "reward - mean of the others", "none": "reward"}
    formula = centred[conventions.advantage_baseline]
    if conventions.advantage_scale == "none":
        return formula
    scope = {"group": "its group", "batch": "the batch"}[conventions.advantage_scale]
    eps = {"add": "+", "clamp": "clamped at", "skip": "where above zero, +"}[conventions.advantage_eps_mode]
    return f"({formula}) / (std of {scope}, ddof {conventions.advantage_ddof}, {eps} {conventions.advantage_eps:g})"


@check("advantage.constant_reward_is_zero", needs=("advantages",), applies=_has_no_baseline)
def constant_reward_is_zero(subject: Subject, rng: Generator) -> None:
    """A group with equal rewards gets advantage zero, for any reward and group size.

    Silent because the mean of equal float32 numbers is not always that number, and the rounding error is then divided
    by an epsilon: groups without a signal push the policy in a random direction. Look at float32 means and at a tiny
    epsilon; subtract in float64, or set the advantage to zero when the rewards' range is zero.
    """
    for size in (2, 3, 5, 7, 8, 16):
        for reward in (0.9, 0.1, 1.0, 0.0, -0.3, 0.7, 0.95):
            rewards_B = torch.full((size,), reward)
            with subject.case(f"{size} rewards of {reward}"):
                call = subject.call("advantages", rewards_B, torch.zeros(size, dtype=torch.long))
                largest = float(call.value.abs().max())
                call.expect_true(
                    largest <= 1e-5,
                    f"{size} completions with reward {reward} each get an advantage of {largest:.2g} instead of 0",
                    "float(got.abs().max()) <= 1e-5",
                    magnitude=largest,
                )


@check("advantage.row_order", needs=("advantages",))
def row_order(subject: Subject, rng: Generator) -> None:
    """Shuffling the rows shuffles the advantages with them: groups are defined by their ids, not by position.

    Silent because a reshape to [groups, size] accepts any order, and asynchronous rollouts arrive in any order: rewards
    are then compared across prompts. Look for `view(-1, group_size)` on data that is not sorted by group.
    """
    rewards_B = cases.uniform(rng, 6, low=0, high=1)
    group_ids_B = torch.tensor([0, 0, 0, 1, 1, 1])
    order = torch.tensor([3, 0, 4, 1, 5, 2])
    before = subject.call("advantages", rewards_B, group_ids_B)
    call = subject.call("advantages", rewards_B[order], group_ids_B[order])
    call.expect(
        before.value[order],
        "advantages of shuffled rows are not the shuffled advantages",
        derived=Derived(before, f"{{}}[{literal(order)}]"),
    )


@check("advantage.groups_are_separate", needs=("advantages",))
def groups_are_separate(subject: Subject, rng: Generator) -> None:
    """Shifting the rewards of one prompt does not change the advantages of other prompts.

    Silent because statistics over the whole batch look like statistics: easy prompts end up positive throughout and hard
    ones negative. Look for a mean without the group axis. (Scaling by the batch's standard deviation, where it is
    declared, is taken into account.)
    """
    subject = subject.configured(advantage_scale="none") if subject.conventions.advantage_scale == "batch" else subject
    unit = _within_the_clip(subject.conventions, 8)
    rewards_B = cases.uniform(rng, 6, low=0, high=1) * unit
    group_ids_B = torch.tensor([0, 0, 0, 1, 1, 1])
    before = subject.call("advantages", rewards_B, group_ids_B)
    call = subject.call("advantages", rewards_B + 7.0 * unit * (group_ids_B == 1), group_ids_B)
    call.expect(
        before.value,
        f"adding {7 * unit:g} to the rewards of the second prompt changed the advantages of the first",
        where=group_ids_B == 0,
        scale=8,
        derived=Derived(before),
    )


@check("advantage.shift", needs=("advantages",), applies=_has_no_baseline)
def shift(subject: Subject, rng: Generator) -> None:
    """Adding a constant to all rewards changes no advantage.

    Silent because a reward with an offset (a format bonus, a length penalty) is common and only shifts the curve. Look
    for a baseline that is not subtracted, or is computed before the bonus was added.
    """
    unit = _within_the_clip(subject.conventions, 4)
    rewards_B, group_ids_B = cases.uniform(rng, 4, low=0, high=1) * unit, torch.tensor([0, 0, 1, 1])
    before = subject.call("advantages", rewards_B, group_ids_B)
    call = subject.call("advantages", rewards_B + 3.0 * unit, group_ids_B)
    told = f"adding {3 * unit:g} to every reward changed the advantages"
    call.expect(before.value, told, scale=4, derived=Derived(before))


@check("advantage.scale", needs=("advantages",))
def scale(subject: Subject, rng: Generator) -> None:
    """Rewards ten times as large give equal advantages with scaling, and ten times as large ones without.

    Silent because the factor hides in the learning rate. Look for the option that switches the scaling: which value of
    it divides by the standard deviation, and is it the one that the config documents? A clip of rewards is declared as
    `reward_clip`.
    """
    unit = _within_the_clip(subject.conventions, 100)
    rewards_B, group_ids_B = cases.uniform(rng, 8, low=0, high=10, decimals=1) * unit, torch.arange(8) // 4
    before = subject.call("advantages", rewards_B, group_ids_B)
    call = subject.call("advantages", rewards_B * 10, group_ids_B)
    if subject.conventions.advantage_scale == "none":
        call.expect(
            before.value * 10,
            "advantages declared as not scaled do not grow with the rewards",
            scale=100,
            derived=Derived(before, "{} * 10"),
        )
        return
    eps = subject.conventions.advantage_eps
    difference = float((call.value - before.value).abs().max())
    bound = 10 * eps / unit + 1e-3
    call.expect_true(
        difference <= bound,
        f"advantages declared as scaled by the {subject.conventions.advantage_scale}'s standard deviation change by "
        f"{difference:.3g} when all rewards are ten times as large",
        f"float((got - expected).abs().max()) <= {bound:.3g}",
        before,
        magnitude=difference,
    )


@check("advantage.bounded", needs=("advantages",), applies=_is_not_scaled)
def bounded(subject: Subject, rng: Generator) -> None:
    """No pattern of right and wrong completions gives an advantage above the group's size.

    Silent because one sample in a thousand then dominates its update and shows as a spike of the gradient norm. Look for
    a division by a standard deviation that can be zero while the numerator is not, as with leave-one-out statistics.
    """
    for size in (2, 3, 4):
        for pattern in range(1, 2**size - 1):
            rewards_B = torch.tensor([float(pattern >> bit & 1) for bit in range(size)])
            with subject.case(rewards_B.tolist()):
                call = subject.call("advantages", rewards_B, torch.zeros(size, dtype=torch.long))
                largest = float(call.value.abs().max())
                call.expect_true(
                    largest <= size,
                    f"rewards {rewards_B.tolist()} give an advantage of {largest:.4g}",
                    f"float(got.abs().max()) <= {size}",
                    magnitude=largest,
                )


@check("advantage.single_completion", needs=("advantages",))
def single_completion(subject: Subject, rng: Generator) -> None:
    """A prompt with a single completion gets the declared advantage, also in a batch with other prompts.

    Silent because the standard deviation of one number is NaN with ddof 1, and a NaN-aware sum drops the row or a clamp
    turns it into the raw reward, which teaches the policy that everything is good. Look at groups that filtering left
    with one member.
    """
    rewards_B, group_ids_B = torch.tensor([0.7, 1.0, 0.0]), torch.tensor([0, 1, 1])
    call = subject.call("advantages", rewards_B, group_ids_B)
    expected_B = reference.advantages(rewards_B.double(), group_ids_B, subject.conventions)
    told = f"a group of one does not get the declared advantage, {subject.conventions.singleton_group!r}"
    call.expect(expected_B, told, where=torch.tensor([True, False, False]))


@check("advantage.nan_reward", needs=("advantages",))
def nan_reward(subject: Subject, rng: Generator) -> None:
    """A NaN reward is handled as declared: it is an error, or its row is left out and gets advantage zero.

    Silent because a completion without a verdict gets one: NaN as 0 is a wrong answer, and a NaN-aware mean moves the
    others. Look for `nan_to_num`, `nanmean` and `nansum`, and for a NaN that is compared with a threshold.
    """
    nan = float("nan")
    group_ids_B = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    for rewards in (
        [1.0, nan, 0.0, 0.5, 1.0, 0.0, 0.0, 2.0],
        [1.0, 0.0, 0.0, 0.5, nan, nan, 1.0, nan],
        [1.0, 0.0, 0.0, 0.5, nan, nan, nan, nan],
    ):
        rewards_B = torch.tensor(rewards)
        with subject.case(f"{int(rewards_B.isnan().sum())} NaN"):
            if subject.conventions.nan_reward == "exclude":
                expected_B = reference.advantages(rewards_B.double(), group_ids_B, subject.conventions)
                call = subject.call("advantages", rewards_B, group_ids_B)
                call.expect(expected_B, "rows with a NaN reward are declared as left out, with advantage zero")
                continue
            loud = subject.call_unless_raised("advantages", rewards_B, group_ids_B)
            if loud is not None:
                told = "a NaN reward is declared as an error, and its row has an advantage"
                loud.expect(torch.full((8,), nan), told, where=rewards_B.isnan())


@check("advantage.inputs_untouched", needs=("advantages",))
def inputs_untouched(subject: Subject, rng: Generator) -> None:
    """Computing advantages does not modify the rewards.

    Silent because the rewards are logged afterwards: the dashboard then shows centred rewards around zero. Look for
    `-=` and `/=`.
    """
    call = subject.call("advantages", torch.tensor([1.0, 0.0, 0.5, 2.0]), torch.tensor([0, 0, 1, 1]))
    call.expect_inputs_untouched("advantages changed its input in place")
