import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from waiting import HANG_S, wait_for

from rlcanary.system.ending import Ending
from rlcanary.system.processes import end_found, identify
from rlcanary.system.sessions import Call, Cancelled, Interrupts, end_marked, is_marked_running, run

SLEEP = "import time; time.sleep(9999)"


def sleeper(mark: str) -> subprocess.Popen[bytes]:
    """Start a process with this mark, and wait until it runs: just after `exec` its environment can still read as empty."""
    program = f"print(flush=True); {SLEEP}"
    marked = os.environ | {"MARK": mark}
    process = subprocess.Popen(
        [sys.executable, "-c", program], env=marked, start_new_session=True, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.readline()
    return process


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
    assert ours.wait(timeout=HANG_S) < 0


def test_daemon_that_left_the_session_of_its_run_ends_with_the_run(tmp_path: Path) -> None:
    """As the processes of `ray start` do."""
    daemon = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {SLEEP!r}], start_new_session=True)"
    command = [sys.executable, "-c", f"{daemon}; print(p.pid)"]
    output = tmp_path / "output"
    mark = {"MARK": str(tmp_path)}
    ending = run(Call(command, tmp_path, os.environ, mark, output, HANG_S), Interrupts())
    assert ending == Ending(0, ending.seconds)
    pid = int(output.read_text())
    wait_for(lambda: identify(pid) is None)


class StopWhen:
    """Asks to stop once a file has been written."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @property
    def is_asked(self) -> bool:
        return self._file.exists() and self._file.stat().st_size > 0

    def check(self) -> None:
        if self.is_asked:
            raise Cancelled


def test_command_that_the_signal_of_the_stop_ended_as_well_has_no_outcome(tmp_path: Path) -> None:
    """A signal to the whole group, as of a scheduler: the run must not count as a failure of its commit."""
    file = tmp_path / "asked"
    call = Call(["sh", "-c", f"echo > '{file}'; kill -TERM $$"], tmp_path, os.environ, {}, tmp_path / "output")
    with pytest.raises(Cancelled):
        run(call, StopWhen(file))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux hands orphans to a subreaper")
@pytest.mark.parametrize("is_stopped", [False, True], ids=["left behind", "of a run that is stopped"])
def test_daemon_without_session_and_environment_ends_with_the_run(tmp_path: Path, is_stopped: bool) -> None:
    """It ignores SIGTERM as well."""
    file = tmp_path / "pid"
    (tmp_path / "daemon").write_text(f"trap '' TERM; echo $$ > '{file}'; while true; do sleep 1; done")
    script = f"env -i setsid sh '{tmp_path}/daemon' & while [ ! -s '{file}' ]; do sleep 0.01; done"
    if is_stopped:
        call = Call(["sh", "-c", f"{script}; sleep 60"], tmp_path, os.environ, {}, tmp_path / "output")
        with pytest.raises(Cancelled):
            run(call, StopWhen(file))
    else:
        assert ends(tmp_path, "sh", "-c", script).code == 0
    pid = int(file.read_text())
    assert identify(pid) is None


class StopAtOnce:
    is_asked = True

    def check(self) -> None:
        raise Cancelled


def test_run_that_is_stopped_before_its_command_starts_leaves_no_command_running(tmp_path: Path) -> None:
    mark = {"MARK": str(tmp_path)}
    with pytest.raises(Cancelled):
        run(Call([sys.executable, "-c", SLEEP], tmp_path, os.environ, mark, tmp_path / "output"), StopAtOnce())
    assert not is_marked_running(mark)


def test_what_a_command_starts_to_clean_up_is_not_interrupted(tmp_path: Path) -> None:
    """As `rlcanary launch` starts a scancel."""
    cleaned, ready = tmp_path / "cleaned", tmp_path / "ready"
    script = f"trap 'sleep 0.5 && touch {cleaned}; exit' TERM; echo > {ready}; while true; do sleep 0.1; done"
    with pytest.raises(Cancelled):
        run(Call(["sh", "-c", script], tmp_path, os.environ, {}, tmp_path / "output"), StopWhen(ready))
    assert cleaned.is_file()


def test_process_is_killed_even_where_the_search_for_it_outlasts_the_grace_period() -> None:
    script = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(9999)"
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert end_found(lambda: {psutil.Process(process.pid)}, grace_seconds=0) == {psutil.Process(process.pid)}
    assert process.wait(timeout=HANG_S) < 0


def ends(tmp_path: Path, *command: str) -> Ending:
    return run(Call(command, tmp_path, os.environ, {}, tmp_path / "output"), Interrupts())


def test_ending_of_a_command_is_its_own(tmp_path: Path) -> None:
    assert ends(tmp_path, "sh", "-c", "exit 3").code == 3
    assert ends(tmp_path, "sh", "-c", "kill -SEGV $$").code == -11
    assert ends(tmp_path, "sh", "-c", "kill -TERM 0").code == -15
    (tmp_path / "plain").write_text("exit 5\n")
    (tmp_path / "plain").chmod(0o755)
    assert ends(tmp_path, "./plain").code == 5
    (tmp_path / "plain").chmod(0o644)
    assert ends(tmp_path, "./plain") == Ending(126, 0.0, why="./plain: Permission denied")
    assert ends(tmp_path, "./none") == Ending(127, 0.0, why="./none: No such file or directory")
    assert (tmp_path / "output").read_text() == "./none: No such file or directory\n"
