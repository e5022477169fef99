"""Credit per token and the critic's loss, each quantity derived a second time: by hand, by sums over lists, by autograd."""

import math
from itertools import product

import pytest
import torch

from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.presets import GRPO, OPO, PPO, REINFORCE_PP
from rlcanary.contract.records.credit import CreditBatch, ValueBatch
from rlcanary.reference import advantages, gae, make_batch, returns_to_go, token_advantages, value_loss, values
from rlcanary.tiny_models import tiny_value_model

MASK = torch.tensor([[1, 1, 0, 0, 1, 0], [1, 0, 1, 1, 1, 1], [0, 1, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)


def batch_of(seed=0, **changes):
    generator = torch.Generator().manual_seed(seed)
    noise_2BT = torch.randn(2, *MASK.shape, generator=generator, dtype=torch.float64)
    given = {
        "rewards": torch.tensor([1.0, -0.5, 0.25, 2.0], dtype=torch.float64),
        "mask": MASK,
        "group_ids": torch.tensor([0, 0, 1, 1]),
        "values": noise_2BT[0],
        "token_rewards": noise_2BT[1],
        "turn_ids": torch.tensor([[0, 0, 0, 1, 1, 1], [3, 3, 5, 5, 6, 6], [0] * 6, [0] * 6]),
    }
    return CreditBatch(**{**given, **changes})


def rows_of(batch):
    """The row, its trained places and the rewards at these, the outcome's on the last."""
    for row, mask in enumerate(batch.mask.tolist()):
        places = [place for place, is_trained in enumerate(mask) if is_trained]
        rewards = [float(batch.token_rewards[row, place]) for place in places]
        if rewards:
            rewards[-1] += float(batch.rewards[row])
        yield row, places, rewards


def test_gae_of_two_tokens_by_hand():
    rewards, own = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.25]])
    # TD errors 0.5 × 0.25 - 0.5 = -0.375 and 1 - 0.25 = 0.75; 0.5 × 0.8 × 0.75 = 0.3.
    found = gae(rewards, own, torch.ones(1, 2, dtype=torch.bool), 0.5, 0.8)
    assert found.tolist() == [[pytest.approx(-0.075), pytest.approx(0.75)]]


@pytest.mark.parametrize(("discount", "trace"), [*product((1.0, 0.9), (0.0, 0.7, 1.0))])
def test_gae_is_the_mean_of_the_n_step_advantages(discount, trace):
    """Weights (1 - lambda) lambda^(n-1) of the advantage over n steps, the rest on the longest (1506.02438, eq. 16)."""
    batch = batch_of()
    found = token_advantages(batch, PPO.replace(whitening="none", discount=discount, gae_lambda=trace))
    expected = torch.zeros_like(batch.values)
    for row, places, rewards in rows_of(batch):
        own = [*batch.values[row][places].tolist(), 0.0]
        for index, place in enumerate(places):
            left = len(places) - index
            for steps in range(1, left + 1):
                total = sum(discount**k * rewards[index + k] for k in range(steps))
                over_steps = total + discount**steps * own[index + steps] - own[index]
                weight = trace ** (steps - 1) * ((1 - trace) if steps < left else 1)
                expected[row, place] += weight * over_steps
    torch.testing.assert_close(found.advantages, expected)
    torch.testing.assert_close(found.returns[MASK], (expected + batch.values)[MASK])


def test_the_critics_own_lambda_changes_its_returns_alone():
    conventions = PPO.replace(whitening="none", gae_lambda=0.7)
    one, two = (token_advantages(batch_of(), each) for each in (conventions, conventions.replace(critic_lambda=1.0)))
    torch.testing.assert_close(one.advantages, two.advantages)
    rewards = torch.zeros(MASK.shape, dtype=torch.float64)
    for row, places, earned in rows_of(batch_of()):
        rewards[row, places] = torch.tensor(earned, dtype=torch.float64)
    torch.testing.assert_close(two.returns[MASK], returns_to_go(rewards, MASK, 1.0)[MASK])


