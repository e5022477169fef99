"""What surrounds the loss of the reference, a second time in plain Python: advantages, scores, batches, a whole update."""

import math
from fractions import Fraction
from itertools import product
from types import SimpleNamespace

import plain_loss
import pytest
import torch

from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.lengths import Lengths
from rlcanary.reference import (
    advantages,
    entropy,
    fused_linear_logprobs_and_entropy,
    has_signal,
    is_overlong,
    make_batch,
    packed_logprobs,
    shape_rewards,
    token_logprobs,
    train_step,
)
from rlcanary.reference.data.ordering import accumulation_steps, data_order
from rlcanary.tiny_models import tiny_llama

NAN = math.nan
REWARDS = {
    "uneven groups in any order": ([0.9, 0.1, 0.4, -2.0, 3.0, 0.25, 0.0, 1.5, 0.7], [4, 1, 4, 1, 4, 1, 4, 4, 8]),
    "pairs, one of them equal": ([0.3, 0.3, 1.0, 0.0], [0, 0, 1, 1]),
    "NaN in each kind of group": ([1.0, NAN, 0.5, NAN, 2.0, NAN, NAN, 0.25, 0.75], [0, 0, 0, 1, 1, 2, 2, 3, 3]),
    "one row": ([0.7], [3]),
    "nothing but NaN": ([NAN, NAN], [0, 0]),
}


def plain_advantages(rewards, groups, c):
    """Exact fractions up to the square root."""
    rewards = [None if math.isnan(reward) else Fraction(reward) for reward in rewards]
    everyone = [reward for reward in rewards if reward is not None]
    return [
        0.0 if reward is None else plain_advantage(row, rewards, groups, everyone, c)
        for row, reward in enumerate(rewards)
    ]


def plain_advantage(row, rewards, groups, everyone, c):
    reward = rewards[row]
    others = [
        other
        for index, (other, group) in enumerate(zip(rewards, groups, strict=True))
        if group == groups[row] and index != row and other is not None
    ]
    needs_a_group = c.advantage_baseline != "none" or c.advantage_scale == "group"
    if not others and needs_a_group:
        return {"zero": 0.0, "reward": float(reward), "nan": NAN}[c.singleton_group]
    compared = others if c.advantage_baseline == "leave_one_out" else [*others, reward]
    centred = reward if c.advantage_baseline == "none" else reward - sum(compared) / len(compared)
    if c.advantage_scale == "none":
        return float(centred)
    spread = deviation(everyone if c.advantage_scale == "batch" else compared, c.advantage_ddof)
    divisor = {
        "add": spread + c.advantage_eps,
        "clamp": max(spread, c.advantage_eps),
        "skip": spread + c.advantage_eps if spread else 1.0,
    }[c.advantage_eps_mode]
    return float(centred) / divisor


def deviation(values, ddof):
    if len(values) <= ddof:
        return 0.0
    mean = sum(values) / len(values)
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - ddof))


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_of_every_convention(name, baseline, scale):
    rewards, groups = REWARDS[name]
    for ddof, mode, single in product((0, 1), ("add", "clamp", "skip"), ("zero", "reward", "nan")):
        conventions = Conventions(
            advantage_baseline=baseline,
            advantage_scale=scale,
            advantage_ddof=ddof,
            advantage_eps=1e-3,
            advantage_eps_mode=mode,
            singleton_group=single,
            nan_reward="exclude",
        )
        got = advantages(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), conventions)
        expected = plain_advantages(rewards, groups, conventions)
        assert got.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15, nan_ok=True), conventions


