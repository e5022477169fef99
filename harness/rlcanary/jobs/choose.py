"""Choose an executor by name."""

from collections.abc import Callable, Mapping

from rlcanary.errors import UserError
from rlcanary.jobs.job import Cluster, Executor
from rlcanary.jobs.local import LocalExecutor
from rlcanary.jobs.ray_jobs import RayExecutor
from rlcanary.jobs.slurm import SlurmExecutor

EXECUTORS: Mapping[str, Callable[[Cluster], Executor]] = {
    "local": LocalExecutor,
    "slurm": SlurmExecutor,
    "ray": RayExecutor,
}
"""The executors of `--executor`, by name."""


def make_executor(name: str, cluster: Cluster) -> Executor:
    """Make one of EXECUTORS.

    Raises:
        UserError: A container is set, and this executor runs none.
    """
    executor = EXECUTORS[name](cluster)
    if cluster.container is not None and not executor.has_containers:
        raise UserError(
            f"CONTAINER needs Slurm, but the jobs run on {name}: unset it, or run the script with "
            "tests/run_functional_in_docker.sh"
        )
    return executor
