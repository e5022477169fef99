"""Running a process so that it, and everything it started, can be ended by process id."""

import contextlib
import errno
import os
import signal
import subprocess
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Protocol

import psutil

from rlcanary.bisect.outcomes import Ending

GRACE_SECONDS = 2.0
LOOK_SECONDS = 0.2


class Stopped(Exception):
    """What was under way is to end."""


class Cancelled(Stopped):
    """Its result no longer matters."""


class Interrupted(Stopped):
    """The search was asked to stop by a signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"interrupted by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class Stop(Protocol):
    """What a loop that waits looks at. Thread-safe."""

    @property
    def is_asked(self) -> bool: ...

    def check(self) -> None:
        """Raise Stopped if a stop was asked for."""
        ...


class Interrupts:
    """While entered, SIGINT, SIGTERM and SIGHUP only raise a flag, and the loops that wait look at it.

    So nothing is cut in two: a journal line or a clean-up under way is finished first.
    A signal that was already ignored (nohup) stays ignored.
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
    """Stops one run: with all others at a signal, or alone."""

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


def run(
    command: Sequence[str],
    *,
    directory: Path,
    environment: Mapping[str, str],
    mark: Mapping[str, str],
    output: Path,
    timeout: float | None,
    stop: Stop,
) -> Ending:
    """Run `command` in a session of its own, its output in the file `output`, and end all that it started whatever happens.

    `mark` joins the environment; it is what no other run has.
    Raises Stopped within about GRACE_SECONDS of being asked to stop, with the processes ended.
    """
    began = time.monotonic()
    with output.open("wb") as stream:
        try:
            process = _start(command, directory, {**environment, **mark}, stream.fileno())
        except OSError as error:
            why = f"{command[0]}: {os.strerror(error.errno or 0)}"
            stream.write(f"{why}\n".encode())
            return Ending(127 if isinstance(error, FileNotFoundError) else 126, 0.0, why=why)
    try:
        timed_out = False
        while process.poll() is None:
            stop.check()
            left = LOOK_SECONDS if timeout is None else began + timeout - time.monotonic()
            if left <= 0:
                timed_out = True
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(left, LOOK_SECONDS))
    finally:
        # Ends a run that timed out or was interrupted, and otherwise what the command left behind.
        end_session(process.pid, mark)
    # A process that the kernel cannot end (a hung device) stays behind rather than holding the search up for ever.
    code = process.poll()
    return Ending(-signal.SIGKILL if code is None else code, time.monotonic() - began, timed_out)


def _start(
    command: Sequence[str], directory: Path, environment: Mapping[str, str], stream: int
) -> subprocess.Popen[bytes]:
    def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            arguments,
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    try:
        return start(command)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        return start(["sh", *command])  # A script without a #! line: what a shell does with it.


def end_session(session: int, mark: Mapping[str, str] = types.MappingProxyType({})) -> None:
    """End every process of a session that we started, and those that left it, as daemons do, with `mark` on them.

    A session is named by the process id of its leader, which has to be our child: else the number may be given away again.
    """
    _end(lambda pid: os.getsid(pid) == session or _has_mark(pid, mark))


def end_marked(mark: Mapping[str, str]) -> None:
    """End every process that has all of `mark` in its environment, whoever started it."""
    _end(lambda pid: _has_mark(pid, mark))


def is_marked_running(mark: Mapping[str, str]) -> bool:
    """Whether a process has all of `mark` in its environment, whoever started it."""
    return any(True for _ in _running(lambda pid: _has_mark(pid, mark)))


def _has_mark(pid: int, mark: Mapping[str, str]) -> bool:
    return bool(mark) and mark.items() <= psutil.Process(pid).environ().items()


def _end(is_meant: Callable[[int], bool]) -> None:
    """Ask the processes to end, after GRACE_SECONDS make them, and after as long again give up."""
    began = time.monotonic()
    asked: set[int] = set()
    while members := list(_running(is_meant)):
        waited = time.monotonic() - began
        if waited > 2 * GRACE_SECONDS:
            return
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                if waited > GRACE_SECONDS:
                    process.kill()
                elif process.pid not in asked:
                    process.terminate()
                    asked.add(process.pid)
        time.sleep(0.02)


def _running(is_meant: Callable[[int], bool]) -> Iterator[psutil.Process]:
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess, psutil.AccessDenied):
            if pid != os.getpid() and is_meant(pid):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE:
                    yield process
