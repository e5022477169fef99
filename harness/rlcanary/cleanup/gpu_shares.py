"""Give each worker of xdist its share of the GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

VARIABLE = "CUDA_VISIBLE_DEVICES"


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


def take_share(environment: Mapping[str, str] = os.environ) -> None:
    """Leave only its own GPUs visible in a worker of xdist. Call it before CUDA is used."""
    name, workers = environment.get("PYTEST_XDIST_WORKER"), environment.get("PYTEST_XDIST_WORKER_COUNT")
    if name is None or workers is None:
        return
    devices = visible_devices(environment)
    if devices:
        os.environ[VARIABLE] = ",".join(share(devices, int(name.removeprefix("gw")), int(workers)))
