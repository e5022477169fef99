"""One update made of an adapter's capabilities, and the push that it gives to each token."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import CollatedBatch, PolicyBatch
from rlcanary.contract.records.credit import CreditBatch
from rlcanary.contract.records.layouts import Layout
from rlcanary.reference.step import descend

PIECES = 2
"""Micro-batches or ranks of an update whose bug is in how it is split."""
LAYOUT = Layout(data_parallel=2, context_parallel=2, tensor_parallel=2, micro_batches=2)

UPDATES = (
    *("train_step", "sharded_update", "completion_logprobs", "advantages", "token_advantages"),
    *("policy_loss", "accumulated_loss", "sharded_loss"),
)
"""The capabilities that an update can go through."""


def changed(bug: type[ReferenceAdapter], name: str) -> bool:
    """Tell whether a bug changes this capability of the reference."""
    return getattr(bug, name) is not getattr(ReferenceAdapter, name)


def update(adapter: ReferenceAdapter, state: Any, batch: CollatedBatch) -> None:
    """Update a state on a batch, through the capabilities that the adapter changes.

    Raises:
        NotProvided: they do not take such a batch or layout.
    """
    kind = type(adapter)
    if changed(kind, "train_step"):
        adapter.train_step(state, batch)
    elif changed(kind, "sharded_update"):
        adapter.sharded_update(state, batch, LAYOUT)
    else:
        descend(state, _loss(adapter, state, batch), adapter.conventions)


def _loss(adapter: ReferenceAdapter, state: Any, batch: CollatedBatch) -> Tensor:
    kind, conventions = type(adapter), adapter.conventions
    # The advantages below are the adapter's, of rows or of tokens.
    of_rows = {"token_credit": "outcome", "whitening": "none", "baseline_weighting": "rows"}
    given = reference.policy_batch(state.model, state.ref_model, batch, conventions.replace(**of_rows))
    logprobs_BT, advantages = given.logprobs, given.advantages
    if changed(kind, "completion_logprobs"):
        logprobs_BT = adapter.completion_logprobs(state.model, batch, conventions.temperature)
    if changed(kind, "token_advantages"):
        values_BT = torch.linspace(0, 1, batch.completion_mask.numel()).view(batch.completion_mask.shape)
        credit = CreditBatch(batch.rewards, batch.completion_mask, batch.group_ids, values_BT)
        advantages = adapter.token_advantages(credit).advantages
    if changed(kind, "advantages"):
        advantages = adapter.advantages(batch.rewards, batch.group_ids)
    whole = PolicyBatch(
        logprobs_BT,
        given.old_logprobs,
        advantages,
        batch.completion_mask,
        given.ref_logprobs,
        given.sampler_logprobs,
        given.entropy,
        batch.group_ids,
    )
    if changed(kind, "accumulated_loss"):
        return adapter.accumulated_loss(whole, PIECES).loss
    if changed(kind, "sharded_loss"):
        return adapter.sharded_loss(whole, PIECES).loss
    return adapter.policy_loss(whole).loss


@dataclass
class Pushes:
    """The gradients that reached a model's logits, of each forward pass whose logits got one."""

    passes: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def of(self, batch: CollatedBatch, temperature: float) -> Tensor | None:
        """Return the push on each token of a batch, [B, S]: minus the derivative of the loss by its logprob.

        Positive makes the token likelier. None if a pass had other rows than the batch.
        """
        wanted = [row[mask].tolist() for row, mask in zip(batch.input_ids, batch.attention_mask, strict=True)]
        push_BS = torch.zeros(batch.input_ids.shape)
        for ids_NS, logits_NSV, gradient_NSV in self.passes:
            chances_NSV = (logits_NSV / temperature).softmax(-1)
            for ids_S, chances_SV, gradient_SV in zip(ids_NS, chances_NSV, gradient_NSV, strict=True):
                found = [row for row, ids in enumerate(wanted) if _place(ids, ids_S.tolist()) is not None]
                if len(found) != 1:
                    return None
                row, ids = found[0], wanted[found[0]]
                start = _place(ids, ids_S.tolist()) or 0
                direction_PV = torch.nn.functional.one_hot(torch.tensor(ids[1:]), chances_SV.shape[1])
                direction_PV = direction_PV - chances_SV[start : start + len(ids) - 1]
                along_P = (gradient_SV[start : start + len(ids) - 1] * direction_PV).sum(-1)
                places = batch.attention_mask[row].nonzero().flatten()[1:]
                push_BS[row, places] -= temperature * along_P / direction_PV.square().sum(-1)
        return push_BS


def _place(ids: list[int], row: list[int]) -> int | None:
    """Return where ids stand in a row that is padded around them, None if they do not."""
    starts = range(len(row) - len(ids) + 1)
    return next((start for start in starts if row[start : start + len(ids)] == ids), None)


@contextmanager
def watched(model: Any) -> Iterator[Pushes]:
    """Record the gradients that reach the logits of a model of transformers inside the block."""
    pushes = Pushes()

    def note(_: Any, given: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        ids, logits = named.get("input_ids", given[0] if given else None), output.logits
        if logits.requires_grad and ids is not None:
            logits.register_hook(lambda gradient: pushes.passes.append((ids, logits.detach(), gradient.detach())))

    handle = model.register_forward_hook(note, with_kwargs=True)
    try:
        yield pushes
    finally:
        handle.remove()
