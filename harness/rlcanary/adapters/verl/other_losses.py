"""verl's losses of fine-tuning and distillation, on given logits in place of a model's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from rlcanary.adapters.frameworks import part
from rlcanary.adapters.verl.building import Building
from rlcanary.adapters.verl.workers.engine import jagged, new_engine, on_ranks, ragged, tensordict
from rlcanary.adapters.verl.workers.run_config import composed
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.records.other_losses import DistillationBatch, SupervisedBatch


class OtherLosses(Building):
    """Losses of training before or beside reinforcement learning."""

    def supervised_loss(self, batch: SupervisedBatch) -> LossOutput:
        from verl.workers.utils.losses import sft_loss

        loss = self._loss_of_logits(
            batch.logits,
            {"input_ids": jagged(batch.token_ids), "loss_mask": jagged(batch.mask.long())},
            partial(sft_loss, config=None),
            batch_num_tokens=batch.global_tokens,
        )
        return LossOutput(loss, {"loss": float(loss.detach())})

    def distillation_loss(self, batch: DistillationBatch) -> LossOutput:
        """Run the loss on the likeliest tokens of the teacher, which here are all.

        The temperature is the rollouts', which divides the student's logits alone: the teacher's server scores at 1
        (`_get_teacher_sampling_params`).
        """
        import torch

        distillation_ppo_loss = part("verl.trainer.distillation:distillation_ppo_loss")
        rows, width, vocabulary = batch.logits.shape
        teacher_BTV = batch.teacher_logits.float().log_softmax(dim=-1)
        # An output stands one position before the token that it scores; the last scores nothing.
        logits_BSV, teacher_BSV = (
            torch.cat([each, torch.zeros_like(each[:, :1])], dim=1) for each in (batch.logits, teacher_BTV)
        )
        ids = torch.zeros(rows, 1 + width, dtype=torch.long)
        fields = {
            "input_ids": jagged(ids),
            "prompts": jagged(ids[:, :1]),
            "responses": jagged(batch.token_ids),
            "response_mask": ragged(list(batch.mask.long())),
            "loss_mask": jagged(batch.mask.long()),
            "teacher_logprobs": ragged(list(teacher_BSV)),
            "teacher_ids": ragged(list(torch.arange(vocabulary).expand(rows, 1 + width, vocabulary))),
        }
        loss = self._loss_of_logits(
            logits_BSV,
            fields,
            partial(distillation_ppo_loss, self._actor_config, self._distillation(loss_mode="forward_kl_topk")),
            batch_num_tokens=batch.global_tokens,
            global_batch_size=rows if batch.global_sequences is None else batch.global_sequences,
            temperature=batch.temperature,
            distillation_use_topk=True,
            distillation_only=True,
        )
        return LossOutput(loss, {"loss": float(loss.detach())})

    def distillation_advantages(self, student_logprobs: Tensor, teacher_logprobs: Tensor, mask: Tensor) -> Tensor:
        """Read the advantages with which the distillation of sampled tokens calls its policy loss."""
        import torch

        losses = part("verl.trainer.distillation:losses")
        rows, width = mask.shape
        ids, padding = torch.zeros(rows, 1 + width, dtype=torch.long), torch.zeros(rows, 1)
        data = tensordict(
            {
                "prompts": jagged(ids[:, :1]),
                "responses": jagged(ids[:, 1:]),
                "response_mask": ragged(list(mask.long())),
                "old_log_probs": jagged(student_logprobs.detach()),
                "teacher_logprobs": ragged(list(torch.cat([teacher_logprobs, padding], dim=1).unsqueeze(-1))),
            },
            **{"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": rows},
        )
        taken: dict[str, Any] = {}

        def policy_loss(**given: Any) -> tuple[Tensor, dict[str, Any]]:
            taken.update(given)
            return torch.zeros(()), {}

        output = {"log_probs": jagged(torch.cat([student_logprobs, padding], dim=1))}
        settings = self._distillation(loss_mode="k1", use_policy_gradient=True)
        with mock.patch.object(losses, "get_policy_loss_fn", return_value=policy_loss):
            losses.distillation_loss(self._actor_config, settings, output, data)
        advantages: Tensor = taken["advantages"]
        return advantages

    def _distillation(self, **settings: Any) -> Any:
        from verl.trainer.distillation import losses
        from verl.workers.config import DistillationLossConfig

        if "use_task_rewards and not" not in inspect.getsource(losses):
            raise NotProvided("this release of verl computes the loss of rewards beside each distillation")
        defaults = dict(composed().distillation.distillation_loss)
        del defaults["_target_"]
        settings = {**defaults, "use_task_rewards": False, **settings}
        return SimpleNamespace(distillation_loss=DistillationLossConfig(**settings))

    def _loss_of_logits(
        self, logits_BSV: Tensor, fields: dict[str, Tensor], loss_function: Callable[..., Any], **plan: Any
    ) -> Tensor:
        """Run the engine's step on packed rows, whose model gives these logits."""
        import torch

        rows, width, vocabulary = logits_BSV.shape
        fields = fields | {"position_ids": jagged(torch.arange(width).expand(rows, -1))}
        taken: list[Tensor] = []

        def called(**given: Any) -> tuple[Tensor, dict[str, Any]]:
            result = loss_function(**given)
            if "student_logits" in given:
                return result  # type: ignore[no-any-return]
            taken.append(result[0])
            return result[0].detach().requires_grad_(), {}

        def on_rank(_: int, group: Any) -> None:
            logits_1SV = logits_BSV.reshape(1, rows * width, vocabulary)
            model = lambda **_: SimpleNamespace(logits=logits_1SV.clone())  # noqa: E731  # some divide in place
            engine, known = new_engine(self._actor_config, group, model), plan.pop("batch_num_tokens")
            plan.setdefault("temperature", 1.0)
            if known is None:
                data = tensordict(fields, use_dynamic_bsz=False, micro_batch_size_per_gpu=rows, **plan)
                engine.forward_backward_batch(data, called)
            else:
                data = tensordict(fields, batch_num_tokens=known, dp_size=1, **plan)
                engine.forward_step(data, called, forward_only=False)

        on_ranks(1, on_rank)
        return taken[0]
