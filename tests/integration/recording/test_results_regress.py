"""`rlcanary regress` on the history of a real repository, and the command that it prints, executed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from waiting import HANG_S

TEST = """
import json, pathlib

def test_policy(tracker):
    tracker.track("it's loss", json.loads((pathlib.Path(__file__).parent / "loss.json").read_text()))
"""
NODEID = "tests/unit/test_loss.py::test_policy"
NAME = "test_loss::test_policy.it's loss"
COMMITS = 12
CULPRIT = 6  # the loss is 0.5 before and 0.8 from here on


ENVIRONMENT = {
    **os.environ,
    **dict.fromkeys(("GIT_CONFIG_GLOBAL", "GIT_CONFIG_SYSTEM"), os.devnull),
    **dict.fromkeys(("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"), "Nobody"),
    **dict.fromkeys(("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"), "nobody@example.org"),
    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    "PYTEST_PLUGINS": "pytest_rlcanary.tracker",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def run(command: str, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        ["bash", "-c", command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository in which the loss is worse from one commit on, with a history: three runs on every third commit."""
    project = tmp_path_factory.mktemp("template")
    unit = project / "tests/unit"
    unit.mkdir(parents=True)
    (unit / "test_loss.py").write_text(TEST)
    (project / "pytest.ini").write_text("[pytest]\n")
    (project / ".gitignore").write_text("unit_results*\n")
    run("git init -q", project)
    number = 0
    for index in range(COMMITS):
        loss = 0.5 if index < CULPRIT else 0.8
        (unit / "loss.json").write_text(json.dumps(loss))
        (unit / "number").write_text(str(index))
        commit = run(f"git add . && git commit -qm 'change {index}' && git rev-parse HEAD", project).stdout.strip()
        for _ in range(3 if index % 3 == 0 else 0):
            write_run(project, number, commit, loss)
            number += 1
    return project


@pytest.fixture
def project(template: Path, tmp_path: Path) -> Path:
    return shutil.copytree(template, tmp_path / "project")


@pytest.fixture
def commits(template: Path) -> list[str]:
    """All commits, the first one first."""
    return run("git rev-list --reverse HEAD", template).stdout.split()


def write_run(project: Path, number: int, commit: str, loss: float | None, **changes: Any) -> None:
    key = NAME.rpartition(".")[0]
    metrics = {"it's loss": loss, "entropy": 2.0 if loss == 0.5 else 3.0, "steady": 1.0}
    document = {
        "exit_status": 0,
        "git_commit": commit,
        "start_time_utc": f"2025-03-{number + 1:02d}T12:00:00+00:00",
        "metrics": {key: metrics},
        "gpu_types": [],
        "schema": 1,
        "run_id": f"run{number}",
        "dirty": False,
        "versions": {"torch": "2.4.0"},
        "environment": "one",
        "tests": {NODEID: {"outcome": "passed", "duration": 1.0, "key": key}},
    }
    results = project / "tests/unit/unit_results"
    results.mkdir(exist_ok=True)
    (results / f"run{number}.json").write_text(json.dumps(document | changes))


def test_regression_is_shown_with_its_size_and_commits(project: Path, commits: list[str]) -> None:
    shown = run("rlcanary regress", project, code=1).stdout
    (row,) = [line for line in shown.splitlines() if line.startswith("│ new")]
    assert all(part in row for part in ("lower", "0.5 → 0.8", "+60 %", "2025-03-07", commits[3][:10], commits[6][:10]))
    (moved,) = [line for line in shown.splitlines() if "moved" in line]
    assert "2 → 3" in moved
    assert "steady" not in shown


@pytest.mark.parametrize("columns", [80, 60])
def test_narrow_terminal_cuts_nothing_off(project: Path, commits: list[str], columns: int) -> None:
    shown = click.unstyle(run(f"FORCE_COLOR=1 COLUMNS={columns} rlcanary regress '*loss'", project, code=1).stdout)
    table = shown[: shown.index("└")]
    assert max(map(len, table.splitlines())) <= columns
    for part in (NAME, "0.5 → 0.8", "+60 %", "lower", "2025-03-07", f"{commits[3][:10]} … {commits[6][:10]}"):
        assert part in table


