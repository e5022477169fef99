"""The correction for a sampler whose probabilities differ from the trainer's."""

from collections.abc import Iterator

import torch
from torch import Generator

from rlcanary import reference
from rlcanary.checks.check import check
from rlcanary.checks.subject import Subject
from rlcanary.checks.worlds import inputs as cases


@check("importance.declared_weights", needs=("importance_weights",))
def declared_weights(subject: Subject, rng: Generator) -> None:
    """Each trained token's weight is trainer over sampler probability, at the declared level and with the declared bound.

    Silent because the inverse of a weight near one is also near one. Look at which logprob is subtracted from which,
    and at truncation although masking is declared.
    """
    for corrected in _corrections(subject):
        for rows, width, lengths in cases.SHAPES:
            with subject.case(rows, width):
                batch = cases.policy_batch(rng, rows, width, lengths)
                assert batch.sampler_logprobs is not None
                call = corrected.call("importance_weights", batch.old_logprobs, batch.sampler_logprobs, batch.mask)
                expected_BT = reference.importance_weights(
                    batch.old_logprobs.double(), batch.sampler_logprobs.double(), batch.mask, corrected.conventions
                )
                level, mode = corrected.conventions.importance_level, corrected.conventions.importance_mode
                call.expect(expected_BT, f"weights declared as {level}-level, {mode}, are other ones", where=batch.mask)


@check("importance.no_gradient", needs=("importance_weights",))
def no_gradient(subject: Subject, rng: Generator) -> None:
    """The weights carry no gradient.

    Silent because w · A · log π with a weight that depends on π has gradient w · A · (1 + log π), which vanishes at log
    π = -1 and changes sign below. Look for a missing `detach()`.
    """
    for corrected in _corrections(subject):
        with subject.case():
            batch = cases.policy_batch(rng, 2, 2, (2, 1))
            trainer_BT = batch.old_logprobs.clone().requires_grad_()
            call = corrected.call("importance_weights", trainer_BT, batch.sampler_logprobs, batch.mask)
            zero_BT = torch.zeros_like(trainer_BT)
            call.expect_gradient(zero_BT, "the importance weights carry a gradient of the trainer's logprobs")


def _corrections(subject: Subject) -> Iterator[Subject]:
    """Yield the declared correction or, if none is declared, every kind that the adapter can be set to."""
    if subject.conventions.importance_level != "none":
        yield subject
        return
    for level in ("token", "sequence"):
        for mode in ("truncate", "mask"):
            with subject.case(f"{level}, {mode}"):
                yield subject.configured(
                    importance_level=level, importance_mode=mode, importance_low=0.5, importance_high=1.2
                )
