"""Layouts: rows, updates and vocabularies that are split over ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch
    from rlcanary.contract.records.layouts import Layout, RowShard, VocabShards
    from rlcanary.contract.records.routing import ReplayLayout, RoutedRow


class Layouts:
    """The computation of each rank of a parallel layout, simulated in one process or by processes of your own."""

    def shard_rows(self, batch: CollatedBatch, layout: Layout, rank: int) -> list[RowShard]:
        """Cut the rows for this rank of a context-parallel group -> one shard per row, in order.

        `rank` counts from 0 within the group. The last token of a row predicts nothing and need not be in any shard. Code
        that needs lengths of a multiple pads inside; code that cannot take such a batch declines with `NotProvided`.
        """
        raise NotProvided

    def gathered_logprobs(self, shards: list[list[Tensor]], batch: CollatedBatch, layout: Layout) -> Tensor:
        """Put logprobs of shards together again -> [B, T] logprobs of `batch.completion_ids`.

        `shards[rank][row]` is the logprob of each label of that rank's shard of that row, as `shard_rows` cut it, and has
        anything where its `loss_mask` is false. If the result has a gradient, it is that of a sum over the whole batch.
        """
        raise NotProvided

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        """One optimizer update on a `TrainState`, computed in the pieces of this layout -> logged metrics.

        It is the update of `train_step`, whatever the layout: weights, learning rate and metrics. `accumulated_loss` and
        `sharded_loss` see one loss on given logprobs; here advantages, divisors and the norm of the gradient are reduced
        over the ranks too, and ranks share rows. Metrics go under the names of `train_step`, and `loss` is the logged
        loss. Code that cannot split these rows so declines with `NotProvided`.
        """
        raise NotProvided

    def vocab_parallel_logprobs(self, shards: VocabShards, token_ids: Tensor, temperature: float) -> Tensor:
        """`token_logprobs` from logits whose vocabulary is split over ranks -> [B, T] logprobs at this temperature.

        Differentiable in each rank's logits, as if they had been one tensor. Code whose logits have no padding declines a
        `vocab_size` below their width with `NotProvided`.
        """
        raise NotProvided

    def replayed_routes(self, rows: list[RoutedRow], layout: ReplayLayout) -> Tensor:
        """The experts that a forward pass of these packed rows takes in the place of its routers' choice -> [N, L, K] long.

        The N tokens are those of the rows one after another and the padding behind them; L counts dense layers too. Where
        there is no route to replay (a row's last token, a dense layer, padding) the result has anything.
        """
        raise NotProvided
