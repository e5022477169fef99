"""Preference losses over pairs of completions: DPO and its relatives."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, get_args

import torch
from torch import Generator

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, assert_metrics, assert_true, leave_out, soft, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.checks.worlds.loss_batches import LARGE, double, gradients, mask, preference_batch, surrounded, widened
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.conventions import Conventions, PreferenceKind
from rlcanary.contract.records.other_losses import PreferenceBatch

# The tokens that count in the chosen and in the rejected completions.
_PAIRS: dict[str, tuple[list[str], list[str]]] = {
    "one token each": (["x"], ["x"]),
    "longer chosen": ([".xxxx", ".xx..", "..xxx"], [".x", ".x", ".x"]),
    "longer rejected": ([".xx", ".x."], ["..xxxx", ".xx..."]),
    "several turns": (["x.xx", ".x.x"], ["xx.x", "..xx"]),
}
_NO_TERMS: dict[str, Any] = {"preference_margin": 0.0, "preference_supervised_coef": 0.0}
_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    *({"preference_kind": name} for name in get_args(PreferenceKind)),
    *({"preference_kind": name, "preference_beta": 1.5} for name in get_args(PreferenceKind)),
    *({"preference_reference": is_on} for is_on in (False, True)),
    *({"preference_length_normalised": is_on} for is_on in (False, True)),
    {"preference_kind": "ipo", "preference_length_normalised": True},
    *({"preference_kind": name, "preference_margin": 0.7} for name in ("sigmoid", "hinge")),
    {"preference_kind": "sigmoid", "preference_label_smoothing": 0.2},
    *({"preference_supervised_coef": weight} for weight in (0.0, 0.5)),
    {"preference_supervised_coef": 0.5, "supervised_aggregation": "sequence_mean"},
    {"preference_reference": False, "preference_length_normalised": True, "preference_margin": 0.5},
)


def _under_options(rng: Generator) -> Iterator[Case]:
    for choice in _OPTIONS:
        for name in _PAIRS if not choice else ("longer chosen", "longer rejected"):
            chosen, rejected = _PAIRS[name]
            batch = preference_batch(rng, mask(chosen), mask(rejected))
            yield Case(name, within=choice, changes=choice, batch=batch)
        part = replace(batch, global_pairs=5.0, global_tokens=9.0)
        yield Case("a part of an update", within=choice, changes=choice, batch=part)
    for name, each in LARGE.items():
        yield Case(name, batch=preference_batch(rng, mask(each), mask(each)))


def _drawn(rng: Generator, size: int) -> Case:
    pairs = rows.whole(rng, 1, size)
    masks = [rows.mask(rng, pairs, rows.whole(rng, 1, 2 * size)) for _ in range(2)]
    for each in masks:
        each[:, 0] = True
    return Case(changes=rows.one_of(rng, _OPTIONS), batch=preference_batch(rng, *masks))


@check("preference.declared_loss", needs=("preference_loss",), cases=_under_options, draws=_drawn)
def declared_loss(adapter: Adapter, batch: PreferenceBatch) -> None:
    """The loss is that of the declared kind, on summed or averaged log-ratios, with the declared margin and smoothing.

    Silent because any increasing function of the margin learns to rank: with means for sums, the reference of the chosen
    completion for both, or the smoothing on the wrong side, accuracy rises all the same and lengths drift. Look at
    what beta multiplies, at divisors by length, and at each of the four logprobs.
    """
    exact = double(batch)
    expected = reference.preference_loss(exact, adapter.conventions).loss
    loss = adapter.preference_loss(inputs.fresh(batch)).loss
    with soft():
        assert_close(loss, expected, "the loss is not the declared one")
    wanted = dict(gradients(expected, exact))
    for name, found in gradients(loss, batch):
        with soft():
            assert_close(found, wanted[name], f"the gradient of {name} is not the declared one", quantity=name)


def _at_the_start(rng: Generator) -> Iterator[Case]:
    for name, (chosen, rejected) in _PAIRS.items():
        batch = preference_batch(rng, mask(chosen), mask(rejected))
        ref_BT, ref_BU = batch.chosen_logprobs.detach(), batch.rejected_logprobs.detach()
        batch = replace(batch, ref_chosen_logprobs=ref_BT, ref_rejected_logprobs=ref_BU)
        yield Case(name, within="the reference", changes={**_NO_TERMS, "preference_reference": True}, batch=batch)
        twice = preference_batch(rng, mask(chosen), mask(chosen))
        same_BT = twice.chosen_logprobs.detach().clone().requires_grad_()
        twice = replace(twice, rejected_logprobs=same_BT, ref_rejected_logprobs=twice.ref_chosen_logprobs)
        yield Case(name, within="the same completion twice", changes=_NO_TERMS, batch=twice)


@check("preference.without_a_preference", needs=("preference_loss",), cases=_at_the_start)
def without_a_preference(adapter: Adapter, batch: PreferenceBatch) -> None:
    """If no completion is ahead, the loss is log 2 (DPO), and each chosen token is pushed up, each rejected one down.

    Silent because training starts here and the loss falls from wherever it starts: with other reference logprobs than the
    policy's own, which dropout or another padding gives, the first updates undo that difference. Look at the first logged
    loss, which should be 0.693, at the mode of the reference model, and at the sign of the log-ratio.
    """
    conventions = adapter.conventions
    beta = conventions.preference_beta
    expected = {"sigmoid": math.log(2), "hinge": 1.0, "ipo": 1 / (4 * beta**2)}[conventions.preference_kind]
    loss = adapter.preference_loss(inputs.fresh(batch)).loss
    with soft():
        assert_close(loss, torch.tensor(expected), "with no completion ahead the loss is not that of a margin of zero")
    found = dict(gradients(loss, batch))
    raised = (found["chosen_logprobs"] < 0)[batch.chosen_mask], (found["rejected_logprobs"] > 0)[batch.rejected_mask]
    for name, moved in zip(("chosen", "rejected"), raised, strict=True):
        told = f"not every {name} token is pushed {'up' if name == 'chosen' else 'down'}"
        with soft():
            assert_true(bool(moved.all()), told, quantity=f"direction of {name}", compared=moved.numel())


def _surroundings(rng: Generator) -> Iterator[Case]:
    for name, (chosen, rejected) in _PAIRS.items():
        for left, right in ((0, 0), (0, 2), (2, 0)):
            batch = preference_batch(rng, mask(chosen), mask(rejected))
            for changes in ({}, {"preference_length_normalised": True}):
                told = f"{left} columns before, {right} behind"
                yield Case(name, told, within=changes, changes=changes, batch=batch, left=left, right=right)


@check("preference.untrained_tokens", needs=("preference_loss",), cases=_surroundings)
def untrained_tokens(adapter: Adapter, batch: PreferenceBatch, left: int, right: int) -> None:
    """Prompt and padding are nothing: their logprobs and their number change neither loss nor gradient.

    Silent because the prompt's logprobs are the same on both sides and cancel, until they are padded or cut differently,
    and padding counts against the longer or the shorter completion of each pair. Look at the mask of both sides, and at
    the divisor of averaged logprobs.
    """
    other = surrounded(batch, left, right)
    loss, other_loss = (adapter.preference_loss(inputs.fresh(each)).loss for each in (batch, other))
    with soft():
        assert_close(other_loss, loss.detach(), "other prompts and other padding changed the loss")
    expected = dict(gradients(loss, batch))
    for name, found in gradients(other_loss, other):
        told = f"other prompts and other padding changed the gradient of {name}, or received one"
        with soft():
            assert_close(found, widened(expected[name], left, right), told, quantity=name)


def _extremes(rng: Generator) -> Iterator[Case]:
    lengths = mask(["xxxx", "xx.."]), mask(["xxxx", ".xxx"])
    for name, chosen, rejected in (("far behind", -900.0, -1.0), ("far ahead", -1.0, -900.0)):
        batch = preference_batch(rng, *lengths)
        chosen_BT, rejected_BT = (torch.full((2, 4), value).requires_grad_() for value in (chosen, rejected))
        yield Case(name, batch=replace(batch, chosen_logprobs=chosen_BT, rejected_logprobs=rejected_BT))
    for name, masks in (
        ("an empty chosen completion", (mask(["....", ".xx."]), lengths[1])),
        ("an empty rejected completion", (lengths[0], mask([".xx.", "...."]))),
    ):
        for changes in ({}, {"preference_length_normalised": True}):
            yield Case(name, changes, changes=changes, batch=preference_batch(rng, *masks))


@check("preference.extremes", needs=("preference_loss",), cases=_extremes)
def extremes(adapter: Adapter, batch: PreferenceBatch) -> None:
    """Loss and gradient are finite where one completion is thousands of nats ahead, and where one has no token.

    Silent because it takes one such pair: a long answer or one that was cut to nothing, whose NaN or infinity ends the
    run days later, or is skipped with its whole batch by a guard. Look for the log of a sigmoid or an exp that overflows,
    and for a mean over no tokens, which adds nothing.
    """
    output = unless_raised(adapter.preference_loss, batch)
    if output is None:
        return  # an error is not silent
    loss = output.loss
    with soft():
        assert_true(bool(loss.isfinite()), f"the loss is {float(loss.detach())}", quantity="value")
    for name, found in gradients(loss, batch):
        with soft():
            told = f"the gradient of {name} is not finite"
            assert_true(bool(found.isfinite().all()), told, quantity=name, compared=found.numel())


def _logged(rng: Generator) -> Iterator[Case]:
    for name, (chosen, rejected) in _PAIRS.items():
        batch = preference_batch(rng, mask(chosen), mask(rejected))
        for changes in ({}, {"preference_reference": False, "preference_length_normalised": True}):
            yield Case(name, within=changes, changes=changes, batch=batch)
    yield Case("a part of an update", batch=replace(batch, global_pairs=5.0, global_tokens=9.0))


@check("preference.metrics", needs=("preference_loss",), cases=_logged, severity="dashboard")
def metrics(adapter: Adapter, batch: PreferenceBatch) -> None:
    """Logged rewards, margins and accuracy are means over the pairs, of the rewards that the loss compares.

    Silent because a run is judged by these curves: an accuracy of the mean rewards is 0 or 1, rewards without the reference
    rise with any likelihood, and a margin of averages beside a loss of sums has another scale. Look at whether pairs are
    compared before they are averaged, and at the loss that shares its rewards with another one. The logged loss is the
    returned one.
    """
    output = adapter.preference_loss(inputs.fresh(batch))
    expected = exact_metrics(batch, adapter.conventions)
    assert_metrics(output, {**expected, "loss": float(output.loss.detach())}, "over the pairs")


def exact_metrics(batch: PreferenceBatch, conventions: Conventions) -> dict[str, float]:
    """The metrics in float64, without the accuracy where a rounding decides it."""
    exact = double(batch)
    expected = reference.preference_loss(exact, conventions).metrics
    nearly_equal = {
        reference.preference_loss(replace(exact, chosen_logprobs=exact.chosen_logprobs + shift), conventions).metrics[
            "reward_accuracy"
        ]
        for shift in (-1e-4, 1e-4)
    }
    if len(nearly_equal) > 1:
        leave_out("the accuracy, since the rewards of a pair are equal but for rounding")
        del expected["reward_accuracy"]
    return expected
