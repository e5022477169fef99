"""Which entries of known_issues.toml a run lists for removal, and which it leaves alone."""

from pathlib import Path

import pytest
from inner_session import run_pytest, run_session

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


TWO = """
def test_passes():
    pass

def test_fails():
    assert False
"""
TWO_REGISTRY = """
[[issue]]
id = "OPEN"
reason = "bundles"
tests = ["test_inner.py::test_passes", "test_inner.py::test_renamed"]
versions = ["pytest<8"]
"""
RENAMED = "there is no test test_inner.py::test_renamed; remove it"


def test_workers_of_xdist_list_the_entries_to_remove_once(tmp_path: Path) -> None:
    (tmp_path / "known_issues.toml").write_text(TWO_REGISTRY)
    run = run_session(tmp_path, TWO, *ONLY_KNOWN_ISSUES, "-n", "2")
    assert run.output.count(RENAMED) == 1, run.output
    assert run.output.count("OPEN: does not apply here: needs pytest<8") == 1


def test_collection_of_some_tests_of_a_file_accuses_none_of_the_others(tmp_path: Path) -> None:
    (tmp_path / "known_issues.toml").write_text(TWO_REGISTRY)
    assert RENAMED in run_session(tmp_path, TWO, *ONLY_KNOWN_ISSUES).output
    again = run_pytest(tmp_path, *ONLY_KNOWN_ISSUES, "--lf")
    assert "1 failed" in again.output
    assert "there is no test" not in again.output
    module = run_pytest(tmp_path, *ONLY_KNOWN_ISSUES, "--pyargs", "test_inner::test_fails", PYTHONPATH=str(tmp_path))
    assert "1 failed" in module.output
    assert "there is no test" not in module.output


OTHER = """
import pytest

def test_known():
    try:
        raise KeyError("bundles")
    except KeyError as error:
        raise RuntimeError("no engine") from error

def test_another_failure_of_code_that_names_the_error():
    with pytest.raises(KeyError, match="bundles"):
        {}["bundles"]
    assert 1 == 2, "wrong answer"

@pytest.mark.xfail(raises=ZeroDivisionError, reason="of its own")
def test_of_its_own():
    1 / 0
"""
OTHER_REGISTRY = """
[[issue]]
id = "OPEN"
reason = "bundles"
tests = ["test_inner.py::test_*"]
error = "KeyError: .bundles"
"""


@pytest.mark.parametrize("options", [[], ["--tb=native"], ["--tb=line"], ["-n", "1"]], ids=" ".join)
def test_a_known_error_is_one_that_was_raised_and_not_one_that_the_source_names(
    tmp_path: Path, options: list[str]
) -> None:
    registry = OTHER_REGISTRY.replace("KeyError: .", "KeyError.*")  # in the source: KeyError, match="bundles"
    (tmp_path / "known_issues.toml").write_text(registry)
    run = run_session(tmp_path, OTHER, *ONLY_KNOWN_ISSUES, *options)
    assert "1 failed, 2 xfailed" in run.output, run.output
    assert "FAILED test_inner.py::test_another_failure_of_code_that_names_the_error" in run.output
