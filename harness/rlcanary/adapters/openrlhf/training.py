"""OpenRLHF's PPO step: its experience maker and its policy worker on one rollout batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from rlcanary.adapters.openrlhf import run
from rlcanary.adapters.openrlhf.base import OpenrlhfBase
from rlcanary.contract.adapter import NotProvided

if TYPE_CHECKING:
    from rlcanary.contract.batch import CollatedBatch, Group

LOGGED = {
    "policy_loss": "policy_loss",
    "ppo_clip_ratio": "clip_fraction",
    "ppo_kl": "approx_kl",
    "entropy_loss": "entropy",
    "actor_lr": "lr",
    "actor_grad_norm": "grad_norm",
    "reward": "reward",
}


class Training(OpenrlhfBase):
    """Updates of a model."""

    def train_step(self, state: Any, batch: CollatedBatch) -> dict[str, float]:
        if self.conventions.kl_coef and batch.ref_logprobs is not None:
            raise NotProvided("the reference model computes its logprobs itself")
        return self._trained(state, batch.groups(), 0, epochs=1, mini_batches=1)

    def rl_step(self, state: Any, groups: list[Group], pad_token_id: int) -> dict[str, float]:
        conventions = self.conventions
        return self._trained(state, groups, pad_token_id, conventions.epochs_per_rollout, conventions.mini_batches)

    def _trained(
        self, state: Any, groups: list[Group], pad_token_id: int, epochs: int, mini_batches: int
    ) -> dict[str, float]:
        import torch
        from openrlhf.trainer.ray.launcher import ReferenceModelActor
        from openrlhf.trainer.ray.ppo_actor import ActorPPOTrainer, PolicyModelActor

        sizes = {len(group.completions) for group in groups}
        rows = sum(len(group.completions) for group in groups)
        if len(sizes) != 1 or rows % mini_batches:
            raise NotProvided("prompts have one number of samples, and updates one number of rows")
        args = self.args(
            {
                "rollout.n_samples_per_prompt": sizes.pop(),
                "rollout.micro_batch_size": rows,
                "train.micro_batch_size": rows // mini_batches,
                "train.batch_size": rows // mini_batches,
                "train.max_epochs": epochs,
            }
        )
        engine = run.engine_of(state, args.actor.max_norm)
        worker_class, reference_class = run.class_of(PolicyModelActor), run.class_of(ReferenceModelActor)
        worker = worker_class.__new__(worker_class)
        worker.strategy = run.strategy_of(args)
        worker.actor = run.actor_of(engine, args.rollout.temperature)
        reference = None
        if args.algo.kl.init_coef > 0:
            if state.ref_model is None:
                raise NotProvided("a KL coefficient needs a reference")
            reference = reference_class.__new__(reference_class)
            reference.strategy = worker.strategy
            reference.model = run.actor_of(state.ref_model.eval(), args.rollout.temperature)
        generator = run.generator_of(args)
        with run.on_cpu():
            with patch.object(torch.cuda, "current_device", lambda: 0):
                worker.trainer = ActorPPOTrainer(
                    worker.strategy,
                    worker.actor,
                    None,
                    state.optimizer,
                    state.scheduler,
                    micro_train_batch_size=args.train.micro_batch_size,
                    dataloader_pin_memory=False,
                )
            samples = [
                generator._process_response_into_experience(response, max_len=len(response["observation_tokens"]) + 1)
                for response in _responses(groups, args.algo.advantage.is_correction_enable)
            ]
            maker = run.maker_of(args, worker, reference, pad_token_id)
            experiences = maker.make_experience_batch(samples)
            maker.actor_model_group.async_run_method_batch(method_name="append", experience=experiences)
            with torch.enable_grad():
                (status,) = maker.actor_model_group.async_run_method(method_name="fit", kl_ctl=maker.kl_ctl.value)
        kept = {**LOGGED, "kl": "kl"} if args.algo.kl.use_loss else LOGGED
        return {ours: float(status[theirs]) for theirs, ours in kept.items() if theirs in status}


def _responses(groups: list[Group], has_logprobs: bool) -> list[dict[str, Any]]:
    """Return the completions as the rollout worker gives them, with the sampler's logprobs if they are asked for."""
    pairs = [(group, *pair) for group in groups for pair in zip(group.completions, group.rewards, strict=True)]
    if has_logprobs and any(completion.logprobs is None for _, completion, _ in pairs):
        raise NotProvided("is_correction_enable needs the sampler's logprobs")
    return [
        run.response_of(
            group.prompt_ids,
            completion.token_ids,
            completion.sampled,
            completion.logprobs if has_logprobs else None,
            reward,
        )
        for group, completion, reward in pairs
    ]
