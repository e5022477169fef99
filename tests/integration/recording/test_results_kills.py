"""SIGKILL at random points: whatever `track` had returned from is in the results of its run, and every file can be read.

RLCANARY_KILLS sets the number of kills.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import HANG_S

KILLS = int(os.environ.get("RLCANARY_KILLS", "12"))

# Each value is written to a file of its own once `track` has returned.
TESTS = """
import os, time
import pytest

@pytest.fixture(scope="session")
def witness():
    return os.open(os.environ["WITNESS"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

@pytest.mark.parametrize("i", range(30))
def test_one(tracker, witness, i):
    for name in "abc":
        value = [i, name * 50]
        tracker.track(name, value)
        os.write(witness, f"{os.environ['RLCANARY_RUN_ID']} test_many::test_one[{i}] {name} {i}\\n".encode())
        time.sleep(0.002)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "test_many.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setenv("WITNESS", str(tmp_path / "witness"))
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_rlcanary.tracker,xdist.plugin")
    return tmp_path


def start(project: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.Popen(command, cwd=project, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def kill_a_worker(project: Path, controller: subprocess.Popen[bytes], dice: random.Random) -> None:
    """Ends one of the controller's workers, if any is there; the run goes on and its results say how it ended. (xdist does
    not survive the end of a worker that is still starting: an internal error.)
    """
    workers = psutil.Process(controller.pid).children()
    if workers:
        os.kill(dice.choice(workers).pid, signal.SIGKILL)
    status = controller.wait(timeout=HANG_S)
    assert status in (0, 1, 3)
    assert json.loads((project / "unit_results.json").read_text())["exit_status"] == status


def runs(project: Path) -> Iterator[tuple[str, Any]]:
    for path in [*project.glob("unit_results/*.json"), *project.glob("unit_results.json")]:
        run = json.loads(path.read_text())
        yield run["run_id"], run


def tracked_values(project: Path) -> int:
    """How many values have been tracked in all runs so far."""
    witness = project / "witness"
    return witness.read_bytes().count(b"\n") if witness.exists() else 0


def wait_for_values(project: Path, process: subprocess.Popen[bytes], values: int) -> None:
    """Until the run has tracked so many values, or is over."""
    before = tracked_values(project)
    while process.poll() is None and tracked_values(project) < before + values:
        time.sleep(0.001)


def test_nothing_tracked_is_lost_and_no_file_is_broken(project: Path) -> None:
    dice = random.Random(0)
    workers = ("-n4", "--max-worker-restart=4")
    for number in range(KILLS):
        process = start(project, *(workers if number % 3 == 2 else ()))
        # In the middle, as it starts, or as it ends.
        wait_for_values(project, process, (dice.randrange(1, 90), 0, 90)[number % 5 // 2])
        time.sleep(dice.uniform(0, 0.3) if number % 5 >= 2 else 0)
        if number % 6 == 5:
            kill_a_worker(project, process, dice)
        else:
            process.kill()
            process.wait()
        dict(runs(project))  # every file is whole at any time

    while any(path.is_dir() for path in (project / "unit_results/.journals").iterdir()):
        assert start(project, "-k", "nothing").wait(timeout=HANG_S) == pytest.ExitCode.NO_TESTS_COLLECTED

    kept = dict(runs(project))
    tracked = [line.split() for line in (project / "witness").read_text().splitlines()]
    lost = [entry for entry in tracked if entry[2] not in kept[entry[0]]["metrics"].get(entry[1], {})]
    assert lost == []
    assert all(kept[run_id]["metrics"][key][name] == [int(i), name * 50] for run_id, key, name, i in tracked)
    cut_short = {run_id for run_id, run in kept.items() if run["exit_status"] is None and run["metrics"]}
    assert cut_short, "no kill met a run that was measuring"
    assert not list(project.glob("**/*.tmp"))
    print(f"{KILLS} kills, {len(cut_short)} runs cut short while measuring, {len(tracked)} values, none lost")
