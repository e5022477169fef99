"""The settings of an audit that a framework starts, which nobody calls with arguments."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlcanary.contract.conventions import Conventions
from rlcanary.live.audit import Audit


def audit_of(conventions: Conventions | None, group: Any = None) -> Audit:
    """Make an audit of data-parallel ranks whose gradients are averaged.

    `RLCANARY_LIVE_EVERY` is the number of updates from one that is audited to the next (20); `RLCANARY_LIVE_BUNDLES` is a
    folder for bundles.

    Raises:
        ValueError: the number is none.
    """
    every = os.environ.get("RLCANARY_LIVE_EVERY", "20")
    if not every.isdecimal() or int(every) < 1:
        raise ValueError(f"RLCANARY_LIVE_EVERY={every!r} has to be a number of updates, 1 or more")
    folder = os.environ.get("RLCANARY_LIVE_BUNDLES")
    return Audit(
        conventions,
        every=int(every),
        bundles=None if folder is None else Path(folder),
        ranks="mean",
        group=group,
    )
