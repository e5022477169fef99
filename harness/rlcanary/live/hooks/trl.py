"""The audit in TRL's `GRPOTrainer`, as a callback. Written for TRL 1.16.

The trainer's own methods are called as before; the callback sees what its loss is given, and the gradient that comes back.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import TrainerCallback

from rlcanary.adapters.trl import conventions_of
from rlcanary.adapters.trl.conventions import AGGREGATIONS
from rlcanary.live.audit import Audit, log
from rlcanary.live.findings import OnFinding
from rlcanary.live.hooks.fitting import attempted, not_audited
from rlcanary.live.record import Record
from rlcanary.live.update import Update

WRITTEN_FOR = "1.16"


def trl(trainer: Any, *, every: int = 20, on_finding: OnFinding = "warn", bundles: bool = True) -> TrainerCallback:
    """Make the callback that audits a trainer: `trainer.add_callback(rlcanary.live.trl(trainer, every=20))`.

    Args:
        trainer: the `GRPOTrainer`. The conventions are read from its `GRPOConfig`.
        every: updates from one audited update to the next.
        on_finding: "log" and "warn" as `Audit` has them; "stop" writes a checkpoint and ends the training.
        bundles: write updates with a new finding to `canary/` in the output folder, for `rlcanary replay`.

    Returns:
        The callback; one that does nothing, with a warning, where the trainer is not as that of TRL 1.16.
    """
    try:
        return TrlCallback(trainer, every, on_finding, bundles)
    except AttributeError as error:
        not_audited("trl", WRITTEN_FOR, error)
        return TrainerCallback()


class TrlCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the micro-batches of an update and judges it behind the optimizer's step.

    Attributes:
        audit: the audit, with its findings.
    """

    def __init__(self, trainer: Any, every: int, on_finding: OnFinding, bundles: bool) -> None:
        self._stops = on_finding == "stop"
        conventions = None
        if trainer.args.loss_type in AGGREGATIONS:
            conventions = conventions_of(trainer.args, bool(trainer.use_vllm)).replace(
                old_logprobs="trainer", training_dropout=_drops_out(trainer.model)
            )
        else:
            log.warning("loss_type=%r is judged by the laws alone", trainer.args.loss_type)
        self.audit = Audit(
            conventions,
            every=every,
            max_tokens=trainer.args.max_completion_length,
            on_finding="log" if on_finding == "log" else "warn",
            bundles=Path(trainer.args.output_dir) / "canary" if bundles else None,
            ranks="mean",
        )
        self._trainer = trainer
        # The balance of a router's experts, and an entropy bonus whose coefficient moves, are in the loss that is logged.
        self._has_other_terms = any(
            getattr(trainer, name, False) for name in ("aux_loss_enabled", "use_adaptive_entropy")
        )
        self._update: Update | None = None
        self._judged: Record | None = None
        self._rewards: torch.Tensor | None = None
        self._known: dict[str, int] = {}
        self._measured: dict[str, float] = {}
        self._logged_at = trainer.state.global_step
        self._inputs: dict[str, Any] | None = None
        self._sampled_at = 0
        self._compute_loss = trainer._compute_loss
        self._sample, self._reward = trainer._generate_and_score_completions, trainer._calculate_rewards
        self._score = trainer._get_per_token_logps_and_entropies
        trainer._compute_loss = self._watched_loss
        trainer._generate_and_score_completions = self._watched_samples
        trainer._calculate_rewards = self._watched_rewards
        trainer._get_per_token_logps_and_entropies = self._watched_scores

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Continue with the evidence that the checkpoint of a resumed run has."""
        self._logged_at = state.global_step
        saved = state.stateful_callbacks.get(SAVED)
        if saved is not None:
            self.audit.load_state_dict(saved)

    def _watched_samples(self, inputs: Any) -> Any:
        trainer = self._trainer
        if not trainer.model.training:
            return self._sample(inputs)
        self._sampled_at = trainer.state.global_step
        known = attempted("trl", WRITTEN_FOR, self._counts) or {}
        output = self._sample(inputs)
        self.audit.guard(lambda: self._judge_rollout(output, known))
        return output

    def _watched_rewards(self, *arguments: Any, **options: Any) -> Any:
        rewards = self._reward(*arguments, **options)
        if self._trainer.model.training:
            self._rewards = rewards
        return rewards

    def _counts(self) -> dict[str, int]:
        """Count the values of each metric that the trainer holds."""
        return {name: len(values) for name, values in self._trainer._metrics["train"].items()}

    def _logged(self, names: dict[str, str], known: dict[str, int]) -> dict[str, float]:
        """Return the means of what the trainer has added to its metrics since they were counted, by our names."""
        metrics = self._trainer._metrics["train"]
        added = {ours: metrics[theirs][known.get(theirs, 0) :] for theirs, ours in names.items() if theirs in metrics}
        return {name: fmean(values) for name, values in added.items() if values}

    def _judge_rollout(self, output: dict[str, Any], known: dict[str, int]) -> None:
        """Judge the advantages of this process, from the rewards of all, and what is logged of rewards and lengths."""
        trainer, args = self._trainer, self._trainer.args
        if trainer.multi_objective_aggregation != "sum_then_normalize" or self._rewards is None:
            return
        of_functions, self._rewards = self._rewards, None
        rewards = (of_functions * trainer.reward_weights.to(of_functions.device)).nansum(dim=1)
        rewards[of_functions.isnan().all(dim=1)] = torch.nan
        count, first = len(output["advantages"]), trainer.accelerator.process_index * len(output["advantages"])
        advantages, mask = torch.zeros_like(rewards), torch.zeros(len(rewards), 1)
        advantages[first : first + count], mask[first : first + count] = output["advantages"], 1
        measured = {}
        if len(rewards) == count and "tool_mask" not in output and not args.mask_truncated_completions:
            lengths = output["completion_mask"].sum(dim=1).float()
            measured = {"length": lengths.mean(), "length_min": lengths.min(), "length_max": lengths.max()}
        self.audit.rollout(
            mask=mask,
            rewards=rewards,
            group_ids=torch.arange(len(rewards)) // trainer.num_generations,
            advantages=advantages,
            logs=self._logged(OF_ROLLOUTS, known),
            measured={name: float(value) for name, value in measured.items()},
        )

    def _watched_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        if not model.training:
            return self._compute_loss(model, inputs)
        if self._update is None:
            self._update = attempted("trl", WRITTEN_FOR, self._begun)
        self._inputs = inputs if self._update is not None and self._update.is_audited else None
        try:
            return self._compute_loss(model, inputs)
        finally:
            self._inputs = None

    def _begun(self) -> Update:
        """Begin an update with its first micro-batch."""
        trainer, scaler = self._trainer, self._trainer.accelerator.scaler
        update = self.audit.update(
            loss_scale=1.0 if scaler is None else scaler.get_scale(),
            model=trainer.model,
            optimizer=trainer.optimizer,
            trainer_version=trainer.state.global_step,
            drawn_freely=_draws_freely(trainer.args),
            half_precision=trainer.accelerator.mixed_precision != "no",
        )
        update.begin()
        self._known, self._measured = self._counts(), {}
        return update

    def _watched_scores(self, *arguments: Any, **options: Any) -> Any:
        scored = self._score(*arguments, **options)
        inputs, update = self._inputs, self._update
        if inputs is not None and update is not None:
            self.audit.guard(lambda: self._watch(update, inputs, scored))
        return scored

    def _watch(self, update: Update, inputs: dict[str, Any], scored: Any) -> None:
        mask_BT, tools_BT = inputs["completion_mask"], inputs.get("tool_mask")
        known = {ours: inputs[theirs] for theirs, ours in GIVEN.items() if theirs in inputs}
        update.watch(
            scored[0],
            entropy=scored[1] if len(scored) > 1 else None,
            mask=(mask_BT if tools_BT is None else mask_BT * tools_BT).bool(),
            versions=torch.full((len(mask_BT),), self._sampled_at),
            **known,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Drop what the trainer did not log alone."""
        self._judged = None

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Measure the gradient and the learning rate of the step."""
        if self._update is not None and self._update.is_audited:
            self.audit.guard(self._measure)

    def _measure(self) -> None:
        trainer = self._trainer
        self._measured = {"lr": float(trainer.optimizer.param_groups[0]["lr"])}
        gradients = [each.grad for each in trainer.model.parameters() if each.grad is not None]
        if all(type(each) is torch.Tensor for each in gradients) and trainer.accelerator.scaler is None:
            norm = float(torch.nn.utils.get_total_norm(gradients))
            # It has been clipped.
            if not trainer.args.max_grad_norm or norm < 0.999 * trainer.args.max_grad_norm:
                self._measured["grad_norm"] = norm

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Judge what the trainer logs of one update alone."""
        record, self._judged = self._judged, None
        is_of_one = state.global_step - self._logged_at == 1
        if logs is None or "loss" not in logs:
            return
        self._logged_at = state.global_step
        if record is not None and is_of_one:
            names = {
                theirs: ours for theirs, ours in OF_UPDATES.items() if theirs != "loss" or not self._has_other_terms
            }
            logged = {ours: float(logs[theirs]) for theirs, ours in names.items() if theirs in logs}
            later = replace(record, logged=logged, measured=self._measured, parts=[])
            self.audit.guard(lambda: self.audit.judge_logged(later))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Judge the update that was taken."""
        update, self._update = self._update, None
        if update is None:
            return
        before = len(self.audit.findings)
        if update.is_audited:
            self.audit.guard(lambda: update.log(self._logged(OF_MICRO_BATCHES, self._known), are_means=True))
        update.end(not getattr(self._trainer.accelerator, "optimizer_step_was_skipped", False), keep_record=True)
        self._judged = update.record
        state.stateful_callbacks[SAVED] = self.audit.state_dict()
        for name, value in self.audit.metrics().items():
            self._trainer._metrics["train"][name].append(value)
        if self._stops and len(self.audit.findings) > before:
            control.should_save = control.should_training_stop = True


def _drops_out(model: Any) -> bool:
    """Tell whether the model drops anything in training mode, in which TRL trains."""
    layers = any(isinstance(each, torch.nn.Dropout) and each.p > 0 for each in model.modules())
    return layers or getattr(model.config, "attention_dropout", 0.0) > 0


def _draws_freely(args: Any) -> bool:
    """Tell whether all rows are plain samples of the policy."""
    is_whole = args.top_p == 1.0 and not args.top_k and not args.min_p and args.repetition_penalty == 1.0
    return is_whole and not args.generation_kwargs and not args.mask_truncated_completions


# The name of the audit's evidence in the trainer's state, which is a part of checkpoints.
SAVED = "rlcanary"
# What the loss is given, by TRL's names and by ours.
GIVEN = {
    "advantages": "advantages",
    "old_per_token_logps": "old_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "sampling_per_token_logps": "sampler_logprobs",
}
# What the trainer logs, by its names and by ours: of a rollout, as a mean over the micro-batches, and of updates.
OF_ROLLOUTS = {
    "reward": "reward",
    "completions/mean_length": "length",
    "completions/min_length": "length_min",
    "completions/max_length": "length_max",
}
OF_MICRO_BATCHES = {"kl": "kl", "entropy": "entropy", "clip_ratio/region_mean": "clip_fraction"}
OF_UPDATES = {"loss": "loss", "grad_norm": "grad_norm", "learning_rate": "lr"}
