"""Judge a recorded update again: as the run took it, or as an adapter would take it now."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from rlcanary import reference
from rlcanary.contract.adapter import Adapter, NotProvided, provided
from rlcanary.errors import UserError
from rlcanary.live.bundle import read
from rlcanary.live.findings import Finding, without_consequences
from rlcanary.live.invariants import JUDGES
from rlcanary.live.invariants.advantages import declared
from rlcanary.live.record import Record
from rlcanary.live.sampling import Sampling


def judged(record: Record, adapter: Adapter | None = None) -> list[Finding]:
    """Judge a record by every invariant, or that of an adapter by those of its loss and its advantages.

    What takes the evidence of several updates is judged as if this were the first one.
    """
    judges = (*JUDGES, Sampling().judge)
    found = without_consequences([finding for judge in judges for finding in judge(record)])
    if adapter is not None:
        found = [finding for finding in found if can_be_of(adapter, finding.invariant)]
    for finding in found:
        finding.since = record.update
    return found


def can_be_of(adapter: Adapter, invariant: str) -> bool:
    """Tell whether an adapter, which computes a loss and perhaps advantages anew, can be the cause of a finding."""
    kind = invariant.partition(".")[0]
    return kind in ("gradient", "logged") or (kind == "advantages" and "advantages" in provided(adapter))


def shows_in_its_bundle(invariant: str) -> bool:
    """Tell whether one update's tokens show a finding: not where it took several updates, or the weights."""
    return invariant.partition(".")[0] not in ("sampling", "weights")


def taken_by(adapter: Adapter, record: Record) -> Record:
    """Return the update as an adapter takes it: its own advantages, and the gradient of its own loss.

    The loss is `accumulated_loss` in as many micro-batches as the run had, or `policy_loss` for one. Of its metrics those
    that the run logs are taken, over the whole update.

    Raises:
        UserError: the adapter has neither loss, or the record lacks what they need.
    """
    has = provided(adapter)
    advantages = record.advantages if record.advantages is not None else declared(record)
    if "advantages" in has and record.rewards is not None and record.group_ids is not None:
        with suppress(NotProvided):  # then the run's own are taken
            advantages = adapter.advantages(record.rewards, record.group_ids).double()
    if advantages is None:
        raise UserError("the bundle has neither advantages nor the rewards and groups that make them")
    if record.is_rollout:
        return replace(record, advantages=advantages)
    count = len(record.pieces)
    batch = record.policy_batch(advantages)
    try:
        if count > 1 and "accumulated_loss" in has:
            output = adapter.accumulated_loss(batch, count)
        else:
            output = adapter.policy_loss(batch)
    except NotProvided as error:
        raise UserError(
            f"the adapter does not compute the loss of this update: {error or 'policy_loss is missing'}"
        ) from error
    gradient_BT = torch.zeros_like(record.gradient)
    if output.loss.requires_grad:
        (found,) = torch.autograd.grad(output.loss, [batch.logprobs], allow_unused=True)
        gradient_BT = gradient_BT if found is None else found.double()
    of_whole = {**output.metrics, "loss": float(output.loss.detach())}
    logged = {name: value for name, value in of_whole.items() if name in record.logged}
    return replace(record, advantages=advantages, gradient=gradient_BT, logged=logged, parts=[])


def replayed(bundle: str | Path, adapter: Adapter | None = None) -> list[Finding]:
    """Judge the update of a bundle, as the run took it or as an adapter takes it.

    Raises:
        UserError: the bundle cannot be read, or the adapter does not compute the update's loss.
    """
    record, _ = read(bundle)
    return judged(record if adapter is None else taken_by(adapter, record), adapter)


def shrunk(record: Record, invariant: str, adapter: Adapter | None = None) -> tuple[Tensor, Record]:
    """Leave out groups, then rows, as long as a finding of this invariant stays.

    An adapter takes each smaller update anew. Without one the gradient is that of the run's whole update, and the rows that
    are left keep its counts.

    Returns:
        [n] the rows that are left, and the update of them alone.
    """
    given = record if adapter is not None else _as_part(record)
    count = max(1, len(record.pieces))

    def shows(rows: Tensor) -> Record | None:
        try:
            smaller = given.rows(rows)
            if adapter is not None:
                pieces = list(torch.arange(len(rows)).tensor_split(min(count, len(rows))))
                smaller = taken_by(adapter, replace(smaller, pieces=pieces, logged=given.logged))
            return smaller if any(finding.invariant == invariant for finding in judged(smaller, adapter)) else None
        except (ValueError, UserError, NotProvided):
            return None  # This loss cannot take the smaller update.

    rows, best = torch.arange(len(record.mask)), record
    units = _by_group(record)
    if adapter is not None or invariant != "advantages":  # the run's advantages are those of whole groups
        units += [[row] for row in rows.tolist()]
    for unit in units:
        kept = rows[~torch.isin(rows, torch.tensor(unit))]
        if 0 < len(kept) < len(rows) and (smaller := shows(kept)) is not None:
            rows, best = kept, smaller
    return rows, best


def _as_part(record: Record) -> Record:
    """Return a whole update as a part of itself: with its advantages and its counts of tokens and rows."""
    advantages = record.advantages if record.advantages is not None else declared(record)
    if record.conventions is None or advantages is None:
        return replace(record, pieces=[])
    rows = reference.count_sequences(record.policy_batch(advantages), record.conventions)
    return replace(record, advantages=advantages, pieces=[], counts=(float(record.mask.sum()), rows))


def _by_group(record: Record) -> list[list[int]]:
    if record.group_ids is None:
        return []
    groups: dict[int, list[int]] = {}
    for row, group in enumerate(record.group_ids.tolist()):
        groups.setdefault(group, []).append(row)
    return list(groups.values())
