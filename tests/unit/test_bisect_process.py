import os
import subprocess
import sys
import time
from pathlib import Path

import psutil

from rlcanary.bisect.outcomes import Ending
from rlcanary.bisect.process import Interrupts, end_marked, run

SLEEP = "import time; time.sleep(60)"


def sleeper(mark: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", SLEEP], env=os.environ | {"MARK": mark}, start_new_session=True)


def test_process_without_our_mark_is_left_alone() -> None:
    stranger = sleeper("other")
    try:
        end_marked({"MARK": "mine"})
        assert psutil.Process(stranger.pid).status() != psutil.STATUS_ZOMBIE
    finally:
        stranger.kill()
        stranger.wait()


def test_process_with_our_mark_is_ended() -> None:
    ours = sleeper("mine too")
    end_marked({"MARK": "mine too"})
    assert ours.wait(timeout=5) < 0


def test_daemon_that_left_the_session_of_its_run_ends_with_the_run(tmp_path: Path) -> None:
    """As the processes of `ray start` do."""
    daemon = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
    command = [sys.executable, "-c", f"{daemon}; print(p.pid)"]
    output = tmp_path / "output"
    mark = {"MARK": str(tmp_path)}
    ending = run(
        command, directory=tmp_path, environment=os.environ, mark=mark, output=output, timeout=20, stop=Interrupts()
    )
    assert ending == Ending(0, ending.seconds)
    pid = int(output.read_text())
    deadline = time.monotonic() + 5
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.02)
