"""The transformers policy samples and scores what the model says, whatever the model's own settings are."""

import asyncio
import copy
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from waiting import HANG_S

from rlcanary.checks.worlds.samples import distribution, gap, p_value, scored, shortfall, trainer_logprobs
from rlcanary.contract.engine import InProcessEngine
from rlcanary.grpo.engines.containers import Masks, Tokens
from rlcanary.grpo.engines.transformers_policy import TransformersPolicy
from rlcanary.tiny_models import EOS_ID, PAD_ID, tiny_llama, tiny_qwen2, tiny_tokenizer

SHORT, MIDDLE, LONG = [5, 6, 7], [9, PAD_ID, EOS_ID, 11, 12], list(range(3, 43))
PROMPTS = [SHORT, LONG, MIDDLE]
DRAWS = {"max_new_tokens": 1, "n": 64, "eos_token_ids": [], "seed": 0}


@pytest.fixture
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def policy(model: Any) -> TransformersPolicy:
    return TransformersPolicy(model, tiny_tokenizer())


def batch_sizes(model: Any) -> list[int]:
    """Note the rows of each forward pass from now on."""
    sizes: list[int] = []
    model.register_forward_pre_hook(
        lambda module, inputs, options: sizes.append(len(options["input_ids"])), with_kwargs=True
    )
    return sizes


def far(completions: list[Any], model: Any, prompt: list[int], temperature: float = 1.0) -> float:
    """How far the reported logprobs are from the model's, in nats."""
    return max(
        float((torch.tensor(each.logprobs) - trainer_logprobs(model, prompt, each.token_ids, temperature)).abs().max())
        for each in completions
    )


@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "long", "middle"])
def test_greedy_continuation_is_the_models(policy: TransformersPolicy, model: Any, prompt: list[int]) -> None:
    assert gap(policy, model, prompt) < 1e-4


def test_prompts_of_unequal_length_do_not_change_each_other(policy: TransformersPolicy, model: Any) -> None:
    greedy = {"do_sample": False, "max_new_tokens": 6, "eos_token_ids": []}
    together = [completion.token_ids for (completion,) in policy.generate(PROMPTS, greedy)]
    assert together == [policy.generate([prompt], greedy)[0][0].token_ids for prompt in PROMPTS]
    for prompt, (completion,) in zip(
        PROMPTS, InProcessEngine(model).generate(PROMPTS, {"temperature": 0, "max_new_tokens": 6}), strict=True
    ):
        assert shortfall(model, prompt, completion.token_ids) < 1e-4
        assert completion.token_ids in together


@pytest.mark.parametrize(("mode", "scored_at"), [("processed", 0.6), ("raw", 1.0)])
def test_logprobs_are_those_of_the_temperature_or_raw(
    policy: TransformersPolicy, model: Any, mode: str, scored_at: float
) -> None:
    sampling = {"temperature": 0.6, "n": 3, "max_new_tokens": 5, "logprobs": mode}
    for prompt, group in zip(PROMPTS, policy.generate(PROMPTS, sampling), strict=True):
        assert len(group) == 3
        assert far(group, model, prompt, scored_at) < 2e-4


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}], ids=["none", "temperature", "top_k", "top_p"]
)
def test_draws_follow_the_distribution_that_was_asked_for(
    policy: TransformersPolicy, model: Any, filters: dict[str, Any]
) -> None:
    (group,) = policy.generate([SHORT], {**DRAWS, "n": 2000, **filters})
    expected_V = distribution(model, SHORT, **filters)
    assert p_value([completion.token_ids[0] for completion in group], expected_V) > 1e-4
    for completion in group[:20]:
        probability = expected_V[completion.token_ids[0]]
        assert completion.logprobs[0] == pytest.approx(float(probability.log()), abs=1e-4)


