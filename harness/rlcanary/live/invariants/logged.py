"""The numbers that the run logs of an update are those of this update."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from statistics import fmean

from rlcanary import reference
from rlcanary.live.findings import Finding
from rlcanary.live.invariants.advantages import declared
from rlcanary.live.record import Record

# How far off a logged number may be, as a share of it and by itself: dashboards round.
SHARE, BY_ITSELF = 0.02, 1e-4


def judge(record: Record) -> Iterator[Finding]:
    """Compare each logged number that has a declared value."""
    advantages = record.advantages if record.advantages is not None else declared(record)
    if not record.logged:
        return
    expected = dict(record.measured)
    if record.rewards is not None:
        expected["reward"] = float(record.rewards.nanmean())
    is_known = record.declares_its_loss and advantages is not None and not record.mask_has_unscored
    if is_known and not record.is_rollout:
        expected |= _of_loss(replace(record, advantages=advantages))
    for name in sorted(set(record.logged) & set(expected)):
        got, wanted = float(record.logged[name]), expected[name]
        if math.isnan(wanted):  # no token has it, as where a micro-batch is masked out: runs log 0 or NaN then
            continue
        allowed = max(SHARE, 8 * record.eps) * abs(wanted) + BY_ITSELF + record.eps
        if not abs(got - wanted) <= allowed:
            told = f"the logged {name} is {got:.4g}, and that of this update is {wanted:.4g}"
            yield Finding(f"logged.{name}", told, abs(got - wanted))


def _of_loss(record: Record) -> dict[str, float]:
    """Compute the loss of an update and its metrics, those of its parts as their mean."""
    whole = _output(record)
    if not record.parts:
        return whole
    of_parts = [_output(record.rows(rows)) for rows in record.parts]
    means = {name: fmean(each[name] for each in of_parts) for name in whole}
    return means | {name: whole[name] for name in ("loss", "policy_loss")}


def _output(record: Record) -> dict[str, float]:
    assert record.conventions is not None
    assert record.advantages is not None
    output = reference.policy_loss(record.policy_batch(record.advantages), record.conventions)
    return {**output.metrics, "loss": float(output.loss.detach())}
