"""Weight sync: afterwards the sampler is the policy in training, with nothing left of the old weights."""

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import NothingToCompare, assert_equal, assert_true, leave_out, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.items import with_items
from rlcanary.checks.worlds.rows import whole
from rlcanary.checks.worlds.samples import allowed, breaking_off, gap, gaps, moved_on, sampling, sampling_first, synced
from rlcanary.checks.worlds.training.states import (
    held,
    named,
    nats,
    nudged,
    own_logprobs,
    policy_gap,
    precision,
    seeded,
    sizes_of,
)
from rlcanary.checks.worlds.training.tiny_trainer import GROUPS, PAIR, reference_near, sampled, state_of, tiny_policy
from rlcanary.contract.adapter import Adapter, NotProvided, provided
from rlcanary.contract.engine import InProcessEngine
from rlcanary.contract.layers import copied

SHORT = [5, 6, 7]
# Several whole blocks of a prefix cache.
LONG = list(range(3, 51))
STEPS = ("update", "sync", "evaluate", "sample")
LEARNING_RATE = 1e-2


def _pair(adapter: Adapter, model: Any) -> tuple[Any, Any]:
    """Make a state and an engine from the same model, and add noise to all of the state's weights that a sync brings."""
    return moved_on(adapter, state_of(adapter, copied(model))), adapter.new_engine(model)


def _assert_in_step(adapter: Adapter, distances: dict[str, dict[str, float]], model: Any, told: str) -> None:
    """Assert that each entry point of the engine answered as the trainer would after each of these weight syncs."""
    wrong = {
        (count, entry): distance
        for count, by_entry in distances.items()
        for entry, distance in by_entry.items()
        if not distance < allowed(adapter, model)
    }
    which, largest = " and the ".join(dict.fromkeys(count for count, _ in wrong)), max(wrong.values(), default=0.0)
    entries = " and ".join(dict.fromkeys(entry for _, entry in wrong))
    told = f"{told} the {which} weight sync: asked through {entries}, the engine is {largest:.3g} nats away from the trainer"
    assert_true(not wrong, told, quantity=f"nats after the {which} sync", magnitude=largest, compared=len(distances))


@check("sync.every_time", needs=("sync_weights",), worlds=("tied_and_biased", "lora", "router"))
def every_time(adapter: Adapter, model: Any) -> None:
    """The engine computes the same as the trainer after the first weight sync and after each later one, however it is asked.

    Silent because samples of an old policy look normal: rewards stall or creep, and a test with a single sync passes.
    Look for a sync behind a flag or a condition, for derived weights (packed, quantised, absorbed) that are made once, for
    a destination that is resolved at the start, and for asynchronous requests that name no adapter (LoRA).
    """
    state, engine = _pair(adapter, model)
    distances: dict[str, dict[str, float]] = {}
    for count in ("first", "second", "third"):
        if distances:
            moved_on(adapter, state)
        adapter.sync_weights(state, engine)
        distances[count] = gaps(engine, state.model, SHORT)
    _assert_in_step(adapter, distances, state.model, "after")


def _prefixes() -> Iterator[Case]:
    yield Case()
    yield Case("a request on the way", on_the_way=True)


@check("sync.cached_prefixes", needs=("sync_weights",), cases=_prefixes, worlds=("sliding_window",))
def cached_prefixes(adapter: Adapter, model: Any, on_the_way: bool = False) -> None:
    """A weight sync invalidates cached prefixes: no keys and values of the old weights are used afterwards.

    Silent because only prompts that were seen before are off, by half a nat, sampled from a mix of two policies.
    Look for the reset of the prefix cache, for the conditions around it, and whether it comes after the weights.
    """
    state, engine = _pair(adapter, model)
    if on_the_way:
        if not (adapter.conventions.sync_while_sampling and isinstance(engine, InProcessEngine)):
            raise NothingToCompare("no request is sampled before the weights that a sync brings")
        sampling_first(engine, LONG)
    distances: dict[str, dict[str, float]] = {}
    for count in ("first", "second"):
        if distances:
            moved_on(adapter, state)
        engine.generate([LONG], sampling())
        adapter.sync_weights(state, engine)
        distances[count] = gaps(engine, state.model, LONG)
    _assert_in_step(adapter, distances, state.model, f"on a prompt of {len(LONG)} tokens that was cached before")


