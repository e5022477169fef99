"""Take one optimizer update in pieces: advantages of the whole, losses of micro-batches, a step.

Shapes: B rows (completions), S sequence positions, T completion positions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlcanary.contract.adapter import TrainState
from rlcanary.contract.batch import CollatedBatch, LossOutput, PolicyBatch
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.records.credit import ValueBatch
from rlcanary.grpo.plan.optimizer import OptimizerSettings
from rlcanary.grpo.plan.schedule import Schedule
from rlcanary.reference import completion_logprobs, completion_scores, policy_loss, split
from rlcanary.reference.step import batch_credit, forward_mode, with_advantages

Record = TypeVar("Record", CollatedBatch, PolicyBatch, ValueBatch)
Watch = Callable[[Tensor, Tensor, Tensor], Any]
Trained = TypeVar("Trained", PolicyBatch, ValueBatch)


class MasterWeights:
    """Float32 copies of a model's parameters, which the optimizer moves; parameters in float32 stand for themselves.

    Gradients of micro-batches add up here in float32: in bfloat16 a small one beside a large one is lost, and a gradient
    that is clipped in bfloat16 rounds to a norm above the limit.

    Attributes:
        parameters: one float32 tensor per trained parameter of the model.
    """

    def __init__(self, model: Any) -> None:
        self._of_model = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.parameters = [
            parameter
            if parameter.dtype in (torch.float32, torch.float64)
            else torch.nn.Parameter(parameter.detach().float())
            for parameter in self._of_model
        ]

    def collect_gradients(self) -> None:
        """Move the gradients of a backward pass from the model to the masters."""
        for parameter, master in self._copies():
            if parameter.grad is None:
                continue
            gradient = parameter.grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
            parameter.grad = None

    def write_back(self) -> None:
        """Round the masters into the model's parameters."""
        for parameter, master in self._copies():
            parameter.data.copy_(master.detach())

    def _copies(self) -> Iterator[tuple[Tensor, Tensor]]:
        pairs = zip(self._of_model, self.parameters, strict=True)
        return ((parameter, master) for parameter, master in pairs if parameter is not master)


@dataclass
class LearnerState(TrainState):
    """A `TrainState` whose optimizer moves master weights.

    Attributes:
        masters: the weights that `optimizer` moves.
        updates: number of optimizer updates taken.
        critic: the state of the critic; None without one.
    """

    masters: MasterWeights | None = None
    updates: int = 0
    critic: LearnerState | None = None


@dataclass
class UpdateBatch(PolicyBatch):
    """The inputs of an update's policy loss and, with a critic, of its value loss.

    Attributes:
        old_values: [B, T] of the critic before the first update on the rollout.
        returns: [B, T] that the critic is trained towards.
    """

    old_values: Tensor | None = None
    returns: Tensor | None = None


def new_state(model: Any, settings: OptimizerSettings, ref_model: Any = None) -> LearnerState:
    """Create a state that trains this model: AdamW on its master weights with a linear warm-up."""
    masters = MasterWeights(model)
    optimizer = torch.optim.AdamW(
        masters.parameters, lr=settings.learning_rate, betas=settings.betas, weight_decay=settings.weight_decay
    )
    warmup = settings.warmup_updates
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / (warmup + 1)))
    return LearnerState(model, optimizer, scheduler, ref_model, masters=masters)


def refresh_reference(state: LearnerState) -> None:
    """Make the present policy the reference model. The two share what is not trained."""
    shared = {id(each): each for each in state.model.parameters() if not each.requires_grad}
    state.ref_model = copy.deepcopy(state.model, shared).eval().requires_grad_(False)


