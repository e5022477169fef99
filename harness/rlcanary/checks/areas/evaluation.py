"""Evaluation: it measures the policy in training and does not change it."""

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from rlcanary.checks.check import check
from rlcanary.checks.subject import Finding, NothingToCompare, Subject, close
from rlcanary.checks.worlds.items import tossed_otherwise
from rlcanary.checks.worlds.states import shaken
from rlcanary.checks.worlds.tiny_trainer import PAIR, new_state, reference_model, sampled, script
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Conventions


@check("evaluation.changes_nothing", needs=("evaluate",))
def changes_nothing(subject: Subject, rng: Generator) -> None:
    """Evaluation changes no weights, optimizer, schedule or reference model, and adds to no gradient.

    Silent because an evaluation through the training path still logs plausible metrics: the learning rate then depends
    on how often it runs. Look for `scheduler.step()`, `backward()` and weight averages on that path. Gradients that are
    cleared do not count: the next update clears them too.
    """
    state = new_state(subject, ref_model=reference_model(subject), dressed="with_items(started({}))")
    before = snapshot(state.value)
    call = subject.call("evaluate", state)
    after = snapshot(state.value)
    different = lasting(before, after)
    subject.compared(len(before))
    if different:
        lines = script(
            "before = snapshot(arguments[0])",
            "adapter.evaluate(*arguments)",
            "got = lasting(before, snapshot(arguments[0]))",
            "assert got == [], got",
        )
        told = f"evaluation changed {_summed_up(different, before, after)}"
        raise Finding(told, call.snippet(lines), "state", len(different))


@check("evaluation.training_mode", needs=("evaluate",))
def training_mode(subject: Subject, rng: Generator) -> None:
    """Evaluation leaves every module in the training or evaluation mode that it was in before.

    Silent because a model that stays in evaluation mode trains without dropout until the next epoch, and one that is
    switched to training mode scores with it. Look for an `eval()` that is not undone, and for a `train()` on a model
    that was not in training mode.
    """
    for mode in ("train", "eval"):
        with subject.case(mode):
            state = new_state(subject, f"tiny_llama().{mode}()", dressed="with_items({})")
            before = modes(state.value)
            call = subject.call("evaluate", state)
            subject.compared(len(before))
            if modes(state.value) != before:
                lines = script(
                    "before = modes(arguments[0])",
                    "adapter.evaluate(*arguments)",
                    "assert modes(arguments[0]) == before",
                )
                raise Finding(f"a model that was in {mode} mode before evaluation is not after it", call.snippet(lines))


@check("evaluation.random_state", needs=("evaluate",))
def random_state(subject: Subject, rng: Generator) -> None:
    """Evaluation does not change the random states of torch, random and numpy.

    Silent because training is still random afterwards, only differently: runs with different evaluation intervals
    cannot be compared. Look for sampling, shuffling and data loaders without a generator of their own.
    """
    state = new_state(subject, dressed="with_items({})")
    before = random_states()
    call = subject.call("evaluate", state)
    drawn = changed(before, random_states())
    subject.compared(len(before))
    if drawn:
        lines = script(
            "before = random_states()",
            "adapter.evaluate(*arguments)",
            "got = changed(before, random_states())",
            "assert got == [], got",
        )
        raise Finding(f"evaluation drew random numbers from {', '.join(drawn)}", call.snippet(lines))


def _samples(conventions: Conventions) -> str | None:
    if conventions.evaluation_temperature > 0:
        return f"evaluation samples at temperature {conventions.evaluation_temperature:g}"
    return None


def _is_greedy(conventions: Conventions) -> str | None:
    return None if conventions.evaluation_temperature > 0 else "evaluation is greedy"


@check("evaluation.repeatable", needs=("evaluate",), applies=_samples)
def repeatable(subject: Subject, rng: Generator) -> None:
    """With greedy evaluation declared, evaluating the same weights twice gives the same numbers.

    Silent because evaluation at the training temperature also gives an accuracy, only lower and noisier, which is then
    blamed on the training. Look for sampling parameters of training in the evaluation path, and for a model that is in
    training mode there.
    """
    state = new_state(subject, "tiny_llama(dropout=0.3).train()", dressed="with_items({})")
    first = subject.call("evaluate", state).output
    call = subject.call("evaluate", state)
    different = changed(first, call.output, 1e-5)
    subject.compared(len({*first, *call.output}))
    if different:
        lines = script(
            "first, second = adapter.evaluate(*arguments), adapter.evaluate(*arguments)",
            "got = changed(first, second, 1e-5)",
            "assert got == [], got",
        )
        raise Finding(
            f"two evaluations of the same weights gave other numbers: {_told(different[0], first, call.output)}",
            call.snippet(lines),
        )


