"""Whatever can be declared can be caught: code that ignores a field of the conventions fails a check."""

from dataclasses import fields, replace
from typing import Any

import pytest
from first_failure import first_failure

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.adapter import CAPABILITIES
from rlcanary.contract.batch import CollatedBatch, Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO
from rlcanary.mutants.declared import Pair, pairs

# Quick ones first: the first check that fails ends the search.
AREAS = (
    *("rollout_metrics", "evaluation_metrics", "supervised", "distillation", "preference"),
    *("credit", "value", "buffer", "verifying", "preparing", "overlong"),
    *("config", "advantage", "loss", "kl", "importance", "logprob", "order", "batch", "split", "step"),
    *("rl_step", "evaluation", "building"),
)
CHECKS = sorted((each for each in all_checks() if each.area in AREAS), key=lambda each: AREAS.index(each.area))

OF_AREA = {
    **dict.fromkeys(("nan_reward", "singleton_group", "reward_clip"), "advantage"),
    **dict.fromkeys(("answer_taken",), "verifying"),
    **dict.fromkeys(("prompt_style", "long_prompt", "equal_prompts"), "preparing"),
    **dict.fromkeys(("critic_lambda", "discount", "whitening", "whitening_ddof", "whitening_singleton"), "credit"),
    **dict.fromkeys(("data_order",), "order"),
    **dict.fromkeys(("decayed",), "building"),
    **dict.fromkeys(("epochs_per_rollout", "mini_batches", "schedule_advances", "logged_updates"), "rl_step"),
    **dict.fromkeys(("max_grad_norm", "old_logprobs", "temperature", "training_dropout"), "step"),
}

# Fields that another module of checks answers for, or that no check of the reference can tell.
UNCAUGHT = {
    "logprobs_upcast": "True is caught by logprob.bfloat16_logits on code that does not upcast; False permits both",
    "sync_buffers": "True is caught by sync.buffers on code that sends parameters alone; False permits both",
    "distillation_whole_rows": "False is caught by distillation.unscored_positions on code that masks behind the divergence",
    "engine_tolerance": "a permission: it takes no engine further from its trainer",
    "sync_frozen": "True is caught by sync.every_parameter on code that sends trained parameters alone; False permits both",
    "sync_while_sampling": "a permission: False only takes two checks away",
}


def _ignoring(values: dict[str, Any]) -> type[ReferenceAdapter]:
    """The reference, which declares its conventions and works as if these fields had these values."""

    def capability(name: str) -> Any:
        def run(self: ReferenceAdapter, *arguments: Any) -> Any:
            return getattr(ReferenceAdapter(self.conventions.replace(**values)), name)(*arguments)

        return run

    return type("Ignoring", (ReferenceAdapter,), {name: capability(name) for name in CAPABILITIES})


def _caught_by(adapter: ReferenceAdapter, field: str) -> str | None:
    # The area that the field is of, or named for, comes first; that of most others is the loss.
    named_for = field.partition("_")[0]
    area = OF_AREA.get(field, named_for if named_for in AREAS else "loss")
    for check in sorted(CHECKS, key=lambda each: each.area != area):
        if first_failure(check, adapter, "reference").status in ("fail", "error"):
            return check.id
    return None


PAIRS = [pair for pair in pairs() if pair.field not in UNCAUGHT]
UNCAUGHT_PAIRS = list({pair.field: pair for pair in pairs() if pair.field in UNCAUGHT}.values())


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.diff)
def test_declaring_one_value_and_doing_another_fails_a_check(pair: Pair) -> None:
    assert _caught_by(_ignoring({pair.field: pair.computed})(pair.conventions), pair.field)


@pytest.mark.nightly
def test_fields_named_as_uncaught_are_not_caught() -> None:
    assert {pair.field for pair in UNCAUGHT_PAIRS} == set(UNCAUGHT)
    declared = GRPO.replace(**{pair.field: getattr(pair.conventions, pair.field) for pair in UNCAUGHT_PAIRS})
    ignoring = _ignoring({pair.field: pair.computed for pair in UNCAUGHT_PAIRS})
    caught_by = _caught_by(ignoring(declared), "logprob")
    assert caught_by is None, f"{caught_by} catches one of {', '.join(UNCAUGHT)}: delete its entry in UNCAUGHT"


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
    assert (result.status, {found.fingerprint.quantity for found in result.findings}) == ("fail", {"sampler logprobs"})
    with pytest.raises(AssertionError):
        exec(result.snippet.replace("load_adapter('reference')", "SamplerLogprobsDropped()"), globals())
    exec(result.snippet, {})
    recomputes = SamplerLogprobsDropped(GRPO.replace(old_logprobs="trainer"))
    assert run_check(check, recomputes, "reference").status == "pass"


def test_every_field_of_the_conventions_is_tried_or_named_as_uncaught() -> None:
    tried = {pair.field for pair in PAIRS}
    assert tried | set(UNCAUGHT) == {field.name for field in fields(Conventions)}
    assert not tried & set(UNCAUGHT)
