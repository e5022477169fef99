"""Show the Python stacks of a Ray cluster's busy workers.

Ray installs faulthandler in every worker. A worker that is to be ended anyway is ended with SIGABRT, and so writes its
stack to its log before it goes; nothing has to be injected into workers, and no debugger is needed. A worker that goes on
is read by py-spy where that is installed.
"""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from rlcanary.cleanup import ray_cluster
from rlcanary.system import processes

# An aborted worker writes its stack and ends as soon as it gets a core, which takes a while on a busy machine.
READ_SECONDS = 10.0
SPY_SECONDS = 2.0
FATAL = "Fatal Python error: Aborted"
IDLE_TITLES = ("ray::IDLE", "ray::DashboardAgent", "ray::RuntimeEnvAgent")


class BusyWorker(NamedTuple):
    """A worker in the middle of a call; own is True if the running test started that call."""

    pid: int
    title: str
    own: bool


def busy_workers(own: Iterable[ray_cluster.Actor]) -> list[BusyWorker]:
    """Find the workers of this machine that run a method or a task, from the titles that Ray gives its processes."""
    own_pids = {actor.pid for actor in own}
    actor_pids = {actor.pid for actor in ray_cluster.actors().values()}
    busy = []
    for pid in _worker_pids() | own_pids:
        title = processes.command_line(pid)
        if title.startswith("ray::") and title not in IDLE_TITLES:
            is_actor = pid in actor_pids
            if not is_actor or pid in own_pids or "." in title:
                busy.append(BusyWorker(pid, title, pid in own_pids or not is_actor))
    return busy


def _worker_pids() -> set[int]:
    import psutil

    found = set()
    for pid in ray_cluster.daemons():
        try:
            found |= {child.pid for child in psutil.Process(pid).children()}
        except psutil.NoSuchProcess:
            continue
    return found


def abort_and_read(workers: Iterable[BusyWorker]) -> dict[int, str]:
    """End workers with SIGABRT and return the stack that each wrote, by process id."""
    folder = ray_cluster.log_folder()
    pids = [worker.pid for worker in workers]
    for pid in pids:
        try:
            resource.prlimit(pid, resource.RLIMIT_CORE, (0, 0))
            abort_main_thread(pid)
        except ProcessLookupError:
            continue
    processes.wait_until_gone(pids, READ_SECONDS)
    return {} if folder is None else {pid: _stack_in_log(Path(folder), pid) for pid in pids}


def abort_main_thread(pid: int) -> None:
    """Send SIGABRT to the main thread, which runs the calls: Ray lets faulthandler write the stack of one thread alone.

    Sent to the process, the signal may go to another thread. Without `tgkill`, as before glibc 2.30, it is sent so.

    Raises:
        ProcessLookupError: There is no such process.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "tgkill"):
        os.kill(pid, signal.SIGABRT)
    elif libc.tgkill(pid, pid, signal.SIGABRT):
        raise OSError(ctypes.get_errno(), f"no SIGABRT to process {pid}")


def _stack_in_log(folder: Path, pid: int) -> str:
    for path in folder.glob(f"worker-*-{pid}.err"):
        _, found, after = path.read_text(errors="replace").rpartition(FATAL)
        stack = after.partition("\nExtension modules:")[0].strip()
        if found and stack:
            return stack
    return "(the worker left no stack in its log)"


def seen_from_outside(pid: int) -> str:
    """Read the stacks of a running process with py-spy; a line with the reason if that fails."""
    place = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    program = shutil.which("py-spy", path=place)
    if program is None:
        return "(with py-spy installed, its stack would be here: pip install py-spy)"
    try:
        done = subprocess.run(
            [program, "dump", "--pid", str(pid)], capture_output=True, text=True, timeout=SPY_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"(py-spy took more than {SPY_SECONDS:g} seconds)"
    return done.stdout.strip() if done.returncode == 0 else f"(py-spy cannot read it: {done.stderr.strip()})"


def pending_tasks(frame: FrameType | None) -> Iterator[Any]:
    """List the object references in the local variables of a thread's frames: a hung test waits for these."""
    import ray

    seen: set[Any] = set()
    while frame is not None:
        for value in list(frame.f_locals.values()):
            for reference in value if isinstance(value, list | tuple | set) else (value,):
                if isinstance(reference, ray.ObjectRef) and reference not in seen:
                    seen.add(reference)
                    yield reference
        frame = frame.f_back


def cancel_tasks(references: Iterable[Any]) -> None:
    """Cancel the tasks behind references, so that Ray does not run them again; actor methods are left alone."""
    import ray

    for reference in references:
        try:
            ray.cancel(reference, force=True)
        except (ValueError, TypeError):  # the method of an actor, or an object that ray.put made
            continue


def end_what_hangs(kept: ray_cluster.Holdings, frame: FrameType | None) -> Mapping[str, str]:
    """End the calls of the hung test in the cluster, so that its CPUs are free again and `ray.get` returns.

    Returns a stack for every busy worker, by its title and process id.
    """
    if not ray_cluster.connected():
        return {}
    own = ray_cluster.actors_made_since(kept)
    busy = busy_workers(own)
    stacks = {
        worker.pid: f"(of a fixture that other tests share: left running)\n{seen_from_outside(worker.pid)}"
        for worker in busy
        if not worker.own
    }
    stacks |= abort_and_read(worker for worker in busy if worker.own)
    cancel_tasks(pending_tasks(frame))
    ray_cluster.end_made_since(kept)
    return {f"{worker.title} (process {worker.pid})": stacks[worker.pid] for worker in busy}
