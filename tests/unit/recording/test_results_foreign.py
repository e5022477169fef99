"""Files that others wrote among the results: each is used or named, and none breaks, hangs or steers a command."""

import datetime
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from rlcanary.bisect.line.past_runs import past_runs
from rlcanary.commands.metrics.regress import regress
from rlcanary.commands.metrics.report import report
from rlcanary.commands.metrics.trend import trend
from rlcanary.history.history import load_history
from rlcanary.history.run_result import UnreadableFile, read_json, read_run
from rlcanary.recording.provenance import environment_change

KEY = "test_a::test_b"
FOREIGN = {"start_time": "2026-03-01 00:00:00", "metrics": {KEY: {"loss": 1.0}}}
WHOLE = FOREIGN | {
    "exit_status": 0,
    "git_commit": "f1062bd",
    "run_id": "foreign",
    "dirty": False,
    "environment": "e",
    "versions": {"torch": "2.4"},
    "gpu_types": [],
    "schema": 1,
    "tests": {"test_a.py::test_b": {"outcome": "passed", "duration": 1.0, "key": KEY}},
}
DIGITS = "9" * 5001


def write_good_runs(folder: Path, count: int = 8) -> None:
    folder.mkdir()
    for number in range(count):
        run = WHOLE | {"run_id": f"r{number}", "start_time": f"2026-01-{number + 1:02d} 00:00:00"}
        (folder / f"r{number}.json").write_text(json.dumps(run | {"metrics": {KEY: {"loss": 1.0 + number % 3}}}))


def all_commands(folder: Path, code: tuple[int, ...] = (0, 1)) -> str:
    """The output of every command that reads results, none of which may break."""
    printed = ""
    name = f"{KEY}.loss"
    for command, arguments in (
        (trend, [name]),
        (trend, ["--json", name]),
        (trend, []),
        (trend, ["--jq", ".metrics"]),
        (regress, []),
        (regress, ["--json"]),
        (report, []),
    ):
        done = CliRunner().invoke(command, [*arguments, "--dir", str(folder), "--any-project"], standalone_mode=False)
        assert done.exception is None, (command.name, arguments, done.exception)
        assert done.return_value in code
        if "--jq" not in arguments:  # as `jq -r` prints it
            printed += done.output
        if "--json" in arguments:
            json.loads(done.stdout, parse_constant=pytest.fail)
    return printed


def text_of(**changes: Any) -> str:
    return json.dumps(WHOLE | changes)


UNREADABLE = {
    "5,001 digits in a metric": text_of().replace("1.0}}", DIGITS + "}}"),
    "5,001 digits in the exit status": text_of().replace('"exit_status": 0', f'"exit_status": {DIGITS}'),
    "exit status": text_of(exit_status=2**80),
    "negative exit status": text_of(exit_status=-(2**80)),
    "schema": text_of(schema=2**80),
    "schema of 4,000 digits": text_of().replace('"schema": 1', f'"schema": {"9" * 4000}'),
    "nested schema": text_of(schema=[[]]),
    "year 9999": text_of(start_time_utc="9999-12-31T23:59:59-14:00"),
    "last microsecond of the year 9999": text_of(start_time_utc="9999-12-31T23:59:59.999999+00:00"),
    "year 1": text_of(start_time_utc="0001-01-01T00:00:00+14:00"),
    "nested": '{"a":' * 50_000,
    "empty": "",
    "not an object": "[]",
    "null": "null",
}


@pytest.mark.parametrize("case", UNREADABLE)
def test_file_that_is_no_run_is_named_and_left_out(tmp_path: Path, case: str) -> None:
    write_good_runs(tmp_path / "results")
    (tmp_path / "results/foreign.json").write_text(UNREADABLE[case])
    assert isinstance(read_run(tmp_path / "results/foreign.json"), UnreadableFile)
    assert "foreign.json" in all_commands(tmp_path / "results")
    with load_history(tmp_path / "results") as history:
        assert len(history.runs) == 8


