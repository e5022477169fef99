"""Measure the peak memory in use while a test runs."""

import os
import threading
import time

from rlcanary.errors import UserError
from rlcanary.recording.ray_nodes import RayNodes
from rlcanary.system.gpus import Gpus

BYTES_PER_GB = 2**30  # as in nvidia-smi and in the metrics of Ray's dashboard, one "GB" is 2**30 bytes

INTERVAL_S = 0.1
# Walking a large process tree takes milliseconds; sampling rests in proportion, so that it never takes more than one
# part in this many.
COST_SHARE = 20


class MemorySampler:
    """Samples memory from a background thread between `start` and `stop` and keeps the maximum.

    In a Ray cluster with GPUs, or on a machine with visible GPUs, this is the memory in use by all processes on the
    fullest GPU. Elsewhere it is the resident memory of this process and all its descendants; pages that several share
    count several times.
    """

    def __init__(self, gpus: Gpus | None) -> None:
        self._gpus = gpus
        self._ray_nodes = RayNodes()
        self._max_gpu_bytes = 0
        self._max_resident_bytes = 0
        self._problem: UserError | None = None
        self._sampling = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="rlcanary-memory", daemon=True)

    def start(self) -> None:
        """Sample from now on, at once for the first time."""
        if self._is_sampled():
            self._thread.start()

    def stop(self) -> None:
        """End the sampling."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def max_gb(self) -> float:
        """Returns the maximum so far, including this moment, in GB of 2**30 bytes.

        Raises:
            UserError: if the memory of some GPU is not known.
        """
        self.sample()
        if self._problem is not None:
            raise self._problem
        on_other_nodes = self._ray_nodes.highest_used_bytes()
        if self._gpus is None and on_other_nodes is None:
            return self._max_resident_bytes / BYTES_PER_GB
        return max(self._max_gpu_bytes, on_other_nodes or 0) / BYTES_PER_GB

    def gpu_names(self) -> list[str]:
        """Lists the models of the GPUs on other nodes of a Ray cluster."""
        return sorted(self._ray_nodes.gpu_names)

    def sample(self) -> None:
        with self._sampling:
            self._ray_nodes.sample()
            if self._gpus is None:
                self._max_resident_bytes = max(self._max_resident_bytes, resident_bytes(os.getpid()))
            else:
                self._max_gpu_bytes = max(self._max_gpu_bytes, self._gpus.highest_used_bytes())

    def _is_sampled(self) -> bool:
        """Sample, and keep what stands in the way for the test to see, if it asks."""
        try:
            self.sample()
        except UserError as error:
            self._problem = error
            return False
        return True

    def _sample_until_stopped(self) -> None:
        rest = INTERVAL_S
        while not self._stopped.wait(rest):
            began = time.perf_counter()
            if not self._is_sampled():
                return
            rest = max(INTERVAL_S, COST_SHARE * (time.perf_counter() - began))


def resident_bytes(pid: int) -> int:
    """Sums the resident memory of a process and all its descendants. A process that ends meanwhile counts as zero."""
    import psutil  # costs 10 ms at every start of pytest otherwise

    root = psutil.Process(pid)
    total = 0
    for process in [root, *root.children(recursive=True)]:
        try:
            total += process.memory_info().rss
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return total
