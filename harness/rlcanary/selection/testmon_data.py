"""Connect records with pytest-testmon: its source tree, its fingerprints and its database.

Every private name of pytest-testmon that rlcanary relies on is used in this module. testmon's database gets two
additions. Every test recorded with rlcanary depends on a file that does not exist, `RECORDED`: this marks tests
recorded without it, and a new format of the records makes testmon run every test again. A table keeps the output of
`explain`.
"""

from __future__ import annotations

import ast
import hashlib
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from testmon import testmon_core
from testmon.process_code import Block, Module, create_fingerprint, methods_to_checksums

from rlcanary.selection.dependencies import Dependencies
from rlcanary.selection.stored import TABLE, packed

RECORDED = "rlcanary.recorded"
FORMAT = "1"
# Hashing more than this at every start would cost more than it saves; size and time of change stand for the content.
HASHED_BYTES = 64 * 2**20
EMPTY = "0:nothing"


class PythonFile(Module):  # type: ignore[misc]
    """A Python file in which even an empty body can change."""

    @property
    def blocks(self) -> list[Any]:
        blocks: list[Any] = super().blocks
        if not blocks and has_no_statement(self.source_code):
            blocks.append(Block(1, 2**31, EMPTY))
        return blocks


def has_no_statement(text: str) -> bool:
    try:
        return not ast.parse(text).body
    except SyntaxError:
        return False


class SourceTree(testmon_core.SourceTree):  # type: ignore[misc]
    """The file view of testmon, with data files of any kind and name."""

    def get_file(self, filename: str) -> Any:
        if filename not in self.cache:
            if filename == RECORDED:
                self.cache[filename] = whole_file(filename, FORMAT, 0.0)
            elif filename.endswith(".py"):
                module = super().get_file(filename)
                if module is not None:
                    module.__class__ = PythonFile
            else:
                self.cache[filename] = data_file(Path(self.rootdir), filename)
        return self.cache[filename]


def data_file(root: Path, filename: str) -> Any:
    path = root / filename
    try:
        stat = path.stat()
        if stat.st_size > HASHED_BYTES:
            content = f"{stat.st_size} {stat.st_mtime_ns}"
        else:
            content = hashlib.sha1(path.read_bytes(), usedforsecurity=False).hexdigest()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        return None
    return whole_file(filename, content, stat.st_mtime)


def whole_file(filename: str, content: str, mtime: float) -> Any:
    module = Module(source_code=content, mtime=mtime, ext="data", fs_fsha=content, filename=filename)
    module._blocks = [Block(1, 1, content)]
    return module


class Fingerprints:
    """The fingerprints that testmon keeps of a test's dependencies."""

    def __init__(self, data: Any) -> None:
        self.data = data
        self.known: dict[tuple[str, frozenset[int]], dict[str, Any]] = {}

    def of_file(self, file: str, lines: frozenset[int]) -> dict[str, Any] | None:
        if (file, lines) not in self.known:
            module = self.data.source_tree.get_file(file)
            if module is None:
                return None
            self.known[file, lines] = {
                "filename": file,
                "mtime": module.mtime,
                "fsha": module.fs_fsha,
                "method_checksums": create_fingerprint(module, lines),
            }
        return self.known[file, lines]

    def of_test(self, test: str, dependencies: Dependencies, reports: Mapping[str, Any]) -> dict[str, Any]:
        """Build the rows that testmon stores of one execution of a test."""
        lines = {**dependencies.lines, RECORDED: {1}}
        lines.setdefault(testmon_core.home_file(test), {1})
        files = (self.of_file(file, frozenset(at)) for file, at in sorted(lines.items()))
        forced = test in self.data.stable_test_names and test not in self.data.failing_tests
        return {
            "deps": [file for file in files if file is not None],
            "forced": forced,
            **testmon_core.process_result(reports),
        }


def save(data: Any, executions: Mapping[str, dict[str, Any]], dependencies: Mapping[str, Dependencies]) -> None:
    data.save_test_execution_file_fps(executions)
    with data.db.con as connection:
        create_table(connection)
        rows = [(test, packed(found)) for test, found in dependencies.items()]
        connection.executemany(f"INSERT OR REPLACE INTO {TABLE} VALUES (?, ?)", rows)


def forget_all_but(data: Any, tests: Iterable[str]) -> None:
    """Remove the stored rows of tests that no longer exist."""
    with data.db.con as connection:
        create_table(connection)
        stored = {row[0] for row in connection.execute(f"SELECT test_name FROM {TABLE}")}
        connection.executemany(
            f"DELETE FROM {TABLE} WHERE test_name = ?", [(test,) for test in stored.difference(tests)]
        )


def create_table(connection: sqlite3.Connection) -> None:
    connection.execute(f"CREATE TABLE IF NOT EXISTS {TABLE} (test_name TEXT PRIMARY KEY, dependencies BLOB)")


def recorded_without_us(data: Any) -> list[str]:
    """List the tests in testmon's database whose record does not cover other processes."""
    rows = data.db.con.execute(
        """SELECT DISTINCT te.test_name FROM test_execution te, test_execution_file_fp link, file_fp f
           WHERE te.environment_id = ? AND te.id = link.test_execution_id AND link.fingerprint_id = f.id
           AND f.filename = ?""",
        (data.exec_id, RECORDED),
    )
    return sorted(set(data.all_tests) - {row[0] for row in rows})


def invalidate(data: Any, tests: Iterable[str]) -> None:
    """Give tests a fingerprint that matches nothing, as testmon does with tests that it has not seen yet."""
    executions = {
        test: {
            "deps": [
                {
                    "filename": testmon_core.home_file(test),
                    "method_checksums": methods_to_checksums(["0match"]),
                    "mtime": None,
                    "fsha": None,
                }
            ]
        }
        for test in tests
    }
    if executions:
        data.save_test_execution_file_fps(executions)


def datafile(root: Path) -> Path:
    return root / str(testmon_core.get_data_file_path())


def connect(path: Path) -> sqlite3.Connection:
    """Open testmon's database for reading only."""
    return sqlite3.connect(f"file:{path}?mode=ro", uri=True)


def damage(path: Path) -> str | None:
    """Explain why testmon could not read its database; None if it can, or has none."""
    if not path.exists():
        return None
    try:
        connection = connect(path)
        try:
            answer = connection.execute("PRAGMA quick_check").fetchone()[0]
        finally:
            connection.close()
    except sqlite3.DatabaseError as error:
        # A database with a write-ahead log cannot be opened read-only in a folder that is read-only.
        return None if "readonly" in str(error) or "unable to open" in str(error) else str(error)
    return None if answer == "ok" else str(answer)


def remove(path: Path) -> list[Path]:
    """Remove testmon's database; return the removed files."""
    removed = []
    for suffix in ("", "-wal", "-shm", "-journal"):
        each = path.with_name(path.name + suffix)
        if each.exists():
            each.unlink()
            removed.append(each)
    return removed


class NoCollector:
    """Replaces testmon's coverage collector: lines come from the journals."""

    def start_testmon(self, test_name: str, next_test_name: str | None = None) -> None: ...

    def discard_current(self) -> None: ...

    def get_batch_coverage_data(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


@contextmanager
def own_source_tree() -> Iterator[None]:
    """Make testmon see data files as `SourceTree` does while entered."""
    original = testmon_core.SourceTree
    testmon_core.SourceTree = SourceTree
    try:
        yield
    finally:
        testmon_core.SourceTree = original