@check("sync.every_parameter", needs=("sync_weights",))
def every_parameter(adapter: Adapter, model: Any) -> None:
    """A change of any one parameter reaches the engine.

    Silent because an engine that lacks one tensor is one percent off, which passes as noise of the kernels. Look for name
    maps, for prefixes that wrappers add, for adapters without their base, and for fused or transposed layouts.
    """
    state, engine = _pair(adapter, model)
    adapter.sync_weights(state, engine)
    missing, judged = [], 0
    for name in sorted(synced(adapter, state)):
        before = named(state.model)[name].detach().clone()
        if not _disturbed(adapter, state, engine, name):
            leave_out(f"noise on {name} does not change the next token's logprobs")
            continue
        adapter.sync_weights(state, engine)
        judged += 1
        if not gap(engine, state.model, SHORT, max_new_tokens=1) < allowed(adapter, state.model):
            missing.append(name)
        # Restore it, so that the next parameter is tested alone.
        _put(state, name, before)
        adapter.sync_weights(state, engine)
    told = f"changes of these parameters do not reach the engine: {', '.join(missing)}"
    assert_true(not missing, told, quantity="parameters", magnitude=len(missing), compared=judged)


@check("sync.small_steps", needs=("sync_weights",))
def small_steps(adapter: Adapter, model: Any) -> None:
    """Steps that are too small to matter alone add up in the engine as they do in the trainer.

    Silent because each sync leaves the engine almost right, and at the learning rates of RL every step is small: the engine
    stays behind further and further. Look for weights that are sent only if they moved by more than a threshold since the
    last sync, and for differences that are sent rounded.
    """
    state, engine = _pair(adapter, model)
    if precision(state.model) not in (torch.float32, torch.float64):
        raise NotProvided("such steps round to nothing in half precision")
    adapter.sync_weights(state, engine)
    start = gaps(engine, state.model, SHORT)
    behind = copied(state.model)
    for _ in range(100):
        nudged(state.model, 5e-5, synced(adapter, state))
        adapter.sync_weights(state, engine)
    batch, _ = reference.make_batch(PAIR, 0)
    if not policy_gap(state, behind, batch) > 4 * allowed(adapter, state.model):
        raise NothingToCompare("a hundred small steps do not change the policy's logprobs")
    distances = {"first": start, "last of 100": gaps(engine, state.model, SHORT)}
    _assert_in_step(adapter, distances, state.model, "with small steps between weight syncs, after")


@check("sync.every_engine", needs=("sync_weights",))
def every_engine(adapter: Adapter, model: Any) -> None:
    """Each engine gets all weights, also one that joins after another was synced and held other weights before.

    Silent because an engine that restarted, or joined late, samples good text from an old policy. Look for weights that are
    sent only where they changed since the last sync, and for a record of what was sent that belongs to no engine.
    """
    state, engine = _pair(adapter, model)
    adapter.sync_weights(state, engine)
    late = adapter.new_engine(nudged(copied(model), 0.5, synced(adapter, state)))
    adapter.sync_weights(state, late)
    distances = {"first": gaps(engine, state.model, SHORT), "second": gaps(late, state.model, SHORT)}
    _assert_in_step(adapter, distances, state.model, "two engines were synced to one state; after")


@check("sync.tied_weights", needs=("sync_weights",))
def tied_weights(adapter: Adapter) -> None:
    """A weight sync updates both embedding and output layer if they share weights.

    Silent because a state dict lists one of the two names, and the engine keeps the other one's old values. Look for
    names that are skipped as duplicates, and for a replacement of parameters that unties them.
    """
    state, engine = _pair(adapter, tiny_policy(tied=True))
    adapter.sync_weights(state, engine)
    _assert_in_step(adapter, {"first": gaps(engine, state.model, SHORT)}, state.model, "with tied weights, after")


def _turns() -> Iterator[Case]:
    yield Case("one engine", turns=[0, 0])
    yield Case("two engines", turns=[0, 1, 0])


@check("sync.version", needs=("sync_weights",), cases=_turns)
def version(adapter: Adapter, model: Any, turns: Sequence[int]) -> None:
    """Each weight sync raises the version of its engine by exactly 1.

    Silent because versions only decide which samples are too old: counted twice, half of the allowed lag is thrown away,
    and long completions with it; counted on another engine, the samples of this one soon all are too old. Look for
    increments in both the caller and the callee, and for engines that are registered under one name.
    """
    state, first = _pair(adapter, model)
    engines = [first, *(adapter.new_engine(model) for _ in range(max(turns)))]
    grown = []
    for turn in turns:
        start = engines[turn].version
        adapter.sync_weights(state, engines[turn])
        grown.append(engines[turn].version - start)
    told = f"weight syncs of engine {', '.join(str(turn + 1) for turn in turns)} did not raise its version by 1 each"
    assert_equal(grown, [1] * len(turns), told, quantity="version")


