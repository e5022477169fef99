"""Bugs in the credit of tokens."""

from dataclasses import replace

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.records.credit import Credit, CreditBatch


def _rewards(batch: CreditBatch) -> Tensor:
    """[B, T]: rewards of tokens, and each row's reward on its last trained token."""
    is_last_BT = batch.mask & (batch.mask.flip(1).cumsum(dim=1).flip(1) == 1)
    token_rewards_BT = torch.zeros(batch.mask.shape) if batch.token_rewards is None else batch.token_rewards
    return token_rewards_BT * batch.mask + is_last_BT * batch.rewards.unsqueeze(1)


class KlOfToolTokens(Bug):
    id = "slime.kl-of-tool-tokens"
    source = "slime 166441911, #1372"
    effect = "the KL penalty of tokens that a tool wrote is in the returns of the tokens before them"

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if batch.token_rewards is None or self.conventions.token_credit != "returns":
            return super().token_advantages(batch)
        # Each token's reward, and those of the untrained tokens between it and the next trained one.
        stray_BT = batch.token_rewards.masked_fill(batch.mask, 0)
        later_BT = stray_BT.flip(1).cumsum(dim=1).flip(1)
        credit = super().token_advantages(batch)
        return replace(credit, advantages=(credit.advantages + later_BT).masked_fill(~batch.mask, 0))


class ReturnsEndAtTools(Bug):
    id = "verl.returns-end-at-tools"
    source = "verl issue #7278, #7300"
    effect = "the running return is set to zero at tokens of tools: all turns but the last have return 0"

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if self.conventions.token_credit != "returns":
            return super().token_advantages(batch)
        outcome_B = reference.advantages(batch.rewards, batch.group_ids, self.conventions)
        rewards_BT, running_B, columns = _rewards(replace(batch, rewards=outcome_B)), torch.zeros_like(outcome_B), []
        for column in reversed(range(batch.mask.shape[1])):
            running_B = (rewards_BT[:, column] + self.conventions.discount * running_B) * batch.mask[:, column]
            columns.append(running_B)
        return Credit(torch.stack(columns[::-1], dim=1))


class GaeOverColumns(Bug):
    id = "miles.gae-over-tool-tokens"
    source = "miles #1827; verl #2337 before it"
    effect = "tokens of tools are steps: credit of earlier turns decays by their number, and their values leak into it"

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if self.conventions.token_credit != "gae":
            return super().token_advantages(batch)
        is_within_BT = batch.mask.flip(1).cumsum(dim=1).flip(1) > 0
        return super().token_advantages(replace(batch, mask=is_within_BT))


class ValueBehindTheEnd(Bug):
    id = "roll.value-of-padding"
    source = "ROLL #447"
    effect = "the value of the first padding token counts as the value behind the end"

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if self.conventions.token_credit != "gae" or batch.values is None:
            return super().token_advantages(batch)
        conventions, last_B = self.conventions, torch.zeros(len(batch.mask))
        rewards_BT, columns = _rewards(batch), []
        next_values_BT = torch.nn.functional.pad(batch.values, (0, 1))[:, 1:]
        errors_BT = rewards_BT + conventions.discount * next_values_BT - batch.values
        for column in reversed(range(batch.mask.shape[1])):
            decayed_B = conventions.discount * conventions.gae_lambda * last_B
            last_B = (errors_BT[:, column] + decayed_B) * batch.mask[:, column]
            columns.append(last_B)
        advantages_BT = torch.stack(columns[::-1], dim=1)
        whitened_BT = reference.whitened(advantages_BT, batch.mask, conventions)
        return Credit(whitened_BT, advantages_BT + batch.values)


class WhitenedPerSlice(Bug):
    id = "slime.whitened-per-slice"
    source = "slime dd7f0379c, #2235"
    effect = (
        "each context-parallel rank whitens its own part of the sequences: two halves of a row are on different scales"
    )

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if self.conventions.whitening == "none":
            return super().token_advantages(batch)
        plain = reference.token_advantages(batch, self.conventions.replace(whitening="none"))
        half = batch.mask.shape[1] // 2
        parts = [
            reference.whitened(plain.advantages[:, part], batch.mask[:, part], self.conventions)
            for part in (slice(half), slice(half, None))
        ]
        return replace(plain, advantages=torch.cat(parts, dim=1))


class OneTokenWhitened(Bug):
    id = "roll.one-token-whitened"
    source = "ROLL 370cb24c"
    effect = "whitening is left out for no trained token, but not for one, whose deviation is NaN"

    def token_advantages(self, batch: CreditBatch) -> Credit:
        return reference.token_advantages(batch, self.conventions.replace(whitening_singleton="nan"))


class MaskOfTheLastStep(Bug):
    id = "skyrl.mask-of-the-last-step"
    source = "SkyRL 76b718782, #1507"
    effect = "the masked advantages of the last step are copied to every earlier one, whose tokens stand elsewhere"

    def token_advantages(self, batch: CreditBatch) -> Credit:
        credit = super().token_advantages(batch)
        last_B = torch.stack([(batch.group_ids == group).nonzero().max() for group in batch.group_ids])
        return replace(credit, advantages=credit.advantages * batch.mask[last_B])


class RewardMinusValue(Bug):
    id = "rlhf-book.reward-minus-value"
    source = "rlhf-book #216"
    effect = "the advantage of a token is its own reward minus its value: all but the last token are taught to be worse"

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if self.conventions.token_credit != "gae" or batch.values is None:
            return super().token_advantages(batch)
        advantages_BT = _rewards(batch) - batch.values
        return replace(super().token_advantages(batch), advantages=advantages_BT)


class PaddingInTheReturns(Bug):
    id = "rlhf-book.padding-in-returns"
    source = "rlhf-book #216"
    effect = "the KL of padding tokens is in the return of every token"

    def token_advantages(self, batch: CreditBatch) -> Credit:
        if batch.token_rewards is None:
            return super().token_advantages(batch)
        is_padding_BT = batch.mask.flip(1).cumsum(dim=1).flip(1) == 0
        leaked_B = (batch.token_rewards * is_padding_BT).sum(dim=1)
        return super().token_advantages(replace(batch, rewards=batch.rewards + leaked_B))
