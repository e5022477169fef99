"""Every completion of a tiny policy is enumerated, so that expectations over samples are sums and theory can be checked.

The policy draws from four tokens, of which the last ends the completion, for at most two steps: thirteen completions. Its
logits are a table over prefixes. Gradients are with respect to that table, in float64.
"""

from collections import Counter
from itertools import combinations_with_replacement, product
from math import factorial, inf, prod

import pytest
import torch

from rlcanary.contract.batch import PolicyBatch
from rlcanary.contract.presets import CISPO, DAPO, DR_GRPO, GRPO, GSPO, RLOO
from rlcanary.reference import (
    advantages,
    fused_linear_logprobs,
    importance_weights,
    kl,
    policy_loss,
    rewards_with_kl,
    token_logprobs,
)

EOS = 3
STEPS = 2
COMPLETIONS = [ids for ids in product(range(4), repeat=STEPS) if ids[0] != EOS] + [(EOS,)]
LENGTHS = torch.tensor([len(ids) for ids in COMPLETIONS])
MASK = torch.arange(STEPS) < LENGTHS.unsqueeze(1)
IDS = torch.tensor([(*ids, 0)[:STEPS] for ids in COMPLETIONS])
# Row of the table for each position: 0 before the first token, 1 + first token before the second.
PREFIXES = torch.stack([torch.zeros_like(IDS[:, 0]), 1 + IDS[:, 0]], dim=1)
N = len(COMPLETIONS)

PRESETS = {"grpo": GRPO, "dr-grpo": DR_GRPO, "dapo": DAPO, "rloo": RLOO, "gspo": GSPO, "cispo": CISPO}
REWARDS = torch.linspace(-1, 2, N, dtype=torch.float64).square() + LENGTHS


