"""verl's weight sync and its validation, with an engine in the place of vLLM's server."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.verl.building import connected
from rlcanary.adapters.verl.datasets import Datasets
from rlcanary.adapters.verl.rollouts import Templated
from rlcanary.adapters.verl.runs import silent
from rlcanary.adapters.verl.workers.agents import Server, agent_worker
from rlcanary.adapters.verl.workers.engine import new_engine, on_ranks
from rlcanary.adapters.verl.workers.run_config import new_config, run_config
from rlcanary.adapters.verl.workers.trainer import EOS, PAD
from rlcanary.adapters.verl.workers.transfer_queue import Rows, stored
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from torch import Tensor

# The most tokens of an answer.
ANSWER = 8


class Syncing(Datasets):
    """From the trainer to the engine."""

    def sync_weights(self, state: Any, engine: Any) -> None:
        """Run the worker's `update_weights`, whose rollout is this engine."""
        from verl.workers.engine_workers import ActorRolloutRefWorker

        if hasattr(state.model, "peft_config"):
            raise NotProvided("adapters are sent apart, as a LoRA that vLLM loads")
        worker = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
        worker.config = run_config(actor_rollout_ref__rollout={"name": "vllm"}).actor_rollout_ref
        worker.layered_summon, worker.peft_merge, worker.base_sync_done = False, False, True
        worker.rollout = Receiver(engine, set(state.model.state_dict()))
        part = new_engine(self._actor_config, None, state.model)
        part.model_config = SimpleNamespace(hf_config=state.model.config, lora=worker.config.model.get("lora") or {})
        part._uses_fsdp2_cpu_offload_policy = False
        worker.actor = SimpleNamespace(engine=part)
        # To collect what other models left takes older releases longer than the sync.
        with connected(), quiet(), mock.patch("gc.collect"):
            on_ranks(1, lambda _, __: asyncio.run(worker.update_weights(global_steps=engine.version + 1)))

    def evaluate(self, state: Any) -> dict[str, float]:
        """Run the trainer's validation on the state's items, with an engine that has its weights."""
        items, engine = list(state.eval_items), self.new_engine(state.model)
        dataset = [
            {
                **{"index": place, "raw_prompt": [{"role": "user", "content": str(place)}], "data_source": "any"},
                "reward_model": {"ground_truth": place},
            }
            for place in range(len(items))
        ]
        widths = {"prompt_length": max(len(item.prompt_ids) for item in items), "response_length": ANSWER}
        config = new_config(
            actor_rollout_ref__rollout={"name": "vllm", **widths},
            reward__custom_reward_function={"path": "given"},
            data={"train_batch_size": 1, "dataloader_num_workers": 0},
            algorithm=self.algorithm,
        )
        tokenizer = Templated(Spelling(engine), [list(item.prompt_ids) for item in items])

        def score(ground_truth: int, solution_str: str, **_: Any) -> float | None:
            reward: float | None = items[ground_truth].reward(solution_str)
            return reward

        async def generate(batch: Any) -> None:
            worker = agent_worker(config, tokenizer, Server(engine, ANSWER, {}), score)
            await worker.generate_sequences(batch)
            await asyncio.gather(*worker.background_tasks)

        with stored() as store, quiet(), silent():

            def keys() -> list[str]:
                # Those of prompts have no number.
                return [key for key in store.rows if "_" in key]

            manager = SimpleNamespace(generate_sequences=lambda batch: asyncio.run(generate(batch)))
            parts = {
                "tokenizer": tokenizer,
                "agent_loop_manager": manager,
                "replay_buffer": SimpleNamespace(sample=lambda **_: (Rows(keys(), partition_id="val"), {})),
                "reward_loop_manager": SimpleNamespace(reward_loop_worker_handles=[]),
            }
            with other_process():
                metrics = self._loaded_with(dataset, config, parts)._validate()
        return {"reward": float(metrics["val-core/any/acc/mean@1"])}


@contextmanager
def other_process() -> Iterator[None]:
    """Leave the random states as they are: verl's driver and agent loops are processes besides those that train."""
    import torch

    state = random.getstate()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(state)


class Spelling:
    """An engine's way to write ids as text, as a tokenizer."""

    pad_token_id, eos_token_id = PAD, EOS

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def decode(self, ids: Any, **_: Any) -> str:
        return str(self.engine.decode(ids.tolist()))


class Receiver:
    """The engine as verl's adapter of a vLLM server: weights, then its cache, then the version."""

    def __init__(self, engine: Any, names: set[str]) -> None:
        """Take the engine and the names that it knows its weights by."""
        self.engine, self.names = engine, names

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: the engine keeps its memory."""

    async def update_weights(
        self, weights: Iterable[tuple[str, Tensor]], global_steps: int, peft_config: Any, base_sync_done: bool
    ) -> None:
        self.engine.load_weights(self._known(weights))
        self.engine.reset_prefix_cache()
        self.engine.version = global_steps

    def _known(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, weight in weights:
            if name not in self.names:
                raise NotProvided("experts are sent one by one, as in the files of a checkpoint")
            yield name, weight
