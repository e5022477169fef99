"""An RL step: several updates on one rollout batch, against advantages and old logprobs of its start."""

import copy
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from rlcanary import reference
from rlcanary.checks.areas.objective.split import NAMES
from rlcanary.checks.asserts import NothingToCompare, assert_equal, assert_true, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.training.descent import assert_gradients, scene, some, terms, watched
from rlcanary.checks.worlds.training.rl_steps import (
    PAD,
    STILL,
    Frozen,
    RlStep,
    passes,
    plan,
    rollout_groups,
    with_logprobs,
)
from rlcanary.checks.worlds.training.states import is_coarse, scheduled_rates
from rlcanary.checks.worlds.training.tiny_trainer import others
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.conventions import Conventions, LoggedUpdates

NEEDS = ("rl_step",)
LEARNING_RATE = 1e-3
# Trainers log the mean of their updates' extremes, or the extreme of all updates.
EXTREMES = {"ratio_min", "ratio_max"}
# A group that no split by prompts can keep together.
ONE_PROMPT = [
    Group(
        [5, 6],
        [Completion([8, 9, 2]), Completion([10]), Completion([11, 12]), Completion([13, 14, 15])],
        [1.0, 0.0, 0.25, 0.5],
    )
]
# Completions that no number of updates divides.
FIVE = [
    Group([5, 6], [Completion([8, 9, 2]), Completion([10]), Completion([11, 12])], [1.0, 0.0, 0.25]),
    Group([16, 17, 18], [Completion([19, 20, 21, 2]), Completion([22, 23])], [0.75, 0.25]),
]

ONCE = {"epochs_per_rollout": 1, "mini_batches": 1}
TWICE = {"epochs_per_rollout": 2, "mini_batches": 2}
HALVES = {"epochs_per_rollout": 1, "mini_batches": 2}


def _tool_groups() -> list[Group]:
    """Make two groups of two completions, three of which hold tokens of a tool; the policy sampled some of each."""
    return [
        Group(
            [5, 6, 7],
            [
                Completion([8, 9, 30, 31, 10, 2], sampled=[True, True, False, False, True, True]),
                Completion([11, 12], sampled=[False, True]),
            ],
            [1.0, 0.0],
            item_id="a",
        ),
        Group(
            [12, 13],
            [Completion([14, 15, 2]), Completion([16, 32, 33], sampled=[True, False, False])],
            [0.0, 0.5],
            item_id="b",
        ),
    ]


def _plans(conventions: Conventions) -> Iterator[Case]:
    yield Case("as declared")
    if (conventions.epochs_per_rollout, conventions.mini_batches) != (2, 2):
        yield Case("2 epochs of 2", changes=TWICE)


def _rollouts(conventions: Conventions) -> Iterator[Case]:
    yield from (Case(case.label, changes=case.changes, groups=rollout_groups()) for case in _plans(conventions))
    yield Case("one prompt in two updates", changes=HALVES, groups=ONE_PROMPT)
    yield Case("five completions in two updates", changes=HALVES, groups=FIVE)
    yield Case("tool tokens", changes=TWICE, groups=_tool_groups())


@check("rl_step.each_row_once_per_epoch", needs=NEEDS, cases=_rollouts)
def each_row_once_per_epoch(adapter: Adapter, model: Any, groups: list[Group]) -> None:
    """In each pass over a rollout batch every completion is trained once.

    Silent because a completion that is trained twice, or never, is one of hundreds. Look for a last mini-batch that is not
    full and dropped, for slices that overlap, for indices that are drawn with replacement, and for an iterator that is used
    up after the first epoch.
    """
    step = RlStep(adapter, model, STILL)
    frozen = step.take(adapter, with_logprobs(model, adapter.conventions, groups))
    trained = [frozen.rows_in(update) for update in step.updates]
    if not all(trained):
        raise NothingToCompare("the gradient of an update does not tell which completions it trained")
    for epoch, of_epoch in enumerate(passes(trained, adapter.conventions), 1):
        counts = Counter(row for rows in of_epoch for row in rows or ())
        times = [counts[row] for row in range(len(frozen.batch.rewards))]
        told = f"times that each completion is trained in epoch {epoch} of {plan(adapter.conventions)}"
        assert_equal(times, [1] * len(times), told, quantity="times trained")


