"""Evaluation: it measures the policy in training and leaves no trace in it."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor

from rlcanary.checks.registry import check
from rlcanary.checks.subject import Finding, NothingToCompare, Subject, close
from rlcanary.checks.training import PAIR, build, new_state, nudged, reference_model, sampled, script
from rlcanary.contract import NotProvided
from rlcanary.conventions import Conventions


@check("evaluation.changes_nothing", needs=("evaluate",))
def changes_nothing(subject: Subject, rng: Generator) -> None:
    """Evaluation leaves weights, gradients, optimizer, schedule and reference model exactly as they were.

    Silent because an evaluation that goes through the training path with a flag looks like one: the learning rate then
    depends on how often one evaluates. Look for `scheduler.step()`, `zero_grad()` and weight averages on that path.
    """
    state = new_state(subject, ref_model=reference_model(subject), dressed="with_items(started({}))")
    before = snapshot(state.value)
    call = subject.call("evaluate", state)
    after = snapshot(state.value)
    different = changed(before, after)
    subject.compared(len(before))
    if different:
        lines = script(
            "before = snapshot(arguments[0])",
            "adapter.evaluate(*arguments)",
            "got = changed(before, snapshot(arguments[0]))",
            "assert got == [], got",
        )
        more = f" and {len(different) - 1} more" if len(different) > 1 else ""
        raise Finding(
            f"evaluation changed {_told(different[0], before, after)}{more}",
            call.snippet(lines),
            "state",
            len(different),
        )


@check("evaluation.training_mode", needs=("evaluate",))
def training_mode(subject: Subject, rng: Generator) -> None:
    """Every module is in the mode after evaluation that it was in before.

    Silent because a model that stays in evaluation mode trains without dropout until the next epoch, and one that is
    switched to training mode scores with it. Look for an `eval()` without its way back, and for a `train()` on a model
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
    """Evaluation leaves the random states of torch, random and numpy as they were.

    Silent because the training that follows is as random as before, only another one: two runs that evaluate at other
    intervals cannot be compared. Look for sampling, shuffling and data loaders without a generator of their own.
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


@check("evaluation.repeatable", needs=("evaluate",), applies=_samples)
def repeatable(subject: Subject, rng: Generator) -> None:
    """With greedy evaluation declared, evaluating the same weights twice gives the same numbers.

    Silent because evaluation at the training temperature gives an accuracy too, a lower and noisier one, and one looks
    for the reason in the training. Look for sampling parameters of training in the evaluation path, and for a model that
    is in training mode there.
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
    """Evaluation measures the weights as they are at that moment.

    Silent because old weights have a plausible score: the curve is merely late, or flat. Look for an engine or a copy of
    the model that is made once, and for a weight sync that evaluation does not wait for.
    """
    state = new_state(subject, dressed="with_items({})")
    first = subject.call("evaluate", state).output
    nudged(state.value.model)
    call = subject.call("evaluate", state)
    # A codebase that evaluates on data of its own may find nothing right with either weights.
    if hasattr(state.value, "eval_items") and not changed(first, call.output, 1e-5):
        lines = script(
            "first = adapter.evaluate(*arguments)",
            "nudged(arguments[0].model)",
            "assert changed(first, adapter.evaluate(*arguments), 1e-5), first",
        )
        raise Finding(f"after the weights changed, evaluation still gives {first}", call.snippet(lines))
    expression = "with_items(adapter.new_state(nudged(tiny_llama()), None, 0.001))"
    expected = subject.adapter.evaluate(build(expression, adapter=subject.adapter))
    different = changed(expected, call.output, 1e-5)
    subject.compared(len({*expected, *call.output}))
    if different:
        lines = script(
            "adapter.evaluate(*arguments)",
            "nudged(arguments[0].model)",
            f"expected = adapter.evaluate({expression})",
            "got = changed(expected, adapter.evaluate(*arguments), 1e-5)",
            "assert got == [], got",
        )
        raise Finding(
            "a state whose weights changed evaluates otherwise than one that starts from these weights: "
            f"{_told(different[0], call.output, expected)}",
            call.snippet(lines),
        )


