"""The vLLM policy on a real engine: it says what the transformers policy says, for the same request objects."""

import asyncio
import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_engines import IN_THE_ENGINE

from rlcanary.checks.worlds.samples import gap, trainer_logprobs
from rlcanary.contract.sampling import Sampling
from rlcanary.errors import UserError
from rlcanary.grpo.engines.containers import Tokens
from rlcanary.grpo.engines.engine_pool import RequestRefused
from rlcanary.grpo.engines.one_engine import start_engine
from rlcanary.grpo.engines.transformers_policy import TransformersPolicy
from rlcanary.grpo.engines.vllm_policy import VllmPolicy, engine_options
from rlcanary.grpo.plan.models import character_tokenizer, save_model
from rlcanary.grpo.plan.plan import SamplerRole
from rlcanary.tiny_models import EOS_ID, PAD_ID, tiny_qwen2

pytestmark = pytest.mark.vllm

SHORT, MIDDLE, LONG = [5, 6, 7], [9, PAD_ID, EOS_ID, 11, 12], [token % 60 + 3 for token in range(160)]
PROMPTS = [SHORT, LONG, MIDDLE]


@pytest.fixture(scope="module")
def vllm_engine_options(vllm_engine_options: dict[str, Any]) -> dict[str, Any]:
    model = vllm_engine_options.pop("model")
    return engine_options(model, **vllm_engine_options, **IN_THE_ENGINE, enable_sleep_mode=False)


@pytest.fixture(scope="module")
def model(tiny_model_folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model_folder).eval()


@pytest.fixture
def policy(vllm_engine: Any) -> VllmPolicy:
    return VllmPolicy(vllm_engine)


@pytest.fixture
def local(model: Any, policy: VllmPolicy) -> TransformersPolicy:
    return TransformersPolicy(model, policy.tokenizer)


def far(completions: Any, model: Any, prompt: list[int], temperature: float = 1.0) -> float:
    return max(
        float((torch.tensor(each.logprobs) - trainer_logprobs(model, prompt, each.token_ids, temperature)).abs().max())
        for each in completions
    )


def test_ends_are_those_of_the_model(policy: VllmPolicy, local: TransformersPolicy) -> None:
    assert policy.eos_token_ids == local.eos_token_ids == (EOS_ID,)


@pytest.mark.parametrize(
    "request_",
    [
        {"temperature": 0, "max_new_tokens": 8},
        {"do_sample": False, "max_tokens": 8, "eos_token_ids": [], "top_k": -1},
        {"do_sample": False, "max_tokens": 8, "eos_token_ids": list(range(0, 200, 4))},
        {"temperature": 0, "max_new_tokens": 8, "eos_token_ids": [], "repetition_penalty": 1.5, "logprobs": False},
        {"temperature": 0, "max_new_tokens": 12, "eos_token_ids": [], "skip_special_tokens": False},
        {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, "presence_penalty": 2.0, "logprobs": False},
        {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True, "frequency_penalty": 1.0, "logprobs": False},
        {
            "temperature": 0,
            "max_tokens": 8,
            "min_tokens": 5,
            "stop_token_ids": list(range(0, 200, 2)),
            "logprobs": False,
        },
        {"min_p": 1.0, "max_new_tokens": 8, "ignore_eos": True},
    ],
    ids=[
        "plain",
        "no ends",
        "many ends",
        "repetition penalty",
        "special tokens",
        "presence",
        "frequency",
        "least",
        "min_p",
    ],
)
def test_one_request_object_gets_the_same_completions_from_both_backends(
    policy: VllmPolicy, local: TransformersPolicy, request_: dict[str, Any]
) -> None:
    parameters = Sampling.of(request_)
    for (theirs,), (ours,) in zip(
        policy.generate(PROMPTS, parameters), local.generate(PROMPTS, parameters), strict=True
    ):
        assert (theirs.token_ids, theirs.finish_reason, theirs.text) == (ours.token_ids, ours.finish_reason, ours.text)
        assert (theirs.logprobs is None) == (ours.logprobs is None)
        if theirs.logprobs is not None:
            assert list(theirs.logprobs) == pytest.approx(list(ours.logprobs), abs=1e-4)


