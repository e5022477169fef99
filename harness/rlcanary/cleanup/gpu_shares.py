"""Give each worker of xdist its share of the GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"
TAKEN = "RLCANARY_GPU_SHARE"  # the worker that has taken its share


def visible_devices(environment: Mapping[str, str] = os.environ) -> list[str]:
    """List the GPUs that the caller may use: those in CUDA_VISIBLE_DEVICES, else the index of every GPU."""
    listed = environment.get(VARIABLE)
    if listed is not None:
        return [name.strip() for name in listed.split(",") if name.strip()]
    from rlcanary.system.gpus import open_gpus

    gpus = open_gpus(environment)
    return [] if gpus is None else [str(index) for index in range(len(gpus))]


def share(devices: Sequence[str], worker: int, workers: int) -> list[str]:
    """Choose the devices of one worker: every n-th, or a shared one if there are fewer devices than workers.

    A worker that xdist started in the place of a crashed one has a number past the last and takes the place of another.
    """
    if not devices:
        return []
    place = worker % workers
    return list(devices[place::workers]) if len(devices) >= workers else [devices[place % len(devices)]]


def take_share(environment: MutableMapping[str, str] = os.environ) -> None:
    """Leave only its own GPUs visible in a worker of xdist. Call it before CUDA is used.

    A pytest that a test starts inherits the worker's variables and its share, of which it takes no share again.
    """
    name, workers = environment.get("PYTEST_XDIST_WORKER", ""), environment.get("PYTEST_XDIST_WORKER_COUNT")
    number = name.removeprefix("gw")
    taken = f"{environment.get('PYTEST_XDIST_TESTRUNUID')} {name}"
    # --tx popen//id=NAME gives a worker a name without a number.
    if workers is None or not number.isdecimal() or environment.get(TAKEN) == taken:
        return
    devices = visible_devices(environment)
    if devices:
        environment[VARIABLE] = ",".join(share(devices, int(number), int(workers)))
        environment[TAKEN] = taken
