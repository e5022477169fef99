"""What the checks of losses see: mistakes that leave one half of value, gradient and metrics right."""

import loss_mutants as mutants
import pytest
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import Result, all_checks, run_check
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import CODEBASES, GRPO

CHECKS = {check.id: check for check in all_checks()}


def run(check_id: str, adapter: Adapter) -> Result:
    return run_check(CHECKS[check_id], adapter, "reference")


def test_nan_gradient_at_masked_positions_is_a_finding() -> None:
    result = run("loss.masked_positions", mutants.WhereAroundTheResult())
    assert result.status == "fail"
    assert "nan at the masked positions" in result.message


@pytest.mark.parametrize("term", ["ref_logprobs", "sampler_logprobs", "entropy", "advantages"])
def test_garbage_at_masked_positions_of_every_term_is_tried(term: str) -> None:
    adapter = type("Mutant", (mutants.MultipliedByTheMask,), {"term": term})()
    result = run("loss.masked_positions", adapter)
    assert result.status == "fail"
    assert f"masked positions of {term} changed the loss" in result.message


def test_metric_that_reads_masked_positions_is_a_finding() -> None:
    assert "the metric entropy" in run("loss.masked_positions", mutants.EntropyOfPadding()).message


def test_token_that_is_counted_as_clipped_and_is_not_is_a_finding() -> None:
    result = run("loss.clipping", mutants.CountedOnBothSides())
    assert result.message.startswith("the metric clip_fraction is 1, for one token with ratio 0.31 and advantage 1")


def test_token_without_advantage_that_is_counted_as_clipped_is_a_finding() -> None:
    found = run("loss.clipping", mutants.CountsTokensWithoutAdvantage()).findings
    assert {each.fingerprint.quantity for each in found} == {"metric clip_fraction"}
    assert all("advantage 0" in each.fingerprint.case for each in found)


def test_wrong_gradient_hides_no_wrong_metric() -> None:
    found = run("config.clip_options", mutants.WrongCispoThatCountsClippedTokens()).findings
    assert {"gradient", "metric clip_fraction"} <= {each.fingerprint.quantity for each in found}


def test_logged_kl_of_a_loss_with_kl_is_compared() -> None:
    adapter = mutants.LoggedKlIsASum(GRPO.replace(kl_coef=0.0))
    assert run("loss.metrics", adapter).status == "pass"
    found = run("config.kl_options", adapter).findings
    assert {each.fingerprint.quantity for each in found} == {"metric kl"}


@pytest.mark.parametrize("conventions", [GRPO, GRPO.replace(dual_clip=3.0), CODEBASES["verl"], CODEBASES["openrlhf"]])
def test_ignored_clamp_of_the_log_ratio_is_a_finding(conventions: Conventions) -> None:
    assert run("loss.log_ratio_clamp", ReferenceAdapter(conventions)).status == "pass"
    assert run("loss.log_ratio_clamp", mutants.LogRatioUnclamped(conventions)).status == "fail"


def test_pieces_of_equal_tokens_and_unequal_rows_that_count_alike_are_a_finding() -> None:
    assert "one long row" in run("split.micro_batches", mutants.BalancedByTokens()).message
    assert "one long row" in run("split.ranks", mutants.BalancedByTokens()).message


def test_metrics_of_the_last_micro_batch_are_a_finding() -> None:
    assert run("split.metrics_over_micro_batches", mutants.MetricsOfTheLastMicroBatch()).status == "fail"


class TwiceTheLoss(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        return LossOutput(2 * output.loss, output.metrics)


def test_wrong_loss_that_reads_no_reference_is_not_said_to_depend_on_it() -> None:
    assert run("loss.declared_value", TwiceTheLoss()).status == "fail"
    assert run("config.zero_is_off", TwiceTheLoss()).status == "pass"


def test_entropy_bonus_without_gradient_is_a_finding() -> None:
    result = run("config.entropy_option", mutants.EntropyBonusWithoutGradient())
    assert result.message.startswith("with entropy_coef=0.1 the gradient of the entropy is another one")


def test_nan_reward_that_counts_as_a_wrong_answer_is_a_finding() -> None:
    for conventions in (GRPO, GRPO.replace(nan_reward="exclude")):
        assert run("advantage.nan_reward", ReferenceAdapter(conventions)).status == "pass"
        assert run("advantage.nan_reward", mutants.NanRewardCountsAsZero(conventions)).status == "fail"


@pytest.mark.parametrize("clip", [0.1, 1.0, 10.0])
def test_declared_clip_of_rewards_accuses_nobody(clip: float) -> None:
    adapter = ReferenceAdapter(GRPO.replace(reward_clip=clip))
    for check_id in CHECKS:
        if check_id.startswith("advantage."):
            assert run(check_id, adapter).status == "pass", check_id


class DividesItsOwnLogits(ReferenceAdapter):
    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        return super().token_logprobs(logits.div_(temperature), token_ids, 1.0)


@pytest.mark.parametrize("check_id", ["logprob.is_log_softmax", "logprob.temperature", "logprob.large_logits"])
def test_code_may_divide_logits_that_a_model_has_just_computed(check_id: str) -> None:
    assert run(check_id, DividesItsOwnLogits()).status == "pass"
