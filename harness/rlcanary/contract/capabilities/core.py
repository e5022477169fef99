"""The core of the contract: logprobs, mask, advantages and the loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, LossOutput, PolicyBatch


class Core:
    """The capabilities to start with."""

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        """[B, T, V] logits that score [B, T] ids at their own position -> [B, T] logprobs at this temperature."""
        raise NotProvided

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        """Forward pass, shift and gather -> [B, T] logprobs of `batch.completion_ids`."""
        raise NotProvided

    def completion_mask(self, completion_ids: Tensor, eos_token_ids: Sequence[int], pad_token_id: int) -> Tensor:
        """[B, T] sampled ids, padded on the right -> [B, T] bool, true up to and including the first EOS."""
        raise NotProvided

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """[B] rewards and the group of each row -> [B] advantages."""
        raise NotProvided

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        """Loss to minimise, differentiable with respect to `batch.logprobs`, with its KL and entropy terms."""
        raise NotProvided
