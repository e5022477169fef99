"""The parts of the objective, and the update in pieces."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, LossOutput, PolicyBatch


class Objective:
    """The parts of a loss, and the loss in micro-batches and over ranks."""

    def entropy(self, logits: Tensor) -> Tensor:
        """[B, T, V] logits -> [B, T] entropy in nats."""
        raise NotProvided

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        """[B, T] and [B, T] logprobs of the same tokens -> [B, T] KL estimates, differentiable in the first."""
        raise NotProvided

    def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
        """[B, T] trainer logprobs, sampler logprobs and mask -> [B, T] weights that correct for their mismatch."""
        raise NotProvided

    def packed_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        """`completion_logprobs` with the rows packed into one sequence without padding -> [B, T]."""
        raise NotProvided

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        """The same update in `n_micro` micro-batches. The gradient of the returned loss is the accumulated gradient."""
        raise NotProvided

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        """The same update over `n_ranks` data-parallel ranks, with the metrics that rank 0 logs.

        The gradient of the returned loss is the reduced gradient.
        """
        raise NotProvided

    def accumulation_steps(self, batch_size: int, micro_batch_size: int, n_ranks: int, sequence_parallel: int) -> int:
        """Micro-batches per update and data-parallel rank; `n_ranks` counts all, `sequence_parallel` of them share rows."""
        raise NotProvided