def plain_scores(logits, token, temperature):
    """The logprob of a token and the entropy of its distribution."""
    weights = [math.exp(logit / temperature) for logit in logits]
    probabilities = [weight / math.fsum(weights) for weight in weights]
    return math.log(probabilities[token]), -math.fsum(p * math.log(p) for p in probabilities if p > 0)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_logprobs_entropies_and_their_slopes(temperature):
    rng = torch.Generator().manual_seed(0)
    hidden = torch.randn(2, 3, 4, generator=rng, dtype=torch.float64)
    weight = torch.randn(5, 4, generator=rng, dtype=torch.float64)
    ids = torch.randint(5, (2, 3), generator=rng)
    logits = (hidden @ weight.t()).requires_grad_()
    pull = torch.randn(2, 2, 3, generator=rng, dtype=torch.float64)

    def value(moved):
        scores = [
            plain_scores(moved[row][place], int(ids[row, place]), temperature)
            for row, place in product(range(2), range(3))
        ]
        return scores, sum(
            float(pull[kind].flatten()[index]) * scored[kind] for index, scored in enumerate(scores) for kind in (0, 1)
        )

    expected, _ = value(logits.tolist())
    got = token_logprobs(logits, ids, temperature), entropy(logits, temperature)
    fused = fused_linear_logprobs_and_entropy(hidden, weight, ids, temperature, chunk=2)
    for kind in (0, 1):
        assert got[kind].flatten().tolist() == pytest.approx([scored[kind] for scored in expected])
        assert fused[kind].flatten().tolist() == pytest.approx([scored[kind] for scored in expected])
    (gradient,) = torch.autograd.grad((got[0] * pull[0] + got[1] * pull[1]).sum(), logits)
    for row, place, entry in product(range(2), range(3), range(5)):
        slope = 0.0
        for sign in (1, -1):
            moved = logits.tolist()
            moved[row][place][entry] += sign * 1e-6
            slope += sign * value(moved)[1] / 2e-6
        assert float(gradient[row, place, entry]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


GROUPS = [
    Group(
        [11, 12, 13],
        [
            Completion(
                [21, 22, 23, 2], [-0.1, NAN, -0.3, -0.4], token_versions=[4, 5, 5, 6], sampled=[True, False, True, True]
            ),
            Completion([24], None, finish_reason="length"),
        ],
        [1.0, 0.25],
        ref_logprobs=[[-1.0, -1.1, -1.2, -1.3], [-1.4]],
        item_id="a",
        policy_version=3,
    ),
    Group(
        [14],
        [Completion([25, 26], [-0.5, -0.6], sampled=[False, False]), Completion([], [])],
        [0.5, NAN],
        ref_logprobs=[[-2.0, -2.1], []],
        item_id="b",
        policy_version=7,
    ),
]


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("pad", [0, 2, -7])
@pytest.mark.parametrize("width", [None, 3, 6])
def test_each_cell_of_a_batch(side, pad, width):
    """Told cell by cell from the groups: a token stands, is attended, trained and scored where it was sampled and fits."""
    batch, _ = make_batch(GROUPS, pad, completion_len_buckets=width and [width], prompt_padding=side)
    rows = [(group, index) for group in GROUPS for index in range(len(group.completions))]
    width, longest = width or 4, 3
    for row, (group, index) in enumerate(rows):
        completion, prompt = group.completions[index], list(group.prompt_ids)
        kept = list(completion.token_ids)[:width]
        lead = longest - len(prompt) if side == "left" else 0
        trail = longest + width - lead - len(prompt) - len(kept)
        start = lead + len(prompt)
        assert batch.input_ids[row].tolist() == [pad] * lead + prompt + kept + [pad] * trail
        assert (
            batch.attention_mask[row].tolist() == [False] * lead + [True] * (start - lead + len(kept)) + [False] * trail
        )
        assert batch.position_ids[row].tolist() == [0] * lead + list(range(len(prompt) + len(kept))) + [0] * trail
        assert int(batch.completion_starts[row]) == start
        for place in range(width):
            is_there = place < len(kept)
            sampled = is_there and (completion.sampled is None or completion.sampled[place])
            scored = is_there and completion.logprobs is not None
            assert int(batch.completion_ids[row, place]) == (kept[place] if is_there else pad)
            assert bool(batch.completion_mask[row, place]) == sampled
            assert float(batch.old_logprobs[row, place]) == pytest.approx(
                completion.logprobs[place] if scored else NAN, nan_ok=True
            )
            assert float(batch.ref_logprobs[row, place]) == pytest.approx(
                group.ref_logprobs[index][place] if is_there else NAN, nan_ok=True
            )
        assert float(batch.rewards[row]) == pytest.approx(group.rewards[index], nan_ok=True)
        assert int(batch.group_ids[row]) == GROUPS.index(group)
        assert int(batch.policy_versions[row]) == min(completion.token_versions or [group.policy_version])
        assert batch.item_ids[row] == group.item_id


def alone(model, batch, temperature):
    """Logprob and entropy of each trained token, one list per row, from a forward pass over that row without padding."""
    scores = []
    for row, start in enumerate(batch.completion_starts.tolist()):
        ids = batch.input_ids[row][batch.attention_mask[row]]
        lead = int(batch.attention_mask[row].long().argmax())
        log_softmax = (model(input_ids=ids.unsqueeze(0)).logits[0] / temperature).log_softmax(dim=-1)
        places = batch.completion_mask[row].nonzero().flatten().tolist()
        before = [log_softmax[start - lead + place - 1] for place in places]
        tokens = [int(batch.completion_ids[row, place]) for place in places]
        scores.append(
            [(scored[token], -(scored.exp() * scored).sum()) for scored, token in zip(before, tokens, strict=True)]
        )
    return scores


@pytest.mark.parametrize("side", ["right", "left"])
def test_packed_rows_score_as_if_alone_whatever_the_padding_id(side):
    model = tiny_llama().double()
    batch, _ = make_batch(GROUPS, pad_token_id=-7, prompt_padding=side)
    batch.input_ids = batch.input_ids.clamp(min=0)
    got = packed_logprobs(model, batch, 0.7)
    expected = [float(logprob.detach()) for row in alone(model, batch, 0.7) for logprob, _ in row]
    assert got[batch.completion_mask].tolist() == pytest.approx(expected, rel=1e-6)
    assert got[~batch.completion_mask].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_mask_of_packed_rows_has_the_dtype_of_the_model(dtype):
    # torch 2.13 misreads another one, without an error, on processors without AVX-512.
    model, given = tiny_llama().to(dtype), []
    model.register_forward_pre_hook(lambda _, args, named: given.append(named["attention_mask"]), with_kwargs=True)
    batch, _ = make_batch(GROUPS, pad_token_id=0)
    packed_logprobs(model, batch, 1.0)
    assert [mask.dtype for mask in given] == [dtype]


UPDATE = [
    Group([5, 6], [Completion([7, 2], [-1.0, -2.0]), Completion([8, 9, 2], [-3.0, -1.0, -0.5])], [1.0, 0.0]),
    Group([10], [Completion([3, 4, 5], [-2.0] * 3, sampled=[True, False, True]), Completion([6], [-1.5])], [0.2, 0.7]),
]


@pytest.mark.parametrize("max_grad_norm", [None, 1e3, 0.1])
@pytest.mark.parametrize(
    "changes",
    [
        {"kl_coef": 0.3, "entropy_coef": 0.1},
        {"kl_coef": 0.3, "kl_score_term": True, "kl_output_clamp": 1.0, "aggregation": "token_mean"},
        {"kl_coef": 0.3, "kl_estimator": "k1", "kl_placement": "reward", "ratio_level": "sequence"},
        {"old_logprobs": "trainer", "importance_level": "token", "clip_low": None, "clip_high": None},
    ],
    ids=str,
)
def test_a_whole_update(changes, max_grad_norm):
    """Rows scored alone, advantages, slopes of the plain loss, chain rule, norm, step: all of it a second time."""
    c = GRPO.replace(temperature=0.7, max_grad_norm=max_grad_norm, **changes)
    model, ref_model = tiny_llama(1).double(), tiny_llama(2).double()
    batch, _ = make_batch(UPDATE, pad_token_id=0)
    state = SimpleNamespace(model=model, ref_model=ref_model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    state.scheduler = torch.optim.lr_scheduler.ConstantLR(state.optimizer, factor=1.0)

    scores, ref = alone(model, batch, 0.7), alone(ref_model, batch, 0.7)
    logprobs = [[float(logprob.detach()) for logprob, _ in row] for row in scores]
    sampler = [batch.old_logprobs[row][batch.completion_mask[row]].tolist() for row in range(4)]
    old = logprobs if c.old_logprobs == "trainer" else sampler
    references = [[float(logprob.detach()) for logprob, _ in row] for row in ref]
    rewards = batch.rewards.tolist()
    if c.kl_placement == "reward":
        for row in range(4):
            rewards[row] -= c.kl_coef * sum(p - q for p, q in zip(old[row], references[row], strict=True))
    given = plain_advantages(rewards, batch.group_ids.tolist(), c)
    rows = [
        plain_loss.Row(
            int(batch.group_ids[row]),
            [
                plain_loss.Token(*numbers, float(scored[1].detach()), given[row])
                for *numbers, scored in zip(old[row], references[row], sampler[row], scores[row], strict=True)
            ],
        )
        for row in range(4)
    ]
    slopes = plain_loss.gradient(rows, logprobs, c)
    pulled = sum(
        slopes[row][place] * scores[row][place][0] - c.entropy_coef * share(rows, row, place, c) * scores[row][place][1]
        for row in range(4)
        for place in range(len(slopes[row]))
    )
    gradient = torch.autograd.grad(pulled, list(model.parameters()))
    norm = math.sqrt(sum(float(each.square().sum()) for each in gradient))
    factor = 1.0 if max_grad_norm is None else min(1.0, max_grad_norm / norm)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    metrics = train_step(state, batch, c)

    for was, slope, parameter in zip(before, gradient, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach(), was - 0.5 * factor * slope, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(parameter.detach() - was, -0.5 * factor * slope, rtol=1e-3, atol=1e-6)
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert (metrics["lr"], metrics["tokens"]) == (0.5, 15)
    assert metrics["reward"] == pytest.approx(sum(batch.rewards.tolist()) / 4)
    expected = plain_loss.metrics(rows, logprobs, c)
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-6)


def share(rows, row, place, c):
    """What the aggregation multiplies one token by."""
    terms = [[0.0] * len(each.tokens) for each in rows]
    terms[row][place] = 1.0
    return plain_loss.aggregate(rows, terms, c)


def test_signal_and_length_over_all_small_groups():
    for rewards in product((0.0, 0.1, 0.3), repeat=3):
        for threshold in (0.0, 0.15, 0.25):
            differs = any(abs(left - right) > threshold for left in rewards for right in rewards)
            assert has_signal(torch.tensor(rewards, dtype=torch.float64), threshold) == differs
    for length, limit, reason in product(range(4), range(4), ("stop", "length", "abort")):
        completion = Completion([5] * length, finish_reason=reason)
        assert is_overlong(completion, limit) == (length > limit or reason == "length")


def test_overlong_completions_lose_reward_line_by_line():
    for limit, buffer, penalty in product((6, 9), (1, 4, 6), (0.5, 1.0, 2.0)):
        lengths = list(range(limit + 1))
        expected = [1 - penalty * max(length - limit + buffer, 0) / buffer for length in lengths]
        given = Lengths(torch.tensor(lengths), torch.full((limit + 1,), 3), limit, max_prompt_tokens=5)
        declared = GRPO.replace(overlong_buffer=buffer, overlong_penalty=penalty)
        shaped = shape_rewards(torch.ones(limit + 1, dtype=torch.float64), given, declared)
        assert shaped.tolist() == pytest.approx(expected, abs=1e-12)


def test_completions_that_were_cut_keep_their_rows_and_lose_their_mask():
    rows = [Completion([5, 6, 2]), Completion([5, 6, 7, 8], finish_reason="length"), Completion([5, 6, 7, 8, 2])]
    for bucket, masked in ((None, {1}), (4, {1, 2})):
        buckets = None if bucket is None else [bucket]
        group = Group([9], rows, [0.0, 1.0, 2.0])
        batch, _ = make_batch([group], 0, completion_len_buckets=buckets, mask_truncated=True)
        lengths = [min(len(row.token_ids), bucket or 9) for row in rows]
        trained = [0 if row in masked else length for row, length in enumerate(lengths)]
        assert batch.completion_mask.sum(dim=1).tolist() == trained
        assert batch.rewards.tolist() == [0.0, 1.0, 2.0]


def test_every_item_is_dealt_out_evenly_to_every_number_of_ranks():
    for items, ranks, shuffle in product(range(1, 8), range(1, 5), (True, False)):
        parts = [data_order(items, 3, rank, ranks, shuffle=shuffle, seed=1) for rank in range(ranks)]
        visited = [part[step] for step in range(len(parts[0])) for part in parts]
        assert {len(part) for part in parts} == {math.ceil(items / ranks)}
        assert sorted(visited[:items]) == list(range(items))
        assert visited[items:] == [visited[index % items] for index in range(len(visited) - items)]
        assert shuffle or visited[:items] == list(range(items))


def test_accumulation_steps_make_up_the_batch_or_are_refused():
    for batch_size, micro, ranks, shared in product(range(1, 13), range(1, 5), range(1, 5), range(1, 5)):
        exact = [
            steps for steps in range(1, 13) if steps * micro * ranks == batch_size * shared and ranks % shared == 0
        ]
        if exact:
            assert [accumulation_steps(batch_size, micro, ranks, shared)] == exact
        else:
            with pytest.raises(ValueError, match="rows"):
                accumulation_steps(batch_size, micro, ranks, shared)
