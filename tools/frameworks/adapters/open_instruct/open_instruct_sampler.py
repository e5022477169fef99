"""open-instruct's sampler, `LLMRayActor`, in this process: an engine of the checks answers where vLLM's server would."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import open_instruct_run as run

from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from rlcanary.contract.state import Item


def ends_of(engine: Any) -> tuple[int, ...] | None:
    """Return the ids at which vLLM ends a completion by itself, those of the tokenizer; None where there is none."""
    tokenizer = getattr(engine, "tokenizer", None)
    return None if tokenizer is None else (tokenizer.eos_token_id,)


def request_of(engine: Any, sampling: Mapping[str, Any]) -> Any:
    """Return open-instruct's sampling parameters for those of the contract.

    Raises:
        NotProvided: it has no such parameter.
    """
    from open_instruct.vllm_utils import SamplingConfig

    given = Sampling(**sampling)
    plain = Sampling(
        temperature=given.temperature,
        top_p=given.top_p,
        max_new_tokens=given.max_new_tokens,
        min_tokens=given.min_tokens,
        n=given.n,
        seed=given.seed,
        stop_sequences=given.stop_sequences,
        logprobs=given.logprobs if given.logprobs is not None else "processed",
    )
    own = ends_of(engine)
    if given.eos_token_ids is not None and own == tuple(given.eos_token_ids):
        plain = replace(plain, eos_token_ids=given.eos_token_ids)
    if given != plain or given.logprobs == "raw":
        raise NotProvided(
            "open-instruct's SamplingConfig has temperature, top_p, lengths, stop strings and a seed alone"
        )
    return SamplingConfig(
        temperature=given.temperature,
        top_p=given.top_p,
        max_tokens=given.max_new_tokens,
        min_tokens=given.min_tokens,
        n=given.n,
        stop=list(given.stop_sequences),
        seed=given.seed,
    )


class Client:
    """vLLM's server for completions: the engine of the checks."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.completions = self

    async def create(self, model: str, prompt: list[int], extra_body: Mapping[str, Any], **params: Any) -> Any:
        wanted = {
            "temperature": params["temperature"],
            "top_p": params["top_p"],
            "max_new_tokens": params["max_tokens"],
            "min_tokens": extra_body["min_tokens"],
            "n": params["n"],
            "seed": params["seed"],
            "stop_sequences": tuple(params["stop"] or ()),
            "skip_special_tokens": extra_body["skip_special_tokens"],
            "eos_token_ids": ends_of(self.engine),
        }
        (completion,) = await self.engine.agenerate(list(prompt), wanted)
        if completion.sampled is not None:
            raise NotProvided("vLLM samples all tokens of an answer")
        if completion.logprobs is None:
            raise NotProvided("vLLM is asked for logprobs")
        scores = SimpleNamespace(token_logprobs=completion.logprobs)
        choice = SimpleNamespace(
            token_ids=completion.token_ids,
            text=completion.text or "",
            logprobs=scores,
            finish_reason=completion.finish_reason,
        )
        return SimpleNamespace(choices=[choice])


