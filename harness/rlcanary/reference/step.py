"""One optimizer update on a collated batch: score, compute advantages and loss, step the optimizer.

Shapes: B rows (completions), T completion positions.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rlcanary.contract.batch import CollatedBatch, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.declining import NotProvided
from rlcanary.contract.records.credit import Credit, CreditBatch
from rlcanary.reference.logprobs import completion_logprobs, completion_scores
from rlcanary.reference.objective.advantages import advantages
from rlcanary.reference.objective.credit import token_advantages
from rlcanary.reference.objective.kl import rewards_with_kl
from rlcanary.reference.objective.losses import policy_loss


def train_step(state: Any, batch: CollatedBatch, conventions: Conventions) -> dict[str, float]:
    """Update the policy on one batch.

    Args:
        state: has `model`, `optimizer`, `scheduler` and `ref_model`, as `TrainState` of the contract describes.
        batch: the sampled completions; not modified.
        conventions: all of them are used.

    Returns:
        The metrics of `policy_loss`; `loss`, `lr` and `grad_norm` of this update, the norm taken before clipping; `reward`,
        the mean reward; `tokens`, the number of attended tokens.

    Raises:
        ValueError: the conventions ask for logprobs that neither the batch nor the state can give.
    """
    output = policy_loss(policy_batch(state.model, state.ref_model, batch, conventions), conventions)
    return {**output.metrics, **descend(state, output.loss, conventions), **batch_metrics(batch)}


def batch_metrics(batch: CollatedBatch) -> dict[str, float]:
    """Compute `reward`, the mean reward, and `tokens`, the number of attended tokens."""
    return {"reward": float(batch.rewards.double().mean()), "tokens": float(batch.attention_mask.sum())}


def policy_batch(model: Any, ref_model: Any, batch: CollatedBatch, conventions: Conventions) -> PolicyBatch:
    """Compute the inputs of the loss: logprobs and entropy with gradient, old and reference logprobs, advantages.

    Args:
        model: the policy. Its dropout is off unless `training_dropout` says otherwise; each module keeps its mode.
        ref_model: scores the completions where the batch does not bring the reference logprobs; None if there is none.
        batch: the sampled completions.
        conventions: temperature, old_logprobs, training_dropout and the fields of rewards and advantages are used.

    Raises:
        ValueError: the ratio is taken against the sampler's logprobs and the batch has none.
    """
    with forward_mode(model, training=conventions.training_dropout):
        logprobs_BT, entropy_BT = completion_scores(model, batch, conventions.temperature)
    if conventions.old_logprobs == "sampler":
        if batch.old_logprobs is None:
            raise ValueError("the batch has no sampler logprobs; old_logprobs='trainer' does without them")
        old_logprobs_BT = batch.old_logprobs
    elif conventions.training_dropout:
        old_logprobs_BT = _scored(model, batch, conventions)
    else:
        # The same pass that the gradient flows through: a second one rounds differently and moves the ratio off 1.
        old_logprobs_BT = logprobs_BT.detach()
    ref_logprobs_BT = batch.ref_logprobs
    if ref_logprobs_BT is None and ref_model is not None:
        ref_logprobs_BT = _scored(ref_model, batch, conventions)
    return with_advantages(batch, conventions, logprobs_BT, old_logprobs_BT, ref_logprobs_BT, entropy_BT)


def with_advantages(
    batch: CollatedBatch,
    conventions: Conventions,
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor | None,
    entropy_BT: Tensor | None = None,
) -> PolicyBatch:
    """Build the inputs of the loss from scored tokens: KL in the rewards if declared there, then advantages.

    Args:
        batch: the sampled completions.
        conventions: the fields of rewards and advantages are used.
        logprobs_BT: [B, T] of the policy in training, with their gradient.
        old_logprobs_BT: [B, T] of the policy that the ratio is taken against.
        ref_logprobs_BT: [B, T] of the reference model, or None.
        entropy_BT: [B, T] of the policy in training, or None.

    Raises:
        NotProvided: the conventions ask for a critic or for turn ids.
    """
    return PolicyBatch(
        logprobs=logprobs_BT,
        old_logprobs=old_logprobs_BT,
        advantages=_advantages(batch, conventions, old_logprobs_BT, ref_logprobs_BT),
        mask=batch.completion_mask,
        ref_logprobs=ref_logprobs_BT,
        sampler_logprobs=batch.old_logprobs,
        entropy=entropy_BT,
        group_ids=batch.group_ids,
    )


def _advantages(
    batch: CollatedBatch, conventions: Conventions, old_logprobs_BT: Tensor, ref_logprobs_BT: Tensor | None
) -> Tensor:
    """[B], or [B, T] where the conventions make more of them than a number per row."""
    if conventions.token_credit in ("gae", "turn_returns"):
        raise NotProvided(f"token_credit {conventions.token_credit!r} needs more than a batch of completions has")
    is_per_row = (conventions.token_credit, conventions.baseline_weighting, conventions.whitening) == (
        "outcome",
        "rows",
        "none",
    )
    if not is_per_row:
        return batch_credit(batch, conventions, old_logprobs_BT, ref_logprobs_BT).advantages
    rewards_B = batch.rewards
    if ref_logprobs_BT is not None:
        rewards_B = rewards_with_kl(rewards_B, old_logprobs_BT, ref_logprobs_BT, batch.completion_mask, conventions)
    return advantages(rewards_B, batch.group_ids, conventions)


def batch_credit(
    batch: CollatedBatch,
    conventions: Conventions,
    old_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor | None,
    values_BT: Tensor | None = None,
) -> Credit:
    """Divide the rewards of a batch among its tokens, with the KL in the rewards if declared there.

    Args:
        batch: the sampled completions.
        conventions: the fields of rewards, advantages and credit are used.
        old_logprobs_BT: [B, T] of the policy that the ratio is taken against.
        ref_logprobs_BT: [B, T] of the reference model, or None.
        values_BT: [B, T] of the critic before each token, or None if there is none.

    Raises:
        ValueError: as for `token_advantages`.
    """
    rewards_BT = batch.rewards.new_zeros(batch.completion_mask.shape)
    if ref_logprobs_BT is not None:
        rewards_BT = rewards_with_kl(rewards_BT, old_logprobs_BT, ref_logprobs_BT, batch.completion_mask, conventions)
    given = CreditBatch(batch.rewards, batch.completion_mask, batch.group_ids, values_BT, rewards_BT)
    return token_advantages(given, conventions)


def descend(state: Any, loss: Tensor, conventions: Conventions, advance: bool = True) -> dict[str, float]:
    """Step the optimizer on the gradient of this loss alone, and behind it the learning-rate schedule if it is to `advance`.

    Returns:
        `loss`, `lr`, the learning rate of this step, and `grad_norm`, the norm of the gradient before it is clipped.
    """
    state.optimizer.zero_grad()
    loss.backward()
    limit = math.inf if conventions.max_grad_norm is None else conventions.max_grad_norm
    grad_norm = torch.nn.utils.clip_grad_norm_(state.model.parameters(), limit)
    learning_rate = state.optimizer.param_groups[0]["lr"]
    state.optimizer.step()
    if advance:
        state.scheduler.step()
    return {"loss": float(loss.detach()), "lr": float(learning_rate), "grad_norm": float(grad_norm)}


def _scored(model: Any, batch: CollatedBatch, conventions: Conventions) -> Tensor:
    with torch.no_grad(), forward_mode(model, training=False):
        return completion_logprobs(model, batch, conventions.temperature)


@contextmanager
def forward_mode(model: Any, training: bool) -> Iterator[None]:
    """Put the model in training or evaluation mode inside the block, and restore each module's mode after it."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training