def _objectives(conventions: Conventions) -> Iterator[Case]:
    yield from (
        Case(case.label, changes=case.changes, groups=rollout_groups(), drift=0.0) for case in _plans(conventions)
    )
    yield Case("an older sampler", changes=TWICE, groups=rollout_groups(), drift=0.3)
    yield Case("with KL", changes={**TWICE, "kl_coef": conventions.kl_coef or 0.3}, groups=rollout_groups(), drift=0.0)
    yield Case("one prompt in two updates", changes=HALVES, groups=ONE_PROMPT, drift=0.0)
    yield Case("five completions in two updates", changes=HALVES, groups=FIVE, drift=0.0)
    yield Case("tool tokens", changes=TWICE, groups=_tool_groups(), drift=0.0)
    # Divisors of tokens and of rows are counted at different places.
    for name in dict.fromkeys((conventions.aggregation, "token_mean")):
        changes = {**ONCE, "mask_truncated": True, "aggregation": name}
        yield Case(
            "a truncated completion that is masked", name, changes=changes, groups=_truncated_groups(), drift=0.0
        )


def _truncated_groups() -> list[Group]:
    """Make two groups, the first of which has a truncated completion; every other completion has an end."""
    return [
        Group([5, 6, 7], [Completion([8, 9, 10, 11], finish_reason="length"), Completion([12, 2])], [1.0, 0.0]),
        Group([12, 13], [Completion([14, 15, 2]), Completion([16, 17, 18, 2])], [0.0, 0.5]),
    ]


@check("rl_step.declared_gradients", needs=NEEDS, cases=_objectives, worlds=("capped_logits",))
def declared_gradients(adapter: Adapter, model: Any, groups: list[Group], drift: float) -> None:
    """Each update has the declared gradient of its completions, with the old logprobs and advantages of the whole rollout.

    Silent because the first update is right. Old logprobs that are computed again for each update make every ratio 1 and
    nothing is ever clipped; advantages over the rows of a mini-batch have another baseline; a divisor of the whole batch,
    or one that is counted before completions are masked, makes each update too small. Look at what is computed inside the
    loop over mini-batches that belongs before it.
    """
    model = scene(adapter, model, groups, is_clipped=False).policy
    step = RlStep(adapter, model, LEARNING_RATE)
    frozen = step.take(adapter, with_logprobs(model, adapter.conventions, groups, drift))
    if adapter.conventions.kl_coef and is_coarse(step.state.model):
        raise NothingToCompare("in half precision the KL of policies so near each other is mostly rounding")
    trained = _trained(adapter, model, groups, frozen, step)
    for number, (update, rows) in enumerate(zip(step.updates, trained, strict=True), 1):
        told = f"the gradient of update {number} is no sum of the declared gradients of completions"
        assert_true(rows is not None, told, quantity="completions trained", magnitude=1.0)
        if not rows:
            raise NothingToCompare("a completion has no gradient, which hides whether it was trained")
        expected = frozen.clipped(frozen.gradients(update.model, rows))
        told = (
            f"update {number} of {plan(adapter.conventions)}, on {len(rows)} of {len(frozen.batch.rewards)} completions, "
            f"has another gradient than declared ({terms(adapter.conventions)})"
        )
        with soft():
            assert_gradients(update.gradients, expected, update.model, told)


