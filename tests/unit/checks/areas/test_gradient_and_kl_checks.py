"""What the checks of gradients and of the KL see, and that clips and clamps of any size accuse no correct loss."""

from dataclasses import replace

import pytest
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import Result, all_checks, run_check
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO, GSPO

CHECKS = {check.id: check for check in all_checks()}
AREAS = ("gradient", "kl")


def run(check_id: str, adapter: Adapter, seed: int = 0) -> Result:
    return run_check(CHECKS[check_id], adapter, "reference", seed)


def accusations(conventions: Conventions, seed: int) -> list[tuple[str, str]]:
    results = [run(check.id, ReferenceAdapter(conventions), seed) for check in CHECKS.values() if check.area in AREAS]
    return [(result.id, result.message) for result in results if result.status not in ("pass", "not-provided")]


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("base", [GRPO, GSPO, GRPO.replace(dual_clip=1.01)], ids=["token", "sequence", "dual"])
@pytest.mark.parametrize("clip", [0.02, 0.05, 3e-4, 0.0, 0.5])
def test_no_clip_range_is_accused(clip: float, base: Conventions, seed: int) -> None:
    assert accusations(base.replace(clip_low=clip, clip_high=clip), seed) == []


@pytest.mark.parametrize(
    "clamps",
    [{"kl_output_clamp": 0.1}, {"kl_input_clamp": 0.3}, {"kl_input_clamp": 0.3, "kl_output_clamp": 0.01}],
    ids=str,
)
@pytest.mark.parametrize("part", [{}, {"kl_score_term": True}, {"kl_ratio_weighted": True}], ids=str)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_no_clamp_of_the_kl_is_accused(estimator: str, part: dict[str, bool], clamps: dict[str, float]) -> None:
    for seed, direction in enumerate(("policy_to_reference", "reference_to_policy")):
        conventions = GRPO.replace(kl_coef=0.5, kl_estimator=estimator, kl_direction=direction, **part, **clamps)
        assert accusations(conventions, seed) == []


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("clamp", [{"kl_output_clamp": 0.1}, {"kl_input_clamp": 0.3}], ids=str)
def test_the_expectation_is_judged_where_no_clamp_holds(estimator: str, clamp: dict[str, float]) -> None:
    class Reversed(ReferenceAdapter):
        def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
            return reference.kl(ref_logprobs, logprobs, self.conventions)

    for seed in range(5):
        conventions = GRPO.replace(kl_estimator=estimator, **clamp)
        assert run("kl.expectation_is_the_divergence", ReferenceAdapter(conventions), seed).status == "pass"
        assert run("kl.expectation_is_the_divergence", Reversed(conventions), seed).status == "fail"


@pytest.mark.parametrize("clamp", [20.0, 0.3])
@pytest.mark.parametrize("field", ["kl_input_clamp", "kl_output_clamp"])
def test_a_clamp_of_the_kl_that_is_not_applied_is_a_finding(field: str, clamp: float) -> None:
    class Unclamped(ReferenceAdapter):
        def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
            return reference.kl(logprobs, ref_logprobs, self.conventions.replace(**{field: None}))

    for estimator in ("k1", "k2", "k3", "abs"):
        result = run("kl.declared_estimator", Unclamped(GRPO.replace(kl_estimator=estimator, **{field: clamp})))
        assert result.status == "fail", estimator
        assert f"on both sides of {field}" in result.message, estimator


@pytest.mark.parametrize("clamp", [20.0, 0.3])
@pytest.mark.parametrize("field", ["kl_input_clamp", "kl_output_clamp"])
def test_a_clamp_that_the_loss_does_not_apply_to_its_kl_is_a_finding(field: str, clamp: float) -> None:
    class Unclamped(ReferenceAdapter):
        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            return reference.policy_loss(batch, self.conventions.replace(**{field: None}))

    for estimator in ("k1", "k2", "k3", "abs"):
        conventions = GRPO.replace(kl_coef=0.3, kl_estimator=estimator, **{field: clamp})
        result = run("loss.declared_gradient", Unclamped(conventions))
        assert result.status == "fail", estimator
        assert f"both sides of {field}" in {found.fingerprint.case for found in result.findings}, estimator


