"""A small process that outlives a pytest killed with SIGKILL by seconds, and ends what that pytest had started.

Run as a script, by path, with the standard library alone. Its standard input is a pipe from pytest that closes when
pytest is gone, however it went; until then the guardian sleeps. It knows the processes that are to end by the mark in their
environment, which every process inherits that pytest starts, and by the lines `pid start-time` that forked children write
into the pipe, because a fork alone leaves the environment in /proc as it was.
"""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

# Names every pytest session that a process descends from, separated by spaces: pytest may run pytest.
MARK_VARIABLE = "RLCANARY_SESSION"
OWN_ACCORD_SECONDS = 0.5  # Ray's processes end by themselves when their driver is gone
TERM_SECONDS = 1.0


class Guardian:
    """The guardian of this process, and the mark for its children. Linux only."""

    def __init__(self) -> None:
        self.mark = f"{os.getpid()}-{os.urandom(4).hex()}"
        self._outer = os.environ.get(MARK_VARIABLE)
        environment = {name: value for name, value in os.environ.items() if name != MARK_VARIABLE}
        command = [sys.executable, "-I", "-S", __file__, self.mark]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, start_new_session=True)
        os.environ[MARK_VARIABLE] = f"{self._outer} {self.mark}" if self._outer else self.mark
        assert self._process.stdin is not None
        self._pipe = self._process.stdin.fileno()
        self._owner = os.getpid()
        self._open = True
        os.register_at_fork(after_in_child=self._register_fork)

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Let the guardian look around once more and end."""
        self._open = False
        if self._outer is None:
            del os.environ[MARK_VARIABLE]
        else:
            os.environ[MARK_VARIABLE] = self._outer
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _register_fork(self) -> None:
        if self._open:
            # A child must not hold the pipe open: the guardian waits for the end of its last writer.
            os.write(self._pipe, f"{os.getpid()} {start_time(os.getpid())}\n".encode())
            os.close(self._pipe)
            self._open = False


def start_time(pid: int) -> int | None:
    """Clock ticks since boot, None for a process that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def is_marked(pid: int, mark: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # gone, or another user's
        return False
    for entry in environment.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == MARK_VARIABLE.encode():
            return mark.encode() in value.split()
    return False


def orphans(mark: str, forked: dict[int, int]) -> dict[int, int]:
    """The processes that are to end, with their start times."""
    found = {}
    for pid in (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()):
        started = start_time(pid)
        if started is not None and pid != os.getpid() and (forked.get(pid) == started or is_marked(pid, mark)):
            found[pid] = started
    return found


def end_orphans(mark: str, forked: dict[int, int]) -> None:
    time.sleep(OWN_ACCORD_SECONDS)
    for signum, seconds in ((signal.SIGTERM, TERM_SECONDS), (signal.SIGKILL, TERM_SECONDS)):
        for pid, started in orphans(mark, forked).items():
            if start_time(pid) == started:
                try:
                    os.kill(pid, signum)
                except (ProcessLookupError, PermissionError):
                    continue
        deadline = time.monotonic() + seconds
        while orphans(mark, forked) and time.monotonic() < deadline:
            time.sleep(0.05)


def watch(mark: str) -> None:
    """Sleep until the pipe closes, noting the forked children that register, then end what is left."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    registered = b""
    while True:
        select.select([0], [], [])
        chunk = os.read(0, 65536)
        if not chunk:
            break
        registered += chunk
    forked = {int(pid): int(started) for pid, started in (line.split() for line in registered.splitlines())}
    end_orphans(mark, forked)


if __name__ == "__main__":
    watch(sys.argv[1])