@check("sync.interrupted", needs=("sync_weights",))
def interrupted(adapter: Adapter, model: Any) -> None:
    """An interrupted weight sync raises or is completed; it never counts as done.

    Silent because a half-loaded engine goes on sampling, under the version of a policy that it does not hold. Look for
    a version that is raised in `finally`, and for an except around the transfer.
    """
    state, engine = _pair(adapter, model)
    engine = breaking_off(engine)
    patched, start = engine.load_weights, engine.version

    def sync() -> bool:
        adapter.sync_weights(state, engine)
        return True

    is_done = unless_raised(sync)
    if engine.load_weights is patched:
        raise NothingToCompare("the weights did not pass through the engine's `load_weights`")
    if not is_done:
        assert_true(engine.version == start, "a weight sync broke off half-way and counts as a version")
    else:
        bound = allowed(adapter, state.model)
        holds = all(distance < bound for distance in gaps(engine, state.model, SHORT).values())
        assert_true(holds, "a weight sync broke off half-way and was not reported")


@check("sync.trainer_untouched", needs=("sync_weights",))
def trainer_untouched(adapter: Adapter, model: Any) -> None:
    """A weight sync does not change the trainer's weights: neither value nor dtype nor device.

    Silent because weights that were cast for the transfer, merged with their adapter or moved still train, from
    slightly different values. Look for conversions in place, and for a merge that is not undone.
    """
    state, engine = _pair(adapter, model)
    before = copy.deepcopy(named(state.model))
    adapter.sync_weights(state, engine)
    after = named(state.model)
    wrong = [name for name, parameter in before.items() if name not in after or not _is_kept(parameter, after[name])]
    told = f"a weight sync changed {len(wrong)} of the trainer's parameters: {', '.join(wrong[:1])}"
    assert_true(not wrong, told, quantity="parameters", magnitude=len(wrong), compared=len(before))


@check("sync.same_policy", needs=("sync_weights",), worlds=("config_dtype",))
def same_policy(adapter: Adapter, model: Any) -> None:
    """A new state still equals the model it was made from after a weight sync, and so does the engine.

    Silent because trainer and engine agree with each other, but not with the checkpoint. Look for loading by name that
    ignores missing weights, and for traces of a merge of adapters.
    """
    state = state_of(adapter, copied(model))
    engine = adapter.new_engine(nudged(copied(model), only=synced(adapter, state)))
    adapter.sync_weights(state, engine)
    batch, _ = reference.make_batch(PAIR, 0)
    distances = {
        "the trainer": (policy_gap(state, model, batch), nats(state.model)),
    }
    for entry, distance in gaps(engine, model.to(precision(state.model)), SHORT).items():
        distances[f"the engine, asked through {entry},"] = distance, allowed(adapter, state.model)
    for which, (distance, bound) in distances.items():
        told = (
            f"after the weight sync of a new state {which} is {distance:.3g} nats away from the model it was made from"
        )
        assert_true(distance < bound, told, quantity="nats", magnitude=distance)


def _start(adapter: Adapter, model: Any) -> tuple[Any, Any]:
    """Make a state that can be updated and evaluated, and an engine of the same weights."""
    ref_model = reference_near(model, adapter.conventions)
    state = with_items(state_of(adapter, copied(model), ref_model, LEARNING_RATE))
    return state, adapter.new_engine(copied(model))


def _take(adapter: Adapter, step: str, state: Any, engine: Any) -> None:
    if step == "update":
        seeded(adapter.train_step, state, sampled(state.model, adapter.conventions, PAIR))
    elif step == "sync":
        adapter.sync_weights(state, engine)
    elif step == "evaluate":
        adapter.evaluate(state)
    else:
        engine.generate([LONG], sampling())


def _possible(adapter: Adapter, steps: Sequence[str]) -> list[str]:
    return [step for step in steps if step != "evaluate" or "evaluate" in provided(adapter)]


def _orders() -> Iterator[Case]:
    for steps in (
        ["update", "sync", "update"],
        ["sync", "sample", "update", "evaluate", "sync", "sample", "update", "evaluate", "sync", "update"],
    ):
        yield Case(" ".join(steps), steps=steps)


