"""Run a process so that it, and everything it started, can be ended by process id."""

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import time
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

import psutil

from rlcanary.system import run_guardian as guardian
from rlcanary.system.ending import Ending
from rlcanary.system.processes import end_found, is_alive

GRACE_SECONDS = 2.0
"""The time between SIGTERM and SIGKILL."""
CLEAN_UP_SECONDS = 10.0
"""The same for a command that is stopped while it runs: a launcher cancels its jobs in it."""
LOOK_SECONDS = 0.2


class Stopped(Exception):
    """The current work has to stop."""


class Cancelled(Stopped):
    """The run is cancelled, because its result no longer matters."""


class Interrupted(Stopped):
    """A signal asked the search to stop."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class Stop(Protocol):
    """The stop request that waiting loops poll. Thread-safe."""

    @property
    def is_asked(self) -> bool: ...

    def check(self) -> None:
        """Raise Stopped if a stop was requested."""
        ...


class Interrupts:
    """A context in which SIGINT, SIGTERM and SIGHUP only set a flag, which waiting loops poll.

    So a journal line or a clean-up in progress is finished first. A signal that was already ignored (nohup) stays
    ignored.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.signum: int | None = None

    def __enter__(self) -> "Interrupts":
        self._previous = {s: signal.getsignal(s) for s in self.SIGNALS if signal.getsignal(s) is not signal.SIG_IGN}
        for signum in self._previous:
            signal.signal(signum, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum

    @property
    def is_asked(self) -> bool:
        return self.signum is not None

    def check(self) -> None:
        """Raise Interrupted if a signal came."""
        if self.signum is not None:
            raise Interrupted(self.signum)


class Cancellation:
    """A stop request for one run. It also follows the signals that stop all runs."""

    def __init__(self, interrupts: Interrupts) -> None:
        self._interrupts = interrupts
        self._cancelled = False

    def cancel(self) -> None:
        self._cancelled = True

    @property
    def is_cancelled(self) -> bool:
        return self._cancelled

    @property
    def is_asked(self) -> bool:
        return self._cancelled or self._interrupts.is_asked

    def check(self) -> None:
        self._interrupts.check()
        if self._cancelled:
            raise Cancelled


@dataclass(frozen=True)
class Call:
    """A command to run, with its standard output and error in a file."""

    command: Sequence[str]
    directory: Path
    environment: Mapping[str, str]
    mark: Mapping[str, str]
    """Environment variables that no other run has."""
    output: Path
    timeout: float | None = None


def run(call: Call, stop: Stop) -> Ending:
    """Run a command below a guardian and end every process that it started, even after an error.

    Raises:
        Stopped: A stop was requested. The processes have ended within about CLEAN_UP_SECONDS.
    """
    began = time.monotonic()
    try:
        guarded = _Guarded(call)
    except OSError as error:
        return _not_started(call, error.errno or 0)
    try:
        timed_out = False
        while guarded.status is None:
            stop.check()
            left = LOOK_SECONDS if call.timeout is None else began + call.timeout - time.monotonic()
            if left <= 0:
                timed_out = True
                break
            guarded.wait(min(left, LOOK_SECONDS))
    finally:
        # End a run that timed out or was interrupted, and any process that the command left behind.
        guarded.end(call.mark)
    if guarded.status != ("ended", 0):
        stop.check()  # The signal that asks the search to stop may have ended the command as well.
    word, number = guarded.status or ("ended", int(signal.SIGKILL))
    if word == "error":
        return _not_started(call, number)
    # A process that the kernel cannot end (a hung device) is left behind, so that the search can go on.
    return Ending(os.waitstatus_to_exitcode(number), time.monotonic() - began, timed_out)


def _not_started(call: Call, number: int) -> Ending:
    why = f"{call.command[0]}: {os.strerror(number)}"
    call.output.write_text(f"{why}\n", encoding="utf-8")
    return Ending(127 if number == errno.ENOENT else 126, 0.0, why=why)


class _Guarded:
    """A command below its own guardian (run_guardian.py)."""

    def __init__(self, call: Call) -> None:
        self.status: tuple[str, int] | None = None
        """The word and number from the guardian: `ended` and a wait status, or `error` and an error number."""
        self._is_started = False
        self._report, status = os.pipe()
        hold, self._hold = os.pipe()
        program = sys.executable, "-I", "-S", guardian.__file__, str(status), str(hold)
        try:
            with call.output.open("wb") as stream:
                self._process = subprocess.Popen(
                    [*program, *call.command],
                    cwd=call.directory,
                    env={**call.environment, **call.mark},
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    pass_fds=(status, hold),
                    start_new_session=True,
                )
        except BaseException:
            self._close()
            raise
        finally:
            os.close(status)
            os.close(hold)

    def wait(self, seconds: float) -> None:
        """Wait up to `seconds` for the status."""
        if self.status is None and select.select([self._report], [], [], seconds)[0]:
            lines = os.read(self._report, 100).decode().splitlines()
            ends = [line.split() for line in lines if line != "started"]
            self._is_started = True
            if ends:
                self.status = ends[0][0], int(ends[0][1])
            elif not lines:  # The guardian itself was killed.
                self.status = "ended", int(signal.SIGKILL)

    def end(self, mark: Mapping[str, str]) -> None:
        """End the command and every process that it started."""
        own = self._process.pid
        if not self._is_started:  # What has not started yet would be missed.
            self.wait(GRACE_SECONDS)
        grace_seconds = CLEAN_UP_SECONDS if self.status is None else GRACE_SECONDS
        end_found(lambda: _marked(mark) | _descendants(own), grace_seconds, spared=own)
        self.wait(0)
        with contextlib.suppress(BrokenPipeError):
            os.write(self._hold, b"x")
        self._close()
        try:
            self._process.wait(GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _close(self) -> None:
        os.close(self._report)
        os.close(self._hold)


def end_session(session: int, mark: Mapping[str, str] = types.MappingProxyType({})) -> None:
    """End every process of a session that this process started, and daemons that left it but carry `mark`.

    A session is identified by the process id of its leader. The leader must be a child of this process, because
    otherwise the id may be reused.
    """
    end_found(lambda: _running(lambda pid: os.getsid(pid) == session) | _marked(mark), GRACE_SECONDS)


def end_marked(mark: Mapping[str, str]) -> None:
    """End every process with all of `mark` in its environment, and its descendants, regardless of their parent."""
    end_found(
        lambda: {process for marked in _marked(mark) for process in (marked, *_descendants(marked.pid))}, GRACE_SECONDS
    )


def is_marked_running(mark: Mapping[str, str]) -> bool:
    """Whether any process has all of `mark` in its environment."""
    return bool(_marked(mark))


def _marked(mark: Mapping[str, str]) -> set[psutil.Process]:
    return _running(lambda pid: bool(mark) and mark.items() <= psutil.Process(pid).environ().items())


def _descendants(pid: int) -> set[psutil.Process]:
    try:
        return set(psutil.Process(pid).children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def _running(is_meant: Callable[[int], bool]) -> set[psutil.Process]:
    """Return the matching processes, without zombies and this process."""
    found: set[psutil.Process] = set()
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess, psutil.AccessDenied):
            if pid != os.getpid() and is_meant(pid):
                found.add(psutil.Process(pid))
    return {process for process in found if is_alive(process)}
