"""The audit in TRL's `GRPOTrainer`, as a callback. Written for TRL 1.16.

The trainer's own methods are called as before; the callback sees what its loss is given, and the gradient that comes back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from rlcanary.adapters.trl import conventions_of
from rlcanary.live.audit import Audit, OnFinding
from rlcanary.live.update import Update


def trl(trainer: Any, *, every: int = 20, on_finding: OnFinding = "warn", bundles: bool = True) -> TrlCallback:
    """Make the callback that audits a trainer: `trainer.add_callback(rlcanary.live.trl(trainer, every=20))`.

    Args:
        trainer: the `GRPOTrainer`. The conventions are read from its `GRPOConfig`.
        every: updates from one audited update to the next.
        on_finding: "log" and "warn" as `Audit` has them; "stop" writes a checkpoint and ends the training.
        bundles: write updates with a new finding to `canary/` in the output folder, for `rlcanary replay`.
    """
    return TrlCallback(trainer, every, on_finding, bundles)


class TrlCallback(TrainerCallback):  # type: ignore[misc]
    """Watches the micro-batches of an update and judges it behind the optimizer's step.

    Attributes:
        audit: the audit, with its findings.
    """

    def __init__(self, trainer: Any, every: int, on_finding: OnFinding, bundles: bool) -> None:
        self._stops = on_finding == "stop"
        conventions = conventions_of(trainer.args, bool(trainer.use_vllm)).replace(
            old_logprobs="trainer", training_dropout=_drops_out(trainer.model)
        )
        self.audit = Audit(
            conventions,
            every=every,
            on_finding="log" if on_finding == "log" else "warn",
            bundles=Path(trainer.args.output_dir) / "canary" if bundles else None,
            ranks="mean",
        )
        self._trainer = trainer
        self._update: Update | None = None
        self._inputs: dict[str, Any] | None = None
        self._sampled_at = 0
        self._compute_loss = trainer._compute_loss
        self._sample = trainer._generate_and_score_completions
        self._score = trainer._get_per_token_logps_and_entropies
        trainer._compute_loss = self._watched_loss
        trainer._generate_and_score_completions = self._watched_samples
        trainer._get_per_token_logps_and_entropies = self._watched_scores

    def _watched_samples(self, inputs: Any) -> Any:
        if self._trainer.model.training:
            self._sampled_at = self._trainer.state.global_step
        return self._sample(inputs)

    def _watched_loss(self, model: Any, inputs: dict[str, Any]) -> Any:
        if not model.training:
            return self._compute_loss(model, inputs)
        if self._update is None:
            self._update = self._begun()
        self._inputs = inputs if self._update.is_audited else None
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
        )
        update.begin()
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

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Judge the update that was taken."""
        update, self._update = self._update, None
        if update is None:
            return
        before = len(self.audit.findings)
        update.end(was_stepped=not self._trainer.accelerator.optimizer_step_was_skipped)
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


# What the loss is given, by TRL's names and by ours.
GIVEN = {
    "advantages": "advantages",
    "old_per_token_logps": "old_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "sampling_per_token_logps": "sampler_logprobs",
}
