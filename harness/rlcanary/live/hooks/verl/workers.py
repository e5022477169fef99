"""The watched parts of verl: updates and samples, on the workers and in the trainer.

An FSDP engine that trains by verl's PPO loss is audited on its workers, and group advantages where the trainer computes
them. A synchronous trainer samples with the weights that it trains: where it compares the engine's logprobs with its own
(`rollout.calculate_log_probs`), the audit does too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial, wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.utils.debug import metrics as debug_metrics
from verl.utils.metric import Metric
from verl.workers.engine.base import BaseEngine
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.utils.losses import ppo_loss
from verl.workers.utils.padding import no_padding_2_padding

from rlcanary.adapters.verl.losses.options import advantage_words, conventions_of, require_words
from rlcanary.contract.conventions import Conventions
from rlcanary.errors import UserError
from rlcanary.live.audit import Audit, log
from rlcanary.live.hooks.environment import audit_of
from rlcanary.live.hooks.fitting import attempted, require
from rlcanary.live.hooks.verl import WRITTEN_FOR
from rlcanary.live.update import Update

# What the loss is given, by verl's names and by ours.
GIVEN = {
    "response_mask": "mask",
    "old_log_probs": "old_logprobs",
    "advantages": "advantages",
    "ref_log_prob": "ref_logprobs",
    "rollout_log_probs": "sampler_logprobs",
}
# The trainers that wait for the samples of their present weights.
SYNCHRONOUS = "PPOTrainerSync"
LEGACY = "RayPPOTrainer"
# The attribute of an engine, and of a trainer, that keeps its audit.
KEPT = "_rlcanary_audit"


def watched_engine(train_batch: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `BaseEngine.train_batch`: an update that is judged, with its findings among the metrics."""

    @wraps(train_batch)
    def watched(engine: Any, data: Any, loss_function: Any) -> Any:
        update = attempted("verl", WRITTEN_FOR, lambda: _begun(engine, loss_function))
        if update is None:
            return train_batch(engine, data, loss_function)
        with update:
            output = train_batch(engine, data, _watched_loss(loss_function, update))
        audit: Audit = getattr(engine, KEPT)
        audit.guard(lambda: _report(audit, output))
        return output

    return watched


def _begun(engine: Any, loss_function: Any) -> Update | None:
    """Begin an update of an actor's FSDP engine; other engines and losses are left alone."""
    is_ppo = isinstance(loss_function, partial) and loss_function.func is ppo_loss
    if not is_ppo or not isinstance(engine, FSDPEngine) or not engine.is_mp_src_rank_with_outputs():
        return None
    if getattr(engine, KEPT, None) is None:
        actor = loss_function.keywords.get("config") or loss_function.args[0]
        setattr(engine, KEPT, audit_of(_declared(actor), engine.get_data_parallel_group()))
    audit: Audit = getattr(engine, KEPT)
    scaler = getattr(engine, "scaler", None)
    loss_scale = 1.0 if scaler is None else scaler.get_scale()
    return audit.update(loss_scale=loss_scale, model=engine.module, optimizer=engine.optimizer)


def _declared(actor: Any) -> Conventions | None:
    """Translate an `ActorConfig`; a loss that the conventions cannot express leaves the laws alone."""
    try:
        require_words(actor)
    except UserError as error:
        log.warning("verl's loss is judged by the laws alone: %s", error)
        return None
    return conventions_of(actor, AlgoConfig(adv_estimator="grpo"), 1.0, actor.ppo_mini_batch_size)


def _watched_loss(loss_function: Callable[..., Any], update: Update) -> Callable[..., Any]:
    audit = update.audit

    @wraps(loss_function)
    def watched(*arguments: Any, **options: Any) -> Any:
        if "log_probs" in options.get("model_output", {}):
            audit.guard(lambda: _watch(update, options["model_output"], options["data"]))
        return loss_function(*arguments, **options)

    return watched


def _watch(update: Update, model_output: dict[str, Tensor], data: Any) -> None:
    if not update.is_audited:
        return
    names = [name for name in (*GIVEN, "rollout_is_weights") if name in data]
    rows = data.select(*names).to_padded_tensor()
    given = {GIVEN[name]: rows[name] for name in names if name in GIVEN}
    if "rollout_is_weights" in names:  # the loss multiplies by them
        given["advantages"] = given["advantages"] * rows["rollout_is_weights"]

    def read(values: Tensor) -> Tensor:
        padded: Tensor = no_padding_2_padding(values, data)
        return padded

    entropy = model_output.get("entropy")
    update.watch(model_output["log_probs"], entropy=None if entropy is None else read(entropy), read=read, **given)