class Decoder:
    """The tokenizer of an engine, as far as the sampler and an evaluation decode with it."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._own = getattr(engine, "tokenizer", None)
        self.pad_token, self.pad_token_id = "<pad>", -1
        self.eos_token_id = next(iter(getattr(engine, "eos_token_ids", ())), 0)

    def batch_decode(self, rows: Sequence[Sequence[int]], **options: Any) -> list[str]:
        if self._own is not None:
            return list(self._own.batch_decode(rows, **options))
        return [self._engine.decode(row) for row in rows]


def verifier(reward: Callable[[str, str], Any]) -> Any:
    """Make a verifier of a function from the ground truth and the text of a completion to a reward."""
    from open_instruct.ground_truth_utils import VerificationResult, VerifierFunction

    class Verifier(VerifierFunction):  # type: ignore[misc]
        def __call__(self, tokenized_prediction: Any, prediction: str, label: str, *_: Any, **__: Any) -> Any:
            score = reward(label, prediction)
            if score is None:
                raise NotProvided("a verifier of open-instruct returns a number")
            return VerificationResult(score=score)

    return Verifier("")


def reward_config(streaming: Any, verifiers: Mapping[str, Any]) -> Any:
    """Make the configuration of rewards as `main` of `grpo_fast.py` does, with these verifiers."""
    from open_instruct.ground_truth_utils import RewardConfig

    return RewardConfig(
        apply_r1_style_format_reward=streaming.apply_r1_style_format_reward,
        r1_style_format_reward=streaming.r1_style_format_reward,
        apply_verifiable_reward=streaming.apply_verifiable_reward,
        verification_reward=streaming.verification_reward,
        non_stop_penalty=streaming.non_stop_penalty,
        non_stop_penalty_value=streaming.non_stop_penalty_value,
        additive_format_reward=streaming.additive_format_reward,
        verifier_functions=dict(verifiers),
        reward_aggregator=streaming.reward_aggregator,
    )


def no_calls(count: int) -> Any:
    """Return what is known of the tools of completions that called none."""
    from open_instruct.data_types import RequestInfo

    empty = [""] * count
    return RequestInfo([0] * count, [False] * count, empty, empty, [0.0] * count, [False] * count, [], [{}] * count)


def sampler(engine: Any, dataset: Any, rewards: Any, max_model_len: int, **options: Any) -> Any:
    """Make the sampler's actor around an engine.

    Args:
        engine: the engine of the checks.
        dataset: the items, for training and for evaluation.
        rewards: the configuration of rewards.
        max_model_len: the engine's limit on a prompt and its completion together.
        options: other arguments of the actor, such as `pools`.
    """
    from open_instruct import vllm_utils

    made = vllm_utils.LLMRayActor.__new__(vllm_utils.LLMRayActor)
    given = {
        "max_steps": 5,
        "per_turn_max_tokens": None,
        "tool_call_timeout": 1800.0,
        "mask_tool_use": True,
        "pools": None,
        "inflight_updates": True,
        **options,
    }
    parser = given.pop("tool_parser", None)
    made._init_config(**given, reward_config=rewards, train_dataset=dataset, eval_dataset=dataset)
    made._init_queues(queue.Queue(), queue.Queue(), queue.Queue(), None)
    made.client, made.model_name, made.server_port = Client(engine), "model", 0
    made.llm_engine = SimpleNamespace(
        tokenizer=Decoder(engine), model_config=SimpleNamespace(max_model_len=max_model_len)
    )
    made.tool_parser = parser or vllm_utils.create_tool_parser("legacy", made.llm_engine.tokenizer)
    made.current_model_step = getattr(engine, "version", 0)
    return made


def answered(actor: Any, requests: Sequence[Any]) -> list[Any]:
    """Let the sampler answer requests -> the results, in the order of the requests."""
    from open_instruct import vllm_utils

    async def healthy(_: int) -> None:
        return None

    async def sampled() -> None:
        actor.loop = asyncio.get_running_loop()
        for request in requests:
            vllm_utils.add_request(actor, request)
        await asyncio.gather(*(asyncio.wrap_future(task) for task in list(actor.active_tasks.values())))
        while not actor.completion_queue.empty():
            done = vllm_utils.accumulate_completions(actor, actor.completion_queue.get())
            if done is not None:
                await asyncio.wrap_future(done)

    with run.on_cpu(), patch.object(vllm_utils, "_check_health", healthy):
        asyncio.run(sampled())
    results: dict[str, Any] = {}
    for found in (actor.results_queue, actor.eval_results_queue):
        while not found.empty():
            result = found.get()
            results[result.prompt_id] = result
    return [results[request.prompt_id] for request in requests]


def requests_for(items: Sequence[Item], config: Any, is_eval: bool = False) -> list[Any]:
    """Make the requests that `add_prompt_to_generator` makes of items."""
    from open_instruct.data_loader import add_prompt_to_generator
    from open_instruct.data_types import EnvConfig

    made: queue.Queue[Any] = queue.Queue()
    for example in run.dataset_of([item.prompt_ids for item in items]):
        add_prompt_to_generator(example, 0, made, config, is_eval, EnvConfig())  # type: ignore[arg-type]
    return [made.get() for _ in items]


def room(items: Sequence[Item], config: Any) -> int:
    """Return the length of the longest prompt and completion, for which a run sets its engine up."""
    return max(len(item.prompt_ids) for item in items) + int(config.max_tokens)
