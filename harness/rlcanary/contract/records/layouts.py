"""The records of parallel layouts: how an update lies on ranks, and the pieces of rows and logits that ranks hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The ranks and micro-batches of one update.

    The world is the product of the numbers of data-, context-, tensor- and pipeline-parallel ranks.

    Attributes:
        data_parallel: groups of ranks that have different rows.
        context_parallel: ranks that have the same rows and compute different positions of them, by ring attention or
            otherwise (sequence parallelism of Ulysses).
        tensor_parallel: ranks that compute the same positions, each with a part of the weights.
        pipeline_parallel: stages that compute the same positions one after another, each with a part of the layers; the last
            one has the loss.
        expert_parallel: ranks, of those of `data_parallel`, among which the experts of a routed layer are divided.
        micro_batches: the parts, one after the other, of the rows of each data-parallel group.
    """

    data_parallel: int = 1
    context_parallel: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    expert_parallel: int = 1
    micro_batches: int = 1


@dataclass
class RowShard:
    """The positions of one row that a rank of a context-parallel group computes, in the order in which it has them.

    Any split will do: contiguous, in a zigzag that balances attention, or cut from packed rows. N positions, 0 where the
    rank has none of the row.

    Attributes:
        input_ids: [N].
        attention_mask: [N] bool, false on padding.
        position_ids: [N] position of each token in the whole row, anything on padding.
        labels: [N] the id that each position predicts, which is the row's next one; anything where `loss_mask` is false.
        loss_mask: [N] bool, true where the label is a trained token.
        old_logprobs: [N] the sampler's logprob of each label; anything where `loss_mask` is false. None if there
            are none.
        ref_logprobs: [N] likewise for the reference model.
    """

    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    labels: Tensor
    loss_mask: Tensor
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None


@dataclass
class VocabShards:
    """Logits whose vocabulary is split over tensor-parallel ranks.

    Attributes:
        logits: one tensor per rank, all [B, T, W]. Side by side they are [B, T, W × ranks].
        vocab_size: number of entries that are tokens. Those behind them only fill the last ranks, hold anything, and take
            no probability.
    """

    logits: list[Tensor]
    vocab_size: int
