"""Bugs in requests to an engine."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from rlcanary.bugs.museum import Bug
from rlcanary.contract.batch import Completion
from rlcanary.contract.engine import InProcessEngine
from rlcanary.tiny_models import PAD_ID


class RawLogprobs(Bug):
    id = "nemo-rl.logprobs-before-temperature"
    source = "NeMo RL 54d7cd22d, #3392, survey N29; open-instruct 716f27531, #1678, survey I06"
    effect = "the engine samples at one temperature and reports logprobs at 1: 0.3 nats off at 0.6"

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        return super().generate(engine, prompts, {**sampling, "logprobs": "raw"})


class RawLogprobsOnOnePath(Bug):
    id = "trl.one-path-before-temperature"
    source = "TRL 0a881bcee, #4873, survey T19"
    effect = "requests with several prompts take another path and return logprobs at temperature 1"

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
    id = "verl.sampler-only-penalty"
    source = "verl 9e5510ab3, #1949, survey V23"
    effect = "the sampler applies a repetition penalty that the trainer does not"

    def new_engine(self, model: Any) -> Any:
        return _PenalisingEngine(model)


class SeedInEveryRequest(Bug):
    id = "rlvr.same-seed-per-request"
    source = "rlvr-experiments 5a9c738, survey H03"
    effect = "all samples of a prompt are the same: no spread in a group, nothing to learn"

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        one = {**sampling, "n": 1, "seed": 42}
        # Every request for a prompt draws the same completion, so one request stands for all of them.
        drawn = [super(SeedInEveryRequest, self).generate(engine, [prompt], one)[0][0] for prompt in prompts]
        return [[copy.deepcopy(completion) for _ in range(sampling["n"])] for completion in drawn]


class TokenIdForLogprob(Bug):
    id = "torchrl.token-id-as-logprob"
    source = "torchrl e7ea30ae6, #3580, survey R07"
    effect = "the fields of an answer are read in the wrong order: the token id is taken for its logprob"

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        groups = super().generate(engine, prompts, sampling)
        return [
            [replace(completion, logprobs=[float(token) for token in completion.token_ids]) for completion in group]
            for group in groups
        ]


class PaddedInsideTheBatch(Bug):
    id = "skyrl.sampled-after-padding"
    source = "SkyRL 6ecf87862, #747"
    effect = "shorter prompts of a batch are padded on the right and continued after the padding"

    def generate(self, engine: Any, prompts: list[list[int]], sampling: Mapping[str, Any]) -> list[list[Completion]]:
        longest = max(len(prompt) for prompt in prompts)
        padded = [[*prompt, *[PAD_ID] * (longest - len(prompt))] for prompt in prompts]
        return super().generate(engine, padded, sampling)


class _LimitedEngine(InProcessEngine):
    """Engine that takes the most tokens from the model's generation config where that has a limit."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Any) -> list[list[Completion]]:
        limit = self.model.generation_config.max_new_tokens or 20
        return super().generate(prompts, {**sampling, "max_new_tokens": min(limit, sampling["max_new_tokens"])})


class LimitOfTheModelsConfig(Bug):
    id = "open-instruct.limit-of-the-models-config"
    source = "open-instruct 0440b5519, #1512; PipelineRL 24342c249"
    effect = "the engine takes its limits from the model's generation config: completions end where nobody said"

    def new_engine(self, model: Any) -> Any:
        return _LimitedEngine(model)