def test_returns_to_go_are_discounted_by_the_number_of_trained_tokens_between():
    batch, conventions = batch_of(), REINFORCE_PP.replace(whitening="none", discount=0.9)
    found = token_advantages(batch, conventions).advantages
    for row, places, rewards in rows_of(batch):
        for index, place in enumerate(places):
            expected = math.fsum(0.9**k * reward for k, reward in enumerate(rewards[index:]))
            assert float(found[row, place]) == pytest.approx(expected)
    assert found[~MASK].abs().max() == 0


def test_tokens_of_a_turn_share_what_it_and_later_turns_earned():
    conventions = GRPO.replace(
        token_credit="turn_returns", discount=0.5, advantage_baseline="none", advantage_scale="none"
    )
    batch = batch_of(token_rewards=torch.tensor([[1.0, 2.0, 9.0, 9.0, 4.0, 9.0]] * 4))
    found = token_advantages(batch, conventions).advantages
    # Turns of 1 + 2, and of 4 + the outcome 1.
    assert found[0].tolist() == [5.5, 5.5, 0, 0, 5.0, 0]
    # Turns 3, 5 and 6 of 1, 9 + 9 and 4 + 9 - 0.5.
    assert found[1].tolist() == [1 + 0.5 * (18 + 0.5 * 12.5), 0, 24.25, 24.25, 12.5, 12.5]


def test_opo_weighs_the_baseline_by_trained_tokens():
    found = token_advantages(batch_of(token_rewards=None), OPO).advantages
    baseline = (3 * 1.0 + 5 * -0.5) / 8
    assert found[0, 0] == pytest.approx(1.0 - baseline)
    assert found[1, 5] == pytest.approx(-0.5 - baseline)
    # A row without tokens weighs nothing.
    assert found[2].abs().max() == 0


def test_the_baseline_weighted_by_length_has_the_least_variance_for_gradients_of_squared_norm_equal_to_the_length():
    """OPO's premise: the minimiser of Σ length × (reward - baseline)²."""
    rewards, lengths = torch.tensor([1.0, 0.0, 0.5]), torch.tensor([2.0, 5.0, 1.0])
    baseline = torch.zeros((), requires_grad=True)
    (slope,) = torch.autograd.grad((lengths * (rewards - baseline) ** 2).sum(), baseline)
    best = -slope / (2 * lengths.sum())
    found = advantages(rewards, torch.zeros(3), OPO, lengths)
    torch.testing.assert_close(found, rewards - best)


def test_outcome_spreads_the_advantage_of_all_rewards_of_the_row():
    batch = batch_of()
    totals = torch.tensor([sum(rewards) for _, _, rewards in rows_of(batch)], dtype=torch.float64)
    # A row without a trained token keeps its reward in the statistics.
    totals[3] = batch.rewards[3]
    expected = advantages(totals, batch.group_ids, GRPO).unsqueeze(1) * MASK
    torch.testing.assert_close(token_advantages(batch, GRPO).advantages, expected)


@pytest.mark.parametrize("ddof", [0, 1])
def test_whitening_takes_the_statistics_of_trained_tokens(ddof):
    plain = token_advantages(batch_of(), PPO.replace(whitening="none")).advantages
    kept = plain[MASK].tolist()
    mean = math.fsum(kept) / len(kept)
    deviation = math.sqrt(math.fsum((each - mean) ** 2 for each in kept) / (len(kept) - ddof))
    formulas = {
        "mean_std": [(each - mean) / deviation for each in kept],
        "mean": [each - mean for each in kept],
        "std": [each / deviation for each in kept],
    }
    for name, expected in formulas.items():
        found = token_advantages(batch_of(), PPO.replace(whitening=name, whitening_ddof=ddof))
        assert found.advantages[MASK].tolist() == pytest.approx(expected)
        assert found.advantages[~MASK].abs().max() == 0


@pytest.mark.parametrize(
    ("singleton", "mean_std", "std"),
    [("undivided", 0.0, 0.9), ("unwhitened", 0.9, 0.9), ("nan", math.nan, math.nan)],
)
def test_one_trained_token_has_no_deviation_with_n_minus_1(singleton, mean_std, std):
    batch = CreditBatch(torch.tensor([0.9, 0.9]), torch.tensor([[True, False], [False, False]]), torch.zeros(2))
    conventions = GRPO.replace(advantage_baseline="none", advantage_scale="none", whitening_singleton=singleton)
    for name, expected in {"mean_std": mean_std, "mean": 0.0, "std": std}.items():
        found = token_advantages(batch, conventions.replace(whitening=name)).advantages
        assert found.tolist() == [[pytest.approx(expected, nan_ok=True), 0.0], [0.0, 0.0]]
        by_n = token_advantages(batch, conventions.replace(whitening=name, whitening_ddof=0)).advantages
        assert by_n[0, 0] == pytest.approx(0.9 if name == "std" else 0.0)


