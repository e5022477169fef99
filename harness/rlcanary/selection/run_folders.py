"""Manage the folders of a project's runs, those that were killed included."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from pathlib import Path

from rlcanary.system.processes import identify


def runs_folder() -> Path:
    """Return the folder of the journals of runs in progress: outside the projects, which may be read-only."""
    return Path(tempfile.gettempdir(), f"rlcanary-selection-{os.getuid()}")


def name_of(root: Path) -> str:
    return hashlib.sha1(str(root).encode(), usedforsecurity=False).hexdigest()[:12]


def new_run(root: Path) -> Path:
    runs_folder().mkdir(mode=0o700, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{name_of(root)}-{os.getpid()}-{started(os.getpid())}-", dir=runs_folder()))


def killed_runs(root: Path) -> list[Path]:
    """List folders of a project's runs whose pytest is gone and did not remove them."""
    return [folder for folder in sorted(runs_folder().glob(f"{name_of(root)}-*-*-*")) if not is_running(folder)]


def is_running(folder: Path) -> bool:
    _, pid, then, _ = folder.name.split("-", 3)
    return started(int(pid)) == int(then)


def started(pid: int) -> int | None:
    """Return a number that tells a process from an earlier one of the same id; None if it has ended."""
    if sys.platform != "linux":
        return started_by_psutil(pid)
    process = identify(pid)
    return process.started if process is not None else None


def started_by_psutil(pid: int) -> int | None:
    import psutil  # takes as long to import as a small run

    try:
        return int(psutil.Process(pid).create_time())
    except psutil.NoSuchProcess:
        return None


def discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
