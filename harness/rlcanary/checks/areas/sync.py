"""Weight sync: afterwards the sampler is the policy in training, with nothing left of the old weights."""

import copy
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.check import check
from rlcanary.checks.literal import Written
from rlcanary.checks.subject import Call, Finding, Subject
from rlcanary.checks.worlds.samples import gap, sampling
from rlcanary.checks.worlds.states import held, named, nats, policy_gap, precision, shaken, size_of
from rlcanary.checks.worlds.tiny_trainer import PAIR, build, new_engine, new_state, script
from rlcanary.contract.adapter import NotProvided

SHORT = [5, 6, 7]
# Several whole blocks of a prefix cache.
LONG = list(range(3, 51))


def _pair(subject: Subject, model: str = "tiny_llama()") -> list[Written]:
    """Make a state and an engine from the same model, and add noise to all of the state's weights."""
    return [new_state(subject, model, dressed="shaken({})"), new_engine(subject, model)]


def _expect_in_step(call: Call, prompt: list[int], message: str, *steps: str) -> None:
    """Demand that the engine continues a prompt as the trainer would; `steps` is the Python so far, for the snippet."""
    state, engine = (argument.value for argument in call.arguments)
    distance, close = gap(engine, state.model, prompt), nats(state.model)
    call.subject.compared()
    if not distance < close:
        lines = script("state, engine = arguments", *steps, f"got = gap(engine, state.model, {prompt})")
        raise Finding(
            f"{message}: the engine is {distance:.3g} nats away from the trainer",
            call.snippet([*lines, f"assert got < {close:.2g}, got"]),
            "nats",
            distance,
        )


@check("sync.every_time", needs=("sync_weights",))
def every_time(subject: Subject, rng: Generator) -> None:
    """The engine computes the same as the trainer after the first weight sync and after each later one.

    Silent because samples of an old policy look normal: rewards stall or creep, and a test with a single sync passes.
    Look for a sync behind a flag or a condition, for derived weights (packed, quantised, absorbed) that are made once, and
    for a destination that is resolved at the start.
    """
    state, engine = _pair(subject)
    steps: list[str] = []
    for count in ("first", "second", "third"):
        with subject.case(f"{count} sync"):
            if steps:
                shaken(state.value)
                steps.append("shaken(state)")
            call = subject.call("sync_weights", state, engine)
            steps.append("adapter.sync_weights(state, engine)")
            _expect_in_step(call, SHORT, f"after the {count} weight sync", *steps)


@check("sync.cached_prefixes", needs=("sync_weights",))
def cached_prefixes(subject: Subject, rng: Generator) -> None:
    """A weight sync invalidates cached prefixes: no keys and values of the old weights are used afterwards.

    Silent because only prompts that were seen before are off, by half a nat, sampled from a mix of two policies.
    Look for the reset of the prefix cache, for the conditions around it, and whether it comes after the weights.
    """
    state, engine = _pair(subject)
    steps: list[str] = []
    for count in ("first", "second"):
        with subject.case(f"{count} sync"):
            if steps:
                shaken(state.value)
                steps.append("shaken(state)")
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
    state, engine = _pair(subject)
    subject.call("sync_weights", state, engine)
    missing, close = [], nats(state.value.model)
    for name, parameter in named(state.value.model).items():
        with subject.case(name):
            before = parameter.detach().clone()
            disturb(state.value, engine.value, name)
            call = subject.call("sync_weights", state, engine)
            subject.compared()
            if not gap(engine.value, state.value.model, SHORT, max_new_tokens=1) < close:
                missing.append(name)
            # Restore it, so that the next parameter is tested alone.
            put(state.value, name, before)
            subject.call("sync_weights", state, engine)
    if missing:
        lines = script(
            "state, engine = arguments",
            "adapter.sync_weights(state, engine)",
            f"disturb(state, engine, {missing[0]!r})",
            "adapter.sync_weights(state, engine)",
            f"got = gap(engine, state.model, {SHORT}, max_new_tokens=1)",
            f"assert got < {close:.2g}, got",
        )
        told = f"changes of these parameters do not reach the engine: {', '.join(missing)}"
        raise Finding(told, call.snippet(lines), "parameters", len(missing))


@check("sync.tied_weights", needs=("sync_weights",))
def tied_weights(subject: Subject, rng: Generator) -> None:
    """A weight sync updates both embedding and output layer if they share weights.

    Silent because a state dict lists one of the two names, and the engine keeps the other one's old values. Look for
    names that are skipped as duplicates, and for a replacement of parameters that unties them.
    """
    state, engine = _pair(subject, "tiny_llama(tied=True)")
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
    """An interrupted weight sync raises or is completed; it never counts as done.

    Silent because a half-loaded engine goes on sampling, under the version of a policy that it does not hold. Look for
    a version that is raised in `finally`, and for an except around the transfer.
    """
    state = new_state(subject, dressed="shaken({})")
    engine = new_engine(subject, dressed="breaking_off({})")
    start = engine.value.version
    call = subject.call_unless_raised("sync_weights", state, engine)
    subject.compared()
    close = nats(state.value.model)
    is_done = call is not None and gap(engine.value, state.value.model, SHORT) < close
    lines = script(
        "state, engine = arguments",
        "start = engine.version",
        "try:",
        "    adapter.sync_weights(state, engine)",
        "except Exception:",
        "    assert engine.version == start, engine.version",
        "else:",
        f"    assert gap(engine, state.model, {SHORT}) < {close:.2g}",
    )
    snippet = Call(subject, "sync_weights", (state, engine), [], None).snippet(lines)
    if call is not None and not is_done:
        raise Finding("a weight sync broke off half-way and was not reported", snippet)
    if call is None and engine.value.version != start:
        raise Finding("a weight sync broke off half-way and counts as a version", snippet)


