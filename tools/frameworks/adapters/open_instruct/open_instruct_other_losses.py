"""open-instruct's losses on preferences, and its split of rows over ranks that share them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import open_instruct_run as run
from open_instruct_objective import NO_PADDING, Objective

from rlcanary.adapters.batches import prompts_of, tokens_of_completions
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.records.layouts import RowShard

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch
    from rlcanary.contract.records.layouts import Layout
    from rlcanary.contract.records.other_losses import PreferenceBatch

NAMES = {
    "loss": "loss",
    "chosen_rewards": "chosen_reward",
    "rejected_rewards": "rejected_reward",
    "accuracy": "reward_accuracy",
}


class OtherLosses(Objective):
    """What is trained besides GRPO."""

    dpo: dict[str, Any]

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        """Run the loss of a micro-batch of `DPOTrainModule` on the logprobs of tokens."""
        import torch
        from open_instruct import dpo_utils, model_utils
        from open_instruct.olmo_core_train_modules import DPOTrainModule

        if batch.global_pairs is not None or batch.global_tokens is not None:
            raise NotProvided("the module takes the mean over the pairs of a micro-batch")
        config = dpo_utils.DPOConfig(**self.dpo)
        config.loss_type = dpo_utils.DPOLossType(config.loss_type)
        labels = {
            "chosen_labels": _labels(batch.chosen_mask),
            "rejected_labels": _labels(batch.rejected_mask),
        }

        def summed(logprobs: Tensor, name: str) -> Tensor:
            # At each position there is the logprob of the next label.
            shifted = torch.nn.functional.pad(logprobs, (0, 1))
            found: Tensor = dpo_utils._get_batch_logps(shifted, labels[name], config.loss_type.is_average_loss)
            return found

        def forward(*_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
            return (
                summed(batch.chosen_logprobs, "chosen_labels"),
                summed(batch.rejected_logprobs, "rejected_labels"),
                None,
            )

        cache = None
        if config.loss_type.needs_reference_model:
            if batch.ref_chosen_logprobs is None or batch.ref_rejected_logprobs is None:
                raise NotProvided("this loss needs a reference")
            cache = model_utils.TensorCache(
                {
                    "chosen_logps": summed(batch.ref_chosen_logprobs, "chosen_labels"),
                    "rejected_logps": summed(batch.ref_rejected_logprobs, "rejected_labels"),
                }
            )
        module = SimpleNamespace(
            _forward_fn=forward, _forward_kwargs={}, model=None, dpo_config=config, reference_cache=cache, _metrics={}
        )
        pairs = {"index": torch.arange(len(batch.chosen_mask)), **labels}
        with run.on_cpu():
            loss, logged = DPOTrainModule._compute_microbatch_loss(module, pairs)
        return LossOutput(loss, {ours: float(logged[theirs]) for theirs, ours in NAMES.items()})

    def shard_rows(self, batch: CollatedBatch, layout: Layout, rank: int) -> list[RowShard]:
        """Split rows as the learner of a sequence-parallel rank does, whose step shifts the labels within its part."""
        import torch
        from open_instruct.data_types import CollatedBatchData
        from open_instruct.utils import UlyssesSPSplitter

        ranks = layout.context_parallel
        if ranks < 2:
            raise NotProvided("without sequence parallelism open-instruct splits nothing")
        splitter = UlyssesSPSplitter(rank, None, ranks, torch.device("cpu"), NO_PADDING)
        kept_BT = tokens_of_completions(batch)
        shards = []
        for row, prompt in enumerate(prompts_of(batch)):
            kept = kept_BT[row]
            ids = torch.cat([prompt, batch.completion_ids[row][kept]]).unsqueeze(0)
            mask = torch.nn.functional.pad(batch.completion_mask[row][kept], (len(prompt), 0)).unsqueeze(0)
            logprobs = torch.full(ids.shape, torch.nan)
            if batch.old_logprobs is not None:
                logprobs[0, len(prompt) :] = batch.old_logprobs[row][kept]
            data = CollatedBatchData(
                query_responses=[ids],
                attention_masks=[torch.ones_like(ids)],
                position_ids=[torch.arange(ids.shape[1]).unsqueeze(0)],
                advantages=[torch.zeros(ids.shape)],
                response_masks=[mask],
                vllm_logprobs=[logprobs],
            )
            with run.on_cpu(all_gather=lambda found, own, **_: [each.copy_(own) for each in found]):
                part = splitter.split_collated_batch(data)
            shards.append(_shard(part, batch.old_logprobs is not None))
        return shards


def _labels(mask: Tensor) -> Tensor:
    import torch

    return torch.nn.functional.pad(torch.where(mask, 1, -100), (1, 0), value=-100)


def _shard(part: Any, has_logprobs: bool) -> RowShard:
    """Make the shard of what `step` and `forward_for_logprobs` read of a part: the last position of it has no label."""
    import torch

    def shifted(values: Tensor, filler: Any) -> Tensor:
        return torch.nn.functional.pad(values[0, 1:], (0, 1), value=filler)

    return RowShard(
        input_ids=part.query_responses[0][0],
        attention_mask=part.attention_masks[0][0].bool(),
        position_ids=part.position_ids[0][0],
        labels=shifted(part.query_responses[0], NO_PADDING),
        loss_mask=shifted(part.response_masks[0], False),
        old_logprobs=shifted(part.vllm_logprobs[0], torch.nan) if has_logprobs else None,
    )
