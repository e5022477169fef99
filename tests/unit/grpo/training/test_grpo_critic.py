"""The critic: micro-batches change nothing, and what it is compared with stays as it was before a step's updates."""

import math
from typing import Any

import pytest
import torch

from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import PPO
from rlcanary.grpo.plan.optimizer import OptimizerSettings
from rlcanary.grpo.plan.schedule import Schedule
from rlcanary.grpo.training.critic import new_critic
from rlcanary.grpo.training.trainer import new_state
from rlcanary.grpo.training.updates import take_updates
from rlcanary.reference import make_batch
from rlcanary.tiny_models import PAD_ID, tiny_llama

GROUPS = [
    Group([5, 6], [Completion([7]), Completion([8, 9, 10, 2])], [1.0, 0.0]),
    Group([11, 12, 13], [Completion([14, 15]), Completion([16, 17, 18, 19, 20])], [0.5, 0.25]),
]


def trained(conventions: Conventions, dtype: Any = torch.float32, **options: Any) -> tuple[Any, list[dict[str, float]]]:
    model = tiny_llama().to(dtype)
    state = new_state(model, OptimizerSettings())
    state.critic = new_critic(model, OptimizerSettings(1e-2))
    batch, _ = make_batch(GROUPS, PAD_ID)
    schedule = Schedule(prompts_per_step=2, group_size=2, max_staleness=2, **options)
    return state, take_updates(state, batch, conventions.replace(old_logprobs="trainer"), schedule)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "group_token_mean"])
def test_micro_batches_of_the_critic_add_up(aggregation: str) -> None:
    conventions = PPO.replace(value_aggregation=aggregation)
    (_, whole), (_, pieces) = (trained(conventions, epochs_per_step=3, rows_per_micro_batch=rows) for rows in (4, 1))
    for one, other in zip(whole, pieces, strict=True):
        for name in ("value_loss", "critic_grad_norm", "value_clip_fraction", "explained_variance"):
            assert other[name] == pytest.approx(one[name], rel=1e-3), name
    assert whole[0]["value_loss"] > whole[2]["value_loss"]


def test_returns_and_old_values_are_those_before_the_first_update_of_a_step() -> None:
    _, updates = trained(PPO, epochs_per_step=3)
    assert len({update["explained_variance"] for update in updates}) == 1
    assert len({update["value_loss"] for update in updates}) == 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("ends", [("stop", 1.0), ("length", 0.5)], ids=["equal", "none"])
def test_nothing_is_explained_of_returns_that_are_equal_or_none(ends: tuple[str, float]) -> None:
    reason, reward = ends
    completions = [Completion([7, 8, 9], finish_reason=reason), Completion([10, 2], finish_reason=reason)]
    batch, _ = make_batch([Group([5, 6], completions, [reward, reward])], PAD_ID, mask_truncated=True)
    model = tiny_llama()
    state = new_state(model, OptimizerSettings())
    state.critic = new_critic(model, OptimizerSettings(1e-2))
    torch.nn.init.normal_(state.critic.model.head.weight, generator=torch.Generator().manual_seed(0))
    conventions = PPO.replace(gae_lambda=1.0, old_logprobs="trainer", mask_truncated=True)
    (update,) = take_updates(state, batch, conventions, Schedule(prompts_per_step=1, group_size=2))
    assert math.isnan(update["explained_variance"])


def test_the_critic_of_a_bfloat16_model_has_float32_masters_and_values() -> None:
    state, updates = trained(PPO, torch.bfloat16, epochs_per_step=3)
    assert {each.dtype for each in state.critic.masters.parameters} == {torch.float32}
    assert state.critic.model(input_ids=torch.tensor([[5, 6]])).logits.dtype == torch.float32
    assert updates[0]["value_loss"] > updates[2]["value_loss"]


def test_the_critics_gradient_is_clipped_on_its_own() -> None:
    state, (update,) = trained(PPO.replace(max_grad_norm=1e-3))
    assert update["critic_grad_norm"] > 1e-2
    seen = torch.stack([each.grad.norm() for each in state.critic.masters.parameters if each.grad is not None]).norm()
    assert float(seen) == pytest.approx(1e-3, rel=1e-3)