@check("evaluation.current_weights", needs=("evaluate",), applies=_samples)
def current_weights(subject: Subject, rng: Generator) -> None:
    """Evaluation measures the current weights.

    Silent because old weights have a plausible score: the curve is merely late, or flat. Look for an engine or a copy of
    the model that is made once, and for a weight sync that evaluation does not wait for.
    """
    state = new_state(subject, dressed="with_items({})")
    first = subject.call("evaluate", state).output
    shaken(state.value)
    call = subject.call("evaluate", state)
    # A codebase that evaluates on its own data may score zero with either weights.
    if hasattr(state.value, "eval_items") and not changed(first, call.output, 1e-5):
        lines = script(
            "first = adapter.evaluate(*arguments)",
            "shaken(arguments[0])",
            "assert changed(first, adapter.evaluate(*arguments), 1e-5), first",
        )
        raise Finding(f"after the weights changed, evaluation still gives {first}", call.snippet(lines))
    other = new_state(subject, dressed="shaken(with_items({}))")
    expected = subject.adapter.evaluate(other.value)
    different = changed(expected, call.output, 1e-5)
    subject.compared(len({*expected, *call.output}))
    if different:
        lines = script(
            "adapter.evaluate(*arguments)",
            "shaken(arguments[0])",
            f"expected = adapter.evaluate({other.expression})",
            "got = changed(expected, adapter.evaluate(*arguments), 1e-5)",
            "assert got == [], got",
        )
        raise Finding(
            "a state that was evaluated before its weights changed evaluates otherwise than one that was not: "
            f"{_told(different[0], call.output, expected)}",
            call.snippet(lines),
        )


@check("evaluation.temperature", needs=("evaluate",), applies=_is_greedy)
def temperature(subject: Subject, rng: Generator) -> None:
    """With sampled evaluation declared, completions are drawn at the declared temperature.

    Silent because evaluation at any temperature gives an accuracy, only not the one that the config promises. Look for
    sampling parameters that are left out on the way to the engine, and for a `do_sample` that is off.
    """
    bias = 2 * subject.conventions.evaluation_temperature
    state = new_state(subject, f"coin(tiny_llama(), {bias:g})", dressed="with_tossed_items({}, 160)")
    if not hasattr(state.value, "eval_items"):
        raise NotProvided("the state has no eval_items")
    call = subject.call("evaluate", state)
    texts = state.value.eval_items[0].reward.texts
    if not texts:
        raise NothingToCompare("evaluation rewarded no completion")
    subject.compared(len(texts))
    told = tossed_otherwise(texts, subject.conventions.evaluation_temperature, bias)
    if told:
        lines = script(
            "adapter.evaluate(*arguments)",
            "texts = arguments[0].eval_items[0].reward.texts",
            f"got = tossed_otherwise(texts, {subject.conventions.evaluation_temperature:g}, {bias:g})",
            "assert got is None, got",
        )
        raise Finding(told, call.snippet(lines))


@check("evaluation.reward", needs=("evaluate",))
def reward(subject: Subject, rng: Generator) -> None:
    """The logged evaluation reward is the mean over items of the reward of each item's own completion.

    Silent because an accuracy that counts rewards equal to 1 reads 0 for shaped rewards, and 0 is an accuracy. Look for
    comparisons with 1.0, for thresholds and clamps, for items that are left out of the mean, and for completions that
    come back in another order than their items.
    """
    state = new_state(subject, dressed="with_graded_items({})")
    if not hasattr(state.value, "eval_items"):
        raise NotProvided("the state has no eval_items")
    call = subject.call("evaluate", state)
    if "reward" not in call.output:
        raise NothingToCompare("evaluation logs no reward")
    got, given = float(call.output["reward"]), [item.reward.given for item in state.value.eval_items]
    unscored = [index for index, rewards in enumerate(given) if not rewards]
    subject.compared(len(given))
    expected = math.nan if unscored else sum(sum(rewards) / len(rewards) for rewards in given) / len(given)
    if not abs(got - expected) < 1e-4:
        lines = script(
            "got = adapter.evaluate(*arguments)['reward']",
            "given = [item.reward.given for item in arguments[0].eval_items]",
            "assert all(given), given",
            "expected = sum(sum(rewards) / len(rewards) for rewards in given) / len(given)",
            "assert abs(got - expected) < 1e-4, (got, given)",
        )
        shown = ", ".join(f"{sum(rewards) / len(rewards):.3f}" if rewards else "none" for rewards in given)
        raise Finding(
            f"items with the rewards {shown} were logged as {got:.4g}, not {expected:.4g}",
            call.snippet(lines),
            "reward",
            abs(got - expected),
        )
    if subject.conventions.evaluation_temperature > 0:
        return
    alone = []
    for index in range(len(given)):
        single = new_state(subject, dressed=f"with_graded_items({{}}, {index})")
        alone.append(float(subject.call("evaluate", single).output["reward"]))
    subject.compared(len(alone))
    if not abs(got - sum(alone) / len(alone)) < 1e-4:
        lines = script(
            "got = adapter.evaluate(*arguments)['reward']",
            "alone = []",
            f"for index in range({len(alone)}):",
            "    with_graded_items(arguments[0], index)",
            "    alone.append(adapter.evaluate(*arguments)['reward'])",
            "assert abs(got - sum(alone) / len(alone)) < 1e-4, (got, alone)",
        )
        shown = ", ".join(f"{value:.3f}" for value in alone)
        raise Finding(
            f"items that earn {shown} when each is evaluated alone earn {got:.4g} together",
            call.snippet(lines),
            "reward",
            abs(got - sum(alone) / len(alone)),
        )


