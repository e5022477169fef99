"""open-instruct's rollouts, rewards, evaluations and weight sync."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import open_instruct_run as run
import open_instruct_sampler as sampling_of
from open_instruct_objective import Objective

from rlcanary.contract.adapter import Item, NotProvided
from rlcanary.contract.batch import Completion, Group

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.records.preparation import Answer
    from rlcanary.contract.records.reward_parts import RewardParts

VERIFIERS = {
    ("math", "boxed"): "MathVerifier",
    ("number", "boxed"): "MathVerifier",
    ("number", "hash"): "GSM8KVerifier",
    ("number", "bare"): "GSM8KVerifier",
    ("exact", "tag"): "StringMatcherVerifier",
    ("choice", "tag"): "StringMatcherVerifier",
    ("exact", "bare"): "PuzzleMatcherVerifier",
}


class Rollouts(Objective):
    """From items to rewarded completions."""

    def rollout(self, engine: Any, items: list[Item], sampling: Mapping[str, Any]) -> list[Group]:
        config = sampling_of.request_of(engine, sampling)
        dataset = run.dataset_of([item.prompt_ids for item in items])
        actor = sampling_of.sampler(engine, dataset, self._rewards(items), sampling_of.room(items, config))
        results = sampling_of.answered(actor, sampling_of.requests_for(items, config))
        return [group_of(item, result) for item, result in zip(items, results, strict=True)]

    def _rewards(self, items: Sequence[Item]) -> Any:
        """Make the reward of items, whose ground truths are their numbers."""

        def reward(label: str, text: str) -> Any:
            return items[int(label)].reward(text)

        return sampling_of.reward_config(self.configs().streaming, {"": sampling_of.verifier(reward)})

    def rollout_seed(self, seed: int, rank: int, step: int, request: int) -> int:
        """Read the seed off a request that the sampler sends."""
        from open_instruct import grpo_fast

        configs = self.configs(seed=seed, num_samples_per_prompt_rollout=1)
        config = grpo_fast.create_generation_configs(configs.args, configs.streaming, configs.vllm)["train"]
        asked: list[int] = []

        class Asked:
            version = step

            async def agenerate(self, _: Any, wanted: Mapping[str, Any]) -> list[Completion]:
                asked.append(wanted["seed"])
                return [Completion([1], [0.0])]

            def decode(self, _: Any) -> str:
                return ""

        items = [Item(str(number), [1], lambda _: 0.0) for number in range(request + 1)]
        actor = sampling_of.sampler(Asked(), run.dataset_of([[1]] * len(items)), self._rewards(items), 16)
        sampling_of.answered(actor, sampling_of.requests_for(items, config)[request:])
        return asked[0]

    def score(self, items: list[Item], completions: list[str]) -> Tensor:
        import torch

        count = len(items)
        score = self._rewards(items).build()
        labels = [[str(number)] for number in range(count)]
        reasons = ["stop"] * count
        scores, _ = asyncio.run(
            score([[]] * count, list(completions), labels, [[""]] * count, reasons, sampling_of.no_calls(count), None)
        )
        return torch.tensor([float(each) for each in scores])

    def combine_rewards(self, parts: RewardParts) -> Tensor:
        """Add verifiers up, of which a row has those that gave it something."""
        import torch

        count, kinds = parts.values.shape
        verifiers = {}
        for kind in range(kinds):
            values = parts.values[:, kind].tolist()
            made = sampling_of.verifier(lambda label, _, values=values: values[int(label)])  # type: ignore[misc]
            made.name, made.weight = str(kind), float(parts.weights[kind])
            verifiers[str(kind)] = made
        score = sampling_of.reward_config(self.configs().streaming, verifiers).build()
        sources = [
            [str(kind) for kind in range(kinds) if not math.isnan(parts.values[row, kind])] for row in range(count)
        ]
        labels = [[str(row)] * len(own) for row, own in enumerate(sources)]
        reasons = ["stop"] * count
        scores, _ = asyncio.run(
            score([[]] * count, [""] * count, labels, sources, reasons, sampling_of.no_calls(count), None)
        )
        return torch.tensor([float(each) for each in scores])

    def verify(self, answer: Answer) -> bool:
        from open_instruct import ground_truth_utils

        name = VERIFIERS.get((answer.kind, answer.format))
        if name is None:
            raise NotProvided(f"open-instruct has no verifier of {answer.kind} in the format {answer.format}")
        result = getattr(ground_truth_utils, name)()([], answer.text, answer.reference)
        return bool(result.score == 1.0)

    # Evaluations

    def evaluate(self, state: Any) -> dict[str, float]:
        """Let the sampler answer the items, and run `maybe_evaluate` on its results."""
        from open_instruct import grpo_fast

        items = list(state.eval_items)
        configs = self.configs(eval_response_length=EVALUATED, with_tracking=True, num_training_steps=2)
        config = grpo_fast.create_generation_configs(configs.args, configs.streaming, configs.vllm)["eval"]
        if not items:
            raise NotProvided("without items open-instruct evaluates nothing")
        engine = self.new_engine(state.model)
        dataset = run.dataset_of([item.prompt_ids for item in items])
        actor = sampling_of.sampler(engine, dataset, self._rewards(items), sampling_of.room(items, config))
        results = sampling_of.answered(actor, sampling_of.requests_for(items, config, is_eval=True))
        prompts = [item.prompt_ids for item in items]
        logged = evaluation_of(configs, config, results, prompts, actor.llm_engine.tokenizer)
        return {"reward": logged["eval/scores"], "length": logged["eval/sequence_lengths"]}

    # Weights

    def sync_weights(self, state: Any, engine: Any) -> None:
        """Broadcast the weights; the engine takes what NCCL sends, by the names and shapes that were announced."""
        from open_instruct import vllm_utils

        told: list[Mapping[str, Any]] = []
        handle = SimpleNamespace(
            sleep=SimpleNamespace(remote=lambda: None),
            update_weights=SimpleNamespace(remote=lambda update, _: told.append(update["update_info"])),
        )

        def send(iterator: Any, **_: Any) -> None:
            sent = list(iterator)
            announced = list(zip(told[0]["names"], told[0]["dtype_names"], told[0]["shapes"], strict=True))
            got = [(name, str(tensor.dtype).split(".")[-1], list(tensor.shape)) for name, tensor in sent]
            if got != announced:
                raise RuntimeError("NCCL sends other tensors than were announced")
            engine.load_weights(sent)

        zero = SimpleNamespace(GatheredParameters=lambda *_, **__: nullcontext())
        model = getattr(state.model, "module", state.model)
        with (
            run.on_cpu(),
            patch.object(vllm_utils, "deepspeed", SimpleNamespace(zero=zero)),
            patch.object(vllm_utils.ray, "get", lambda value: value),
            patch.object(vllm_utils, "NCCLTrainerSendWeightsArgs", lambda **options: options),
            patch.object(vllm_utils.NCCLWeightTransferEngine, "trainer_send_weights", send, create=True),
        ):
            vllm_utils.broadcast_weights_to_vllm(model, [handle], object(), engine.version + 1)
        # vllm_enable_prefix_caching is off: vLLM keeps no prefixes.
        engine.reset_prefix_cache()
        engine.version += 1


EVALUATED = 16


def evaluation_of(
    configs: run.Configs, config: Any, results: Sequence[Any], prompts: Sequence[Sequence[int]], tokenizer: Any
) -> dict[str, float]:
    """Run `maybe_evaluate` on results of the sampler -> what it logs."""
    import queue

    from open_instruct import grpo_utils
    from open_instruct.data_types import EnvConfig

    found: queue.Queue[Any] = queue.Queue()
    for result in results:
        found.put(result)
    logged: dict[str, Any] = {}
    tracker = SimpleNamespace(Table=lambda **_: None, log=lambda metrics, **_: logged.update(metrics))
    with run.on_cpu(), patch.object(grpo_utils, "wandb", tracker):
        grpo_utils.maybe_evaluate(
            configs.args,
            1,
            found,
            tokenizer,
            0,
            run.dataset_of(prompts),
            config,
            None,
            EnvConfig(),
            configs.streaming.max_possible_score,
        )
    return {name: float(value) for name, value in logged.items() if value is not None}


def group_of(item: Item, result: Any) -> Group:
    """Make a group of what the sampler puts into the queue of results."""
    completions = [
        Completion(ids, logprobs, reason, sampled=[bool(each) for each in mask])
        for ids, logprobs, reason, mask in zip(
            result.responses, result.logprobs, result.finish_reasons, result.masks, strict=True
        )
    ]
    rewards = [float(score) for score in result.reward_scores]
    return Group(item.prompt_ids, completions, rewards, item_id=item.id, policy_version=result.model_step)
