"""The metrics of rollouts: rewards, lengths, ends and groups, on any number of ranks."""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, get_args

from torch import Generator

from rlcanary.checks.asserts import NothingToCompare, assert_metrics, assert_true, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check, other_values
from rlcanary.checks.worlds.rollouts import batch_of, drawn, group
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.conventions import Conventions, LoggedLength, LoggedStd, Unscored
from rlcanary.contract.records.reporting import RolloutBatch
from rlcanary.reference import reporting
from rlcanary.tiny_models import EOS_ID

# Others wrote the first token and a tool's reply; the second completion ends with another end-of-sequence id.
TOOLS = Completion([21, 22, 23, 24, EOS_ID], sampled=[False, True, False, False, True], text="tools")
OTHER_EOS = 3
LENGTHS: tuple[dict[str, Any], ...] = (
    {"logged_length": "all", "length_counts_eos": True},
    {"logged_length": "all", "length_counts_eos": False},
    {"logged_length": "sampled", "length_counts_eos": True},
    {"logged_length": "sampled", "length_counts_eos": False},
)
UNEVEN = (
    group([1.0, 0.0, 0.5], [2, 5, 3], ["stop", "length", "stop"], version=3),
    group([0.0, 0.25], [5, 1], ["stop", "abort"], dataset="code", version=1),
    group([1.0, 1.0, 1.0, 2.0], [1, 2, 3, 7], ["stop", "stop", "stop", "length"], version=4),
)


def _rollouts(conventions: Conventions) -> Iterator[Case]:
    yield Case("one group", batch=batch_of(group([1.0, 0.0], [2, 4], ["stop", "length"])))
    for truncated in range(5):
        reasons = ["length"] * truncated + ["stop"] * (4 - truncated)
        yield Case(f"{truncated} of 4 truncated", batch=batch_of(group([1.0, 0.0, 1.0, 0.0], [4] * 4, reasons)))
    alike = [[1.0, 1.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]]
    yield Case("groups without a signal", batch=batch_of(*map(group, alike)))
    yield Case("stale groups", batch=batch_of(group([1.0, 0.0], version=5), group([0.0, 1.0, 0.5]), trainer_version=6))
    yield Case("uneven groups of two datasets", batch=batch_of(*UNEVEN, trainer_version=5))
    completions = [
        TOOLS,
        Completion([21, OTHER_EOS], text="short"),
        Completion([22], finish_reason="length", text="cut"),
    ]
    tools = replace(
        batch_of(Group([11], completions, [1.0, 0.0, 0.0], dataset="math")), eos_token_ids=[EOS_ID, OTHER_EOS]
    )
    yield Case("tool tokens", batch=tools)
    for changes in LENGTHS:
        yield Case("tool tokens", changes, changes=changes, batch=tools)
    around = [conventions.pass_threshold + distance for distance in (-0.25, 0.25, -0.5, 0.5)]
    yield Case("around the threshold", batch=batch_of(group(around, [2, 3, 4, 5])))
    yield Case("negative rewards", batch=batch_of(group([-1.0, -0.5, -2.0]), group([-0.25, -3.0])))
    empty = Completion([], finish_reason="length", text="")
    for told, given in (("one of a group", [empty, *completions[1:]]), ("a whole group", [empty] * 3)):
        nothing = Group([12], given, [0.0, 1.0, 0.5], dataset="math")
        yield Case(f"completions of no token, {told}", batch=batch_of(nothing, group([1.0, 0.0])), may_be_refused=True)
    yield Case("70 groups", batch=batch_of(*(group([number / 8, 0.0], [1 + number, 2]) for number in range(70))))


def _other_definitions(conventions: Conventions) -> list[dict[str, Any]]:
    """List the declarations that differ in one field."""
    choices: dict[str, tuple[Any, ...]] = {
        "logged_std": get_args(LoggedStd),
        "logged_std_ddof": (0, 1),
        "logged_length": get_args(LoggedLength),
        "length_counts_eos": (True, False),
    }
    return other_values(conventions, choices)


def _drawn(rng: Generator, size: int) -> Case:
    return Case(batch=drawn(rng, size))


@check(
    "rollout_metrics.recomputed",
    severity="dashboard",
    needs=("rollout_metrics",),
    cases=_rollouts,
    alternatives=_other_definitions,
    draws=_drawn,
)
def recomputed(adapter: Adapter, batch: RolloutBatch, may_be_refused: bool = False) -> None:
    """The logged rewards, lengths, shares of ends and of groups, and staleness are those of these rollouts.

    Silent because a share of truncated completions that is off by a half decides on a length limit, and nobody counts
    again. Look for lengths that count padding or tool tokens, for completions of the greatest length that count as
    truncated though they stopped, for completions of no token that are not counted, for means of group means over groups
    of unequal size, and for a spread with another ddof than the declared one.
    """
    expected = reporting.rollout_metrics(batch, adapter.conventions)
    compute = partial(unless_raised, adapter.rollout_metrics) if may_be_refused else adapter.rollout_metrics
    if (logged := compute(batch, 1)) is not None:
        assert_metrics(logged, expected, "computed again from the rollouts")


def _on_ranks() -> Iterator[Case]:
    even = [group([1.0, 0.0], [2, 5], ["stop", "length"]), group([0.0, 0.5], [3, 7], ["stop", "stop"], version=2)]
    yield Case("2 groups, 2 ranks", batch=batch_of(*even, trainer_version=2), n_ranks=2)
    yield Case("3 uneven groups, 3 ranks", batch=batch_of(*UNEVEN, trainer_version=5), n_ranks=3)
    yield Case("5 uneven groups, 2 ranks", batch=batch_of(*UNEVEN, *even, trainer_version=5), n_ranks=2)


