"""Weight sync of more than the parameters that an ordinary run sends: buffers, other dtypes, thawed parts, second tries."""

import copy
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from rlcanary.checks.asserts import NothingToCompare, assert_close, assert_equal, assert_true, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.models import part_frozen, scaled
from rlcanary.checks.worlds.samples import allowed, gap, gaps, moved_on, sampling, synced
from rlcanary.checks.worlds.training.states import held, named, nats, nudged, precision, weights_of
from rlcanary.checks.worlds.training.tiny_trainer import state_of, tiny_policy
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.layers import copied

PROMPT = [5, 6, 7]


def _assert_in_step(adapter: Adapter, engine: Any, model: Any, told: str) -> None:
    wrong = {entry: far for entry, far in gaps(engine, model, PROMPT).items() if not far < allowed(adapter, model)}
    largest = max(wrong.values(), default=0.0)
    told = f"{told}, asked through {' and '.join(wrong)}, the engine is {largest:.3g} nats away from the trainer"
    assert_true(not wrong, told, quantity="nats", magnitude=largest)


def _scale(adapter: Adapter, tensors: Sequence[Tensor], factor: float, engine: Any, model: Any, told: str) -> None:
    """Multiply tensors of the trained model until its logprobs are away from the engine's, and no further.

    Logits that are many times as large would round as much more.
    """
    for _ in range(12):
        with torch.no_grad():
            for tensor in tensors:
                tensor.mul_(factor)
        if gap(engine, model, PROMPT) > 4 * allowed(adapter, model):
            return
    raise NothingToCompare(f"{told} not change the next tokens' logprobs")


@check(
    "sync.buffers",
    needs=("sync_weights",),
    applies=lambda declared: None if declared.sync_buffers else "training changes no buffer of the model",
)
def buffers(adapter: Adapter) -> None:
    """Buffers that training changes, such as a router's bias or a scale, reach the engine with the parameters.

    Silent because a buffer is no parameter: an optimizer and a sync by `named_parameters` pass over it, and the engine keeps
    the one of the checkpoint while the routes move away. Look for the bias of a balanced router, for scales that are made
    anew, and for a filter of the state dict.
    """
    state, engine = state_of(adapter, scaled()), adapter.new_engine(scaled())
    for count, factor in (("first", 2.0), ("second", 0.5)):
        scales = [buffer for name, buffer in state.model.named_buffers() if name.endswith("scale")]
        _scale(adapter, scales, factor, engine, state.model, "the buffer does")
        adapter.sync_weights(state, engine)
        _assert_in_step(adapter, engine, state.model, f"after the buffers changed and the {count} weight sync")