def _drawn(rng: Generator, size: int) -> Case:
    steps = [STEPS[whole(rng, 0, 3)] for _ in range(whole(rng, 1, size + 2))]
    return Case(steps=["update", *steps, "update"])


@check("sync.training_goes_on", needs=("train_step", "sync_weights"), cases=_orders, draws=_drawn)
def training_goes_on(adapter: Adapter, model: Any, steps: Sequence[str]) -> None:
    """Training after any weight syncs, evaluations and samples continues as it would have without them.

    Silent because runs that sync or evaluate at other times are never compared. Look for weights that are merged, cast or
    swapped for the engine and put back only the first time, for an evaluation that clears what the optimizer keeps, and
    for modes, gradients and hooks that outlive their step.
    """
    taken = _possible(adapter, steps)
    ends = []
    for steps_of_run in (taken, [step for step in taken if step == "update"]):
        state, engine = _start(adapter, model)
        for step in steps_of_run:
            _take(adapter, step, state, engine)
        ends.append(state)
    batch, _ = reference.make_batch(GROUPS, 0)
    distance = policy_gap(ends[0], ends[1].model, batch)
    told = f"after {', '.join(taken)} the policy is {distance:.3g} nats away from where the updates alone lead"
    assert_true(distance < nats(state.model), told, quantity="nats", magnitude=distance)


@check("sync.stays_in_step", needs=("train_step", "sync_weights"), cases=_orders, draws=_drawn)
def stays_in_step(adapter: Adapter, model: Any, steps: Sequence[str]) -> None:
    """From each weight sync to the next update the engine samples from the policy, whatever lies before and between.

    Silent because a sampler that is one update behind, or holds the weights of an evaluation, samples good text. Look for
    a sync that is skipped because nothing seems to have changed, for weights that are resolved once, and for an evaluation
    that leaves its own weights or prefixes in the engine.
    """
    state, engine = _start(adapter, model)
    batch, _ = reference.make_batch(PAIR, 0)
    before_BT = own_logprobs(state.model, batch)
    taken = _possible(adapter, steps)
    distances, is_in_step = {}, False
    for place, step in enumerate(taken, 1):
        _take(adapter, step, state, engine)
        is_in_step = step == "sync" or (is_in_step and step != "update")
        if is_in_step:
            for entry, distance in gaps(engine, state.model, LONG).items():
                distances[f"{step} (step {place}) through {entry}"] = distance
    bound = allowed(adapter, state.model)
    if not float((own_logprobs(state.model, batch) - before_BT).abs().max()) > 4 * bound:
        raise NothingToCompare("the updates do not change the policy's logprobs")
    wrong = {name: distance for name, distance in distances.items() if not distance < bound}
    largest = max(wrong.values(), default=0.0)
    told = f"in the order {', '.join(taken)} the engine is {largest:.3g} nats away from the trainer after {', '.join(wrong)}"
    assert_true(not wrong, told, quantity="nats", magnitude=largest, compared=len(distances))


def _disturbed(adapter: Adapter, state: Any, engine: Any, name: str) -> bool:
    """Add noise to one parameter, enough to move the next token's logprobs away from the engine's.

    Returns:
        False if noise on this parameter does not change the model's output. The parameter is restored.
    """
    before = named(state.model)[name].detach().clone()
    noise = torch.randn(before.shape, generator=torch.Generator().manual_seed(1)) * sizes_of(state.model)[name]
    for doubling in range(8):
        _put(state, name, before + (noise * 2.0 ** (doubling - 1)).to(before))
        if gap(engine, state.model, SHORT, max_new_tokens=1) > 4 * allowed(adapter, state.model):
            return True
    _put(state, name, before)
    return False


def _put(state: Any, name: str, value: Tensor) -> None:
    """Set a parameter's value, and that of the copy that the optimizer moves, if there is one."""
    parameter, copies = named(state.model)[name], held(state)[0]
    with torch.no_grad():
        for tensor in (parameter, copies.get(name, parameter)):
            tensor.copy_(value)


def _is_kept(before: Tensor, after: Tensor) -> bool:
    """Tell whether a parameter kept its dtype and, except for the last bit of an undone merge, its value."""
    allowed = 2 * torch.finfo(before.dtype).eps * before.abs().max()
    is_same_kind = before.dtype == after.dtype and before.requires_grad == after.requires_grad
    return is_same_kind and bool(((after - before).abs() <= allowed).all())
