"""Which outcome a test has that was tried again (the reports of pytest-rerunfailures), or that has subtests."""

import json

import pytest

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


def test_a_crashed_attempt_that_is_never_repeated_has_no_outcome() -> None:
    log = OutcomeLog()
    assert log.add("t", "setup", "passed", False, 0.1) is None
    assert log.add("t", "???", "rerun", False, 0.0) is None


def test_failure_after_a_failed_attempt_is_a_failure() -> None:
    log = OutcomeLog()
    attempt(log, "rerun")
    assert attempt(log, "failed") == "failed"


SUBTESTS = """
import pytest
import unittest

def test_failed(subtests, tracker):
    with subtests.test("a"):
        assert False

def test_passed(subtests):
    with subtests.test("a"):
        pass

@pytest.mark.xfail
def test_failed_as_expected(subtests):
    with subtests.test("a"):
        assert False

@pytest.mark.xfail
def test_failed_nowhere(subtests):
    with subtests.test("a"):
        pass

class TestUnit(unittest.TestCase):
    def test_failed(self):
        with self.subTest("a"):
            self.fail("no")
"""


@pytest.mark.parametrize("arguments", [[], ["-n1"], ["-p", "no:terminal"]], ids=["alone", "xdist", "no terminal"])
def test_test_with_a_failed_subtest_is_a_failure(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_rlcanary.tracker,xdist.plugin")
    pytester.makepyfile(test_a=SUBTESTS)
    assert pytester.runpytest_subprocess(*arguments).ret == 1
    tests = json.loads((pytester.path / "unit_results.json").read_text())["tests"]
    assert {nodeid.partition("::")[2]: test["outcome"] for nodeid, test in tests.items()} == {
        "test_failed": "failed",
        "test_passed": "passed",
        "test_failed_as_expected": "xfailed",
        "test_failed_nowhere": "xpassed",
        "TestUnit::test_failed": "failed",
    }
