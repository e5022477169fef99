"""The updates of a step: passes over one rollout batch, each in pieces of `rows_per_update` rows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from rlcanary.contract.batch import CollatedBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.grpo.plan.schedule import Schedule
from rlcanary.grpo.training.critic import frozen_values, update_critic
from rlcanary.grpo.training.trainer import UpdateBatch, accumulate_gradients, descend, policy_data, score

# Rounding, and engines in lower precision, move the mean ratio of a step by some thousandths.
FURTHEST_RATIO = 1.25


class NotOnPolicy(Exception):
    """Sampler and trainer disagree about samples of the very weights that are trained."""


def take_updates(
    state: Any,
    batch: CollatedBatch,
    conventions: Conventions,
    schedule: Schedule,
    span: Callable[[str], AbstractContextManager[None]] = lambda _: nullcontext(),
    is_on_policy: bool = False,
) -> list[dict[str, float]]:
    """Take all updates on a rollout batch. Advantages, values, old and reference logprobs are those before the first one.

    Args:
        state: the learner's state.
        batch: all rows of the step, whole groups.
        conventions: all of them are used.
        schedule: the rows of an update and of a forward pass, and the passes over the batch.
        span: times a part by its name.
        is_on_policy: the state's weights drew all rows, so that ratios of the first update are 1.

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
    updates: list[dict[str, float]] = []
    for _ in range(schedule.epochs_per_step):
        for rows in torch.arange(len(batch.rewards)).split(schedule.update_rows):
            with span("loss"):
                chosen, judged = batch.rows(rows), given.rows(rows)
                output = accumulate_gradients(state, chosen, judged, conventions, schedule)
            if is_on_policy and not updates and not conventions.training_dropout:
                _require_ratio_of_one(output.metrics.get("ratio_mean", 1.0))
            with span("step"):
                moved = descend(state, conventions)
            if isinstance(judged, UpdateBatch):
                with span("critic"):
                    moved |= update_critic(critic, chosen, judged, conventions, schedule)
            updates.append({"loss": float(output.loss), **output.metrics, **moved})
    return updates


def _require_ratio_of_one(ratio: float) -> None:
    if not 1 / FURTHEST_RATIO <= ratio <= FURTHEST_RATIO:
        raise NotOnPolicy(
            f"on the samples of the present weights the ratio of trainer to sampler is {ratio:.3g} in the mean, and has to "
            "be 1: the two score different distributions (weights that were not synced, another temperature, top-k or "
            "top-p, other ids); no update was taken"
        )
