"""The audit in torchrl's `GRPOTrainer`, or in a loop with its losses. Written for torchrl 0.14.

The loss module computes its logprobs as before; the audit sees them, what the loss reads, and the step of the optimizer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlcanary.adapters.torchrl.options import AGGREGATIONS, advantage_words, loss_words
from rlcanary.contract.conventions import Conventions
from rlcanary.live.audit import Audit, log
from rlcanary.live.findings import OnFinding
from rlcanary.live.hooks.fitting import not_audited
from rlcanary.live.hooks.steps import Steps

WRITTEN_FOR = "0.14"


def torchrl(
    trainer: Any, *, every: int = 20, on_finding: OnFinding = "warn", bundles: str | Path | None = None
) -> TorchrlAudit | None:
    """Audit a trainer from its next update on: `rlcanary.live.torchrl(trainer, every=20)`.

    Args:
        trainer: a `GRPOTrainer`, or any object with the `loss_module`, the `optimizer` and, if there is one, the
            `replay_buffer` of a loop. The conventions are read from the loss.
        every: updates from one audited update to the next.
        on_finding: "log", "warn" or "stop", see `Audit`.
        bundles: the folder that gets a bundle of each update with a new finding.

    Returns:
        What watches it; None, with a warning, where the loss is not as those of torchrl 0.14.
    """
    try:
        return TorchrlAudit(trainer, every, on_finding, bundles)
    except (AttributeError, ImportError) as error:
        not_audited("torchrl", WRITTEN_FOR, error)
        return None


class TorchrlAudit:
    """Watches a loss and its optimizer, and the transform that computes advantages.

    Attributes:
        audit: of the updates, and of the groups that the replay buffer is given.
    """

    def __init__(self, trainer: Any, every: int, on_finding: OnFinding, bundles: str | Path | None) -> None:
        loss = trainer.loss_module
        stepper = getattr(trainer, "optimization_stepper", None)
        optimizer = getattr(trainer, "optimizer", None) or stepper.optimizer  # type: ignore[union-attr]
        self.audit = Audit(conventions_of(loss), every=every, on_finding=on_finding, bundles=bundles, ranks="mean")
        self._loss = loss
        self._steps = Steps(self.audit, optimizer, loss.actor_network, getattr(stepper, "scaler", None))
        self._scored: tuple[Any, Tensor, Tensor] | None = None
        self._entropy: Tensor | None = None
        self._score, self._measure = loss._get_cur_log_prob, loss._get_entropy
        loss._get_cur_log_prob, loss._get_entropy = self._watched_scores, self._watched_entropy
        loss.register_forward_hook(lambda *_: self.audit.guard(self._watch))
        for transform in _advantage_transforms(getattr(trainer, "replay_buffer", None)):
            self._watch_advantages(transform)
        if hasattr(trainer, "register_op"):
            trainer.register_op("post_optim_log", self.metrics)

    def metrics(self, *_: Any) -> dict[str, float]:
        """Return numbers for the trainer's log."""
        return self.audit.metrics()

    def _watched_scores(self, tensordict: Any) -> Any:
        scored = self._score(tensordict)
        self._scored = tensordict, scored[0], scored[1].mask
        return scored

    def _watched_entropy(self, *arguments: Any, **options: Any) -> Any:
        self._entropy = self._measure(*arguments, **options)
        return self._entropy

    def _watch(self) -> None:
        """Watch what the loss has just been computed from."""
        scored, entropy, self._scored, self._entropy = self._scored, self._entropy, None, None
        if scored is None or not scored[1].requires_grad:
            return
        tensordict, logprobs, is_trained = scored
        update = self._steps.update()
        if not update.is_audited:
            return
        if self.audit.conventions is not None:  # bounds and coefficients may be scheduled
            self.audit.conventions = self.audit.conventions.replace(**loss_words(self._loss))
        keys = self._loss.tensor_keys
        sampled = tensordict.get(keys.sample_log_prob, as_padded_tensor=True, padding_side="left", padding_value=0.0)
        mask = is_trained & sampled.isfinite()
        advantages = tensordict.get(keys.advantage, as_padded_tensor=True).squeeze(-1)
        known = {"advantages": advantages.expand(mask.shape), "sampler_logprobs": sampled.masked_fill(~mask, torch.nan)}
        if self._loss.kl_to_ref_coeff:
            known["ref_logprobs"] = tensordict.get(
                keys.ref_log_probs,
                as_padded_tensor=True,
                padding_side=self._loss.ref_log_prob_padding_side,
                padding_value=self._loss.ref_log_prob_padding_value,
            ).view(mask.shape)
        update.watch(logprobs, entropy=None if entropy is None else entropy.squeeze(-1), mask=mask, **known)

    def _watch_advantages(self, transform: Any) -> None:
        compute = transform._inv_call_single

        def watched(trajectory: Any) -> Any:
            group = compute(trajectory)
            if group is not None:
                self.audit.guard(lambda: self._judge(transform, group))
            return group

        transform._inv_call_single = watched

    def _judge(self, transform: Any, group: Any) -> None:
        """Judge a group whose trajectories have one step and one reward each."""
        rewards = [step.get(transform.rewards_key).flatten() for step in group.unbind(0)]
        advantages = [step.get(transform.advantage_key).flatten() for step in group.unbind(0)]
        if len(rewards) == transform.grpo_size and all(len(each) == 1 for each in (*rewards, *advantages)):
            self.audit.rollout(
                mask=torch.ones(len(rewards), 1),
                rewards=torch.cat(rewards),
                group_ids=torch.zeros(len(rewards), dtype=torch.long),
                advantages=torch.cat(advantages),
            )


def conventions_of(loss: Any) -> Conventions | None:
    """Translate a loss module; None for one that the conventions cannot express, of which the laws are judged."""
    unknown = [name for name in ("kl_to_inference_coeff", "kl_mask_threshold") if getattr(loss, name) is not None]
    if loss.aggregation not in AGGREGATIONS:
        unknown.append("aggregation")
    if loss.reduction != "mean":
        unknown.append("reduction")
    if unknown:
        log.warning("torchrl's loss is judged by the laws alone, the conventions cannot express %s", ", ".join(unknown))
        return None
    return Conventions(**advantage_words(), **loss_words(loss))


def _advantage_transforms(replay_buffer: Any) -> list[Any]:
    """Find the transforms of a replay buffer in this process that compute advantages of groups."""
    from torchrl.objectives.llm import MCAdvantage

    found = getattr(replay_buffer, "_transform", None)
    return [each for each in (found if found is not None else ()) if isinstance(each, MCAdvantage)]
