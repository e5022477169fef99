"""Code of correct ways of its own, as public trainers have them, is accused of nothing."""

from dataclasses import fields, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.worlds import inputs
from rlcanary.contract.adapter import TrainState
from rlcanary.contract.batch import CollatedBatch, LossOutput, PolicyBatch


class InFloat64(ReferenceAdapter):
    """Numpy and lists of floats compute in float64, whatever the inputs are, and give that back."""

    def advantages(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        return super().advantages(rewards.double(), group_ids)

    def token_logprobs(self, logits: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
        return super().token_logprobs(logits.double(), token_ids, temperature)

    def entropy(self, logits: Tensor) -> Tensor:
        return super().entropy(logits.double())

    def kl(self, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        return super().kl(logprobs.double(), ref_logprobs.double())

    def policy_loss(self, batch: PolicyBatch) -> LossOutput:
        values = {field.name: getattr(batch, field.name) for field in fields(batch)}
        wide = {
            name: each.double()
            for name, each in values.items()
            if isinstance(each, Tensor) and each.is_floating_point()
        }
        return super().policy_loss(replace(batch, **wide))


class Ascends(ReferenceAdapter):
    """An objective that is maximised in place of a loss that is minimised, and groups that are padded by the trainer."""

    def new_state(self, model: Any, ref_model: Any, learning_rate: float) -> Any:
        optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, maximize=True, weight_decay=0.0)
        return TrainState(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0), ref_model)

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        own = self.make_batch(batch.groups(), 0)
        was_training = state.model.training
        state.model.eval()
        policy = reference.policy_batch(state.model, state.ref_model, own, self.conventions)
        state.model.train(was_training)
        state.optimizer.zero_grad()
        (-super().policy_loss(policy).loss).backward()
        if self.conventions.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_(state.model.parameters(), self.conventions.max_grad_norm)
        state.optimizer.step()
        state.scheduler.step()
        return {}


def red(adapter: ReferenceAdapter, areas: tuple[str, ...]) -> dict[str, str]:
    checks = [check for check in all_checks() if check.area in areas]
    results = [run_check(check, adapter, "unused") for check in checks]
    assert sum(result.status == "pass" for result in results) >= len(results) / 2
    return {result.id: result.message for result in results if result.status in ("fail", "error")}


def test_results_in_float64_of_inputs_in_float32_are_green() -> None:
    assert red(InFloat64(), ("advantage", "logprob", "entropy", "kl", "loss", "gradient", "config")) == {}


def test_trainer_that_maximises_and_pads_for_itself_is_green() -> None:
    assert red(Ascends(), ("step",)) == {}


def test_batch_gives_back_the_groups_it_was_made_of() -> None:
    from rlcanary.checks.worlds.training.tiny_trainer import GROUPS, TOOLS

    for groups in (GROUPS, TOOLS):
        batch = reference.make_batch(list(groups), 0)[0]
        again = reference.make_batch(batch.groups(), 0)[0]
        for field in fields(batch):
            before, after = getattr(batch, field.name), getattr(again, field.name)
            assert torch.equal(before, after) if isinstance(before, Tensor) else before == after, field.name


def test_tokens_of_the_batches_of_losses_have_probabilities() -> None:
    for seed, shape in product(range(5), (*inputs.SHAPES, *inputs.LARGE)):
        batch = inputs.policy_batch(torch.Generator().manual_seed(seed), *shape)
        for name in ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs"):
            assert float(getattr(batch, name).max()) < 0, name
