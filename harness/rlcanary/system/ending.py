"""The end of a process or a job."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """The end of a process. `code` is its exit code, or minus the signal that killed it."""

    code: int
    seconds: float
    timed_out: bool = False
    why: str = ""
    """The reason why no process ran. Empty if one did."""
    state: str = ""
    """The last state of a job without a result. `code` has no meaning then."""
