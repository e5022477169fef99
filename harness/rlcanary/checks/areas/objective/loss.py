"""The policy loss: declared value, declared gradient, and independence of irrelevant inputs."""

import copy
import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, assert_metrics, assert_unchanged, gradient, soft, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.checks.worlds.oracle import exact_loss, exact_output
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Aggregation, Conventions

PER_TOKEN = ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "entropy")
ALONG_ROWS = (*PER_TOKEN, "mask")


def _other_aggregations(conventions: Conventions) -> list[dict[str, Any]]:
    return [{"aggregation": name} for name in get_args(Aggregation) if name != conventions.aggregation]


def _assert_declared(adapter: Adapter, batch: PolicyBatch, told: str = "the batch") -> LossOutput:
    loss, gradient_BT = exact_loss(batch, adapter.conventions)
    output = adapter.policy_loss(inputs.fresh(batch))
    with soft():
        assert_close(output.loss, loss, f"{told}: wrong loss")
    with soft():
        assert_close(gradient(output.loss, batch.logprobs), gradient_BT, f"{told}: wrong gradient", quantity="gradient")
    return output


def _drawn(conventions: Conventions, rng: Generator, size: int) -> Case:
    return Case(batch=rows.policy_batch(rng, size, conventions))


def _batches(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    yield from inputs.batches(*inputs.SHAPES, inputs.WITH_EMPTY_ROW, *inputs.LARGE)(rng)
    yield from inputs.around_kl_clamps(conventions)


# An alternative explains a failure if it gives both the value and the gradient.
_declared = partial(
    check,
    needs=("policy_loss",),
    cases=_batches,
    alternatives=_other_aggregations,
    explains=_assert_declared,
    draws=_drawn,
)


@_declared("loss.declared_value")
def declared_value(adapter: Adapter, batch: PolicyBatch) -> None:
    """The loss is the declared objective: ratio, clipping, correction, aggregation, KL and entropy terms.

    Silent because any of these can be off by a factor or on the wrong side and still give a finite, falling number. Look
    at the sign of the surrogate, the side of each clipping bound, and what the sum over tokens is divided by.
    """
    loss, _ = exact_loss(batch, adapter.conventions)
    told = f"the loss is not the declared one ({_terms(adapter.conventions)})"
    assert_close(adapter.policy_loss(inputs.fresh(batch)).loss, loss, told)


@_declared("loss.declared_gradient")
def declared_gradient(adapter: Adapter, batch: PolicyBatch) -> None:
    """The gradient with respect to every token's logprob is that of the declared objective.

    Silent because the logged loss can be exactly right while the gradient is not: a missing or a misplaced detach, a
    division after backward, a weight that carries gradient. Look at `detach()` on old logprobs and importance weights.
    """
    _, gradient_BT = exact_loss(batch, adapter.conventions)
    told = f"the gradient is not that of the declared loss ({_terms(adapter.conventions)})"
    found_BT = gradient(adapter.policy_loss(inputs.fresh(batch)).loss, batch.logprobs)
    assert_close(found_BT, gradient_BT, told, quantity="gradient")


def _terms(conventions: Conventions) -> str:
    pieces = (conventions.objective, f"{conventions.ratio_level} ratio", conventions.aggregation)
    terms = [getattr(piece, "__name__", str(piece)) for piece in pieces]
    terms += [f"kl_coef {conventions.kl_coef:g}"] if conventions.kl_coef else []
    terms += [f"entropy_coef {conventions.entropy_coef:g}"] if conventions.entropy_coef else []
    return ", ".join(terms)


def _drawn_on_policy(conventions: Conventions, rng: Generator, size: int) -> Case:
    batch = rows.policy_batch(rng, size, conventions.replace(kl_coef=0.0), on_policy=True)
    return Case(changes={"kl_coef": 0.0}, batch=batch)


@check(
    "loss.on_policy_sign",
    needs=("policy_loss",),
    cases=inputs.batches(*inputs.SHAPES, on_policy=True, kl_coef=0.0),
    draws=_drawn_on_policy,
)
def on_policy_sign(adapter: Adapter, batch: PolicyBatch) -> None:
    """On policy, a gradient step raises the logprob of every token with positive advantage and lowers the others.

    Silent because the policy still moves, and the reward may still drift up, with advantages that are squared, used as
    a mask or stripped of their sign. Look at every place where the advantage enters, and how often.
    """
    wanted_BT = -batch.advantages.sign().unsqueeze(1).expand_as(batch.mask)
    gradient_BT = gradient(adapter.policy_loss(inputs.fresh(batch)).loss, batch.logprobs)
    told = "on policy, the gradient does not have the sign of -advantage at every trained token"
    # A team's own objective may leave tokens out, and that of tokens of high entropy does.
    leaves_out = adapter.conventions.is_own("objective") or adapter.conventions.top_entropy is not None
    where_BT = batch.mask & (gradient_BT != 0) if leaves_out else batch.mask
    assert_close(gradient_BT.sign(), wanted_BT, told, where=where_BT, quantity="sign of the gradient")


def _couples_rows(conventions: Conventions) -> str | None:
    return "the entropy bonus is on" if conventions.entropy_coef else None


def _full_and_uneven(rng: Generator) -> Iterator[Case]:
    for shape in ((2, 2, (2, 2)), (3, 4, (4, 2, 3))):
        yield Case(*shape[:2], batch=inputs.policy_batch(rng, *shape))


@check("loss.rows_are_separate", needs=("policy_loss",), applies=_couples_rows, cases=_full_and_uneven, draws=_drawn)
def rows_are_separate(adapter: Adapter, batch: PolicyBatch) -> None:
    """Changing one completion's advantage changes the gradient of that completion only.

    Silent because a broadcast of [B, 1] against the wrong axis gives every completion the sum of all advantages, which is
    about zero for centred ones: the policy stands still and nothing fails. Look for `unsqueeze` on advantages that already
    have a token axis, and test with as many rows as positions.
    """
    raised_B = batch.advantages.clone()
    raised_B[0] += 2.0
    _, before_BT = _judged(adapter, batch)
    _, after_BT = _judged(adapter, replace(batch, advantages=raised_B))
    told = "raising the advantage of the first row by 2 changed the gradient of the others"
    assert_close(after_BT[1:], before_BT[1:], told, quantity="gradient")


def _judged(adapter: Adapter, batch: PolicyBatch) -> tuple[LossOutput, Tensor]:
    """Call the loss on a copy of the batch, and take its gradient with respect to the logprobs."""
    batch = copy.deepcopy(replace(batch, logprobs=batch.logprobs.detach().requires_grad_()))
    output = adapter.policy_loss(inputs.fresh(batch))
    return output, gradient(output.loss, batch.logprobs)


def _row_and_token_advantages(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    for shape in ((2, 2, (2, 1)), (3, 3, (3, 1, 2)), (2, 4, (4, 2))):
        batch = inputs.policy_batch(rng, *shape)
        yield Case(batch, batch=batch)
        # A sequence's ratio is defined with one advantage for the sequence.
        if conventions.ratio_level == "token":
            along_BT = inputs.uniform(rng, *batch.mask.shape, low=-1.5, high=1.5)
            yield Case(batch, "differing along rows", batch=replace(batch, advantages=along_BT))


@check("loss.token_advantages", needs=("policy_loss",), cases=_row_and_token_advantages, draws=_drawn)
def token_advantages(adapter: Adapter, batch: PolicyBatch) -> None:
    """Advantages given per token weight their own tokens and, equal along each row, do what one advantage per row does.

    Silent because [B, T] and [B, 1] broadcast together to [B, B, T] without an error, and the first advantage of a row is
    an advantage too. Look at `unsqueeze(1)` and at how the shape of the advantages is told apart.
    """
    if batch.advantages.ndim == 2:
        _assert_declared(adapter, batch, "with advantages that differ along the rows")
        return
    # Zero behind the last trained token of each row, as padding is filled.
    is_within_BT = batch.mask.flip(1).cumsum(dim=1).flip(1) > 0
    advantages_BT = batch.advantages.unsqueeze(1) * is_within_BT
    before, before_BT = _judged(adapter, batch)
    after, after_BT = _judged(adapter, replace(batch, advantages=advantages_BT))
    told = "advantages of shape [B, T], equal along rows, change the"
    with soft():
        assert_close(after.loss, before.loss, f"{told} loss")
    assert_close(after_BT, before_BT, f"{told} gradient", quantity="gradient")


@check("loss.row_order", needs=("policy_loss",), cases=inputs.batches((4, 5, (5, 2, 1, 3))), draws=_drawn)
def row_order(adapter: Adapter, batch: PolicyBatch) -> None:
    """Shuffling the rows of the batch changes neither the loss, nor any token's gradient, nor a logged mean.

    Silent because data loaders shuffle anyway: the loss is then that of mismatched completions and advantages. Look for
    a tensor that is indexed, filtered or sorted while its neighbours are not.
    """
    order = torch.arange(len(batch.mask)).roll(1)
    before, gradient_BT = _judged(adapter, batch)
    _assert_same(_judged(adapter, batch.rows(order)), (before, gradient_BT[order]), "shuffling the rows")


def _assert_same(after: tuple[LossOutput, Tensor], before: tuple[LossOutput, Tensor], told: str) -> None:
    """Assert that loss, gradient and logged metrics are those of the call before."""
    (output, gradient_BT), (expected, expected_BT) = after, before
    with soft():
        assert_close(output.loss, expected.loss, f"{told} changed the loss")
    with soft():
        assert_close(gradient_BT, expected_BT, f"{told} changed the gradient", quantity="gradient")
    assert_metrics(output, expected.metrics, f"without {told}")


def _with_holes(rng: Generator) -> Iterator[Case]:
    batch = inputs.policy_batch(rng, 3, 5, (5, 5, 5))
    kept = [[1, 0, 0, 1, 1], [0, 1, 1, 0, 0], [1, 1, 1, 1, 0]]
    yield Case(batch=replace(batch, mask=torch.tensor(kept, dtype=torch.bool)))


@check("loss.holes_are_nothing", needs=("policy_loss",), cases=_with_holes, draws=_drawn)
def holes_are_nothing(adapter: Adapter, batch: PolicyBatch) -> None:
    """Tokens of tools between trained tokens count for nothing: without them loss, gradients and logged means are the same.

    Silent because single-turn completions have no holes: a length that is taken from the last trained token, or from the
    shape, weighs answers with long tool replies less. Look for lengths that are not the sum of the mask, for `argmax` and
    `nonzero()[-1]` on masks, and for differences between neighbouring positions.
    """
    order_BT = (~batch.mask).int().argsort(dim=1, stable=True)
    together: dict[str, Any] = {name: getattr(batch, name).gather(1, order_BT) for name in ALONG_ROWS}
    before, gradient_BT = _judged(adapter, batch)
    expected = before, gradient_BT.gather(1, order_BT)
    _assert_same(_judged(adapter, replace(batch, **together)), expected, "closing the holes")


@check("loss.padding_amount", needs=("policy_loss",), cases=inputs.batches((3, 3, (3, 1, 2))), draws=_drawn)
def padding_amount(adapter: Adapter, batch: PolicyBatch) -> None:
    """Padding the batch to a greater width changes neither the loss, nor any gradient, nor a logged mean.

    Silent because the width of a batch is that of its longest completion: a mean over all positions makes the learning
    rate, or the KL coefficient, depend on the longest of the neighbours. Look for `.mean()` without the mask.
    """
    wider: dict[str, Any] = {name: torch.nn.functional.pad(getattr(batch, name), (0, 4)) for name in ALONG_ROWS}
    before, gradient_BT = _judged(adapter, batch)
    expected = before, torch.nn.functional.pad(gradient_BT, (0, 4))
    _assert_same(_judged(adapter, replace(batch, **wider)), expected, "four more columns of padding")


def _shares(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    whole = inputs.policy_batch(rng, 4, 4, (4, 1, 3, 2))
    for name in dict.fromkeys((conventions.aggregation, "token_mean", "sequence_mean")):
        counted = conventions.replace(aggregation=name)
        for index, piece in enumerate(reference.split(whole, 2, counted), 1):
            piece.logprobs = piece.logprobs.detach().requires_grad_()
            yield Case(name, f"piece {index}", changes={"aggregation": name}, batch=piece)


@check("loss.share_of_the_update", needs=("policy_loss",), cases=_shares)
def share_of_the_update(adapter: Adapter, batch: PolicyBatch) -> None:
    """The loss of a part of an update is divided by the tokens or rows of the whole update, which the batch tells.

    Silent because a part divided by its own count is also a mean: the parts then weigh the same, however many tokens each
    has. Look for a sum of the part's own mask where `global_tokens` or `global_sequences` is given. A loss that does not
    take the counts is left out; `accumulated_loss` and `sharded_loss` judge how such code divides.
    """
    alone = adapter.policy_loss(inputs.fresh(replace(batch, global_tokens=None, global_sequences=None))).loss
    if torch.equal(adapter.policy_loss(inputs.fresh(batch)).loss, alone):
        raise NotProvided("the loss does not take the counts of a whole update")
    _assert_declared(adapter, batch, "a batch with the counts of the whole update")


def _garbage(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    batch = inputs.policy_batch(rng, 2, 3, (3, 1))
    for name in (*PER_TOKEN, "advantages"):
        for garbage in (-50.0, math.nan, math.inf, -math.inf):
            changes = _reading(conventions, name)
            yield Case(garbage, within=name, changes=changes, batch=batch, name=name, garbage=garbage)


def _reading(conventions: Conventions, name: str) -> dict[str, Any]:
    """Return the changes that enable the term which reads this field of the batch."""
    match name:
        case "ref_logprobs" if conventions.kl_coef == 0 or conventions.kl_placement == "reward":
            return {"kl_coef": 0.5, "kl_placement": "loss"}
        case "sampler_logprobs" if conventions.importance_level == "none":
            return {"importance_level": "token", "importance_high": 1.2}
        case "entropy" if conventions.entropy_coef == 0:
            return {"entropy_coef": 0.1}
    return {}


def _drawn_garbage(conventions: Conventions, rng: Generator, size: int) -> Case:
    name = rows.one_of(rng, (*PER_TOKEN, "advantages"))
    garbage, changes = rows.one_of(rng, (-50.0, math.nan, math.inf, -math.inf)), _reading(conventions, name)
    batch = rows.policy_batch(rng, size, conventions.replace(**changes))
    return Case(changes=changes, batch=batch, name=name, garbage=garbage)


@check("loss.masked_positions", needs=("policy_loss",), cases=_garbage, draws=_drawn_garbage)
def masked_positions(adapter: Adapter, batch: PolicyBatch, name: str, garbage: float) -> None:
    """Values at masked positions, NaN and infinities included, change no loss, no gradient and no logged mean.

    Silent because a mask by multiplication turns NaN × 0 into NaN for the whole batch, which a gradient-norm guard then
    skips: updates are dropped without a message. `torch.where` behind the arithmetic saves the loss and not the
    gradient: NaN comes back through the branch that was not taken, at the masked positions themselves, and from there
    reaches every weight. Padding is where garbage lives. Look for `x * mask` and for `where` around the result;
    `torch.where` or `masked_fill` before the arithmetic is immune.
    """
    if name == "advantages":
        batch = replace(batch, advantages=batch.advantages.reshape(len(batch.mask), -1).expand_as(batch.mask))
    before = _judged(adapter, batch)
    filled = replace(batch, **{name: getattr(batch, name).masked_fill(~batch.mask, garbage)})
    after = unless_raised(_judged, adapter, filled)
    if after is not None:
        _assert_same(after, before, f"{garbage} at the masked positions of {name}")


def _both_sides_of_bounds(conventions: Conventions) -> Iterator[Case]:
    # No bound holds a token of a group of equal rewards, whose advantage is 0. CISPO's bounds hold the weight of any token.
    advantages = (1.0, -1.0) if conventions.objective == "cispo" else (1.0, -1.0, 0.0)
    for ratio in inputs.ratios_around_bounds(conventions):
        for advantage in advantages:
            yield Case(f"ratio {ratio:.3g}", f"advantage {advantage:g}", ratio=ratio, advantage=advantage)


@check("loss.clipping", needs=("policy_loss",), cases=_both_sides_of_bounds)
def clipping(adapter: Adapter, ratio: float, advantage: float) -> None:
    """A token is clipped on the declared side and at the declared bound: above for A > 0, below for A < 0.

    Silent because a clipped and an unclipped token have nearly the same loss: only their gradients and the clip
    fraction differ. Look at min and max, at the sign of the advantage, at which of the two epsilons goes where, and at
    a clip fraction that counts another side than the one that is clipped.
    """
    told = f"one token with ratio {ratio:.3g} and advantage {advantage:g}"
    batch = inputs.one_row([math.log(ratio)], advantage)
    expected = exact_output(batch, adapter.conventions).metrics
    assert_metrics(_assert_declared(adapter, batch, told), expected, f"for {told}")


def _both_sides_of_the_clamp(conventions: Conventions) -> Iterator[Case]:
    clamped = {"log_ratio_clamp": 0.5}
    for changes in ({}, clamped, {**clamped, "clip_low": None, "clip_high": None}):
        clamp = changes.get("log_ratio_clamp", conventions.log_ratio_clamp)
        # Without a clamp a ratio of e⁵ is an ordinary number; behind one even a ratio that overflows float32 is.
        sizes = (5.0,) if clamp is None else (0.97 * clamp, 1.03 * clamp, clamp + 100)
        for log_ratio in (sign * size for size in sizes for sign in (1, -1)):
            for advantage in (1.0, -1.0):
                label = f"log-ratio {log_ratio:.3g}", f"advantage {advantage:g}"
                yield Case(*label, within=changes, changes=changes, log_ratios=[log_ratio], advantage=advantage)
        if clamp is not None:
            # Tokens beyond the clamp in a row whose mean is within: a clamp of the mean would do nothing.
            for log_ratios in ([3 * clamp, -2.5 * clamp], [1.5 * clamp, -0.2 * clamp]):
                yield Case(log_ratios, within=changes, changes=changes, log_ratios=log_ratios, advantage=1.0)


@check("loss.log_ratio_clamp", needs=("policy_loss",), cases=_both_sides_of_the_clamp)
def log_ratio_clamp(adapter: Adapter, log_ratios: list[float], advantage: float) -> None:
    """The log-ratio is clamped as declared, on both sides, and a token beyond the clamp has no gradient.

    Silent because ratios of this size are rare: one token whose probability fell by e²⁰ then outweighs its batch, or
    overflows to infinity, and infinity times a gradient of zero is NaN. Look for `exp` before the clamp, for a clamp of
    the ratio where one of the log-ratio is declared, and for a clamp that the conventions do not mention.
    """
    told = f"log-ratio {', '.join(f'{each:.3g}' for each in log_ratios)} and advantage {advantage:g}"
    _assert_declared(adapter, inputs.one_row(log_ratios, advantage), told)


def _near_and_far(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    yield from inputs.batches(*inputs.SHAPES)(rng)
    # A clamp of the ratio, which many have at 20 nats, is none of the logged distance.
    far = max(20.0, conventions.log_ratio_clamp or 0.0) + 5
    for log_ratios in ([-far, 0.1], [far, -0.1]):
        yield Case(f"log-ratios {log_ratios}", batch=inputs.one_row(log_ratios, 1.0))


@check("loss.metrics", severity="dashboard", needs=("policy_loss",), cases=_near_and_far, draws=_drawn)
def metrics(adapter: Adapter, batch: PolicyBatch) -> None:
    """Logged KL, entropy, clip fraction and ratios are those of the trained tokens, as recomputed from the batch.

    Silent because metrics affect only people's decisions. Look for means over padding, means of means, a clip fraction
    that counts tokens which are not clipped, and a KL of log-ratios that were clamped for the loss.
    """
    expected = exact_output(batch, adapter.conventions).metrics
    assert_metrics(adapter.policy_loss(inputs.fresh(batch)), expected, "recomputed from the batch")


@check("loss.inputs_untouched", severity="hardening", needs=("policy_loss",), cases=inputs.batches((2, 3, (3, 1))))
def inputs_untouched(adapter: Adapter, batch: PolicyBatch) -> None:
    """Computing the loss does not modify the batch.

    Silent because the second epoch or the next micro-batch then sees other numbers than the first. Look for operations
    in place on advantages, masks and logprobs.
    """
    before = copy.deepcopy(batch)
    adapter.policy_loss(batch)
    assert_unchanged(batch, before, "policy_loss changed its batch in place")


@check("loss.nothing_trained", needs=("policy_loss",), cases=inputs.batches((2, 3, (0, 0))))
def nothing_trained(adapter: Adapter, batch: PolicyBatch) -> None:
    """A batch in which every token is masked has loss zero and gradient zero.

    Silent because it happens once in a thousand steps, after filtering: 0 / 0 gives NaN, which the optimizer writes into
    every weight or a guard skips together with the rest of the update. Look at the clamp of the token count.
    """
    loss = adapter.policy_loss(inputs.fresh(batch)).loss
    told = "of a batch without a trained token is not zero"
    with soft():
        assert_close(loss, torch.tensor(0.0), f"the loss {told}")
    assert_close(gradient(loss, batch.logprobs), torch.zeros(2, 3), f"the gradient {told}", quantity="gradient")
