"""A small transformer learns with the reference: it samples, is rewarded, and what was rewarded becomes likelier."""

from dataclasses import replace

import pytest
import torch

from rlcanary.contract.batch import Completion, Group, PolicyBatch
from rlcanary.contract.presets import DR_GRPO, GRPO, PAPERS
from rlcanary.reference import advantages, completion_logprobs, fused_linear_logprobs, make_batch, policy_loss, split
from rlcanary.tiny_models import EOS_ID, PAD_ID, tiny_llama

PROMPTS = [[11, 12], [13, 14, 15, 16], [17]]
WIDTH = 6
REWARDED = [[7, 7, 2], [9, 7, 9, 2], [9, 2], [30, 31, 32, 33, 34, 2]]


def sample(model, generator, group_size=8):
    """Groups of completions drawn from the model, token by token; the reward is the share of ids below 32."""
    groups = []
    for prompt in PROMPTS:
        rows = torch.tensor([prompt] * group_size)
        for _ in range(WIDTH):
            with torch.no_grad():
                probabilities = model(input_ids=rows).logits[:, -1].softmax(dim=-1)
            rows = torch.cat([rows, torch.multinomial(probabilities, 1, generator=generator)], dim=1)
        sampled = [row[: row.index(EOS_ID) + 1] if EOS_ID in row else row for row in rows[:, len(prompt) :].tolist()]
        rewards = [sum(token < 32 for token in row) / len(row) for row in sampled]
        groups.append(Group(prompt, [Completion(row) for row in sampled], rewards))
    return groups


def fixed_groups(rewards=(1.0, 0.5, 0.0, 0.0)):
    return [Group(prompt, [Completion(ids) for ids in REWARDED], list(rewards)) for prompt in PROMPTS]


def policy_batch(model, batch, conventions, reference=None, old_logprobs=None):
    logprobs = completion_logprobs(model, batch)
    return PolicyBatch(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() if old_logprobs is None else old_logprobs,
        advantages=advantages(batch.rewards, batch.group_ids, conventions),
        mask=batch.completion_mask,
        ref_logprobs=reference,
        group_ids=batch.group_ids,
    )


def update(model, optimizer, batch, conventions, **given):
    output = policy_loss(policy_batch(model, batch, conventions, **given), conventions)
    optimizer.zero_grad()
    output.loss.backward()
    assert output.loss.isfinite()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    optimizer.step()
    return output.metrics


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def sequence_logprobs(model, batch):
    with torch.no_grad():
        return completion_logprobs(model, batch).nan_to_num(0).sum(dim=1)


def optimizer_of(model, learning_rate=1e-3):
    return torch.optim.Adam(model.parameters(), lr=learning_rate)


@pytest.fixture
def model():
    return tiny_llama(seed=1)


@pytest.mark.parametrize("name", PAPERS)
def test_a_policy_that_samples_and_updates_earns_more(model, name):
    conventions = PAPERS[name].replace(aggregation_constant=float(WIDTH))
    generator = torch.Generator().manual_seed(0)
    optimizer = optimizer_of(model, learning_rate=1e-2)
    earned = []
    for _ in range(10):
        batch, stats = make_batch(sample(model, generator), PAD_ID)
        earned.append(sum(stats.rewards) / len(stats.rewards))
        update(model, optimizer, batch, conventions)
    assert earned[0] < 0.55
    assert sum(earned[-3:]) / 3 > 0.8


@pytest.mark.parametrize("name", PAPERS)
def test_one_update_makes_high_reward_completions_likelier_and_low_reward_ones_less_likely(model, name):
    """Completions of one length, so that the aggregation weighs them alike; middling ones may go either way."""
    groups = [
        Group(prompt, [Completion(ids) for ids in ([7, 7, 2], [9, 8, 2], [30, 31, 2])], [1.0, 0.4, 0.0])
        for prompt in PROMPTS
    ]
    batch, _ = make_batch(groups, PAD_ID)
    before = sequence_logprobs(model, batch)
    update(model, torch.optim.SGD(model.parameters(), lr=1e-3), batch, PAPERS[name])
    change = (sequence_logprobs(model, batch) - before).view(len(PROMPTS), 3)
    assert (change[:, 0] > 0).all()
    assert (change[:, 2] < 0).all()


def test_advantages_have_the_sign_of_being_better_than_the_group(model):
    batch, _ = make_batch(sample(model, torch.Generator().manual_seed(3)), PAD_ID)
    given = advantages(batch.rewards, batch.group_ids, GRPO).view(len(PROMPTS), -1)
    rewards = batch.rewards.view(len(PROMPTS), -1)
    assert torch.equal(given.sign(), (rewards - rewards.mean(dim=1, keepdim=True)).sign())
    assert given.sum(dim=1).abs().max() < 1e-5


def test_a_constant_reward_moves_nothing(model):
    batch, _ = make_batch(fixed_groups(rewards=[0.9] * 4), PAD_ID)
    loss = policy_loss(policy_batch(model, batch, GRPO), GRPO).loss
    assert not any(gradient.any() for gradient in gradients(model, loss))