@check("rollout_metrics.ranks", severity="dashboard", needs=("rollout_metrics",), cases=_on_ranks)
def ranks(adapter: Adapter, batch: RolloutBatch, n_ranks: int) -> None:
    """On any number of ranks the logged metrics are those of all rollouts.

    Silent because every rank's number is plausible. Look for metrics of the first rank alone, sums over all ranks that
    are divided by the count of one, means of the ranks' means, maxima that are averaged, and rewards of all ranks that
    are zipped with the completions of one.
    """
    alone = adapter.rollout_metrics(batch, 1)
    assert_metrics(adapter.rollout_metrics(batch, n_ranks), alone, "on one rank")


def _some() -> Iterator[Case]:
    yield Case(batch=batch_of(*UNEVEN, trainer_version=5))


@check("rollout_metrics.order", severity="dashboard", needs=("rollout_metrics",), cases=_some, draws=_drawn)
def order(adapter: Adapter, batch: RolloutBatch) -> None:
    """The order of groups, and of the completions within one, changes no metric.

    Silent because rollouts arrive in another order in every run. Look for reshapes into groups of a fixed size, for lists
    that are sorted while others are not, and for metrics of the first or last group alone.
    """
    turned = [_turned(each) for each in reversed(batch.groups)]
    before = adapter.rollout_metrics(batch, 1)
    after = adapter.rollout_metrics(replace(batch, groups=turned), 1)
    assert_metrics(after, before, "before groups and completions were turned around")


def _turned(each: Group) -> Group:
    return replace(each, completions=list(each.completions)[::-1], rewards=list(each.rewards)[::-1])


@check("rollout_metrics.datasets_are_separate", severity="dashboard", needs=("rollout_metrics",), cases=_some)
def datasets_are_separate(adapter: Adapter, batch: RolloutBatch) -> None:
    """More rollouts of one dataset leave the reward of the others as it is.

    Silent because the reward of a dataset that has a neighbour's in it is still a reward. Look for labels and rewards that
    are filtered or shuffled apart, and for a mean over the whole batch under each name.
    """
    others = group([5.0, 3.0], [9, 8], ["length", "length"], dataset="chat")
    before = adapter.rollout_metrics(batch, 1)
    after = adapter.rollout_metrics(replace(batch, groups=[others, *batch.groups, others]), 1)
    separate = {name: value for name, value in before.items() if name.startswith("reward/")}
    assert_metrics(after, separate, "without the rollouts of another dataset")


def _nan_rewards(conventions: Conventions) -> Iterator[Case]:
    for name in dict.fromkeys((conventions.unscored, *get_args(Unscored))):
        for rewards in ([math.nan, 1.0, 0.5, 0.5], [1.0, 0.0, math.nan, math.nan]):
            label = f"{sum(map(math.isnan, rewards))} NaN", *[name] * (name != conventions.unscored)
            batch = batch_of(group(rewards, [2, 3, 4, 5]), group([2.0, 1.0, 1.0], dataset="code"))
            yield Case(*label, changes={"unscored": name}, batch=batch)


@check("rollout_metrics.unscored", severity="dashboard", needs=("rollout_metrics",), cases=_nan_rewards)
def unscored(adapter: Adapter, batch: RolloutBatch) -> None:
    """A completion without a reward (NaN) makes the logged rewards an error, is left out, or counts as 0, as declared.

    Silent because a verifier that times out then looks like a policy that got worse. Look for `nan_to_num`, `nansum` and
    `nanmean`, for `reward or 0.0`, and for a sum over some completions that is divided by the number of all.
    """
    if adapter.conventions.unscored == "error":
        metrics = unless_raised(adapter.rollout_metrics, batch, 1) or {}
        numbers = [float(metrics[name]) for name in ("reward", "reward/math") if name in metrics]
        told = f"a completion without a reward is declared as an error, and the mean rewards are {numbers}"
        assert_true(all(map(math.isnan, numbers)), told, quantity="metric reward", compared=len(numbers))
        return
    expected = reporting.rollout_metrics(batch, adapter.conventions)
    # Whether a group lacks a signal, or is right, is open where some of its rewards are missing.
    rewards = {name: value for name, value in expected.items() if name.startswith("reward")}
    is_zero = adapter.conventions.unscored == "zero"
    told = "with 0 for each missing reward" if is_zero else "over the completions with a reward"
    assert_metrics(adapter.rollout_metrics(batch, 1), rewards, told)


def _constant_and_nearly() -> Iterator[Case]:
    for size in (2, 3, 5, 7):
        for reward in (1.0, 0.0, 0.1, 0.7, 0.9):
            yield Case(f"{size} rewards of {reward}", rewards=[reward] * size, without=1.0)
            yield Case(
                f"{size} rewards, one not {reward}", rewards=[reward + 0.01, *[reward] * (size - 1)], without=0.0
            )


@check("rollout_metrics.constant_rewards", severity="dashboard", needs=("rollout_metrics",), cases=_constant_and_nearly)
def constant_rewards(adapter: Adapter, rewards: list[float], without: float) -> None:
    """A group counts as one without a signal exactly if all its rewards are equal, for any reward and group size.

    Silent because the standard deviation of equal numbers is not always zero: a batch that teaches nothing is then
    reported as one that teaches something. Look for `std == 0` and `std > 0` on float32 numbers, and for a tolerance
    that takes small differences for none.
    """
    metrics = adapter.rollout_metrics(batch_of(group(rewards)), 1)
    assert_metrics(metrics, {"no_signal": without}, f"for the rewards {rewards}")
    if "no_signal" not in metrics:
        raise NothingToCompare("logs no no_signal")
