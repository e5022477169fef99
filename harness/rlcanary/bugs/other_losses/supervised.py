"""Bugs in supervised losses and in what they log."""

from dataclasses import replace

import torch

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.other_losses import SupervisedBatch


class WindowOfOnes(Bug):
    id = "slime.first-turns-lost"
    source = "slime c5c2eb4ff, #1350, survey L11"
    effect = "ids and mask are cut to as many last positions as there are trained tokens: the first turns are lost"

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        behind_BS = batch.mask.flip(1).cumsum(1).flip(1) > 0
        ends_B1, lengths_B1 = behind_BS.sum(dim=1, keepdim=True), batch.mask.sum(dim=1, keepdim=True)
        kept_BS = torch.arange(batch.mask.shape[1]) >= ends_B1 - lengths_B1
        return super().supervised_loss(replace(batch, mask=batch.mask & kept_BS))


class LoggedWithAnotherScale(Bug):
    id = "skyrl.logged-with-another-scale"
    source = "SkyRL 9ef15e374, #1893, survey S43"
    effect = "the mean of a micro-batch is logged, its share of the update optimised: the curve depends on their size"

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        output = super().supervised_loss(batch)
        alone = replace(batch, global_tokens=None, global_sequences=None)
        logged = reference.supervised_loss(alone, self.conventions).metrics["loss"]
        return LossOutput(output.loss, {**output.metrics, "loss": logged})


class PerplexityOfNothing(Bug):
    id = "areal.perplexity-of-nothing"
    source = "AReaL 93fb1721d, #463, survey A35"
    effect = "a row without labels, added as padding, makes the logged perplexity NaN"

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        output = super().supervised_loss(batch)
        has_labels = bool(batch.mask[:, 1:].any(dim=1).all())
        return output if has_labels else LossOutput(output.loss, {**output.metrics, "perplexity": float("nan")})


class TokensOfOneRank(Bug):
    id = "areal.tokens-of-one-rank"
    source = "AReaL 95e2379d0, #1249, survey A37"
    effect = "the logged number of tokens is that of one context-parallel rank"

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        output = super().supervised_loss(batch)
        of_first_rank = batch.mask[:, 1 : batch.mask.shape[1] // 2 + 1].sum()
        return LossOutput(output.loss, {**output.metrics, "tokens": float(of_first_rank)})
