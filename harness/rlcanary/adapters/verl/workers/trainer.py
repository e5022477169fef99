"""verl's default trainer and its workers in one process: no Ray, no FSDP, no accelerator."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.verl.workers.agents import agent_worker
from rlcanary.adapters.verl.workers.engine import new_engine, on_ranks
from rlcanary.adapters.verl.workers.run_config import composed
from rlcanary.adapters.verl.workers.transfer_queue import Rows, Store, trainer_module

if TYPE_CHECKING:
    from rlcanary.contract.batch import Completion

PAD, EOS = 0, 2
# The fields that the workers of an actor read.
READ = (
    *("input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask"),
    *("old_log_probs", "ref_log_prob", "advantages", "rollout_is_weights"),
)


def new_trainer(config: Any, **parts: Any) -> Any:
    """Make verl's trainer for synchronous runs. Parts are what its `init` would set."""
    trainer_module()
    from verl.trainer.ppo.v1 import PPOTrainerSync

    with quiet():
        trainer = PPOTrainerSync(config)
    trainer.global_steps, trainer.ref_in_actor = 1, False
    trainer.tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=EOS)
    vars(trainer).update(parts)
    return trainer


class Workers:
    """The workers of a run, one per data-parallel rank, in the place of the Ray actors that the trainer calls.

    The state is rank 0's; the others have copies. FSDP's reduction of gradients is a sum over the ranks by their number.
    """

    def __init__(self, store: Store, actor: Any, state: Any, sizes: Mapping[str, Any], n_ranks: int = 1) -> None:
        """Take the rows, an `ActorConfig`, a `TrainState` and settings of micro-batches that a `TrainingWorker` asks for."""
        own = state.model, state.optimizer, state.scheduler
        self.store, self.actor, self.sizes = store, actor, sizes
        self.states = [own, *(copy.deepcopy(own) for _ in range(n_ranks - 1))]
        self.reference = state.ref_model
        self._dispatch_info = {"actor": list(range(n_ranks))}

    def compute_log_prob(self, rows: Rows) -> Rows:
        return self._scored(rows, [model for model, *_ in self.states])

    def compute_ref_log_prob(self, rows: Rows) -> Rows:
        return self._scored(rows, [copy.deepcopy(self.reference) for _ in self.states[1:]] + [self.reference])

    def update_actor(self, rows: Rows) -> Any:
        def on_rank(rank: int, group: Any) -> Any:
            worker = self._worker(rank, group, *self.states[rank])
            return worker.train_mini_batch(chunks[rank])

        chunks = self._chunks(rows)
        first = on_ranks(len(chunks), on_rank)[0]
        # The share of an accelerator's speed, without one.
        first["metrics"]["mfu"] = [0.0]
        return first

    def _scored(self, rows: Rows, models: Sequence[Any]) -> Rows:
        import torch

        chunks = self._chunks(rows)
        outputs = on_ranks(
            len(chunks), lambda rank, group: self._worker(rank, group, models[rank]).infer_batch(chunks[rank])
        )
        for name in ("log_probs", "entropy"):
            if name in outputs[0]:
                values = [row for output in outputs for row in output[name].unbind()]
                for key, row in zip(rows.keys, values, strict=True):
                    self.store.rows[key][name] = torch.as_tensor(row)
        return rows

    def _chunks(self, rows: Rows) -> list[Any]:
        """Divide rows among the ranks as the dispatch of a worker group does, with the settings of the call."""
        from verl.utils import tensordict_utils

        data = self.store.kv_batch_get(rows.keys, rows.partition_id, READ)
        tensordict_utils.assign_non_tensor(data, **rows.extra_info)
        if len(self.states) == 1:
            return [data]
        with quiet():
            return list(tensordict_utils.chunk_tensordict(data, len(self.states)))

    def _worker(self, rank: int, group: Any, *state: Any) -> Any:
        """Make a `TrainingWorker` without its constructor, which builds an engine on an accelerator."""
        from verl.utils.profiler import DistProfiler
        from verl.workers.engine_workers import TrainingWorker
        from verl.workers.utils.losses import ppo_loss

        worker = TrainingWorker.__new__(TrainingWorker)
        worker.engine = new_engine(copy.deepcopy(self.actor), group, *state)
        worker.engine.get_data_parallel_rank = lambda: rank
        worker.engine.is_mp_src_rank_with_outputs = lambda: True
        if group.size() > 1:
            worker.engine.forward_backward_batch = partial(
                _reduced, worker.engine, worker.engine.forward_backward_batch
            )
        worker.engine_config = SimpleNamespace(
            **{"use_fused_kernels": False, "forward_only": False},
            **{name: self.sizes.get(name) for name in ("use_dynamic_bsz", "max_token_len_per_gpu")},
            micro_batch_size_per_gpu=self.sizes.get("micro_batch_size_per_gpu"),
            infer_max_token_len_per_gpu=self.sizes.get("max_token_len_per_gpu"),
            infer_micro_batch_size_per_gpu=self.sizes.get("micro_batch_size_per_gpu"),
        )
        worker.model_config = composed().actor_rollout_ref.model
        worker.loss_fn = partial(ppo_loss, worker_config(self.actor))
        worker.device_name, worker.flops_counter, worker.profiler = "cpu", None, DistProfiler(rank)
        return worker


def worker_config(actor: Any) -> Any:
    """Copy an `ActorConfig`, into which each worker writes the counts of its batch."""
    return copy.deepcopy(actor)


def _reduced(engine: Any, run: Callable[..., Any], *args: Any, forward_only: bool = False, **options: Any) -> Any:
    """Average the gradients of all ranks behind a batch, as FSDP does."""
    import torch

    output = run(*args, forward_only=forward_only, **options)
    group = engine.get_data_parallel_group()
    for parameter in () if forward_only else engine.module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            torch.distributed.all_reduce(parameter.grad, group=group)
            parameter.grad /= group.size()
    return output


def put_rollouts(store: Store, rollouts: Sequence[Rollout]) -> Rows:
    """Have verl's agent loop worker write finished rollouts into the store -> their rows, in order."""
    worker = agent_worker(composed(), None)

    async def put() -> None:
        for each in rollouts:
            await worker._agent_loop_postprocess(
                each.output, validate=False, uid=each.uid, session_id=each.session, global_steps=1
            )

    with quiet():
        asyncio.run(put())
    keys = [f"{each.uid}_{each.session}_0" for each in rollouts]
    return Rows(keys, [store.tags[key] for key in keys])


class Rollout:
    """A finished rollout as verl's agent loop hands it on."""

    def __init__(
        self,
        uid: str,
        session: int,
        prompt_ids: Sequence[int],
        completion: Completion,
        reward: float,
        version: int | None = None,
    ) -> None:
        """Take a completion of a prompt and its reward.

        Args:
            uid: the group.
            session: the number of the completion in its group.
            prompt_ids: the prompt.
            completion: what was sampled, and what was inserted.
            reward: of the completion.
            version: the global step of the weights that sampled it.
        """
        from verl.experimental.agent_loop.agent_loop import AgentLoopMetrics, AgentLoopOutput

        ids = list(completion.token_ids)
        sampled = [True] * len(ids) if completion.sampled is None else completion.sampled
        self.uid, self.session = uid, session
        self.output = AgentLoopOutput(
            prompt_ids=list(prompt_ids),
            response_ids=ids,
            response_mask=[int(each) for each in sampled],
            response_logprobs=None if completion.logprobs is None else list(completion.logprobs),
            reward_score=reward,
            metrics=AgentLoopMetrics(),
            num_turns=2,
            extra_fields={"min_global_steps": version, "max_global_steps": version},
        )