def test_equal_advantages_are_whitened_to_zero():
    rewards, mask = torch.tensor([0.9, 0.9, 0.9]), torch.ones(3, 2, dtype=torch.bool)
    batch = CreditBatch(rewards, mask, torch.zeros(3))
    conventions = GRPO.replace(advantage_baseline="none", advantage_scale="none", whitening="mean_std")
    assert token_advantages(batch, conventions).advantages.abs().max() < 1e-6


@pytest.mark.parametrize("conventions", [GRPO, PPO, REINFORCE_PP, OPO], ids=["grpo", "ppo", "reinforce++", "opo"])
def test_nothing_outside_the_mask_enters(conventions):
    dirty = {name: getattr(batch_of(), name).where(MASK, torch.nan) for name in ("values", "token_rewards")}
    clean, found = (token_advantages(each, conventions) for each in (batch_of(), batch_of(**dirty)))
    torch.testing.assert_close(found.advantages, clean.advantages)
    if clean.returns is not None:
        torch.testing.assert_close(found.returns, clean.returns)


def test_what_the_conventions_need_and_the_batch_lacks_is_named():
    with pytest.raises(ValueError, match="values"):
        token_advantages(batch_of(values=None), PPO)
    with pytest.raises(ValueError, match="turn_ids"):
        token_advantages(batch_of(turn_ids=None), GRPO.replace(token_credit="turn_returns"))
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="old_values"):
        value_loss(ValueBatch(ones, ones, ones.bool()), PPO)


@pytest.mark.parametrize(
    ("moved", "wanted", "error", "slope"),
    [
        (0.1, 1.0, 0.81, -1.8),  # within the clip
        (0.5, 1.0, 0.64, 0.0),  # clipped: the held value is further away
        (0.5, -1.0, 2.25, 3.0),  # beyond the clip, on the wrong side: the moved value is further away
        (-0.5, -1.0, 0.64, 0.0),
        (-0.5, 1.0, 2.25, -3.0),
    ],
)
def test_value_clip_keeps_the_larger_error(moved, wanted, error, slope):
    own = torch.tensor([[moved]], dtype=torch.float64, requires_grad=True)
    batch = ValueBatch(own, torch.tensor([[wanted]]), torch.ones(1, 1).bool(), old_values=torch.zeros(1, 1))
    output = value_loss(batch, GRPO.replace(value_clip=0.2, value_coef=1.0))
    (gradient,) = torch.autograd.grad(output.loss, own)
    assert (float(output.loss.detach()), float(gradient)) == (pytest.approx(error), pytest.approx(slope))
    assert output.metrics == {"value_clip_fraction": float(slope == 0)}


def test_value_loss_is_half_the_mean_squared_error_of_trained_tokens():
    batch = batch_of()
    own = batch.values.clone().requires_grad_()
    output = value_loss(ValueBatch(own, batch.token_rewards, MASK), GRPO)
    expected = torch.nn.functional.mse_loss(own[MASK], batch.token_rewards[MASK]) / 2
    torch.testing.assert_close(output.loss, expected)
    found, wanted = (torch.autograd.grad(loss, own)[0] for loss in (output.loss, expected))
    torch.testing.assert_close(found, wanted)


def test_value_is_that_of_the_prefix_before_the_token():
    model = tiny_value_model()
    batch, _ = make_batch([Group([5, 6, 7], [Completion([8, 9, 2]), Completion([10])], [1.0, 0.0])], pad_token_id=0)
    found = values(model, batch)
    for length in range(3):
        prefix = torch.tensor([[5, 6, 7, 8, 9][: 3 + length]])
        alone = model(input_ids=prefix, attention_mask=torch.ones_like(prefix)).logits[0, -1, 0]
        torch.testing.assert_close(found[0, length], alone, atol=1e-5, rtol=1e-4)
    assert found[1, 1:].tolist() == [0, 0]
