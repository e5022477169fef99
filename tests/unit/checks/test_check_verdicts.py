"""How a check ends: a pass is a comparison, and every case has its say."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import Check, all_checks, run_check
from rlcanary.checks.asserts import Finding, assert_close
from rlcanary.checks.check import Result, check
from rlcanary.checks.worlds.training.descent import assert_gradients
from rlcanary.contract.batch import LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.conversations import Episode

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


@pytest.mark.parametrize(("adapter", "status"), [(Wrapped(), "pass"), (WrappedUpsideDown(), "fail")])
@pytest.mark.parametrize(
    "name", ["step.declared_gradient", "step.off_policy_gradient", "step.gradient_norm_is_clipped"]
)
def test_gradients_are_compared_with_those_of_the_states_own_model(name: str, adapter: Wrapped, status: str) -> None:
    assert run(name, adapter).status == status


def check_of(function) -> Check:
    return check("loss.made_up", needs=("policy_loss",))(function)


def test_check_that_called_and_compared_nothing_is_not_compared() -> None:
    def calling(adapter: ReferenceAdapter) -> None:
        adapter.keep_group(torch.tensor([1.0, 0.0]))

    result = run_check(check_of(calling), ReferenceAdapter(), "reference")
    assert (result.status, result.message) == ("not-compared", "the code returned nothing that this check compares")


def test_error_of_a_check_does_not_blame_the_call_that_has_returned() -> None:
    def comparing(adapter: ReferenceAdapter) -> None:
        adapter.keep_group(torch.tensor([1.0, 0.0]))
        raise RuntimeError("no such number")

    result = run_check(check_of(comparing), ReferenceAdapter(), "reference")
    assert result.message.startswith("after keep_group([2]): RuntimeError: no such number (comparing, line ")


def test_gradient_that_is_nan_on_both_sides_is_a_failure() -> None:
    model = torch.nn.Linear(1, 1)
    undefined = {"weight": torch.tensor([[torch.nan]])}
    with pytest.raises(Finding, match="the other gradient is NaN already"):
        assert_gradients(undefined, undefined, model, "another order changed the gradient")


def test_entries_that_do_not_count_are_not_shown() -> None:
    with pytest.raises(Finding, match=r"got:      \[1, -\]\n  expected: \[2, -\]"):
        assert_close(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 4.0]), "off", where=torch.tensor([True, False]))


def test_metric_of_no_tokens_may_be_logged_as_anything() -> None:
    class Zero(ReferenceAdapter):
        def policy_loss(self, batch: PolicyBatch) -> LossOutput:
            output = super().policy_loss(batch)
            return LossOutput(
                output.loss, {name: value if value == value else 0.0 for name, value in output.metrics.items()}
            )

    assert run_check(CHECKS["loss.metrics"], Zero(), "reference", examples=12).status == "pass"


def test_comparison_of_no_entry_is_none() -> None:
    def empty(adapter: ReferenceAdapter) -> None:
        advantages = adapter.advantages(torch.tensor([1.0, 0.0]), torch.tensor([0, 0]))
        assert_close(advantages, torch.zeros(2), "other advantages", where=torch.tensor([False, False]))

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
    also = result.message.splitlines()[-1]
    assert also.startswith("also: [2]: raises ZeroDivisionError; ")
    assert "; [6]: value off by 2; [8]: value off by 2; " in also


class DividesInPlace(ReferenceAdapter):
    """Divides the logits by the temperature in place, as code does on logits of its own forward pass."""

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        return super().token_logprobs(logits.div_(temperature), token_ids, 1.0)


@pytest.mark.parametrize("name", ["logprob.is_log_softmax", "logprob.temperature", "logprob.filtered_logits"])
def test_code_that_works_in_place_on_fresh_logits_is_right(name: str) -> None:
    assert run(name, DividesInPlace()).status == "pass"


def test_code_that_works_in_place_on_the_callers_logits_is_still_found() -> None:
    assert run("logprob.inputs_untouched", DividesInPlace()).status == "fail"


class LossesInPlace(ReferenceAdapter):
    """Works in place on what its losses are given, as code does on the logits and logprobs of its own forward pass."""

    def policy_loss(self, batch):
        return super().policy_loss(replace(batch, logprobs=batch.logprobs.mul_(1.0)))

    def accumulated_loss(self, batch, n_micro):
        return super().accumulated_loss(replace(batch, logprobs=batch.logprobs.mul_(1.0)), n_micro)

    def sharded_loss(self, batch, n_ranks):
        return super().sharded_loss(replace(batch, logprobs=batch.logprobs.mul_(1.0)), n_ranks)

    def value_loss(self, batch):
        return super().value_loss(replace(batch, values=batch.values.mul_(1.0)))

    def supervised_loss(self, batch):
        return super().supervised_loss(replace(batch, logits=batch.logits.mul_(1.0)))

    def distillation_loss(self, batch):
        batch.teacher_logits.div_(batch.temperature).mul_(batch.temperature)
        return super().distillation_loss(replace(batch, logits=batch.logits.mul_(1.0)))

    def preference_loss(self, batch):
        return super().preference_loss(replace(batch, chosen_logprobs=batch.chosen_logprobs.mul_(1.0)))

    def accumulated_other_loss(self, batch, n_micro):
        return super().accumulated_other_loss(in_place(batch), n_micro)

    def sharded_other_loss(self, batch, n_ranks):
        return super().sharded_other_loss(in_place(batch), n_ranks)


def in_place(batch):
    trained = {name: value.mul_(1.0) for name, value in vars(batch).items() if getattr(value, "requires_grad", False)}
    return replace(batch, **trained)


LOSSES = {name for name in vars(LossesInPlace) if name.endswith("_loss")}


@pytest.mark.parametrize("name", [check.id for check in CHECKS.values() if LOSSES & set(check.needs)])
def test_losses_may_work_in_place_on_what_a_model_has_just_computed(name: str) -> None:
    result = run(name, LossesInPlace())
    if name == "loss.inputs_untouched":  # judges the caller's own tensors
        return
    assert result.status == run(name, ReferenceAdapter()).status == "pass", result.message


class RootOfZero(ReferenceAdapter):
    """Adds a zero to the loss, as a root whose derivative is infinite there."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        output = super().policy_loss(batch)
        nothing = (batch.logprobs - batch.logprobs.detach()).masked_fill(~batch.mask, 0)
        return LossOutput(output.loss + self.root(nothing).sum(), output.metrics)

    def root(self, nothing: Tensor) -> Tensor:
        return nothing.sqrt()


