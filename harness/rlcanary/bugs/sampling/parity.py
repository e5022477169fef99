"""Bugs in requests to an engine."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import Completion
from rlcanary.contract.engine import InProcessEngine


class RawLogprobs(Bug):
    id = "N29"
    source = "NeMo RL 54d7cd22d, #3392"
    effect = "the engine reports logprobs at temperature 1 for what it draws at another: 0.3 nats off at 0.6"

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        return super().generate(engine, prompts, {**sampling, "logprobs": "raw"})


class RawLogprobsOnOnePath(Bug):
    id = "T19"
    source = "TRL 0a881bcee, #4873"
    effect = "requests of several prompts, which take another path, come back with logprobs at temperature 1"

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        mode = "raw" if len(prompts) > 1 else sampling["logprobs"]
        return super().generate(engine, prompts, {**sampling, "logprobs": mode})


class _PenalisingEngine(InProcessEngine):
    """Engine that makes the prompt's tokens less likely, like a generation config with repetition_penalty 1.1."""

    def read_prompt(self, prompt: Sequence[int]) -> tuple[Tensor, Any]:
        logits, cache = super().read_prompt(prompt)
        seen = logits[:, list(prompt)]
        logits[:, list(prompt)] = torch.where(seen > 0, seen / 1.1, seen * 1.1)
        return logits, cache


class PenaltyFromTheModelsConfig(Bug):
    id = "V23"
    source = "verl 9e5510ab3, #1949"
    effect = "the sampler has a repetition penalty that the trainer does not know of"

    def new_engine(self, model: Any) -> Any:
        return _PenalisingEngine(model)


class SeedInEveryRequest(Bug):
    id = "H03"
    source = "rlvr-experiments 5a9c738"
    effect = "all samples of a prompt are the same: no spread in a group, nothing to learn"

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        one = {**sampling, "n": 1, "seed": 42}
        return [
            [super(SeedInEveryRequest, self).generate(engine, [prompt], one)[0][0] for _ in range(sampling["n"])]
            for prompt in prompts
        ]


class TokenIdForLogprob(Bug):
    id = "R07"
    source = "torchrl e7ea30ae6, #3580"
    effect = "the fields of an answer are read in the wrong order: the token id is taken for its logprob"

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        groups = super().generate(engine, prompts, sampling)
        return [
            [replace(completion, logprobs=[float(token) for token in completion.token_ids]) for completion in group]
            for group in groups
        ]
