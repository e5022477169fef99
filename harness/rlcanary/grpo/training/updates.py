"""The updates of a step: passes over one rollout batch, each in pieces of `rows_per_update` rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from rlcanary.contract.batch import CollatedBatch, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.grpo.plan.schedule import Schedule
from rlcanary.grpo.training.critic import frozen_values, update_critic
from rlcanary.grpo.training.trainer import UpdateBatch, accumulate_gradients, descend, policy_data, score

# Rounding, and engines in lower precision, move the mean ratio of a step, and the exponential of its mean logarithm, by
# some thousandths.
FURTHEST_RATIO = 1.25


class Audit(Protocol):
    """The audit of a run's updates, as this package sees `rlcanary.live.Audit`."""

    def update(self, *, mask: Tensor, model: Any, **given: Any) -> AbstractContextManager[Any]:
        """Watch an update, whose forward and backward passes and step are inside the context."""

    def metrics(self) -> dict[str, float]:
        """Return numbers for the run's log."""

    def state_dict(self) -> dict[str, Any]:
        """Return the evidence so far, for a checkpoint."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue with the evidence of a checkpoint."""


class NotOnPolicy(Exception):
    """Sampler and trainer disagree about samples of the very weights that are trained."""


def take_updates(
    state: Any,
    batch: CollatedBatch,
    conventions: Conventions,
    schedule: Schedule,
    span: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    is_on_policy: bool = False,
    audit: Audit | None = None,
    version: int | None = None,
    draws_freely: bool = True,
) -> list[dict[str, float]]:
    """Take all updates on a rollout batch. Advantages, values, old and reference logprobs are those before the first one.

    Args:
        state: the learner's state.
        batch: all rows of the step, whole groups.
        conventions: all of them are used.
        schedule: the rows of an update and of a forward pass, and the passes over the batch.
        span: times a part by its name.
        is_on_policy: the state's weights drew all rows, so that ratios of the first update are 1.
        audit: looks at each update; None for none.
        version: the policy version of the state's weights before the first update, for the audit.
        draws_freely: rows were drawn from the whole distribution, likewise.

    Returns:
        The loss and the metrics of each update.

    Raises:
        ValueError: the ratio is taken against the sampler's logprobs and the batch has none.
        FloatingPointError: a gradient is NaN or infinite. The weights are those of the update before.
        NotOnPolicy: ratios that have to be 1 are not. No update was taken.
    """
    with span("advantage"):
        before_BT = None
        if conventions.old_logprobs == "trainer" and schedule.updates_per_step > 1:
            before_BT = score(state.model, batch, conventions, schedule)
        critic = getattr(state, "critic", None)
        values_BT = None if critic is None else frozen_values(critic.model, batch, schedule)
        given = policy_data(state, batch, conventions, schedule, before_BT, values_BT)
    is_drawn_freely = draws_freely and not (schedule.dynamic_sampling or conventions.mask_truncated)
    updates: list[dict[str, float]] = []
    for _ in range(schedule.epochs_per_step):
        for rows in torch.arange(len(batch.rewards), device=batch.rewards.device).split(schedule.update_rows):
            chosen, judged = batch.rows(rows), given.rows(rows)
            # What is scaled by the whole batch does not follow from a part of it.
            follows = len(rows) == len(batch.rewards) or conventions.advantage_scale != "batch"
            now = None if updates else version
            with _watched(audit, state, chosen, judged, now, is_drawn_freely, follows) as watched:
                with span("loss"):
                    watch = None if watched is None else watched.watch
                    output = accumulate_gradients(state, chosen, judged, conventions, schedule, watch)
                if is_on_policy and not updates and not conventions.training_dropout and judged.mask.any():
                    _require_one_distribution(output.metrics)
                with span("step"):
                    moved = descend(state, conventions)
                if watched is not None:
                    watched.log({**output.metrics, "loss": output.loss})
            if isinstance(judged, UpdateBatch):
                with span("critic"):
                    moved |= update_critic(critic, chosen, judged, conventions, schedule)
            updates.append({"loss": float(output.loss), **output.metrics, **moved})
    return updates


def _watched(
    audit: Audit | None,
    state: Any,
    batch: CollatedBatch,
    given: PolicyBatch,
    version: int | None,
    is_drawn_freely: bool,
    advantages_follow: bool,
) -> AbstractContextManager[Any]:
    """Open the audit of an update.

    The version is None where the weights have moved since they had one. The audit computes the advantages anew where
    they follow from the rewards of these rows.
    """
    if audit is None:
        return nullcontext()
    is_unscored = bool(given.old_logprobs.isnan().all())
    return audit.update(
        mask=given.mask,
        model=state.model,
        optimizer=state.optimizer,
        rewards=batch.rewards if advantages_follow else None,
        group_ids=batch.group_ids,
        advantages=given.advantages,
        old_logprobs=None if is_unscored else given.old_logprobs,
        sampler_logprobs=batch.old_logprobs,
        ref_logprobs=given.ref_logprobs,
        versions=None if version is None else batch.policy_versions,
        trainer_version=version,
        drawn_freely=is_drawn_freely,
    )


def _require_one_distribution(metrics: Mapping[str, float]) -> None:
    """Check that the trainer scores the samples as their sampler did, but for rounding.

    The mean of the ratio alone is near 1 for samples of any other policy, if that reports its own logprobs. What grows
    with the distance of the two is the mean of its logarithm, `approx_kl`.
    """
    ratio, distance = metrics.get("ratio_mean", 1.0), metrics.get("approx_kl", 0.0)
    if not (1 / FURTHEST_RATIO <= ratio <= FURTHEST_RATIO and distance <= math.log(FURTHEST_RATIO)):
        raise NotOnPolicy(
            f"on samples of the present weights the ratio of trainer to sampler is {ratio:.3g} in the mean, which has to be "
            f"1, and their KL divergence {distance:.3g} nats per token, which has to be 0: the two score different "
            "distributions (weights that were not synced, another temperature, top-k or top-p, other ids); no update was "
            "taken"
        )
