"""All updates on one rollout batch: several passes over it, each in mini-batches, against logprobs frozen at its start."""

from dataclasses import replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.batch import CollatedBatch, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.reference.logprobs import completion_scores
from rlcanary.reference.objective.losses import policy_loss
from rlcanary.reference.step import batch_metrics, descend, forward_mode, policy_batch


def rl_step(state: Any, batch: CollatedBatch, conventions: Conventions) -> dict[str, float]:
    """Update the policy `epochs_per_rollout` × `mini_batches` times on one rollout batch, its rows in order.

    Args:
        state: has `model`, `optimizer`, `scheduler` and `ref_model`, as `TrainState` of the contract describes.
        batch: all rows of the rollout; not modified.
        conventions: all of them are used.

    Returns:
        The metrics of the updates as `train_step` has them, the mean over the updates or those of the last one, as
        `logged_updates` declares. `reward` and `tokens` are those of the whole batch, `lr` is that of the last update.

    Raises:
        ValueError: the rows are fewer than the mini-batches, or lack logprobs that the conventions ask for.
    """
    rows = len(batch.rewards)
    if rows < conventions.mini_batches:
        raise ValueError(f"{rows} rows do not fill {conventions.mini_batches} mini-batches")
    frozen = frozen_batch(state.model, state.ref_model, batch, conventions)
    by_update = conventions.schedule_advances == "update"
    updates = []
    for _ in range(conventions.epochs_per_rollout):
        for rows_b in torch.arange(rows, device=batch.rewards.device).tensor_split(conventions.mini_batches):
            output = policy_loss(mini_batch(state.model, batch, frozen, rows_b, conventions), conventions)
            updates.append({**output.metrics, **descend(state, output.loss, conventions, advance=by_update)})
    if not by_update:
        state.scheduler.step()
    if conventions.logged_updates == "last":
        updates = updates[-1:]
    return {
        **{name: fmean(update[name] for update in updates) for name in updates[0]},
        "lr": updates[-1]["lr"],
        **batch_metrics(batch),
    }


def frozen_batch(model: Any, ref_model: Any, batch: CollatedBatch, conventions: Conventions) -> PolicyBatch:
    """Compute what stays the same in all updates on a rollout: advantages, old and reference logprobs.

    Its own `logprobs` and `entropy` are those before the first update, without gradient.
    """
    with torch.no_grad():
        given = policy_batch(model, ref_model, batch, conventions)
    return replace(given, old_logprobs=given.old_logprobs.clone())


def mini_batch(
    model: Any, batch: CollatedBatch, frozen: PolicyBatch, rows_b: Tensor, conventions: Conventions
) -> PolicyBatch:
    """Compute the inputs of the loss of some rows: the policy's present logprobs beside what is frozen.

    Args:
        model: the policy as it is now.
        batch: all rows of the rollout.
        frozen: as `frozen_batch` gives it.
        rows_b: [b] indices of the rows.
        conventions: temperature and training_dropout are used.
    """
    with forward_mode(model, training=conventions.training_dropout):
        logprobs_bT, entropy_bT = completion_scores(model, batch.rows(rows_b), conventions.temperature)
    return replace(frozen.rows(rows_b), logprobs=logprobs_bT, entropy=entropy_bT)
