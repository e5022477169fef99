"""A cause explains all that it stands above, and what nothing explains stays by itself."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs import all_bugs
from rlcanary.bugs.causes import REACHED, candidates, causes_of
from rlcanary.checks import Check, Result, all_checks, run_check
from rlcanary.checks.findings.diagnosis import Cause, Diagnosis
from rlcanary.checks.findings.document import to_document
from rlcanary.contract.batch import Group, LossOutput, PolicyBatch
from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.reporting import RolloutBatch

CHECKS = {check.id: check for check in all_checks()}


def diagnosed(adapter: ReferenceAdapter, *ids: str) -> tuple[list[Cause], list[Result]]:
    """Run these checks and search for the causes of what failed, however long it takes."""
    checks: list[Check] = [CHECKS[name] for name in ids]
    results = [run_check(check, adapter, "reference") for check in checks]
    return causes_of(checks, results, adapter, seconds=0).causes, results


class Mistakes:
    class PaddingTrained(ReferenceAdapter):
        words = "the padding is trained"

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            return super().policy_loss(replace(batch, mask=torch.ones_like(batch.mask)))

    class QuarterOfTheLoss(ReferenceAdapter):
        words = "the loss is 0.25 times the declared one"

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            output = super().policy_loss(batch)
            return LossOutput(output.loss / 4, output.metrics)

    class GradientTwice(ReferenceAdapter):
        words = "the gradient of the loss is 2 times the declared one"

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            output = super().policy_loss(batch)
            return LossOutput(2 * output.loss - output.loss.detach(), output.metrics)

    class RatioDetached(ReferenceAdapter):
        words = "the ratio is detached: the policy term has no gradient"

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            return super().policy_loss(replace(batch, logprobs=batch.logprobs.detach()))

    class TokenMean(ReferenceAdapter):
        words = "aggregation is 'token_mean', where 'sequence_mean' is declared: if you mean that, declare it"

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            changes = {"aggregation": "token_mean"} if self.conventions.aggregation == "sequence_mean" else {}
            return ReferenceAdapter(self.conventions.replace(**changes)).policy_loss(batch)


@pytest.mark.parametrize(
    "mistake", [value for value in vars(Mistakes).values() if isinstance(value, type)], ids=lambda value: value.__name__
)
def test_one_cause_in_plain_words_explains_every_finding(mistake: type[ReferenceAdapter]) -> None:
    causes, results = diagnosed(mistake(), "loss.declared_value", "loss.declared_gradient")
    assert [cause.words for cause in causes] == [mistake.words]
    for result in results:
        assert all(causes[0].covers(result.id, found) for found in result.findings)


def test_mistake_in_two_capabilities_is_one_cause() -> None:
    class KlWithoutGradient(ReferenceAdapter):
        def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
            return super().kl(logprobs, ref_logprobs).detach()

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            right = super().policy_loss(batch)
            without = ReferenceAdapter(self.conventions.replace(kl_coef=0.0)).policy_loss(batch).loss
            return LossOutput(without + (right.loss - without).detach(), right.metrics)

    adapter = KlWithoutGradient(GRPO.replace(kl_coef=0.5))
    causes, results = diagnosed(adapter, "kl.declared_estimator", "loss.declared_gradient", "loss.declared_value")
    assert [result.status for result in results] == ["fail", "fail", "pass"]
    assert [cause.words for cause in causes] == ["the KL has no gradient"]
    assert set(causes[0].explained) == {"kl.declared_estimator", "loss.declared_gradient"}


def test_metric_of_no_tokens_refutes_no_cause() -> None:
    class Shifted(ReferenceAdapter):
        """The mask one token late, and zero for the metrics of a batch without tokens."""

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            later_BT = torch.nn.functional.pad(batch.mask, (1, 0))[:, :-1]
            output = super().policy_loss(replace(batch, mask=later_BT))
            metrics = {name: 0.0 if math.isnan(value) else value for name, value in output.metrics.items()}
            return LossOutput(output.loss, metrics)

    causes, results = diagnosed(Shifted(GRPO.replace(kl_coef=0.5)), "loss.metrics", "loss.declared_value")
    assert [cause.words for cause in causes] == ["the mask is shifted by one: each row trains the token after"]
    assert causes[0].count == sum(len(result.findings) for result in results)


def test_two_mistakes_are_two_causes() -> None:
    class Both(Mistakes.QuarterOfTheLoss):
        def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
            return -super().advantages(rewards, group_ids)

    causes, _ = diagnosed(Both(), "loss.declared_value", "advantage.declared_formula")
    told = {cause.words: set(cause.explained) for cause in causes}
    assert told == {
        Mistakes.QuarterOfTheLoss.words: {"loss.declared_value"},
        "the advantages have the wrong sign": {"advantage.declared_formula"},
    }


def test_mistake_that_nobody_knows_has_no_cause() -> None:
    class Wobbly(ReferenceAdapter):
        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            output = super().policy_loss(batch)
            return LossOutput(output.loss + 0.1 * (batch.logprobs * batch.mask).square().sum().sin(), output.metrics)

    causes, results = diagnosed(Wobbly(), "loss.declared_value")
    assert results[0].status == "fail"
    assert causes == []


def test_cause_that_a_passing_check_refutes_is_not_told() -> None:
    class OnlyWithoutEmptyRows(Mistakes.PaddingTrained):
        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            exact = ReferenceAdapter(self.conventions).policy_loss(batch)
            return exact if batch.mask.shape[1] == 4 or not batch.mask.any() else super().policy_loss(batch)

    adapter = OnlyWithoutEmptyRows()
    causes, results = diagnosed(adapter, "config.entropy_option", "loss.rows_are_separate", "loss.nothing_trained")
    assert [result.status for result in results] == ["fail", "pass", "pass"]
    assert causes == []


def test_candidates_are_told_apart_by_their_words() -> None:
    words = [candidate.words for candidate in candidates(GRPO, [])]
    assert len(words) > len(all_bugs()) + 50
    assert len(set(words)) == len(words)


def test_oracle_is_right_again_behind_a_candidate() -> None:
    for candidate in candidates(GRPO, []):
        if candidate.words == "the advantages have the wrong sign":
            rewards_B, groups_B = torch.tensor([1.0, 0.0]), torch.tensor([0, 0])
            exact_B = ReferenceAdapter(GRPO).advantages(rewards_B, groups_B)
            assert torch.equal(candidate.adapter.advantages(rewards_B, groups_B), -exact_B)
            assert torch.equal(ReferenceAdapter(GRPO).advantages(rewards_B, groups_B), exact_B)
            return
    pytest.fail("no candidate has this sign")


def test_passing_suite_has_no_cause() -> None:
    assert diagnosed(ReferenceAdapter(), "loss.on_policy_sign")[0] == []


class MoreMistakes:
    class NothingOverNothing(ReferenceAdapter):
        words = "a row without a trained token is divided by its 0 tokens: the loss is NaN"

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            exact = super().policy_loss(batch)
            shares_B = (batch.logprobs * batch.mask).sum(dim=1) / batch.mask.sum(dim=1)
            return replace(exact, loss=exact.loss + (shares_B - shares_B.detach()).sum() * 0)

    class AdvantagesOfTheRowBefore(ReferenceAdapter):
        words = "the advantages are those of the previous row"

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            return super().policy_loss(replace(batch, advantages=batch.advantages.roll(1, dims=0)))

    class EntropyByDefault(ReferenceAdapter):
        words = "entropy_coef is 0.01 where it is set to 0 or None"

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            coefficient = self.conventions.entropy_coef or 0.01
            return ReferenceAdapter(self.conventions.replace(entropy_coef=coefficient)).policy_loss(batch)

    class SumsAreMeans(ReferenceAdapter):
        words = "aggregation 'sequence_sum' is computed as 'sequence_mean'"

        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            changes = {"aggregation": "sequence_mean"} if self.conventions.aggregation == "sequence_sum" else {}
            return ReferenceAdapter(self.conventions.replace(**changes)).policy_loss(batch)

    class LastItemLost(ReferenceAdapter):
        words = "the last item is never sampled"

        def rollout(self, *given: Any) -> list[Group]:
            return super().rollout(*given)[:-1]

    class SystemPromptLost(ReferenceAdapter):
        words = "the system prompt is dropped"

        def render(self, messages: list[Mapping[str, Any]], tokenizer: Any) -> tuple[list[int], list[bool]]:
            return super().render([message for message in messages if message["role"] != "system"], tokenizer)


@pytest.mark.parametrize(
    ("mistake", "check_id"),
    [
        (MoreMistakes.NothingOverNothing, "loss.declared_gradient"),
        (MoreMistakes.AdvantagesOfTheRowBefore, "loss.declared_gradient"),
        (MoreMistakes.EntropyByDefault, "config.entropy_option"),
        (MoreMistakes.SumsAreMeans, "config.aggregation_options"),
        (MoreMistakes.LastItemLost, "rollout.groups_follow_items"),
        (MoreMistakes.SystemPromptLost, "rendering.is_the_template"),
    ],
)
def test_mistake_is_found_in_any_part_of_the_loop(mistake: type[ReferenceAdapter], check_id: str) -> None:
    causes, results = diagnosed(mistake(), check_id)
    assert [result.status for result in results] == ["fail"]
    assert [cause.words for cause in causes] == [mistake.words]  # type: ignore[attr-defined]


def test_search_that_its_limit_ends_says_so() -> None:
    check, adapter = CHECKS["loss.declared_value"], Mistakes.QuarterOfTheLoss()
    results = [run_check(check, adapter, "reference")]
    assert "ended after 1e-09 s" in str(causes_of([check], results, adapter, seconds=1e-9))
    assert str(causes_of([check], results, adapter, seconds=0)) == ""
    assert to_document("x", results, Diagnosis([], 2.0))["causes_cut_after"] == 2.0


def test_declaration_of_something_else_than_the_loss_is_a_cause() -> None:
    class LeavesThemOut(ReferenceAdapter):
        def rollout_metrics(self, batch: RolloutBatch, n_ranks: int) -> dict[str, float]:
            changes = {"unscored": "exclude"} if self.conventions.unscored == "error" else {}
            return ReferenceAdapter(self.conventions.replace(**changes)).rollout_metrics(batch, n_ranks)

    causes, _ = diagnosed(LeavesThemOut(GRPO.replace(unscored="error")), "rollout_metrics.unscored")
    assert [cause.words for cause in causes] == [
        "unscored is 'exclude', where 'error' is declared: if you mean that, declare it"
    ]


def test_causes_are_sought_in_capabilities_that_checks_ask_for() -> None:
    asked = {name for check in CHECKS.values() for name in check.needs}
    assert frozenset().union(*REACHED.values()) <= asked
