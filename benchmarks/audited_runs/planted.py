"""Runs with a bug of the museum planted in them."""

import math
from functools import cache
from typing import Any

from audited_runs.training import MAX_TOKENS, PROFILES, ROWS, Run
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs import Bug
from rlcanary.live import Audit

# What a run calls; a bug in anything else never reaches an update.
REACHED = {
    *("completion_logprobs", "token_logprobs", "advantages", "policy_loss", "accumulated_loss", "make_batch"),
    *("rollout", "sync_weights", "new_engine"),
}
IDLE = ["not reached", 0]


def planted(bug: type[Bug], updates: int) -> list[Any] | None:
    """Train with a bug -> the kind of its first finding and the audited updates until then.

    None is one that takes the weights elsewhere in some run and is not found. IDLE does not, or ends its first such run
    with an error.
    """
    is_reached = False
    for profile, (conventions, pieces) in PROFILES.items():
        audit = Audit(conventions, every=1, on_finding="log", rows=ROWS, max_tokens=MAX_TOKENS)
        run = Run(bug(conventions), audit, pieces=pieces)
        while audit.updates < updates:
            try:
                run.step()
            except (ValueError, RuntimeError, LookupError, TypeError, AttributeError):
                return None if is_reached else IDLE  # The run ends with an error.
            if audit.findings:
                return [audit.findings[0].invariant, audit.audited]
        # Later, a difference in the last bit has grown.
        pairs = zip(run.trace[:6], right(profile, updates)[:6], strict=True)
        is_reached |= not all(math.isclose(got, wanted, rel_tol=1e-5) for got, wanted in pairs)
    return None if is_reached else IDLE


@cache
def right(profile: str, updates: int) -> list[float]:
    """Train without a mistake -> the sum of the weights after each update."""
    conventions, pieces = PROFILES[profile]
    run = Run(ReferenceAdapter(conventions), None, pieces=pieces)
    while len(run.trace) < updates:
        run.step()
    return run.trace


def reached(bug: type[Bug]) -> bool:
    """Tell whether a run calls what the bug changes."""
    return any(getattr(bug, name) is not getattr(ReferenceAdapter, name) for name in REACHED)