def test_tokens_below_min_p_are_not_drawn_and_the_others_in_proportion(policy: TransformersPolicy, model: Any) -> None:
    plain_V = distribution(model, SHORT)
    kept_V = plain_V * (plain_V >= 0.4 * plain_V.max())
    (group,) = policy.generate([SHORT], {**DRAWS, "n": 2000, "min_p": 0.4})
    assert 1 < int((kept_V > 0).sum()) < 20
    assert p_value([completion.token_ids[0] for completion in group], kept_V / kept_V.sum()) > 1e-4


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_are_taken_for_tokens_of_the_completion_alone(
    policy: TransformersPolicy, model: Any, name: str
) -> None:
    request = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True, name: 2.0}
    ((completion,),) = policy.generate([LONG], request)
    ids = list(completion.token_ids)
    scores_TV = scored(model, LONG, ids)
    for place, token in enumerate(ids):
        counts = Counter(ids[:place])
        penalty_V = torch.zeros(64, dtype=torch.float64)
        for seen, count in counts.items():
            penalty_V[seen] = 2.0 * (count if name == "frequency_penalty" else 1)
        best = (scores_TV[place] - penalty_V).amax()
        assert float(best - (scores_TV[place] - penalty_V)[token]) < 1e-4
    assert Counter(ids).most_common(1)[0][1] < 24


def test_no_completion_ends_before_its_least_tokens(policy: TransformersPolicy) -> None:
    request = {"n": 16, "max_new_tokens": 8, "min_tokens": 4, "seed": 0, "eos_token_ids": list(range(0, 64, 2))}
    (group,) = policy.generate([SHORT], request)
    lengths = {len(completion.token_ids) for completion in group}
    assert min(lengths) == 5
    assert all(completion.token_ids[place] % 2 for completion in group for place in range(4))


def test_requests_of_other_seeds_share_a_batch_and_draw_what_they_would_draw_alone(model: Any) -> None:
    batching = TransformersPolicy(model, tiny_tokenizer(), min_batch_size=3, batching_timeout=60.0)
    requests = [{"max_new_tokens": 6, "eos_token_ids": [], "seed": seed} for seed in range(3)]

    async def asked() -> list[Any]:
        return await asyncio.gather(*(batching.agenerate(SHORT, request) for request in requests))

    together = asyncio.run(asked())
    assert batching.batcher.state().batches == 1
    alone = [TransformersPolicy(model, tiny_tokenizer()).generate([SHORT], request)[0] for request in requests]
    assert [each.token_ids for (each,) in together] == [each.token_ids for (each,) in alone]


def test_a_new_version_has_the_same_model_and_other_settings(policy: TransformersPolicy) -> None:
    other = policy.get_new_version(eos_token_ids=[7])
    assert (other.model, other.tokenizer) == (policy.model, policy.tokenizer)
    assert (policy.eos_token_ids, other.eos_token_ids) == ((2,), (7,))


@pytest.mark.parametrize("strategy", ["response", "assistant", "attention", "own"])
def test_distributions_are_those_that_the_selected_tokens_are_scored_by(
    policy: TransformersPolicy, strategy: Any
) -> None:
    tokens = Tokens.of([SHORT, LONG], [[7, 8, 9], [10]])
    masks = Masks(
        [torch.zeros(len(row), dtype=torch.bool) for row in tokens.prompt],
        [torch.tensor([True, False, True]), torch.tensor([True])],
    )
    if strategy == "own":
        strategy = [torch.arange(len(row)) % 2 == 1 for row in tokens.full]
    chosen = masks.select(strategy)
    found = policy.distributions(tokens, masks, strategy, temperature=0.7)
    expected = policy.logprobs(tokens, masks, strategy, temperature=0.7).full
    for row, mask, distribution_K, scored_S in zip(tokens.full, chosen, found, expected, strict=True):
        mask[0] = False
        assert distribution_K.log_prob(row[mask]).tolist() == pytest.approx(scored_S[mask].tolist(), abs=1e-4)
        assert distribution_K.logits.requires_grad


