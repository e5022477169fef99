"""The watched parts of SkyRL: updates of its workers, and advantages and samples in its trainer.

SkyRL brings what is in its registries to each of its processes. An entry that is never called is registered there: a process
imports it, and with it this module. A trainer that is not asynchronous samples with the weights that it trains, so that its
logprobs are compared with the engine's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NoReturn

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry, PolicyLossRegistry
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from skyrl.train.trainer import RayPPOTrainer
from torch import Tensor

from rlcanary.adapters.skyrl.options import conventions_of
from rlcanary.contract.conventions import Conventions
from rlcanary.errors import UserError
from rlcanary.live.audit import Audit, log
from rlcanary.live.hooks.environment import audit_of
from rlcanary.live.hooks.fitting import attempted, require
from rlcanary.live.hooks.skyrl import WRITTEN_FOR
from rlcanary.live.hooks.steps import Steps
from rlcanary.live.record import Record
from rlcanary.live.update import exact

# The attributes of a worker and of a trainer that keep what watches them.
STEPS, AUDIT = "_rlcanary_steps", "_rlcanary_audit"
# The options of `off_policy_correction` that leave tokens or rows out of the loss.
MASKS = (
    *("sequence_mask_metric", "outlier_token_is_threshold_low", "outlier_token_is_threshold_high"),
    *("token_mask_is_threshold_low", "token_mask_is_threshold_high"),
)


def declared(algorithm: Any) -> Conventions | None:
    """Translate an `AlgorithmConfig`; None for one that the conventions cannot express, of which the laws are judged."""
    try:
        # An entropy bonus does not reach the logprobs.
        return conventions_of(algorithm, 1.0, 1, 1).replace(entropy_coef=0.0)
    except UserError as error:
        log.warning("SkyRL's loss is judged by the laws alone: %s", error)
        return None


def watched_micro_batch(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `PolicyWorkerBase._forward_backward_micro`, of which a loss sees the logprobs."""

    @wraps(run)
    def watched(worker: Any, experience: Any, microbatch_weight: float, loss_fn: Any = None, **options: Any) -> Any:
        if loss_fn is not None or not hasattr(worker.optimizer, "register_step_post_hook"):
            return run(worker, experience, microbatch_weight, loss_fn=loss_fn, **options)
        steps = attempted("skyrl", WRITTEN_FOR, lambda: _steps(worker))
        if steps is None:
            return run(worker, experience, microbatch_weight, loss_fn=loss_fn, **options)
        loss = worker.policy_loss_fn

        def watched_loss(logprobs: Tensor, old: Tensor, advantages: Tensor, **given: Any) -> Any:
            def watch() -> None:
                # The rows of this update on all ranks; it may have others, of padding.
                rows = round(len(logprobs) / microbatch_weight) * worker.mesh_rank.dp_size
                known = {
                    "mask": given["loss_mask"].bool(),
                    "old_logprobs": old,
                    "advantages": advantages * rows,
                    "sampler_logprobs": given["rollout_logprobs"],
                    "ref_logprobs": experience.base_action_log_probs,
                }
                _watch(steps, logprobs, rows, known)

            steps.audit.guard(watch)
            return loss(logprobs, old, advantages, **given)

        worker.policy_loss_fn = watched_loss
        try:
            status = run(worker, experience, microbatch_weight, loss_fn=loss_fn, **options)
        finally:
            worker.policy_loss_fn = loss
        return status | steps.audit.metrics()

    return watched


def _steps(worker: Any) -> Steps:
    """Return what follows the optimizer of a worker."""
    if not hasattr(worker, STEPS):
        audit = audit_of(_of_scaled_advantages(worker.cfg.algorithm), worker.device_mesh.get_group("dp"))
        setattr(worker, STEPS, Steps(audit, worker.optimizer, worker.model))
    steps: Steps = getattr(worker, STEPS)
    return steps


def _watch(steps: Steps, logprobs: Tensor, rows: int, known: dict[str, Any]) -> None:
    update = steps.update()
    update.know(counts=(1.0, float(rows)))
    update.watch(logprobs, **known)


def _of_scaled_advantages(algorithm: Any) -> Conventions | None:
    """Return the conventions of the workers, whose advantages are divided before: their loss is a sum.

    The laws alone judge one that masks by the ratio of trainer to sampler.
    """
    conventions = declared(algorithm)
    if conventions is None:
        return None
    correction = algorithm.off_policy_correction
    objective = (
        "custom" if any(getattr(correction, name, None) is not None for name in MASKS) else conventions.objective
    )
    return conventions.replace(aggregation="sequence_sum", objective=objective)


