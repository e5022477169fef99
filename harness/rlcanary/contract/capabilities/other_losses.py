"""Losses other than the policy's: supervised fine-tuning, distillation and preferences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import LossOutput
    from rlcanary.contract.records.other_losses import DistillationBatch, OtherBatch, PreferenceBatch, SupervisedBatch


class OtherLosses:
    """Losses of training before, beside or in place of reinforcement learning."""

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        """Cross entropy of the trained tokens, each under the logits at the position before it.

        Differentiable with respect to `batch.logits`. Metrics: `loss` (the returned loss as a number), `nll` (negative
        logprob of this batch's trained tokens, averaged over them, without label smoothing), `perplexity` (exp of `nll`),
        `accuracy` (share of trained tokens that have the highest logit) and `tokens` (their number).
        """
        raise NotProvided

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        """Divergence between teacher and student over the whole vocabulary, at each trained token.

        Differentiable with respect to `batch.logits`. Metrics: `loss` (the returned loss as a number) and `divergence`
        (of this batch's trained tokens, averaged over them, without a factor of the temperature or a term of hard labels).
        """
        raise NotProvided

    def distillation_advantages(self, student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[B, T] student and teacher logprobs of the tokens that the student sampled, mask -> [B, T] advantages.

        The log-ratio of teacher to student, without gradient: weighted with it, the student's policy gradient is on average
        that of minus KL(student ‖ teacher).
        """
        raise NotProvided

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        """Loss over pairs of completions (DPO and its relatives), averaged over the pairs.

        Differentiable with respect to `batch.chosen_logprobs` and `batch.rejected_logprobs`. A completion's reward is beta
        times its log-ratio of policy to reference, or times its logprob where no reference is declared; both are sums over
        its tokens, or means where length normalisation is declared. Metrics: `loss` (the returned loss as a number), and
        over the pairs the means of `chosen_reward`, `rejected_reward` and `reward_margin` (chosen minus rejected), and
        `reward_accuracy` (share of pairs whose chosen reward is the higher one).
        """
        raise NotProvided

    def accumulated_other_loss(self, batch: OtherBatch, n_micro: int) -> LossOutput:
        """One of the losses above, or a critic's `value_loss`, of an update in `n_micro` micro-batches of equally many rows.

        It is differentiable like that loss and equals it on the whole batch, metrics included. The loop's own counts are to
        be tested, so the batch tells no global ones. Code declines the kinds of batches that it does not train on with
        `NotProvided`.
        """
        raise NotProvided

    def sharded_other_loss(self, batch: OtherBatch, n_ranks: int) -> LossOutput:
        """Likewise over `n_ranks` data-parallel ranks, with the gradient that reaches the optimizer."""
        raise NotProvided