def test_settings_of_the_model_do_not_leak_into_requests(model: Any) -> None:
    odd = copy.deepcopy(model)
    odd.generation_config.update(
        top_k=1,
        temperature=0.1,
        repetition_penalty=5.0,
        min_p=0.9,
        max_length=4,
        num_return_sequences=2,
        do_sample=True,
    )
    request = {"n": 2, "max_new_tokens": 6, "seed": 0, "eos_token_ids": []}
    plain, leaking = (TransformersPolicy(each, tiny_tokenizer()).generate(PROMPTS, request) for each in (model, odd))
    assert leaking == plain
    assert odd.generation_config.top_k == 1


def test_padding_is_not_penalised_as_a_repetition(policy: TransformersPolicy, model: Any) -> None:
    request = {**DRAWS, "n": 1, "do_sample": False, "repetition_penalty": 50.0, "logprobs": False}
    likes_padding = copy.deepcopy(model)
    bias_V = torch.zeros(64)
    bias_V[PAD_ID] = 40.0
    likes_padding.lm_head.register_forward_hook(lambda module, inputs, output: output + bias_V)
    policy.model = likes_padding
    together = policy.generate([SHORT, LONG], request)
    assert together[0][0].token_ids == [PAD_ID]
    assert together[0] == policy.generate([SHORT], request)[0]


def test_seed_repeats_whoever_is_beside_and_no_seed_does_not(policy: TransformersPolicy) -> None:
    def sampled(prompts: list[list[int]], **options: Any) -> list[Any]:
        request = {"n": 4, "max_new_tokens": 8, "eos_token_ids": [], **options}
        return [[completion.token_ids for completion in group] for group in policy.generate(prompts, request)]

    alone, together = sampled([SHORT], seed=1), sampled([LONG, SHORT], seed=1)
    assert together[1] == alone[0] != sampled([SHORT], seed=2)[0]
    assert len({tuple(ids) for ids in alone[0]}) == 4
    assert sampled([SHORT]) != sampled([SHORT])


def test_sampling_leaves_the_trainers_random_state_and_dropout_as_they_are(model: Any) -> None:
    dropping = tiny_llama(dropout=0.5).train()
    policy = TransformersPolicy(dropping, tiny_tokenizer())
    before = torch.get_rng_state()
    (group,) = policy.generate([SHORT], {"n": 4, "seed": 0, "eos_token_ids": []})
    assert torch.equal(before, torch.get_rng_state())
    assert dropping.training
    assert dropping.model.layers[0].self_attn.training
    assert far(group, model, SHORT) < 1e-4


def test_any_end_is_part_of_its_completion_and_padding_is_not(policy: TransformersPolicy) -> None:
    ends = list(range(0, 64, 4))
    (group,) = policy.generate([SHORT], {"n": 40, "max_new_tokens": 6, "eos_token_ids": ends, "seed": 0})
    assert {completion.finish_reason for completion in group} == {"stop", "length"}
    for completion in group:
        assert not set(completion.token_ids[:-1]) & set(ends)
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in ends)
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 6
        assert len(completion.logprobs) == len(completion.token_ids) == len(completion.token_versions)


def test_ends_are_those_of_model_and_tokenizer_unless_the_request_names_its_own(model: Any) -> None:
    model.generation_config.eos_token_id = [40, 41]
    assert TransformersPolicy(model, tiny_tokenizer()).eos_token_ids == (40, 41, EOS_ID)
    model.generation_config.eos_token_id = None
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="give eos_token_ids"):
        TransformersPolicy(model, tokenizer)


def test_stop_sequence_ends_a_completion_and_one_begun_in_the_prompt_does_not(policy: TransformersPolicy) -> None:
    request = {"do_sample": False, "max_new_tokens": 8, "eos_token_ids": []}
    ((free,),) = policy.generate([SHORT], request)
    third, fourth = (f"t{token}" for token in free.token_ids[2:4])
    ((stopped,),) = policy.generate([SHORT], {**request, "stop": [f"{third} {fourth}"]})
    assert stopped.token_ids == free.token_ids[:4]
    assert stopped.finish_reason == "stop"
    assert stopped.text.endswith(f"{third} {fourth}")
    ((begun,),) = policy.generate([SHORT], {**request, "stop": [f"t{SHORT[-1]} t{free.token_ids[0]}"]})
    assert (begun.token_ids, begun.finish_reason) == (free.token_ids, "length")


