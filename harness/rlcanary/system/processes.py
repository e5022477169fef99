"""List the child processes cheaply, end them by process id, and recognise them by their start time."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import psutil

PR_SET_CHILD_SUBREAPER = 36
DEAD = (b"Z", b"X")
PF_EXITING = 0x4

# Time between SIGTERM and SIGKILL.
GRACE_SECONDS = 1.0

# Classes of pools, and the attribute that holds the processes of one.
POOLS = (
    ("concurrent.futures.process", "ProcessPoolExecutor", "_processes"),
    ("multiprocessing.pool", "Pool", "_pool"),
    ("torch.utils.data.dataloader", "_MultiProcessingDataLoaderIter", "_workers"),
)

# Processes that the first test starts and that serve all later tests by design.
KEPT_COMMANDS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "torch/_inductor/compile_worker",
)


class ProcessId(NamedTuple):
    """A process id with its start time in clock ticks since boot, which tells it from a later process of the same id."""

    pid: int
    started: int


class LeftProcess(NamedTuple):
    """A process that was ended: its command, and whether it had to be killed."""

    pid: int
    command: str
    killed: bool

    def __str__(self) -> str:
        return f"process {self.pid} ({self.command}){', which had to be killed' if self.killed else ''}"


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that a daemon left by a test remains a child of this process.

    Linux only. Elsewhere such processes are not seen.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Census(NamedTuple):
    """The children of this process: the living ones, and those that have ended or are ending, which nothing can stop.

    Ending takes a process that held much memory some tenths of a second.
    """

    alive: set[ProcessId]
    dead: set[ProcessId]

    def everyone(self) -> set[ProcessId]:
        return self.alive | self.dead


class LastProcess:
    """The latest id that the kernel gave to a process or thread. If it has not changed, nothing was started.

    Reading it takes 1 µs, and a census 30. It is None without Linux, and in containers that replace /proc/loadavg.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        if sys.platform == "linux":
            self._file = os.open("/proc/loadavg", os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(self._file).st_dev != os.stat("/proc/self").st_dev or int(self.id() or 0) < os.getpid():  # noqa: PTH116
                os.close(self._file)
                self._file = None

    def id(self) -> bytes | None:
        return None if self._file is None else os.pread(self._file, 128, 0).rpartition(b" ")[2]

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def children() -> set[ProcessId]:
    """Return the living children of this process. It takes about 0.03 ms for a few children."""
    return census().alive


def census() -> Census:
    if sys.platform != "linux":
        return Census(_children_by_psutil(), set())
    found = Census(set(), set())
    for thread in os.scandir("/proc/self/task"):
        try:
            listed = _read(f"{thread.path}/children")
        except OSError:  # the thread ended meanwhile
            continue
        for pid in map(int, listed.split()):
            fields = _stat(pid)
            if fields:
                ends = fields[0] in DEAD or int(fields[6]) & PF_EXITING
                (found.dead if ends else found.alive).add(ProcessId(pid, int(fields[19])))
    return found


def _read(path: str) -> bytes:
    """Read a small file of /proc, in a third of pathlib's time."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = []
        while part := os.read(descriptor, 65536):
            parts.append(part)
        return b"".join(parts)
    finally:
        os.close(descriptor)


def _children_by_psutil() -> set[ProcessId]:
    import psutil

    return {ProcessId(child.pid, int(child.create_time() * 100)) for child in psutil.Process().children()}


def identify(pid: int) -> ProcessId | None:
    """Return the current process with this id, or None if it has ended. A zombie has ended."""
    fields = _stat(pid)
    return ProcessId(pid, int(fields[19])) if fields and fields[0] not in DEAD else None


def _stat(pid: int) -> list[bytes]:
    """Return the fields of /proc/PID/stat from the state on. Empty if there is no such process."""
    try:
        # The command's name, in parentheses, may itself hold spaces and parentheses.
        return _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    except OSError:
        return []


def of_popen_objects(dead: set[ProcessId]) -> set[ProcessId]:
    """Find the children that ended for which a `subprocess.Popen` lives: if another reaps them, it reports code 0."""
    if not dead:
        return set()
    waiting = {each.pid for each in instances_of(subprocess.Popen) if hasattr(each, "pid")}
    return {process for process in dead if process.pid in waiting}


def of_pools(alive: set[ProcessId]) -> set[ProcessId]:
    """Find the children that are workers of a pool which somebody still holds."""
    workers: set[int] = set()
    for module, name, attribute in POOLS:
        kind = getattr(sys.modules.get(module), name, None)
        for pool in instances_of(kind) if alive and kind is not None else ():
            held = getattr(pool, attribute, None) or ()
            workers.update(getattr(each, "pid", 0) for each in (held.values() if isinstance(held, dict) else held))
    return {process for process in alive if process.pid in workers}


def instances_of(kind: type[Any]) -> list[Any]:
    """List the objects of a class and of those made from it.

    Slow, at some 10 ms, but few tests leave a process.
    """
    classes = [kind]
    for each in classes:
        classes += each.__subclasses__()
    # A lazy proxy would answer isinstance by loading.
    return [each for each in gc.get_referrers(*classes) if issubclass(type(each), kind)]


def reap(dead: Iterable[ProcessId]) -> None:
    """Reap children that have ended or are ending. After `adopt_orphans`, this process has to reap them itself."""
    wait_until_gone([process.pid for process in dead], GRACE_SECONDS)


def command_line(pid: int) -> str:
    """Return the command of a process, its arguments separated by spaces. Empty if it has ended.

    A process that is being replaced by another program has none for a moment, which is waited out for up to 0.2 s.
    """
    for _ in range(100):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except OSError:
            return ""
        if command or identify(pid) is None:
            return command
        time.sleep(0.002)
    return ""


def is_kept(pid: int, patterns: Iterable[str] = KEPT_COMMANDS) -> bool:
    command = command_line(pid)
    return any(pattern in command for pattern in patterns)


def end(processes: Collection[ProcessId], grace_seconds: float = GRACE_SECONDS) -> list[LeftProcess]:
    """End these children and all their descendants: SIGTERM, then SIGKILL after the grace period.

    Returns:
        The children that were ended.
    """
    if not processes:
        return []
    import psutil

    named: list[tuple[psutil.Process, str]] = []
    tree: set[psutil.Process] = set()
    for process in processes:
        try:
            child = psutil.Process(process.pid)
            if sys.platform == "linux" and identify(process.pid) != process:
                continue
            named.append((child, shortened(command_line(process.pid))))
            tree |= {child, *child.children(recursive=True)}
        except psutil.NoSuchProcess:
            continue
    killed = end_found(lambda: tree, grace_seconds)
    wait_until_gone([member.pid for member in tree], 0)
    return [LeftProcess(child.pid, command, child in killed) for child, command in named]


def end_found(
    find: Callable[[], set[psutil.Process]], grace_seconds: float, spared: int | None = None
) -> set[psutil.Process]:
    """End processes: SIGTERM, SIGKILL after the grace period, and give up after as long again.

    A process that was found once is ended even if a later `find` no longer returns it. One that appears only after the
    SIGTERM cleans up for one that got it, as a `scancel` does. It has the rest of the grace period.

    Args:
        find: Returns the processes to end. It is called until all have ended.
        grace_seconds: The time between SIGTERM and SIGKILL.
        spared: The id of a process to leave.

    Returns:
        The processes that had to be killed.
    """
    import psutil

    found: set[psutil.Process] = set()

    def living() -> set[psutil.Process]:
        found.update(find())
        return {process for process in found if process.pid != spared and is_alive(process)}

    for process in living():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.terminate()
    began = time.monotonic()
    while living() and time.monotonic() < began + grace_seconds:
        time.sleep(0.02)
    killed: set[psutil.Process] = set()
    began = time.monotonic()
    while members := living():
        if killed and time.monotonic() > began + grace_seconds:
            break
        for process in members:
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                process.kill()
        killed |= members
        time.sleep(0.02)
    return killed


def is_alive(process: psutil.Process) -> bool:
    import psutil

    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def shortened(command: str, width: int = 90) -> str:
    return command if len(command) <= width else command[: width - 1] + "…"


def _reaped(pid: int) -> bool:
    """Reap a dead child. A child that another process started is left to that process."""
    try:
        return os.waitpid(pid, os.WNOHANG)[0] == pid
    except ChildProcessError:
        return True


def wait_until_gone(pids: Iterable[int], timeout: float) -> list[int]:
    """Wait for processes to end, and reap those that are children of this one.

    Returns:
        The processes that have not ended.
    """
    deadline = time.monotonic() + timeout
    left = list(pids)
    while True:
        left = [pid for pid in left if identify(pid) is not None or not _reaped(pid)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)
