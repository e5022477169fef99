"""AReaL's workflow of rollouts, its verifier of numbers and its loaders of data."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.contract.adapter import Adapter, Item, NotProvided
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.sampling import Sampling

if TYPE_CHECKING:
    from rlcanary.contract.records.preparation import Answer


class Rollouts(Adapter):
    """Completions of items, verdicts and orders of items."""

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        """Run the RLVR workflow in groups, with the engine of the checks behind AReaL's interface."""
        from areal.api.cli_args import GenerationHyperparameters
        from areal.api.io_struct import ModelResponse
        from areal.infra.remote_inf_engine import GroupedRolloutWorkflow
        from areal.workflow import rlvr

        request = Sampling(**sampling).with_ends(())
        if request.seed is not None or (request.eos_token_ids is not None and len(request.eos_token_ids) > 1):
            raise NotProvided("AReaL has neither a seed of a request nor a setting for several EOS ids")
        config = GenerationHyperparameters(
            n_samples=request.n,
            max_new_tokens=request.max_new_tokens,
            temperature=request.temperature,
            top_p=request.top_p,
            top_k=request.top_k or int(1e8),
            stop=list(request.stop_sequences) or None,
            stop_token_ids=list(request.eos_token_ids or ()),
        )
        responses: list[Any] = []
        texts: list[list[str]] = [[] for _ in items]

        async def agenerate(asked: Any) -> Any:
            given = asked.gconfig
            wanted = {
                "temperature": given.temperature,
                "top_p": given.top_p,
                "top_k": 0 if given.top_k >= int(1e8) else given.top_k,
                "max_new_tokens": given.max_new_tokens,
                "n": 1,
                "stop_sequences": tuple(given.stop or ()),
                "eos_token_ids": tuple(given.stop_token_ids),
            }
            (completion,) = await engine.agenerate(list(asked.input_ids), wanted)
            if completion.logprobs is None or completion.sampled is not None:
                raise NotProvided("the engine returns logprobs, and samples all tokens of an answer")
            if completion.finish_reason == "abort":
                raise NotProvided("RemoteInfEngine goes on with aborted requests, which this adapter replaces")
            versions = completion.token_versions
            responses.append(
                ModelResponse(
                    input_tokens=list(asked.input_ids),
                    output_tokens=list(completion.token_ids),
                    output_logprobs=list(completion.logprobs),
                    output_versions=list(versions or [0] * len(completion.token_ids)),
                    stop_reason=completion.finish_reason,
                )
            )
            return responses[-1]

        async def scored(_: str, text: str, *__: Any, number: int, **___: Any) -> float:
            texts[number].append(text)
            # As a reward function of AReaL's has to, which is given the text with its special tokens.
            reward = items[number].reward(text.removesuffix(engine.tokenizer.eos_token))
            return float("nan") if reward is None else float(reward)

        async def generated() -> list[Any]:
            workflow = rlvr.RLVRWorkflow(
                lambda: 0.0,
                config,
                engine.tokenizer,
                get_input_ids_fn=lambda data, *_: list(items[data].prompt_ids),
                data_extract_prompt_fn=lambda data: data["number"],
            )
            workflow.async_reward_fn = scored
            grouped = GroupedRolloutWorkflow(workflow, request.n, SimpleNamespace(warning=lambda *_: None))
            server = SimpleNamespace(agenerate=agenerate)
            return await asyncio.gather(*(grouped.arun_episode(server, {"number": n}) for n in range(len(items))))

        with quiet():
            found = asyncio.run(generated())
        return [_group(item, data) for item, data in zip(items, found, strict=True)]

    def verify(self, answer: Answer) -> bool:
        from areal.reward.gsm8k import gsm8k_reward_fn

        if (answer.kind, answer.format) != ("number", "boxed"):
            raise NotProvided("gsm8k_reward_fn reads numbers in \\boxed{}")
        with quiet():
            return gsm8k_reward_fn(None, answer.text, None, None, answer.reference) == 1  # type: ignore[no-any-return]

    def data_order(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        return self._loaded(n_items, epoch, rank, world_size)

    def _loaded(self, n_items: int, epoch: int, rank: int, world_size: int) -> list[int]:
        from areal.api.cli_args import TrainDatasetConfig
        from areal.utils.data import cycle_dataloader
        from areal.utils.dataloader import create_dataloader

        config = TrainDatasetConfig(path="", type="rl", batch_size=world_size, num_workers=0)
        loader = create_dataloader(list(range(n_items)), rank, world_size, config)
        found = cycle_dataloader(loader)
        own = len(loader)
        for _ in range(epoch * own):
            next(found)
        return [item for _ in range(own) for item in next(found)]

    def evaluation_items(self, n_items: int, batch_size: int, rank: int, n_ranks: int) -> list[int]:
        from areal.api.cli_args import ValidDatasetConfig
        from areal.utils.dataloader import create_dataloader

        config = ValidDatasetConfig(path="", type="rl", batch_size=batch_size * n_ranks, num_workers=0)
        return [item for batch in create_dataloader(list(range(n_items)), rank, n_ranks, config) for item in batch]


def _group(item: Item, data: Mapping[str, Any]) -> Group:
    completions = []
    prompt: list[int] = []
    for row in range(len(data["rewards"])):
        kept = data["attention_mask"][row]
        ids = data["input_ids"][row][kept].tolist()
        start = data["loss_mask"][row].tolist().index(1) if data["loss_mask"][row].any() else len(ids)
        prompt = ids[:start]
        completions.append(
            Completion(
                ids[start:],
                data["logprobs"][row][kept][start:].tolist(),
                token_versions=data["versions"][row][kept][start:].tolist(),
            )
        )
    versions = [version for each in completions for version in each.token_versions or ()]
    return Group(
        prompt, completions, data["rewards"].tolist(), item_id=item.id, policy_version=min(versions, default=0)
    )