def _trained(adapter: Adapter, model: Any, groups: list[Group], frozen: Frozen, step: RlStep) -> list[list[int] | None]:
    """Find the rows of each update, as `Frozen.rows_in` does; a single update has them all."""
    if len(step.updates) == 1:
        return [list(range(len(frozen.batch.rewards)))]
    trained = [frozen.rows_in(update) for update in step.updates]
    if all(trained):
        return trained
    # Where a row is clipped as a whole, or a gradient is wrong, an equal step that moves nothing tells the rows.
    still = RlStep(adapter, model, STILL)
    equal = still.take(adapter, with_logprobs(model, adapter.conventions, groups))
    return [rows or equal.rows_in(update) for rows, update in zip(trained, still.updates, strict=True)]


def _logged(conventions: Conventions) -> Iterator[Case]:
    for reduced in ("mean", "last"):
        changes = {**TWICE, "logged_updates": reduced}
        yield Case("2 epochs of 2", reduced, changes=changes, groups=rollout_groups(), drift=0.0)
    yield Case("an older sampler", changes=TWICE, groups=rollout_groups(), drift=0.3)
    yield Case("with KL", changes={**TWICE, "kl_coef": conventions.kl_coef or 0.3}, groups=rollout_groups(), drift=0.0)
    yield Case("tool tokens", changes=TWICE, groups=_tool_groups(), drift=0.0)


@check("rl_step.metrics", needs=NEEDS, severity="dashboard", cases=_logged)
def metrics(adapter: Adapter, model: Any, groups: list[Group], drift: float) -> None:
    """The logged loss, KL, entropy, ratio, clip fraction and gradient norm are those of all updates, or of the last one.

    Silent because the first update of a rollout is on policy: its KL and clip fraction are 0, its ratio is 1, and a curve
    of such numbers tells of a healthy run. Look for metrics that each update overwrites, for sums that nobody divides, and
    for metrics of the first mini-batch or of the last epoch alone.
    """
    model = scene(adapter, model, groups, is_clipped=False).policy
    step = RlStep(adapter, model, LEARNING_RATE)
    frozen = step.take(adapter, with_logprobs(model, adapter.conventions, groups, drift))
    if is_coarse(step.state.model):
        raise NothingToCompare("in half precision the policies of a step are too near each other")
    trained = _trained(adapter, model, groups, frozen, step)
    if not all(trained):
        raise NothingToCompare("the gradient of an update does not tell which completions it trained")
    of_updates = [frozen.metrics(update.model, rows or []) for update, rows in zip(step.updates, trained, strict=True)]
    tokens = [int(frozen.batch.completion_mask[rows or []].sum()) for rows in trained]
    values = {name: [each[name] for each in of_updates] for name in set(of_updates[0]) & set(step.metrics) - EXTREMES}
    # A mean over the tokens of all updates is as good as one over the updates.
    means = {
        name: (fmean(each), sum(value * count for value, count in zip(each, tokens, strict=True)) / sum(tokens))
        for name, each in values.items()
    }
    wanted: dict[LoggedUpdates, Mapping[str, tuple[float, ...]]] = {
        "mean": means,
        "last": {name: (each[-1],) for name, each in values.items()},
    }
    declared = adapter.conventions.logged_updates
    reduced = max(
        wanted if declared is None else [declared],
        key=lambda each: sum(_is_one(step.metrics[name], right) for name, right in wanted[each].items()),
    )
    for name, right in sorted(wanted[reduced].items()):
        got, of = step.metrics[name], ", ".join(f"{value:.6g}" for value in values[name])
        what = "the mean over the updates" if reduced == "mean" else "that of the last update"
        told = f"the metric {name} of a step is {got:.6g}, {what} is {right[0]:.6g} (in order: {of})"
        with soft():
            off = min(abs(got - value) for value in right)
            assert_true(_is_one(got, right), told, quantity=f"metric {name}", magnitude=off)


def _is_one(got: float, wanted: Sequence[float]) -> bool:
    return any(math.isclose(got, value, rel_tol=1e-3, abs_tol=1e-4) for value in wanted)


