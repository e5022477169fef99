"""The KL is taken from the rewards once, as the reference's own step takes it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.conventions import GRPO
from rlcanary.grpo.engines.transformers_policy import TransformersPolicy
from rlcanary.grpo.training.kl_reward import subtract_kl, trainer_conventions
from rlcanary.reference import kl, make_batch, policy_batch
from rlcanary.tiny_models import PAD_ID, tiny_llama, tiny_tokenizer

CONVENTIONS = GRPO.replace(kl_placement="reward", kl_coef=0.1, kl_estimator="k1", temperature=0.6)


@pytest.fixture
def policies() -> tuple[TransformersPolicy, TransformersPolicy]:
    return TransformersPolicy(tiny_llama(), tiny_tokenizer()), TransformersPolicy(tiny_llama(1), tiny_tokenizer())


@pytest.fixture
def groups(policies: Any) -> list[Group]:
    prompts = [[5, 6, 7], [9]]
    sampled = policies[0].generate(prompts, {"n": 3, "temperature": 0.6, "max_new_tokens": 6, "seed": 0})
    return [
        Group(prompt, completions, [1.0, 0.0, 0.25], item_id=index)
        for index, (prompt, completions) in enumerate(zip(prompts, sampled, strict=True))
    ]


def test_each_reward_loses_the_kl_of_its_own_completion(policies: Any, groups: list[Group]) -> None:
    reduced = subtract_kl(groups, policies[1], CONVENTIONS)
    for before, after in zip(groups, reduced, strict=True):
        assert after.completions is before.completions
        for reward, less, completion in zip(before.rewards, after.rewards, before.completions, strict=True):
            ids = torch.tensor([[*before.prompt_ids, *completion.token_ids]])
            with torch.no_grad():
                logits = policies[1].model(ids).logits[0, len(before.prompt_ids) - 1 : -1].double() / 0.6
            referred = logits.log_softmax(-1).gather(1, ids[0, len(before.prompt_ids) :, None])[:, 0]
            estimate = kl(torch.tensor(completion.logprobs).double(), referred, CONVENTIONS).sum()
            assert less == pytest.approx(reward - 0.1 * float(estimate), abs=1e-4)


def test_step_on_the_result_is_the_step_that_takes_the_kl_itself(policies: Any, groups: list[Group]) -> None:
    policy, reference = (each.model for each in policies)
    itself = policy_batch(policy, reference, make_batch(groups, PAD_ID)[0], CONVENTIONS)
    reduced = make_batch(subtract_kl(groups, policies[1], CONVENTIONS), PAD_ID)[0]
    again = policy_batch(policy, None, reduced, trainer_conventions(CONVENTIONS))
    torch.testing.assert_close(again.advantages, itself.advantages, atol=1e-4, rtol=0)
    without = policy_batch(policy, None, make_batch(groups, PAD_ID)[0], trainer_conventions(CONVENTIONS))
    assert float((without.advantages - again.advantages).abs().max()) > 1e-2


def test_policy_that_is_its_own_reference_loses_nothing(policies: Any, groups: list[Group]) -> None:
    for before, after in zip(groups, subtract_kl(groups, policies[0], CONVENTIONS), strict=True):
        assert list(after.rewards) == pytest.approx(list(before.rewards), abs=1e-4)


def test_kl_that_would_be_taken_twice_is_refused(policies: Any, groups: list[Group]) -> None:
    with pytest.raises(ValueError, match="would count twice"):
        subtract_kl(groups, policies[1], CONVENTIONS.replace(kl_placement="loss"))
    scored = [replace(groups[0], ref_logprobs=[[-1.0] * len(each.token_ids) for each in groups[0].completions])]
    with pytest.raises(ValueError, match="the step takes the KL from rewards itself"):
        subtract_kl(scored, policies[1], CONVENTIONS)


@pytest.mark.parametrize("logprobs", [None, [-1.0], [-1.0, math.nan]])
def test_completion_without_the_samplers_logprobs_is_refused(policies: Any, logprobs: Any) -> None:
    group = Group([5], [Completion([8, 9], logprobs)], [1.0], item_id="a")
    with pytest.raises(ValueError, match=r"sampler's logprob of each token|not scored"):
        subtract_kl([group], policies[1], CONVENTIONS)
