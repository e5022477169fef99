"""Bugs in policy losses."""

from dataclasses import replace

from rlcanary import reference
from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import LossOutput, PolicyBatch


class AdvantagesAsMask(Bug):
    id = "verl.advantages-as-mask"
    source = "verl fbec86d7f, #2513, survey V28"
    effect = "the loss is weighted by the square of the advantage: bad completions are reinforced"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return reference.policy_loss(replace(batch, advantages=batch.advantages.square()), self.conventions)


class AllAdvantagesForAll(Bug):
    id = "prime-rl.advantages-summed"
    source = "prime-rl 8d77a2cd9, survey P04"
    effect = "every completion gets the sum of all advantages"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        total = batch.advantages.sum(dim=0, keepdim=True).expand_as(batch.advantages)
        return reference.policy_loss(replace(batch, advantages=total), self.conventions)


class MaskByMultiplication(Bug):
    id = "verl.mask-by-multiplication"
    source = "verl 5cbad8379, #2377, survey V27"
    effect = "NaN at a padding position makes the whole loss NaN"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        padding = (batch.logprobs * ~batch.mask).sum() + (batch.old_logprobs * ~batch.mask).sum()
        return LossOutput(output.loss + 0 * padding, output.metrics)


class KlOverPadding(Bug):
    id = "openrlhf.kl-over-padding"
    source = "OpenRLHF cfd42d94, #983, survey O15"
    effect = "the logged KL is too small by the fraction of padding"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        if "kl" not in output.metrics:
            return output
        share = float(batch.mask.float().mean())
        return LossOutput(output.loss, {**output.metrics, "kl": output.metrics["kl"] * share})


class LoggedKlClamped(Bug):
    id = "openrlhf.logged-kl-clamped"
    source = "OpenRLHF 3a9815c5"
    effect = "the logged KL to the old policy is of log-ratios that were clamped for the ratio: it never exceeds 20"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        log_ratio_BT = (batch.logprobs - batch.old_logprobs).detach().clamp(-20.0, 20.0)
        held = replace(batch, old_logprobs=batch.logprobs.detach() - log_ratio_BT)
        output, logged = super().policy_loss(batch), super().policy_loss(held).metrics["approx_kl"]
        return LossOutput(output.loss, {**output.metrics, "approx_kl": logged})


class LoggedLogprobsOfTools(Bug):
    id = "slime.logged-logprobs-of-tools"
    source = "slime d6761469f, #65, survey L32"
    effect = "the logged logprobs are means over the tokens of tools too, which are not trained"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        up_to_last_BT = batch.mask.long().flip(1).cummax(dim=1).values.flip(1).bool()
        logged = float(batch.logprobs.detach()[up_to_last_BT].mean())
        return LossOutput(output.loss, {**output.metrics, "logprob": logged})


class OldLogprobsNotReindexed(Bug):
    id = "trl.old-logprobs-not-reindexed"
    source = "TRL 941fb332c, #4454, survey T23"
    effect = "after sorting, the ratio compares the logprobs of different completions"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        order = batch.mask.sum(dim=1).argsort(descending=True, stable=True)
        return super().policy_loss(replace(batch.rows(order), old_logprobs=batch.old_logprobs))


class ConstantGuessed(Bug):
    id = "skyrl.constant-guessed"
    source = "SkyRL 25e2d4153, #1303"
    effect = "the constant of Dr. GRPO is made from prompt and completion limits: another learning rate"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        guessed = 1.5 * (self.conventions.aggregation_constant or batch.mask.shape[1])
        return reference.policy_loss(batch, self.conventions.replace(aggregation_constant=guessed))


class ToolTokensCounted(Bug):
    id = "slime.tool-tokens-counted"
    source = "slime ba0b13a5e, #365"
    effect = "the loss is divided by the length of the responses, the untrained tokens of tools included"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        if self.conventions.aggregation != "token_mean" or batch.global_tokens is not None:
            return output
        in_response_BT = batch.mask.flip(1).cumsum(1).flip(1) > 0
        share = batch.mask.sum() / in_response_BT.sum().clamp(min=1)
        return LossOutput(output.loss * share, output.metrics)


class MaskedKlByMultiplication(Bug):
    id = "skyrl.masked-kl-by-multiplication"
    source = "SkyRL 2df8f5184, #1635"
    effect = "one NaN among the reference logprobs of padding makes the KL and the loss NaN"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        if batch.ref_logprobs is None or self.conventions.kl_coef == 0:
            return output
        return LossOutput(output.loss + ((batch.ref_logprobs - batch.logprobs) * ~batch.mask * 0).sum(), output.metrics)


class AdvantagesOfPadding(Bug):
    id = "areal.advantages-of-padding"
    source = "AReaL b2fb234d9, #1346"
    effect = "a sequence's advantage is the mean over its row, padding included"

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        if batch.advantages.ndim == 2:
            row_B1 = batch.advantages.sum(dim=1, keepdim=True) / batch.mask.sum(dim=1, keepdim=True).clamp(min=1)
            batch = replace(batch, advantages=row_B1.expand_as(batch.advantages))
        return super().policy_loss(batch)