@check("rl_step.rollouts_are_separate", needs=NEEDS, cases=_plans)
def rollouts_are_separate(adapter: Adapter, model: Any) -> None:
    """The updates on a second rollout batch are those of its own completions, rewards and old logprobs.

    Silent because what was kept of the last rollout fits in shape. Look for logprobs, advantages and index lists that are
    stored by position or by item, and for gradients that were left behind by the last update.
    """
    step = RlStep(adapter, model, STILL)
    step.take(adapter, with_logprobs(model, adapter.conventions, rollout_groups()))
    frozen = step.take(adapter, with_logprobs(model, adapter.conventions, others(rollout_groups())))
    for number, update in enumerate(step.updates, 1):
        rows = frozen.rows_in(update)
        told = f"the gradient of update {number} on a second rollout is no sum of the gradients of its completions"
        assert_true(rows is not None, told, quantity="completions trained", magnitude=1.0)
        if not rows:
            raise NothingToCompare("a completion has no gradient, which hides whether it was trained")
        with soft():
            expected = frozen.clipped(frozen.gradients(update.model, rows))
            told = f"update {number} on a second rollout has another gradient than declared"
            assert_gradients(update.gradients, expected, update.model, told)


def _once() -> Iterator[Case]:
    yield Case("one update", changes=ONCE)


@check("rl_step.metrics_are_separate", needs=NEEDS, severity="dashboard", cases=_once)
def metrics_are_separate(adapter: Adapter, model: Any) -> None:
    """The metrics logged for a second rollout batch are those of its own completions.

    Silent because a mean over all rollouts so far moves as the metric does, only less and later. Look for lists of values
    that are averaged for the log and never emptied, or emptied by evaluations alone.
    """
    first = with_logprobs(model, adapter.conventions, rollout_groups())
    given = [replace(each, rewards=[2 * reward + 1 for reward in each.rewards]) for each in others(rollout_groups())]
    second = with_logprobs(model, adapter.conventions, given)
    alone, step = RlStep(adapter, model, STILL), RlStep(adapter, model, STILL)
    alone.take(adapter, second)
    for groups in (first, second):
        step.take(adapter, groups)
    for name in sorted({*NAMES, "grad_norm", "loss", "reward"} & alone.metrics.keys()):
        got, expected = (each.metrics.get(name, math.nan) for each in (step, alone))
        told = f"the metric {name} of a second rollout is {got:.6g}, without the first one before it {expected:.6g}"
        with soft():
            is_same = math.isclose(got, expected, rel_tol=1e-3, abs_tol=1e-4) or math.isnan(expected)
            assert_true(is_same, told, quantity=f"metric {name}", magnitude=abs(got - expected))


def _schedules(conventions: Conventions) -> Iterator[Case]:
    declared = conventions.schedule_advances
    for case in _plans(conventions):
        yield Case(case.label, f"schedule by {declared}", changes=case.changes)
    (other,) = {"update", "rollout"} - {declared}
    yield Case("2 epochs of 2", f"schedule by {other}", changes={**TWICE, "schedule_advances": other})


@check("rl_step.learning_rates", needs=NEEDS, cases=_schedules)
def learning_rates(adapter: Adapter, model: Any) -> None:
    """The learning-rate schedule advances as declared: with each update, or once with each rollout.

    Silent because a schedule that runs too fast or too slow is a schedule: the warm-up is over early, or the decay never
    comes. Look at which loop steps the scheduler, and at the number of steps that it was built for.
    """
    step = RlStep(adapter, model, LEARNING_RATE, decays=True)
    by_update = adapter.conventions.schedule_advances == "update"
    expected = [rates[0] for rates in scheduled_rates(step.state, 8)]
    for number in (0, 1):
        step.take(adapter, with_logprobs(model, adapter.conventions, rollout_groups()))
        of_step = [update.learning_rates[0] for update in step.updates]
        count = len(of_step)
        planned = expected[number * count : (number + 1) * count] if by_update else [expected[number]] * count
        told = f"learning rates of rollout {number + 1} of {plan(adapter.conventions)}"
        with soft():
            assert_equal(
                [f"{rate:.4g}" for rate in of_step], [f"{rate:.4g}" for rate in planned], told, quantity="learning rate"
            )


