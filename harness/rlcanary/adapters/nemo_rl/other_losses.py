"""NeMo RL's losses of a critic, of labels and of preferences, on given values and logprobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import part
from rlcanary.contract.adapter import Adapter, NotProvided
from rlcanary.contract.batch import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.records.credit import ValueBatch
    from rlcanary.contract.records.other_losses import PreferenceBatch, SupervisedBatch

# The defaults of `DPOLossConfig`, which had none in older trees.
PREFERENCE: dict[str, Any] = {
    "reference_policy_kl_penalty": 0.05,
    "preference_loss_weight": 1.0,
    "sft_loss_weight": 0.0,
    "preference_average_log_probs": False,
    "sft_average_log_probs": False,
}
PREFERENCES = {
    "loss": "loss",
    "accuracy": "reward_accuracy",
}


class OtherLosses(Adapter):
    """Losses of a critic, of labels and of preferences."""

    def value_loss(self, batch: ValueBatch) -> LossOutput:
        import torch
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        make = part("nemo_rl.algorithms.loss.loss_functions:MseValueLossFn")
        config = part("nemo_rl.algorithms.loss.loss_functions:MseValueLossConfig")
        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the workers count the tokens of the whole update themselves")
        data = BatchedDataDict(
            {
                "token_mask": batch.mask.float(),
                "sample_mask": torch.ones(len(batch.mask)),
                "returns": batch.returns,
                "values": batch.old_values,
            }
        )
        loss, _ = make(config())(
            batch.values.unsqueeze(-1), data, torch.tensor(float(len(batch.mask))), batch.mask.sum().float()
        )
        return LossOutput(loss)

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        import torch
        from nemo_rl.algorithms.loss.loss_functions import NLLLossFn
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the workers count the tokens of the whole update themselves")
        data = BatchedDataDict({"token_mask": batch.mask.float(), "sample_mask": torch.ones(len(batch.mask))})
        loss, metrics = NLLLossFn()(
            scored(batch.logits, batch.token_ids),
            data,
            torch.tensor(float(len(batch.mask))),
            batch.mask[:, 1:].sum().float(),  # as the workers count them: nothing predicts the first token
        )
        return LossOutput(loss, {"loss": metrics["loss"], "tokens": metrics["num_unmasked_tokens"]})

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        import torch
        from nemo_rl.algorithms.loss.loss_functions import DPOLossConfig, DPOLossFn
        from nemo_rl.distributed.batched_data_dict import BatchedDataDict

        if batch.global_pairs is not None or batch.global_tokens is not None:
            raise NotProvided("the workers count the rows of the whole update themselves")
        if batch.ref_chosen_logprobs is None or batch.ref_rejected_logprobs is None:
            raise NotProvided("DPO has a reference model")
        width = max(batch.chosen_mask.shape[1], batch.rejected_mask.shape[1])

        def interleaved(chosen: Tensor, rejected: Tensor) -> Tensor:
            """Put each pair's completions beside each other, as NeMo RL has them."""
            padded = [torch.nn.functional.pad(each, (0, width - each.shape[1])) for each in (chosen, rejected)]
            return torch.stack(padded, dim=1).flatten(0, 1)

        mask = interleaved(batch.chosen_mask.float(), batch.rejected_mask.float())
        data = BatchedDataDict(
            {
                "token_mask": torch.nn.functional.pad(mask, (1, 0)),
                "sample_mask": torch.ones(len(mask)),
                # The last position's, which predicts nothing, is cut off.
                "reference_policy_logprobs": torch.nn.functional.pad(
                    interleaved(batch.ref_chosen_logprobs, batch.ref_rejected_logprobs), (0, 1)
                ),
            }
        )
        loss, metrics = DPOLossFn(DPOLossConfig(**PREFERENCE))(
            interleaved(batch.chosen_logprobs, batch.rejected_logprobs),
            data,
            torch.tensor(float(len(mask))),
            mask.sum(),
        )
        return LossOutput(loss, {ours: metrics[theirs] for theirs, ours in PREFERENCES.items()})


def scored(logits: Tensor, input_ids: Tensor) -> Tensor:
    """Score each id but the first with the logits of the position before it, on the CPU where there is no GPU."""
    from unittest.mock import patch

    import torch
    from nemo_rl.distributed.model_utils import get_next_token_logprobs_from_logits

    def stay(tensor: Tensor) -> Tensor:
        return tensor

    with patch.object(torch.Tensor, "cuda", torch.Tensor.cuda if torch.cuda.is_available() else stay):
        found: Tensor = get_next_token_logprobs_from_logits(input_ids=input_ids, next_token_logits=logits)
    return found
