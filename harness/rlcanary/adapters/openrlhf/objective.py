"""OpenRLHF's scores of tokens, and the training step of its actor on given logprobs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import micro_batches, prompts_of, tokens_of_completions
from rlcanary.adapters.openrlhf import run
from rlcanary.adapters.openrlhf.base import OpenrlhfBase
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import LossOutput

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, PolicyBatch

METRICS = {"ppo_clip_ratio": "clip_fraction", "kl": "kl", "entropy_loss": "entropy"}


class Objective(OpenrlhfBase):
    """Logprobs, entropies and the loss of the policy."""

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        import torch
        from openrlhf.models.utils import log_probs_from_logits

        # In float32, like the actor. A model's output is no leaf, which matters to an operation in place.
        logits = logits.clone() if logits.requires_grad else logits
        return log_probs_from_logits(logits.to(torch.float32), token_ids, temperature)  # type: ignore[no-any-return]

    def completion_logprobs(self, model: Any, batch: CollatedBatch, temperature: float) -> Tensor:
        import torch

        prompts = prompts_of(batch)
        width = max(map(len, prompts))
        prompt_ids = torch.stack([torch.nn.functional.pad(ids, (width - len(ids), 0)) for ids in prompts])
        lengths = torch.tensor([len(ids) for ids in prompts])
        prompt_mask = torch.arange(width).flip(0) < lengths.unsqueeze(1)
        return run.actor_of(model, temperature)(  # type: ignore[no-any-return]
            torch.cat([prompt_ids, batch.completion_ids], dim=1),
            batch.completion_mask,
            attention_mask=torch.cat([prompt_mask, tokens_of_completions(batch)], dim=1).long(),
        )

    def entropy(self, logits: Tensor) -> Tensor:
        import torch
        from openrlhf.models.utils import compute_entropy

        with torch.compiler.set_stance("force_eager"):
            return compute_entropy(logits)  # type: ignore[no-any-return]

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return self._update(batch, 1)

    def accumulated_loss(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        return self._update(batch, n_micro)

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        from openrlhf.models.utils import compute_approx_kl

        return compute_approx_kl(logprobs, ref_logprobs, self.conventions.kl_estimator)  # type: ignore[no-any-return]

    def _update(self, batch: PolicyBatch, n_micro: int) -> LossOutput:
        """Run the actor's training step on every micro-batch of one optimizer step."""
        import torch
        from openrlhf.utils.loss_utils import iter_grad_accum_global_norm

        if batch.global_tokens is not None or batch.global_sequences is not None:
            raise NotProvided("the trainer counts the tokens of the whole update itself")
        pieces = micro_batches(batch, n_micro)
        losses: list[Tensor] = []
        trainer = self._trainer(losses)
        metrics: dict[str, Any] = {}
        windows = iter_grad_accum_global_norm(pieces, trainer.strategy, n_micro, lambda piece: piece.mask)
        for step, (piece, loss_batch_info) in enumerate(windows):
            trainer.actor = _GivenActor(piece)
            # With its coefficient at zero the trainer computes the KL of nothing; it needs no reference then.
            status = trainer.training_step(self._experience(piece), self.conventions.kl_coef, step, loss_batch_info)
            metrics = status["metrics"]
        # DeepSpeed divides the loss of every backward pass by the number of them in an optimizer step.
        total = torch.stack(losses).sum() / n_micro
        if n_micro > 1:
            return LossOutput(total)
        kept = dict(METRICS)
        if self.conventions.dual_clip is not None:
            del kept["ppo_clip_ratio"]
        if self.conventions.aggregation != "token_mean":
            kept.pop("entropy_loss")
        return LossOutput(total, {ours: float(metrics[theirs]) for theirs, ours in kept.items() if theirs in metrics})

    def _experience(self, batch: PolicyBatch) -> Any:
        import torch
        from openrlhf.trainer.ppo_utils.experience import Experience

        rows, width = batch.mask.shape
        advantages = batch.advantages.unsqueeze(1) if batch.advantages.ndim == 1 else batch.advantages
        conventions = self.conventions
        if conventions.kl_coef and conventions.kl_placement == "loss" and batch.ref_logprobs is None:
            raise NotProvided("kl.use_loss needs reference logprobs")
        if conventions.importance_level != "none" and batch.sampler_logprobs is None:
            raise NotProvided("is_correction_enable needs the sampler's logprobs")
        return Experience(
            sequences=torch.zeros(rows, 1 + width, dtype=torch.long),
            attention_mask=torch.ones(rows, 1 + width, dtype=torch.long),
            action_mask=batch.mask,
            action_log_probs=batch.old_logprobs,
            base_action_log_probs=batch.ref_logprobs,
            rollout_log_probs=batch.sampler_logprobs,
            advantages=advantages.expand(rows, width),
            info={},
        )

    def _trainer(self, losses: list[Tensor]) -> Any:
        from openrlhf.models import PolicyLoss
        from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer

        args = self.args()
        trainer = ActorPPOTrainer.__new__(ActorPPOTrainer)
        trainer.args = args
        trainer.strategy = SimpleNamespace(
            args=args,
            ring_attn_group=None,
            backward=lambda loss, *_: losses.append(loss),
            optimizer_step=lambda *_, **__: None,
            get_grad_norm=lambda _: 0.0,
        )
        trainer.actor_optim = None
        trainer.actor_scheduler = SimpleNamespace(get_last_lr=lambda: [0.0])
        trainer.ema_model = None
        trainer.replay_buffer = None
        trainer.aux_loss = False
        correction = args.algo.advantage
        trainer.actor_loss_fn = PolicyLoss(
            clip_eps_low=args.actor.eps_clip_low_high[0],
            clip_eps_high=args.actor.eps_clip_low_high[1],
            dual_clip=args.actor.dual_clip,
            policy_loss_type=args.actor.policy_loss_type,
            enable_vllm_is_correction=correction.is_correction_enable,
            vllm_is_truncated_threshold=correction.is_correction_threshold,
            vllm_is_correction_type=correction.is_correction_type,
        )
        return trainer


class _GivenActor:
    """Stand-in for the policy that returns the logprobs and entropies of a batch."""

    def __init__(self, batch: PolicyBatch) -> None:
        self.batch = batch

    def train(self) -> None:
        pass

    def __call__(self, *_: Any, **__: Any) -> tuple[Tensor, Any]:
        return self.batch.logprobs, SimpleNamespace(entropy=self.batch.entropy)
