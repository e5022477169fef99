"""On-policy distillation: divergences between teacher and student, and their estimate from the sampled tokens."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, assert_metrics, gradient, soft, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.checks.worlds.loss_batches import LARGE, MASKS, distillation_batch, double, mask, surrounded, widened
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Divergence, TokenAggregation
from rlcanary.contract.records.other_losses import DistillationBatch

_SOFT_LABELS_ONLY = {"distillation_label_weight": 0.0}
_DIVERGENCES: tuple[dict[str, Any], ...] = (
    {},
    *({"distillation_divergence": name} for name in get_args(Divergence)),
    *({"distillation_divergence": "jsd", "distillation_beta": beta} for beta in (0.1, 0.9)),
    {"distillation_divergence": "mixed_kl", "distillation_beta": 0.2},
)
_OPTIONS: tuple[dict[str, Any], ...] = (
    *_DIVERGENCES,
    *({"distillation_temperature_squared": is_on} for is_on in (False, True)),
    *({"distillation_label_weight": weight} for weight in (0.0, 0.3)),
    *({"distillation_aggregation": name} for name in get_args(TokenAggregation)),
)


def _under_options(rng: Generator) -> Iterator[Case]:
    for choice in _OPTIONS:
        for (name, each), temperature in zip(MASKS.items(), (1.0, 2.0, 1.0, 0.5), strict=True):
            batch = distillation_batch(rng, mask(each), temperature)
            yield Case(name, f"temperature {temperature:g}", within=choice, changes=choice, batch=batch)
        part = replace(batch, global_tokens=11.0, global_sequences=7.0)
        yield Case("a part of an update", within=choice, changes=choice, batch=part)
    for name, each in LARGE.items():
        yield Case(name, batch=distillation_batch(rng, mask(each)))


def _drawn(rng: Generator, size: int) -> Case:
    trained_BT = rows.mask(rng, rows.whole(rng, 1, size), rows.whole(rng, 1, 2 * size))
    # No tokens at all have a mean of their own in every codebase.
    trained_BT[0, 0] = True
    batch = distillation_batch(rng, trained_BT, rows.one_of(rng, (0.5, 1.0, 3.0)))
    return Case(changes=rows.one_of(rng, _OPTIONS), batch=batch)


@check("distillation.declared_loss", needs=("distillation_loss",), cases=_under_options, draws=_drawn)
def declared_loss(adapter: Adapter, batch: DistillationBatch) -> None:
    """The loss is the declared divergence at each trained token, at the temperature of both, reduced as declared.

    Silent because each of the divergences is smallest where the student is the teacher: with the direction swapped, with
    beta on the other side of the mixture, or with the temperature on one side, the loss falls and another student
    comes out. Look at the order of arguments of `kl_div`, whose first is a logprob of the second distribution; at
    `batchmean`, which divides by rows; and at a fused loss with other defaults than the plain one.
    """
    exact = double(batch)
    expected = reference.distillation_loss(exact, adapter.conventions)
    output = adapter.distillation_loss(inputs.fresh(batch))
    with soft():
        assert_close(output.loss, expected.loss, "the loss is not the declared divergence")
    told = "the gradient is not that of the declared divergence"
    wanted_BTV = gradient(expected.loss, exact.logits)
    with soft():
        assert_close(gradient(output.loss, batch.logits), wanted_BTV, told, quantity="gradient")
    assert_metrics(output, {**expected.metrics, "loss": float(output.loss.detach())}, "of the trained tokens")


def _equal(rng: Generator) -> Iterator[Case]:
    for choice in _DIVERGENCES:
        for name in ("one token", "a row of nothing"):
            batch = distillation_batch(rng, mask(MASKS[name]), 2.0)
            # Softmax does not see a constant.
            batch = replace(batch, teacher_logits=batch.logits.detach() + 3)
            yield Case(name, within=choice, changes={**choice, **_SOFT_LABELS_ONLY}, batch=batch)


@check("distillation.equal_teacher", needs=("distillation_loss",), cases=_equal)
def equal_teacher(adapter: Adapter, batch: DistillationBatch) -> None:
    """A student whose distribution is the teacher's has loss zero and gradient zero: there is nothing left to learn.

    Silent because the loss of a student never gets to zero in practice: a cross entropy in place of a divergence, or a
    teacher at another temperature, goes on pulling at a student that is right already. Look at the temperature of both
    sides, and at logits that are compared before they are normalised.
    """
    loss = adapter.distillation_loss(inputs.fresh(batch)).loss
    with soft():
        assert_close(loss, torch.tensor(0.0), "between equal distributions the loss is not zero")
    told = "between equal distributions the gradient is not zero"
    assert_close(gradient(loss, batch.logits), torch.zeros_like(batch.logits), told, quantity="gradient")


_EXCHANGES: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
    ({"distillation_divergence": "forward_kl"}, {"distillation_divergence": "reverse_kl"}),
    *(
        ({**kind, "distillation_beta": 0.25}, {**kind, "distillation_beta": 0.75})
        for kind in ({"distillation_divergence": "jsd"}, {"distillation_divergence": "mixed_kl"})
    ),
)


def _exchanges(rng: Generator) -> Iterator[Case]:
    for one, other in _EXCHANGES:
        batch = distillation_batch(rng, mask(MASKS["uneven rows"]))
        yield Case(one, changes=_SOFT_LABELS_ONLY, batch=batch, one=one, other=other)


@check("distillation.exchange", needs=("distillation_loss",), cases=_exchanges)
def exchange(adapter: Adapter, batch: DistillationBatch, one: dict[str, Any], other: dict[str, Any]) -> None:
    """With student and teacher exchanged, forward and reverse KL have each other's value, and so have beta and 1 - beta.

    Silent because the two directions are equal to second order near the teacher: the one covers all that the teacher would
    say, the other keeps to what it says most, and which of them runs shows in the samples only. Look at the words forward
    and reverse, which some define by the student and some by the teacher, and at the weights of the mixture.
    """
    exchanged = replace(batch, logits=batch.teacher_logits, teacher_logits=batch.logits.detach())
    expected = adapter.configured(**other).distillation_loss(exchanged).loss.detach()
    told = f"{Case(one).label} is not {Case(other).label} with student and teacher exchanged"
    assert_close(adapter.configured(**one).distillation_loss(inputs.fresh(batch)).loss, expected, told)


def _surroundings(rng: Generator) -> Iterator[Case]:
    for name, each in MASKS.items():
        for left, right in ((0, 0), (0, 2), (1, 0)):
            batch = distillation_batch(rng, mask(each), 2.0)
            yield Case(name, f"{left} columns before, {right} behind", batch=batch, left=left, right=right)


@check("distillation.untrained_tokens", needs=("distillation_loss",), cases=_surroundings)
def untrained_tokens(adapter: Adapter, batch: DistillationBatch, left: int, right: int) -> None:
    """Positions that are not trained are nothing: neither their logits nor their number change loss and gradient.

    Silent because a student that also imitates the teacher on padding or on a tool's answer has a loss that falls like any
    other. Look at the mask of the mean, and at logits that are one position further than the mask.
    """
    other = surrounded(batch, left, right)
    loss, other_loss = (adapter.distillation_loss(inputs.fresh(each)).loss for each in (batch, other))
    with soft():
        assert_close(other_loss, loss.detach(), "other untrained positions changed the loss")
    expected_BTV = widened(gradient(loss, batch.logits), left, right)
    told = "other untrained positions changed the gradient, or received one"
    assert_close(gradient(other_loss, other.logits), expected_BTV, told, quantity="gradient")


def _unscored(rng: Generator) -> Iterator[Case]:
    for choice in _DIVERGENCES:
        changes = {**choice, "distillation_whole_rows": False}
        for name in ("uneven rows", "several turns"):
            for nothing in (-math.inf, math.nan):
                batch = distillation_batch(rng, mask(MASKS[name]))
                yield Case(name, nothing, within=choice, changes=changes, batch=batch, nothing=nothing)


@check("distillation.unscored_positions", needs=("distillation_loss",), cases=_unscored)
def unscored_positions(adapter: Adapter, batch: DistillationBatch, nothing: float) -> None:
    """If a teacher scores trained tokens alone, its entries in the other places change no loss and no gradient.

    Silent because the loss is right: a mask behind the divergence takes the infinity out of the sum, and lets it back in as
    a gradient of NaN, which a guard of the norm then skips with the whole batch. It takes rows of different lengths. Look
    for `x * mask` and for `where` around the divergence; `where` in front of it is immune.
    """
    filled_BTV = batch.teacher_logits.masked_fill(~batch.mask.unsqueeze(2), nothing)
    output = unless_raised(adapter.distillation_loss, inputs.fresh(replace(batch, teacher_logits=filled_BTV)))
    if output is None:
        return
    found_BTV = gradient(output.loss, batch.logits)
    expected = adapter.distillation_loss(inputs.fresh(batch)).loss
    told = f"{nothing} where the teacher scores nothing changed the"
    with soft():
        assert_close(output.loss, expected.detach(), f"{told} loss")
    assert_close(found_BTV, gradient(expected, batch.logits), f"{told} gradient", quantity="gradient")


def _sampled(rng: Generator) -> Iterator[Case]:
    for name, each in MASKS.items():
        mask_BT = mask(each)
        scored_BT = [inputs.uniform(rng, *mask_BT.shape, low=-4, high=-0.1) for _ in range(2)]
        # Nothing scores prompts, tools and padding.
        student_BT, teacher_BT = (each.masked_fill(~mask_BT, torch.nan) for each in scored_BT)
        yield Case(name, student_BT=student_BT.requires_grad_(), teacher_BT=teacher_BT, mask_BT=mask_BT)


@check("distillation.advantages", needs=("distillation_advantages",), cases=_sampled)
def advantages(adapter: Adapter, student_BT: Tensor, teacher_BT: Tensor, mask_BT: Tensor) -> None:
    """The advantage of a sampled token is the teacher's logprob minus the student's, and carries no gradient.

    Silent because a gradient through the student's logprob cancels or doubles the update, and with the sign wrong the
    student leaves the teacher while the reward curve of the task, if there is one, still moves. Look for a missing
    `detach()`, and for advantages that are centred or scaled as if they were rewards.
    """
    advantages_BT = adapter.distillation_advantages(student_BT.clone(), teacher_BT, mask_BT)
    told = "the advantages are not the log-ratios of teacher to student"
    with soft():
        assert_close(advantages_BT, (teacher_BT - student_BT).detach(), told, where=mask_BT, scale=4)
    told = "the advantages carry a gradient of the student's logprobs"
    assert_close(gradient(advantages_BT, student_BT), torch.zeros_like(student_BT), told, quantity="gradient")


def _distributions(rng: Generator) -> Iterator[Case]:
    for vocabulary in (2, 6):
        student_V, teacher_V = (inputs.uniform(rng, vocabulary, low=-2, high=2) for _ in range(2))
        yield Case(f"{vocabulary} tokens", student_V=student_V, teacher_V=teacher_V)


@check("distillation.sampled_gradient", needs=("distillation_advantages",), cases=_distributions)
def sampled_gradient(adapter: Adapter, student_V: Tensor, teacher_V: Tensor) -> None:
    """Averaged over the tokens that the student samples, the policy gradient is that of minus KL(student ‖ teacher).

    Silent because one sample says nothing about the average: an estimate of the other direction, or one with a weight of
    its own for each token, looks as noisy as the right one. Look at the logprobs of which model enter with which sign.
    """
    logits_V = student_V.double().requires_grad_()
    logprobs_V, teacher_V = logits_V.log_softmax(dim=0), teacher_V.double().log_softmax(dim=0)
    probabilities_V = logprobs_V.detach().exp()
    expected_V = gradient((logprobs_V.exp() * (teacher_V - logprobs_V)).sum(), logits_V)
    # A row for each token that may be sampled.
    given = logprobs_V.detach().float().unsqueeze(1), teacher_V.float().unsqueeze(1)
    advantages_V1 = adapter.distillation_advantages(*given, torch.ones(len(student_V), 1, dtype=torch.bool))
    found_V = gradient((probabilities_V * advantages_V1.squeeze(1).double() * logprobs_V).sum(), logits_V)
    told = "the expected policy gradient is not that of minus KL(student ‖ teacher)"
    assert_close(found_V.float(), expected_V, told, scale=4, quantity="gradient")
