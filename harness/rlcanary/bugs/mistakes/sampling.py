"""Mistakes in requests to the engine, rollouts and weight sync."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from rlcanary.bugs.mistakes.planting import Function, Patches
from rlcanary.contract.batch import Completion, Group
from rlcanary.tiny_models import BOS_ID, PAD_ID

FIRST_ORDINARY_ID = 4


def _sampled_with(change: Callable[[dict[str, Any]], dict[str, Any]]) -> Patches:
    """Patch requests and rollouts to be sampled with other parameters."""

    def patch(exact: Function) -> Function:
        return lambda engine, asked, sampling: exact(engine, asked, {**sampling, **change(dict(sampling))})

    return {"adapter.generate": patch, "adapter.rollout": patch}


def _completions(change: Callable[[Completion], Completion]) -> Patches:
    """Patch what the engine returns, and what a rollout makes of it."""

    def generate(exact: Function) -> Function:
        return lambda *given: [[change(each) for each in group] for group in exact(*given)]

    def rollout(exact: Function) -> Function:
        return lambda *given: [
            replace(group, completions=[change(each) for each in group.completions]) for group in exact(*given)
        ]

    return {"adapter.generate": generate, "adapter.rollout": rollout}


def _prompts(change: Callable[[list[int], int], list[int]]) -> Patches:
    """Patch the prompts that the sampler gets, made from the prompt and the length of the longest one."""

    def generate(exact: Function) -> Function:
        def call(engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> Any:
            longest = max(map(len, prompts), default=0)
            return exact(engine, [change(list(prompt), longest) for prompt in prompts], sampling)

        return call

    def rollout(exact: Function) -> Function:
        def call(engine: Any, items: list[Any], sampling: Mapping[str, Any]) -> list[Group]:
            longest = max((len(item.prompt_ids) for item in items), default=0)
            sent = [replace(item, prompt_ids=change(list(item.prompt_ids), longest)) for item in items]
            groups = exact(engine, sent, sampling)
            return [replace(group, prompt_ids=item.prompt_ids) for group, item in zip(groups, items, strict=True)]

        return call

    return {"adapter.generate": generate, "adapter.rollout": rollout}


def _groups(change: Callable[[list[Group]], Iterable[Group]]) -> Patches:
    return {"adapter.rollout": lambda exact: lambda *given: list(change(exact(*given)))}


def _each_group(change: Callable[[Group], Group]) -> Patches:
    return _groups(lambda groups: map(change, groups))


def _moved(name: str, by: int) -> Patches:
    """Patch a rollout to pair a field of each group with the rest of another one."""

    def change(groups: list[Group]) -> list[Group]:
        others = groups[by:] + groups[:by]
        return [replace(each, **{name: getattr(other, name)}) for each, other in zip(groups, others, strict=True)]

    return _groups(change)


def _of_completions(change: Callable[[list[Any]], Sequence[Any]], *names: str) -> Patches:
    """Patch a rollout to change the order of fields of each group."""

    def changed(group: Group) -> Group:
        changes: dict[str, Any] = {name: change(list(getattr(group, name))) for name in names}
        return replace(group, **changes)

    return _each_group(changed)


def _without_last(each: Completion) -> Completion:
    if each.finish_reason != "stop" or not each.token_ids:
        return each
    logprobs = None if each.logprobs is None else list(each.logprobs)[:-1]
    versions = None if each.token_versions is None else list(each.token_versions)[:-1]
    return replace(each, token_ids=list(each.token_ids)[:-1], logprobs=logprobs, token_versions=versions)


def _logprobs(change: Callable[[list[float]], list[float] | None]) -> Patches:
    return _completions(
        lambda each: each if each.logprobs is None else replace(each, logprobs=change(list(each.logprobs)))
    )


def _synced(weights: Callable[[Any, Any], Iterable[tuple[str, Tensor]]], steps: int = 1) -> Patches:
    """Patch a sync to load these weights, made from state and engine."""

    def sync_weights(state: Any, engine: Any) -> None:
        engine.load_weights(weights(state, engine))
        engine.reset_prefix_cache()
        engine.version += steps

    return {"adapter.sync_weights": lambda _: sync_weights}


def _without(*parts: str) -> Callable[[Any, Any], Iterable[tuple[str, Tensor]]]:
    return lambda state, _: [
        each for each in state.model.named_parameters() if not any(part in each[0] for part in parts)
    ]


def _of_the_sync_before(state: Any, engine: Any) -> list[tuple[str, Tensor]]:
    now = [(name, weight.detach().clone()) for name, weight in state.model.named_parameters()]
    before: list[tuple[str, Tensor]] = getattr(engine, "weights_before", now)
    engine.weights_before = now
    return before


def _only_once(exact: Function) -> Function:
    def sync_weights(state: Any, engine: Any) -> None:
        if engine.version == 0:
            exact(state, engine)
        else:
            engine.version += 1

    return sync_weights


def _cache_kept(_: Function) -> Function:
    def sync_weights(state: Any, engine: Any) -> None:
        engine.load_weights(state.model.named_parameters())
        engine.version += 1

    return sync_weights


def _counted(by: int) -> Patches:
    def patch(exact: Function) -> Function:
        def sync_weights(state: Any, engine: Any) -> None:
            exact(state, engine)
            engine.version += by

        return sync_weights

    return {"adapter.sync_weights": patch}


# Each mistake patches capabilities by name.
SAMPLING_MISTAKES: dict[str, Patches] = {
    **{
        f"the engine ignores {name}": _sampled_with(lambda _, name=name, value=value: {name: value})  # type: ignore[misc]
        for name, value in {
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "seed": None,
            "eos_token_ids": None,
        }.items()
    },
    "the engine reports logprobs before the temperature": _sampled_with(lambda _: {"logprobs": "raw"}),
    "every request has the same seed": _sampled_with(lambda _: {"seed": 0}),
    "completions are one token too long": _sampled_with(lambda now: {"max_new_tokens": now["max_new_tokens"] + 1}),
    "completions end one token too early": _sampled_with(
        lambda now: {"max_new_tokens": max(now["max_new_tokens"] - 1, 1)}
    ),
    "the end of each completion is lost": _completions(_without_last),
    "every completion counts as ended": _completions(lambda each: replace(each, finish_reason="stop")),
    "every completion counts as truncated": _completions(lambda each: replace(each, finish_reason="length")),
    "the sampler's logprobs are lost": _logprobs(lambda _: None),
    "the sampler's logprobs are all 0": _logprobs(lambda values: [0.0] * len(values)),
    "the sampler's first logprob is 0": _logprobs(lambda values: [0.0, *values[1:]] if values else values),
    "the sampler's logprobs are one token late": _logprobs(lambda values: [0.0, *values[:-1]] if values else values),
    "the sampler's logprobs are one token early": _logprobs(lambda values: [*values[1:], 0.0] if values else values),
    "the sampler's logprobs are taken for their token ids": _completions(
        lambda each: replace(each, logprobs=[float(token) for token in each.token_ids])
    ),
    "the sampler gets a second BOS": _prompts(lambda prompt, _: [BOS_ID, *prompt]),
    "the sampler gets the prompt without its first token": _prompts(lambda prompt, _: prompt[1:] or prompt),
    "the sampler gets the prompt without its last token": _prompts(lambda prompt, _: prompt[:-1] or prompt),
    "the sampler gets the prompt without special tokens": _prompts(
        lambda prompt, _: [token for token in prompt if token >= FIRST_ORDINARY_ID] or prompt
    ),
    "the sampler reads the padding before short prompts": _prompts(
        lambda prompt, longest: [PAD_ID] * (longest - len(prompt)) + prompt
    ),
    "the sampler continues behind the padding of short prompts": _prompts(
        lambda prompt, longest: prompt + [PAD_ID] * (longest - len(prompt))
    ),
    "the trainer gets the prompt without special tokens": _each_group(
        lambda group: replace(group, prompt_ids=[token for token in group.prompt_ids if token >= FIRST_ORDINARY_ID])
    ),
    "completions belong to the next prompt": _moved("completions", 1),
    "completions belong to the previous prompt": _moved("completions", -1),
    "rewards belong to the next prompt": _moved("rewards", 1),
    "rewards belong to the previous prompt": _moved("rewards", -1),
    "prompts belong to the next item": _moved("prompt_ids", 1),
    "rewards belong to the next completion": _of_completions(lambda each: each[1:] + each[:1], "rewards"),
    "rewards belong to the previous completion": _of_completions(lambda each: each[-1:] + each[:-1], "rewards"),
    "rewards are in the opposite order of the completions": _of_completions(lambda each: each[::-1], "rewards"),
    "a group has its first completion several times": _of_completions(
        lambda each: each[:1] * len(each), "completions", "rewards"
    ),
    "the last completion of each group is lost": _of_completions(
        lambda each: each[:-1] or each, "completions", "rewards"
    ),
    "groups come in the opposite order of the items": _groups(lambda groups: groups[::-1]),
    "the last item is never sampled": _groups(lambda groups: groups[:-1]),
    "the first item is never sampled": _groups(lambda groups: groups[1:]),
    "an odd item out is never sampled": _groups(lambda groups: groups[: len(groups) // 2 * 2]),
    "the version is that of the engine after the rollout": {
        "adapter.rollout": lambda exact: (
            lambda engine, *rest: [replace(group, policy_version=engine.version) for group in exact(engine, *rest)]
        )
    },
    "every group has version 0": _each_group(lambda group: replace(group, policy_version=0)),
    "the versions of the tokens are lost": _completions(lambda each: replace(each, token_versions=None)),
    "no weights are synced": _synced(lambda *_: ()),
    "weights are synced only once": {"adapter.sync_weights": _only_once},
    "each sync sends the weights of the one before": _synced(_of_the_sync_before),
    **{
        f"the weights of {told} are not synced": _synced(_without(*parts))
        for told, parts in {
            "the embedding": ("embed", "wte", "wpe"),
            "attention": ("attn",),
            "queries": ("q_proj",),
            "keys": ("k_proj",),
            "values": ("v_proj",),
            "the MLP": ("mlp",),
            "the gates": ("gate",),
            "the MLP's first layer": ("mlp.up",),
            "the MLP's last layer": ("mlp.down",),
            "the norms": ("norm",),
            "the output layer": ("lm_head",),
            "biases": ("bias",),
            "the adapter": ("lora_",),
        }.items()
    },
    "only queries and values are synced, as for an adapter": _synced(
        lambda state, _: [
            each for each in state.model.named_parameters() if any(part in each[0] for part in ("q_proj", "v_proj"))
        ]
    ),
    "only parameters that are trained are synced": _synced(
        lambda state, _: [each for each in state.model.named_parameters() if each[1].requires_grad]
    ),
    "weights are synced in bfloat16": _synced(
        lambda state, _: [
            (name, weight.detach().bfloat16().to(weight.dtype)) for name, weight in state.model.named_parameters()
        ]
    ),
    "the prefix cache is not emptied": {"adapter.sync_weights": _cache_kept},
    "a sync counts as two versions": _counted(1),
    "a sync does not count as a version": _counted(-1),
}
