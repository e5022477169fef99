"""Credit per token, and the critic that some of it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, LossOutput
    from rlcanary.contract.records.credit import Credit, CreditBatch, ValueBatch


class Critic:
    """From the rewards of completions to the credit of tokens, and the training of a critic."""

    def token_advantages(self, batch: CreditBatch) -> Credit:
        """Rewards of completions and tokens -> [B, T] advantages and, with a critic, [B, T] returns.

        Code that has no place for rewards of tokens, or for tokens of tools within a completion, declines a batch with
        them with `NotProvided`.
        """
        raise NotProvided

    def values(self, model: Any, batch: CollatedBatch) -> Tensor:
        """Forward pass and shift -> [B, T] the critic's value before each completion token, of the state that drew it.

        The model is called with input_ids, attention_mask and position_ids, and returns an object with `logits` [B, S, 1]:
        at each position the value of the sequence up to and including it.
        """
        raise NotProvided

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        """The critic's loss to minimise, with its coefficient, differentiable with respect to `batch.values`."""
        raise NotProvided
