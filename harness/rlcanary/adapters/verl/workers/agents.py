"""verl's agent loops with another engine behind its client, and its reward managers with other reward functions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.verl.workers.transfer_queue import trainer_module

if TYPE_CHECKING:
    from rlcanary.contract.batch import Completion

# How verl names the ends of a completion.
STOP_REASONS = {"stop": "completed", "length": "completed", "abort": "aborted"}


class Remote:
    """An object in this process, called as an actor of Ray is: each method by its `remote`."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.target, name))


class Server:
    """An engine in the place of verl's server of vLLM, and of the load balancer in front of several."""

    def __init__(self, engine: Any, limit: int, ends: Mapping[str, Any]) -> None:
        """Take an engine, the most tokens of a response, and what the model's generation config says of its end."""
        self.engine, self.limit, self.ends = engine, limit, ends
        self.has_marks, self.last_reason = False, ""

    async def require_acquire_fields(self) -> list[str]:
        return []

    async def require_release_fields(self) -> list[str]:
        return []

    async def acquire_server(self, request_id: str) -> tuple[str, Any]:
        return "server", Remote(self)

    def release_server(self, server_id: str) -> None:
        """Do nothing: there is one server."""

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling_params: Mapping[str, Any], **_: Any
    ) -> Any:
        from verl.workers.rollout.replica import TokenOutput

        given = dict(sampling_params)
        top_k, logprobs, limit = given.pop("top_k"), given.pop("logprobs"), given.pop("max_tokens", self.limit)
        (completion,) = await self.engine.agenerate(
            prompt_ids,
            {
                **given,
                **self.ends,
                "top_k": max(top_k, 0),  # -1 is off
                "logprobs": "processed" if logprobs else None,
                "max_new_tokens": limit,
                "n": 1,
            },
        )
        self.has_marks, self.last_reason = self.has_marks or completion.sampled is not None, completion.finish_reason
        return token_output(TokenOutput, completion, self.engine.version)


def token_output(kind: Any, completion: Completion, version: int) -> Any:
    return kind(
        token_ids=list(completion.token_ids),
        log_probs=None if completion.logprobs is None else list(completion.logprobs),
        stop_reason=STOP_REASONS[completion.finish_reason],
        extra_fields={"global_steps": version},
    )


def agent_worker(config: Any, tokenizer: Any, server: Any = None, score: Callable[..., Any] | None = None) -> Any:
    """Make verl's agent loop worker without its constructor, which loads a model's files.

    Args:
        config: of the run.
        tokenizer: of transformers.
        server: answers its requests.
        score: the custom reward function; none leaves the rewards to the agent loops.
    """
    trainer_module()
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopWorkerTQ
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.workers.rollout import llm_server

    worker_class = AgentLoopWorkerTQ.__ray_metadata__.modified_class
    worker = worker_class.__new__(worker_class)
    rollout = config.actor_rollout_ref.rollout
    worker.config, worker.rollout_config, worker.dataset_cls = config, rollout, RLHFDataset
    worker.tokenizer, worker.processor, worker.hf_model_type = tokenizer, None, None
    worker.tools, worker.mm_processor_kwargs, worker.distillation_enabled = [], {}, False
    worker.background_tasks = set()
    # The client of runs whose weights are synced while it waits: it continues what was interrupted.
    worker.llm_client = server and llm_server.FullyAsyncLLMServerClient(config, Remote(server))
    worker.reward_loop_worker_handles = score and [Remote(reward_worker(config, tokenizer, score))]
    return worker


def reward_worker(config: Any, tokenizer: Any, score: Callable[..., Any]) -> Any:
    """Make verl's reward worker with the configured manager and a custom reward function."""
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker
    from verl.trainer.ppo import reward

    worker = RewardLoopWorker.__new__(RewardLoopWorker)
    worker.config = config
    with mock.patch.object(reward, "get_custom_reward_fn", return_value=score):
        worker.reward_manager = reward.load_reward_manager(config, tokenizer)
    return worker


def scored(data: Any, decode: Callable[..., str], score: Callable[..., Any], config: Any) -> list[Any]:
    """Have the reward worker score the rows of a batch, whose responses `decode` writes as text."""

    async def run() -> Any:
        worker = reward_worker(config, SimpleNamespace(decode=decode), score)
        return await worker.compute_score_batch(data)

    with quiet():
        return [result["reward_score"] for result in asyncio.run(run())]


def numbered(n_rows: int) -> dict[str, list[Any]]:
    """Return what a dataset says of rows whose right answers are their numbers."""
    return {
        "data_source": ["any"] * n_rows,
        "reward_model": [{"ground_truth": row} for row in range(n_rows)],
        "extra_info": [{} for _ in range(n_rows)],
    }
