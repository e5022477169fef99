"""One update in pieces: whatever the pieces, the weights move as the reference moves them; clipping clips in any dtype."""

import copy
from typing import Any

import pytest
import torch

from rlcanary.contract.adapter import TrainState
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO, PAPERS, PRESETS
from rlcanary.grpo.plan.optimizer import OptimizerSettings
from rlcanary.grpo.plan.schedule import Schedule
from rlcanary.grpo.training.critic import new_critic
from rlcanary.grpo.training.trainer import (
    accumulate_gradients,
    descend,
    new_state,
    policy_data,
    refresh_reference,
    score,
    trimmed,
)
from rlcanary.grpo.training.updates import NotOnPolicy, take_updates
from rlcanary.reference import completion_logprobs, make_batch, train_step
from rlcanary.tiny_models import PAD_ID, tiny_llama

LENGTHS = ((1, 7, 3, 5), (2, 2, 6, 4))


def groups(seed: int = 0) -> list[Group]:
    """Two groups of four completions of different lengths, their sampler logprobs near those of an untrained model."""
    source = torch.Generator().manual_seed(seed)
    made = []
    for prompt, lengths in zip(([11, 12], [13, 14, 15, 16]), LENGTHS, strict=True):
        completions = [
            Completion(torch.randint(3, 64, (length,), generator=source).tolist(), [-4.0] * length)
            for length in lengths
        ]
        made.append(Group(prompt, completions, [1.0, 0.0, 0.5, 0.0]))
    return made


def batch(**options: Any) -> Any:
    return make_batch(groups(), PAD_ID, **options)[0]


def schedule(micro: int, **options: Any) -> Schedule:
    return Schedule(prompts_per_step=2, group_size=4, rows_per_micro_batch=micro, **options)


def update(state: Any, conventions: Conventions, micro: int, **options: Any) -> dict[str, float]:
    numbers, given = schedule(micro, **options), batch()
    output = accumulate_gradients(state, given, policy_data(state, given, conventions, numbers), conventions, numbers)
    return {**output.metrics, **descend(state, conventions)}


def reference_state(model: Any) -> TrainState:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    return TrainState(model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0))


@pytest.mark.parametrize("old_logprobs", ["sampler", "trainer"])
@pytest.mark.parametrize("micro", [8, 2, 1])
@pytest.mark.parametrize("name", PAPERS)
def test_micro_batches_by_length_move_the_weights_as_the_reference_does(
    name: str, micro: int, old_logprobs: str
) -> None:
    conventions = PAPERS[name].replace(old_logprobs=old_logprobs, max_grad_norm=0.5, aggregation_constant=8.0)
    expected = reference_state(tiny_llama())
    metrics = train_step(expected, batch(), conventions)
    state = new_state(tiny_llama(), OptimizerSettings(1e-3))
    got = update(state, conventions, micro)
    for key in got:
        assert got[key] == pytest.approx(metrics[key], rel=1e-4, abs=1e-6), key
    for one, other in zip(state.model.parameters(), expected.model.parameters(), strict=True):
        # Adam divides by the gradient's own size: where that is rounding noise, so is the step.
        assert (one - other).abs().quantile(0.99) < 1e-5


