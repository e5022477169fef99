"""A small process that outlives a pytest killed with SIGKILL by seconds, and ends what that pytest had started.

Run as a script, by path, with the standard library alone. While pytest lives the guardian notes its descendants about once a
second; once pytest is gone, however it went, those are ended that still live. Processes younger than the last look are
known by the mark in the environment that they inherit (which alone would not do: vLLM and Ray overwrite the environment of
their processes with a title). Linux only.
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
LOOK_SECONDS = 1.0
COST_SHARE = 100  # looking takes at most one part in this many, on hosts with thousands of processes too
OWN_ACCORD_SECONDS = 0.5  # Ray's processes end by themselves when their driver is gone
TERM_SECONDS = 1.0


class Guardian:
    """The guardian of this process, and the mark for its children."""

    def __init__(self) -> None:
        owner = os.getpid()
        mark = f"{owner}-{os.urandom(4).hex()}"
        self._outer = os.environ.get(MARK_VARIABLE)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark, str(owner), str(start_time(owner))],
            stdin=subprocess.DEVNULL,
            # A reader of pytest's output must not wait for the guardian.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={name: value for name, value in os.environ.items() if name != MARK_VARIABLE},
            start_new_session=True,
        )
        os.environ[MARK_VARIABLE] = f"{self._outer} {mark}" if self._outer else mark

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Dismiss the guardian of a pytest that ends in order."""
        self._process.kill()
        self._process.wait()
        if self._outer is None:
            os.environ.pop(MARK_VARIABLE, None)
        else:
            os.environ[MARK_VARIABLE] = self._outer


def read_stat(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat from the state on; empty for a process that has ended (a zombie has)."""
    try:
        # The command's name, in parentheses, may itself hold spaces and parentheses.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in (b"Z", b"X") else fields


def start_time(pid: int) -> int | None:
    """Clock ticks since boot, None for a process that has ended."""
    fields = read_stat(pid)
    return int(fields[19]) if fields else None


def all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def descendants(owner: int) -> dict[int, int]:
    """The living descendants of a process but for this one, with their start times."""
    children: dict[int, list[int]] = {}
    started = {}
    for pid in all_pids():
        if fields := read_stat(pid):
            children.setdefault(int(fields[1]), []).append(pid)
            started[pid] = int(fields[19])
    found: dict[int, int] = {}
    waiting = list(children.get(owner, []))
    while waiting:
        pid = waiting.pop()
        if pid != os.getpid():
            found[pid] = started[pid]
            waiting += children.get(pid, [])
    return found


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


def living(known: dict[int, int], mark: str) -> dict[int, int]:
    """The processes that are to end and have not."""
    found = {pid: started for pid, started in known.items() if start_time(pid) == started}
    for pid in all_pids():
        if pid not in found and pid != os.getpid() and is_marked(pid, mark):
            started = start_time(pid)
            if started is not None:
                found[pid] = started
    return found


def end(known: dict[int, int], mark: str) -> None:
    time.sleep(OWN_ACCORD_SECONDS)
    for signum in (signal.SIGTERM, signal.SIGKILL):
        for pid, started in living(known, mark).items():
            if start_time(pid) == started:
                try:
                    os.kill(pid, signum)
                except (ProcessLookupError, PermissionError):
                    continue
        deadline = time.monotonic() + TERM_SECONDS
        while living(known, mark) and time.monotonic() < deadline:
            time.sleep(0.05)


def guard(mark: str, owner: int, owner_started: int) -> None:
    """Watch the owner until it is gone, then end what is left of it."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    known: dict[int, int] = {}
    try:
        ended = [os.pidfd_open(owner)]
    except OSError:  # already gone, or a kernel before 5.3, where the end is noticed at the next look
        ended = []
    while start_time(owner) == owner_started:
        began = time.monotonic()
        known |= descendants(owner)
        select.select(ended, [], [], max(LOOK_SECONDS, COST_SHARE * (time.monotonic() - began)))
    end(known, mark)


if __name__ == "__main__":
    guard(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
