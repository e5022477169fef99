"""Measure the resources of a process before and after a test, and find the owners of new ones."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from rlcanary.cleanup import belongings, ray_cluster
from rlcanary.system import processes

MIB = 2**20
PAGE = os.sysconf("SC_PAGE_SIZE")
# Growth of resident memory below this is the allocator's business.
NOTABLE = {
    "gpu_mb": 1.0,
    "rss_mb": 50.0,
    "processes": 1,
    "threads": 1,
    "fds": 1,
    "sockets": 1,
    "shm": 1,
    "ray_actors": 1,
}
LISTENING = "0A"  # in /proc/net/tcp
SHARED_MEMORY = Path("/dev/shm")
UNITS = {
    "gpu_mb": "MB of GPU memory",
    "rss_mb": "MB of resident memory",
    "fds": "file descriptors",
    "sockets": "listening sockets",
    "shm": "segments in /dev/shm",
    "ray_actors": "Ray actors",
}
OWNERS_SHOWN = 3


class Resources(NamedTuple):
    """Resources of the process at one moment: amounts by name, and their members for those that can be listed."""

    amounts: Mapping[str, float]
    members: Mapping[str, Mapping[Any, str]]

    def with_growth(self, before: Resources, after: Resources) -> Resources:
        """Add the growth between two other moments: resources that a shared fixture set up are not a test's growth."""
        return Resources(
            {name: amount + after.amounts[name] - before.amounts[name] for name, amount in self.amounts.items()},
            {name: {**known, **after.members[name]} for name, known in self.members.items()},
        )


class Growth(NamedTuple):
    """One resource that grew during a test."""

    resource: str
    before: float
    after: float
    owners: tuple[str, ...]

    @property
    def amount(self) -> float:
        return self.after - self.before

    def __str__(self) -> str:
        owners = f": {', '.join(self.owners)}" if self.owners else ""
        return f"{self.amount:+g} {UNITS.get(self.resource, self.resource)}{owners}"


def measure(kept: Iterable[str] = processes.KEPT_COMMANDS) -> Resources:
    """Measure this process's resources now.

    Costs a few milliseconds, most of it for finding tensors on GPUs if there are any.

    Args:
        kept: parts of command lines of processes that a test may leave running.
    """
    commands = {child: processes.command_line(child.pid) for child in processes.children()}
    members: dict[str, Mapping[Any, str]] = {
        "processes": {
            child: processes.shortened(command) or str(child.pid)
            for child, command in commands.items()
            if not any(part in command for part in kept)
        },
        "threads": {thread.native_id: thread.name for thread in threading.enumerate()},
        "fds": (files := _open_files()),
        "sockets": _listening_sockets(set(files.values())),
        "shm": _shared_memory(),
        "ray_actors": _ray_actors(),
    }
    amounts = {name: float(len(found)) for name, found in members.items()}
    amounts["rss_mb"] = round(int(Path("/proc/self/statm").read_text().split()[1]) * PAGE / MIB, 1)
    amounts["gpu_mb"] = round(belongings.gpu_bytes_allocated() / MIB, 3)
    members["gpu_mb"] = _gpu_tensors()
    return Resources(amounts, members)


def growth(before: Resources, after: Resources) -> list[Growth]:
    """Compare two moments: the resources that grew, with the owners of the new members."""
    grown = [_grown(resource, before, after) for resource in NOTABLE]
    return [each for each in grown if each.amount >= NOTABLE[each.resource]]


def exceeded(before: Resources, after: Resources, allowed: Mapping[str, float]) -> list[str]:
    """Describe the limits of a `leak_check` marker that a test exceeded."""
    grown = [(_grown(resource, before, after), limit) for resource, limit in allowed.items()]
    return [f"{each} (allowed: {limit:g})" for each, limit in grown if each.amount > limit]


def _grown(resource: str, before: Resources, after: Resources) -> Growth:
    known = before.members.get(resource, {})
    new = [owner for key, owner in after.members.get(resource, {}).items() if key not in known]
    had, has = before.amounts[resource], after.amounts[resource]
    if resource == "shm":  # other processes remove segments meanwhile, and make some
        others = _held_by_others_alone(new) if new else set()
        new = [name for name in new if name not in others]
        has = had + len(new)
    shown = new[:OWNERS_SHOWN] + ([f"{len(new) - OWNERS_SHOWN} more"] if len(new) > OWNERS_SHOWN else [])
    return Growth(resource, had, has, tuple(shown))


def _open_files() -> dict[Any, str]:
    found = {}
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except OSError:  # the descriptor of this listing itself
            continue
        found[descriptor.name, target] = target
    return found


def _listening_sockets(files: Collection[str]) -> dict[Any, str]:
    """Find the TCP sockets among these open files on which this process accepts connections, by their ports."""
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            address, state = fields[1], fields[3]
            if state == LISTENING and f"socket:[{fields[9]}]" in files:
                found[fields[9]] = f"port {int(address.rpartition(':')[2], 16)}"
    return found


def _shared_memory() -> dict[Any, str]:
    """List this user's shared-memory segments; the system does not record which process made one."""
    if not SHARED_MEMORY.is_dir():
        return {}
    return {path.name: path.name for path in SHARED_MEMORY.iterdir() if _owner(path) == os.getuid()}


def _held_by_others_alone(segments: Collection[str]) -> set[str]:
    """Find the segments that are mapped in processes outside this one's tree, and in none of its own."""
    import psutil

    own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
    ours, theirs = set[str](), set[str]()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mapped = (process / "maps").read_text()
        except OSError:  # gone meanwhile, or of another user
            continue
        held = {name for name in segments if f"{SHARED_MEMORY}/{name}\n" in mapped}
        (ours if int(process.name) in own else theirs).update(held)
    return theirs - ours


def _owner(path: Path) -> int | None:
    try:
        return path.lstat().st_uid
    except FileNotFoundError:  # removed meanwhile
        return None


def _ray_actors() -> dict[Any, str]:
    if not ray_cluster.connected():
        return {}
    return {actor.id: f"{actor.class_name} {actor.name}".strip() for actor in ray_cluster.actors().values()}


def _gpu_tensors() -> dict[Any, str]:
    """List the tensors of this process on GPUs, the largest first."""
    if not belongings.cuda_is_up():
        return {}
    tensor_type = sys.modules["torch"].Tensor
    # isinstance asks each object for its class, and a lazy proxy answers by loading what it stands for.
    tensors: list[Any] = [found for found in gc.get_objects() if issubclass(type(found), tensor_type) and found.is_cuda]
    tensors.sort(key=lambda tensor: -tensor.nbytes)
    return {id(tensor): f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}" for tensor in tensors}
