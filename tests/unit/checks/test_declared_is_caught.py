"""Whatever can be declared can be caught: code that ignores a field of the conventions fails a check."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, get_args, get_type_hints

import pytest

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.adapter import CAPABILITIES
from rlcanary.contract.batch import CollatedBatch, Group
from rlcanary.contract.conventions import GRPO, Conventions

# Quick ones first: the first check that fails ends the search.
AREAS = ("config", "advantage", "loss", "kl", "importance", "logprob", "order", "batch", "split", "step", "evaluation")
CHECKS = sorted((each for each in all_checks() if each.area in AREAS), key=lambda each: AREAS.index(each.area))

# A value of each number that tells a declaration from the default.
NUMBERS: dict[str, Any] = {
    "advantage_ddof": 0,
    "advantage_eps": 0.1,
    "reward_clip": 0.5,
    "clip_low": 0.4,
    "clip_high": 0.4,
    "dual_clip": 1.5,
    "log_ratio_clamp": 0.5,
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
    "sync_while_sampling": False,
}
# What has to be on for a field to have an effect.
CONTEXT: dict[str, dict[str, Any]] = {
    "advantage_eps_mode": {"advantage_baseline": "leave_one_out"},
    "aggregation_constant": {"aggregation": "constant"},
    "importance_mode": {"importance_level": "token", "importance_low": 0.8, "importance_high": 1.1},
    "importance_low": {"importance_level": "token", "importance_mode": "mask", "importance_high": 1.1},
    "importance_high": {"importance_level": "token"},
    **{f"kl_{name}": {"kl_coef": 0.5} for name in ("estimator", "direction", "placement", "score_term")},
    **{f"kl_{name}": {"kl_coef": 0.5} for name in ("ratio_weighted", "input_clamp", "output_clamp")},
}
# Fields that another module of checks answers for, or that no check of the reference can tell.
UNCAUGHT = {
    "logprobs_upcast": "True is caught by logprob.bfloat16_logits on code that does not upcast; False permits both",
    "sync_while_sampling": "a permission: False only takes two checks away",
}


def _ignoring(field: str, value: Any) -> type[ReferenceAdapter]:
    """The reference, which declares its conventions and works as if this field had this value."""

    def capability(name: str) -> Any:
        def run(self: ReferenceAdapter, *arguments: Any) -> Any:
            return getattr(ReferenceAdapter(self.conventions.replace(**{field: value})), name)(*arguments)

        return run

    return type("Ignoring", (ReferenceAdapter,), {name: capability(name) for name in CAPABILITIES})


def _all_pairs() -> Iterator[tuple[str, Any, Any]]:
    """Each field with a value that is declared and another one that is done."""
    hints = get_type_hints(Conventions)
    for field in fields(Conventions):
        values = get_args(hints[field.name])
        if values and isinstance(values[0], str):
            yield from ((field.name, value, values[index - 1]) for index, value in enumerate(values))
        else:
            yield field.name, NUMBERS[field.name], field.default
            yield field.name, field.default, NUMBERS[field.name]


def _caught_by(adapter: ReferenceAdapter) -> str | None:
    for check in CHECKS:
        if run_check(check, adapter, "reference").status in ("fail", "error"):
            return check.id
    return None


PAIRS = [pair for pair in _all_pairs() if pair[0] not in UNCAUGHT]
UNCAUGHT_PAIRS = [pair for pair in _all_pairs() if pair[0] in UNCAUGHT]


@pytest.mark.parametrize(("field", "declared", "done"), PAIRS)
def test_declaring_one_value_and_doing_another_fails_a_check(field: str, declared: Any, done: Any) -> None:
    conventions = GRPO.replace(**{**CONTEXT.get(field, {}), field: declared})
    assert _caught_by(_ignoring(field, done)(conventions))


@pytest.mark.parametrize(("field", "declared", "done"), UNCAUGHT_PAIRS)
def test_field_named_as_uncaught_is_not_caught(field: str, declared: Any, done: Any) -> None:
    caught_by = _caught_by(_ignoring(field, done)(GRPO.replace(**{**CONTEXT.get(field, {}), field: declared})))
    assert caught_by is None, f"{caught_by} catches {field}: delete its entry in UNCAUGHT"


class EverythingCountsAsSampled(ReferenceAdapter):
    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        groups = [
            replace(group, completions=[replace(each, sampled=None) for each in group.completions]) for group in groups
        ]
        return super().make_batch(groups, pad_token_id)


def test_completions_whose_marks_of_what_was_sampled_are_ignored_fail_a_check() -> None:
    (check,) = [each for each in CHECKS if each.id == "batch.only_sampled_tokens_are_trained"]
    assert run_check(check, ReferenceAdapter(), "reference").status == "pass"
    assert run_check(check, EverythingCountsAsSampled(), "reference").status == "fail"


class SamplerLogprobsDropped(ReferenceAdapter):
    def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
        return replace(super().make_batch(groups, pad_token_id), old_logprobs=None)


def test_batch_without_the_logprobs_of_its_completions_fails_unless_the_trainer_computes_its_own() -> None:
    (check,) = [each for each in CHECKS if each.id == "batch.rewards_and_identity"]
    assert run_check(check, ReferenceAdapter(), "reference").status == "pass"
    result = run_check(check, SamplerLogprobsDropped(), "reference")
    assert (result.status, [found.fingerprint.quantity for found in result.findings]) == ("fail", ["sampler logprobs"])
    with pytest.raises(AssertionError):
        exec(result.snippet.replace("load_adapter('reference')", "SamplerLogprobsDropped()"), globals())
    exec(result.snippet, {})
    recomputes = SamplerLogprobsDropped(GRPO.replace(old_logprobs="trainer"))
    assert run_check(check, recomputes, "reference").status == "pass"


def test_every_field_of_the_conventions_is_tried_or_named_as_uncaught() -> None:
    tried = {field for field, _, _ in PAIRS}
    assert tried | set(UNCAUGHT) == {field.name for field in fields(Conventions)}
    assert not tried & set(UNCAUGHT)
