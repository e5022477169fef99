"""The critic: values of the right states, and a loss that trains them as declared."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, assert_metrics, assert_true, gradient, soft, unless_raised
from rlcanary.checks.case import Case, Model
from rlcanary.checks.check import check, other_values
from rlcanary.checks.worlds import inputs, rows
from rlcanary.checks.worlds.credit import drawn_values, tiny_critic, value_batch
from rlcanary.checks.worlds.groups import PADDING_IDS, sampled
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.conventions import Aggregation, Conventions
from rlcanary.contract.records.credit import ValueBatch

CRITIC = Model("", tiny_critic)
GROUPS = [
    Group([5, 6, 7], [Completion([8, 9, 2]), Completion([10])], [1.0, 0.0]),
    Group([11], [Completion([12, 13, 14, 15, 2], sampled=[True, False, False, True, True])], [1.0]),
    Group([16, 17, 18, 19, 20], [Completion([21, 0])], [1.0]),
]


# The declared loss, those with and without clipping, and those of other aggregations.
KINDS: dict[str, dict[str, Any]] = {
    "": {},
    **{f"clip {clip}": {"value_clip": clip} for clip in (None, 0.2)},
    **{name: {"value_aggregation": name} for name in ("token_mean", "sequence_mean", "group_token_mean")},
}


def _value_batches(rng: Generator) -> Iterator[Case]:
    for kind, changes in KINDS.items():
        for shape in (*inputs.SHAPES, inputs.WITH_EMPTY_ROW):
            yield Case(*shape[:2], within=kind, changes=changes, batch=value_batch(rng, *shape))
    for shape in inputs.LARGE:
        yield Case(*shape[:2], batch=value_batch(rng, *shape))


def _drawn(rng: Generator, size: int) -> Case:
    return Case(changes=rows.one_of(rng, list(KINDS.values())), batch=drawn_values(rng, size))


def _other_losses(conventions: Conventions) -> list[dict[str, Any]]:
    """List the declarations that differ in one field."""
    choices = {"value_coef": (0.5, 1.0), "value_clip": (None,), "value_aggregation": get_args(Aggregation)}
    return other_values(conventions, choices)


@check(
    "value.declared_loss",
    needs=("value_loss",),
    cases=_value_batches,
    alternatives=_other_losses,
    draws=_drawn,
)
def declared_loss(adapter: Adapter, batch: ValueBatch) -> None:
    """The critic's loss and its gradient are the declared ones: squared error, clip, coefficient, aggregation and mask.

    Silent because the loss falls with any factor and any mask, and twice the gradient is twice the critic's learning rate.
    Look at the factor of one half, at the mask, at what the sum is divided by, and at the larger of the two errors.
    """
    exact = replace(batch, values=batch.values.detach().double().requires_grad_())
    expected = reference.value_loss(exact, adapter.conventions)
    # What stands outside the mask has no meaning.
    given = replace(batch, returns=torch.where(batch.mask, batch.returns, 7.0))
    output = adapter.value_loss(inputs.fresh(given))
    told = f"of the critic is not the declared one ({_terms(adapter.conventions)})"
    with soft():
        assert_close(output.loss, expected.loss, f"the loss {told}")
    with soft():
        expected_BT = gradient(expected.loss, exact.values)
        assert_close(gradient(output.loss, batch.values), expected_BT, f"the gradient {told}", quantity="gradient")
    assert_metrics(output, expected.metrics, "as declared")


def _terms(conventions: Conventions) -> str:
    clip = "" if conventions.value_clip is None else f", clip {conventions.value_clip:g}"
    return f"{conventions.value_coef:g} times the squared error, {conventions.value_aggregation}{clip}"


def _garbage(rng: Generator) -> Iterator[Case]:
    batch = value_batch(rng, 2, 3, (3, 1))
    for name in ("values", "returns", "old_values"):
        for garbage in (-50.0, math.nan, math.inf, -math.inf):
            yield Case(garbage, within=name, changes={"value_clip": 0.2}, batch=batch, name=name, garbage=garbage)


@check("value.masked_positions", needs=("value_loss",), cases=_garbage)
def masked_positions(adapter: Adapter, batch: ValueBatch, name: str, garbage: float) -> None:
    """Values at masked positions, NaN and infinities included, change no loss, no gradient and no metric.

    Silent because a mask by multiplication turns NaN × 0 into NaN for the whole batch, and `torch.where` behind the
    arithmetic saves the loss and not the gradient. Look for `x * mask` and for `where` around the result; `torch.where` or
    `masked_fill` before the arithmetic is immune.
    """
    filled_BT = getattr(batch, name).detach().masked_fill(~batch.mask, garbage)
    filled = replace(batch, **{name: filled_BT.requires_grad_(name == "values")})
    before, after = adapter.value_loss(inputs.fresh(batch)), unless_raised(adapter.value_loss, inputs.fresh(filled))
    if after is None:
        return
    told = f"{garbage} at the masked positions of {name}"
    with soft():
        assert_close(after.loss, before.loss, f"{told} changed the loss")
    with soft():
        expected_BT = gradient(before.loss, batch.values)
        assert_close(
            gradient(after.loss, filled.values), expected_BT, f"{told} changed the gradient", quantity="gradient"
        )
    assert_metrics(after, before.metrics, f"without {told}")


def _one_token(conventions: Conventions) -> Iterator[Case]:
    # One token is its own mean and its own sum.
    is_constant = conventions.value_aggregation == "constant"
    changes = {"value_clip": 0.2, **({"value_aggregation": "token_mean"} if is_constant else {})}
    for moved in (0.1, 0.5, -0.1, -0.5):
        for wanted in (-1.0, 0.15, 0.45, 1.0):
            yield Case(f"moved by {moved}, wanted {wanted}", changes=changes, moved=moved, wanted=wanted)


@check("value.clip_is_pessimistic", needs=("value_loss",), cases=_one_token)
def clip_is_pessimistic(adapter: Adapter, moved: float, wanted: float) -> None:
    """Clipping the value never makes the loss of a token smaller than its squared error.

    Silent because the smaller error is a loss too: values that are far off and moved further then have no gradient and
    stay there. Look for `min` in place of `max`, copied from the policy's surrogate.
    """
    values_11, mask_11 = torch.tensor([[moved]], requires_grad=True), torch.ones(1, 1, dtype=torch.bool)
    returns_11, old_11, group_ids_1 = torch.tensor([[wanted]]), torch.zeros(1, 1), torch.zeros(1, dtype=torch.long)
    batch = ValueBatch(values_11, returns_11, mask_11, old_11, group_ids_1)
    loss = float(adapter.value_loss(inputs.fresh(batch)).loss.detach())
    unclipped = adapter.conventions.value_coef * (moved - wanted) ** 2
    told = f"a value that moved by {moved:g} towards {wanted:g} has loss {loss:.4g}, without clipping {unclipped:.4g}"
    assert_true(loss >= unclipped - 1e-5, told, quantity="value", magnitude=unclipped - loss)


def _pieces(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    for name in dict.fromkeys((conventions.value_aggregation, "token_mean", "sequence_mean")):
        for lengths, pieces in (((4, 3, 1, 1), [[0, 1], [2, 3]]), ((1, 4, 2, 0, 5, 5), [[0, 1, 2, 3], [4, 5]])):
            batch = value_batch(rng, len(lengths), max(lengths), lengths)
            yield Case(lengths, within=name, changes={"value_aggregation": name}, batch=batch, pieces=pieces)


@check("value.pieces_add_up", needs=("value_loss",), cases=_pieces)
def pieces_add_up(adapter: Adapter, batch: ValueBatch, pieces: list[list[int]]) -> None:
    """The losses of micro-batches that know the counts of the whole update add up to the loss of the whole.

    Silent because the mean of the pieces' means is near the mean: the weight of the critic's loss, and of the tokens of
    short pieces, then depends on the accumulation. Look for a mean over the micro-batch beside a policy loss that is scaled
    by the whole.
    """
    counting = adapter.conventions.replace(aggregation=adapter.conventions.value_aggregation)
    tokens, sequences = float(batch.mask.sum()), reference.count_sequences(batch, counting)
    whole = adapter.value_loss(inputs.fresh(batch))
    expected = reference.value_loss(batch, adapter.conventions)
    parts = []
    for piece in pieces:
        chosen = {name: value[piece] for name, value in vars(batch).items() if isinstance(value, Tensor)}
        parts.append(adapter.value_loss(ValueBatch(**chosen, global_tokens=tokens, global_sequences=sequences)).loss)
    told = f"the losses of {len(pieces)} micro-batches do not add up to"
    total = torch.stack(parts).sum()
    with soft():
        assert_close(total, whole.loss, f"{told} the loss of the whole")
    expected_BT = gradient(expected.loss, batch.values)
    assert_close(gradient(total, batch.values), expected_BT, f"{told} the whole's gradient", quantity="gradient")


def _paddings() -> Iterator[Case]:
    for told, layout in {
        "padding on the right": {"pad_token_id": 0},
        "padding on the left": {"pad_token_id": 0, "prompt_padding": "left"},
        "padding with the id 21": {"pad_token_id": 21},
    }.items():
        yield Case(told, critic=CRITIC, groups=GROUPS, layout=layout)
    temperature = {"temperature": 0.5}
    yield Case(temperature, changes=temperature, critic=CRITIC, groups=GROUPS, layout={"pad_token_id": 0})


def _drawn_layout(rng: Generator, size: int) -> Case:
    layout = {"pad_token_id": rows.one_of(rng, PADDING_IDS), "prompt_padding": rows.one_of(rng, ("left", "right"))}
    return Case(critic=CRITIC, groups=sampled(rng, size), layout=layout)


@check("value.as_alone", needs=("values",), cases=_paddings, draws=_drawn_layout)
def as_alone(adapter: Adapter, critic: Any, groups: list[Group], layout: dict[str, Any]) -> None:
    """The value before each completion token is the critic's for the row alone, up to there, at any temperature.

    Silent because values of other states are of the same size, and the critic's loss falls. Look for positions and masks
    that count padding, for slices by the width of the batch, and for the temperature of the logits on the critic's path.
    """
    batch, _ = reference.make_batch(groups, **layout)
    alone_BT = torch.zeros(batch.completion_mask.shape)
    with torch.no_grad():
        for row_T, (prompt, answer) in zip(alone_BT, _sequences(groups), strict=True):
            ids_1S = torch.tensor([[*prompt, *answer]])
            values_S = critic(input_ids=ids_1S, attention_mask=torch.ones_like(ids_1S)).logits[0, :, 0]
            row_T[: len(answer)] = values_S[len(prompt) - 1 : -1]
    told = "values of the batch are not those of each row alone"
    assert_close(adapter.values(critic, batch), alone_BT, told, where=batch.completion_mask)


def _sequences(groups: list[Group]) -> list[tuple[list[int], list[int]]]:
    return [(list(group.prompt_ids), list(each.token_ids)) for group in groups for each in group.completions]


def _places() -> Iterator[Case]:
    for place in (0, 1, 2):
        yield Case(f"token {place}", critic=CRITIC, place=place)


@check("value.before_the_token", needs=("values",), cases=_places)
def before_the_token(adapter: Adapter, critic: Any, place: int) -> None:
    """Another token changes the values behind it, from the very next on, and none up to its own.

    Silent because a critic that is paired with the token before or after still learns: the advantage is then that of
    another action. Look at the slice of the values beside that of the logprobs, which both start one position before
    the completion.
    """
    tokens = [8, 9, 10, 11]
    other = [*tokens[:place], 40, *tokens[place + 1 :]]
    batches = [reference.make_batch([Group([5, 6, 7], [Completion(each)], [1.0])], 0)[0] for each in (tokens, other)]
    before_T, after_T = (adapter.values(critic, batch).detach()[0] for batch in batches)
    told = f"another token {place} changed the values before it or its own"
    assert_close(after_T[: place + 1], before_T[: place + 1], told)
    difference = float((after_T[place + 1] - before_T[place + 1]).abs())
    told = f"another token {place} did not change the value before token {place + 1}"
    assert_true(difference > 1e-4, told, quantity="value of the next token", magnitude=difference)
