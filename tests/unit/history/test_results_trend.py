"""`rlcanary trend`, as people type it."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import rlcanary

from rlcanary.history.jq_query import formatted_number

KEY = "test_policy::test_generation[0.5]"
METRIC = f"{KEY}.mean_lps"
ONE_LINER = f'[.start_time, .git_commit, .metrics["{KEY}"].mean_lps] | @tsv'


def write_run(folder: Path, index: int, metrics: dict[str, Any], nodeid: str = f"tests/unit/{KEY}") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {
        "exit_status": 0,
        "git_commit": f"{index:02d}" * 20,
        "start_time": f"2025-03-{index + 1:02d} 12:00:00",
        "metrics": {KEY: metrics},
        "schema": 1,
        "start_time_utc": f"2025-03-{index + 1:02d}T12:00:00.000000+00:00",
        "run_id": f"run{index}",
        "tests": {nodeid: {"outcome": "passed", "duration": 1.0, "key": KEY}},
    }
    # The names are in the opposite order of the times.
    (folder / f"run{90 - index}.json").write_text(json.dumps(document))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project with twenty runs, in which the metric drops from 0.9 to 0.45 at the fourteenth."""
    for index in range(20):
        metrics = {"mean_lps": 0.9 if index < 13 else 0.45, "text": "x", "_elapsed": 0.25 + index}
        write_run(tmp_path / "tests/unit/unit_results", index, metrics)
    return tmp_path


def test_trend_marks_the_step_and_names_the_commits_around_it(project: Path) -> None:
    answer = rlcanary("trend", METRIC, cwd=project)
    assert answer.returncode == 0
    marked = [line for line in answer.stdout.splitlines() if "◀" in line]
    assert len(marked) == 1
    assert "2025-03-14" in marked[0]
    assert "-50 %" in marked[0]
    assert "1212121212 and 1313131313" in answer.stdout
    assert "█" * 13 + "▁" * 7 in answer.stdout


def test_trend_as_json_is_ordered_by_time_and_complete(project: Path) -> None:
    trend = json.loads(rlcanary("trend", METRIC, "--json", cwd=project).stdout)
    assert [run["value"] for run in trend["runs"]] == [0.9] * 13 + [0.45] * 7
    assert [(change["index"], change["first_after"]) for change in trend["change_points"]] == [(13, "13" * 20)]


def test_trend_without_a_metric_lists_them(project: Path) -> None:
    answer = rlcanary("trend", cwd=project)
    assert answer.returncode == 0
    assert METRIC in answer.stdout
    assert json.loads(rlcanary("trend", "--json", cwd=project).stdout)[METRIC] == 20


def test_runs_that_tracked_nothing_say_what_would(tmp_path: Path) -> None:
    folder = tmp_path / "tests/unit/unit_results"
    write_run(folder, 0, {})
    answer = rlcanary("trend", cwd=tmp_path)
    assert (answer.returncode, answer.stderr) == (0, "")
    assert answer.stdout == "No test tracked anything in 1 run; a test that takes the `tracker` fixture does.\n"


@pytest.mark.parametrize(
    "name", ["test_policy::test_generation.mean_lp", "mean_lp"], ids=["misspelt", "without the test"]
)
def test_unknown_metric_names_the_nearest(project: Path, name: str) -> None:
    answer = rlcanary("trend", name, cwd=project)
    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
    assert METRIC in answer.stderr


def test_metric_that_is_no_number_has_no_trend(project: Path) -> None:
    answer = rlcanary("trend", f"{KEY}.text", cwd=project)
    assert answer.returncode == 2
    assert "is not a number ('x' in" in answer.stderr


@pytest.mark.parametrize(
    "expression", [ONE_LINER, ".", ".metrics", '.metrics[]._elapsed, "µ", [], {}', ".tests | keys[]", ".git_commit"]
)
def test_jq_expression_gives_the_same_answer_as_the_jq_command(project: Path, expression: str) -> None:
    jq = shutil.which("jq")
    if jq is None:
        pytest.skip("the jq command is not installed")
    write_run(
        project / "tests/unit/unit_results",
        20,
        {"mean_lps": -1.5399343967437744, "loss": [0.1, None, {"kl": 3}]},
    )
    command = f"{jq} -r '{expression}' tests/unit/unit_results/*"
    expected = subprocess.run(command, shell=True, cwd=project, capture_output=True, text=True, check=True).stdout
    assert rlcanary("trend", "--jq", expression, cwd=project).stdout == expected


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (1.0, "1"),
        (-0.5, "-0.5"),
        (0.1 + 0.2, "0.30000000000000004"),
        (1e15, "1000000000000000"),
        (1e16, "1e+16"),
        (1.23e18, "1.23e+18"),
        (123456789012345678, "123456789012345680"),
        (1e-4, "0.0001"),
        (-2.5e-7, "-2.5e-07"),
        (1e300, "1e+300"),
        (float("nan"), "null"),
        (float("inf"), "1.7976931348623157e+308"),
    ],
)
def test_numbers_are_spelled_as_jq_spells_them(number: float, text: str) -> None:
    assert formatted_number(float(number)) == text