def test_locale_without_arrows_gets_the_same_verdict(project: Path) -> None:
    assert "0.5 ? 0.8" in run("PYTHONIOENCODING=ascii rlcanary regress '*loss'", project, code=1).stdout


def test_printed_command_finds_the_commit(project: Path, commits: list[str]) -> None:
    (found,) = json.loads(run("rlcanary regress --json '*loss'", project, code=1).stdout)
    assert (found["metric"], found["status"], found["better"]) == (NAME, "new", "lower")
    before = {path: path.read_text() for path in project.glob("tests/unit/**/*.json")}
    bisected = run(found["command"], project)
    assert f"{commits[CULPRIT]} is the first bad commit" in bisected.stdout
    assert {path: path.read_text() for path in project.glob("tests/unit/**/*.json")} == before


def test_command_from_a_subfolder_goes_to_the_root(project: Path) -> None:
    (found,) = json.loads(run("rlcanary regress --json '*loss'", project / "tests/unit", code=1).stdout)
    assert found["command"].startswith("cd ../.. && rlcanary bisect")


def test_loss_that_became_nan_is_worse_and_has_a_command(project: Path, commits: list[str]) -> None:
    write_run(project, 12, commits[11], None)
    (found,) = json.loads(run("rlcanary regress --json '*loss'", project, code=1).stdout)
    assert found["after"] is None
    assert (found["last_good"]["git_commit"], found["first_bad"]["git_commit"]) == (commits[9], commits[11])
    assert ">= 0" in found["command"]


def test_direction_is_declared_in_the_settings_or_by_an_option(project: Path) -> None:
    run("rlcanary regress --higher '*loss'", project)
    (project / "pytest.ini").write_text("[pytest]\nrlcanary_directions =\n    *.entropy = stable\n    * = ignore\n")
    (found,) = json.loads(run("rlcanary regress --json", project, code=1).stdout)
    assert (found["metric"].rpartition(".")[2], found["status"]) == ("entropy", "new")
    run("pytest -q --strict-config tests", project)


def test_change_is_announced_once_and_then_known(project: Path, commits: list[str]) -> None:
    def statuses(code: int) -> dict[str, str]:
        found = json.loads(run("rlcanary regress --json", project, code=code).stdout)
        return {entry["metric"].rpartition(".")[2]: entry["status"] for entry in found}

    assert statuses(code=1) == {"it's loss": "new", "entropy": "moved"}
    assert statuses(code=1)["it's loss"] == "new"  # nothing ran in between
    write_run(project, 12, commits[11], 0.8)
    assert statuses(code=0)["it's loss"] == "known"
    assert "known" in run("rlcanary regress", project).stdout
    answer = run("rlcanary regress --acknowledge '*loss' --note 'the new tokenizer'", project).stdout
    assert "│ known" not in answer
    (found,) = json.loads(run("rlcanary regress --json '*loss'", project).stdout)
    assert (found["status"], found["note"]) == ("acknowledged", "the new tokenizer")
    for number in range(13, 17):
        write_run(project, number, commits[11], 0.5)
    assert "it's loss" not in statuses(code=0)
    for number in range(17, 21):
        write_run(project, number, commits[11], 0.8)
    assert statuses(code=1)["it's loss"] == "new"


def test_damaged_ledger_is_named_and_nothing_is_lost(project: Path) -> None:
    run("rlcanary regress", project, code=1)
    ledger = project / "tests/unit/unit_results/.alarms.jsonl"
    before = ledger.read_text()
    ledger.write_text(before + '{"record": "no event"}\n')
    assert ".alarms.jsonl" in run("rlcanary regress", project, code=2).stderr
    ledger.write_text(before + '{"record": "known", "num')  # torn by a power cut
    run("rlcanary regress", project, code=1)
    assert ledger.read_text().startswith(before)


