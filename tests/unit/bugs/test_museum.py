"""Every shipped bug in the museum is caught, and its snippet reproduces it; every check can fail."""

import inspect
import os
import re
from dataclasses import replace
from functools import cache

import pytest
import torch
from buffer_mutants import BUFFER_MUTANTS
from building_mutants import BUILDING_MUTANTS
from checkpoint_mutants import CHECKPOINT_MUTANTS
from conversation_mutants import CONVERSATION_MUTANTS
from critic_mutants import CRITIC_MUTANTS
from data_mutants import DATA_MUTANTS
from expected_table import expected_table
from first_failure import first_failure
from layouts_mutants import LAYOUTS_MUTANTS
from loss_mutants import LOSS_MUTANTS
from memory_mutants import MEMORY_MUTANTS
from other_loss_mutants import OTHER_LOSS_MUTANTS
from preparation_mutants import PREPARATION_MUTANTS
from programs import run_without_rlcanary
from reporting_mutants import REPORTING_MUTANTS
from rl_step_mutants import RL_STEP_MUTANTS
from torch import Tensor
from trainer_mutants import TRAINER_MUTANTS
from world_mutants import WORLD_MUTANTS

from rlcanary import reference
from rlcanary.adapters import load_adapter
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs import OUT_OF_REACH, Bug, all_bugs
from rlcanary.bugs.detection import relevant_checks
from rlcanary.checks import Check, Result, all_checks
from rlcanary.checks.programs.standalone import standalone
from rlcanary.contract.batch import CollatedBatch, Group, LossOutput, PolicyBatch

# Every line says which checks catch a bug; the first of them runs. RLCANARY_MUSEUM=all runs these and all others, and
# tells which line is wrong.
TRIES_ALL = os.environ.get("RLCANARY_MUSEUM") == "all"
BUGS = all_bugs()
CHECKS = {check.id: check for check in all_checks()}


@cache
def outcome(check: Check, mutated: type[ReferenceAdapter]) -> Result:
    """The result of one check on one mistake, up to its first finding, which several tests ask for."""
    spec = f"{mutated.__module__}:{mutated.__name__}"
    return first_failure(check, mutated(), spec)


def caught_by() -> dict[str, list[str]]:
    """The checks that catch each bug."""
    return expected_table("museum.txt")


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.id)
def test_shipped_bug_is_caught_and_the_snippets_tell_it_from_the_reference(bug: type[Bug]) -> None:
    expected = caught_by()[bug.id] if TRIES_ALL else caught_by()[bug.id][:1]
    checks = relevant_checks(bug) if TRIES_ALL else [CHECKS[name] for name in expected]
    results = {check.id: outcome(check, bug) for check in checks}
    assert {name for name, result in results.items() if result.status == "error"} == set()
    assert [name for name, result in results.items() if result.status == "fail"] == expected != []
    for name in expected:
        with pytest.raises(AssertionError):
            exec(results[name].snippet, {})
        exec(results[name].snippet.replace(bug.spec(), "reference"), {})


def test_no_line_of_the_table_is_about_another_bug() -> None:
    assert caught_by().keys() == {bug.id for bug in BUGS}


@pytest.mark.parametrize("bug", {bug.area(): bug for bug in BUGS}.values(), ids=lambda bug: bug.id)
def test_its_snippet_tells_a_shipped_bug_of_each_area_from_the_reference_without_rlcanary_too(bug: type[Bug]) -> None:
    snippet = outcome(CHECKS[caught_by()[bug.id][0]], bug).snippet
    with pytest.raises(AssertionError):
        run_without_rlcanary(standalone(snippet, bug(), bug.spec()))
    on_reference = snippet.replace(bug.spec(), "reference")
    run_without_rlcanary(standalone(on_reference, ReferenceAdapter(), "reference"))


