"""Mutants that declare one value of a convention and compute another, in a context where the two differ."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, cast

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.adapter import CAPABILITIES, Adapter
from rlcanary.contract.conventions import Conventions, choices
from rlcanary.contract.presets import GRPO
from rlcanary.mutants.mutant import Run

# A value of each number that tells a declaration from the default.
NUMBERS: dict[str, Any] = {
    "advantage_ddof": 0,
    "advantage_eps": 0.1,
    "reward_clip": 0.5,
    "overlong_buffer": 4,
    "overlong_penalty": 0.5,
    "mask_truncated": True,
    "clip_low": 0.4,
    "clip_high": 0.4,
    "dual_clip": 1.5,
    "advantage_std_of_others": False,
    "top_entropy": 0.4,
    "kl_aggregation": "token_mean",
    "entropy_aggregation": "token_mean",
    "log_ratio_clamp": 0.5,
    "sapo_temperature_positive": 2.0,
    "sapo_temperature_negative": 0.5,
    "off_policy_mask": 0.05,
    "aggregation_constant": 7.0,
    "kl_coef": 0.5,
    "kl_input_clamp": 0.3,
    "kl_output_clamp": 0.1,
    "kl_score_term": True,
    "kl_ratio_weighted": True,
    "entropy_coef": 0.1,
    "temperature": 0.6,
    "max_grad_norm": 0.1,
    "importance_low": 0.8,
    "importance_high": 1.1,
    "training_dropout": True,
    "evaluation_temperature": 0.7,
    "logprobs_upcast": False,
    "engine_tolerance": 0.05,
    "sync_while_sampling": False,
    "epochs_per_rollout": 2,
    "mini_batches": 2,
    "logged_updates": "last",
    "logged_std_ddof": 0,
    "length_counts_eos": False,
    "pass_threshold": 0.5,
    "supervised_label_smoothing": 0.2,
    "distillation_beta": 0.2,
    "distillation_temperature_squared": True,
    "distillation_label_weight": 0.3,
    "distillation_whole_rows": False,
    "preference_beta": 0.5,
    "preference_reference": False,
    "preference_length_normalised": True,
    "preference_margin": 0.7,
    "preference_label_smoothing": 0.2,
    "preference_supervised_coef": 0.5,
    "discount": 0.7,
    "gae_lambda": 0.5,
    "critic_lambda": 0.5,
    "whitening_ddof": 0,
    "value_clip": 0.2,
    "value_coef": 1.0,
    "buffer_order": "newest_first",
    "sync_buffers": True,
    "sync_frozen": False,
    "prompt_style": "raw",
}
# What has to be on for a field to have an effect.
CONTEXT: dict[str, dict[str, Any]] = {
    "advantage_eps_mode": {"advantage_baseline": "leave_one_out"},
    **{f"sapo_temperature_{sign}": {"objective": "sapo"} for sign in ("positive", "negative")},
    "advantage_std_of_others": {"advantage_baseline": "leave_one_out"},
    "aggregation_constant": {"aggregation": "constant"},
    "overlong_penalty": {"overlong_buffer": 4},
    "entropy_aggregation": {"entropy_coef": 0.1},
    "importance_mode": {"importance_level": "token", "importance_low": 0.8, "importance_high": 1.1},
    "importance_low": {"importance_level": "token", "importance_mode": "mask", "importance_high": 1.1},
    "importance_high": {"importance_level": "token"},
    "distillation_beta": {"distillation_divergence": "jsd"},
    "discount": {"token_credit": "gae"},
    "gae_lambda": {"token_credit": "gae"},
    "critic_lambda": {"token_credit": "gae"},
    **{f"whitening_{name}": {"whitening": "mean_std"} for name in ("ddof", "singleton")},
    **{f"kl_{name}": {"kl_coef": 0.5} for name in ("estimator", "direction", "placement", "score_term", "aggregation")},
    **{f"kl_{name}": {"kl_coef": 0.5} for name in ("ratio_weighted", "input_clamp", "output_clamp")},
}


@dataclass(frozen=True)
class Pair:
    """A reference that declares one value of a convention and computes another.

    Attributes:
        field: the name of the field.
        declared: the declared value.
        computed: the value in its place.
    """

    field: str
    declared: Any
    computed: Any

    @property
    def conventions(self) -> Conventions:
        """The declared conventions, under which the field has an effect."""
        return GRPO.replace(**{**CONTEXT.get(self.field, {}), self.field: self.declared})

    @property
    def where(self) -> str:
        return f"{Conventions.__module__}:{self.field}"

    @property
    def diff(self) -> str:
        return f"- {self.field}={self.declared!r}\n+ {self.field}={self.computed!r}"

    @property
    def id(self) -> str:
        return f"{self.where}\n{self.diff}"

    def planted_in(self, adapter: Adapter) -> Adapter:
        def computing(name: str) -> Any:
            def run(changed: Adapter, *arguments: Any, **keywords: Any) -> Any:
                conventions = changed.conventions
                if getattr(conventions, self.field) == self.declared:
                    conventions = conventions.replace(**{self.field: self.computed})
                return getattr(ReferenceAdapter(conventions), name)(*arguments, **keywords)

            return run

        kind = type("Computing", (ReferenceAdapter,), {name: computing(name) for name in CAPABILITIES})
        return cast(Adapter, kind(self.conventions))

    def reached_by(self, run: Run) -> frozenset[str]:
        return frozenset(run.check.needs)


def pairs() -> Iterator[Pair]:
    """Yield each value of each option with the one before it, and each number's default with another value, both ways."""
    for field in fields(Conventions):
        if values := choices(field.name):
            yield from (Pair(field.name, value, values[index - 1]) for index, value in enumerate(values))
        else:
            yield Pair(field.name, NUMBERS[field.name], field.default)
            yield Pair(field.name, field.default, NUMBERS[field.name])
