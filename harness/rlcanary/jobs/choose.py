"""Choose an executor by name."""

import os

from rlcanary.errors import UserError
from rlcanary.jobs.job import Executor
from rlcanary.jobs.local import LocalExecutor
from rlcanary.jobs.ray_jobs import RayExecutor
from rlcanary.jobs.slurm import SlurmExecutor, SlurmOptions

RAY_ADDRESS = "http://127.0.0.1:8265"
EXECUTORS = ("local", "slurm", "ray")


def make_executor(name: str, slurm: SlurmOptions, ray_address: str) -> Executor:
    """Make the executor `local`, `slurm` or `ray`.

    Raises:
        UserError: A container is set, and the executor is not Slurm.
    """
    if name == "slurm":
        return SlurmExecutor(slurm)
    if slurm.container is not None:
        raise UserError(
            f"CONTAINER is for Slurm, and jobs are to run on {name}: unset it, or run the script with "
            "tests/run_functional_in_docker.sh"
        )
    return LocalExecutor() if name == "local" else RayExecutor(ray_address)


def ray_address() -> str:
    """Return the address of the Ray head node's dashboard, from the same variable as Ray's own command."""
    return os.environ.get("RAY_API_SERVER_ADDRESS") or RAY_ADDRESS