def table(seed):
    return torch.randn(1 + 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


def logprobs(policy):
    """[N, T] of every completion, garbage at the position behind an EOS."""
    return token_logprobs(policy[PREFIXES], IDS)


def sequence_logprobs(policy):
    return logprobs(policy).masked_fill(~MASK, 0).sum(dim=1)


def gradient(value, policy):
    return torch.autograd.grad(value, policy, retain_graph=True)[0]


def true_gradient(policy, rewards=REWARDS):
    """Of the expected reward."""
    return gradient((sequence_logprobs(policy).exp() * rewards).sum(), policy)


def expected_gradient(policy, conventions, rewards=REWARDS, group=2):
    """Of the loss of one group, over all groups that the policy may sample, on policy."""
    scored = logprobs(policy)
    probabilities = sequence_logprobs(policy).exp().detach()
    expected_loss = 0
    for rows in combinations_with_replacement(range(N), group):
        index = torch.tensor(rows)
        orders = factorial(group) / prod(factorial(count) for count in Counter(rows).values())
        given = advantages(rewards[index], torch.zeros(group), conventions)
        batch = PolicyBatch(scored[index], scored[index].detach(), given, MASK[index])
        expected_loss += orders * probabilities[index].prod() * policy_loss(batch, conventions).loss
    return gradient(expected_loss, policy)


def weighted_scores(policy, weights):
    """Σ weight × probability × ∇ log probability: what a policy gradient with these weights expects."""
    surrogate = (sequence_logprobs(policy).exp().detach() * weights * sequence_logprobs(policy)).sum()
    return gradient(surrogate, policy)


def pair_weights(policy, advantage, normaliser):
    """[N] the factor that completion i gets on average over its partner j, from one pair's formula."""
    probabilities = sequence_logprobs(policy).exp().detach()
    return torch.stack(
        [
            sum(2 * probabilities[j] * advantage(REWARDS[i], REWARDS[j]) / normaliser(i, j) for j in range(N))
            for i in range(N)
        ]
    )


def centred(reward, other):
    return (reward - other) / 2


def scaled(reward, other):
    """Centred, over the standard deviation of two numbers with ddof 1, plus epsilon."""
    return (reward - other) / 2 / ((reward - other).abs() / 2**0.5 + 1e-6)


def test_probabilities_of_all_completions_add_to_one():
    assert sequence_logprobs(table(0)).exp().sum().item() == pytest.approx(1, abs=1e-12)


def test_rloo_is_the_policy_gradient():
    policy = table(1)
    torch.testing.assert_close(expected_gradient(policy, RLOO), -true_gradient(policy))


def test_rloo_is_the_policy_gradient_with_groups_of_three():
    policy = table(1)
    torch.testing.assert_close(expected_gradient(policy, RLOO, group=3), -true_gradient(policy))


def test_dr_grpo_is_the_policy_gradient_shrunk_by_the_own_share_of_the_baseline():
    policy = table(2)
    torch.testing.assert_close(expected_gradient(policy, DR_GRPO), -(1 - 1 / 2) * true_gradient(policy))


def test_dr_grpo_divides_by_its_constant():
    policy = table(2)
    conventions = DR_GRPO.replace(aggregation_constant=8.0)
    torch.testing.assert_close(expected_gradient(policy, conventions), -(1 - 1 / 2) / 8 * true_gradient(policy))


def test_no_baseline_is_the_policy_gradient():
    policy = table(3)
    conventions = RLOO.replace(advantage_baseline="none")
    torch.testing.assert_close(expected_gradient(policy, conventions, group=1), -true_gradient(policy))


def test_sequence_mean_weighs_each_completion_by_one_over_its_length():
    """The length bias that Dr. GRPO takes out: centred advantages, averaged over each completion's tokens."""
    policy = table(4)
    conventions = DR_GRPO.replace(aggregation="sequence_mean")
    value = (sequence_logprobs(policy).exp() * REWARDS).sum().detach()
    biased = -(1 - 1 / 2) * weighted_scores(policy, (REWARDS - value) / LENGTHS)
    got = expected_gradient(policy, conventions)
    torch.testing.assert_close(got, biased)
    assert torch.cosine_similarity(got.flatten(), -true_gradient(policy).flatten(), dim=0) < 0.999


def test_group_scaling_counts_wins_in_place_of_rewards():
    """The bias of the standard deviation: of two completions the better gets 1/√2, by however little it is better."""
    policy = table(5)
    conventions = RLOO.replace(advantage_baseline="mean", advantage_scale="group", advantage_eps=0.0)
    probabilities = sequence_logprobs(policy).exp().detach()
    wins = (REWARDS.unsqueeze(1) - REWARDS).sign() @ probabilities
    torch.testing.assert_close(expected_gradient(policy, conventions), -weighted_scores(policy, wins) / 2**0.5)


def test_grpo_is_parallel_to_the_policy_gradient_when_rewards_are_binary_and_lengths_equal():
    policy = table(6)
    binary = (IDS[:, 1] == 1).double()
    with torch.no_grad():
        policy[0, EOS] = -200.0
    got = expected_gradient(policy, GRPO.replace(advantage_eps=0.0), binary)
    torch.testing.assert_close(got, -true_gradient(policy, binary) / 2**0.5 / STEPS)


@pytest.mark.parametrize(
    ("name", "advantage", "normaliser"),
    [
        ("grpo", scaled, lambda i, j: 2 * LENGTHS[i]),
        ("gspo", scaled, lambda i, j: 2 * LENGTHS[i]),
        ("dapo", scaled, lambda i, j: LENGTHS[i] + LENGTHS[j]),
        ("cispo", scaled, lambda i, j: LENGTHS[i] + LENGTHS[j]),
        ("dr-grpo", centred, lambda i, j: 2),
        ("rloo", lambda reward, other: reward - other, lambda i, j: 2),
    ],
)
def test_on_policy_each_preset_expects_its_paper_formula(name, advantage, normaliser):
    policy = table(7)
    expected = -weighted_scores(policy, pair_weights(policy, advantage, normaliser))
    torch.testing.assert_close(expected_gradient(policy, PRESETS[name]), expected)


def sampled_elsewhere(policy, sampler, conventions):
    """Expected gradient without a baseline when `sampler` draws the completions and `policy` is trained."""
    scored, drawn = logprobs(policy), logprobs(sampler).detach()
    probabilities = sequence_logprobs(sampler).exp().detach()
    expected_loss = 0
    for row in range(N):
        index = torch.tensor([row])
        batch = PolicyBatch(
            scored[index], scored[index].detach(), REWARDS[index], MASK[index], sampler_logprobs=drawn[index]
        )
        expected_loss += probabilities[row] * policy_loss(batch, conventions).loss
    return gradient(expected_loss, policy)


def test_sequence_importance_weights_correct_for_another_sampler_exactly():
    policy, sampler = table(8), table(9)
    conventions = RLOO.replace(importance_level="sequence", importance_high=1e9)
    torch.testing.assert_close(sampled_elsewhere(policy, sampler, conventions), -true_gradient(policy))


def test_truncated_weights_are_biased_by_the_mass_that_is_cut():
    policy, sampler = table(8), table(9)
    ratio = (sequence_logprobs(policy) - sequence_logprobs(sampler)).exp().detach()
    conventions = RLOO.replace(importance_level="sequence", importance_high=1.5)
    expected = -weighted_scores(policy, REWARDS * (1.5 / ratio).clamp(max=1))
    torch.testing.assert_close(sampled_elsewhere(policy, sampler, conventions), expected)


def test_masked_weights_leave_out_what_lies_outside_the_bounds():
    policy, sampler = table(8), table(9)
    ratio = (sequence_logprobs(policy) - sequence_logprobs(sampler)).exp().detach()
    conventions = RLOO.replace(
        importance_level="sequence", importance_mode="mask", importance_low=0.5, importance_high=1.5
    )
    expected = -weighted_scores(policy, REWARDS * ((ratio >= 0.5) & (ratio <= 1.5)))
    torch.testing.assert_close(sampled_elsewhere(policy, sampler, conventions), expected)


def test_token_importance_weights_leave_a_bias_over_two_steps():
    policy, sampler = table(8), table(9)
    got = sampled_elsewhere(policy, sampler, RLOO.replace(importance_level="token", importance_high=1e9))
    assert not torch.allclose(got, -true_gradient(policy), rtol=0.05)


def test_sequence_weights_average_to_one_over_the_sampler():
    policy, sampler = table(8), table(9)
    conventions = RLOO.replace(importance_level="sequence", importance_high=1e9)
    weights = importance_weights(logprobs(policy).detach(), logprobs(sampler).detach(), MASK, conventions)
    assert (sequence_logprobs(sampler).exp().detach() * weights[:, 0]).sum().item() == pytest.approx(1, abs=1e-12)


def one_step():
    """Logprobs of the four tokens under a policy and a reference: [1, 4] each, every token once."""
    policy = table(10)[:1].detach().requires_grad_()
    return policy, policy.log_softmax(dim=1), table(11)[:1].detach().log_softmax(dim=1)


def divergence(p, q):
    return (p.exp() * (p - q)).sum()


def plain_estimate(log_ratio, estimator):
    return {
        "k1": log_ratio,
        "k2": log_ratio**2 / 2,
        "k3": 1 / log_ratio.exp() - 1 + log_ratio,
        "abs": log_ratio.abs(),
    }[estimator]


def expected_kl_gradient(policy, p, q, conventions):
    """Of the KL term of the loss, on policy, over all tokens that the policy may draw."""
    one = torch.ones(1, 1, dtype=torch.bool)
    total = 0
    for token in range(4):
        scored = p[:, token : token + 1]
        batch = PolicyBatch(scored, scored.detach(), torch.zeros(1), one, q[:, token : token + 1])
        total += p[0, token].exp().detach() * policy_loss(batch, conventions).loss
    return gradient(total, policy)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_divergence(estimator):
    _, p, q = one_step()
    estimate = kl(p, q, GRPO.replace(kl_estimator=estimator))
    torch.testing.assert_close((p.exp() * estimate).sum(), divergence(p, q))


@pytest.mark.parametrize("part", [{"kl_score_term": True}, {"kl_ratio_weighted": True}], ids=str)
@pytest.mark.parametrize("direction", ["policy_to_reference", "reference_to_policy"])
@pytest.mark.parametrize("clamps", [{}, {"kl_input_clamp": 1.0}, {"kl_output_clamp": 0.9}], ids=str)
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "abs"])
def test_the_score_function_part_makes_the_gradient_that_of_the_expected_estimate(estimator, clamps, direction, part):
    """Over the tokens that no clamp holds; the others have no gradient."""
    policy, p, q = one_step()
    conventions = RLOO.replace(kl_estimator=estimator, kl_direction=direction, kl_coef=0.7, **clamps, **part)
    estimate = plain_estimate(p - q if direction == "policy_to_reference" else q - p, estimator)
    free = ((p - q).abs() <= clamps.get("kl_input_clamp", inf)) & (estimate.abs() <= clamps.get("kl_output_clamp", inf))
    assert free.any()
    assert free.all() == (not clamps)
    torch.testing.assert_close(
        expected_kl_gradient(policy, p, q, conventions), 0.7 * gradient((p.exp() * estimate * free).sum(), policy)
    )


