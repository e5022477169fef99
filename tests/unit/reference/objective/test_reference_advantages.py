"""Advantages: measured values, exact zeros, groups of one, NaN rewards. Formulas: test_reference_data_derived_twice.py."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import DR_GRPO, GRPO, PRESETS, RLOO
from rlcanary.reference import advantages, token_level_advantages

few = settings(max_examples=25, derandomize=True, deadline=None)
PASS_THROUGH = Conventions(advantage_baseline="none", advantage_scale="none")


def one_group(rewards, conventions):
    return advantages(
        torch.tensor(rewards, dtype=torch.float64), torch.zeros(len(rewards), dtype=torch.long), conventions
    )


def test_measured_values_of_one_success_in_four():
    rewards = [1.0, 0.0, 0.0, 0.0]
    measured = {
        "rlvr-experiments": [1.7320, -0.5773],
        "trl": [1.4997, -0.4999],
        "verl": [1.5, -0.5],
        "nemo-rl": [1.0, -0.57735],
        "prime-rl": [0.75, -0.25],
    }
    for name, (winner, loser) in measured.items():
        assert one_group(rewards, PRESETS[name]).tolist() == pytest.approx([winner, *[loser] * 3], abs=2e-4), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_constant_reward_group_gets_zero_advantage(dtype, baseline, scale):
    for eps_mode in ("add", "clamp", "skip"):
        conventions = Conventions(
            advantage_baseline=baseline, advantage_scale=scale, advantage_eps_mode=eps_mode, advantage_eps=1e-9
        )
        for size in (2, 3, 7, 16, 63, 64):
            for reward in (0.05, 0.1, 0.3, 0.9, 0.95, 1.0, 95.0, -0.7):
                given_rewards = torch.full((size,), reward, dtype=dtype)
                got = advantages(given_rewards, torch.zeros(size, dtype=torch.long), conventions)
                assert not got.any(), (size, reward, eps_mode)


@pytest.mark.parametrize("reward", [0.05, 0.35, 0.9])
@pytest.mark.parametrize("size", [3, 13, 14, 30])
def test_the_deviation_of_equal_rewards_is_zero_where_that_decides(reward, size):
    """With "skip", a deviation of rounding alone would divide by epsilon what is to be left as it is."""
    conventions = GRPO.replace(advantage_eps_mode="skip")
    equal = one_group([reward] * size, conventions.replace(advantage_baseline="none"))
    assert equal.tolist() == [reward] * size
    winner, *_ = one_group([1.0, *[reward] * size], conventions.replace(advantage_baseline="leave_one_out"))
    assert winner.item() == 1.0 - reward


def test_leave_one_out_divides_by_the_deviation_of_the_others_or_of_the_group():
    conventions = GRPO.replace(advantage_baseline="leave_one_out", advantage_eps=0.0)
    # The others of the first are 1, 1 and 4, with variance 3; the whole group has mean 1.5 and variance 3.
    first, *_ = one_group([0.0, 1.0, 1.0, 4.0], conventions)
    assert first.item() == pytest.approx(-2 / math.sqrt(3))
    _, second, *_ = one_group([0.0, 1.0, 1.0, 4.0], conventions)
    assert second.item() == pytest.approx((1 - 5 / 3) / math.sqrt(13 / 3))
    whole = one_group([0.0, 1.0, 1.0, 4.0], conventions.replace(advantage_std_of_others=False))
    assert whole.tolist() == pytest.approx([value / math.sqrt(3) for value in (-2, -2 / 3, -2 / 3, 10 / 3)])


def test_equal_rewards_without_epsilon_are_zero_and_not_nan():
    assert one_group([0.3, 0.3], GRPO.replace(advantage_eps=0.0)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("policy", "expected"), [("zero", 0.0), ("reward", 0.7), ("nan", math.nan)])
@pytest.mark.parametrize(
    "relative",
    [{}, {"advantage_baseline": "leave_one_out"}, {"advantage_scale": "none"}, {"advantage_baseline": "none"}],
)
def test_a_group_of_one_is_what_its_policy_says(policy, expected, relative):
    conventions = GRPO.replace(singleton_group=policy, **relative)
    got = advantages(torch.tensor([0.7, 1.0, 0.0], dtype=torch.float64), torch.tensor([5, 2, 2]), conventions).tolist()
    assert got[0] == pytest.approx(expected, nan_ok=True)
    assert all(math.isfinite(value) for value in got[1:])


def test_rewards_pass_through_without_baseline_and_scale():
    rewards = torch.tensor([0.7, -1.0, 3.0])
    assert torch.equal(advantages(rewards, torch.tensor([0, 1, 1]), PASS_THROUGH), rewards)


def test_dr_grpo_only_centres():
    assert one_group([1.0, 0.0, 0.0, 0.0], DR_GRPO).tolist() == [0.75, -0.25, -0.25, -0.25]


def test_rloo_compares_with_the_others():
    assert one_group([1.0, 0.0, 0.5], RLOO).tolist() == [0.75, -0.75, 0.0]


def test_a_nan_reward_is_an_error_that_names_its_row():
    with pytest.raises(ValueError, match="row 2 is NaN"):
        one_group([1.0, 0.0, math.nan], GRPO)


def test_a_nan_reward_can_be_left_out_and_gets_zero():
    conventions = GRPO.replace(nan_reward="exclude")
    got = one_group([1.0, 0.0, math.nan, 0.5], conventions)
    expected = one_group([1.0, 0.0, 0.5], conventions)
    assert got.tolist() == [expected[0], expected[1], 0.0, expected[2]]


def test_a_nan_reward_is_left_out_of_the_deviation_of_the_batch():
    conventions = GRPO.replace(nan_reward="exclude", advantage_scale="batch")
    got = one_group([1.0, 0.0, math.nan, 0.5], conventions)
    expected = one_group([1.0, 0.0, 0.5], conventions)
    assert got.tolist() == [expected[0], expected[1], 0.0, expected[2]]


def test_a_group_of_nan_rewards_gets_zero():
    assert one_group([math.nan, math.nan], GRPO.replace(nan_reward="exclude")).tolist() == [0.0, 0.0]


def test_an_infinite_reward_is_an_error():
    with pytest.raises(ValueError, match="row 1 is infinite"):
        one_group([1.0, -math.inf], GRPO)


@pytest.mark.parametrize("shapes", [((3,), (2,)), ((2, 2), (2, 2)), ((), ())])
def test_rewards_and_groups_have_to_be_one_per_row(shapes):
    with pytest.raises(ValueError, match=r"both have to be \[B\]"):
        advantages(torch.zeros(shapes[0]), torch.zeros(shapes[1], dtype=torch.long), GRPO)


def test_no_rows_are_no_advantages():
    assert advantages(torch.zeros(0), torch.zeros(0, dtype=torch.long), GRPO).shape == (0,)


def test_advantages_carry_no_gradient_and_leave_the_rewards_as_they_are():
    rewards = torch.tensor([1.0, 0.0], requires_grad=True)
    assert not advantages(rewards, torch.zeros(2), GRPO).requires_grad
    assert rewards.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16])
def test_rewards_of_other_dtypes_are_computed_exactly(dtype):
    got = advantages(torch.tensor([1, 0, 0, 0]).to(dtype), torch.zeros(4), GRPO)
    assert got.dtype == torch.float32
    assert got.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


rewards_of_groups = st.lists(
    st.tuples(st.integers(-20, 20).map(lambda tenth: tenth / 10), st.integers(0, 3)), min_size=2, max_size=12
)
options = st.sampled_from(list(PRESETS.values())).map(lambda preset: preset.replace(singleton_group="zero"))
centred = options.filter(lambda preset: preset.advantage_baseline != "none")


@few
@given(pairs=rewards_of_groups, conventions=options, data=st.data())
def test_row_order_does_not_matter(pairs, conventions, data):
    rewards, groups = (torch.tensor(column) for column in zip(*pairs, strict=True))
    order = torch.tensor(data.draw(st.permutations(range(len(pairs)))))
    torch.testing.assert_close(
        advantages(rewards[order].double(), groups[order], conventions),
        advantages(rewards.double(), groups, conventions)[order],
    )


@few
@given(pairs=rewards_of_groups, conventions=centred, shift=st.integers(-100, 100))
def test_shifting_all_rewards_changes_nothing(pairs, conventions, shift):
    rewards, groups = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    torch.testing.assert_close(
        advantages(rewards + shift, groups, conventions.replace(advantage_eps=1e-2)),
        advantages(rewards, groups, conventions.replace(advantage_eps=1e-2)),
        rtol=1e-6,
        atol=1e-9,
    )


@few
@given(
    pairs=rewards_of_groups,
    conventions=options.filter(lambda preset: preset.advantage_eps_mode != "skip"),
    scale=st.sampled_from([0.01, 0.5, 3.0, 1000.0]),
)
def test_scaling_rewards_scales_or_leaves_advantages(pairs, conventions, scale):
    rewards, groups = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    conventions = conventions.replace(advantage_eps=0.0)
    before = advantages(rewards, groups, conventions)
    after = advantages(rewards * scale, groups, conventions)
    torch.testing.assert_close(after, before * scale if conventions.advantage_scale == "none" else before)


@few
@given(pairs=rewards_of_groups, conventions=options)
def test_groups_do_not_see_each_other(pairs, conventions):
    rewards, groups = (torch.tensor(column, dtype=torch.float64) for column in zip(*pairs, strict=True))
    whole = advantages(rewards, groups, conventions)
    for group in groups.unique():
        alone = advantages(rewards[groups == group], groups[groups == group], conventions)
        torch.testing.assert_close(whole[groups == group], alone)


def test_per_token_rewards_are_summed_over_the_mask_and_spread_over_it():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    rewards = torch.tensor([[0.25, 0.75, math.nan], [0.0, 9.0, math.inf]])
    got = token_level_advantages(rewards, mask, torch.zeros(2), GRPO)
    row = advantages(torch.tensor([1.0, 0.0]), torch.zeros(2), GRPO)
    assert torch.equal(got, row.unsqueeze(1) * mask)


def test_per_token_advantages_of_a_nan_singleton_stay_inside_the_mask():
    mask = torch.tensor([[True, False]])
    got = token_level_advantages(torch.ones(1, 2), mask, torch.zeros(1), GRPO.replace(singleton_group="nan"))
    assert got.isnan().tolist() == mask.tolist()


def test_per_token_rewards_and_mask_have_to_fit():
    with pytest.raises(ValueError, match=r"both have to be \[B, T\]"):
        token_level_advantages(torch.zeros(2, 3), torch.ones(2, 1, dtype=torch.bool), torch.zeros(2), GRPO)
