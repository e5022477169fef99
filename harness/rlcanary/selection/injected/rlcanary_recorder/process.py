"""Keep the recorder of this interpreter, of which there is at most one."""

from __future__ import annotations

import os
import sys
from typing import Any

from .children import PATCHES as CHILD_PATCHES
from .children import START
from .core import CONTEXT, PACKAGE, SETTINGS, Recorder
from .threads import PATCHES as THREAD_PATCHES
from .variables import PATCHES as VARIABLE_PATCHES

RAY_MODULES = (
    "ray.actor",
    "ray.remote_function",
    "ray._private.function_manager",
    "ray._private.serialization",
    "ray._private.worker",
    "ray.util.state.api",
    "ray.runtime_context",
    "ray.dag.compiled_dag_node",
)
# An interpreter has one set of threads, audit hooks and monitoring tools, so it has one recorder.
_recorders: list[Recorder] = []


def recorder() -> Recorder | None:
    return _recorders[0] if _recorders else None


def start(
    folder: str, root: str, context: str | None = None, injected: str | None = None, may_trace: bool = True
) -> Recorder:
    """Begin to record in this interpreter, unless it records already."""
    if _recorders:
        return _recorders[0]
    active = Recorder(folder, root, context, injected, may_trace)
    _recorders.append(active)
    # Pickled functions look for the recorder under this name, also where it is a part of rlcanary.
    package = __name__.rpartition(".")[0]
    for name in [module for module in sys.modules if module == package or module.startswith(f"{package}.")]:
        sys.modules.setdefault(PACKAGE + name.removeprefix(package), sys.modules[name])
    active.start(CHILD_PATCHES | THREAD_PATCHES | VARIABLE_PATCHES | dict.fromkeys(RAY_MODULES, patch_ray))
    return active


def patch_ray(recorder: Recorder, module: Any) -> None:
    from .ray_calls import PATCHES  # most processes never load Ray

    PATCHES[module.__name__](recorder, module)


def start_in_child() -> None:
    """Begin to record in a process that was started with the variables of `Recorder.environment`."""
    folder, root = os.environ[SETTINGS].split("\n")
    if not os.path.isdir(folder):
        return
    context = os.environ.get(CONTEXT)
    if context is None or any(word.endswith("/default_worker.py") for word in sys.orig_argv):
        start_in_ray_worker(folder, root)
        return
    active = start(folder, root, context)
    active.write("r", context, START)
    active.begin(context)


def start_in_ray_worker(folder: str, root: str, injected: str | None = None) -> Recorder:
    """Begin to record in a worker of Ray, which serves many tests, whichever of them started the cluster."""
    active = recorder()
    if active is None:
        active = start(folder, root, injected=injected)
        os.environ.update(active.environment(active.process, os.environ.get("PYTHONPATH", "")))
    return active
