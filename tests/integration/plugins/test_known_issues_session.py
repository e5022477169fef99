"""Which entries of known_issues.toml a run lists for removal, and which it leaves alone."""

from pathlib import Path

import pytest
from inner_session import run_session

ONLY_KNOWN_ISSUES = ("-p", "no:rlcanary-tracker")
SUBTESTS = """
import unittest

def test_fails_in_a_subtest(subtests):
    with subtests.test("a"):
        assert False
    with subtests.test("b"):
        pass

def test_passes(subtests):
    with subtests.test("a"):
        pass

class TestUnit(unittest.TestCase):
    def test_fails_in_a_subtest(self):
        with self.subTest("a"):
            self.fail("no")
"""
SUBTESTS_REGISTRY = """
[[issue]]
id = "SUB"
reason = "bundles"
tests = ["test_inner.py::test_fails*", "test_inner.py::TestUnit::*"]
strict = true

[[issue]]
id = "FIXED"
reason = "bundles"
tests = ["test_inner.py::test_passes"]
"""


@pytest.mark.parametrize("options", [[], ["-n", "1"]], ids=["alone", "xdist"])
def test_known_issue_that_shows_in_a_subtest_is_not_called_fixed(tmp_path: Path, options: list[str]) -> None:
    (tmp_path / "known_issues.toml").write_text(SUBTESTS_REGISTRY)
    run = run_session(tmp_path, SUBTESTS, *ONLY_KNOWN_ISSUES, *options)
    assert run.code == 0, run.output
    assert "SUB: fixed?" not in run.output
    assert "FIXED: fixed? test_inner.py::test_passes" in run.output