@pytest.mark.parametrize("part", ["kl_score_term", "kl_ratio_weighted"])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_with_the_score_function_part_an_unbiased_estimate_has_the_gradient_of_the_divergence(estimator, part):
    policy, p, q = one_step()
    conventions = RLOO.replace(kl_estimator=estimator, kl_coef=0.7, **{part: True})
    torch.testing.assert_close(
        expected_kl_gradient(policy, p, q, conventions), 0.7 * gradient(divergence(p, q), policy)
    )


def test_k2_has_the_gradient_of_the_divergence_without_the_score_function_part_and_not_with_it():
    policy, p, q = one_step()
    conventions = RLOO.replace(kl_estimator="k2", kl_coef=1.0)
    exact = gradient(divergence(p, q), policy)
    torch.testing.assert_close(expected_kl_gradient(policy, p, q, conventions), exact)
    scored = expected_kl_gradient(policy, p, q, conventions.replace(kl_score_term=True))
    assert (scored - exact).abs().max() > 0.1


def test_gradient_of_k1_vanishes():
    policy, p, q = one_step()
    got = gradient((p.exp().detach() * kl(p, q, GRPO.replace(kl_estimator="k1"))).sum(), policy)
    torch.testing.assert_close(got, torch.zeros_like(got))


def test_gradient_of_k3_is_that_of_the_other_direction():
    policy, p, q = one_step()
    got = gradient((p.exp().detach() * kl(p, q, GRPO.replace(kl_estimator="k3"))).sum(), policy)
    torch.testing.assert_close(got, gradient(divergence(q, p), policy))


def test_kl_in_the_reward_gives_the_gradient_of_the_regularised_objective():
    """With k1 in the reward, the policy gradient is that of reward minus beta times the divergence of whole sequences."""
    policy, reference = table(12), table(13)
    conventions = RLOO.replace(kl_estimator="k1", kl_coef=0.3, kl_placement="reward")
    p, q = sequence_logprobs(policy), sequence_logprobs(reference).detach()
    objective = (p.exp() * (REWARDS - 0.3 * (p - q))).sum()
    penalised = rewards_with_kl(REWARDS, logprobs(policy), logprobs(reference), MASK, conventions)
    torch.testing.assert_close(expected_gradient(policy, conventions, penalised), -gradient(objective, policy))


def test_the_policy_gradient_through_the_fused_head():
    """The table as a head over one-hot hidden states: same gradient as through the logits."""
    policy = table(14)
    one_hot = torch.eye(5, dtype=torch.float64)[PREFIXES]
    fused = fused_linear_logprobs(one_hot, policy.t(), IDS, chunk=3).masked_fill(~MASK, 0).sum(dim=1)
    torch.testing.assert_close(gradient((fused.exp() * REWARDS).sum(), policy), true_gradient(policy))