def watched_estimate(estimate: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RayPPOTrainer.compute_advantages_and_returns`."""

    @wraps(estimate)
    def watched(trainer: Any, data: Any) -> Any:
        data = estimate(trainer, data)
        attempted("skyrl", WRITTEN_FOR, lambda: _judge_advantages(trainer, data))
        return data

    return watched


def _judge_advantages(trainer: Any, data: Any) -> None:
    audit = _audit(trainer)
    if audit.conventions is None or trainer.cfg.generator.step_wise_trajectories:
        return
    uids = [str(uid) for uid in data.metadata["uids"]]
    places = {uid: place for place, uid in enumerate(dict.fromkeys(uids))}
    audit.rollout(
        mask=data["response_mask"],
        rewards=data["rewards"].sum(dim=-1),
        group_ids=torch.tensor([places[uid] for uid in uids]),
        advantages=data["advantages"],
    )


def watched_division(divide: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RayPPOTrainer._normalize_advantages`, which divides advantages so that the loss is a sum."""

    @wraps(divide)
    def watched(trainer: Any, data: Any, boundaries: Any, prompt_boundaries: Any = None) -> Any:
        before = data["advantages"]
        data = divide(trainer, data, boundaries, prompt_boundaries)
        attempted("skyrl", WRITTEN_FOR, lambda: _judge_division(trainer, before, data, boundaries, prompt_boundaries))
        return data

    return watched


def _judge_division(trainer: Any, before: Tensor, data: Any, boundaries: Any, prompt_boundaries: Any) -> None:
    """Judge the weights of tokens: the gradient that they make of a sum of ratios at 1."""
    audit = _audit(trainer)
    if audit.conventions is not None and not trainer.cfg.trainer.algorithm.advantage_batch_normalize:
        _judge_weights(audit, before, data, boundaries, prompt_boundaries)
    trainer.all_metrics |= audit.metrics()


def _judge_weights(audit: Audit, before: Tensor, data: Any, boundaries: Any, prompt_boundaries: Any) -> None:
    assert audit.conventions is not None
    of_ratios = audit.conventions.replace(objective="clip", ratio_level="token", kl_coef=0.0, importance_level="none")
    groups = torch.arange(len(before))
    for place, (start, end) in enumerate(prompt_boundaries or ()):
        groups[start:end] = place
    for start, end in boundaries:
        mask = exact(data["loss_mask"][start:end]).bool()
        nothing = torch.zeros(mask.shape, dtype=torch.float64)
        record = Record(
            audit.rollouts - 1,
            of_ratios,
            nothing,
            -exact(data["advantages"][start:end]) * mask,
            mask,
            advantages=exact(before[start:end]),
            old_logprobs=nothing,
            group_ids=groups[start:end],
        )
        audit.judge(record, kind="weights")


def watched_scores(score: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `RayPPOTrainer.fwd_logprobs_values_reward`, behind which the trainer has its own logprobs of the samples."""

    @wraps(score)
    def watched(trainer: Any, training_input: Any) -> Any:
        training_input = score(trainer, training_input)
        attempted("skyrl", WRITTEN_FOR, lambda: _judge_samples(trainer, training_input))
        return training_input

    return watched


def _judge_samples(trainer: Any, data: Any) -> None:
    """Judge the samples of a trainer, unless they may be those of older weights."""
    is_asynchronous = any("Async" in kind.__name__ for kind in type(trainer).__mro__)
    scored, sampled = data.get("action_log_probs", None), data.get("rollout_logprobs", None)
    if is_asynchronous or scored is None or sampled is None:
        return
    algorithm, parameters = trainer.cfg.trainer.algorithm, trainer.cfg.generator.sampling_params
    _audit(trainer).sampled(
        mask=data["loss_mask"].bool(),
        logprobs=scored,
        sampler_logprobs=sampled,
        drawn_freely=parameters.top_p == 1 and parameters.top_k == -1 and algorithm.dynamic_sampling.type is None,
    )


def _audit(trainer: Any) -> Audit:
    """Return the audit of a trainer."""
    if not hasattr(trainer, AUDIT):
        setattr(trainer, AUDIT, audit_of(declared(trainer.cfg.trainer.algorithm)))
    audit: Audit = getattr(trainer, AUDIT)
    return audit


def carried(*_: Any, **__: Any) -> NoReturn:
    """Bring this module to the processes that read SkyRL's registries. It is no loss and no estimator."""
    raise NotImplementedError("rlcanary is no policy loss and no advantage estimator")


def install() -> None:
    """Watch the workers and the trainer of this process, and register what brings this module to the others."""
    require(PolicyWorkerBase._forward_backward_micro, "self", "experience", "microbatch_weight", "loss_fn")
    require(RayPPOTrainer.compute_advantages_and_returns, "self", "data")
    require(RayPPOTrainer.fwd_logprobs_values_reward, "self", "training_input")
    require(RayPPOTrainer._normalize_advantages, "self", "data", "mini_batch_boundaries", "prompt_boundaries")
    PolicyWorkerBase._forward_backward_micro = watched_micro_batch(PolicyWorkerBase._forward_backward_micro)
    RayPPOTrainer.compute_advantages_and_returns = watched_estimate(RayPPOTrainer.compute_advantages_and_returns)
    RayPPOTrainer.fwd_logprobs_values_reward = watched_scores(RayPPOTrainer.fwd_logprobs_values_reward)
    RayPPOTrainer._normalize_advantages = watched_division(RayPPOTrainer._normalize_advantages)
    for registry in (PolicyLossRegistry, AdvantageEstimatorRegistry):
        if "rlcanary" not in registry._functions:
            registry.register("rlcanary", carried)
