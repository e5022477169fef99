"""What a check says of a mistake: its first failure, which takes a fraction of the time of all."""

from rlcanary.checks import Check, Result, run_check
from rlcanary.contract.adapter import Adapter


def first_failure(check: Check, adapter: Adapter, spec: str = "unused") -> Result:
    """Run a check up to its first case that fails; one that raises an error is not the last."""
    return run_check(check, adapter, spec, until=lambda found: not found.is_error)