def _report(audit: Audit, output: Any) -> None:
    output["metrics"] |= {name: Metric("max", value) for name, value in audit.metrics().items()}


def watched_estimator(estimator: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Wrap an estimator of advantages [B, T] from rewards and groups, so that what it returns is judged."""
    audits: dict[bool, Audit] = {}

    @wraps(estimator)
    def watched(token_level_rewards: Tensor, response_mask: Tensor, index: Any, *arguments: Any, **options: Any) -> Any:
        returned = estimator(token_level_rewards, response_mask, index, *arguments, **options)
        is_scaled = name != "grpo" or options.get("norm_adv_by_std_in_grpo", True)

        def judge() -> None:
            if is_scaled not in audits:
                algorithm = SimpleNamespace(adv_estimator=name, norm_adv_by_std_in_grpo=is_scaled, gamma=1.0, lam=1.0)
                audits[is_scaled] = audit_of(Conventions(**advantage_words(algorithm)))
            places = {group: place for place, group in enumerate(dict.fromkeys(map(str, index)))}
            audits[is_scaled].rollout(
                mask=response_mask.bool(),
                rewards=token_level_rewards.sum(dim=-1),
                group_ids=torch.tensor([places[str(group)] for group in index]),
                advantages=returned[0],
            )

        attempted("verl", WRITTEN_FOR, judge)
        return returned

    return watched


def watched_comparison(compare: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `calculate_debug_metrics`, in which a trainer compares the engine's logprobs with its own."""

    @wraps(compare)
    def watched(data: Any) -> Any:
        metrics = compare(data)
        trainer = sys._getframe(1).f_locals.get("self")  # the function is not told who calls
        audit = attempted("verl", WRITTEN_FOR, lambda: _judged_samples(trainer, data))
        return metrics if audit is None else metrics | audit.metrics()

    return watched


def _judged_samples(trainer: Any, data: Any) -> Audit | None:
    """Judge the samples of a trainer, unless they may be those of older weights."""
    names = [kind.__name__ for kind in type(trainer).__mro__]
    if SYNCHRONOUS not in names and names[0] != LEGACY:
        return None
    if not hasattr(trainer, KEPT):
        setattr(trainer, KEPT, audit_of(None))
    audit: Audit = getattr(trainer, KEPT)
    rollout, algorithm = trainer.config.actor_rollout_ref.rollout, trainer.config.algorithm
    filtered = algorithm.get("filter_groups") or {}
    batch = data.batch
    audit.sampled(
        mask=batch["response_mask"].bool(),
        logprobs=batch["old_log_probs"],
        sampler_logprobs=batch["rollout_log_probs"],
        entropy=batch.get("entropy", None),
        drawn_freely=rollout.top_p == 1 and rollout.top_k in (-1, 0) and not filtered.get("enable", False),
    )
    return audit


def install() -> None:
    """Watch the engines, the estimators and the comparison of this process."""
    require(BaseEngine.train_batch, "self", "data", "loss_function")
    require(core_algos.compute_grpo_outcome_advantage, "token_level_rewards", "response_mask", "index")
    require(core_algos.ADV_ESTIMATOR_REGISTRY["rloo"], "token_level_rewards", "response_mask", "index")
    require(debug_metrics.calculate_debug_metrics, "data")
    BaseEngine.train_batch = watched_engine(BaseEngine.train_batch)
    grpo = watched_estimator(core_algos.compute_grpo_outcome_advantage, "grpo")
    core_algos.compute_grpo_outcome_advantage = grpo
    core_algos.ADV_ESTIMATOR_REGISTRY["grpo"] = grpo
    rloo = watched_estimator(core_algos.ADV_ESTIMATOR_REGISTRY["rloo"], "rloo")
    core_algos.ADV_ESTIMATOR_REGISTRY["rloo"] = rloo
    debug_metrics.calculate_debug_metrics = watched_comparison(debug_metrics.calculate_debug_metrics)
