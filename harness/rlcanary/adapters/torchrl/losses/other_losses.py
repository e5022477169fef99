"""torchrl's supervised loss on given logits, which its model wrapper shifts and scores."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.torchrl.base import TorchrlBase
from rlcanary.adapters.torchrl.options import new_supervised_loss
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput

if TYPE_CHECKING:
    from rlcanary.contract.records.other_losses import SupervisedBatch


class Supervised(TorchrlBase):
    """Supervised fine-tuning."""

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        import torch
        from tensordict import TensorDict, lazy_stack

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("torchrl's loss has no global counts")
        attended_BS = torch.ones_like(batch.mask)
        wrapper = self._wrapped(None, generate=False)

        def scored(_: Any) -> Any:
            logprobs_BS, _ = wrapper._compute_log_probs_from_model_output(
                {"logits": batch.logits}, batch.token_ids, attended_BS, pad_val=None
            )
            return lazy_stack([TensorDict({"log_probs": {"full": row_S}}) for row_S in logprobs_BS])

        rows = [
            TensorDict({"row": row, "masks": {"all_assistant_mask": mask_S, "all_attention_mask": attended_S}})
            for row, (mask_S, attended_S) in enumerate(zip(batch.mask, attended_BS, strict=True))
        ]
        actor = torch.nn.Module()
        actor.forward = scored
        with quiet():
            loss = new_supervised_loss(self.supervised, actor)
            try:
                loss.set_keys(history="row")
            except AttributeError as error:
                raise NotProvided("the supervised loss of this release reads histories alone") from error
            output = loss(lazy_stack(rows))
        return LossOutput(output.loss_sft, {"loss": float(output.loss_sft.detach())})