class Mutants:
    """Mistakes for the checks that no shipped bug in the museum trips yet."""

    class UnnormalisedScores(ReferenceAdapter):
        def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
            return (logits / temperature).gather(-1, token_ids.unsqueeze(-1)).squeeze(-1)

    class NoBaseline(ReferenceAdapter):
        def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
            return reference.advantages(rewards, group_ids, self.conventions.replace(advantage_baseline="none"))

    class AdvantagesInPlace(ReferenceAdapter):
        def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
            result = super().advantages(rewards, group_ids)
            rewards -= rewards.mean()
            return result

    class LossInPlace(ReferenceAdapter):
        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            output = super().policy_loss(batch)
            batch.advantages -= batch.advantages.mean()
            return output

    class TokenAdvantagesOfAllRows(ReferenceAdapter):
        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            if batch.advantages.ndim == 2:
                total = batch.advantages.sum(dim=0, keepdim=True).expand_as(batch.advantages)
                batch = replace(batch, advantages=total)
            return super().policy_loss(batch)

    class ZeroOverZero(ReferenceAdapter):
        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            output = super().policy_loss(batch)
            tokens = batch.mask.sum()
            return LossOutput(output.loss * tokens / tokens, output.metrics)

    class GradientTwice(ReferenceAdapter):
        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            output = super().policy_loss(batch)
            return LossOutput(2 * output.loss - output.loss.detach(), output.metrics)

    class MissingMinusOne(ReferenceAdapter):
        def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
            return super().kl(logprobs, ref_logprobs) + 1

    class WeightsUpsideDown(ReferenceAdapter):
        def importance_weights(self, trainer_logprobs: Tensor, sampler_logprobs: Tensor, mask: Tensor) -> Tensor:
            return super().importance_weights(sampler_logprobs, trainer_logprobs, mask)

    class PositionsCountPadding(ReferenceAdapter):
        def make_batch(self, groups: list[Group], pad_token_id: int) -> CollatedBatch:
            batch, _ = reference.make_batch(groups, pad_token_id, prompt_padding="left")
            batch.position_ids = torch.arange(batch.input_ids.shape[1]).expand_as(batch.input_ids)
            return batch


MUTANTS = [
    *(value for value in vars(Mutants).values() if inspect.isclass(value)),
    *BUFFER_MUTANTS,
    *BUILDING_MUTANTS,
    *CHECKPOINT_MUTANTS,
    *CONVERSATION_MUTANTS,
    *CRITIC_MUTANTS,
    *DATA_MUTANTS,
    *LAYOUTS_MUTANTS,
    *LOSS_MUTANTS,
    *MEMORY_MUTANTS,
    *RL_STEP_MUTANTS,
    *REPORTING_MUTANTS,
    *OTHER_LOSS_MUTANTS,
    *PREPARATION_MUTANTS,
    *TRAINER_MUTANTS,
    *WORLD_MUTANTS,
]


@pytest.mark.parametrize("check", all_checks(), ids=lambda check: check.id)
def test_check_can_fail(check: Check) -> None:
    mistakes = {**{bug.id: bug for bug in BUGS}, **{mutant.__name__: mutant for mutant in MUTANTS}}
    caught = [bug for bug, checks in caught_by().items() if check.id in checks]
    (mistake, *_) = caught or expected_table("tripped_by.txt")[check.id]
    assert outcome(check, mistakes[mistake]).status == "fail"


def test_no_line_names_a_check_that_catches_a_bug() -> None:
    assert not expected_table("tripped_by.txt").keys() & {check for checks in caught_by().values() for check in checks}


def test_every_check_explains_itself() -> None:
    for check in all_checks():
        assert "Silent because" in check.explanation, check.id
        assert "Look" in check.explanation, check.id
        assert check.summary.endswith("."), check.id


def test_at_most_one_in_twenty_of_two_surveys_is_out_of_reach() -> None:
    assert len(OUT_OF_REACH) <= 200 / 20
    assert not set(OUT_OF_REACH) & {bug.id for bug in BUGS}


def test_bugs_have_sources_and_distinct_ids() -> None:
    assert len({bug.id for bug in BUGS}) == len(BUGS)
    for bug in BUGS:
        assert load_adapter(bug.spec()).name == bug.id
        assert re.fullmatch(r"[a-z-]+\.[a-z0-9-]+", bug.id)
        assert bug.source
        assert bug.effect
