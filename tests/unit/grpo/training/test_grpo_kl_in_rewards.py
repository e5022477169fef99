"""The KL is taken from the rewards once, as the reference's own step takes it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlcanary.contract.batch import Completion, Group, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO
from rlcanary.grpo.engines.transformers_policy import TransformersPolicy
from rlcanary.grpo.plan.optimizer import OptimizerSettings
from rlcanary.grpo.plan.schedule import Schedule
from rlcanary.grpo.training.trainer import new_state, policy_data
from rlcanary.reference import kl, make_batch, policy_batch
from rlcanary.tiny_models import PAD_ID, tiny_llama, tiny_tokenizer

CONVENTIONS = GRPO.replace(kl_placement="reward", kl_coef=0.1, kl_estimator="k1", temperature=0.6)
# The advantage of a row is its reward.
AS_IT_IS = CONVENTIONS.replace(advantage_baseline="none", advantage_scale="none")
REWARDS = [1.0, 0.0, 0.25]


@pytest.fixture
def models() -> tuple[Any, Any]:
    return tiny_llama(), tiny_llama(1)


@pytest.fixture
def groups(models: Any) -> list[Group]:
    prompts = [[5, 6, 7], [9]]
    policy = TransformersPolicy(models[0], tiny_tokenizer())
    sampled = policy.generate(prompts, {"n": 3, "temperature": 0.6, "max_new_tokens": 6, "seed": 0})
    return [
        Group(prompt, completions, REWARDS, item_id=index)
        for index, (prompt, completions) in enumerate(zip(prompts, sampled, strict=True))
    ]


def data(models: Any, groups: list[Group], conventions: Conventions) -> PolicyBatch:
    state = new_state(models[0], OptimizerSettings(), models[1])
    schedule = Schedule(prompts_per_step=len(groups), group_size=len(groups[0].rewards), rows_per_micro_batch=1)
    return policy_data(state, make_batch(groups, PAD_ID)[0], conventions, schedule)


def test_each_reward_loses_the_kl_of_its_own_completion(models: Any, groups: list[Group]) -> None:
    rows = [
        (group, completion, reward)
        for group in groups
        for completion, reward in zip(group.completions, REWARDS, strict=True)
    ]
    for (group, completion, reward), less in zip(rows, data(models, groups, AS_IT_IS).advantages, strict=True):
        ids = torch.tensor([[*group.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logits = models[1](ids).logits[0, len(group.prompt_ids) - 1 : -1].double() / 0.6
        referred = logits.log_softmax(-1).gather(1, ids[0, len(group.prompt_ids) :, None])[:, 0]
        estimate = kl(torch.tensor(completion.logprobs).double(), referred, CONVENTIONS).sum()
        assert float(less) == pytest.approx(reward - 0.1 * float(estimate), abs=1e-4)


def test_update_takes_the_kl_as_the_step_of_the_reference_does(models: Any, groups: list[Group]) -> None:
    itself = policy_batch(*models, make_batch(groups, PAD_ID)[0], CONVENTIONS)
    got = data(models, groups, CONVENTIONS)
    torch.testing.assert_close(got.advantages, itself.advantages, atol=1e-4, rtol=0)
    without = data(models, groups, CONVENTIONS.replace(kl_coef=0.0))
    assert float((without.advantages - got.advantages).abs().max()) > 1e-2


def test_policy_that_is_its_own_reference_loses_nothing(models: Any, groups: list[Group]) -> None:
    got = data((models[0], models[0]), groups, AS_IT_IS).advantages
    torch.testing.assert_close(got, torch.tensor(REWARDS * 2).to(got), atol=1e-4, rtol=0)


def test_kl_is_not_taken_twice(models: Any, groups: list[Group]) -> None:
    """Neither where it is a term of the loss, nor where the groups bring reference logprobs beside a reference model."""
    in_loss = data(models, groups, AS_IT_IS.replace(kl_placement="loss")).advantages
    assert torch.equal(in_loss, torch.tensor(REWARDS * 2).to(in_loss))
    scored = [replace(group, ref_logprobs=[each.logprobs for each in group.completions]) for group in groups]
    got = data(models, scored, AS_IT_IS).advantages
    torch.testing.assert_close(got, torch.tensor(REWARDS * 2).to(got))


@pytest.mark.parametrize("logprobs", [None, [-1.0], [-1.0, math.nan]])
def test_completion_without_the_samplers_logprobs_is_refused(models: Any, logprobs: Any) -> None:
    group = Group([5], [Completion([8, 9], logprobs)], [1.0], item_id="a")
    with pytest.raises(ValueError, match=r"no sampler logprobs|2 tokens with 1 sampler logprobs|not scored"):
        data(models, [group], CONVENTIONS)
