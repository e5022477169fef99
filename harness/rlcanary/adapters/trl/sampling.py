"""Rollouts, requests and weight syncs through the trainer's vLLM backend."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.trl import releases
from rlcanary.adapters.trl.base import TrlBase
from rlcanary.adapters.trl.engines import generation_of
from rlcanary.adapters.trl.trainer.trainers import PROMPT, PROMPT_IDS, grpo_trainer, replay
from rlcanary.contract.declining import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.batch import Completion, Group
    from rlcanary.contract.state import Item


class TrlSampling(TrlBase):
    """Sampling from an engine that has the trainer's weights."""

    def sync_weights(self, state: Any, engine: Any) -> None:
        known = next((each for each, _ in state.engines if each is engine), None)
        if known is None:
            state.engines.append((engine, generation_of(engine, state.trainer)))
        (generation,) = (each for known, each in state.engines if known is engine)
        generation.sync_weights()

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        from rlcanary.contract.batch import Completion

        count = sampling.get("n", 1)
        rows = [prompt for prompt in prompts for _ in range(count)]
        trainer = self._trainer if self.use_vllm else _sampling_trainer(self.settings, engine.model, sampling)
        if self.use_vllm:
            trainer.vllm_generation = generation_of(engine, trainer, sampling)
            trainer._last_loaded_step = trainer.state.global_step
        with quiet():
            ids, logprobs = releases.single_turn(trainer, rows, count)
        scores = [None] * len(ids) if logprobs is None else [list(map(_logprob, each)) for each in logprobs]
        ends = finish_reasons(trainer, ids, sampling)
        completions = [Completion(*each) for each in zip(ids, scores, ends, strict=True)]
        return [completions[first : first + count] for first in range(0, len(rows), count)]

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        from rlcanary.contract.batch import Completion, Group

        def reward(completions: list[str], item: list[Item], **_: Any) -> list[float | None]:
            return [each.reward(text) for each, text in zip(item, completions, strict=True)]

        releases.require_rollout_func()
        count, trainer = sampling.get("n", 1), self._trainer
        releases.use_tokenizer(trainer, engine.tokenizer)
        trainer.rollout_func, trainer.reward_funcs = None, [reward]
        trainer.use_vllm, trainer.num_generations = True, count
        trainer.vllm_generation = generation_of(engine, trainer, sampling)
        # The weights of the engine are those of its model.
        trainer._last_loaded_step = trainer.state.global_step
        trainer._logs = {**trainer._logs, "rewards": defaultdict(list), "completion": []}
        trainer.model.train()
        of_rows = [item for item in items for _ in range(count)]
        rows = [{"prompt": PROMPT, "item": item} for item in of_rows]
        # The trainer takes text, and the items are prompts behind its tokenizer.
        trainer._tokenize_prompts = lambda _: ([list(item.prompt_ids) for item in of_rows], None, {})
        trainer._get_per_token_logps_and_entropies = partial(_unscored, trainer)
        with quiet():
            output = trainer._generate_and_score_completions(rows)
        (rewards,) = trainer._logs["rewards"].values()
        present_BT, logprobs_BT = output["completion_mask"], output["sampling_per_token_logps"]
        kept = [ids[mask.bool()].tolist() for ids, mask in zip(output["completion_ids"], present_BT, strict=True)]
        scores = [row[mask.bool()].tolist() for row, mask in zip(logprobs_BT, present_BT, strict=True)]
        drawn = zip(kept, scores, finish_reasons(trainer, kept, sampling), trainer._logs["completion"], strict=True)
        completions = [Completion(ids, logprobs, end, text=text) for ids, logprobs, end, text in drawn]
        prompts = [
            ids[mask.bool()].tolist() for ids, mask in zip(output["prompt_ids"], output["prompt_mask"], strict=True)
        ]
        return [
            Group(prompts[first], completions[first : first + count], rewards[first : first + count], item_id=item.id)
            for item, first in zip(items, range(0, len(rows), count), strict=True)
        ]


def _sampling_trainer(settings: dict[str, Any], model: Any, sampling: Mapping[str, Any]) -> Any:
    """Construct a trainer that samples from a copy of a model by transformers, in training mode as its updates have it.

    Raises:
        NotProvided: a request asks for what the trainer cannot be told.
    """
    from rlcanary.contract.layers import copied
    from rlcanary.tiny_models import tiny_tokenizer

    if sampling.get("seed") is not None or sampling.get("stop_sequences"):
        raise NotProvided("requests have neither a seed nor stop sequences")
    own, tokenizer = copied(model), tiny_tokenizer()
    if ends := list(sampling.get("eos_token_ids") or ()):
        own.generation_config.eos_token_id = ends
        tokenizer.eos_token_id = ends[0]
    names = ("top_p", "top_k", "repetition_penalty")
    given = {name: sampling[name] for name in names if name in sampling}
    given["max_completion_length"] = sampling["max_new_tokens"]
    if sampling["temperature"]:
        given["temperature"] = sampling["temperature"]
    else:
        given["generation_kwargs"] = {"do_sample": False}
    trainer = grpo_trainer({**settings, **given}, own, tokenizer=tokenizer)
    trainer.model.train()
    return trainer


def _unscored(
    trainer: Any, _model: Any, input_ids: Any, _mask: Any, logits_to_keep: int, *_: Any, **__: Any
) -> tuple[Any, ...]:
    """Stand in for the forward pass of a model that has another vocabulary than the engine."""
    import torch

    return releases.scores(trainer, torch.zeros(len(input_ids), logits_to_keep), None)


def _logprob(value: float | None) -> float:
    return math.nan if value is None else value


def finish_reasons(trainer: Any, completions: list[list[int]], sampling: Mapping[str, Any]) -> list[str]:
    """Return for each completion whether the trainer counts it as truncated, which is all that it keeps of its end."""
    trainer.rollout_func, trainer.use_vllm = replay, False
    releases.use_ends(trainer, sampling.get("eos_token_ids") or ())
    trainer.model.train()
    found: dict[tuple[int, ...], str] = {}
    with quiet():
        for ids in {tuple(each) for each in completions}:
            trainer.replayed = {"prompt_ids": [PROMPT_IDS], "completion_ids": [list(ids)], "logprobs": None}
            trainer._metrics["train"].clear()
            trainer._generate([PROMPT])
            (share,) = trainer._metrics["train"]["completions/clipped_ratio"]
            found[ids] = "length" if share else "stop"
    return [found[tuple(each)] for each in completions]
