"""KL estimates: values, gradients, clamps, and the KL in the reward. Expectations are in test_reference_enumeration.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcanary.contract.presets import GRPO
from rlcanary.reference import kl, rewards_with_kl

few = settings(max_examples=25, derandomize=True, deadline=None)
LOG_RATIO = torch.linspace(-3, 3, 13, dtype=torch.float64).reshape(1, -1)
BY_HAND = {
    "k1": lambda x: x,
    "k2": lambda x: x * x / 2,
    "k3": lambda x: math.exp(-x) - 1 + x,
    "abs": abs,
}


def estimates(log_ratio, **options):
    return kl(log_ratio - 1.0, torch.full_like(log_ratio, -1.0), GRPO.replace(**options))


@pytest.mark.parametrize("estimator", BY_HAND)
def test_estimates_by_hand(estimator):
    expected = [BY_HAND[estimator](value) for value in LOG_RATIO[0].tolist()]
    assert estimates(LOG_RATIO, kl_estimator=estimator)[0].tolist() == pytest.approx(expected)
    mirrored = estimates(LOG_RATIO, kl_estimator=estimator, kl_direction="reference_to_policy")
    assert mirrored[0].tolist() == pytest.approx([BY_HAND[estimator](-value) for value in LOG_RATIO[0].tolist()])


@pytest.mark.parametrize("estimator", BY_HAND)
@pytest.mark.parametrize("direction", ["policy_to_reference", "reference_to_policy"])
def test_gradient_is_the_slope_of_the_estimate(estimator, direction):
    logprobs = (LOG_RATIO[:, LOG_RATIO[0] != 0] - 1.0).requires_grad_()
    conventions = GRPO.replace(kl_estimator=estimator, kl_direction=direction, kl_output_clamp=10.0)
    assert torch.autograd.gradcheck(lambda p: kl(p, torch.full_like(p, -1.0).detach(), conventions), logprobs)


def test_k3_keeps_its_digits_near_the_reference():
    """exp(x) - 1 - x in float32 is all rounding below 1e-4, where k3 is x²/2."""
    tiny = torch.tensor([[1e-4]])
    got = kl(-1.0 + tiny - 1.0, torch.tensor([[-2.0]]), GRPO)
    exact = (-1.0 + tiny - 1.0 + 2.0).double()
    assert got.item() == pytest.approx((exact**2 / 2).item(), rel=0.05)


def test_input_clamp_bounds_the_ratio_and_output_clamp_the_estimate():
    clamped = estimates(LOG_RATIO, kl_input_clamp=1.0)
    assert clamped.max().item() == pytest.approx(math.e - 2)
    assert estimates(LOG_RATIO, kl_output_clamp=0.5).max().item() == 0.5
    assert estimates(LOG_RATIO, kl_estimator="k1", kl_output_clamp=0.5).min().item() == -0.5


def test_a_clamped_estimate_has_no_gradient_with_its_score_term_either():
    """As NeMo RL, which clamps the estimate times its weight and detaches the weight where the log-ratio is clamped."""
    logprobs = torch.tensor([[-1.0]], requires_grad=True)
    scored = kl(
        logprobs, torch.tensor([[-4.0]]), GRPO.replace(kl_estimator="k1", kl_score_term=True, kl_output_clamp=2)
    )
    assert scored.item() == 2.0
    assert torch.autograd.grad(scored, logprobs)[0].item() == 0.0


def test_logprobs_of_other_tokens_are_an_error():
    with pytest.raises(ValueError, match="the same tokens"):
        kl(torch.zeros(2, 3), torch.zeros(2, 1), GRPO)


@few
@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_k3_is_never_negative_and_zero_only_at_the_reference(log_ratios):
    got = estimates(torch.tensor([log_ratios], dtype=torch.float64))
    assert (got >= 0).all()
    assert (estimates(torch.zeros(1, 3)) == 0).all()


MASK = torch.tensor([[True, True, False], [True, False, False]])
LOGPROBS = torch.tensor([[-1.0, -2.0, math.nan], [-0.5, math.inf, -1.0]])
REFERENCE = torch.tensor([[-1.5, -1.0, -1.0], [-0.25, math.nan, math.nan]])
IN_REWARD = GRPO.replace(kl_placement="reward", kl_coef=0.5, kl_estimator="k1")


def test_kl_in_the_reward_is_summed_over_the_row():
    got = rewards_with_kl(torch.tensor([1.0, 0.0]), LOGPROBS, REFERENCE, MASK, IN_REWARD)
    assert got.tolist() == pytest.approx([1.0 - 0.5 * (0.5 - 1.0), 0.0 - 0.5 * -0.25])


def test_kl_in_the_reward_of_each_token():
    rewards = torch.tensor([[0.0, 1.0, 7.0], [2.0, 0.0, 0.0]])
    got = rewards_with_kl(rewards, LOGPROBS, REFERENCE, MASK, IN_REWARD)
    assert got.flatten().tolist() == pytest.approx([-0.25, 1.5, 7.0, 2.125, 0.0, 0.0])


@pytest.mark.parametrize("changes", [{"kl_placement": "loss"}, {"kl_coef": 0.0}])
def test_rewards_stay_where_the_kl_is_in_the_loss_or_off(changes):
    rewards = torch.tensor([1.0, 0.0])
    assert torch.equal(rewards_with_kl(rewards, LOGPROBS, REFERENCE, MASK, IN_REWARD.replace(**changes)), rewards)


def test_rewards_with_kl_carry_no_gradient():
    logprobs = LOGPROBS.clone().requires_grad_()
    assert not rewards_with_kl(torch.ones(2), logprobs, REFERENCE, MASK, IN_REWARD).requires_grad


def test_whole_number_rewards_are_not_rounded_back():
    got = rewards_with_kl(torch.tensor([1, 0]), LOGPROBS, REFERENCE, MASK, IN_REWARD)
    assert got.tolist() == [1.25, 0.125]


def test_a_token_that_the_reference_did_not_score_is_an_error():
    with pytest.raises(ValueError, match="ref_logprobs is NaN"):
        rewards_with_kl(torch.ones(2), torch.zeros(2, 3), REFERENCE, torch.ones(2, 3, dtype=torch.bool), IN_REWARD)


@pytest.mark.parametrize("shape", [(3,), (2, 1), (1,), ()])
def test_rewards_are_per_row_or_per_token(shape):
    with pytest.raises(ValueError, match="neither per row nor per token"):
        rewards_with_kl(torch.ones(shape), LOGPROBS, REFERENCE, MASK, IN_REWARD)
