"""The losses of TRL's other trainers: supervised, of preferences, and of distillation.

Each takes a model. The models here return given logits or logprobs; the rest is the trainer's.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl import releases
from rlcanary.adapters.trl.base import TrlBase
from rlcanary.adapters.trl.trainer.trainers import PROMPT, QUIETLY, place_kept, random_states_kept
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.records.other_losses import DistillationBatch, PreferenceBatch, SupervisedBatch

# The trainer's names of metrics, and the contract's.
REWARDS = {
    "rewards/chosen": "chosen_reward",
    "rewards/rejected": "rejected_reward",
    "rewards/margins": "reward_margin",
    "rewards/accuracies": "reward_accuracy",
}


# Releases with it score without logits.
FUSED = "trl.trainer.utils:FusedCausalLMOutput"
# Older ones with it score in chunks of so many tokens.
CHUNKED = "trl.trainer.sft_trainer:_patch_chunked_ce_lm_head"
CHUNK = 256


class TrlLosses(TrlBase):
    """Losses of training before, beside or in place of reinforcement learning."""

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        import torch

        trainer = self._sft_trainer
        trainer._metrics["train"].clear()
        trainer.model.train()
        count = None if batch.global_tokens is None else torch.tensor(batch.global_tokens)
        model = supervised_model(trainer, batch.logits)
        loss = trainer.compute_loss(model, supervised_inputs(batch), num_items_in_batch=count)
        logged = trainer._metrics["train"].get("mean_token_accuracy", [])
        return LossOutput(loss, {"loss": float(loss.detach()), **({"accuracy": logged[-1]} if logged else {})})

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        if batch.global_pairs is not None:
            raise NotProvided("the trainer averages over the pairs of each micro-batch")
        trainer = self._dpo_trainer
        policy, trainer.ref_model = preference_models(batch)
        trainer._metrics["train"].clear()
        trainer.model.train()
        loss = trainer._compute_loss(policy, preference_inputs(batch), False)
        logged = trainer._metrics["train"]
        metrics = {"loss": float(loss.detach()), **{ours: logged[theirs][-1] for theirs, ours in REWARDS.items()}}
        return LossOutput(loss, metrics)

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        import torch

        divergence_loss = releases.part("trl.trainer.distillation_trainer:_chunked_divergence_loss")

        chunks = {"chunk_size": CHUNK} if "chunk_size" in releases.parameters(divergence_loss) else {}
        heads = [torch.eye(batch.logits.shape[-1])] * 2
        loss, *_ = divergence_loss(
            batch.logits,
            batch.teacher_logits,
            *heads,
            batch.mask.long(),
            distillation_beta(self.distillation),
            **chunks,
            num_items_in_batch=None if batch.global_tokens is None else torch.tensor(batch.global_tokens),
            temperature=batch.temperature,
        )
        return LossOutput(loss, {"loss": float(loss.detach())})

    @cached_property
    def _sft_trainer(self) -> Any:
        from trl import SFTConfig, SFTTrainer

        return _constructed(SFTTrainer, SFTConfig, self.sft, [{"input_ids": [5, 6, 7]}])

    @property
    def _dpo_trainer(self) -> Any:
        return copy.copy(self._built_dpo_trainer)

    @cached_property
    def _built_dpo_trainer(self) -> Any:
        from trl import DPOConfig

        pair = {"prompt": PROMPT, "chosen": "t6", "rejected": "t7"}
        return _constructed(releases.part("trl:DPOTrainer"), DPOConfig, self.dpo, [pair], ref_model=_tiny())


def supervised_model(trainer: Any, logits_BSV: Tensor) -> Any:
    """Make a model with these logits, patched as the trainer patches its own."""
    model = _given_logits(logits_BSV)
    if releases.has_part(CHUNKED) and trainer.args.loss_type == "chunked_nll":
        releases.part(CHUNKED)(model, chunk_size=CHUNK)
        return model
    return releases.fused(model, outputs=("log_probs", "entropy", "is_top1"))


def supervised_inputs(batch: SupervisedBatch) -> dict[str, Tensor]:
    """Return rows as the trainer's collator gives them."""
    import torch

    # Labels behind the shift are ids, and those of other tokens any number.
    ids_BS = batch.token_ids.clamp(0, batch.logits.shape[-1] - 1)
    return {
        "input_ids": ids_BS,
        "attention_mask": torch.ones_like(ids_BS),
        "labels": ids_BS.masked_fill(~batch.mask, -100),
    }


def preference_models(batch: PreferenceBatch) -> list[Any]:
    """Make the policy and the reference model with these logprobs."""
    mask_BT = _stacked(batch.chosen_mask, batch.rejected_mask, False)
    pairs = (
        (batch.chosen_logprobs, batch.rejected_logprobs),
        (batch.ref_chosen_logprobs, batch.ref_rejected_logprobs),
    )
    given = _given_logprobs if releases.has_part(FUSED) else _logits_of
    return [given(_stacked(*pair, 0.0), mask_BT) for pair in pairs]