@check("rl_step.weights_move", needs=NEEDS, cases=_plans)
def weights_move(adapter: Adapter, model: Any) -> None:
    """After an RL step the weights are where its optimizer takes them: every update starts from the one before.

    Silent because the loss of the first update is right. Look for weights that are restored, averaged or rounded between
    updates, and for an optimizer of a model that was replaced.
    """
    step = RlStep(adapter, model, LEARNING_RATE)
    step.take(adapter, with_logprobs(model, adapter.conventions, rollout_groups()))
    wrong = step.astray()
    told = f"{len(wrong)} parameters are not where the updates of {plan(adapter.conventions)} take them: {some(wrong)}"
    assert_true(not wrong, told, quantity="weights", magnitude=len(wrong))


def _one_update() -> Iterator[Case]:
    yield Case(changes=ONCE)


@check("rl_step.order_of_groups", needs=NEEDS, cases=_one_update)
def order_of_groups(adapter: Adapter, model: Any) -> None:
    """With one update, the order of the groups does not change it.

    Silent because groups arrive in any order. Look for rewards, logprobs or advantages that are sorted or collected
    elsewhere and joined by position.
    """
    gradients = []
    for groups in (rollout_groups(), rollout_groups()[::-1]):
        step = RlStep(adapter, model, STILL)
        step.take(adapter, with_logprobs(model, adapter.conventions, groups))
        gradients.append(step.updates[0].gradients)
    assert_gradients(gradients[1], gradients[0], model, "the order of the groups changed the gradient")


def _rollouts_of_one_update() -> Iterator[Case]:
    yield Case(changes=ONCE, groups=rollout_groups())
    changes = {**ONCE, "mask_truncated": True}
    yield Case("a truncated completion that is masked", changes=changes, groups=_truncated_groups())
    groups = [*_truncated_groups(), _tool_groups()[0]]
    yield Case("a truncated completion that is masked, beside tool tokens", changes=changes, groups=groups)
    yield Case("tool tokens", changes=ONCE, groups=_tool_groups())
    yield Case("temperature 0.6", changes={**ONCE, "temperature": 0.6}, groups=rollout_groups())


@check("rl_step.one_update_is_train_step", needs=("rl_step", "train_step"), cases=_rollouts_of_one_update)
def one_update_is_train_step(adapter: Adapter, model: Any, groups: list[Group]) -> None:
    """An RL step of one update is `train_step` on the whole batch.

    Silent because each path trains. Look for what only one of them does: a temperature, a mask, a filter, a divisor that is
    counted before completions are masked.
    """
    step, single = RlStep(adapter, model, STILL), RlStep(adapter, model, STILL).state
    groups = with_logprobs(model, adapter.conventions, groups)
    step.take(adapter, groups)
    watch = watched(single)
    batch, _ = reference.make_batch(groups, PAD, mask_truncated=adapter.conventions.mask_truncated)
    adapter.train_step(single, batch)
    message = "rl_step gave another gradient than train_step"
    assert_gradients(step.updates[0].gradients, watch.updates[0].gradients, model, message)


@check("rl_step.groups_untouched", needs=NEEDS, severity="hardening")
def groups_untouched(adapter: Adapter, model: Any) -> None:
    """An RL step does not modify its groups.

    Silent because they are often thrown away behind it; a buffer that offers them again, or a table of samples that is
    written later, sees normalised rewards. Look for operations in place on lists of rewards and ids.
    """
    step = RlStep(adapter, model, STILL)
    groups = with_logprobs(model, adapter.conventions, rollout_groups())
    before = copy.deepcopy(groups)
    adapter.rl_step(step.state, groups, PAD)
    assert_equal(groups, before, "rl_step changed its groups in place")