@check("evaluation.training_goes_on", needs=("evaluate", "train_step"))
def training_goes_on(subject: Subject, rng: Generator) -> None:
    """Training after any number of evaluations continues as it would have without them.

    Silent because runs with different evaluation intervals are never compared. Look for state that evaluation shares
    with training: gradients, schedules, caches, counters, weights that are swapped in and out.
    """
    ends = []
    for evaluations in (0, 1, 2, 3):
        state = new_state(subject, ref_model=reference_model(subject), dressed="with_items({})")
        batch = sampled(state.value.model, subject.conventions, PAIR)
        subject.call("train_step", state, batch)
        for _ in range(evaluations):
            subject.call("evaluate", state)
        call = subject.call("train_step", state, batch)
        ends.append(snapshot(state.value))
        different = changed(ends[0], ends[-1], 1e-5)
        subject.compared(len(ends[0]))
        if different:
            lines = script(
                f"other = {state.expression}",
                "adapter.train_step(*arguments)",
                *["adapter.evaluate(arguments[0])"] * evaluations,
                "adapter.train_step(*arguments)",
                "adapter.train_step(other, arguments[1])",
                "adapter.train_step(other, arguments[1])",
                "got = changed(snapshot(other), snapshot(arguments[0]), 1e-5)",
                "assert got == [], got",
            )
            times = f"{evaluations} evaluation{'s' * (evaluations > 1)}"
            raise Finding(
                f"two updates with {times} between them end elsewhere than two updates: they differ in "
                f"{_summed_up(different, ends[0], ends[-1])}",
                call.snippet(lines),
            )


def snapshot(state: Any) -> dict[str, Any]:
    """Copy by name the state that training continues from: weights, buffers, gradients, optimizer and schedule."""
    parts = {
        "model": state.model.state_dict(),
        "gradient": {name: parameter.grad for name, parameter in state.model.named_parameters()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in state.model.named_parameters()},
        "optimizer": state.optimizer.state_dict(),
        "moved by the optimizer": [group["params"] for group in state.optimizer.param_groups],
        "scheduler": state.scheduler.state_dict(),
        "ref_model": {} if state.ref_model is None else state.ref_model.state_dict(),
    }
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in _entries("", parts)}


def modes(state: Any) -> dict[str, bool]:
    """Return the training mode of each module of the policy."""
    return {name: module.training for name, module in state.model.named_modules()}


def random_states() -> dict[str, str]:
    """Return the states of the random number generators that trainers share."""
    return {
        "torch": str(torch.get_rng_state().tolist()),
        "random": str(random.getstate()),
        "numpy": str(np.random.get_state(legacy=False)["state"]),
    }


def changed(before: dict[str, Any], after: dict[str, Any], tolerance: float = 0.0) -> list[str]:
    """Return the entries that differ, numbers by more than this relative tolerance."""
    names = sorted({*before, *after})
    return [name for name in names if not _equal(before.get(name), after.get(name), tolerance)]


def lasting(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the entries that differ, except for cleared gradients."""
    return [
        name
        for name in changed(before, after)
        if not (name.startswith("gradient.") and (after.get(name) is None or not after[name].any()))
    ]


def _summed_up(names: list[str], first: dict[str, Any], second: dict[str, Any]) -> str:
    """Summarise the differing entries: a count per part, with one example."""
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(name.split(".")[0], []).append(name)
    return "; ".join(
        f"{_told(found[0], first, second)}{f' and {len(found) - 1} more of {part}' if len(found) > 1 else ''}"
        for part, found in parts.items()
    )


def _entries(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list | tuple):
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _entries(f"{prefix}.{name}" if prefix else str(name), item)
    else:
        yield prefix, value


def _equal(before: Any, after: Any, tolerance: float) -> bool:
    if isinstance(before, Tensor | float) and isinstance(after, Tensor | float):
        first, second = torch.as_tensor(before), torch.as_tensor(after)
        return first.shape == second.shape and close(first, second, tolerance, tolerance * 1e-3)
    return type(before) is type(after) and bool(before == after)


def _told(name: str, first: dict[str, Any], second: dict[str, Any]) -> str:
    """Describe an entry that differs, with its values if they are numbers."""
    values = first.get(name), second.get(name)
    return name if any(isinstance(value, Tensor) for value in values) else f"{name}, {values[0]!r} and {values[1]!r}"