def test_the_rewards_of_one_prompt_do_not_reach_the_others(model):
    """The second prompt became easy: its own completions all get nothing, the gradient of the others stays as it was."""
    conventions = GRPO.replace(aggregation="sequence_sum")
    easy = [group if index != 1 else replace(group, rewards=[5.0] * 4) for index, group in enumerate(fixed_groups())]
    with_easy, _ = make_batch(easy, PAD_ID)
    without, _ = make_batch([easy[0], easy[2]], PAD_ID)
    got = gradients(model, policy_loss(policy_batch(model, with_easy, conventions), conventions).loss * 12)
    expected = gradients(model, policy_loss(policy_batch(model, without, conventions), conventions).loss * 8)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_raising_all_rewards_of_one_prompt_changes_no_gradient(model):
    groups = fixed_groups()
    raised = [groups[0], replace(groups[1], rewards=[reward + 3.0 for reward in groups[1].rewards]), groups[2]]
    losses = [policy_loss(policy_batch(model, make_batch(g, PAD_ID)[0], GRPO), GRPO).loss for g in (groups, raised)]
    for one, other in zip(*(gradients(model, loss) for loss in losses), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_dr_grpo_weighs_every_token_alike_where_grpo_weighs_long_completions_less(model):
    """Two completions of three and six tokens with opposite advantages, gradients with respect to their logprobs."""
    groups = [Group([11], [Completion([7, 7, 2]), Completion([9] * 5 + [2])], [1.0, 0.0])]
    batch, _ = make_batch(groups, PAD_ID)
    slopes = {}
    for name, conventions in {"grpo": GRPO, "dr-grpo": DR_GRPO.replace(aggregation_constant=6.0)}.items():
        given = policy_batch(model, batch, conventions)
        slopes[name] = torch.autograd.grad(policy_loss(given, conventions).loss, given.logprobs)[0]
    assert slopes["dr-grpo"][0, 0] == -slopes["dr-grpo"][1, 0] == pytest.approx(-0.5 / 2 / 6)
    assert slopes["grpo"][0, 0].item() == pytest.approx(-2 * slopes["grpo"][1, 0].item())


def test_a_larger_beta_holds_the_policy_closer_to_the_reference():
    batch, _ = make_batch(fixed_groups(), PAD_ID)
    distances = []
    for beta in (0.0, 0.1, 1.0):
        model = tiny_llama(seed=1)
        conventions = GRPO.replace(kl_coef=beta)
        with torch.no_grad():
            reference = completion_logprobs(model, batch)
        optimizer = optimizer_of(model)
        for _ in range(15):
            metrics = update(model, optimizer, batch, conventions, reference=reference)
        distances.append(metrics["kl"])
    assert distances[0] > 1.5 * distances[1] > 2 * distances[2] > 0


def test_clipping_limits_how_far_repeated_updates_on_one_batch_go():
    batch, _ = make_batch(fixed_groups(), PAD_ID)
    furthest = {}
    for name, conventions in {"clipped": GRPO, "unclipped": GRPO.replace(clip_low=None, clip_high=None)}.items():
        model = tiny_llama(seed=1)
        with torch.no_grad():
            old = completion_logprobs(model, batch)
        optimizer = torch.optim.SGD(model.parameters(), lr=3e-3)
        for _ in range(20):
            metrics = update(model, optimizer, batch, conventions, old_logprobs=old)
        furthest[name] = metrics["ratio_max"]
        assert (metrics["clip_fraction"] > 0.2) == (name == "clipped")
    assert furthest["clipped"] < 2
    assert furthest["unclipped"] > 10


def test_the_first_step_is_on_policy(model):
    batch, _ = make_batch(sample(model, torch.Generator().manual_seed(4)), PAD_ID)
    with torch.no_grad():
        logprobs = completion_logprobs(model, batch)
    metrics = policy_loss(policy_batch(model, batch, GRPO, reference=logprobs), GRPO).metrics
    assert metrics["ratio_min"] == metrics["ratio_max"] == 1.0
    assert metrics["clip_fraction"] == metrics["kl"] == 0.0


def test_the_side_of_the_padding_does_not_reach_the_weights(model):
    losses = [
        policy_loss(policy_batch(model, make_batch(fixed_groups(), PAD_ID, prompt_padding=side)[0], GRPO), GRPO).loss
        for side in ("left", "right")
    ]
    for one, other in zip(*(gradients(model, loss) for loss in losses), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PAPERS)
def test_micro_batches_of_uneven_token_counts_move_the_weights_alike(model, name):
    """Each piece has a forward and a backward pass of its own, and the weights' gradients add up."""
    conventions = PAPERS[name]
    batch, _ = make_batch(fixed_groups(), PAD_ID)
    whole = policy_batch(model, batch, conventions)
    expected = gradients(model, policy_loss(whole, conventions).loss)
    model.zero_grad()
    for piece in split(replace(whole, logprobs=torch.arange(len(whole.mask))), 5, conventions):
        rows = piece.logprobs
        logprobs = completion_logprobs(model, select(batch, rows))
        policy_loss(replace(piece, logprobs=logprobs), conventions).loss.backward()
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def select(batch, rows):
    names = ("input_ids", "attention_mask", "position_ids", "completion_starts", "completion_ids", "completion_mask")
    return replace(batch, **{name: getattr(batch, name)[rows] for name in names})


def test_the_fused_head_gives_the_model_the_same_gradient(model):
    batch, _ = make_batch(fixed_groups(), PAD_ID)
    mask = batch.completion_mask
    expected = completion_logprobs(model, batch)[mask]
    hidden = model.model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask.long(), position_ids=batch.position_ids
    ).last_hidden_state
    places = (batch.completion_starts.unsqueeze(1) - 1 + torch.arange(mask.shape[1])).clamp(max=hidden.shape[1] - 1)
    at_tokens = hidden[torch.arange(len(mask)).unsqueeze(1), places][mask]
    got = fused_linear_logprobs(at_tokens, model.lm_head.weight, batch.completion_ids[mask], chunk=10)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, len(got))
    for one, other in zip(
        gradients(model, (got * weights).sum()), gradients(model, (expected * weights).sum()), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
