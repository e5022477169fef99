"""Which outcome a test has that was tried again (the reports of pytest-rerunfailures)."""

from rlcanary.recording.outcomes import OutcomeLog


def attempt(log: OutcomeLog, outcome: str) -> str:
    log.add("t.py::test_a", "setup", "passed", False, 0.0)
    log.add("t.py::test_a", "call", outcome, False, 1.0)
    over = log.add("t.py::test_a", "teardown", "passed", False, 0.0)
    assert over is not None
    return over[0]


def test_pass_after_a_failed_attempt_is_told_from_a_pass() -> None:
    log = OutcomeLog()
    attempt(log, "rerun")
    assert attempt(log, "passed") == "retried"
    assert attempt(OutcomeLog(), "passed") == "passed"


def test_failure_after_a_failed_attempt_is_a_failure() -> None:
    log = OutcomeLog()
    attempt(log, "rerun")
    assert attempt(log, "failed") == "failed"