@check("sync.repeated_after_an_error", needs=("sync_weights",))
def repeated_after_an_error(adapter: Adapter, model: Any) -> None:
    """A weight sync that follows one that broke off brings all weights, and counts as one.

    Silent because the run goes on as soon as the engine answers again: with what was noted as sent before it arrived, the
    engine keeps old weights beside new ones for good. Look for differences to what was sent last, for buckets that go on
    where they stopped, and for a version or a flag that the failed sync left behind.
    """
    state, engine = moved_on(adapter, state_of(adapter, copied(model))), adapter.new_engine(model)
    start, load_weights = engine.version, engine.load_weights

    def load_some(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        engine.load_weights = load_weights
        load_weights(islice(weights, 3))
        raise ConnectionError("the connection to the engine was lost")

    def sync() -> bool:
        adapter.sync_weights(state, engine)
        return True

    engine.load_weights = load_some
    tries = [unless_raised(sync), unless_raised(sync)]
    if not tries[1]:
        return
    _assert_in_step(adapter, engine, state.model, "after a weight sync that broke off and another one")
    done = sum(each is True for each in tries)
    told = f"{done} of two weight syncs were completed: by how much the engine's version is raised"
    assert_equal(engine.version - start, done, told, quantity="version")


@check(
    "sync.thawed",
    severity="hardening",
    needs=("sync_weights",),
    applies=lambda declared: (
        None if declared.sync_frozen else "the engine keeps the frozen parameters that it has loaded"
    ),
)
def thawed(adapter: Adapter) -> None:
    """A parameter that was frozen at first and is trained later reaches the engine from then on.

    Silent because the engine has the right start values, and only what was thawed stays behind. Look for a list of trainable
    parameters that is made once, and for a sync of what the optimizer held at the start.
    """
    state, engine = state_of(adapter, part_frozen()), adapter.new_engine(part_frozen())
    adapter.sync_weights(state, engine)
    frozen = [parameter for parameter in state.model.parameters() if not parameter.requires_grad]
    if not frozen or not hasattr(state.optimizer, "add_param_group"):
        raise NotProvided("the state thaws all parameters, or its optimizer takes no further ones")
    moved = {id(each) for group in state.optimizer.param_groups for each in group["params"]}
    if new := [parameter for parameter in frozen if id(parameter) not in moved]:
        state.optimizer.add_param_group({"params": new})
    for parameter in frozen:
        parameter.requires_grad_(True)
    for count in ("first", "second"):
        _scale(adapter, frozen, 1.1, engine, state.model, "the thawed parameters do")
        adapter.sync_weights(state, engine)
        _assert_in_step(
            adapter, engine, state.model, f"after a part was thawed and trained, and the {count} weight sync"
        )


@check("sync.other_dtype", needs=("sync_weights",))
def other_dtype(adapter: Adapter, model: Any) -> None:
    """An engine in half precision gets the trainer's weights rounded to it, and the trainer keeps its own.

    Silent because a model that is rounded for the transfer, in place, trains on: steps below half a unit of bfloat16 are
    lost from then on. Look for `model.to(dtype)`, which changes the model itself, and for a cast by bits or through another
    half precision.
    """
    state = moved_on(adapter, state_of(adapter, copied(model)))
    if precision(state.model) not in (torch.float32, torch.float64):
        raise NotProvided("the trainer itself is in half precision")
    engine = adapter.new_engine(nudged(copied(model), 0.5, synced(adapter, state)).bfloat16())
    before = copy.deepcopy(weights_of(state))
    adapter.sync_weights(state, engine)
    after = weights_of(state)
    changed = [name for name, each in before.items() if name not in after or not _is_same(each, after[name])]
    told = f"a weight sync to an engine in bfloat16 changed {len(changed)} of the trainer's weights, as {changed[:1]}"
    assert_true(not changed, told, quantity="parameters", magnitude=len(changed), compared=len(before))
    _assert_in_step(adapter, engine, copied(state.model).bfloat16(), "after a weight sync to an engine in bfloat16")


def _unusual() -> Iterator[Case]:
    yield Case("a row of zeros", has_zeros=True)
    yield Case("memory in another order", has_zeros=False)


@check("sync.unusual_weights", needs=("sync_weights",), cases=_unusual)
def unusual_weights(adapter: Adapter, model: Any, has_zeros: bool) -> None:
    """Weights with a row of zeros, or with memory in another order than that of their shape, reach the engine as they are.

    Silent because hardly a weight is so: a row of padding, an expert that nothing reaches, a matrix that was transposed when
    it was loaded. A block of zeros divided by its own scale is NaN in the engine, and a copy of bytes brings the numbers in
    the wrong places. Look for a scale without a least value, for `view(-1)` and for buckets that are filled by pointers.
    """
    state, engine = moved_on(adapter, state_of(adapter, copied(model))), adapter.new_engine(model)
    parameters, copies = named(state.model), held(state)[0]
    matrices = [name for name in synced(adapter, state) if parameters[name].ndim == 2]
    with torch.no_grad():
        for name in matrices:
            if has_zeros:
                for tensor in (parameters[name], copies.get(name, parameters[name])):
                    tensor[0] = 0
            else:
                parameters[name].data = parameters[name].data.t().contiguous().t()
    adapter.sync_weights(state, engine)
    told = "a row of zeros" if has_zeros else "memory in another order"
    _assert_in_step(adapter, engine, state.model, f"after a weight sync of matrices with {told}")


@check("sync.small_weights", needs=("sync_weights",))
def small_weights(adapter: Adapter) -> None:
    """Weights that are small in one layer and large in the next give the engine's answers as even ones do.

    Silent because a matrix that is rounded to eight bits at a scale of 1 keeps its large entries, loses the small ones, and
    the model talks on. Scaled by powers of two, which its next layer undoes, a model computes the very same, in any
    precision with a scale for each matrix or block. Look at how the scale of each weight is found, and whether it is sent.
    """
    answers = []
    for model in (tiny_policy(), _unevenly_scaled(tiny_policy())):
        state = state_of(adapter, copied(model))
        engine = adapter.new_engine(nudged(copied(model), only=synced(adapter, state)))
        adapter.sync_weights(state, engine)
        ((completion,),) = engine.generate([PROMPT], sampling(temperature=0.0, max_new_tokens=6))
        answers.append(completion)
    even, uneven = answers
    told = (
        "weights that are small in one layer and large in the next compute the same, and the engine goes on with other"
    )
    assert_equal(list(uneven.token_ids), list(even.token_ids), f"{told} tokens", quantity="tokens")
    if even.logprobs is not None and uneven.logprobs is not None:
        got, expected = (torch.tensor(list(each.logprobs or ())) for each in (uneven, even))
        assert_close(got, expected.double(), f"{told} logprobs", within=(0.0, nats(state.model)), quantity="logprobs")


def _unevenly_scaled(model: Any) -> Any:
    """Scale the queries and the gated values of each layer by 1 / 256, and the keys and the way down by 256."""
    factors = {"q_proj.weight": 2.0**-8, "k_proj.weight": 2.0**8, "up_proj.weight": 2.0**-8, "down_proj.weight": 2.0**8}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.mul_(next((factor for end, factor in factors.items() if name.endswith(end)), 1.0))
    return model


def _is_same(before: Tensor, after: Tensor) -> bool:
    """Tell whether a weight kept its dtype and, except for the last bits of an undone merge, its value."""
    allowed = 2 * torch.finfo(before.dtype).eps * before.abs().max()
    return before.dtype == after.dtype and bool(((after - before).abs() <= allowed).all())
