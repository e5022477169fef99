"""Manage a run's folder of journals, and those of runs that were killed."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

from rlcanary.selection.dependencies import Dependencies, Run
from rlcanary.selection.journal import Journals
from rlcanary.selection.source_map import SourceMap


def runs_folder() -> Path:
    """Return the folder of the journals of runs in progress: outside the projects, which may be read-only."""
    return Path(tempfile.gettempdir(), f"rlcanary-selection-{os.getuid()}")


def name_of(root: Path) -> str:
    return hashlib.sha1(str(root).encode(), usedforsecurity=False).hexdigest()[:12]


def new_run(root: Path) -> Path:
    runs_folder().mkdir(mode=0o700, exist_ok=True)
    started = int(psutil.Process().create_time())
    return Path(tempfile.mkdtemp(prefix=f"{name_of(root)}-{os.getpid()}-{started}-", dir=runs_folder()))


def killed_runs(root: Path) -> list[Path]:
    """List folders of a project's runs whose pytest is gone and did not remove them."""
    return [folder for folder in sorted(runs_folder().glob(f"{name_of(root)}-*-*-*")) if not is_running(folder)]


def is_running(folder: Path) -> bool:
    _, pid, started, _ = folder.name.split("-", 3)
    try:
        return int(psutil.Process(int(pid)).create_time()) == int(started)
    except psutil.NoSuchProcess:
        return False


class Recording:
    """The records of a run so far, by test."""

    def __init__(self, folder: Path, sources: SourceMap, environment: Mapping[str, str] | None = None) -> None:
        self.journals = Journals(folder)
        self.run = Run(sources, environment)

    def read(self) -> None:
        self.run.add(self.journals.new_lines())

    def dependencies(self, test: str) -> Dependencies:
        return self.run.dependencies_of_test(test)


def tests_with_late_records(folder: Path, sources: SourceMap, stored: dict[str, set[tuple[str, str]]]) -> list[str]:
    """List the tests of a killed run with dependencies that were not saved before it was killed."""
    recording = Recording(folder, sources)
    recording.read()
    return [
        test
        for test in recording.run.tests
        if test in stored and not set(recording.dependencies(test).through) <= stored[test]
    ]


def discard(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
