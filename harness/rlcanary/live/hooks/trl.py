"""The audit in TRL's `GRPOTrainer`, as a callback. Written for TRL 1.16.

The trainer's own methods are called as before; the callback sees what its loss is given, and the gradient that comes back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import TrainerCallback

from rlcanary.adapters.trl import conventions_of
from rlcanary.live.audit import Audit, OnFinding, Piece
from rlcanary.live.ranks import Made
from rlcanary.live.record import Record
from rlcanary.live.weights import Weights


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
        self._weights: Weights | None = None
        self._loss_scale, self._updated_at = 1.0, 0
        self._trainer = trainer
        self._inputs: dict[str, Any] | None = None
        self._seen: list[tuple[dict[str, Any], Piece]] = []
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
        is_audited = self.audit.updates % self.audit.every == 0 and model.training
        self._inputs = inputs if is_audited else None
        try:
            return self._compute_loss(model, inputs)
        finally:
            self._inputs = None

    def _watched_scores(self, *arguments: Any, **options: Any) -> Any:
        scored = self._score(*arguments, **options)
        inputs, logprobs = self._inputs, scored[0]
        if inputs is not None and logprobs.requires_grad:
            entropy = scored[1] if len(scored) > 1 else None
            self.audit.guard(lambda: self._watch(inputs, logprobs, entropy))
        return scored

    def _watch(self, inputs: dict[str, Any], logprobs: Tensor, entropy: Tensor | None) -> None:
        start = sum(len(piece.rows) for _, piece in self._seen)
        kept = {name: inputs[name] for name in KEPT if isinstance(inputs.get(name), Tensor)}
        if entropy is not None:
            kept["entropy"] = entropy.detach()
        self._seen.append((kept, Piece(logprobs, torch.arange(start, start + len(logprobs)))))

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Note the weights of an update that is audited."""
        if self._seen:
            self.audit.guard(self._weigh)

    def _weigh(self) -> None:
        self._updated_at = self._trainer.state.global_step
        scaler = self._trainer.accelerator.scaler
        self._loss_scale = 1.0 if scaler is None else scaler.get_scale()
        self._weights = Weights(self._trainer.model)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Judge the update that was taken."""
        number, seen = self.audit.updates, self._seen
        self.audit.updates, self._seen = number + 1, []
        for _, piece in seen:
            piece.handle.remove()
        before = len(self.audit.findings)
        if seen:
            self.audit.conclude(lambda: self._made(number, seen))
        for name, value in self.audit.metrics().items():
            self._trainer._metrics["train"][name].append(value)
        if self._stops and len(self.audit.findings) > before:
            control.should_save = control.should_training_stop = True

    def _made(self, number: int, seen: list[tuple[dict[str, Any], Piece]]) -> Made:
        record = _record(number, seen, self.audit)
        record.gradient /= self._loss_scale
        record.versions = torch.full((len(record.mask),), self._sampled_at)
        record.trainer_version = self._updated_at
        record.drawn_freely = _draws_freely(self._trainer.args)
        weights, self._weights = self._weights, None
        return record, None if weights is None else weights.moves()


def _drops_out(model: Any) -> bool:
    """Tell whether the model drops anything in training mode, in which TRL trains."""
    layers = any(isinstance(each, torch.nn.Dropout) and each.p > 0 for each in model.modules())
    return layers or getattr(model.config, "attention_dropout", 0.0) > 0


def _draws_freely(args: Any) -> bool:
    """Tell whether all rows are plain samples of the policy."""
    is_whole = args.top_p == 1.0 and not args.top_k and not args.min_p and args.repetition_penalty == 1.0
    return is_whole and not args.generation_kwargs and not args.mask_truncated_completions


# What the loss is given, by TRL's names.
KEPT = (
    *("completion_mask", "tool_mask", "advantages", "old_per_token_logps", "ref_per_token_logps"),
    "sampling_per_token_logps",
)


def _record(number: int, seen: list[tuple[dict[str, Any], Piece]], audit: Audit) -> Record:
    width = max(piece.logprobs.shape[1] for _, piece in seen)

    def joined(values: list[Tensor]) -> Tensor:
        """Put the micro-batches under each other, padded on the right, in float64 where they are of floats."""
        moved = [value.detach().cpu() for value in values]
        moved = [value.double() if value.is_floating_point() else value for value in moved]
        if moved[0].ndim == 1:
            return torch.cat(moved)
        return torch.cat([torch.nn.functional.pad(value, (0, width - value.shape[1])) for value in moved])

    def given(name: str) -> Tensor | None:
        values = [kept[name] for kept, _ in seen if name in kept]
        return joined(values) if len(values) == len(seen) else None

    mask_BT, tools_BT = given("completion_mask"), given("tool_mask")
    assert mask_BT is not None
    return Record(
        number,
        audit.conventions,
        joined([piece.logprobs for _, piece in seen]),
        joined([piece.gradient for _, piece in seen]),
        (mask_BT if tools_BT is None else mask_BT * tools_BT).bool(),
        pieces=[piece.rows for _, piece in seen],
        eps=torch.finfo(seen[0][1].logprobs.dtype).eps,
        advantages=given("advantages"),
        old_logprobs=given("old_per_token_logps"),
        sampler_logprobs=given("sampling_per_token_logps"),
        ref_logprobs=given("ref_per_token_logps"),
        entropy=given("entropy"),
    )
