"""The engine of the checks in the place of the vLLM engine that torchrl's `vLLMWrapper` samples from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rlcanary.adapters.frameworks import has_part
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import Completion
from rlcanary.contract.sampling import Sampling

# vLLM's options that the engine of the checks names in the same way, with their neutral values.
FURTHER = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": 0.0}


def generate_kwargs(request: Sampling, eos_token_id: int) -> dict[str, Any]:
    """Translate a request to the wrapper's `generate_kwargs` for vLLM, which ends at the tokenizer's EOS on its own."""
    kwargs: dict[str, Any] = {
        "temperature": request.temperature,
        "top_p": request.top_p,
        "max_new_tokens": request.max_new_tokens,
        "ignore_eos": eos_token_id not in request.ends,
    }
    if request.top_k:
        kwargs["top_k"] = request.top_k
    if others := [token for token in request.ends if token != eos_token_id]:
        kwargs["stop_token_ids"] = others
    if request.stop_sequences:
        kwargs["stop_sequences"] = list(request.stop_sequences)
    if request.seed is not None:
        kwargs["seed"] = request.seed
    return kwargs


def require_answers_by_ids() -> None:
    """Decline rollouts of conversations by a wrapper that reads an answer back out of the text of the whole conversation.

    Raises:
        NotProvided: the wrapper of this release does: it knows the templates of some models, and that of no other.
    """
    if has_part("torchrl.modules.llm.policies.vllm_wrapper:_extract_responses_from_full_histories"):
        raise NotProvided("this release takes answers out of the text, by the chat templates that it knows")


def as_vllm(engine: Any, eos_token_id: int, on_sync: Callable[[], None] = lambda: None) -> Any:
    """Make an object that the wrapper takes for torchrl's `AsyncVLLM`.

    Args:
        engine: a `rlcanary.contract.engine.Engine`.
        eos_token_id: the EOS that ends a completion on its own.
        on_sync: is called for each weight sync that falls into a request, as the trainer tells the collector of it.

    Raises:
        NotProvided: vLLM, whose records the wrapper speaks, is not installed.
    """
    try:
        from vllm import RequestOutput, SamplingParams
    except ModuleNotFoundError as error:
        raise NotProvided("torchrl's collectors sample from vLLM, which is not installed") from error

    class AsyncVLLM:
        def generate(self, prompts: list[Any], sampling_params: SamplingParams) -> list[RequestOutput]:
            before = engine.version
            ids = [list(map(int, prompt["prompt_token_ids"])) for prompt in prompts]
            groups = engine.generate(ids, _request(sampling_params, eos_token_id))
            if any(each.sampled is not None for group in groups for each in group):
                raise NotProvided("vLLM samples all tokens of an answer")
            for _ in range(engine.version - before):
                on_sync()
            return [_output(prompt, group) for prompt, group in zip(ids, groups, strict=True)]

    AsyncVLLM.__module__ = "torchrl.modules.llm.backends.vllm"  # the wrapper knows its engines by name
    return AsyncVLLM()


def _request(params: Any, eos_token_id: int) -> dict[str, Any]:
    own = () if params.ignore_eos else (eos_token_id,)
    request: dict[str, Any] = {
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": max(params.top_k, 0),
        "max_new_tokens": params.max_tokens,
        "n": params.n,
        "seed": params.seed,
        "eos_token_ids": (*own, *(params.stop_token_ids or ())),
    }
    if params.stop:
        request["stop_sequences"] = tuple(params.stop)
    return request | {name: getattr(params, name) for name, none in FURTHER.items() if getattr(params, name) != none}


def _output(prompt: Sequence[int], completions: list[Completion]) -> Any:
    from vllm import CompletionOutput, RequestOutput
    from vllm.logprobs import Logprob

    def scored(completion: Completion) -> list[dict[int, Any]] | None:
        if completion.logprobs is None:
            return None
        pairs = zip(completion.token_ids, completion.logprobs, strict=True)
        return [{token: Logprob(value)} for token, value in pairs]

    outputs = [
        CompletionOutput(
            index=index,
            text=each.text or "",
            token_ids=list(each.token_ids),
            cumulative_logprob=None,
            logprobs=scored(each),
            finish_reason=each.finish_reason,
        )
        for index, each in enumerate(completions)
    ]
    return RequestOutput(
        request_id="0", prompt=None, prompt_token_ids=list(prompt), prompt_logprobs=None, outputs=outputs, finished=True
    )
