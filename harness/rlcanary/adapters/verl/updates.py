"""verl's updates: the trainer's step on rollouts, with its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rlcanary.adapters.batches import prompts_of, tokens_of_completions
from rlcanary.adapters.frameworks import quiet
from rlcanary.adapters.verl.losses.objective import Objective
from rlcanary.adapters.verl.workers.run_config import run_config
from rlcanary.adapters.verl.workers.trainer import Rollout, Workers, new_trainer, put_rollouts
from rlcanary.adapters.verl.workers.transfer_queue import Rows, stored
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.batch import Completion
from rlcanary.contract.records.layouts import Layout

if TYPE_CHECKING:
    from torch import Tensor

    from rlcanary.contract.batch import CollatedBatch, Group


class Updates(Objective):
    """The updates of a run on a rollout batch."""

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        """Run the trainer's step with one update on all rows."""
        return self._step(state, rollouts_of(batch), given_reference=batch.ref_logprobs)

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        conventions = self.conventions
        prompts, rest = divmod(len(groups), conventions.mini_batches)
        if rest or len({len(group.completions) for group in groups}) > 1:
            raise NotProvided("an update takes the rollout.n completions of each of ppo_mini_batch_size prompts")
        rollouts = [
            Rollout(str(number), session, group.prompt_ids, completion, reward)
            for number, group in enumerate(groups)
            for session, (completion, reward) in enumerate(zip(group.completions, group.rewards, strict=True))
        ]
        sizes = {"ppo_mini_batch_size": prompts, "ppo_epochs": conventions.epochs_per_rollout}
        return self._step(state, rollouts, sizes, n=len(groups[0].completions))

    def sharded_update(self, state: Any, batch: CollatedBatch, layout: Layout) -> dict[str, float]:
        if layout != Layout(layout.data_parallel, micro_batches=layout.micro_batches):
            raise NotProvided("sequence, tensor and expert parallelism need an accelerator")
        rows, rest = divmod(len(batch.rewards), layout.data_parallel * layout.micro_batches)
        if rest:
            raise NotProvided("ranks and micro-batches have to be of equal size")
        rollouts = rollouts_of(batch)
        return self._step(
            state, rollouts, given_reference=batch.ref_logprobs, n_ranks=layout.data_parallel, rows_at_once=rows
        )

    def _step(
        self,
        state: Any,
        rollouts: Sequence[Rollout],
        sizes: Mapping[str, Any] | None = None,
        n: int = 1,
        given_reference: Tensor | None = None,
        n_ranks: int = 1,
        rows_at_once: int | None = None,
    ) -> dict[str, float]:
        """Run the trainer's step on finished rollouts.

        Args:
            state: the state to train.
            rollouts: finished ones.
            sizes: `ppo_mini_batch_size` and `ppo_epochs`, by default one update on all rows.
            n: completions per prompt.
            given_reference: [B, T] logprobs of the reference model, which then does not score.
            n_ranks: data-parallel ranks.
            rows_at_once: rows of a micro-batch; by default as configured, or else all of an update.
        """
        actor, config = self._actor_config, self._algorithm_config
        if config.adv_estimator == "gae":
            raise NotProvided("a TrainState has no critic")
        in_actor = state.ref_model is None and hasattr(state.model, "peft_config")
        if self.conventions.kl_coef and given_reference is None and state.ref_model is None and not in_actor:
            raise NotProvided("a KL needs a reference")
        has_logprobs = all(each.output.response_logprobs is not None for each in rollouts)
        if self.conventions.importance_level != "none" and not has_logprobs:
            raise NotProvided("rollout correction needs the sampler's logprobs")
        sizes = {"ppo_mini_batch_size": len(rollouts), "ppo_epochs": 1, **(sizes or {})}
        settings = run_config(
            actor_rollout_ref__actor={**self.actor, **sizes},
            actor_rollout_ref__rollout={
                **{"n": n, "temperature": self.temperature, "calculate_log_probs": has_logprobs}
            },
            algorithm=self.algorithm,
        )
        all_rows = n * sizes["ppo_mini_batch_size"]
        micro = {
            "use_dynamic_bsz": actor.use_dynamic_bsz,
            "max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
            "micro_batch_size_per_gpu": rows_at_once or self.actor.get("ppo_micro_batch_size_per_gpu", all_rows),
        }
        metrics: dict[str, Any] = {}
        with stored() as store, quiet():
            rows = put_rollouts(store, rollouts)
            workers = Workers(store, actor, state, micro, n_ranks)
            trainer = new_trainer(settings, actor_rollout_wg=workers, ref_policy_wg=workers, **finished(rows))
            trainer.ref_in_actor = in_actor
            if given_reference is not None:
                trainer.use_reference_policy = False
                for key, row_T in zip(rows.keys, given_reference, strict=True):
                    store.rows[key]["ref_log_prob"] = row_T[: len(store.rows[key]["responses"])]
            trainer._step_once(metrics, {}, len(rollouts))
        logged = {name: float(value) for name, value in metrics.items()}
        return {**self._named(logged), **{name: logged[f"actor/{name}"] for name in ("loss", "grad_norm", "lr")}}


def finished(rows: Rows) -> dict[str, Any]:
    """Return the parts of a trainer whose rollouts are done and rewarded."""
    return {
        "replay_buffer": SimpleNamespace(sample=lambda **_: (rows, {})),
        "reward_loop_manager": SimpleNamespace(reward_loop_worker_handles=[]),
        "checkpoint_manager": SimpleNamespace(sleep_replicas=lambda: None),
        "curr_step_profile": False,
    }


def rollouts_of(batch: CollatedBatch) -> list[Rollout]:
    """Take a batch apart into the rollouts that it was made of."""
    are_tokens_BT, given = tokens_of_completions(batch), batch.old_logprobs
    sessions: dict[int, int] = {}
    rollouts = []
    for row, (prompt, kept, group) in enumerate(
        zip(prompts_of(batch), are_tokens_BT, batch.group_ids.tolist(), strict=True)
    ):
        sampled = batch.completion_mask[row][kept].tolist()
        logprobs = None if given is None else given[row][kept].where(batch.completion_mask[row][kept], 0.0).tolist()
        completion = Completion(batch.completion_ids[row][kept].tolist(), logprobs, sampled=sampled)
        session = sessions[group] = sessions.get(group, -1) + 1
        rollouts.append(Rollout(str(group), session, prompt.tolist(), completion, float(batch.rewards[row])))
    return rollouts
