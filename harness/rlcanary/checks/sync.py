"""Weight sync: after it the sampler is the policy in training, all of it, and nothing of the old one is left."""

import copy
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Generator, Tensor

from rlcanary.checks.generation import gap, sampling
from rlcanary.checks.registry import check
from rlcanary.checks.snippet import Written
from rlcanary.checks.subject import Call, Finding, Subject
from rlcanary.checks.training import named, new_engine, new_state, nudged, script

SHORT = [5, 6, 7]
# Several whole blocks of a prefix cache.
LONG = list(range(3, 51))
# Float32 against float32, in nats; the smallest mistake that was measured on real engines is a hundred times as large.
CLOSE = 1e-4


def _pair(subject: Subject, policy: str = "nudged(tiny_llama())", sampler: str = "tiny_llama()") -> list[Written]:
    """A state and an engine that start from different weights."""
    return [new_state(subject, policy), new_engine(subject, sampler)]


def _expect_in_step(call: Call, prompt: list[int], message: str, *steps: str) -> None:
    """Demand that the engine continues a prompt as the trainer would; `steps` led here, in Python, for the snippet."""
    state, engine = (argument.value for argument in call.arguments)
    distance = gap(engine, state.model, prompt)
    call.subject.compared()
    if not distance < CLOSE:
        lines = script("state, engine = arguments", *steps, f"got = gap(engine, state.model, {prompt})")
        raise Finding(
            f"{message}: the engine is {distance:.3g} nats away from the trainer",
            call.snippet([*lines, f"assert got < {CLOSE}, got"]),
            "nats",
            distance,
        )


@check("sync.every_time", needs=("sync_weights",))
def every_time(subject: Subject, rng: Generator) -> None:
    """After the first weight sync, and after each later one, the engine computes what the trainer computes.

    Silent because samples of an old policy are samples: rewards stand still or creep, and a single sync in a test passes.
    Look for a sync behind a flag or a condition, for derived weights (packed, quantised, absorbed) that are made once, and
    for a destination that is resolved at the start.
    """
    state, engine = _pair(subject)
    steps: list[str] = []
    for count in ("first", "second", "third"):
        with subject.case(f"{count} sync"):
            if steps:
                nudged(state.value.model)
                steps.append("nudged(state.model)")
            call = subject.call("sync_weights", state, engine)
            steps.append("adapter.sync_weights(state, engine)")
            _expect_in_step(call, SHORT, f"after the {count} weight sync", *steps)


@check("sync.cached_prefixes", needs=("sync_weights",))
def cached_prefixes(subject: Subject, rng: Generator) -> None:
    """After a weight sync nothing is computed from keys and values that the old weights left in the prefix cache.

    Silent because only prompts that were seen before are off, by half a nat, as samples of a policy that never existed.
    Look for the reset of the prefix cache, for the conditions around it, and whether it comes after the weights.
    """
    state, engine = _pair(subject)
    steps: list[str] = []
    for count in ("first", "second"):
        with subject.case(f"{count} sync"):
            if steps:
                nudged(state.value.model)
                steps.append("nudged(state.model)")
            engine.value.generate([LONG], sampling())
            call = subject.call("sync_weights", state, engine)
            steps += [f"engine.generate([{LONG}], sampling())", "adapter.sync_weights(state, engine)"]
            message = f"on a prompt of {len(LONG)} tokens that was cached before the {count} weight sync"
            _expect_in_step(call, LONG, message, *steps)


@check("sync.every_parameter", needs=("sync_weights",))
def every_parameter(subject: Subject, rng: Generator) -> None:
    """A change of any one parameter reaches the engine.

    Silent because an engine that lacks one tensor is one percent off, which passes as noise of the kernels. Look for name
    maps, for prefixes that wrappers add, for adapters without their base, and for fused or transposed layouts.
    """
    state, engine = _pair(subject, "tiny_llama()")
    subject.call("sync_weights", state, engine)
    missing = []
    for name, parameter in named(state.value.model).items():
        before = parameter.detach().clone()
        disturb(state.value.model, name)
        subject.compared()
        call = subject.call("sync_weights", state, engine)
        if not gap(engine.value, state.value.model, SHORT, max_new_tokens=1) < CLOSE:
            missing.append(name)
            # So that the next parameter is looked at alone.
            with torch.no_grad():
                parameter.copy_(before)
    if missing:
        lines = script(
            "state, engine = arguments",
            "adapter.sync_weights(state, engine)",
            f"disturb(state.model, {missing[0]!r})",
            "adapter.sync_weights(state, engine)",
            f"got = gap(engine, state.model, {SHORT}, max_new_tokens=1)",
            f"assert got < {CLOSE}, got",
        )
        told = f"changes of these parameters do not reach the engine: {', '.join(missing)}"
        raise Finding(told, call.snippet(lines), "parameters", len(missing))