@pytest.mark.parametrize("kind", ["loop", "zero", "null", "pipe", "folder", "nowhere", "huge"])
def test_what_is_no_file_is_named_and_left_out(tmp_path: Path, kind: str) -> None:
    write_good_runs(tmp_path / "results")
    path = tmp_path / "results/foreign.json"
    match kind:
        case "loop":
            path.symlink_to(path.name)
        case "zero" | "null":
            path.symlink_to(f"/dev/{kind}")
        case "pipe":
            os.mkfifo(path)
        case "folder":
            path.mkdir()
        case "nowhere":
            path.symlink_to("nowhere")
        case "huge":
            with path.open("wb") as stream:
                stream.truncate(2**40)
    assert "foreign.json" in all_commands(tmp_path / "results")


def test_names_of_others_never_reach_the_terminal_raw(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    write_good_runs(folder)
    evil = "\x1b[2J\x07\u202e\x9b2J\n"
    for number in range(12):
        metrics = {f"{evil}key": {f"{evil}loss": 1.0 if number < 6 else 5.0, f"{evil}text": evil}, KEY: {"loss": evil}}
        tests = {f"{evil}.py::t": {"outcome": "passed", "duration": 1.0, "key": f"{evil}key"}}
        run = WHOLE | {"metrics": metrics, "git_commit": f"{evil}{number < 6}; touch x", "tests": tests}
        run |= {"run_id": f"{evil}{number}", "environment": f"{evil}{number}", "versions": {evil: evil + str(number)}}
        run["start_time"] = f"2026-02-{number + 1:02d} 00:00:00"
        (folder / f"{number}{evil}.json").write_text(json.dumps(run))
    (folder / f"broken{evil}.json").write_text("{")
    printed = all_commands(folder)
    assert "\\x1b[2J" in printed
    assert not set("\x1b\x07\u202e\x9b") & set(printed)
    with load_history(folder) as history:
        name = next(f"{key}.{metric}" for key, metric in history.metrics() if metric.endswith("loss") and key != KEY)
    shown = CliRunner().invoke(trend, [name, "--dir", str(folder), "--any-project"], standalone_mode=False)
    assert shown.exception is None


@pytest.mark.parametrize("scale", [1e300, 1.7e308, 1e-160, 1e-320, 5e-324])
def test_very_large_and_very_small_numbers_break_nothing(tmp_path: Path, scale: float) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    dice = random.Random(0)
    for number in range(30):
        values = {
            "loss": scale * dice.uniform(-1, 1),
            "mixed": dice.choice([0.0, scale, 1.0]),
            "step": scale * (number > 15),
        }
        run = WHOLE | {
            "run_id": f"r{number}",
            "start_time": f"2026-01-{number + 1:02d} 00:00:00",
            "metrics": {KEY: values},
        }
        (folder / f"r{number}.json").write_text(json.dumps(run))
    all_commands(folder)


def test_fuzzed_files_are_used_or_named(tmp_path: Path) -> None:
    folder = tmp_path / "results"
    write_good_runs(folder)
    dice = random.Random(0)
    strange = [
        None,
        True,
        -1,
        2**63,
        10**400,
        1e308,
        "",
        "\ud800",
        "\\ud800",
        "\0",
        "x" * 10_000,
        [],
        {},
        [[]],
        {"a": {}},
    ]
    strange += [{"\ud800": {"a": 1}, "\\ud800": {"a": 2}}, {KEY: {"\ud800": 1, "\\ud800": 2, "": "\0"}}]
    names = [*WHOLE, "start_time_utc", "unknown"]
    for number in range(300):
        run: dict[str, Any] = dict(WHOLE)
        for _ in range(dice.randint(1, 3)):
            run[dice.choice(names)] = dice.choice(strange)
        if dice.random() < 0.3:
            run["tests"] = {
                "a": dice.choice(strange),
                "b": {"key": dice.choice(strange), "outcome": dice.choice(strange)},
            }
        text = json.dumps(run)
        if dice.random() < 0.2:
            text = text[: dice.randrange(len(text))]
        (folder / f"f{number}.json").write_text(text)
    all_commands(folder)


def test_environments_of_others_are_compared_without_trust() -> None:
    for versions in (None, [], [1], {"torch": 1}, "x", 5):
        for gpus in (None, {}, [1], "x", 5):
            environment_change({"versions": versions, "gpu_types": gpus}, {})
    assert environment_change({"versions": {"torch": "1"}}, {"versions": {"torch": "2"}}) == "torch 1 → 2"


@pytest.mark.parametrize("pipes", [True, False])
def test_device_is_never_read(tmp_path: Path, pipes: bool) -> None:
    assert read_json(Path("/dev/zero"), pipes) == "a device and not a file"
    assert read_json(tmp_path, pipes) == "a folder and not a file"


@pytest.mark.parametrize("pipes", [True, False])
def test_file_of_the_kernel_which_may_never_end_is_never_read(pipes: bool) -> None:
    assert Path("/proc/version").read_text()
    assert read_json(Path("/proc/version"), pipes) == "empty file"


def write_runs(folder: Path, runs: list[tuple[str | None, float]]) -> None:
    """Runs of commits c000, c001 …, one an hour, each with the outcome of the test and its time."""
    folder.mkdir()
    began = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
    for number, (outcome, elapsed) in enumerate(runs):
        run = WHOLE | {
            "run_id": f"r{number:03d}",
            "git_commit": f"c{number:03d}",
            "start_time_utc": (began + datetime.timedelta(hours=number)).isoformat(),
            "metrics": {KEY: {"_elapsed": elapsed + 0.01 * (number % 5)}},
            "tests": {"test_a.py::test_b": {"outcome": outcome, "duration": elapsed, "key": KEY}},
        }
        (folder / f"r{number:03d}.json").write_text(json.dumps(run))


def regressions(folder: Path) -> tuple[list[dict[str, Any]], str]:
    done = CliRunner().invoke(regress, ["--json", "--dir", str(folder), "--any-project"], standalone_mode=False)
    assert done.exception is None
    return json.loads(done.stdout), done.stderr


def test_fix_of_a_test_that_failed_early_is_no_regression(tmp_path: Path) -> None:
    write_runs(tmp_path / "results", [("passed", 60.0)] * 20 + [("failed", 1.0)] * 32 + [("passed", 60.0)] * 8)
    found, warnings = regressions(tmp_path / "results")
    assert found == []
    assert f"{KEY}._elapsed is left out of 32 runs in which its test did not pass" in warnings


@pytest.mark.parametrize("outcome", ["failed", "error", "xfailed", "skipped", None])
def test_slowdown_behind_failures_is_bisected_between_runs_that_passed(tmp_path: Path, outcome: str | None) -> None:
    write_runs(tmp_path / "results", [("passed", 60.0)] * 20 + [(outcome, 1.0)] * 5 + [("passed", 90.0)] * 8)
    (found,), warnings = regressions(tmp_path / "results")
    assert found["status"] == "new"
    assert (found["last_good"]["git_commit"], found["first_bad"]["git_commit"]) == ("c019", "c025")
    assert "left out of 5 runs" in warnings


@pytest.mark.parametrize("status", [None, 2, 3])
def test_numbers_of_a_run_that_was_cut_short_are_left_out(tmp_path: Path, status: int | None) -> None:
    write_runs(tmp_path / "results", [("passed", 60.0)] * 20 + [("passed", 90.0)] * 5 + [("passed", 60.0)] * 2)
    for number in range(20, 25):
        path = tmp_path / f"results/r{number:03d}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"exit_status": status}))
    found, warnings = regressions(tmp_path / "results")
    assert found == []
    assert "left out of 5 runs" in warnings


def test_metric_of_a_test_that_never_passed_has_no_trend(tmp_path: Path) -> None:
    write_runs(tmp_path / "results", [("failed", 1.0)] * 10)
    done = CliRunner().invoke(trend, [f"{KEY}._elapsed", "--dir", str(tmp_path / "results"), "--any-project"])
    assert done.exit_code != 0
    assert "and there is no other run" in str(done.exception)
    all_commands_but_trend = CliRunner().invoke(
        regress, ["--dir", str(tmp_path / "results"), "--any-project"], standalone_mode=False
    )
    assert all_commands_but_trend.exception is None


def test_history_of_others_says_nothing_of_flakiness(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class NoRepository:
        toplevel = tmp_path
        directory = "."

    folder = tmp_path / "unit_results"
    folder.mkdir()
    for number, tests in enumerate(([], {"t.py::t": []}, {"t.py::t": {"outcome": []}}, "x")):
        (folder / f"{number}.json").write_text(json.dumps(WHOLE | {"tests": tests}))
    assert past_runs(["pytest", "t.py::t"], NoRepository(), "a", "b") is None  # type: ignore[arg-type]
