"""How a check ends: a pass is a comparison, and every case has its say."""

import pytest
import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.batch import LossOutput, PolicyBatch
from rlcanary.checks import Check, all_checks, run_check
from rlcanary.checks.registry import Result, check
from rlcanary.checks.subject import Subject
from rlcanary.conventions import Conventions

CHECKS = {item.id: item for item in all_checks()}


def run(name: str, adapter: ReferenceAdapter) -> Result:
    return run_check(CHECKS[name], adapter, "reference")


class Silent(ReferenceAdapter):
    """Logs nothing and gives no logprobs."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return LossOutput(super().policy_loss(batch).loss, {})

    def sharded_loss(self, batch: PolicyBatch, n_ranks: int) -> LossOutput:
        return LossOutput(super().sharded_loss(batch, n_ranks).loss, {})

    def train_step(self, state, batch):
        super().train_step(state, batch)
        return {}

    def evaluate(self, state):
        return {}


@pytest.mark.parametrize(
    "name",
    [
        "loss.metrics",
        "split.metrics_over_ranks",
        "split.extremes_are_ordered",
        "metrics.on_policy_identities",
        "metrics.recomputed",
        "evaluation.repeatable",
        "evaluation.reward",
    ],
)
def test_check_that_found_nothing_to_compare_says_so(name: str) -> None:
    result = run(name, Silent())
    assert result.status == "not-compared"
    assert result.message


class Wrapped(ReferenceAdapter):
    """A correct trainer of adapters on a frozen model, as LoRA: no parameter has the name that the model has."""

    factor = 1.0

    def new_state(self, model, ref_model, learning_rate):
        class Policy(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.base_model = model.requires_grad_(False)
                self.lora_B = torch.nn.Parameter(torch.zeros(model.config.vocab_size))

            def forward(self, **inputs):
                output = self.base_model(**inputs)
                output.logits = output.logits + self.lora_B
                return output

        state = super().new_state(Policy(), ref_model, learning_rate)
        if self.factor != 1:
            state.model.lora_B.register_hook(lambda gradient: gradient * self.factor)
        return state


class WrappedUpsideDown(Wrapped):
    factor = -3.0


@pytest.mark.parametrize("adapter", [Wrapped(), WrappedUpsideDown()], ids=["correct", "gradients times -3"])
@pytest.mark.parametrize(
    "name", ["step.declared_gradient", "step.off_policy_gradient", "step.gradient_norm_is_clipped"]
)
def test_gradients_of_parameters_that_the_model_does_not_have_are_not_passed(name: str, adapter: Wrapped) -> None:
    assert run(name, adapter).status != "pass"


def check_of(function) -> Check:
    return check("loss.made_up", needs=("policy_loss",))(function)


def test_check_that_called_and_compared_nothing_is_not_compared() -> None:
    calling = check_of(lambda subject, rng: subject.call("keep_group", torch.tensor([1.0, 0.0])))
    result = run_check(calling, ReferenceAdapter(), "reference")
    assert (result.status, result.message) == ("not-compared", "what the calls returned leaves nothing to compare")


def test_comparison_of_no_entry_is_none() -> None:
    def empty(subject: Subject, rng: torch.Generator) -> None:
        call = subject.call("advantages", torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
        call.expect(torch.zeros(2), "other advantages", where=torch.tensor([False, False]))

    assert run_check(check_of(empty), ReferenceAdapter(), "reference").status == "not-compared"


class RaisesOnTwo(ReferenceAdapter):
    """An error in the smallest case, the wrong sign in all others."""

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        if len(rewards) == 2:
            raise ZeroDivisionError("two")
        return -super().advantages(rewards, group_ids)


def test_error_in_the_smallest_case_hides_no_failure_in_a_larger_one() -> None:
    result = run("advantage.declared_formula", RaisesOnTwo(Conventions()))
    assert result.status == "fail"
    assert "also raised: [2] (ZeroDivisionError)" in result.message
    assert "also fails: [6]; [8]" in result.message