def test_number_is_spelled_the_same_inside_and_outside_of_strings(tmp_path: Path) -> None:
    write_run(tmp_path, 0, {"mean_lps": 1.0})
    answer = rlcanary("trend", "--dir", tmp_path, "--jq", f'.metrics["{KEY}"].mean_lps | ., @text', cwd=tmp_path)
    assert answer.stdout == "1\n1\n"


def test_invalid_jq_is_one_line_and_exit_2(project: Path) -> None:
    answer = rlcanary("trend", "--jq", ".a |", cwd=project)
    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
    assert "invalid jq expression" in answer.stderr


def test_jq_expression_that_fails_on_one_file_answers_for_the_others(project: Path) -> None:
    write_run(project / "tests/unit/unit_results", 20, {"mean_lps": "text"})
    answer = rlcanary("trend", "--jq", f'.metrics["{KEY}"].mean_lps + 1', cwd=project)
    assert answer.returncode == 1
    assert len(answer.stdout.splitlines()) == 20
    assert "run70.json" in answer.stderr


@pytest.mark.parametrize("arguments", [[METRIC], ["--jq", ".git_commit"]], ids=["metric", "jq"])
def test_truncated_file_costs_one_warning_and_nothing_else(project: Path, arguments: list[str]) -> None:
    whole = rlcanary("trend", *arguments, cwd=project)
    (project / "tests/unit/unit_results/run05.json").write_text('{"exit_status": 0, "git_com')
    answer = rlcanary("trend", *arguments, cwd=project)
    assert answer.returncode == 0
    assert answer.stdout == whole.stdout
    assert len(answer.stderr.splitlines()) == 1
    assert "run05.json: not valid JSON" in answer.stderr


def test_text_in_one_run_costs_that_run_only(project: Path) -> None:
    write_run(project / "tests/unit/unit_results", 20, {"mean_lps": "failed"})
    answer = rlcanary("trend", METRIC, cwd=project)
    assert answer.returncode == 0
    assert "(20 runs)" in answer.stdout
    assert f"{METRIC} was not a number in 1 run, left out here (the newest: 'failed' in run70.json)" in answer.stderr
    for command in ("regress", "report"):
        assert f"{METRIC} was not a number in 1 run" in rlcanary(command, cwd=project).stderr


@pytest.mark.parametrize("arguments", [[METRIC], ["--jq", ".git_commit"]], ids=["metric", "jq"])
def test_pipe_among_the_files_is_not_waited_for(project: Path, arguments: list[str]) -> None:
    os.mkfifo(project / "tests/unit/unit_results/pipe.json")
    answer = rlcanary("trend", *arguments, cwd=project)
    assert answer.returncode == 0
    assert "pipe.json: a pipe" in answer.stderr


def test_nan_from_another_tool_is_shown_as_such(project: Path) -> None:
    write_run(project / "tests/unit/unit_results", 20, {"mean_lps": float("nan")})
    answer = rlcanary("trend", METRIC, cwd=project)
    assert answer.returncode == 0
    assert "not finite" in answer.stdout


def test_key_measured_by_two_tests_is_a_warning(project: Path) -> None:
    write_run(
        project / "tests/unit/unit_results", 20, {"mean_lps": 0.5}, nodeid="other/test_policy.py::test_generation[0.5]"
    )
    answer = rlcanary("trend", METRIC, cwd=project)
    assert "more than one test" in answer.stderr
    assert "other/test_policy.py" in answer.stderr


def test_results_are_found_where_the_settings_of_pytest_put_them(project: Path) -> None:
    (project / "tests/unit/unit_results").rename(project / "elsewhere")
    (project / "pyproject.toml").write_text('[tool.pytest.ini_options]\nrlcanary_results = "elsewhere.json"\n')
    for folder in (project, project / "tests/unit"):
        assert json.loads(rlcanary("trend", "--json", cwd=folder).stdout)[METRIC] == 20
    (project / "elsewhere").rename(project / "gone")
    answer = rlcanary("trend", cwd=project / "tests")
    assert answer.returncode == 2
    assert "looked for ../elsewhere)" in answer.stderr


def test_results_are_found_from_any_folder_of_a_repository_without_settings(project: Path) -> None:
    (project / ".git").mkdir()
    assert rlcanary("trend", METRIC, cwd=project / "tests/unit").returncode == 0


def test_results_beside_the_first_of_the_testpaths_are_found(project: Path) -> None:
    (project / "tests").rename(project / "checks")
    (project / "checks/unit/unit_results").rename(project / "checks/unit_results")
    (project / "pytest.ini").write_text("[pytest]\ntestpaths = checks\n")
    assert rlcanary("trend", METRIC, cwd=project).returncode == 0


@pytest.mark.parametrize("arguments", [[], ["--dir", "empty"], ["--dir", "missing"], ["--dir", "empty", "--jq", "."]])
def test_no_results_is_one_line_that_says_what_to_do(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "empty").mkdir()
    answer = rlcanary("trend", *arguments, cwd=tmp_path)
    assert answer.returncode == 2
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1
    assert "run pytest first" in answer.stderr
