"""Batches of supervised, distillation and preference losses, the same in float64, and the same with other padding.

Shapes: B rows, S sequence positions, T and U completion positions, V vocabulary.
"""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Generator, Tensor

from rlcanary.checks.asserts import gradient
from rlcanary.checks.worlds.inputs import uniform
from rlcanary.contract.records.other_losses import DistillationBatch, OtherBatch, PreferenceBatch, SupervisedBatch

Batch = TypeVar("Batch", bound=OtherBatch)

VOCABULARY = 5

# Trained tokens of each row behind a prompt: one, some beside padding, turns with untrained ones between them, none.
MASKS: dict[str, list[str]] = {
    "one token": [".x"],
    "uneven rows": ["..xxx.", ".x...."],
    "several turns": [".x..xx", "..xx.x", ".....x"],
    "a row of nothing": [".xxx", "....", "..x."],
}
# More tokens, and more rows, than a chunk is likely to hold.
LARGE: dict[str, list[str]] = {"a long row": [f".{'x' * 299}"], "many rows": [".x"] * 70}


def mask(rows: list[str]) -> Tensor:
    """[B, T] bool, true where a row has an x."""
    return torch.tensor([[letter == "x" for letter in row] for row in rows])


def supervised_batch(rng: Generator, trained_BS: Tensor) -> SupervisedBatch:
    """Random logits and ids of prompts, answers and padding."""
    ids_BS = torch.randint(VOCABULARY, trained_BS.shape, generator=rng)
    return SupervisedBatch(_logits(rng, trained_BS).requires_grad_(), ids_BS, trained_BS)


def distillation_batch(rng: Generator, trained_BT: Tensor, temperature: float = 1.0) -> DistillationBatch:
    """Random logits of student and teacher, whose distributions differ widely."""
    ids_BT = torch.randint(VOCABULARY, trained_BT.shape, generator=rng)
    logits_BTV, teacher_BTV = _logits(rng, trained_BT), _logits(rng, trained_BT)
    return DistillationBatch(logits_BTV.requires_grad_(), teacher_BTV, ids_BT, trained_BT, temperature)


def preference_batch(rng: Generator, chosen_BT: Tensor, rejected_BU: Tensor) -> PreferenceBatch:
    """Random logprobs of pairs, with margins of both signs."""
    policy = [uniform(rng, *each.shape, low=-4, high=-0.2).requires_grad_() for each in (chosen_BT, rejected_BU)]
    ref = [uniform(rng, *each.shape, low=-4, high=-0.2) for each in (chosen_BT, rejected_BU)]
    return PreferenceBatch(policy[0], policy[1], chosen_BT, rejected_BU, ref[0], ref[1])


def _logits(rng: Generator, trained_BT: Tensor) -> Tensor:
    return uniform(rng, *trained_BT.shape, VOCABULARY, low=-3, high=3, decimals=3)


def double(batch: Batch) -> Batch:
    """Convert the batch to float64; what requires a gradient does so as a leaf."""
    exact: dict[str, Any] = {
        field.name: value.detach().double().requires_grad_(value.requires_grad)
        for field in fields(batch)
        if isinstance(value := getattr(batch, field.name), Tensor) and value.is_floating_point()
    }
    return replace(batch, **exact)


def gradients(loss: Tensor, batch: Batch) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradient of the loss with respect to each tensor of the batch that requires one, by name."""
    for field in fields(batch):
        value = getattr(batch, field.name)
        if isinstance(value, Tensor) and value.requires_grad:
            yield field.name, gradient(loss, value)


def surrounded(batch: Batch, left: int, right: int) -> Batch:
    """Put other numbers where nothing is trained, and as many columns of them around the rows.

    Logits of a supervised batch are trained at the position before the token that they predict.
    """
    changed: dict[str, Any] = {}
    for field in fields(batch):
        values = getattr(batch, field.name)
        if not isinstance(values, Tensor):
            continue
        if values.dtype == torch.bool:
            changed[field.name] = widened(values, left, right)
            continue
        kept = _trained(batch, field.name)
        other = torch.arange(values.numel()).reshape(values.shape) % 4
        filling = other.to(values.dtype) - (12.5 if values.is_floating_point() else 0)
        shaped = kept.reshape(*kept.shape, *[1] * (values.ndim - kept.ndim)).expand_as(values)
        moved = widened(torch.where(shaped, values.detach(), filling), left, right, 3)
        changed[field.name] = moved.requires_grad_(values.requires_grad)
    return replace(batch, **changed)


def _trained(batch: Batch, name: str) -> Tensor:
    """[B, T] bool: the places of a field that the loss reads."""
    if isinstance(batch, PreferenceBatch):
        return batch.chosen_mask if "chosen" in name else batch.rejected_mask
    if isinstance(batch, SupervisedBatch) and name == "logits":
        return torch.cat([batch.mask[:, 1:], torch.zeros_like(batch.mask[:, :1])], dim=1)
    return batch.mask


def widened(values: Tensor, left: int, right: int, number: float = 0) -> Tensor:
    """[B, T, …] with columns of this number on both sides."""
    columns = [values.new_full((len(values), width, *values.shape[2:]), number) for width in (left, right)]
    return torch.cat([columns[0], values, columns[1]], dim=1)
