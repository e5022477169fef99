"""Report a test that passed its limit: one sentence, the place in the test, and the stacks of its threads."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType

import pytest
from _pytest.outcomes import Failed  # what pytest.fail raises, under a name that can be subclassed

from pytest_rlcanary.hooks import Hooks
from rlcanary.cleanup.watchdog import Expiry, TimedOut

EXPIRY = pytest.StashKey[Expiry]()


class TestTimedOut(Failed):
    """Failure of a test that passed its limit."""

    __module__ = "builtins"  # reports then show the bare name
    __test__ = False


class Stacks(Hooks):
    """Shows the stacks of tests that timed out; a session without one does not pay for this hook."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        expiry = item.stash.get(EXPIRY, None)
        if expiry is not None and call.excinfo is not None and call.excinfo.errisinstance(TestTimedOut):
            del item.stash[EXPIRY]
            add_stacks(report, expiry)
        return report


def sentence(expiry: Expiry, when: str) -> str:
    return f"{expiry.what} was still running after {expiry.limit:g} seconds, its limit ({when})"


def is_our_doing(error: BaseException) -> bool:
    """Tell if an exception is the interruption, or Ray's error for an actor or a task that was ended."""
    return isinstance(error, TimedOut) or type(error).__module__.startswith("ray.")


def above_ray(trace: TracebackType | None) -> TracebackType | None:
    """Cut the traceback at the call into Ray: the place inside Ray is of no interest."""
    entry = trace
    while entry is not None and entry.tb_next is not None:
        if entry.tb_next.tb_frame.f_globals.get("__name__", "").split(".")[0] == "ray":
            entry.tb_next = None
        entry = entry.tb_next
    return trace


def add_stacks(report: pytest.TestReport, expiry: Expiry) -> None:
    """Put the stacks below the failure, so that they reach the terminal, the XML file and the controller of xdist."""
    add_section = getattr(report.longrepr, "addsection", None)
    if add_section is None:
        report.longrepr = f"{report.longreprtext}\n" + "\n".join(expiry.threads.values())
        return
    for name, stack in expiry.stacks().items():
        add_section(f"stack of {name}", stack)