def policy_data(
    state: Any,
    batch: CollatedBatch,
    conventions: Conventions,
    schedule: Schedule,
    trainer_logprobs: Tensor | None = None,
    values: Tensor | None = None,
) -> PolicyBatch:
    """Compute the data that all losses of an update share: advantages, old and reference logprobs.

    Args:
        state: scores with its reference model where the batch brings no reference logprobs.
        batch: the rows of the update, whole groups.
        conventions: conventions of old logprobs, rewards and advantages.
        schedule: rows and widths of a forward pass.
        trainer_logprobs: [B, T] that the trainer gave these rows before the first update on their rollout; None where
            this is the first.
        values: [B, T] that the critic gave these rows before the first update; None without a critic.

    Returns:
        A batch whose `logprobs` are still missing (NaN). Where the old logprobs are to be those of the forward pass that
        the gradient flows through, they are missing too. With a critic it is an `UpdateBatch`.

    Raises:
        ValueError: the ratio is taken against the sampler's logprobs and the batch has none.
    """
    missing_BT = torch.full(batch.completion_ids.shape, torch.nan, device=batch.input_ids.device)
    old_logprobs_BT = missing_BT if trainer_logprobs is None else trainer_logprobs
    if conventions.old_logprobs == "sampler":
        if batch.old_logprobs is None:
            raise ValueError("the batch has no sampler logprobs; old_logprobs='trainer' does without them")
        old_logprobs_BT = batch.old_logprobs
    elif trainer_logprobs is None and (conventions.training_dropout or conventions.kl_placement == "reward"):
        old_logprobs_BT = score(state.model, batch, conventions, schedule)
    ref_logprobs_BT = batch.ref_logprobs
    if ref_logprobs_BT is None and state.ref_model is not None:
        ref_logprobs_BT = score(state.ref_model, batch, conventions, schedule)
    if values is None:
        return with_advantages(batch, conventions, missing_BT, old_logprobs_BT, ref_logprobs_BT)
    credit = batch_credit(batch, conventions, old_logprobs_BT, ref_logprobs_BT, values)
    return UpdateBatch(
        missing_BT,
        old_logprobs_BT,
        credit.advantages,
        batch.completion_mask,
        ref_logprobs_BT,
        batch.old_logprobs,
        group_ids=batch.group_ids,
        old_values=values,
        returns=credit.returns,
    )


def accumulate_gradients(
    state: Any,
    batch: CollatedBatch,
    given: PolicyBatch,
    conventions: Conventions,
    schedule: Schedule,
    watch: Watch | None = None,
) -> LossOutput:
    """Run the forward and backward passes of an update, one micro-batch after another.

    The gradients add up to that of the loss of the whole batch: each piece knows the counts of the whole.

    Args:
        state: its gradients are replaced.
        batch: the rows of the update.
        given: their policy data, from `policy_data`.
        conventions: the conventions of the loss.
        schedule: rows and widths of a forward pass.
        watch: sees the logprobs of each forward pass, their rows, and their entropy, as `rlcanary.live.Audit` does.

    Returns:
        The loss of the whole, without gradient, and its metrics.
    """
    state.optimizer.zero_grad()
    state.model.zero_grad()
    masters = getattr(state, "masters", None)
    logprobs_BT, old_logprobs_BT = given.logprobs.clone(), given.old_logprobs.clone()
    entropy_BT = given.logprobs.clone()
    losses = []
    for rows, piece in pieces(given, schedule.micro_batches_per_update, conventions):
        micro = trimmed(batch, rows, schedule)
        width = micro.completion_ids.shape[1]
        with forward_mode(state.model, training=conventions.training_dropout):
            logprobs_bt, entropy_bt = completion_scores(state.model, micro, conventions.temperature)
        if watch is not None:
            watch(logprobs_bt, rows, entropy_bt)
        piece = narrowed(piece, width)
        piece.logprobs, piece.entropy = logprobs_bt, entropy_bt
        if conventions.old_logprobs == "trainer" and piece.old_logprobs.isnan().all():
            # The very pass that the gradient flows through: a second one rounds differently and moves the ratio off 1.
            piece.old_logprobs = logprobs_bt.detach()
        loss = policy_loss(piece, conventions).loss
        loss.backward()
        if masters is not None:
            masters.collect_gradients()
        losses.append(loss.detach())
        logprobs_BT[rows, :width] = logprobs_bt.detach().to(logprobs_BT.dtype)
        old_logprobs_BT[rows, :width] = piece.old_logprobs.to(old_logprobs_BT.dtype)
        entropy_BT[rows, :width] = entropy_bt.detach().to(entropy_BT.dtype)
    whole = replace(given, logprobs=logprobs_BT, old_logprobs=old_logprobs_BT, entropy=entropy_BT)
    with torch.no_grad():
        metrics = policy_loss(whole, conventions).metrics
    if conventions.old_logprobs == "sampler":
        # It would compare the sampler's logprobs with themselves, and be 1 whatever the trainer says.
        metrics.pop("mult_prob_error", None)
    return LossOutput(torch.stack(losses).sum(), metrics)


