"""verl's engine around the losses of fine-tuning and of the critic: micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.verl.other_losses import OtherLosses
from rlcanary.adapters.verl.workers.engine import given_values, jagged, new_engine, on_ranks, sent, tensordict
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.credit import ValueBatch
from rlcanary.contract.records.other_losses import SupervisedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.records.other_losses import OtherBatch


class Splitting(OtherLosses):
    """Losses of fine-tuning and of the critic in the micro-batches and over the ranks of an update."""

    def accumulated_other_loss(self, batch: OtherBatch, n_micro: int) -> LossOutput:
        return self._other_update(batch, n_micro=n_micro)

    def sharded_other_loss(self, batch: OtherBatch, n_ranks: int) -> LossOutput:
        return self._other_update(batch, n_ranks=n_ranks)

    def _other_update(self, batch: OtherBatch, n_micro: int = 1, n_ranks: int = 1) -> LossOutput:
        """Run the engine's `forward_backward_batch` on each rank, and average the ranks' gradients as FSDP does."""
        from verl.utils.tensordict_utils import chunk_tensordict

        if not isinstance(batch, SupervisedBatch | ValueBatch):
            raise NotProvided("only fine-tuning and the critic are driven in micro-batches and over ranks")
        rows = len(batch.mask)
        if rows % (n_ranks * n_micro):
            raise NotProvided("ranks and micro-batches have to be of equal size")
        size = rows // (n_ranks * n_micro)
        prepared = self._fine_tuning(batch) if isinstance(batch, SupervisedBatch) else self._critic(batch)
        fields, loss_function, engine_on = prepared
        plan = {"global_batch_size": rows, "use_dynamic_bsz": False, "micro_batch_size_per_gpu": size}
        with quiet():
            chunks = chunk_tensordict(tensordict(fields, temperature=1.0, **plan), n_ranks)

        def on_rank(rank: int, group: Any) -> Tensor:
            losses, leaves = [], []

            def called(**given: Any) -> tuple[Tensor, dict[str, Any]]:
                loss, _ = loss_function(**given)
                losses.append(loss)
                leaves.append(loss.detach().requires_grad_())
                return leaves[-1], {}

            engine_on(group, rank * rows // n_ranks, size).forward_backward_batch(chunks[rank], called)
            total: Tensor = sum(leaf.grad * loss for leaf, loss in zip(leaves, losses, strict=True))
            return total

        loss = sum(on_ranks(n_ranks, on_rank)) / n_ranks
        return LossOutput(loss, {"loss": float(loss.detach())} if isinstance(batch, SupervisedBatch) else {})

    def _fine_tuning(self, batch: SupervisedBatch) -> tuple[dict[str, Tensor], Callable[..., Any], Callable[..., Any]]:
        """Return the data, the loss and what makes the engine of a rank, whose model has these logits."""
        import torch
        from verl.workers.utils.losses import sft_loss

        rows, width, vocabulary = batch.logits.shape
        fields = {
            "input_ids": jagged(batch.token_ids),
            "loss_mask": jagged(batch.mask.long()),
            "position_ids": jagged(torch.arange(width).expand(rows, -1)),
        }

        def engine_on(group: Any, first_row: int, size: int) -> Any:
            pieces = iter(batch.logits[first_row:].split(size))
            packed = lambda **_: SimpleNamespace(logits=next(pieces).reshape(1, -1, vocabulary).clone())  # noqa: E731
            return new_engine(self._actor_config, group, packed)

        return fields, partial(sft_loss, config=None), engine_on

    def _critic(self, batch: ValueBatch) -> tuple[dict[str, Tensor], Callable[..., Any], Callable[..., Any]]:
        """Likewise for a critic with these values."""
        import torch
        from verl.workers.utils.losses import value_loss

        if batch.old_values is None:
            raise NotProvided("verl always clips the values, around the old ones")
        rows, width = batch.mask.shape
        tokens = torch.zeros(rows, 1 + width, dtype=torch.long)
        fields = {
            **{name: sent(each) for name, each in (("values", batch.old_values), ("returns", batch.returns))},
            "response_mask": sent(batch.mask.long()),
            "loss_mask": sent(batch.mask.long()),
            "input_ids": jagged(tokens),
            "position_ids": jagged(torch.arange(1 + width).expand(rows, -1)),
            "prompts": sent(tokens[:, :1]),
            "responses": sent(tokens[:, 1:]),
            "row": torch.arange(rows),
        }
        config = SimpleNamespace(
            cliprange_value=self.conventions.value_clip,
            loss_agg_mode=self.critic.get("loss_agg_mode", "token-mean"),
            loss_scale_factor=self.conventions.aggregation_constant,
        )

        def engine_on(group: Any, *_: int) -> Any:
            engine = new_engine(self._actor_config, group, lambda **_: None, kind="FSDPEngineWithValueHead")
            engine.prepare_model_outputs = partial(given_values, batch.values)
            return engine

        return fields, partial(value_loss, config), engine_on
