"""The loop of TRL's other trainers around their losses: micro-batches and ranks."""

from __future__ import annotations

import copy
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl.losses import (
    REWARDS,
    TrlLosses,
    preference_inputs,
    preference_models,
    supervised_inputs,
    supervised_model,
)
from rlcanary.adapters.trl.trainer.trainers import logged
from rlcanary.contract.batch import LossOutput
from rlcanary.contract.declining import NotProvided
from rlcanary.contract.records.other_losses import PreferenceBatch, SupervisedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.records.other_losses import OtherBatch

METRICS = {"mean_token_accuracy": "accuracy", **REWARDS}


class TrlSplitting(TrlLosses):
    """Supervised and preference losses in the micro-batches of an update."""

    def accumulated_other_loss(self, batch: OtherBatch, n_micro: int) -> LossOutput:
        """Run the trainer's own count of labels, and its `training_step` on each micro-batch."""
        import torch

        if isinstance(batch, SupervisedBatch):
            trainer, rows = copy.copy(self._sft_trainer), len(batch.mask)
        elif isinstance(batch, PreferenceBatch):
            trainer, rows = self._dpo_trainer, len(batch.chosen_mask)
        else:
            raise NotProvided("only the supervised and the preference trainer are driven in micro-batches")
        if rows % n_micro:
            raise NotProvided("micro-batches have to be of equal size")
        trainer._metrics["train"].clear()
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = n_micro
        pieces = [batch.rows(part) for part in torch.arange(rows).split(rows // n_micro)]
        given = [_inputs(piece) for piece in pieces]
        with quiet():
            inputs, count = trainer.get_batch_samples(iter(given), n_micro, trainer.args.device)
            losses = [_step(trainer, piece, each, count) for piece, each in zip(pieces, inputs, strict=True)]
            metrics = logged(trainer, METRICS)
        loss = torch.stack(losses).sum()
        return LossOutput(loss, {"loss": float(loss.detach()), **metrics})


def _inputs(piece: SupervisedBatch | PreferenceBatch) -> dict[str, Tensor]:
    return supervised_inputs(piece) if isinstance(piece, SupervisedBatch) else preference_inputs(piece)


def _step(trainer: Any, piece: Any, inputs: dict[str, Tensor], count: Any) -> Tensor:
    """Run a training step -> the value that the loop adds up, with the gradient that the step sends backward."""
    tensors = {field.name: getattr(piece, field.name) for field in fields(piece)}
    trained = {name: each for name, each in tensors.items() if getattr(each, "requires_grad", False)}
    leaves = {name: value.detach().requires_grad_() for name, value in trained.items()}
    ending = replace(piece, **leaves)
    if isinstance(piece, PreferenceBatch):
        model, trainer.ref_model = preference_models(ending)
    else:
        model = supervised_model(trainer, ending.logits)
    loss: Tensor = trainer.training_step(model, inputs, count)
    for name, each in trained.items():
        pushed = (leaves[name].grad * each).sum()
        loss = loss + pushed - pushed.detach()
    return loss
