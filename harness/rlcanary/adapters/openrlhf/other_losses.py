"""OpenRLHF's losses of supervised fine-tuning and of preferences."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.openrlhf import run
from rlcanary.adapters.openrlhf.base import OpenrlhfBase
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.records.other_losses import PreferenceBatch, SupervisedBatch

PREFERENCES = {
    "loss": "loss",
    "acc": "reward_accuracy",
    "chosen_reward": "chosen_reward",
    "reject_reward": "rejected_reward",
}


class OtherLosses(OpenrlhfBase):
    """Losses of training before reinforcement learning."""

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        """Run `SFTTrainer.fit` on one batch, which goes backward once."""
        import torch
        from openrlhf.models import SFTLoss
        from openrlhf.trainer.sft_trainer import SFTTrainer

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the trainer counts the tokens of the whole update itself")
        trainer, losses, logged = self._one_batch(SFTTrainer, len(batch.mask))
        trainer.model = run.actor_of(_GivenModel(batch.logits), 1.0)
        trainer.model.device = torch.nn.Parameter(torch.zeros(1))
        trainer.loss_fn = SFTLoss()
        # As SFTDataset marks them: a token's mask stands where it is predicted.
        mask = batch.mask.float().roll(-1, 1)
        trainer.train_dataloader = _Loader([(batch.token_ids, torch.ones_like(batch.token_ids), mask)])
        with run.on_cpu():
            trainer.fit(trainer.args)
        return LossOutput(losses[0], {"loss": logged[0]["gpt_loss"]})

    def preference_loss(self, batch: PreferenceBatch) -> LossOutput:
        """Run `DPOTrainer.fit` on one batch of pairs."""
        import torch
        from openrlhf.models import DPOLoss
        from openrlhf.trainer.dpo_trainer import DPOTrainer

        if batch.global_pairs is not None or batch.global_tokens is not None:
            raise NotProvided("micro-batches are averaged alike")
        if batch.ref_chosen_logprobs is None or batch.ref_rejected_logprobs is None:
            raise NotProvided("DPO has a reference model")
        trainer, losses, logged = self._one_batch(DPOTrainer, len(batch.chosen_mask))
        trainer.model = _GivenScores(batch.chosen_logprobs, batch.rejected_logprobs)
        trainer.ref_model = _GivenScores(batch.ref_chosen_logprobs, batch.ref_rejected_logprobs)
        trainer.tokenizer = SimpleNamespace(pad_token_id=0)
        trainer.nll_loss = False
        trainer.loss_fn = DPOLoss(self.conventions.preference_beta, self.conventions.preference_label_smoothing)
        # A prompt of one token, behind which the mask tells what is attended.
        masks = [
            torch.nn.functional.pad(mask, (1, 0), value=True).long()
            for mask in (batch.chosen_mask, batch.rejected_mask)
        ]
        ids = [torch.zeros_like(mask) for mask in masks]
        trainer.train_dataloader = _Loader([(ids[0], masks[0], ids[1], masks[1], [1] * len(masks[0]))])
        with run.on_cpu():
            trainer.fit(trainer.args)
        return LossOutput(losses[0], {ours: logged[0][theirs] for theirs, ours in PREFERENCES.items()})

    def _one_batch(self, kind: Any, rows: int) -> tuple[Any, list[Tensor], list[dict[str, float]]]:
        """Make a trainer of one epoch of one batch -> it, the losses that go backward, and what it logs."""
        losses: list[Tensor] = []
        logged: list[dict[str, float]] = []
        args = self.args({"train.batch_size": rows})
        trainer = kind.__new__(kind)
        trainer.args, trainer.strategy = args, run.strategy_of(args)
        trainer.strategy.backward = lambda loss, *_: losses.append(loss)
        trainer.strategy.optimizer_step = lambda *_: None
        trainer.optimizer, trainer.scheduler = None, SimpleNamespace(get_last_lr=lambda: [0.0])
        trainer.epochs, trainer.aux_loss = 1, False
        trainer._wandb = trainer._tensorboard = None
        trainer.save_logs_and_checkpoints = lambda *given: logged.append(given[3])
        return trainer, losses, logged


class _GivenModel:
    """A model that returns given logits."""

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    def __call__(self, *_: Any, **__: Any) -> dict[str, Tensor]:
        return {"logits": self.logits}


class _GivenScores:
    """A model that returns given logprobs of chosen and rejected completions."""

    def __init__(self, chosen: Tensor, rejected: Tensor) -> None:
        self.rows = [*chosen, *rejected]

    def parameters(self) -> Any:
        return iter(self.rows)

    def train(self) -> None:
        """Do nothing: there are no modules."""

    eval = train

    def __call__(self, input_ids: Tensor, **_: Any) -> tuple[Tensor, dict[str, Tensor]]:
        import torch

        width = input_ids.shape[1] - 1
        return torch.stack([torch.nn.functional.pad(row, (0, width - len(row))) for row in self.rows]), {}


class _Loader(list[Any]):
    """A loader of data without a sampler."""

    sampler = None
