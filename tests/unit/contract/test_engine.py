"""The engine in the trainer's process samples as a model says and caches prefixes as engines do."""

import asyncio
import math
from typing import Any

import pytest
import torch

from rlcanary.checks.worlds.samples import distribution, gap, p_value, shortfall, trainer_logprobs
from rlcanary.contract.engine import BLOCK, InProcessEngine
from rlcanary.tiny_models import tiny_llama

SHORT = [5, 6, 7]
LONG = list(range(3, 3 + 3 * BLOCK))
GREEDY = {"temperature": 0.0, "max_new_tokens": 6}


@pytest.fixture
def model() -> Any:
    return tiny_llama()


@pytest.fixture
def engine(model: Any) -> InProcessEngine:
    return InProcessEngine(model)


@pytest.fixture
def other_weights() -> dict[str, torch.Tensor]:
    return dict(tiny_llama(1).named_parameters())


def test_greedy_continuation_is_the_models_argmax(engine: InProcessEngine, model: Any) -> None:
    prompts = [SHORT, LONG, [9]]
    groups = engine.generate(prompts, GREEDY)
    assert [len(group) for group in groups] == [1, 1, 1]
    for prompt, (completion,) in zip(prompts, groups, strict=True):
        assert len(completion.token_ids) == 6
        assert shortfall(model, prompt, completion.token_ids) < 1e-4


def test_greedy_reports_raw_logprobs(engine: InProcessEngine, model: Any) -> None:
    ((completion,),) = engine.generate([SHORT], GREEDY)
    expected = trainer_logprobs(model, SHORT, completion.token_ids)
    torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(("mode", "scored_at"), [("processed", 0.6), ("raw", 1.0)])
def test_logprobs_are_those_of_the_temperature_or_raw(
    engine: InProcessEngine, model: Any, mode: str, scored_at: float
) -> None:
    sampling = {"temperature": 0.6, "n": 3, "max_new_tokens": 5, "logprobs": mode}
    for prompt, group in zip([SHORT, LONG], engine.generate([SHORT, LONG], sampling), strict=True):
        for completion in group:
            expected = trainer_logprobs(model, prompt, completion.token_ids, scored_at)
            torch.testing.assert_close(torch.tensor(completion.logprobs).double(), expected, rtol=0, atol=2e-4)


def test_processed_logprobs_with_a_filter_are_those_of_the_kept_tokens(engine: InProcessEngine, model: Any) -> None:
    kept = distribution(model, SHORT, top_k=3)
    (group,) = engine.generate([SHORT], {"n": 50, "max_new_tokens": 1, "top_k": 3})
    for completion in group:
        assert math.exp(completion.logprobs[0]) == pytest.approx(float(kept[completion.token_ids[0]]), rel=1e-4)


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"temperature": 2.0}, {"top_k": 2}, {"top_p": 0.7}])
def test_first_tokens_follow_the_distribution(engine: InProcessEngine, model: Any, options: dict[str, Any]) -> None:
    (group,) = engine.generate([SHORT], {"n": 2000, "max_new_tokens": 1, "seed": 0, **options})
    assert p_value([completion.token_ids[0] for completion in group], distribution(model, SHORT, **options)) > 1e-3


def test_top_p_keeps_the_token_that_passes_the_bound(engine: InProcessEngine, model: Any) -> None:
    likeliest = int(distribution(model, SHORT).argmax())
    (group,) = engine.generate([SHORT], {"n": 20, "max_new_tokens": 1, "top_p": 1e-6})
    assert {completion.token_ids[0] for completion in group} == {likeliest}


def test_seed_repeats_and_no_seed_does_not(engine: InProcessEngine) -> None:
    def sampled(seed: int | None) -> list[Any]:
        (group,) = engine.generate([SHORT], {"n": 4, "max_new_tokens": 8, "seed": seed})
        return [tuple(completion.token_ids) for completion in group]

    assert sampled(1) == sampled(1) != sampled(2)
    assert len(set(sampled(1))) == 4
    assert sampled(None) != sampled(None)


def test_sampling_leaves_the_global_random_state(engine: InProcessEngine) -> None:
    before = torch.get_rng_state()
    engine.generate([SHORT], {"n": 4})
    assert torch.equal(before, torch.get_rng_state())


def test_any_eos_id_ends_a_completion_and_is_part_of_it(engine: InProcessEngine) -> None:
    ends = tuple(range(0, 64, 4))
    (group,) = engine.generate([SHORT], {"n": 40, "max_new_tokens": 6, "eos_token_ids": ends, "seed": 0})
    assert {completion.finish_reason for completion in group} == {"stop", "length"}
    for completion in group:
        assert not set(completion.token_ids[:-1]) & set(ends)
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in ends)
        assert completion.finish_reason == "stop" or len(completion.token_ids) == 6
        assert len(completion.logprobs) == len(completion.token_ids) == len(completion.token_versions)


def test_text_is_decoded_or_the_ids_written_out(engine: InProcessEngine, model: Any) -> None:
    ((completion,),) = engine.generate([SHORT], GREEDY)
    assert completion.text == " ".join(map(str, completion.token_ids))
    ((completion,),) = InProcessEngine(model, decode=lambda ids: f"{len(ids)} ids").generate([SHORT], GREEDY)
    assert completion.text == "6 ids"