def test_unsuitable_requests_are_refused(policy: TransformersPolicy) -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        policy.generate([SHORT, []], {})
    with pytest.raises(ValueError, match="did you mean"):
        policy.generate([SHORT], {"max_token": 3})
    with pytest.raises(ValueError, match="max_batch_size=0"):
        TransformersPolicy(policy.model, policy.tokenizer, max_batch_size=0)


def test_small_batches_give_what_one_batch_gives(policy: TransformersPolicy, model: Any) -> None:
    small = TransformersPolicy(model, tiny_tokenizer(), max_batch_size=2)
    request = {"n": 2, "seed": 3, "max_new_tokens": 5}
    whole = policy.generate(PROMPTS, request)
    assert [[c.token_ids for c in group] for group in small.generate(PROMPTS, request)] == [
        [c.token_ids for c in group] for group in whole
    ]
    tokens = Tokens.of(PROMPTS, [[1, 2], [3], []])
    for left, right in zip(small.logprobs(tokens).full, policy.logprobs(tokens).full, strict=True):
        torch.testing.assert_close(left, right, equal_nan=True, atol=1e-5, rtol=0)


def test_scores_are_the_models_and_nan_where_the_strategy_does_not_select(
    policy: TransformersPolicy, model: Any
) -> None:
    tokens = Tokens.of(PROMPTS, [[8, PAD_ID], [EOS_ID], []])
    for temperature in (1.0, 0.6):
        whole = policy.logprobs(tokens, strategy="attention", temperature=temperature)
        for row, ids in zip(whole.full, tokens.full, strict=True):
            exact_TV = scored(model, ids[:1].tolist(), ids[1:].tolist(), temperature)
            torch.testing.assert_close(row[1:].double(), exact_TV.gather(1, ids[1:, None])[:, 0], atol=1e-4, rtol=0)
            assert row[0].isnan()
    response = policy.logprobs(tokens)
    assert all(row.isnan().all() for row in response.prompt)
    assert not any(row.isnan().any() for row in response.response)
    masks = Masks.of(tokens)
    own = [torch.zeros_like(row) for row in masks.full]
    own[0][4] = True
    assert [int((~row.isnan()).sum()) for row in policy.logprobs(tokens, masks, own).full] == [1, 0, 0]


def test_sampled_logprobs_are_those_that_scoring_gives(policy: TransformersPolicy) -> None:
    groups = policy.generate(PROMPTS, {"n": 2, "temperature": 0.6, "max_new_tokens": 6})
    tokens = Tokens.of(
        [prompt for prompt in PROMPTS for _ in range(2)], [each.token_ids for group in groups for each in group]
    )
    again = policy.logprobs(tokens, temperature=0.6)
    sampled = [torch.tensor(each.logprobs) for group in groups for each in group]
    assert max(float((a - b).abs().max()) for a, b in zip(again.response, sampled, strict=True)) < 1e-4


def test_scoring_is_differentiable_and_without_dropout(model: Any) -> None:
    policy = TransformersPolicy(tiny_llama(dropout=0.5).train(), tiny_tokenizer())
    tokens = Tokens.of([SHORT], [[8, 9]])
    first, again = policy.logprobs(tokens), policy.logprobs(tokens)
    assert torch.equal(first.response[0], again.response[0])
    first.response[0].sum().backward()
    assert float(policy.model.lm_head.weight.grad.abs().sum()) > 0


def test_masks_of_other_rows_are_refused(policy: TransformersPolicy) -> None:
    with pytest.raises(ValueError, match="do not belong to"):
        policy.logprobs(Tokens.of([SHORT], [[1]]), Masks.of(Tokens.of([SHORT], [[1, 2]])))


