"""Mistakes in losses that leave one half of value, gradient and metrics right."""

from dataclasses import replace

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import LossOutput, PolicyBatch


class WhereAroundTheResult(ReferenceAdapter):
    """The loss is finite whatever stands at masked positions, the gradient is not."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        ratio_BT = (batch.logprobs - batch.old_logprobs).exp()
        held_BT = ratio_BT.clamp(0.8, 1.2)
        advantages_B1 = batch.advantages.unsqueeze(1)
        loss_BT = -torch.minimum(ratio_BT * advantages_B1, held_BT * advantages_B1)
        loss_BT = torch.where(batch.mask, loss_BT, 0.0)
        return LossOutput((loss_BT.sum(dim=1) / batch.mask.sum(dim=1)).mean())


class MultipliedByTheMask(ReferenceAdapter):
    """Right in every term but one, which is multiplied by the mask."""

    term = "ref_logprobs"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        # One advantage per row, or a value per token.
        given_BT = getattr(batch, self.term).reshape(len(batch.mask), -1)
        return LossOutput(output.loss + 0 * (given_BT * batch.mask).sum(), output.metrics)


class EntropyOfPadding(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        assert batch.entropy is not None
        return LossOutput(output.loss, {"entropy": float(batch.entropy.mean())})


class CountedOnBothSides(ReferenceAdapter):
    """The clip fraction counts every ratio beyond a bound, also where the bound does not hold it."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        ratio_BT = reference.importance_ratio(batch.logprobs, batch.old_logprobs, batch.mask, self.conventions).detach()
        outside_BT = (ratio_BT < 0.8) | (ratio_BT > 1.2)
        return LossOutput(output.loss, {"clip_fraction": float(outside_BT[batch.mask].float().mean())})


class CountsTokensWithoutAdvantage(ReferenceAdapter):
    """The clip fraction counts a ratio above the bound also where the advantage is 0."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        ratio_BT = (batch.logprobs - batch.old_logprobs).exp().detach()
        above_BT = (ratio_BT > 1.2) & (batch.advantages.unsqueeze(1) == 0)
        more = float(above_BT[batch.mask].float().mean())
        return LossOutput(output.loss, {"clip_fraction": output.metrics["clip_fraction"] + more})


class WrongCispoThatCountsClippedTokens(ReferenceAdapter):
    """CISPO with twice the gradient, whose clip fraction is a sum."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        if self.conventions.objective != "cispo":
            return output
        counted = output.metrics["clip_fraction"] * float(batch.mask.sum())
        return LossOutput(2 * output.loss, {"clip_fraction": counted})


class LoggedKlIsASum(ReferenceAdapter):
    """Logs a KL only with a KL in the loss, and then its sum."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        kl = output.metrics.pop("kl", 0.0)
        logged = {"kl": kl * float(batch.mask.sum())} if self.conventions.kl_coef else {}
        return LossOutput(output.loss, {**output.metrics, **logged})


class LogRatioUnclamped(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return reference.policy_loss(batch, self.conventions.replace(log_ratio_clamp=None))


class BalancedByTokens(ReferenceAdapter):
    """Rows go to the piece with the fewest tokens, longest first, and every piece counts alike."""

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        lengths_B = batch.mask.sum(dim=1)
        pieces: list[list[int]] = [[] for _ in range(n_micro)]
        tokens = [0] * n_micro
        for row in lengths_B.argsort(descending=True, stable=True).tolist():
            shortest = tokens.index(min(tokens))
            pieces[shortest].append(row)
            tokens[shortest] += int(lengths_B[row])
        losses = [
            reference.policy_loss(batch.rows(torch.tensor(rows)), self.conventions).loss for rows in pieces if rows
        ]
        return LossOutput(torch.stack(losses).sum() / n_micro)

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        return self.accumulated_loss(batch, n_ranks)


class MetricsOfTheLastMicroBatch(ReferenceAdapter):
    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        output = super().accumulated_loss(batch, n_micro)
        last = reference.split(batch, n_micro, self.conventions)[-1]
        return LossOutput(output.loss, reference.policy_loss(last, self.conventions).metrics)


class EntropyBonusWithoutGradient(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        entropy_BT = None if batch.entropy is None else batch.entropy.detach()
        return super().policy_loss(replace(batch, entropy=entropy_BT))


class NanRewardCountsAsZero(ReferenceAdapter):
    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return super().advantages(rewards.nan_to_num(), group_ids)


class PartTakenForTheWhole(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return super().policy_loss(replace(batch, global_tokens=None, global_sequences=None))


class TokensCountedInTheBatchsDtype(ReferenceAdapter):
    """The number of tokens is added up one by one in the dtype of the logprobs."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        tokens = int(batch.mask.sum())
        counted = torch.zeros((), dtype=batch.logprobs.dtype)
        for _ in range(tokens):
            counted += 1
        return LossOutput(output.loss * (tokens / counted.float()), output.metrics)


LOSS_MUTANTS = [
    TokensCountedInTheBatchsDtype,
    PartTakenForTheWhole,
    NanRewardCountsAsZero,
    EntropyBonusWithoutGradient,
    WhereAroundTheResult,
    MultipliedByTheMask,
    EntropyOfPadding,
    CountedOnBothSides,
    LogRatioUnclamped,
    BalancedByTokens,
    MetricsOfTheLastMicroBatch,
]