@check("evaluation.reward", needs=("evaluate",))
def reward(subject: Subject, rng: Generator) -> None:
    """The reward that evaluation logs is the mean of its items' rewards, whatever their range.

    Silent because an accuracy that counts rewards equal to 1 reads 0 for shaped rewards, and 0 is an accuracy. Look for
    comparisons with 1.0, for thresholds and clamps, and for items that are left out of the mean.
    """
    state = new_state(subject, dressed="with_graded_items({})")
    if not hasattr(state.value, "eval_items"):
        raise NotProvided("the state has no eval_items")
    call = subject.call("evaluate", state)
    if "reward" not in call.output:
        raise NothingToCompare("evaluation logs no reward")
    got = float(call.output["reward"])
    subject.compared()
    if not abs(got - 0.25) < 1e-5:
        lines = script("got = adapter.evaluate(*arguments)['reward']", "assert abs(got - 0.25) < 1e-5, got")
        raise Finding(
            f"the rewards 0.75, 0.5, 0.25 and -0.5 were logged as {got:.4g}, not 0.25",
            call.snippet(lines),
            "reward",
            abs(got - 0.25),
        )


@check("evaluation.training_goes_on", needs=("evaluate", "train_step"))
def training_goes_on(subject: Subject, rng: Generator) -> None:
    """Training goes on after an evaluation as it would have without it.

    Silent because a run with other intervals between evaluations is never compared with this one. Look for anything that
    evaluation shares with training: gradients, schedules, caches, counters.
    """
    batch = sampled(subject, PAIR)
    ends = []
    for evaluations in (0, 2):
        state = new_state(subject, ref_model=reference_model(subject), dressed="with_items(decaying({}))")
        subject.call("train_step", state, batch)
        for _ in range(evaluations):
            subject.call("evaluate", state)
        call = subject.call("train_step", state, batch)
        ends.append(snapshot(state.value))
    different = changed(ends[0], ends[1], 1e-5)
    subject.compared(len(ends[0]))
    if different:
        lines = script(
            f"other = {state.expression}",
            "adapter.train_step(*arguments)",
            "adapter.evaluate(arguments[0])",
            "adapter.evaluate(arguments[0])",
            "adapter.train_step(*arguments)",
            "adapter.train_step(other, arguments[1])",
            "adapter.train_step(other, arguments[1])",
            "got = changed(snapshot(other), snapshot(arguments[0]), 1e-5)",
            "assert got == [], got",
        )
        raise Finding(
            f"two updates with two evaluations between them end elsewhere than two updates: {_told(different[0], *ends)}",
            call.snippet(lines),
        )


def snapshot(state: Any) -> dict[str, Any]:
    """All that training goes on from: weights, buffers, gradients, optimizer and schedule, as copies by name."""
    parts = {
        "model": state.model.state_dict(),
        "gradient": {name: parameter.grad for name, parameter in state.model.named_parameters()},
        "requires_grad": {name: parameter.requires_grad for name, parameter in state.model.named_parameters()},
        "optimizer": state.optimizer.state_dict(),
        "scheduler": state.scheduler.state_dict(),
        "ref_model": {} if state.ref_model is None else state.ref_model.state_dict(),
    }
    return {name: value.detach().clone() if isinstance(value, Tensor) else value for name, value in _entries("", parts)}


def modes(state: Any) -> dict[str, bool]:
    """Which modules of the policy are in training mode."""
    return {name: module.training for name, module in state.model.named_modules()}


def random_states() -> dict[str, str]:
    """The states of the random number generators that trainers share."""
    return {
        "torch": str(torch.get_rng_state().tolist()),
        "random": str(random.getstate()),
        "numpy": str(np.random.get_state(legacy=False)["state"]),
    }


def changed(before: dict[str, Any], after: dict[str, Any], tolerance: float = 0.0) -> list[str]:
    """The entries that differ, numbers by more than this share of themselves."""
    names = sorted({*before, *after})
    return [name for name in names if not _equal(before.get(name), after.get(name), tolerance)]


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
    """An entry that differs, with its values where they are numbers."""
    values = first.get(name), second.get(name)
    return name if any(isinstance(value, Tensor) for value in values) else f"{name}, {values[0]!r} and {values[1]!r}"