def test_concurrent_requests_share_batches_and_come_back_to_their_callers(
    policy: TransformersPolicy,
) -> None:
    request = {"do_sample": False, "max_new_tokens": 4, "eos_token_ids": []}
    prompts = [[3 + index, 4] for index in range(40)]
    expected = [policy.generate([prompt], request)[0] for prompt in prompts]
    sizes = batch_sizes(policy.model)
    together = [future.result(HANG_S) for future in [policy.submit(prompt, request) for prompt in prompts]]
    assert [[each.token_ids for each in group] for group in together] == [
        [each.token_ids for each in group] for group in expected
    ]
    # One pass over each prompt, and three per batch over their completions.
    assert len(sizes) < len(prompts) + 3 * 10

    async def all_at_once() -> Any:
        return await asyncio.gather(*(policy.agenerate(prompt, request) for prompt in prompts))

    in_turns = asyncio.run(all_at_once())
    assert [[each.token_ids for each in group] for group in in_turns] == [
        [each.token_ids for each in group] for group in expected
    ]


def test_threads_share_a_batch_once_there_are_enough_of_them(model: Any) -> None:
    policy = TransformersPolicy(model, tiny_tokenizer(), min_batch_size=4, batching_timeout=HANG_S)
    request = {"do_sample": False, "max_new_tokens": 4, "eos_token_ids": []}
    prompts = [[3 + index, 4] for index in range(4)]
    expected = [group[0].token_ids for group in policy.generate(prompts, request)]
    sizes = batch_sizes(model)
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda prompt: policy.submit(prompt, request).result(HANG_S), prompts))
    assert [group[0].token_ids for group in together] == expected
    # The first token follows from the pass over the prompt.
    assert sizes == [1, 1, 1, 1, 4, 4, 4]
    left = policy.submit(prompts[0], request)
    assert policy.batcher.state().waiting == 1
    policy.batcher.cleanup(flush=True)
    assert left.result(0)[0].token_ids == expected[0]


def test_a_failing_request_does_not_break_others(policy: TransformersPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(prompt: list[int]) -> Any:
        return await policy.agenerate(prompt, {"max_new_tokens": 2})

    async def both() -> Any:
        return await asyncio.gather(ask([10**6]), ask([]), ask(SHORT), return_exceptions=True)

    unknown, empty, good = asyncio.run(both())
    assert "prompt 0 has the id 1000000, outside the vocabulary of 64" in str(unknown)
    assert "prompt 0 is empty" in str(empty)
    assert len(good) == 1
    with monkeypatch.context() as patch:
        patch.setattr(policy.model, "forward", lambda **options: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            asyncio.run(ask(SHORT))
    assert len(asyncio.run(ask(SHORT))) == 1


def test_weights_load_by_name_and_completions_carry_the_version(policy: TransformersPolicy) -> None:
    other = tiny_llama(1)
    assert policy.load_weights(other.named_parameters()) == set(dict(other.named_parameters()))
    policy.reset_prefix_cache()
    policy.version += 1
    assert gap(policy, other, LONG) < 1e-4
    ((completion,),) = policy.generate([SHORT], {"max_new_tokens": 3, "eos_token_ids": []})
    assert completion.token_versions == [1, 1, 1]
    with pytest.raises(KeyError, match="no parameter or buffer 'head'"):
        policy.load_weights([("head", torch.zeros(1))])
    with pytest.raises(ValueError, match=r"weight of shape \(1,\)"):
        policy.load_weights([("lm_head.weight", torch.zeros(1))])


def test_other_architectures_sample_as_they_score() -> None:
    model = tiny_qwen2()
    policy = TransformersPolicy(model, tiny_tokenizer())
    groups = policy.generate(PROMPTS, {"n": 2, "max_new_tokens": 5, "eos_token_ids": []})
    for prompt, group in zip(PROMPTS, groups, strict=True):
        assert far(group, model, prompt) < 1e-4


def test_request_without_logprobs_has_none(policy: TransformersPolicy) -> None:
    (completion,) = policy.generate([SHORT], {"logprobs": False, "max_new_tokens": 2})[0]
    assert completion.logprobs is None
