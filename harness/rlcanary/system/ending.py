"""How a process or a job ended."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Ending:
    """How a process ended. `code` is its exit code, or minus the signal that killed it."""

    code: int
    seconds: float
    timed_out: bool = False
    why: str = ""
    """What stood in the way, where there was no process to run."""
    state: str = ""
    """The last state of a job that left no result: `code` says nothing then."""
