"""Disks that are full, folders that vanish and journals of another shape: the run goes on, and nothing tracked is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def only_needed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_rlcanary.tracker,xdist.plugin")


def results(folder: Path) -> Any:
    return json.loads((folder / "unit_results.json").read_text())


def tracked(run: Any) -> dict[str, Any]:
    return {name: value for metrics in run["metrics"].values() for name, value in metrics.items() if name != "_elapsed"}


def full_disk_tests(room_later: str) -> str:
    """The disk, for this process, is full in the middle of the third value, and later has room again or has not."""
    return f"""
import pathlib, resource, pytest

def test_values(tracker):
    tracker.track("before", 1)
    sizes = [path.stat().st_size for path in pathlib.Path("unit_results").rglob("*.jsonl")]
    resource.setrlimit(resource.RLIMIT_FSIZE, (max(sizes) + 40, resource.RLIM_INFINITY))
    tracker.track("torn", "x" * 200)
    tracker.track("during", 3)

def test_after(tracker):
    {room_later}
    tracker.track("after", 4)

def test_without_tracker():
    pass
"""


ROOM = "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))"
ALL = {"before": 1, "torn": "x" * 200, "during": 3, "after": 4}


@pytest.mark.parametrize("arguments", [[], ["-n1"]], ids=["alone", "xdist"])
def test_values_tracked_on_a_full_disk_are_in_the_results(pytester: pytest.Pytester, arguments: list[str]) -> None:
    pytester.makepyfile(full_disk_tests(ROOM))
    outcome = pytester.runpytest_subprocess(*arguments)
    outcome.assert_outcomes(passed=3)
    assert outcome.ret == 0
    assert "File too large" in outcome.stderr.str()
    assert tracked(results(pytester.path)) == ALL
    assert not list(pytester.path.glob("unit_results/.journals/*/"))


def test_values_tracked_on_a_full_disk_survive_a_kill_once_there_is_room(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(full_disk_tests(ROOM) + "\ndef test_killed(tracker):\n    import os; os._exit(1)")
    pytester.runpytest_subprocess()
    pytester.makepyfile("def test_next(): pass")
    outcome = pytester.runpytest_subprocess()
    assert outcome.ret == 0
    assert "line 5 is damaged" in outcome.stdout.str()  # the half line, whose record was written again below it
    (killed,) = [
        run for path in pytester.path.glob("unit_results/*.json") if tracked(run := json.loads(path.read_text()))
    ]
    assert tracked(killed) == ALL
    assert killed["exit_status"] is None


def test_disk_that_stays_full_ends_no_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(full_disk_tests("pass"))
    outcome = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    outcome.assert_outcomes(passed=3)
    assert outcome.ret == 0
    assert "could not be written" in outcome.stderr.str()
    assert results(pytester.path)["exit_status"] is None  # as of a run that was killed, which the next start completes
    pytester.runpytest_subprocess()
    assert any(
        tracked(json.loads(path.read_text())).get("before") == 1 for path in pytester.path.glob("unit_results/*.json")
    )


@pytest.mark.parametrize("arguments", [[], ["-n1"]], ids=["alone", "xdist"])
@pytest.mark.parametrize("uses_tracker", [True, False])
def test_disk_that_is_full_from_the_start_ends_no_run(
    pytester: pytest.Pytester, uses_tracker: bool, arguments: list[str]
) -> None:
    pytester.mkdir("unit_results")
    pytester.makeconftest(
        """
        import resource
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))  # xdist needs some bytes itself
        """
    )
    pytester.makepyfile(f"def test_a({'tracker' if uses_tracker else ''}): pass")
    command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-s", *arguments]
    outcome = subprocess.run(command, cwd=pytester.path, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stdout + outcome.stderr
    assert "written (File too large)" in outcome.stdout


def can_mount() -> bool:
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs the right to mount a small file system")
def test_real_small_file_system_that_fills_up_ends_no_run(pytester: pytest.Pytester) -> None:
    pytester.mkdir("unit_results")
    pytester.makepyfile(
        """
        import errno, pathlib, pytest

        def test_values(tracker):
            tracker.track("before", 1)
            filler = pathlib.Path("unit_results/filler")
            with filler.open("wb", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
                while True:
                    stream.write(bytes(4096))
            for number in range(200):
                tracker.track(f"during {number}", "x" * 100)
            filler.unlink()

        def test_after(tracker):
            tracker.track("after", 2)
        """
    )
    mounted = "mount -t tmpfs -o size=128k tmpfs unit_results"
    command = f"{mounted} && {sys.executable} -m pytest -p no:cacheprovider && cp -r unit_results kept"
    outcome = pytester.run("unshare", "-m", "bash", "-c", command)
    assert outcome.ret == 0
    assert "No space left on device" in outcome.stderr.str()
    (kept,) = (pytester.path / "kept").glob("*.json")
    values = tracked(json.loads(kept.read_text()))
    assert values == {"before": 1, "after": 2} | {f"during {number}": "x" * 100 for number in range(200)}


@pytest.mark.parametrize("arguments", [[], ["-n1"]], ids=["alone", "xdist"])
def test_folder_of_results_that_a_test_removes_costs_no_value(pytester: pytest.Pytester, arguments: list[str]) -> None:
    pytester.makepyfile(
        """
        import shutil

        def test_a(tracker):
            tracker.track("a", 1)
            shutil.rmtree("unit_results", ignore_errors=True)  # the controller may be writing there
            tracker.track("b", 2)
        """
    )
    outcome = pytester.runpytest_subprocess(*arguments)
    assert outcome.ret == 0
    assert "the journal was deleted" in outcome.stderr.str()
    assert tracked(results(pytester.path)) == {"a": 1, "b": 2}


def test_descriptors_that_a_test_closes_cost_no_value(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        import os

        def test_a(tracker, tmp_path):
            tracker.track("a", 1)
            for number in os.listdir("/proc/self/fd"):
                if os.path.realpath(f"/proc/self/fd/{number}").endswith(".jsonl"):
                    os.close(int(number))
            with open(tmp_path / "theirs", "wb") as stream:
                tracker.track("b", 2)
            assert (tmp_path / "theirs").read_bytes() == b""
        """
    )
    assert pytester.runpytest_subprocess("-s").ret == 0
    assert tracked(results(pytester.path)) == {"a": 1, "b": 2}


