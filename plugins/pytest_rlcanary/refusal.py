"""End a session for a user's mistake that shows only once the tests are collected."""

from __future__ import annotations

import pytest


def refuse(config: pytest.Config, where: str, message: str) -> None:
    """Say what is wrong in one line and end the session with exit code 2, before any test ran.

    A worker of xdist has no output and cannot end the session: there the mistake is an error of collection, which the
    controller shows, and this function returns.

    Args:
        config: of the session.
        where: the test or the option that holds the mistake.
        message: what is wrong and what to do.
    """
    if not hasattr(config, "workerinput"):
        pytest.exit(f"{where}: {message}", returncode=2)
    config.hook.pytest_collectreport(report=pytest.CollectReport(where, "failed", message, []))
