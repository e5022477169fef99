"""What the checks of losses see: mistakes that leave one half of value, gradient and metrics right."""


import pytest
import torch

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.batch import LossOutput, PolicyBatch
from rlcanary.checks import Result, all_checks, run_check
from rlcanary.contract import Adapter

CHECKS = {check.id: check for check in all_checks()}


def run(check_id: str, adapter: Adapter) -> Result:
    return run_check(CHECKS[check_id], adapter, "reference")


class WhereAroundTheResult(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        ratio_BT = (batch.logprobs - batch.old_logprobs).exp()
        held_BT = ratio_BT.clamp(0.8, 1.2)
        advantages_B1 = batch.advantages.unsqueeze(1)
        loss_BT = -torch.minimum(ratio_BT * advantages_B1, held_BT * advantages_B1)
        loss_BT = torch.where(batch.mask, loss_BT, 0.0)
        return LossOutput((loss_BT.sum(dim=1) / batch.mask.sum(dim=1)).mean())


def test_nan_gradient_at_masked_positions_is_a_finding() -> None:
    result = run("loss.masked_positions", WhereAroundTheResult())
    assert result.status == "fail"
    assert "nan at the masked positions of logprobs changed the gradient" in result.message


class MaskedTermsByMultiplication(ReferenceAdapter):
    """Right on the policy term, by multiplication on one of the others."""

    term = ""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        return LossOutput(output.loss + 0 * (getattr(batch, self.term) * batch.mask).sum(), output.metrics)


@pytest.mark.parametrize("term", ["ref_logprobs", "sampler_logprobs", "entropy"])
def test_garbage_at_masked_positions_of_every_term_is_tried(term: str) -> None:
    adapter = type("Mutant", (MaskedTermsByMultiplication,), {"term": term})()
    result = run("loss.masked_positions", adapter)
    assert result.status == "fail"
    assert f"masked positions of {term} changed the loss" in result.message


class MetricsOverPadding(ReferenceAdapter):
    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        assert batch.entropy is not None
        return LossOutput(output.loss, {"entropy": float(batch.entropy.mean())})


def test_metric_that_reads_masked_positions_is_a_finding() -> None:
    assert "the metric entropy" in run("loss.masked_positions", MetricsOverPadding()).message
