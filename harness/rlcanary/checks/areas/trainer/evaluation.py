"""Evaluation: it measures the policy in training and does not change it."""

import copy
import math
from collections.abc import Iterator
from typing import Any

from rlcanary.checks.asserts import NothingToCompare, assert_equal, assert_true, soft
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.items import assert_tossed, with_graded_items, with_items, with_tossed_items
from rlcanary.checks.worlds.training.snapshots import (
    assert_same_entries,
    but_for_cleared_gradients,
    changed,
    modes,
    random_states,
    snapshot,
)
from rlcanary.checks.worlds.training.states import coin, shaken, started
from rlcanary.checks.worlds.training.tiny_trainer import PAIR, reference_near, sampled, state_of, tiny_policy
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.layers import copied

# So many completions, of a model with so many unlikelier first tokens, tell 1.0 from a declared 0.7 in 99 of 100 runs.
TOSSES, OTHERS = 320, 16


@check("evaluation.changes_nothing", needs=("evaluate",))
def changes_nothing(adapter: Adapter, model: Any) -> None:
    """Evaluation changes no weights, optimizer, schedule or reference model, and adds to no gradient.

    Silent because an evaluation through the training path still logs plausible metrics: the learning rate then depends
    on how often it runs. Look for `scheduler.step()`, `backward()` and weight averages on that path. Gradients that are
    cleared do not count: the next update clears them too.
    """
    ref_model = reference_near(model, adapter.conventions)
    state = with_items(started(state_of(adapter, model, ref_model)))
    before = snapshot(state)
    adapter.evaluate(state)
    after = but_for_cleared_gradients(snapshot(state), before)
    assert_same_entries(after, before, "evaluation changed the state")


def _modes() -> Iterator[Case]:
    yield Case("train", training=True)
    yield Case("eval", training=False)


@check("evaluation.training_mode", needs=("evaluate",), cases=_modes)
def training_mode(adapter: Adapter, model: Any, training: bool) -> None:
    """Evaluation leaves every module in the training or evaluation mode that it was in before.

    Silent because a model that stays in evaluation mode trains without dropout until the next epoch, and one that is
    switched to training mode scores with it. Look for an `eval()` that is not undone, and for a `train()` on a model
    that was not in training mode.
    """
    state = with_items(state_of(adapter, model.train(training)))
    before = modes(state)
    adapter.evaluate(state)
    told = f"a model that was in {'train' if training else 'eval'} mode before evaluation is not after it"
    assert_true(modes(state) == before, told, compared=len(before))


@check("evaluation.random_state", needs=("evaluate",))
def random_state(adapter: Adapter, model: Any) -> None:
    """Evaluation does not change the random states of torch, random and numpy.

    Silent because training is still random afterwards, only differently: runs with different evaluation intervals
    cannot be compared. Look for sampling, shuffling and data loaders without a generator of their own.
    """
    state = with_items(state_of(adapter, copied(model)))
    before = random_states()
    adapter.evaluate(state)
    after = random_states()
    # A GPU that evaluation was the first to use has no state from before.
    drawn = changed(before, {name: after[name] for name in before})
    assert_true(not drawn, f"evaluation drew random numbers from {', '.join(drawn)}", compared=len(before))


def _samples(conventions: Conventions) -> str | None:
    if conventions.evaluation_temperature > 0:
        return f"evaluation samples at temperature {conventions.evaluation_temperature:g}"
    return None


def _is_greedy(conventions: Conventions) -> str | None:
    return None if conventions.evaluation_temperature > 0 else "evaluation is greedy"


@check("evaluation.repeatable", severity="dashboard", needs=("evaluate",), applies=_samples)
def repeatable(adapter: Adapter) -> None:
    """With greedy evaluation declared, evaluating the same weights twice gives the same numbers.

    Silent because evaluation at the training temperature also gives an accuracy, only lower and noisier, which is then
    blamed on the training. Look for sampling parameters of training in the evaluation path, and for a model that is in
    training mode there.
    """
    state = with_items(state_of(adapter, tiny_policy(dropout=0.3).train()))
    first, second = adapter.evaluate(state), adapter.evaluate(state)
    told = "two evaluations of the same weights gave other numbers"
    with soft():
        assert_same_entries(second, first, told, tolerance=1e-5, quantity="metrics")
    # Samples under a fixed seed are repeatable too, and not greedy; that shows in fewer tosses than a share needs.
    likeliest = with_tossed_items(state_of(adapter, coin(tiny_policy(), 0.5, OTHERS)), 64)
    if not hasattr(likeliest, "eval_items"):
        return
    adapter.evaluate(likeliest)
    texts = likeliest.eval_items[0].reward.texts
    if texts:
        told = "with greedy evaluation declared, equal prompts of a policy that prefers one token have several answers"
        assert_equal(len(set(texts)), 1, told, quantity="answers")