def test_stop_sequence_ends_a_completion_on_both_backends(policy: VllmPolicy, local: TransformersPolicy) -> None:
    request = {"temperature": 0, "max_new_tokens": 12, "eos_token_ids": []}
    prompts = [[token, 5] for token in range(4, 60)]
    frees = [completion.token_ids for (completion,) in local.generate(prompts, request)]
    # Two printable characters in a row, which are the ids 4 to 97; not the first, so that something is left in front.
    prompt, free, place = next(
        (prompt, ids, place)
        for prompt, ids in zip(prompts, frees, strict=True)
        for place in range(1, 9)
        if all(4 <= token < 98 for token in ids[place : place + 2])
    )
    stop = policy.tokenizer.decode(free[place : place + 2])
    first = next(end for end in range(1, 13) if stop in policy.tokenizer.decode(free[:end]))
    for backend in (policy, local):
        ((stopped,),) = backend.generate([prompt], {**request, "stop": stop})
        assert stopped.token_ids == free[:first]
        assert stopped.finish_reason == "stop"
        assert stopped.text.endswith(stop)


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.6}, {"top_k": 5}, {"top_p": 0.7}], ids=["none", "temperature", "top_k", "top_p"]
)
def test_sampled_logprobs_are_those_of_the_distribution_drawn_from(
    policy: VllmPolicy, model: Any, filters: dict[str, Any]
) -> None:
    from rlcanary.checks.worlds.samples import distribution

    for prompt, group in zip(PROMPTS, policy.generate(PROMPTS, {"n": 4, "max_new_tokens": 6, **filters}), strict=True):
        assert len(group) == 4
        if "top_k" not in filters and "top_p" not in filters:
            assert far(group, model, prompt, filters.get("temperature", 1.0)) < 1e-4
        for completion in group:
            probability = distribution(model, prompt, **filters)[completion.token_ids[0]]
            assert completion.logprobs[0] == pytest.approx(float(probability.log()), abs=1e-3)


def test_raw_logprobs_from_an_engine_of_processed_ones_are_refused(policy: VllmPolicy) -> None:
    with pytest.raises(ValueError, match="logprobs='raw', but"):
        policy.generate([SHORT], {"temperature": 0.6, "logprobs": "raw"})
    assert policy.generate([SHORT], {"logprobs": "raw"})[0][0].logprobs is not None


def test_seed_repeats_and_children_differ(policy: VllmPolicy) -> None:
    request = {"n": 4, "max_new_tokens": 8, "seed": 1, "eos_token_ids": []}
    first, again = (policy.generate([SHORT], request)[0] for _ in range(2))
    assert [each.token_ids for each in first] == [each.token_ids for each in again]
    assert len({tuple(each.token_ids) for each in first}) == 4


def test_scores_are_those_of_the_transformers_policy(policy: VllmPolicy, local: TransformersPolicy) -> None:
    tokens = Tokens.of([*PROMPTS, [4]], [[8, PAD_ID], [EOS_ID], [], []])
    for strategy in ("response", "attention"):
        theirs, ours = (each.logprobs(tokens, strategy=strategy).full for each in (policy, local))
        for left, right in zip(theirs, ours, strict=True):
            torch.testing.assert_close(left, right.detach(), equal_nan=True, atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="at temperature 1"):
        policy.logprobs(tokens, temperature=0.6)


def test_concurrent_requests_come_back_to_their_callers_and_a_bad_one_breaks_nothing(policy: VllmPolicy) -> None:
    prompts = [[3 + index, 4] for index in range(20)]
    lengths = [index % 5 + 1 for index in range(20)]

    async def ask(prompt: list[int], length: int) -> Any:
        return await policy.agenerate(prompt, {"temperature": 0, "max_new_tokens": length, "eos_token_ids": []})

    async def all_at_once() -> Any:
        return await asyncio.gather(*map(ask, prompts, lengths))

    with pytest.raises(ValueError, match="id 1000000, outside"):
        asyncio.run(ask([10**6], 1))
    for prompt, length, (completion,) in zip(prompts, lengths, asyncio.run(all_at_once()), strict=True):
        assert len(completion.token_ids) == length
        ((alone,),) = policy.generate([prompt], {"temperature": 0, "max_new_tokens": length, "eos_token_ids": []})
        assert alone.token_ids == completion.token_ids


def test_a_prompt_that_is_too_long_is_refused_alone(policy: VllmPolicy) -> None:
    lengths = [3, 256, 255, 300]

    async def all_at_once() -> Any:
        asked = {"temperature": 0, "max_new_tokens": 4, "eos_token_ids": []}
        return await asyncio.gather(
            *(policy.agenerate([5] * length, asked) for length in lengths), return_exceptions=True
        )

    short, full, nearly, longer = asyncio.run(all_at_once())
    assert [len(each.token_ids) for (each,) in (short, nearly)] == [4, 1]
    for refused, length in ((full, 256), (longer, 300)):
        assert isinstance(refused, RequestRefused)
        assert (
            str(refused) == f"prompt 0 has {length} ids, which leaves no room for a completion among the engine's 256"
        )