class ScoreTermBehindTheClamp(ReferenceAdapter):
    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        estimate = reference.kl(logprobs, ref_logprobs, self.conventions.replace(kl_score_term=False))
        return estimate + estimate.detach() * (logprobs - logprobs.detach())


@pytest.mark.parametrize("clamp", [{"kl_input_clamp": 20.0}, {"kl_output_clamp": 10.0}], ids=str)
def test_a_score_term_that_a_clamp_does_not_stop_is_a_finding(clamp: dict[str, float]) -> None:
    conventions = GRPO.replace(kl_estimator="k1", kl_score_term=True, **clamp)
    result = run("kl.declared_estimator", ScoreTermBehindTheClamp(conventions))
    assert (result.status, "the gradient of the KL is not" in result.message) == ("fail", True)


class KlOfTheWrongSign(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = reference.policy_loss(batch, self.conventions)
        without = reference.policy_loss(batch, self.conventions.replace(kl_coef=0.0)).loss
        return LossOutput(2 * without - output.loss, output.metrics)


class KlWithoutGradient(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        with_kl = reference.policy_loss(batch, self.conventions)
        without = reference.policy_loss(batch, self.conventions.replace(kl_coef=0.0)).loss
        return LossOutput(without + (with_kl.loss - without).detach(), with_kl.metrics)


@pytest.mark.parametrize("mutant", [KlOfTheWrongSign, KlWithoutGradient])
@pytest.mark.parametrize("estimator", ["k2", "k3", "abs"])
def test_a_kl_that_does_not_pull_the_policy_towards_the_reference_is_a_finding(
    mutant: type[ReferenceAdapter], estimator: str
) -> None:
    result = run("kl.pulls_towards_reference", mutant(GRPO.replace(kl_estimator=estimator, kl_coef=0.5)))
    assert result.status == "fail"
    assert "rows of one token" in result.message


def test_the_pull_is_judged_without_the_declared_estimator() -> None:
    """A loss with another estimator than the declared one differs from the declaration and pulls all the same."""

    class OtherEstimator(ReferenceAdapter):
        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            return reference.policy_loss(batch, self.conventions.replace(kl_estimator="k2"))

    result = run("kl.pulls_towards_reference", OtherEstimator(GRPO.replace(kl_coef=0.5)))
    assert result.status == "fail"
    assert "rows of one token" not in result.message


class GradientTwice(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        return LossOutput(2 * output.loss - output.loss.detach(), output.metrics)


class ClippedTokensKeepTheirGradient(ReferenceAdapter):
    """The value of the clipped objective with the gradient of the unclipped one."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        free = reference.policy_loss(batch, self.conventions.replace(clip_low=None, clip_high=None)).loss
        return LossOutput(output.loss.detach() + free - free.detach(), output.metrics)


class RatioDetached(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(replace(batch, logprobs=batch.logprobs.detach()))
        return LossOutput(output.loss + 0 * batch.logprobs.sum(), output.metrics)


@pytest.mark.parametrize("mutant", [GradientTwice, ClippedTokensKeepTheirGradient, RatioDetached])
@pytest.mark.parametrize("clip", [0.2, 0.05, 0.02, 3e-4])
@pytest.mark.parametrize("seed", range(3))
def test_a_gradient_that_is_not_the_slope_is_a_finding(mutant: type[ReferenceAdapter], clip: float, seed: int) -> None:
    result = run("gradient.finite_differences", mutant(GRPO.replace(clip_low=clip, clip_high=clip)), seed)
    assert result.status == "fail"


def test_the_surrogate_beside_a_score_term_is_looked_at() -> None:
    """NeMo RL's defaults: the score-function part has a gradient and no value, the rest is judged without it."""
    conventions = GRPO.replace(kl_coef=0.1, kl_score_term=True)
    assert run("gradient.finite_differences", ReferenceAdapter(conventions)).status == "pass"
    assert run("gradient.finite_differences", GradientTwice(conventions)).status == "fail"
