"""End the descendants of a pytest killed with SIGKILL, from a small process that outlives it by seconds.

While pytest lives the guardian notes its descendants about once a second; once pytest is gone, however it went, those are
ended that still live. Processes younger than the last look are known by the mark in the environment that they inherit (which
alone would not do: vLLM and Ray overwrite the environment of their processes with a title). Linux only.

Run as a script, by path. Every start of pytest pays for its imports: `signal` and `pathlib` would double its price.
"""

import os
import select
import sys
import time

# Names every pytest session that a process descends from, separated by spaces: pytest may run pytest.
MARK_VARIABLE = "RLCANARY_SESSION"
LOOK_SECONDS = 1.0
COST_SHARE = 100  # looking takes at most one part in this many of a core, on hosts with thousands of processes too
OWN_ACCORD_SECONDS = 0.5  # Ray's processes end by themselves when their driver is gone
TERM_SECONDS = 1.0
TERM, KILL = 15, 9  # as on every Linux


def read(path: str) -> bytes:
    with open(path, "rb") as file:  # noqa: PTH123 - see above
        return file.read()


def read_stat(pid: int) -> list[bytes]:
    """Read the fields of /proc/PID/stat from the state on; empty for a process that has ended (a zombie has)."""
    try:
        # The command's name, in parentheses, may itself hold spaces and parentheses.
        fields = read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in (b"Z", b"X") else fields


def start_time(pid: int) -> int | None:
    """Read a process's start time in clock ticks since boot; None for a process that has ended."""
    fields = read_stat(pid)
    return int(fields[19]) if fields else None


def all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208 - see above


def descendants(owner: int) -> dict[int, int]:
    """Find the living descendants of a process except this one, with their start times."""
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
        environment = read(f"/proc/{pid}/environ")
    except OSError:  # gone, or another user's
        return False
    for entry in environment.split(b"\0"):
        name, _, value = entry.partition(b"=")
        if name == MARK_VARIABLE.encode():
            return mark.encode() in value.split()
    return False


def living(known: dict[int, int], mark: str) -> dict[int, int]:
    """List the processes that still have to end."""
    found = {pid: started for pid, started in known.items() if start_time(pid) == started}
    for pid in all_pids():
        if pid not in found and pid != os.getpid() and is_marked(pid, mark):
            started = start_time(pid)
            if started is not None:
                found[pid] = started
    return found


def end(known: dict[int, int], mark: str) -> None:
    time.sleep(OWN_ACCORD_SECONDS)
    for signum in (TERM, KILL):
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
    """Watch the owner until it is gone, then end its descendants.

    It starts with the signals that end a session blocked.
    """
    known: dict[int, int] = {}
    try:
        ended = [os.pidfd_open(owner)]
    except OSError:  # already gone, or a kernel before 5.3, where the end is noticed at the next look
        ended = []
    while start_time(owner) == owner_started:
        began = time.thread_time()  # on a busy host a look may wait for seconds, which must not keep the next one off
        known |= descendants(owner)
        select.select(ended, [], [], max(LOOK_SECONDS, COST_SHARE * (time.thread_time() - began)))
    end(known, mark)


if __name__ == "__main__":
    guard(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
