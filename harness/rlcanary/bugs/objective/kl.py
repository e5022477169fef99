"""Bugs in the KL term."""

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import LossOutput, PolicyBatch


class KlSubtracted(Bug):
    id = "verl.kl-subtracted"
    source = "verl a65c9157b, #179, survey V01"
    effect = "the policy is pushed away from the reference"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = reference.policy_loss(batch, self.conventions)
        without = reference.policy_loss(batch, self.conventions.replace(kl_coef=0.0)).loss
        return LossOutput(2 * without - output.loss, output.metrics)


class RatioUpsideDown(Bug):
    id = "rlvr.kl-ratio-inverted"
    source = "rlvr-experiments 12345f5, survey H04"
    effect = "k3 explodes where the policy reinforces: 974 instead of 5.9"

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        log_ratio = logprobs - ref_logprobs
        return log_ratio.exp() - 1 - log_ratio


class KlWithoutGradient(Bug):
    id = "skyrl.kl-without-gradient"
    source = "SkyRL 9d7bca91a, #1353"
    effect = "the KL is computed without gradient: it is logged, and pulls nothing towards the reference"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        without = reference.policy_loss(batch, self.conventions.replace(kl_coef=0.0)).loss
        output = super().policy_loss(batch)
        return LossOutput(without + (output.loss - without).detach(), output.metrics)


class WeightPastTheClamp(Bug):
    id = "nemo-rl.weight-past-the-clamp"
    source = "NeMo RL 2206ae11f, #2958"
    effect = "a token whose log-ratio is clamped keeps the gradient of its weight"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        conventions, output = self.conventions, super().policy_loss(batch)
        is_weighted = conventions.kl_ratio_weighted or conventions.kl_score_term
        if batch.ref_logprobs is None or not is_weighted or conventions.kl_input_clamp is None:
            return output
        weights_BT = (batch.logprobs - batch.logprobs.detach()).exp()
        is_clamped_BT = (batch.logprobs - batch.ref_logprobs).detach().abs() > conventions.kl_input_clamp
        kept_BT = torch.where(is_clamped_BT & batch.mask, weights_BT, 1.0)
        # Of value 0, with the gradient of the weights alone.
        leaked = conventions.kl_coef * (kept_BT - kept_BT.detach()).sum() / batch.mask.sum().clamp(min=1)
        return LossOutput(output.loss + conventions.kl_input_clamp * leaked, output.metrics)


class WeightedByTheRow(Bug):
    id = "trl.kl-weighted-by-the-row"
    source = "TRL, #6586"
    effect = "with a ratio per sequence, the KL of a token is weighted by all tokens of its row, and pulls at them too"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        conventions, output = self.conventions, super().policy_loss(batch)
        if not conventions.kl_ratio_weighted or conventions.ratio_level == "token" or batch.ref_logprobs is None:
            return output
        mask_BT, lengths_B1 = batch.mask, batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
        log_ratio_BT = (batch.logprobs - batch.old_logprobs).masked_fill(~mask_BT, 0)
        log_weights_BT = (log_ratio_BT.sum(dim=1, keepdim=True) / lengths_B1).expand_as(log_ratio_BT)
        logprobs_BT, ref_logprobs_BT = (each.masked_fill(~mask_BT, 0) for each in (batch.logprobs, batch.ref_logprobs))
        wrong_BT = reference.kl(logprobs_BT, ref_logprobs_BT, conventions, log_weights_BT)
        without = reference.policy_loss(batch, conventions.replace(kl_coef=0.0)).loss
        counted = conventions.replace(aggregation=conventions.kl_aggregation or conventions.aggregation)
        kl = reference.aggregate(wrong_BT, batch, counted)
        return LossOutput(without + conventions.kl_coef * kl, output.metrics)
