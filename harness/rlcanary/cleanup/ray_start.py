"""Start a Ray cluster on a machine that is too busy for Ray's own time limit."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TypeVar

from rlcanary.cleanup.belongings import Belongings
from rlcanary.system import processes

RAY_WAS_SLOW = "timed out during startup"
Cluster = TypeVar("Cluster")


def start_ray(start: Callable[[], Cluster], limit_s: float = math.inf) -> Cluster:
    """Start a cluster, and retry if Ray gives up after its own 30 seconds: a busy machine takes longer.

    Args:
        start: starts it, with `ray.init` say.
        limit_s: no attempt starts after as many seconds.

    Raises:
        Exception: Ray's own, if the cluster cannot start, or has not within the limit.
    """
    import ray

    began = time.monotonic()
    while True:
        before = Belongings()
        try:
            return start()
        except Exception as error:  # Ray raises nothing narrower
            if RAY_WAS_SLOW not in str(error) or time.monotonic() - began > limit_s:
                raise
            ray.shutdown()
            processes.end(before.children_since_start())
        finally:
            before.close()
