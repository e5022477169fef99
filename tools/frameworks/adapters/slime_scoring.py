"""slime's logprobs and entropies."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import slime_run as run

from rlcanary.adapters.batches import prompts_of, tokens_of_completions
from rlcanary.contract.adapter import Adapter

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch


class Scoring(Adapter):
    """The scores of tokens."""

    settings: dict[str, Any]

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        return self._scored(logits, token_ids, temperature, with_entropy=False)[0]

    def entropy(self, logits: Tensor) -> Tensor:
        import torch

        return self._scored(logits, torch.zeros(logits.shape[:2], dtype=torch.long), 1.0, with_entropy=True)[1]

    def _scored(
        self, logits: Tensor, token_ids: Tensor, temperature: float, with_entropy: bool
    ) -> tuple[Tensor, Tensor]:
        """Run `get_log_probs_and_entropy` on rows whose prompt is one token -> [B, T] and [B, T], or [0]."""
        import torch
        from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

        rows, width, _ = logits.shape
        args = run.args_of({**self.settings, "rollout_temperature": temperature, "entropy_coef": 1.0})
        packed = torch.nn.functional.pad(logits, (0, 0, 0, 1)).flatten(0, 1).unsqueeze(0)
        with run.on_cpu():
            _, found = get_log_probs_and_entropy(
                packed.float(),  # as Megatron's output is
                args=args,
                unconcat_tokens=list(torch.nn.functional.pad(token_ids, (1, 0))),
                total_lengths=[width + 1] * rows,
                response_lengths=[width] * rows,
                with_entropy=with_entropy,
            )
        return torch.stack(found["log_probs"]), torch.stack(found["entropy"]) if with_entropy else torch.empty(0)

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        import torch
        from slime.backends.megatron_utils.data import DataIterator, get_batch
        from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

        args = run.args_of({**self.settings, "rollout_temperature": temperature})
        data = self._rows(batch)
        keys = ("tokens", "loss_masks", "multimodal_train_inputs", "total_lengths", "response_lengths")
        iterator = DataIterator(data, micro_batch_indices=[[row] for row in range(len(data["tokens"]))])
        rows, width = [], batch.completion_ids.shape[1]
        with run.on_cpu():
            for _ in data["tokens"]:
                micro = get_batch(iterator, keys, args.data_pad_size_multiplier, allgather_cp=args.allgather_cp)
                _, found = get_log_probs_and_entropy(
                    run.Chunk(model)(micro["tokens"]),
                    args=args,
                    **{name: micro[name] for name in ("unconcat_tokens", "total_lengths", "response_lengths")},
                )
                rows.extend(found["log_probs"])
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row)), value=torch.nan) for row in rows])

    def _rows(self, batch: CollatedBatch) -> dict[str, list[Any]]:
        """Return the fields of a rollout that a forward pass reads."""
        import torch

        kept_BT = tokens_of_completions(batch)
        completions = [ids[kept] for ids, kept in zip(batch.completion_ids, kept_BT, strict=True)]
        tokens = [torch.cat(pair) for pair in zip(prompts_of(batch), completions, strict=True)]
        return {
            "tokens": tokens,
            "loss_masks": [mask[kept].int() for mask, kept in zip(batch.completion_mask, kept_BT, strict=True)],
            "total_lengths": [len(each) for each in tokens],
            "response_lengths": [len(each) for each in completions],
        }