def test_prefix_cache_changes_no_result(engine: InProcessEngine, model: Any) -> None:
    sharing = [LONG, LONG, [*LONG[: 2 * BLOCK], 60, 61], [*LONG, 62], LONG[:BLOCK]]
    for prompt in sharing:
        assert gap(engine, model, prompt) < 1e-4


def test_prefix_cache_saves_the_forward_pass_of_whole_blocks(engine: InProcessEngine) -> None:
    lengths = []
    engine.model.register_forward_pre_hook(
        lambda module, inputs, options: lengths.append(options["input_ids"].shape[1]), with_kwargs=True
    )
    one_token = {"max_new_tokens": 1}
    engine.generate([[*LONG, 60]], one_token)
    engine.generate([[*LONG, 61]], one_token)
    engine.generate([[9, *LONG]], one_token)
    assert lengths == [len(LONG) + 1, 1, len(LONG) + 1]


def test_cached_prefixes_outlive_new_weights_until_the_cache_is_reset(
    engine: InProcessEngine, other_weights: dict[str, torch.Tensor]
) -> None:
    engine.generate([LONG], GREEDY)
    assert engine.load_weights(other_weights.items()) == set(other_weights)
    assert gap(engine, tiny_llama(1), SHORT) < 1e-4
    assert gap(engine, tiny_llama(1), LONG) > 1e-2
    engine.reset_prefix_cache()
    assert gap(engine, tiny_llama(1), LONG) < 1e-4


def test_engine_keeps_a_copy_and_counts_no_versions_itself(
    model: Any, engine: InProcessEngine, other_weights: dict[str, torch.Tensor]
) -> None:
    engine.load_weights(other_weights.items())
    assert engine.version == 0
    assert torch.equal(model.lm_head.weight, tiny_llama().lm_head.weight)


def test_tied_weights_load_under_either_name() -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        engine = InProcessEngine(tiny_llama(tied=True))
        weight = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
        engine.load_weights([(name, weight)])
        assert torch.equal(engine.model.lm_head.weight, weight)
        assert torch.equal(engine.model.model.embed_tokens.weight, weight)


def test_unknown_name_and_wrong_shape_are_refused(engine: InProcessEngine) -> None:
    with pytest.raises(KeyError, match=r"module\.lm_head\.weight"):
        engine.load_weights([("module.lm_head.weight", torch.zeros(64, 32))])
    with pytest.raises(ValueError, match=r"\(32, 64\) .* \(64, 32\)"):
        engine.load_weights([("lm_head.weight", torch.zeros(32, 64))])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"n": 0}, "n=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"logprobs": "none"}, "logprobs='none'"),
    ],
)
def test_sampling_out_of_range_is_refused(engine: InProcessEngine, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.generate([SHORT], options)


def test_unknown_sampling_option_and_empty_prompt_are_refused(engine: InProcessEngine) -> None:
    with pytest.raises(TypeError, match="max_tokens"):
        engine.generate([SHORT], {"max_tokens": 3})
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        engine.generate([[]], {})


def test_concurrent_requests_end_when_they_are_done_with_the_results_of_one_alone(engine: InProcessEngine) -> None:
    ended = []

    async def request(prompt: list[int], length: int) -> Any:
        completions = await engine.agenerate(prompt, {"temperature": 0.0, "max_new_tokens": length})
        ended.append(length)
        return completions[0].token_ids

    async def all_requests() -> list[Any]:
        return await asyncio.gather(request(LONG, 9), request(SHORT, 3), request([9], 6))

    together = asyncio.run(all_requests())
    assert ended == [3, 6, 9]
    for prompt, length, token_ids in zip([LONG, SHORT, [9]], (9, 3, 6), together, strict=True):
        ((alone,),) = engine.generate([prompt], {"temperature": 0.0, "max_new_tokens": length})
        assert token_ids == alone.token_ids


def test_sync_during_a_request_mixes_two_policies_and_says_so(
    engine: InProcessEngine, other_weights: dict[str, torch.Tensor]
) -> None:
    async def sync_after(turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)
        engine.load_weights(other_weights.items())
        engine.reset_prefix_cache()
        engine.version += 1

    async def both() -> Any:
        completions, _ = await asyncio.gather(engine.agenerate(SHORT, GREEDY), sync_after(2))
        return completions[0]

    completion = asyncio.run(both())
    assert set(completion.token_versions) == {0, 1}
    assert list(completion.token_versions) == sorted(completion.token_versions)
    first_new = completion.token_versions.index(1)
    logprobs = torch.tensor(completion.logprobs).double()
    old = trainer_logprobs(tiny_llama(), SHORT, completion.token_ids)
    new = trainer_logprobs(tiny_llama(1), SHORT, completion.token_ids)
    torch.testing.assert_close(logprobs[:first_new], old[:first_new], rtol=0, atol=1e-4)
    # New weights on keys and values of the old ones: neither policy.
    assert not torch.allclose(logprobs[first_new:], new[first_new:], atol=1e-2)
    assert not torch.allclose(logprobs[first_new:], old[first_new:], atol=1e-2)