@check(
    "evaluation.current_weights",
    severity="dashboard",
    needs=("evaluate",),
    applies=_samples,
    worlds=("generation_config",),
)
def current_weights(adapter: Adapter, model: Any) -> None:
    """Evaluation measures the current weights.

    Silent because old weights have a plausible score: the curve is merely late, or flat. Look for an engine or a copy of
    the model that is made once, and for a weight sync that evaluation does not wait for.
    """
    state = with_items(state_of(adapter, copied(model)))
    first = adapter.evaluate(state)
    shaken(state)
    second = adapter.evaluate(state)
    # A codebase that evaluates on its own data may score zero with either weights.
    if hasattr(state, "eval_items"):
        is_new = bool(changed(first, second, 1e-5))
        assert_true(is_new, f"after the weights changed, evaluation still gives {first}")
    other = adapter.evaluate(shaken(with_items(state_of(adapter, copied(model)))))
    told = "a state that was evaluated before its weights changed evaluates otherwise than one that was not"
    assert_same_entries(second, other, told, tolerance=1e-5, quantity="metrics")


@check("evaluation.temperature", severity="dashboard", needs=("evaluate",), applies=_is_greedy)
def temperature(adapter: Adapter) -> None:
    """With sampled evaluation declared, completions are drawn at the declared temperature.

    Silent because evaluation at any temperature gives an accuracy, only not the one that the config promises. Look for
    sampling parameters that are left out on the way to the engine, and for a `do_sample` that is off.
    """
    declared = adapter.conventions.evaluation_temperature
    fair = coin(tiny_policy(), math.log(OTHERS) * declared, OTHERS)
    state = with_tossed_items(state_of(adapter, fair), TOSSES)
    if not hasattr(state, "eval_items"):
        raise NotProvided("the state has no eval_items")
    adapter.evaluate(state)
    texts = state.eval_items[0].reward.texts
    if not texts:
        raise NothingToCompare("evaluation rewarded no completion")
    assert_tossed(texts, declared)


@check("evaluation.reward", severity="dashboard", needs=("evaluate",), worlds=("learned_positions",))
def reward(adapter: Adapter, model: Any) -> None:
    """The logged evaluation reward is the mean over items of the reward of each item's own completion.

    Silent because an accuracy that counts rewards equal to 1 reads 0 for shaped rewards, and 0 is an accuracy. Look for
    comparisons with 1.0, for thresholds and clamps, for items that are left out of the mean, and for completions that
    come back in another order than their items.
    """
    state = with_graded_items(state_of(adapter, copied(model)))
    if not hasattr(state, "eval_items"):
        raise NotProvided("the state has no eval_items")
    metrics = adapter.evaluate(state)
    if "reward" not in metrics:
        raise NothingToCompare("evaluation logs no reward")
    given = [item.reward.given for item in state.eval_items]
    means = [sum(rewards) / len(rewards) if rewards else math.nan for rewards in given]
    got, expected = float(metrics["reward"]), sum(means) / len(means)
    told = f"items with the rewards {_shown(means)} were logged as {got:.4g}, not {expected:.4g}"
    error = abs(got - expected)
    assert_true(error < 1e-4, told, quantity="reward", magnitude=error, compared=len(given))
    if adapter.conventions.evaluation_temperature > 0:
        return
    singles = [with_graded_items(state_of(adapter, copied(model)), index) for index in range(len(given))]
    alone = [float(adapter.evaluate(single)["reward"]) for single in singles]
    told = f"items that earn {_shown(alone)} when each is evaluated alone earn {got:.4g} together"
    error = abs(got - sum(alone) / len(alone))
    assert_true(error < 1e-4, told, quantity="reward", magnitude=error, compared=len(alone))


def _shown(rewards: list[float]) -> str:
    return ", ".join(f"{reward:.3f}" for reward in rewards)


@check("evaluation.training_goes_on", needs=("evaluate", "train_step"))
def training_goes_on(adapter: Adapter, model: Any) -> None:
    """Training after any number of evaluations continues as it would have without them.

    Silent because runs with different evaluation intervals are never compared. Look for state that evaluation shares
    with training: gradients, schedules, caches, counters, weights that are swapped in and out.
    """
    ends = []
    for evaluations in (0, 1, 2, 3):
        ref_model = reference_near(model, adapter.conventions)
        state = with_items(state_of(adapter, copied(model), ref_model))
        batch = sampled(state.model, adapter.conventions, PAIR)
        adapter.train_step(state, copy.deepcopy(batch))
        for _ in range(evaluations):
            adapter.evaluate(state)
        adapter.train_step(state, batch)
        ends.append(snapshot(state))
        told = f"two updates with {evaluations} evaluations between them end elsewhere than two updates without"
        assert_same_entries(ends[-1], ends[0], told, tolerance=1e-5)
