"""The whole path from token ids to logprobs: the same completion scores the same in every batch."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_close
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.groups import PADDING_IDS, sampled
from rlcanary.checks.worlds.rows import one_of
from rlcanary.checks.worlds.samples import trainer_logprobs
from rlcanary.checks.worlds.training.states import nats, own_logprobs, precision
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import CollatedBatch, Completion, Group

# Prompts and completions of different lengths, one prompt as long as its completion, ids that serve as padding elsewhere,
# tokens of a tool within a completion.
GROUPS = [
    Group([5, 6, 7], [Completion([8, 9, 2]), Completion([10])], [1.0, 0.0]),
    Group([11, 12, 13, 14, 15], [Completion([16, 17, 18, 19, 2]), Completion([20, 0, 21])], [1.0, 0.0]),
    Group([22], [Completion([23, 24])], [1.0]),
    Group([25, 26], [Completion([27, 28, 29, 30, 31], sampled=[True, False, False, True, True])], [1.0]),
    # The longest prompt, whose completion is short.
    Group([32, 33, 34, 35, 36, 37, 38], [Completion([39, 2])], [1.0]),
]
# A row of a single token, which is nothing but its prompt, between others.
WITH_NOTHING_SAMPLED = [
    Group([5, 6], [Completion([8, 9])], [1.0]),
    Group([7], [Completion([])], [0.0]),
    Group([10, 11, 12], [Completion([13]), Completion([14, 15])], [1.0, 0.0]),
]
# Long rows and short ones in turn, which do not fit together into one pack or micro-batch of a few dozen tokens.
MANY = [
    Group([5 + row, 6], [Completion([8 + (7 * row + position) % 50 for position in range(length)])], [1.0])
    for row, length in enumerate((1, 37, 2, 24, 5, 40, 3, 200))
]

# Models that do more behind their output layer than a product of hidden states and weights.
HEADS = ("capped_logits", "scaled_logits", "composite")


def _groups() -> Iterator[Case]:
    yield Case(groups=GROUPS)


def _few_and_many() -> Iterator[Case]:
    yield from _groups()
    yield Case("8 rows of 1 to 200 tokens", groups=MANY)


def _drawn(rng: Generator, size: int) -> Case:
    return Case(groups=sampled(rng, size))


def _assert_as_alone(
    score: Callable[..., Tensor],
    model: Any,
    groups: list[Group],
    batch: CollatedBatch,
    message: str,
    temperature: float = 1.0,
) -> None:
    """Assert that completions of a batch get the logprobs that each gets in a batch of its own, without padding."""
    got_BT = score(model, copy.deepcopy(batch), temperature)
    exact_BT = torch.zeros(batch.completion_mask.shape, dtype=torch.float64)
    allowed = 0.0 if precision(model) == torch.float32 else nats(model)
    alone = [(group.prompt_ids, completion) for group in groups for completion in group.completions]
    for row, (prompt, completion) in enumerate(alone):
        length = len(completion.token_ids)
        exact_BT[row, :length] = trainer_logprobs(model, prompt, completion.token_ids, temperature)
        if allowed and length:
            single, _ = reference.make_batch([Group(prompt, [completion], [0.0])], pad_token_id=0)
            error_T = (own_logprobs(model, single, temperature)[0] - exact_BT[row, :length])[single.completion_mask[0]]
            # Half precision rounds the same sequence otherwise in another batch.
            allowed = max([allowed, *(3 * error_T.abs()).tolist()])
    # Attention over padded rows sums in another order; logits of this model are of the order of 10.
    within = (0.0, allowed) if allowed else None
    assert_close(got_BT, exact_BT, message, where=batch.completion_mask, scale=10, within=within)


@check(
    "forward.scores_each_token_at_its_place",
    needs=("completion_logprobs",),
    cases=_few_and_many,
    draws=_drawn,
    worlds=("router", *HEADS),
)
def scores_each_token_at_its_place(adapter: Adapter, model: Any, groups: list[Group]) -> None:
    """Every completion token is scored by the logits at the position before it, for prompts of any length.

    Silent because logits one position off, or of the neighbouring row, are logits: the loss falls and the policy learns
    noise. Look for a slice of the last T positions, a shift on one side only, and one prompt length for all rows.
    """
    batch, _ = reference.make_batch(groups, pad_token_id=0)
    _assert_as_alone(
        adapter.completion_logprobs, model, groups, batch, "logprobs differ from those of each sequence alone"
    )


def _paddings() -> Iterator[Case]:
    layouts: dict[str, dict[str, Any]] = {
        "more padding on the right": {"pad_token_id": 0, "seq_len_buckets": [16]},
        "padding on the left": {"pad_token_id": 0, "prompt_padding": "left"},
        # Both ids are also tokens of these completions.
        "padding with the id 2": {"pad_token_id": 2},
        "padding with the id 21": {"pad_token_id": 21},
    }
    for told, layout in layouts.items():
        yield Case(told, groups=GROUPS, told=told, layout=layout)


def _drawn_layout(rng: Generator, size: int) -> Case:
    pad, side, wider = one_of(rng, PADDING_IDS), one_of(rng, ("left", "right")), one_of(rng, (None, [40]))
    layout = {"pad_token_id": pad, "prompt_padding": side, "seq_len_buckets": wider}
    return Case(groups=sampled(rng, size), told=f"padding with the id {pad} on the {side}", layout=layout)


@check(
    "forward.padding",
    needs=("completion_logprobs",),
    cases=_paddings,
    draws=_drawn_layout,
    worlds=("learned_positions", "convolution", "bfloat16"),
)
def padding(adapter: Adapter, model: Any, groups: list[Group], told: str, layout: dict[str, Any]) -> None:
    """Neither the side nor the amount nor the id of the padding changes a completion's logprobs.

    Silent because policy and reference are off by the same amount, so that the KL looks fine: a short prompt scores
    differently in a batch with a long one. Look for a forward pass without attention mask, and for positions that count
    padding.
    """
    batch, _ = reference.make_batch(groups, **layout)
    _assert_as_alone(adapter.completion_logprobs, model, groups, batch, f"{told} changed the logprobs")


def _sides() -> Iterator[Case]:
    yield from _groups()
    yield Case("padding on the left", groups=GROUPS, side="left")


@check("forward.garbage_in_padding", needs=("completion_logprobs",), cases=_sides, worlds=("router",), draws=_drawn)
def garbage_in_padding(
    adapter: Adapter, model: Any, groups: list[Group], side: Literal["left", "right"] = "right"
) -> None:
    """The ids in the padding do not change the logprobs.

    Silent because padding ids are usually constant, and the model adapts to them. Look for masks made from ids instead
    of lengths, and for attention to padding after the end.
    """
    batch, _ = reference.make_batch(groups, pad_token_id=0, prompt_padding=side)
    dirty_BS = torch.where(batch.attention_mask, batch.input_ids, 33)
    lengths_B = torch.tensor([len(completion.token_ids) for group in groups for completion in group.completions])
    is_token_BT = reference.lengths_to_mask(lengths_B, batch.completion_ids.shape[1])
    dirty_BT = torch.where(is_token_BT, batch.completion_ids, 33)
    dirty = replace(batch, input_ids=dirty_BS, completion_ids=dirty_BT)
    _assert_as_alone(
        adapter.completion_logprobs, model, groups, dirty, "ordinary ids in the padding changed the logprobs"
    )


def _temperatures() -> Iterator[Case]:
    for temperature in (0.6, 1.5):
        yield Case(f"temperature {temperature}", groups=GROUPS, temperature=temperature)


@check("forward.temperature", needs=("completion_logprobs",), cases=_temperatures, worlds=HEADS)
def applies_the_temperature(adapter: Adapter, model: Any, groups: list[Group], temperature: float) -> None:
    """The forward path applies the sampling temperature, once.

    Silent because only one of several paths may omit it (one backend, or the old logprobs): the ratio is then off at
    every token and clipping hides it. Look at each path that turns logits into logprobs.
    """
    batch, _ = reference.make_batch(groups, pad_token_id=0)
    told = f"at temperature {temperature} the forward path scores another distribution"
    _assert_as_alone(adapter.completion_logprobs, model, groups, batch, told, temperature)


def _packed() -> Iterator[Case]:
    for temperature in (1.0, 0.6):
        yield Case(f"temperature {temperature}", groups=GROUPS, temperature=temperature)
    yield Case("a row of a single token", groups=WITH_NOTHING_SAMPLED, temperature=1.0)
    yield Case("8 rows of 1 to 40 tokens", groups=MANY, temperature=1.0)


@check(
    "forward.packing",
    needs=("packed_logprobs",),
    cases=_packed,
    draws=lambda rng, size: Case(groups=sampled(rng, size, empty=True), temperature=1.0),
    worlds=("learned_positions", "sliding_window", "convolution", *HEADS),
)
def packing(adapter: Adapter, model: Any, groups: list[Group], temperature: float) -> None:
    """Rows packed into one sequence get the same logprobs as alone, at every temperature.

    Silent because attention across the seam between two documents still gives probabilities. Look at the boundaries
    (cumulative lengths that start at 0 and end at the number of tokens), at positions that start anew, at whether this
    path gets the temperature, and whether rows of several packs come back in the order of the batch.
    """
    batch, _ = reference.make_batch(groups, pad_token_id=0)
    _assert_as_alone(
        adapter.packed_logprobs, model, groups, batch, "packed rows score differently from each row alone", temperature
    )


@check("forward.earlier_calls", needs=("completion_logprobs",))
def earlier_calls(adapter: Adapter, model: Any) -> None:
    """Scores do not depend on earlier calls: the same rows are scored again, in another order between.

    Silent because the first batch is right. Look for masks and positions that are cached under a shape, and for inputs
    that a call leaves changed.
    """
    _assert_unaffected(adapter.completion_logprobs, model)


@check("forward.earlier_packings", needs=("packed_logprobs",))
def earlier_packings(adapter: Adapter, model: Any) -> None:
    """Scores of packed rows do not depend on earlier calls: the same rows are packed again, in another order between.

    Silent because the first batch is right. Look for masks and boundaries that are cached under a length or a number of
    tokens.
    """
    _assert_unaffected(adapter.packed_logprobs, model)


def _assert_unaffected(score: Callable[..., Tensor], model: Any) -> None:
    for told, groups in (("in order", GROUPS), ("in reverse", GROUPS[::-1]), ("in order again", GROUPS)):
        batch, _ = reference.make_batch(groups, pad_token_id=0)
        _assert_as_alone(score, model, groups, batch, f"the rows {told}: logprobs differ from those of each row alone")
