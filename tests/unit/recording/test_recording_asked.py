"""Results are written where somebody asks for them, and nowhere else."""

import json
from pathlib import Path

import pytest

OWN_FIXTURE = """
import pytest

@pytest.fixture
def tracker():
    return "of this project"

def test_a(tracker):
    assert tracker == "of this project"
"""
DYNAMIC = "def test_a(request): request.getfixturevalue('tracker').track('a', 1)"


@pytest.fixture(autouse=True)
def only_needed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_rlcanary.tracker,xdist.plugin")


def written(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if "results" in path.name or path.name.startswith(".unit"))


@pytest.mark.parametrize("arguments", [[], ["-n1"], ["-k", "none"]], ids=["alone", "xdist", "all deselected"])
@pytest.mark.parametrize("test", ["def test_a(): pass", OWN_FIXTURE], ids=["no tracker", "a fixture of this name"])
def test_run_without_the_tracker_writes_nothing(pytester: pytest.Pytester, test: str, arguments: list[str]) -> None:
    pytester.makepyfile(test_a=test)
    outcome = pytester.runpytest_subprocess(*arguments)
    assert outcome.ret in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
    assert written(pytester.path) == []
    assert "rlcanary: results in" not in outcome.stdout.str() + outcome.stderr.str()


@pytest.mark.parametrize("argument", ["--collect-only", "--fixtures", "--help", "--version"])
def test_pytest_that_runs_no_tests_writes_nothing(pytester: pytest.Pytester, argument: str) -> None:
    pytester.makepyfile("def test_a(tracker): pass")
    pytester.runpytest_subprocess(argument)
    assert written(pytester.path) == []


SET_UP = """
import pytest

@pytest.fixture
def engine(tracker):
    tracker.track("start", 1)
    assert tracker.get_max_mem() > 0

def test_a(engine):
    assert False
"""


@pytest.mark.parametrize("workers", [[], ["-n1"]], ids=["alone", "xdist"])
@pytest.mark.parametrize("argument", ["--setup-only", "--setup-plan"])
def test_pytest_that_shows_what_sets_tests_up_records_nothing(
    pytester: pytest.Pytester, argument: str, workers: list[str]
) -> None:
    pytester.makepyfile(SET_UP)
    pytester.mkdir("unit_results")
    assert pytester.runpytest_subprocess(argument, *workers).ret == 0
    assert written(pytester.path) == ["unit_results"]
    assert list((pytester.path / "unit_results").iterdir()) == []


@pytest.mark.parametrize("arguments", [[], ["-n2"]], ids=["alone", "xdist"])
@pytest.mark.parametrize("test", ["def test_a(tracker): tracker.track('a', 1)", DYNAMIC], ids=["static", "dynamic"])
def test_run_in_which_a_test_uses_the_tracker_is_recorded_whole(
    pytester: pytest.Pytester, test: str, arguments: list[str]
) -> None:
    pytester.makepyfile(test_0="def test_before(): pass", test_1=test)
    outcome = pytester.runpytest_subprocess(*arguments)
    outcome.assert_outcomes(passed=2)
    run = json.loads((pytester.path / "unit_results.json").read_text())
    assert run["metrics"]["test_1::test_a"]["a"] == 1
    assert {nodeid: test["outcome"] for nodeid, test in run["tests"].items()} == {
        "test_0.py::test_before": "passed",
        "test_1.py::test_a": "passed",
    }
    assert run["exit_status"] == 0


@pytest.mark.parametrize("asked", ["option", "setting", "folder"])
def test_run_is_recorded_where_it_is_asked_for(pytester: pytest.Pytester, asked: str) -> None:
    pytester.makepyfile("def test_a(): pass")
    arguments = ["--rlcanary-results=unit_results.json"] if asked == "option" else []
    if asked == "setting":
        pytester.makeini("[pytest]\nrlcanary_results = unit_results.json")
    if asked == "folder":
        pytester.mkdir("unit_results")
    outcome = pytester.runpytest_subprocess(*arguments)
    outcome.stdout.fnmatch_lines(["*results in unit_results.json"])
    assert json.loads((pytester.path / "unit_results.json").read_text())["exit_status"] == 0
    assert len(list(pytester.path.glob("unit_results/*.json"))) == 1
