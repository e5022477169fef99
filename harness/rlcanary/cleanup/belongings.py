"""Track the owners of processes, Ray actors and placement groups: the test that must end them, or the session."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from rlcanary.cleanup import ray_cluster
from rlcanary.cleanup.ray_cluster import Holdings
from rlcanary.system import processes
from rlcanary.system.processes import Census, ProcessId


class Belongings:
    """The processes and Ray objects that are not the test's.

    They existed before the test, or a fixture wider than a test made them during it; all others are the test's.

    Attributes:
        spared: ids of processes that are not leaks, such as the guardian's.
        kept_commands: parts of command lines of processes that stay: `processes.KEPT_COMMANDS` and those of the caller.
    """

    def __init__(self, spared: Iterable[int] = (), keep: Iterable[str] = ()) -> None:
        self._spared = set(spared)
        self.kept_commands = (*processes.KEPT_COMMANDS, *keep)
        self._processes: set[ProcessId] = set()
        self._in_pools: set[ProcessId] = set()  # which are ended once nobody holds their pool
        self._census_at_begin: Census | None = None
        self._ray = Holdings()
        self._ended_on_leaving: list[str] = []
        self._distributed = False
        self._last_process = processes.LastProcess()
        self._census = processes.census()
        self._census_at: bytes | None = None
        self._at_start = self._census.alive
        # Sessions can be nested in one process; the inner one must not end the outer one's processes.
        self._connected_at_start, self._distributed_at_start = ray_cluster.connected(), distributed_is_up()
        self.ray_is_shared = False

    def begin(self) -> None:
        """Begin a test: existing processes and actors stay."""
        if (census := self._updated_census()) is not self._census_at_begin:
            self._processes, self._census_at_begin = census.everyone() - self._in_pools, census
        self._ray = ray_cluster.holdings()
        self._distributed = distributed_is_up()
        self.ray_is_shared = self.ray_is_shared and ray_cluster.connected()

    def _updated_census(self) -> Census:
        """Count the children anew, but only if a process was started since the last time: most tests start none."""
        last = self._last_process.id()  # before the census, so that a process started meanwhile is new next time
        if last is None or last != self._census_at:
            self._census, self._census_at = processes.census(), last
        return self._census

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Assign objects created while entered to a fixture that other tests share."""
        processes_before, ray_before = processes.census().everyone(), ray_cluster.holdings()
        handled_before = ray_cluster.handled_actors()
        connected_before, distributed_before = ray_cluster.connected(), distributed_is_up()
        try:
            yield
        finally:
            self._processes |= processes.census().everyone() - processes_before
            self._ray |= ray_cluster.holdings() - ray_before
            self._ray |= Holdings(ray_cluster.handled_actors() - handled_before)
            self._distributed |= distributed_is_up() and not distributed_before
            self.ray_is_shared |= ray_cluster.connected() and not connected_before

    def kept_in_ray(self) -> Holdings:
        return self._ray

    def leave_ray(self) -> None:
        """End this process's objects in a Ray cluster before it disconnects from one that goes on without it."""
        self._ended_on_leaving += ray_cluster.end_made_since(Holdings())

    def left_processes(self) -> set[ProcessId]:
        """List the children that the test left running."""
        left = {process for process in processes.children() - self._processes if process.pid not in self._spared}
        if not left:
            return left
        spared = ray_cluster.daemons() if ray_cluster.connected() else set()
        left = {p for p in left if p.pid not in spared and not processes.is_kept(p.pid, self.kept_commands)}
        self._in_pools = processes.of_pools(left)
        return left - self._in_pools

    def end_left(self) -> list[str]:
        """End the test's leftovers and describe them."""
        ended, self._ended_on_leaving = self._ended_on_leaving + ray_cluster.end_made_since(self._ray), []
        if distributed_is_up() and not self._distributed:
            sys.modules["torch.distributed"].destroy_process_group()
            ended.append("the torch.distributed process group")
        if self._updated_census() is not self._census_at_begin:
            ended += name_processes(processes.end(self.left_processes()))
            if multiprocessing := sys.modules.get("multiprocessing"):
                multiprocessing.active_children()  # notes the exit codes of its processes that have ended
            # Orphans that came to this process, and children whose exit codes no object can ask for.
            dead = processes.census().dead - self._processes
            processes.reap(dead - processes.of_popen_objects(dead))
        return ended

    def end_session(self) -> list[str]:
        """End every process and Ray object created since the session began."""
        if ray_cluster.connected() and not self._connected_at_start:
            sys.modules["ray"].shutdown()
        if distributed_is_up() and not self._distributed_at_start:
            sys.modules["torch.distributed"].destroy_process_group()
        empty_gpu_caches()
        return self.end_session_processes()

    def close(self) -> None:
        """Release the resources that watching takes."""
        self._last_process.close()

    def end_session_processes(self) -> list[str]:
        """End the children that were started since the session began."""
        return name_processes(processes.end(self.children_since_start()))

    def end_all_but_ray(self) -> None:
        """End the children that were started since the session began, except the Ray that this process is connected to.

        Ray ends a process whose cluster has gone.
        """
        spared = ray_cluster.daemons() if ray_cluster.connected() else set()
        processes.end([process for process in self.children_since_start() if process.pid not in spared])

    def children_since_start(self) -> list[ProcessId]:
        """List the children created since this object was made, except those that serve every test."""
        since = processes.children() - self._at_start
        return [p for p in since if p.pid not in self._spared and not processes.is_kept(p.pid)]


def name_processes(ended: Iterable[processes.LeftProcess]) -> list[str]:
    """Name the processes, without the workers of a Ray cluster that was ending anyway."""
    return [str(process) for process in ended if not process.command.startswith("ray::")]


def distributed_is_up() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and bool(distributed.is_available()) and bool(distributed.is_initialized())


def cuda_is_up() -> bool:
    """Tell if this process has imported torch and used CUDA through it."""
    cuda = sys.modules.get("torch.cuda")
    return cuda is not None and bool(cuda.is_initialized())


def gpu_bytes_allocated() -> int:
    """Return the bytes that tensors of this process hold on all visible GPUs; 0 before CUDA is used."""
    cuda = sys.modules.get("torch.cuda")
    if cuda is None or not cuda.is_initialized():
        return 0
    return sum(int(cuda.memory_allocated(device)) for device in range(cuda.device_count()))


def empty_gpu_caches() -> None:
    """Wait for the GPUs and release unused cached memory; does nothing before CUDA is used."""
    if cuda_is_up():
        cuda = sys.modules["torch.cuda"]
        cuda.synchronize()
        cuda.empty_cache()
