"""The numbers that the run logs of an update are those of this update."""

from __future__ import annotations

import math
from collections.abc import Iterator

from rlcanary import reference
from rlcanary.contract import conventions as words
from rlcanary.live.findings import Finding
from rlcanary.live.invariants.advantages import declared
from rlcanary.live.record import Record

# How far off a logged number may be, as a share of it and by itself: dashboards round.
SHARE, BY_ITSELF = 0.02, 1e-4


def judge(record: Record) -> Iterator[Finding]:
    """Compare each logged number that has a declared value."""
    conventions = record.conventions
    advantages = record.advantages if record.advantages is not None else declared(record)
    if not record.logged or conventions is None or advantages is None or record.mask_has_unscored:
        return
    if "custom" in (getattr(conventions, name) for name in words.PIECES):
        return
    output = reference.policy_loss(record.policy_batch(advantages), conventions)
    expected = {**output.metrics, "loss": float(output.loss.detach())}
    if record.rewards is not None:
        expected["reward"] = float(record.rewards.nanmean())
    for name in sorted(set(record.logged) & set(expected)):
        got, wanted = float(record.logged[name]), expected[name]
        if math.isnan(got) and math.isnan(wanted):
            continue
        allowed = max(SHARE, 8 * record.eps) * abs(wanted) + BY_ITSELF + record.eps
        if not abs(got - wanted) <= allowed:
            told = f"the logged {name} is {got:.4g}, and that of this update is {wanted:.4g}"
            yield Finding(f"logged.{name}", told, abs(got - wanted))
