"""The record of an audited update: what the run was given, and what its own backward pass did with it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.conventions import PIECES, Conventions


@dataclass
class Record:
    """An update, in float64 on the CPU.

    Attributes:
        update: the number of the update.
        conventions: the declared ones; None leaves the laws alone, which hold for every implementation.
        logprobs: [B, T] of the trainer, as its forward passes gave them.
        gradient: [B, T] of the loss with respect to `logprobs`, summed over the backward passes.
        mask: [B, T] bool, true on the tokens that are to be trained.
        pieces: the rows of each micro-batch, in the order of the forward passes.
        eps: the relative rounding of the run's own logprobs.
        half_precision: the trainer's weights, or its forward pass, are known to be in 16 bits.
        rewards: [B].
        group_ids: [B].
        advantages: [B] or [B, T], as the run computed them.
        old_logprobs: [B, T] that the ratio was taken against.
        sampler_logprobs: [B, T].
        ref_logprobs: [B, T].
        entropy: [B, T].
        versions: [B] the version of the weights that sampled each row.
        trainer_version: the version of the weights that the update starts from.
        max_staleness: the versions by which a row may be older; None allows any.
        declared_rows: the rows that an update has; None allows any number.
        max_tokens: the tokens that a completion may have; None allows any number.
        drawn_freely: the rows are samples as they come: neither chosen by their rewards or lengths, nor drawn with top-k,
            top-p or penalties.
        logged: the numbers that the run logs of this update, by the names of `rlcanary.contract.batch.LossOutput`, and
            `loss` and `reward`.
        parts: the rows of each part of the update over which the run averages the metrics that it logs; none where they are
            those of the whole.
        measured: what the audit has measured itself of numbers that the run logs, by their names.
        is_rollout: these are rows and advantages alone, as they were computed; there is no loss, and no gradient.
        counts: the trained tokens and the rows, as the aggregation counts them, of the whole update that this is a part of;
            None where this is the whole.
    """

    update: int
    conventions: Conventions | None
    logprobs: Tensor
    gradient: Tensor
    mask: Tensor
    pieces: list[Tensor] = field(default_factory=list)
    eps: float = torch.finfo(torch.float32).eps
    half_precision: bool = False
    rewards: Tensor | None = None
    group_ids: Tensor | None = None
    advantages: Tensor | None = None
    old_logprobs: Tensor | None = None
    sampler_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    entropy: Tensor | None = None
    versions: Tensor | None = None
    trainer_version: int | None = None
    max_staleness: int | None = None
    declared_rows: int | None = None
    max_tokens: int | None = None
    drawn_freely: bool = True
    logged: dict[str, float] = field(default_factory=dict)
    parts: list[Tensor] = field(default_factory=list)
    measured: dict[str, float] = field(default_factory=dict)
    is_rollout: bool = False
    counts: tuple[float, float] | None = None

    @property
    def declares_its_loss(self) -> bool:
        """True if the conventions name each piece of the loss; else the laws alone judge it."""
        return self.conventions is not None and not custom_pieces(self.conventions)

    @property
    def mask_has_unscored(self) -> bool:
        """True if a trained token lacks the logprob of the old policy: the mask is the mistake, and has its own finding."""
        return self.ratio_logprobs is not None and bool(self.ratio_logprobs[self.mask].isnan().any())

    @property
    def ratio_logprobs(self) -> Tensor | None:
        """The logprobs [B, T] that the importance ratio is taken against; None where they are the trainer's own."""
        is_of_sampler = self.conventions is not None and self.conventions.old_logprobs == "sampler"
        return self.sampler_logprobs if self.old_logprobs is None and is_of_sampler else self.old_logprobs

    def policy_batch(self, advantages: Tensor) -> PolicyBatch:
        """Build the inputs of the declared loss, with logprobs that it can be differentiated in.

        Raises:
            ValueError: the conventions ask for logprobs that the record does not have.
        """
        old_BT = self.ratio_logprobs
        return PolicyBatch(
            logprobs=self.logprobs.clone().requires_grad_(),
            old_logprobs=self.logprobs.clone() if old_BT is None else old_BT,
            advantages=advantages,
            mask=self.mask,
            ref_logprobs=self.ref_logprobs,
            sampler_logprobs=self.sampler_logprobs,
            entropy=self.entropy,
            group_ids=self.group_ids,
            global_tokens=None if self.counts is None else self.counts[0],
            global_sequences=None if self.counts is None else self.counts[1],
        )

    def rows(self, index: Tensor) -> Record:
        """Select rows by `index`, [n] long; they are one micro-batch, and nothing is logged of them."""
        tensors = {each.name: getattr(self, each.name) for each in fields(self)}
        chosen: dict[str, Any] = {name: value[index] for name, value in tensors.items() if isinstance(value, Tensor)}
        return replace(self, **chosen, pieces=[], logged={}, parts=[], measured={}, declared_rows=None)

    def under(self, **changes: Any) -> Record:
        """Return the same update under other conventions."""
        assert self.conventions is not None
        return replace(self, conventions=self.conventions.replace(**changes))


def custom_pieces(conventions: Conventions) -> list[str]:
    """List the conventions that say no more than that the run has a piece of its own."""
    return [name for name in PIECES if getattr(conventions, name) == "custom"]