HEADER = {
    "record": "run",
    "git_commit": None,
    "start_time": "2026-01-01 00:00:00",
    "gpu_types": [],
    "start_time_utc": "2026-01-01T00:00:00+00:00",
    "run_id": "killed",
    "host": "here",
    "dirty": None,
    "versions": {},
    "environment": "e",
}
BEGIN = '{"journal": "results", "version": 1}'
METRIC = {"record": "metric", "nodeid": "t.py::t", "name": "a", "value": 1, "nonfinite": []}
SHAPES = {
    "empty object": "{}",
    "list": "[1]",
    "no header": f"{BEGIN}\n{json.dumps(METRIC)}",
    "another version": '{"journal": "results", "version": 2}\n{}',
    "without a version, as before": json.dumps(HEADER),
    "header without gpu_types": f"{BEGIN}\n{json.dumps({k: v for k, v in HEADER.items() if k != 'gpu_types'})}",
    "header with another type": f"{BEGIN}\n{json.dumps(HEADER | {'gpu_types': [[]]})}",
    "metric without nonfinite": f"{BEGIN}\n{json.dumps(HEADER)}\n"
    + json.dumps({k: v for k, v in METRIC.items() if k != "nonfinite"}),
    "nonfinite of another type": f"{BEGIN}\n{json.dumps(HEADER)}\n{json.dumps(METRIC | {'nonfinite': [1]})}",
    "keys of another type": f'{BEGIN}\n{json.dumps(HEADER)}\n{{"record": "keys", "keys": {{"a": 1}}}}',
    "number beyond floats": f"{BEGIN}\n{json.dumps(HEADER)}\n" + json.dumps(METRIC).replace('": 1,', '": 1e999,'),
    "duration beyond floats": f"{BEGIN}\n{json.dumps(HEADER)}\n"
    + '{"record": "outcome", "nodeid": "a", "outcome": "passed", "duration_s": 1e999}',
    "number of 5,001 digits": f"{BEGIN}\n{json.dumps(HEADER)}\n"
    + json.dumps(METRIC).replace('": 1,', f'": {"9" * 5001},'),
    "not text": f"{BEGIN}\n{json.dumps(HEADER)}\n\udcff\udcfe",
    "nested": f"{BEGIN}\n{json.dumps(HEADER)}\n" + "[" * 100_000,
}


@pytest.mark.parametrize("shape", SHAPES)
def test_journal_that_cannot_be_read_is_named_once_and_set_aside(pytester: pytest.Pytester, shape: str) -> None:
    folder = pytester.path / "unit_results/.journals/killed"
    folder.mkdir(parents=True)
    text = os.fsencode(SHAPES[shape] + "\n")
    (folder / "controller.jsonl").write_bytes(text)
    pytester.makepyfile("def test_a(): pass")
    outcome = pytester.runpytest_subprocess("-p", "no:xdist")
    assert outcome.ret == 0
    aside = folder.parent / "unreadable/killed"
    warnings = [line for line in outcome.stdout.lines if "rlcanary: warning:" in line]
    assert any("killed" in line and ("damaged" in line or "controller.jsonl:" in line) for line in warnings) or (
        shape in ("no header", "number beyond floats") and any(f"{folder} " in line for line in warnings)
    )
    assert any(str(aside) in line for line in warnings)
    assert (aside / "controller.jsonl").read_bytes() == text
    assert results(pytester.path)["exit_status"] == 0
    assert "rlcanary: warning:" not in pytester.runpytest_subprocess("-p", "no:xdist").stdout.str()


def test_name_of_a_damaged_journal_sends_nothing_to_the_terminal(pytester: pytest.Pytester) -> None:
    folder = pytester.path / "unit_results/.journals/killed\x1b[2J"
    folder.mkdir(parents=True)
    (folder / "controller.jsonl").write_text("{}\n")
    pytester.makepyfile("def test_a(): pass")
    printed = pytester.runpytest_subprocess("-p", "no:xdist").stdout.str()
    assert "killed\\x1b[2J" in printed
    assert "\x1b[2J" not in printed


def test_what_can_be_read_of_a_damaged_journal_is_kept(pytester: pytest.Pytester) -> None:
    folder = pytester.path / "unit_results/.journals/killed"
    folder.mkdir(parents=True)
    (folder / "controller.jsonl").write_text(f"{BEGIN}\n{json.dumps(HEADER)}\n[1]\n{json.dumps(METRIC)}\n")
    (folder / "gw0.jsonl").mkdir()
    pytester.makepyfile("def test_a(): pass")
    outcome = pytester.runpytest_subprocess()
    assert outcome.ret == 0
    assert "3 is damaged (not an object)" in outcome.stdout.str()
    assert "gw0.jsonl is not a file" in outcome.stdout.str()
    assert tracked(json.loads((pytester.path / "unit_results/killed.json").read_text())) == {"a": 1}
