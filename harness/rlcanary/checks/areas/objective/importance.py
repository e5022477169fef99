"""The correction for a sampler whose probabilities differ from the trainer's."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from rlcanary import reference
from rlcanary.checks.asserts import assert_close, gradient
from rlcanary.checks.case import Case
from rlcanary.checks.check import Cases, check
from rlcanary.checks.worlds import inputs, rows
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import Conventions


def _kinds(conventions: Conventions) -> dict[str, dict[str, Any]]:
    """Return the declared correction or, if none is declared, every kind that the adapter can be set to."""
    if conventions.importance_level != "none":
        return {"": {}}
    bounds = {"importance_low": 0.5, "importance_high": 1.2}
    return {
        f"{level}, {mode}": {"importance_level": level, "importance_mode": mode, **bounds}
        for level in ("token", "sequence")
        for mode in ("truncate", "mask")
    }


def _pair(batch: PolicyBatch) -> dict[str, Any]:
    trainer_BT = batch.old_logprobs.detach().requires_grad_()
    return {"trainer_BT": trainer_BT, "sampler_BT": batch.sampler_logprobs, "mask_BT": batch.mask}


def _logprobs(*shapes: inputs.Shape) -> Cases:
    def cases(conventions: Conventions, rng: Generator) -> Iterator[Case]:
        for kind, changes in _kinds(conventions).items():
            for shape in shapes:
                label = shape[:2] if len(shapes) > 1 else ()
                yield Case(*label, within=kind, changes=changes, **_pair(inputs.policy_batch(rng, *shape)))

    return cases


def _few_and_many(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    yield from _logprobs(*inputs.SHAPES)(conventions=conventions, rng=rng)
    # No longer rows: the weight of a sequence of hundreds of tokens is beyond every bound.
    many_rows, _ = inputs.LARGE
    for case in _logprobs(many_rows)(conventions=conventions, rng=rng):
        yield Case("70 rows", within=case.label, changes=case.changes, **case.inputs)


def _drawn(conventions: Conventions, rng: Generator, size: int) -> Case:
    changes = rows.one_of(rng, list(_kinds(conventions).values()))
    return Case(changes=changes, **_pair(rows.policy_batch(rng, size, conventions.replace(**changes))))


@check(
    "importance.declared_weights",
    needs=("importance_weights",),
    cases=_few_and_many,
    draws=_drawn,
)
def declared_weights(adapter: Adapter, trainer_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor) -> None:
    """Each trained token's weight is trainer over sampler probability, at the declared level and with the declared bound.

    Silent because the inverse of a weight near one is also near one. Look at which logprob is subtracted from which,
    and at truncation although masking is declared.
    """
    expected_BT = reference.importance_weights(trainer_BT.double(), sampler_BT.double(), mask_BT, adapter.conventions)
    weights_BT = adapter.importance_weights(trainer_BT.detach(), sampler_BT, mask_BT.clone())
    level, mode = adapter.conventions.importance_level, adapter.conventions.importance_mode
    assert_close(weights_BT, expected_BT, f"weights declared as {level}-level, {mode}, are other ones", where=mask_BT)


def _equal(conventions: Conventions, rng: Generator) -> Iterator[Case]:
    if not conventions.importance_low <= 1 <= conventions.importance_high:
        raise NotProvided("the declared bounds leave out a weight of 1")
    for case in _logprobs((2, 3, (3, 1)))(conventions=conventions, rng=rng):
        trainer_BT = case.inputs["trainer_BT"].detach()
        same = {"logprobs_BT": trainer_BT, "mask_BT": case.inputs["mask_BT"]}
        yield Case(case.label, changes=case.changes, **same)
        # A weight on a bound lies within.
        is_mask = case.changes.get("importance_mode", conventions.importance_mode) == "mask"
        for name in ("importance_low", "importance_high") if is_mask else ():
            yield Case(case.label, f"{name} 1", changes={**case.changes, name: 1.0}, **same)


@check("importance.equal_logprobs_weigh_one", needs=("importance_weights",), cases=_equal)
def equal_logprobs_weigh_one(adapter: Adapter, logprobs_BT: Tensor, mask_BT: Tensor) -> None:
    """If the sampler's logprobs are the trainer's, every trained token has weight 1: the correction is the identity.

    Silent because a weight that is always a little off acts as another learning rate. Look for padding that enters a
    sequence's sum, for normalisation by the mean weight of a batch with masked tokens, and for logprobs of two precisions.
    """
    weights_BT = adapter.importance_weights(logprobs_BT, logprobs_BT.clone(), mask_BT)
    told = "with equal logprobs of sampler and trainer the weights are not 1"
    assert_close(weights_BT, torch.ones_like(logprobs_BT), told, where=mask_BT)


@check("importance.no_gradient", needs=("importance_weights",), cases=_logprobs((2, 2, (2, 1))), draws=_drawn)
def no_gradient(adapter: Adapter, trainer_BT: Tensor, sampler_BT: Tensor, mask_BT: Tensor) -> None:
    """The weights carry no gradient.

    Silent because w · A · log π with a weight that depends on π has gradient w · A · (1 + log π), which vanishes at log
    π = -1 and changes sign below. Look for a missing `detach()`.
    """
    found_BT = gradient(adapter.importance_weights(trainer_BT.clone(), sampler_BT, mask_BT), trainer_BT)
    told = "the importance weights carry a gradient of the trainer's logprobs"
    assert_close(found_BT, torch.zeros_like(trainer_BT), told, quantity="gradient")
