"""The recorder of this interpreter, of which there is at most one."""

from __future__ import annotations

import json
import os
import sys

from .children import PATCHES as CHILD_PATCHES
from .children import START
from .core import CONTEXT, SETTINGS, Recorder
from .ray_calls import PATCHES as RAY_PATCHES

PACKAGE = "rlcanary_recorder"
# An interpreter has one set of threads, audit hooks and monitoring tools, so it has one recorder.
_recorders: list[Recorder] = []


def recorder() -> Recorder | None:
    return _recorders[0] if _recorders else None


def start(folder: str, root: str, context: str | None = None) -> Recorder:
    """Begin to record in this interpreter, unless it records already."""
    if _recorders:
        return _recorders[0]
    active = Recorder(folder, root, context)
    _recorders.append(active)
    # What brings the recorder along looks for it under this name, also where it is a part of rlcanary.
    package = __name__.rpartition(".")[0]
    for name in [module for module in sys.modules if module == package or module.startswith(f"{package}.")]:
        sys.modules.setdefault(PACKAGE + name.removeprefix(package), sys.modules[name])
    active.start(CHILD_PATCHES | RAY_PATCHES)
    return active


def start_in_child() -> None:
    """Begin to record in a process that was started with the variables of `Recorder.environment`."""
    if SETTINGS not in os.environ:
        return
    settings = json.loads(os.environ[SETTINGS])
    program = next((word for word in sys.orig_argv[1:] if word.endswith(".py")), "")
    if not os.path.isdir(settings["folder"]) or is_ray_service(program):
        return
    if program.endswith("/default_worker.py"):
        start(settings["folder"], settings["root"])
        return
    context = os.environ.get(CONTEXT)
    active = start(settings["folder"], settings["root"], context)
    if context:
        active.write("r", context, START)
        active.begin(context)


def is_ray_service(program: str) -> bool:
    return "/ray/" in program and not program.endswith("/default_worker.py")