@check("sync.trainer_untouched", needs=("sync_weights",))
def trainer_untouched(subject: Subject, rng: Generator) -> None:
    """A weight sync does not change the trainer's weights: neither value nor dtype nor device.

    Silent because weights that were cast for the transfer, merged with their adapter or moved still train, from
    slightly different values. Look for conversions in place, and for a merge that is not undone.
    """
    state, engine = _pair(subject)
    before = copy.deepcopy(named(state.value.model))
    call = subject.call("sync_weights", state, engine)
    after = named(state.value.model)
    subject.compared(len(before))
    wrong = [name for name, parameter in before.items() if name not in after or not is_kept(parameter, after[name])]
    if wrong:
        lines = script(
            "import copy",
            "state, engine = arguments",
            f"before = copy.deepcopy(named(state.model)[{wrong[0]!r}])",
            "adapter.sync_weights(state, engine)",
            f"assert is_kept(before, named(state.model)[{wrong[0]!r}])",
        )
        raise Finding(
            f"a weight sync changed {len(wrong)} of the trainer's parameters: {wrong[0]}",
            call.snippet(lines),
            "parameters",
            len(wrong),
        )


@check("sync.same_policy", needs=("sync_weights",))
def same_policy(subject: Subject, rng: Generator) -> None:
    """A new state still equals the model it was made from after a weight sync, and so does the engine.

    Silent because trainer and engine agree with each other, but not with the checkpoint. Look for loading by name that
    ignores missing weights, and for traces of a merge of adapters.
    """
    state, engine = new_state(subject), new_engine(subject, "nudged(tiny_llama())")
    call, model = subject.call("sync_weights", state, engine), build("tiny_llama()")
    batch, _ = reference.make_batch(PAIR, 0)
    close = nats(state.value.model)
    distances = {
        "the trainer": policy_gap(state.value, model, batch),
        "the engine": gap(engine.value, model.to(precision(state.value.model)), SHORT),
    }
    for told, distance in distances.items():
        subject.compared()
        if not distance < close:
            lines = script(
                "from rlcanary import reference",
                "from rlcanary.checks.worlds.tiny_trainer import PAIR",
                "state, engine = arguments",
                "adapter.sync_weights(state, engine)",
                "got = policy_gap(state, tiny_llama(), reference.make_batch(PAIR, 0)[0])",
                f"assert got < {close:.2g}, got",
                f"got = gap(engine, tiny_llama().to({precision(state.value.model)}), {SHORT})",
                f"assert got < {close:.2g}, got",
            )
            raise Finding(
                f"after the weight sync of a new state {told} is {distance:.3g} nats away from the model that the state was "
                "made from",
                call.snippet(lines),
                "nats",
                distance,
            )


def disturb(state: Any, engine: Any, name: str) -> None:
    """Add noise to one parameter, enough to move the next token's logprobs away from the engine's.

    Raises:
        NotProvided: noise on this parameter does not change the model's output. The parameter is restored.
    """
    before = named(state.model)[name].detach().clone()
    noise = torch.randn(before.shape, generator=torch.Generator().manual_seed(1)) * size_of(state.model, name)
    for doubling in range(8):
        put(state, name, before + (noise * 2.0 ** (doubling - 1)).to(before))
        if gap(engine, state.model, SHORT, max_new_tokens=1) > 4 * nats(state.model):
            return
    put(state, name, before)
    raise NotProvided(f"noise on {name} does not change the next token's logprobs")


def put(state: Any, name: str, value: Tensor) -> None:
    """Set a parameter's value, and that of the copy that the optimizer moves, if there is one."""
    parameter, copies = named(state.model)[name], held(state)[0]
    with torch.no_grad():
        for tensor in (parameter, copies.get(name, parameter)):
            tensor.copy_(value)


def breaking_off(engine: Any) -> Any:
    """Make the engine lose its connection once, after three weights have arrived."""
    load_weights = engine.load_weights

    def load_some(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        engine.load_weights = load_weights
        load_weights(islice(weights, 3))
        raise ConnectionError("the connection to the engine was lost")

    engine.load_weights = load_some
    return engine


def is_kept(before: Tensor, after: Tensor) -> bool:
    """Tell whether a parameter kept its dtype and, except for the last bit of an undone merge, its value."""
    allowed = 2 * torch.finfo(before.dtype).eps * before.abs().max()
    is_same_kind = before.dtype == after.dtype and before.requires_grad == after.requires_grad
    return is_same_kind and bool(((after - before).abs() <= allowed).all())