class ChosenRootOfZero(RootOfZero):
    """Chooses zero in place of it, which makes the gradient NaN."""

    def root(self, nothing: Tensor) -> Tensor:
        return torch.where(nothing == 0, 0 * nothing, nothing.sqrt())


OF_A_GRADIENT = [name for name in CHECKS if name.startswith("gradient.") and "policy_loss" in CHECKS[name].needs]


@pytest.mark.parametrize("adapter", [RootOfZero(), ChosenRootOfZero()], ids=["infinite", "NaN"])
@pytest.mark.parametrize("name", OF_A_GRADIENT)
def test_a_gradient_that_is_not_finite_is_a_finding_and_no_error(name: str, adapter: ReferenceAdapter) -> None:
    assert run(name, adapter).status == "fail"


class RewardOnly(ReferenceAdapter):
    """The reward itself, divided by the deviation of the batch, as some REINFORCE variants: no one field explains it."""

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return (rewards - rewards.mean()) / (rewards.std() + 1e-6)


class DividesByN(ReferenceAdapter):
    """A standard deviation without Bessel's correction."""

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return ReferenceAdapter(self.conventions.replace(advantage_ddof=0)).advantages(rewards, group_ids)


class SumOverRows(ReferenceAdapter):
    """A sum over rows of the rows' means: another declaration."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        adapter = ReferenceAdapter(self.conventions.replace(aggregation="sequence_sum"))
        return adapter.policy_loss(batch)


class TrainsPadding(ReferenceAdapter):
    """Counts padding as trained tokens, which is a mistake and no declaration."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        return super().policy_loss(replace(batch, mask=torch.ones_like(batch.mask)))


class ValueOfAnother(ReferenceAdapter):
    """The value of another aggregation with the gradient of the declared one."""

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        loss = super().policy_loss(batch).loss
        return LossOutput(loss - loss.detach() + SumOverRows(self.conventions).policy_loss(batch).loss.detach(), {})


HINT = "if you mean that, declare it"


def test_declaration_that_explains_every_case_is_named() -> None:
    for name in ("loss.declared_value", "loss.declared_gradient"):
        assert f"aggregation='sequence_sum' gives this in every case: {HINT}" in run(name, SumOverRows()).message
    divided = run("advantage.declared_formula", DividesByN(Conventions(advantage_ddof=1)))
    assert f"advantage_ddof=0 gives this in every case: {HINT}" in divided.message


@pytest.mark.parametrize(
    ("name", "adapter"),
    [
        ("advantage.declared_formula", RewardOnly()),
        ("loss.declared_value", TrainsPadding()),
        ("loss.declared_gradient", TrainsPadding()),
        ("loss.declared_value", ValueOfAnother()),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_declaration_that_explains_one_case_alone_is_not_named(name: str, adapter: ReferenceAdapter) -> None:
    result = run(name, adapter)
    assert result.status == "fail"
    assert HINT not in result.message


class NoConversation(ReferenceAdapter):
    def converse(self, *_: object) -> list[list[Episode]]:
        raise TypeError("converse() got an unexpected keyword argument")


def test_conversation_that_never_works_is_no_answer_to_a_failing_environment() -> None:
    result = run_check(CHECKS["conversation.failing_environment"], NoConversation(), "unused")
    assert result.status in ("error", "adapter-error")