def preference_inputs(batch: PreferenceBatch) -> dict[str, Tensor]:
    """Return pairs as the trainer's collator gives them."""
    import torch

    mask_BT = _stacked(batch.chosen_mask, batch.rejected_mask, False)
    zeros_BS = torch.zeros(len(mask_BT), mask_BT.shape[1] + 1, dtype=torch.long)
    return {
        "input_ids": zeros_BS,
        "attention_mask": zeros_BS + 1,
        # A token of the prompt stands in front.
        "completion_mask": torch.nn.functional.pad(mask_BT.long(), (1, 0)),
    }


def distillation_beta(settings: dict[str, Any]) -> float:
    """Return the beta of a `DistillationConfig` with these settings."""
    from trl import DistillationConfig

    with tempfile.TemporaryDirectory() as folder, quiet(), place_kept():
        return float(DistillationConfig(output_dir=folder, use_cpu=True, bf16=False, **settings).beta)


def _constructed(trainer: Any, config: Any, settings: dict[str, Any], rows: list[dict[str, Any]], **models: Any) -> Any:
    """Construct a trainer on the tiny Llama."""
    from datasets import Dataset

    from rlcanary.tiny_models import tiny_tokenizer

    with (
        tempfile.TemporaryDirectory() as folder,
        quiet(),
        random_states_kept(),
        place_kept(where_it_fails=True),
        _no_bars(),
    ):
        return trainer(
            model=_tiny(),
            args=config(output_dir=folder, **QUIETLY, **settings),
            train_dataset=Dataset.from_list(rows),
            processing_class=tiny_tokenizer(),
            **models,
        )


@contextmanager
def _no_bars() -> Iterator[None]:
    """Hide the progress bars of datasets, on which the trainers map their rows."""
    import datasets

    had_bars = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if had_bars:
            datasets.enable_progress_bars()


def _tiny() -> Any:
    from rlcanary.tiny_models import tiny_llama

    return tiny_llama()


def _given_logits(logits_BSV: Tensor) -> Any:
    """Make a causal language model with these logits: hidden states that its head, the identity, leaves as they are."""
    import torch
    from transformers import LlamaConfig
    from transformers.loss.loss_utils import ForCausalLMLoss
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutput

    size = logits_BSV.shape[-1]

    class Given(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = LlamaConfig(vocab_size=size)
            self.base_model = lambda **_: BaseModelOutputWithPast(last_hidden_state=logits_BSV)

        def get_output_embeddings(self) -> Any:
            return SimpleNamespace(weight=torch.eye(size), bias=None)

        def forward(self, labels: Any = None, num_items_in_batch: Any = None, **_: Any) -> Any:
            loss = None if labels is None else ForCausalLMLoss(logits_BSV, labels, size, num_items_in_batch)
            return CausalLMOutput(loss, logits=logits_BSV)

    Given.__name__ = "LlamaForCausalLM"  # transformers shifts the labels of the causal models that it knows by name
    return Given()


def _given_logprobs(logprobs_BT: Tensor, mask_BT: Tensor) -> Any:
    """Make a model whose fused head has these logprobs, and zero where it is given no label."""
    import torch
    from trl.trainer.utils import FusedCausalLMOutput

    zeros_BT = torch.zeros(mask_BT.shape)
    output = FusedCausalLMOutput(
        log_probs=logprobs_BT.masked_fill(~mask_BT, 0),
        entropy=zeros_BT,
        mean_logits=zeros_BT,
        is_top1=zeros_BT.bool(),
        label_mask=mask_BT,
    )

    class Given(torch.nn.Module):
        def forward(self, **_: Any) -> Any:
            return output

    return Given()


def _logits_of(logprobs_BT: Tensor, mask_BT: Tensor) -> Any:
    """Make a model whose token 0, of two, has these logprobs."""
    import torch

    others_BT = torch.log(-torch.expm1(logprobs_BT.masked_fill(~mask_BT, -1.0).clamp(max=-1e-6)))
    logits_BTV = torch.stack([logprobs_BT, others_BT], dim=-1)
    # No position is behind the last token.
    logits_BSV = torch.cat([logits_BTV, torch.zeros_like(logits_BTV[:, :1])], dim=1)

    class Given(torch.nn.Module):
        def forward(self, **_: Any) -> Any:
            return SimpleNamespace(logits=logits_BSV)

    return Given()


def _stacked(chosen_BT: Any, rejected_BU: Any, filling: Any) -> Tensor:
    """Put rejected rows behind chosen ones, both padded on the right, as the trainer's collator has them."""
    import torch

    width = max(chosen_BT.shape[1], rejected_BU.shape[1])
    parts = (
        torch.nn.functional.pad(part, (0, width - part.shape[1]), value=filling) for part in (chosen_BT, rejected_BU)
    )
    return torch.cat(list(parts))