@check("sync.tied_weights", needs=("sync_weights",))
def tied_weights(subject: Subject, rng: Generator) -> None:
    """Where the output layer shares the embedding's weights, a sync moves both.

    Silent because a state dict lists one of the two names, and the engine keeps the other one's old values. Look for
    names that are skipped as duplicates, and for a replacement of parameters that unties them.
    """
    state, engine = _pair(subject, "nudged(tiny_llama(tied=True))", "tiny_llama(tied=True)")
    call = subject.call("sync_weights", state, engine)
    _expect_in_step(call, SHORT, "with tied weights, after a weight sync", "adapter.sync_weights(state, engine)")


@check("sync.version", needs=("sync_weights",))
def version(subject: Subject, rng: Generator) -> None:
    """Each weight sync raises the engine's version by exactly 1.

    Silent because versions only decide which samples are too old: counted twice, half of the allowed lag is thrown away,
    and long completions with it. Look for increments in both the caller and the callee.
    """
    state, engine = _pair(subject)
    start = engine.value.version
    for count in (1, 2):
        with subject.case(count):
            call = subject.call("sync_weights", state, engine)
            subject.compared()
            if engine.value.version - start != count:
                lines = script(
                    "state, engine = arguments",
                    "start = engine.version",
                    *["adapter.sync_weights(state, engine)"] * count,
                    f"assert engine.version - start == {count}, engine.version - start",
                )
                raise Finding(
                    f"after {count} weight sync{'s' * (count > 1)} the engine's version has grown by "
                    f"{engine.value.version - start}",
                    call.snippet(lines),
                    "version",
                    abs(engine.value.version - start - count),
                )


@check("sync.interrupted", needs=("sync_weights",))
def interrupted(subject: Subject, rng: Generator) -> None:
    """A weight sync that breaks off is an error, or is made good; it never counts as done.

    Silent because a half-loaded engine samples on, under the number of a policy that it is not. Look for a version that
    is raised in `finally`, and for an except around the transfer.
    """
    state = new_state(subject, "nudged(tiny_llama())")
    engine = new_engine(subject, dressed="breaking_off({})")
    start = engine.value.version
    call = subject.call_unless_raised("sync_weights", state, engine)
    subject.compared()
    is_done = call is not None and gap(engine.value, state.value.model, SHORT) < CLOSE
    lines = script(
        "state, engine = arguments",
        "start = engine.version",
        "try:",
        "    adapter.sync_weights(state, engine)",
        "except Exception:",
        "    assert engine.version == start, engine.version",
        "else:",
        f"    assert gap(engine, state.model, {SHORT}) < {CLOSE}",
    )
    snippet = Call(subject, "sync_weights", (state, engine), [], None).snippet(lines)
    if call is not None and not is_done:
        raise Finding("a weight sync broke off half-way and was not reported", snippet)
    if call is None and engine.value.version != start:
        raise Finding("a weight sync broke off half-way and counts as a version", snippet)


@check("sync.trainer_untouched", needs=("sync_weights",))
def trainer_untouched(subject: Subject, rng: Generator) -> None:
    """A weight sync leaves the trainer's weights as they are, in value, type and place.

    Silent because weights that were cast for the wire, merged with their adapter or moved away train on, from slightly
    elsewhere. Look for conversions in place, and for a merge without its undoing.
    """
    state, engine = _pair(subject)
    before = copy.deepcopy(named(state.value.model))
    call = subject.call("sync_weights", state, engine)
    after = named(state.value.model)
    subject.compared(len(before))
    wrong = [name for name, parameter in before.items() if name not in after or not _same(parameter, after[name])]
    if wrong:
        lines = script(
            "state, engine = arguments",
            f"before = named(state.model)[{wrong[0]!r}].detach().clone()",
            "adapter.sync_weights(state, engine)",
            f"torch.testing.assert_close(named(state.model)[{wrong[0]!r}].detach(), before, rtol=0, atol=0)",
        )
        raise Finding(
            f"a weight sync changed {len(wrong)} of the trainer's parameters: {wrong[0]}",
            call.snippet(lines),
            "parameters",
            len(wrong),
        )


def disturb(model: Any, name: str) -> None:
    """Noise of half its own size on one parameter."""
    parameter = named(model)[name]
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        noise = torch.randn(parameter.shape, generator=random).to(parameter)
        parameter.add_(noise * parameter.square().mean().sqrt() / 2)


def breaking_off(engine: Any) -> Any:
    """The engine, whose connection is lost once after three weights have arrived."""
    load_weights = engine.load_weights

    def load_some(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        engine.load_weights = load_weights
        load_weights(islice(weights, 3))
        raise ConnectionError("the connection to the engine was lost")

    engine.load_weights = load_some
    return engine


def _same(before: Tensor, after: Tensor) -> bool:
    return before.dtype == after.dtype and before.requires_grad == after.requires_grad and torch.equal(before, after)