def test_a_kl_in_the_reward_is_that_of_the_whole_update() -> None:
    conventions = GRPO.replace(kl_coef=0.1, kl_placement="reward", old_logprobs="trainer")
    model, reference = tiny_llama(), tiny_llama(seed=1)
    expected = reference_state(copy.deepcopy(model))
    expected.ref_model = reference
    metrics = train_step(expected, batch(), conventions)
    state = new_state(model, OptimizerSettings(1e-3), reference)
    got = update(state, conventions, 2)
    assert got["kl"] == pytest.approx(metrics["kl"], rel=1e-5)
    assert got["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)


def test_the_reference_model_is_the_policy_of_its_refresh() -> None:
    state = new_state(tiny_llama(), OptimizerSettings(1e-2))
    refresh_reference(state)
    conventions = GRPO.replace(kl_coef=0.1)
    assert update(state, conventions, 4)["kl"] == 0
    assert update(state, conventions, 4)["kl"] > 0
    refresh_reference(state)
    assert update(state, conventions, 4)["kl"] == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_holds_the_norm_of_what_the_optimizer_sees(dtype: torch.dtype) -> None:
    state = new_state(tiny_llama().to(dtype), OptimizerSettings(1e-3))
    limit = 1e-3
    conventions = GRPO.replace(max_grad_norm=limit, old_logprobs="trainer")
    assert update(state, conventions, 2)["grad_norm"] > 10 * limit
    seen = torch.stack([parameter.grad.double().norm() for parameter in state.masters.parameters]).norm()
    assert float(seen) == pytest.approx(limit, rel=1e-4)


def test_steps_too_small_for_bfloat16_add_up_in_the_masters() -> None:
    """One step of 1e-5 is lost in the rounding of a weight near 1; a thousand of them are not."""
    model = tiny_llama().to(torch.bfloat16)
    state = new_state(model, OptimizerSettings(1e-5))
    norm = model.model.norm.weight
    before = norm.detach().clone()
    master = state.masters.parameters[[id(p) for p in model.parameters()].index(id(norm))]
    for step in range(1000):
        for parameter in state.masters.parameters:
            parameter.grad = torch.ones_like(parameter)
        descend(state, GRPO)
        if step == 0:
            assert torch.equal(norm, before)
    assert master.mean().item() == pytest.approx(0.99, abs=1e-3)
    assert norm.float().mean().item() == pytest.approx(0.99, abs=4e-3)


def test_gradients_of_bfloat16_micro_batches_add_up_in_float32() -> None:
    state = new_state(tiny_llama().to(torch.bfloat16), OptimizerSettings())
    parameter = next(state.model.parameters())
    master = state.masters.parameters[0]
    for value in [1.0] + [1e-3] * 100:
        parameter.grad = torch.full_like(parameter, value)
        state.masters.collect_gradients()
    assert master.grad.flatten()[0].item() == pytest.approx(1.1, rel=1e-3)
    assert parameter.grad is None


def test_a_gradient_that_is_not_finite_leaves_the_weights_alone() -> None:
    state = new_state(tiny_llama(), OptimizerSettings())
    before = copy.deepcopy(state.model.state_dict())
    for parameter in state.masters.parameters:
        parameter.grad = torch.full_like(parameter, torch.nan)
    with pytest.raises(FloatingPointError, match="nan"):
        descend(state, GRPO)
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    assert state.updates == 0


def test_the_learning_rate_warms_up() -> None:
    state = new_state(tiny_llama(), OptimizerSettings(1e-3, warmup_updates=3))
    conventions = GRPO.replace(old_logprobs="trainer")
    rates = [update(state, conventions, 8)["lr"] for _ in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_a_micro_batch_is_as_wide_as_the_bucket_of_its_own_longest_row() -> None:
    whole = batch()
    short = torch.tensor([0, 4, 5])
    assert trimmed(whole, short, schedule(2)).input_ids.shape == (3, 6)
    bucketed = trimmed(whole, short, schedule(2, seq_len_buckets=(8, 16), completion_len_buckets=(4, 8)))
    assert (bucketed.input_ids.shape, bucketed.completion_ids.shape) == ((3, 8), (3, 4))


def test_scores_in_micro_batches_are_those_of_the_whole() -> None:
    model, given = tiny_llama(), batch()
    got = score(model, given, GRPO, schedule(3 - 1))
    torch.testing.assert_close(got, completion_logprobs(model, given), equal_nan=True)


def test_no_update_is_taken_where_sampler_and_trainer_disagree_about_the_same_weights() -> None:
    state, given, numbers = new_state(tiny_llama(), OptimizerSettings()), batch(), schedule(4)
    with torch.no_grad():
        own_BT = completion_logprobs(state.model, given, temperature=1.0)
    before = copy.deepcopy(state.model.state_dict())
    given.old_logprobs = own_BT - 0.5
    with pytest.raises(NotOnPolicy, match=r"is 1\.65 in the mean"):
        take_updates(state, given, GRPO, numbers, is_on_policy=True)
    assert all(torch.equal(value, before[name]) for name, value in state.model.state_dict().items())
    given.old_logprobs = own_BT
    (metrics,) = take_updates(state, given, GRPO, numbers, is_on_policy=True)
    assert metrics["ratio_mean"] == pytest.approx(1)


def test_no_update_is_taken_on_samples_of_another_policy_whose_mean_ratio_is_one() -> None:
    state, given = new_state(tiny_llama(), OptimizerSettings()), batch()
    with torch.no_grad():
        own_BT = completion_logprobs(state.model, given, temperature=1.0)
    ratios_N = torch.tensor([1.9, 0.1]).repeat(own_BT.numel())[: int(given.completion_mask.sum())]
    given.old_logprobs = own_BT.masked_scatter(
        given.completion_mask.bool(), own_BT[given.completion_mask.bool()] - ratios_N.log()
    )
    with pytest.raises(NotOnPolicy, match="KL divergence"):
        take_updates(state, given, GRPO, schedule(4), is_on_policy=True)


@pytest.mark.parametrize("seed", range(8))
def test_logprobs_rounded_as_in_half_precision_stop_no_run(seed: int) -> None:
    state, given = new_state(tiny_llama(), OptimizerSettings()), batch()
    with torch.no_grad():
        own_BT = completion_logprobs(state.model, given, temperature=1.0)
    given.old_logprobs = own_BT + 0.1 * torch.randn(own_BT.shape, generator=torch.Generator().manual_seed(seed))
    assert take_updates(state, given, GRPO, schedule(4), is_on_policy=True)


OPTIONS = {
    "KL in the rewards": GRPO.replace(kl_coef=0.1, kl_placement="reward"),
    "an entropy bonus": GRPO.replace(entropy_coef=0.01),
    "weights of importance": GRPO.replace(old_logprobs="trainer", importance_level="token"),
}


@pytest.mark.parametrize("name", [*PRESETS, *OPTIONS])
def test_no_tensor_of_an_update_is_made_on_the_default_device(name: str) -> None:
    conventions = {**PRESETS, **OPTIONS}[name]

    def updated(default: str) -> list[dict[str, float]]:
        state = new_state(tiny_llama(), OptimizerSettings())
        state.critic = new_critic(state.model, OptimizerSettings()) if conventions.token_credit == "gae" else None
        if conventions.kl_coef:
            refresh_reference(state)
        given = batch()
        # What is made without a device has no values there, and nothing else can be computed with it.
        with torch.device(default):
            return take_updates(state, given, conventions, schedule(2, epochs_per_step=2, max_staleness=1))

    assert updated("meta") == updated("cpu")
