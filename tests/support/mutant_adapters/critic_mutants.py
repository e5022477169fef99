"""Mistakes in credit per token and in the critic that no shipped bug in the museum makes."""

from dataclasses import replace

import torch

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.credit import Credit, CreditBatch, ValueBatch


class ReturnsOfWhitenedAdvantages(ReferenceAdapter):
    def token_advantages(self, batch: CreditBatch) -> Credit:
        credit = super().token_advantages(batch)
        if credit.returns is None or batch.values is None:
            return credit
        return replace(credit, returns=credit.advantages + batch.values)


class StatisticsOfAllColumns(ReferenceAdapter):
    """Whitens by mean and deviation of the whole tensor, padding included."""

    def token_advantages(self, batch: CreditBatch) -> Credit:
        plain = reference.token_advantages(batch, self.conventions.replace(whitening="none"))
        everywhere_BT = torch.ones_like(batch.mask)
        return replace(plain, advantages=reference.whitened(plain.advantages, everywhere_BT, self.conventions))


class RewardOnTheLastColumn(ReferenceAdapter):
    """The outcome reward falls on the last column, where only the longest rows are trained."""

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if self.conventions.token_credit != "gae":
            return super().token_advantages(batch)
        return super().token_advantages(replace(batch, rewards=batch.rewards * batch.mask[:, -1]))


class GroupsByPosition(ReferenceAdapter):
    def token_advantages(self, batch: CreditBatch) -> Credit:
        return super().token_advantages(replace(batch, group_ids=batch.group_ids.sort().values))


class RowsCountedByTokens(ReferenceAdapter):
    """The mean of a group is taken over a [B, T] tensor, so that long rows count more."""

    def token_advantages(self, batch: CreditBatch) -> Credit:
        changes = {"baseline_weighting": "tokens", "advantage_baseline": "mean"}
        return reference.token_advantages(batch, self.conventions.replace(**changes))


class ValuesShiftedByOne(ReferenceAdapter):
    def token_advantages(self, batch: CreditBatch) -> Credit:
        values_BT = None if batch.values is None else batch.values.roll(1, dims=1)
        return super().token_advantages(replace(batch, values=values_BT))


class DividedByNothing(ReferenceAdapter):
    """Divides by the deviation as it is, which is 0 where all advantages are equal."""

    def token_advantages(self, batch: CreditBatch) -> Credit:
        credit, ddof = super().token_advantages(batch), self.conventions.whitening_ddof
        kept_N = credit.advantages[batch.mask]
        if self.conventions.whitening not in ("mean_std", "std") or len(kept_N) <= ddof:
            return credit
        return replace(credit, advantages=credit.advantages / kept_N.std(correction=ddof))


class SmallerOfTwoErrors(ReferenceAdapter):
    """Takes the minimum, as the policy's surrogate does."""

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        clip = self.conventions.value_clip
        if clip is None or batch.old_values is None:
            return super().value_loss(batch)
        held_BT = batch.values.clamp(batch.old_values - clip, batch.old_values + clip)
        is_smaller_BT = (held_BT - batch.returns).abs() < (batch.values - batch.returns).abs()
        chosen_BT = torch.where(is_smaller_BT, held_BT, batch.values)
        return ReferenceAdapter(self.conventions.replace(value_clip=None)).value_loss(replace(batch, values=chosen_BT))


class LossOfPaddingToo(ReferenceAdapter):
    def value_loss(self, batch: ValueBatch) -> LossOutput:
        return super().value_loss(replace(batch, mask=torch.ones_like(batch.mask)))


class ValuesMultipliedByTheMask(ReferenceAdapter):
    """The loss and the gradient are right as long as padding holds finite numbers."""

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        output = super().value_loss(batch)
        return LossOutput(output.loss + 0 * (batch.values * batch.mask).sum(), output.metrics)


CRITIC_MUTANTS = [
    ReturnsOfWhitenedAdvantages,
    StatisticsOfAllColumns,
    RewardOnTheLastColumn,
    GroupsByPosition,
    RowsCountedByTokens,
    ValuesShiftedByOne,
    DividedByNothing,
    SmallerOfTwoErrors,
    LossOfPaddingToo,
    ValuesMultipliedByTheMask,
]