def test_new_weights_change_what_the_engine_says_long_cached_prompts_included(policy: VllmPolicy, model: Any) -> None:
    other = tiny_qwen2(1, vocabulary=model.config.vocab_size)
    policy.generate([LONG], {"max_new_tokens": 2})
    try:
        assert policy.load_weights(other.state_dict().items()) == set(model.state_dict())
        policy.reset_prefix_cache()
        policy.version += 1
        for prompt in PROMPTS:
            assert gap(policy, other, prompt) < 1e-4
            assert gap(policy, model, prompt) > 1e-2
        ((completion,),) = policy.generate([SHORT], {"max_new_tokens": 2, "eos_token_ids": []})
        assert completion.token_versions == [1, 1]
    finally:
        policy.load_weights(model.state_dict().items())
        policy.reset_prefix_cache()
    assert all(gap(policy, model, prompt) < 1e-4 for prompt in PROMPTS)


def test_weights_that_do_not_cover_the_engine_are_refused_before_anything_is_sent(
    policy: VllmPolicy, model: Any
) -> None:
    weights = {name: torch.zeros_like(weight) for name, weight in model.state_dict().items()}
    name = next(iter(weights))
    with pytest.raises(KeyError, match=r"no parameter 'module\.x'"):
        policy.load_weights([*weights.items(), ("module.x", torch.zeros(1))])
    with pytest.raises(ValueError, match="does not fit the engine's"):
        policy.load_weights([*weights.items(), (name, torch.zeros(1))])
    del weights[name]
    with pytest.raises(ValueError, match="1 parameters would keep"):
        policy.load_weights(weights.items())
    assert gap(policy, model, SHORT) < 1e-4


def test_missing_logprob_is_nan_never_a_certain_token(policy: VllmPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    generate = policy.llm.generate

    def without_the_second(*args: Any, **options: Any) -> Any:
        outputs = copy.deepcopy(generate(*args, **options))
        outputs[0].outputs[0].logprobs[1] = {}
        return outputs

    monkeypatch.setattr(policy.llm, "generate", without_the_second)
    ((completion,),) = policy.generate([SHORT], {"max_new_tokens": 3, "eos_token_ids": []})
    assert [math.isnan(logprob) for logprob in completion.logprobs] == [False, True, False]


def test_sleeping_engine_refuses_requests_instead_of_never_answering(policy: VllmPolicy, model: Any) -> None:
    policy.sleep()
    try:
        with pytest.raises(RuntimeError, match="asleep and would never answer"):
            policy.generate([SHORT], {})
        with pytest.raises(RuntimeError, match="asleep"):
            policy.logprobs(Tokens.of([SHORT], [[1]]))
        with pytest.raises(RuntimeError, match="asleep"):
            policy.load_weights(model.state_dict().items())
    finally:
        policy.wake_up()
    assert gap(policy, model, LONG) < 1e-4


def test_engine_of_a_model_without_an_end_has_those_of_the_plan(tmp_path: Path) -> None:
    tokenizer, model = character_tokenizer("0123456789+="), tiny_qwen2(vocabulary=14)
    tokenizer.eos_token = tokenizer.chat_template = None
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    save_model(model, tokenizer, tmp_path)
    role = SamplerRole(engine="vllm", options={"max_model_len": 64, **IN_THE_ENGINE})
    with start_engine(role, Sampling(eos_token_ids=(7,), seed=0), "float32", tmp_path) as (engine, _):
        ((completion,),) = engine.generate([SHORT], {"max_new_tokens": 60})
    assert completion.token_ids.index(7) == len(completion.token_ids) - 1


@pytest.mark.parametrize("options", [{"no_such_option": 3}, {"max_model_len": 100_000_000}], ids=str)
def test_options_that_vllm_refuses_are_told_in_a_line(tiny_model_folder: Path, options: dict[str, int]) -> None:
    role = SamplerRole(engine="vllm", options=options)
    started = start_engine(role, Sampling(), "float32", tiny_model_folder)
    (name,) = options
    with pytest.raises(UserError, match=rf"^vLLM refuses roles\.sampler\.options .*{name}.*$"), started:
        pass