def descend(state: Any, conventions: Conventions) -> dict[str, float]:
    """Clip the gathered gradient, step the optimizer and the learning-rate schedule, and move the model.

    Returns:
        `lr`, the learning rate of this step, and `grad_norm`, the norm of the gradient before clipping.

    Raises:
        FloatingPointError: the gradient is NaN or infinite. The weights are left as they were.
    """
    masters = getattr(state, "masters", None)
    parameters = list(state.model.parameters()) if masters is None else masters.parameters
    limit = math.inf if conventions.max_grad_norm is None else conventions.max_grad_norm
    grad_norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
    if not math.isfinite(grad_norm):
        raise FloatingPointError(f"the gradient's norm is {grad_norm}: the weights were not updated")
    learning_rate = float(state.optimizer.param_groups[0]["lr"])
    state.optimizer.step()
    state.scheduler.step()
    if masters is not None:
        masters.write_back()
        state.updates += 1
    return {"lr": learning_rate, "grad_norm": grad_norm}


def score(model: Any, batch: CollatedBatch, conventions: Conventions, schedule: Schedule) -> Tensor:
    """Compute the [B, T] logprobs of the completions, in micro-batches, without gradient and without dropout."""
    read = partial(completion_logprobs, model, temperature=conventions.temperature)
    return read_frozen(model, batch, schedule, read)


def read_frozen(
    model: Any, batch: CollatedBatch, schedule: Schedule, read: Callable[[CollatedBatch], Tensor]
) -> Tensor:
    """Read [B, T] numbers of a model, in micro-batches, without gradient and without dropout."""
    read_BT = torch.full(batch.completion_ids.shape, torch.nan, device=batch.input_ids.device)
    by_length_B = _by_length(batch.completion_mask)
    with torch.no_grad(), forward_mode(model, training=False):
        for rows in by_length_B.split(schedule.micro_batch_rows):
            micro = trimmed(batch, rows, schedule)
            read_BT[rows, : micro.completion_ids.shape[1]] = read(micro)
    return read_BT


def trimmed(batch: CollatedBatch, rows: Tensor, schedule: Schedule) -> CollatedBatch:
    """Select rows of a batch without the padding that only longer rows needed, up to the next bucket."""
    chosen = batch.rows(rows)
    length = _bucket(chosen.attention_mask, schedule.seq_len_buckets)
    width = _bucket(chosen.completion_mask, schedule.completion_len_buckets)
    return narrowed(chosen, width, length)


def pieces(given: Trained, n_pieces: int, conventions: Conventions) -> Iterator[tuple[Tensor, Trained]]:
    """Split rows into micro-batches of like length, with their row numbers."""
    if conventions.aggregation == "group_token_mean":
        order_B = torch.arange(len(given.mask), device=given.mask.device)
        n_pieces = min(n_pieces, len(torch.unique(given.group_ids)))
    else:
        order_B = _by_length(given.mask)
    # What the model has yet to compute, the first field, carries the numbers of the rows.
    carrier = fields(given)[0].name
    numbers: dict[str, Any] = {carrier: order_B}
    numbered = replace(given.rows(order_B), **numbers)
    for piece in split(numbered, n_pieces, conventions):
        yield getattr(piece, carrier), piece


def _by_length(mask_BT: Tensor) -> Tensor:
    return mask_BT.sum(dim=1).argsort(stable=True)


def narrowed(record: Record, width: int, length: int = 0) -> Record:
    """Keep the first `width` completion positions and, in whole sequences, the first `length` positions."""
    changes: dict[str, Any] = {
        field.name: value[:, : length if field.name in ("input_ids", "attention_mask", "position_ids") else width]
        for field in fields(record)
        if isinstance(value := getattr(record, field.name), Tensor) and value.ndim == 2
    }
    return replace(record, **changes)


def _bucket(mask_BL: Tensor, buckets: Sequence[int]) -> int:
    """Find the smallest bucket that holds every marked position, at most the present width."""
    available = mask_BL.shape[1]
    needed = int((torch.arange(1, available + 1, device=mask_BL.device) * mask_BL).max())
    return min(min((bucket for bucket in buckets if bucket >= needed), default=needed), available) or available