def test_change_without_a_change_of_the_code_says_so(project: Path, commits: list[str]) -> None:
    for number in range(12, 18):
        loss = 0.8 if number < 15 else 1.6
        environment = "one" if number < 15 else "two"
        versions = {"torch": "2.4.0" if number < 15 else "2.5.0"}
        write_run(project, number, commits[11], loss, environment=environment, versions=versions)
    shown = run("rlcanary regress '*loss'", project, code=1).stdout
    assert "torch 2.4.0 → 2.5.0" in shown
    assert f"both runs are of commit {commits[11][:10]}" in shown


def test_two_tests_under_one_key_are_named(project: Path, commits: list[str]) -> None:
    tests = {f"other/{NODEID}": {"outcome": "passed", "duration": 1.0, "key": NAME.rpartition(".")[0]}}
    write_run(project, 12, commits[11], 0.8, tests=tests)
    shown = run("rlcanary regress '*loss'", project, code=1).stdout
    assert f"was measured by more than one test: {NODEID} (12 runs), other/{NODEID} (1 run)" in shown


def test_text_is_not_counted_as_judged(project: Path, commits: list[str]) -> None:
    for number in range(12):
        write_run(project, number, commits[0], 0.5, metrics={"test_loss::test_policy": {"note": "text"}})
    assert run("rlcanary regress", project).stdout == "Nothing was judged.\n"


def test_nothing_worse_is_exit_0(project: Path) -> None:
    assert "Nothing is worse in 12 runs" in run("rlcanary regress '*steady'", project).stdout


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("rlcanary regress test_los", "no metric matches 'test_los'"),
        ("rlcanary regress --higher '*.entropi'", "no metric matches '*.entropi'"),
        ("rlcanary regress --acknowledge '*.steady'", "no alarm to acknowledge"),
        ("rlcanary report --output tests", "cannot write tests: "),
        ("rlcanary regress --dir nowhere", "no results folder nowhere"),
        ("echo '[pytest]\nrlcanary_directions = x' > pytest.ini; rlcanary regress", "PATTERN = DIRECTION"),
    ],
)
def test_mistake_is_one_line_and_exit_2(project: Path, command: str, message: str) -> None:
    error = run(command, project, code=2).stderr
    assert len(error.splitlines()) == 1
    assert message in error


@pytest.mark.parametrize("command", ["trend", "trend --jq .git_commit", "regress", "report"])
def test_history_of_another_project_is_recognised(project: Path, tmp_path: Path, command: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    run(
        f"git init -q && git commit -q --allow-empty -m first && mkdir tests && cp -r {project}/tests/unit tests", other
    )
    error = run(f"rlcanary {command}", other, code=2).stderr
    assert len(error.splitlines()) == 1
    assert "are of another project" in error
    run(f"rlcanary {command} --any-project", other, code=1 if command == "regress" else 0)
    run(f"rlcanary trend --dir {project}/tests/unit/unit_results", other)  # it lies in its own project


def test_history_of_a_shallow_clone_is_taken_at_its_word(project: Path, tmp_path: Path) -> None:
    run(f"git clone -q --depth 1 file://{project} {tmp_path}/shallow", tmp_path)
    (project / "tests/unit/unit_results").rename(tmp_path / "shallow/tests/unit/unit_results")
    for path in (tmp_path / "shallow/tests/unit/unit_results").glob("*.json"):
        path.write_text(path.read_text().replace(run("git rev-parse HEAD", project).stdout.strip(), "0" * 40))
    trend = run("rlcanary trend", tmp_path / "shallow")
    assert trend.stdout
    assert "another project" not in trend.stderr


def test_too_few_runs_are_no_verdict(template: Path, tmp_path: Path) -> None:
    project = tmp_path / "young"
    shutil.copytree(template, project)
    for path in sorted((project / "tests/unit/unit_results").glob("*.json"))[3:]:
        path.unlink()
    answer = run("rlcanary regress", project).stdout
    assert "Nothing was judged" in answer
    assert "too few runs" in answer
    assert "Nothing is worse" not in answer


def test_full_disk_costs_the_ledger_and_not_the_verdict(project: Path) -> None:
    told = run("trap '' XFSZ; ulimit -f 0; rlcanary regress", project, code=1)
    assert "so what is new today will be new again tomorrow" in told.stderr
    assert NAME in told.stdout
    assert NAME in run("rlcanary regress", project, code=1).stdout
