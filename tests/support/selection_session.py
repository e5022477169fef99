"""Runs pytest --testmon on a project in a process of its own, and asks which tests an edit would select."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from inner_session import WITHOUT_FOREIGN
from testmon import testmon_core
from waiting import HANG_S

from rlcanary.selection import testmon_data


def run_testmon(project: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--testmon", *WITHOUT_FOREIGN, "-p", "no:rlcanary-tracker", *options],
        cwd=project,
        env=clean_environment() | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=HANG_S,
        check=False,
    )


def clean_environment() -> dict[str, str]:
    foreign = ("PYTEST_", "RAY_", "RLCANARY_SELECTION", "TESTMON_", "PYTHONPATH")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
    return inherited | {
        "COLUMNS": "200",
        "RAY_AUTH_MODE": "disabled",
        "RAY_worker_niceness": "0",
        "OMP_NUM_THREADS": "1",
    }


def selected(project: Path) -> set[str]:
    """The tests that testmon would run now, without the file; those that are new or failed are not among them."""
    with testmon_data.own_source_tree():
        data = testmon_core.TestmonData.for_worker(rootdir=str(project), exec_id=environment_of(project))
        testmon_data.share_packages(data)
        data.files_of_interest = data.db.all_filenames()
        data.determine_stable()
        data.db.con.close()
    return {test.partition("::")[2] for test in data.unstable_test_names}


def environment_of(project: Path) -> int:
    connection = testmon_data.connect(testmon_data.datafile(project))
    try:
        return int(connection.execute("SELECT max(id) FROM environment").fetchone()[0])
    finally:
        connection.close()


@contextmanager
def edited(project: Path, file: str, old: str, new: str) -> Iterator[None]:
    """The file with one place replaced; an empty `old` means the beginning of the file."""
    path = project / file
    before = path.read_text()
    assert old in before, f"{file} has no {old!r}"
    path.write_text(before.replace(old, new, 1) if old else new + before)
    try:
        yield
    finally:
        path.write_text(before)


def write_project(folder: Path, files: Mapping[str, str]) -> Path:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (folder / "pytest.ini").touch()
    return folder


def stored_tests(project: Path) -> set[str]:
    """The ids of the tests that the database knows."""
    connection = testmon_data.connect(testmon_data.datafile(project))
    try:
        return {row[0] for row in connection.execute("SELECT DISTINCT test_name FROM test_execution")}
    finally:
        connection.close()
