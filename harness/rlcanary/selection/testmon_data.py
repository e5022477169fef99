"""Connect records with pytest-testmon: its source tree, its fingerprints and its database.

Every private name of pytest-testmon that rlcanary relies on is used in this module. testmon's database gets two
additions. Every test recorded with rlcanary depends on a file that does not exist, `RECORDED`: this marks tests
recorded without it, and a new format of the records makes testmon run every test again. A table keeps the output of
`explain`.
"""

from __future__ import annotations

import os
import sqlite3
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from testmon import testmon_core
from testmon.process_code import Block, Module, create_fingerprint, methods_to_checksums

from rlcanary.selection import questions
from rlcanary.selection.injected.rlcanary_recorder.files import EXISTS, LISTING, content, digest
from rlcanary.selection.stored import TABLE, packed

if TYPE_CHECKING:
    from rlcanary.selection.dependencies import Dependencies

RECORDED = "rlcanary.recorded"
FORMAT = "4"
AGAIN = (f"{questions.MARK}{EXISTS}", f"{questions.MARK}{LISTING}")  # questions whose answer a run changes


class PythonFile(Module):  # type: ignore[misc]
    """A Python file whose blocks are those of `source_file`."""

    _blocks: list[Any] | None

    @property
    def blocks(self) -> list[Any]:
        if self._blocks is None:
            from rlcanary.selection.source_file import parsed  # not needed where no file changed

            source = parsed(self.source_code.encode())
            found = [*source.blocks, *source.constants] if source.is_valid else []
            self._blocks = [Block(block.start, block.end, block.code, block.name) for block in found]
        return self._blocks


class SourceTree(testmon_core.SourceTree):  # type: ignore[misc]
    """The file view of testmon, with data files of any kind and name, and with questions.

    Args:
        rootdir: the project.
        installed: the installed packages with their releases; empty until they are known.
        environment: the variables with which the session began.
    """

    def __init__(self, rootdir: str, *, installed: list[str], environment: Mapping[str, str] | None = None) -> None:
        super().__init__(rootdir)
        self.installed = installed
        self.environment = dict(os.environ if environment is None else environment)
        self.listed: dict[str, frozenset[str]] = {}  # names by folder

    def get_file(self, filename: str) -> Any:
        if filename not in self.cache:
            if filename == RECORDED:
                self.cache[filename] = whole_file(filename, FORMAT, 0.0)
            elif questions.is_question(filename):
                self.cache[filename] = whole_file(filename, self.answer(filename), 0.0)
            elif filename.endswith(".py"):
                module = super().get_file(filename)
                if module is not None:
                    module.__class__ = PythonFile
            else:
                self.cache[filename] = data_file(Path(self.rootdir), filename)
        return self.cache[filename]

    def answer(self, filename: str) -> str:
        if filename == questions.PACKAGES:
            return digest("".join(self.installed[-1:]).encode())
        return questions.answer(Path(self.rootdir), filename, self.environment, self.listed)


def data_file(root: Path, filename: str) -> Any:
    path = root / filename
    found = content(str(path))
    return whole_file(filename, found, path.stat().st_mtime) if found else None


def whole_file(filename: str, content: str, mtime: float) -> Any:
    # testmon wants a text only where there is nothing else to tell the file by.
    module = Module(source_code=None if content else "", mtime=mtime, ext="data", fs_fsha=content, filename=filename)
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

    def of_answer(self, question: str, asked: str) -> dict[str, Any]:
        """Take the answer that code got, or the present one if none was recorded."""
        tree = self.data.source_tree
        if question.endswith(AGAIN) and not asked:
            asked = tree.answer(question)
        answer = asked or tree.get_file(question).fs_fsha
        return {"filename": question, "mtime": 0.0, "fsha": answer, "method_checksums": methods_to_checksums([answer])}

    def is_outdated(self, file: str) -> bool:
        """Tell if testmon read a file before it got its present content."""
        module = self.data.source_tree.get_file(file)
        try:
            return module is not None and module.mtime != os.stat(f"{self.data.rootdir}/{file}").st_mtime
        except OSError:
            return True

    def of_test(
        self, test: str, dependencies: Dependencies, reports: Mapping[str, Any], written: Container[str] = ()
    ) -> dict[str, Any]:
        """Build the rows that testmon stores of one execution of a test.

        A file that changed while the run used it gets a fingerprint that matches nothing.
        """
        lines: dict[str, set[int]] = dict(dependencies.lines)
        lines.setdefault(testmon_core.home_file(test), {1})
        rows = [self.of_file(RECORDED, frozenset({1}))]
        for file, at in sorted(lines.items()):
            if file in dependencies.changed or (file not in written and self.is_outdated(file)):
                rows.append(nothing_like(file))
            else:
                rows.append(self.of_file(file, frozenset(at)))
        answers = {questions.PYTEST_OPTIONS: "", questions.PACKAGES: "", **dependencies.answers}
        rows += [self.of_answer(question, asked) for question, asked in sorted(answers.items())]
        forced = test in self.data.stable_test_names and test not in self.data.failing_tests
        return {
            "deps": [row for row in rows if row is not None],
            "forced": forced,
            **testmon_core.process_result(reports),
        }


def nothing_like(file: str) -> dict[str, Any]:
    """Return a fingerprint that matches nothing, as testmon gives to tests that it has not seen yet."""
    return {"filename": file, "method_checksums": methods_to_checksums(["0match"]), "mtime": None, "fsha": None}


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
        """SELECT te.test_name FROM test_execution te WHERE te.environment_id = ? AND EXISTS
           (SELECT 1 FROM test_execution_file_fp link WHERE link.test_execution_id = te.id
            AND link.fingerprint_id IN (SELECT id FROM file_fp WHERE filename = ?))""",
        (data.exec_id, RECORDED),
    )
    return sorted(set(data.all_tests) - {row[0] for row in rows})


def invalidate(data: Any, tests: Iterable[str]) -> None:
    """Make testmon select these tests, whatever their files hold."""
    executions = {test: {"deps": [nothing_like(testmon_core.home_file(test))]} for test in tests}
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


def share_packages(data: Any) -> bool:
    """Let all processes of a run go by the packages that the process which listed them found.

    Return true if testmon has judged the tests by others.
    """
    tree = data.source_tree
    known = data.db.fetch_attribute(questions.PACKAGES, default="")
    if not tree.installed:
        tree.installed.append(known)
        tree.cache.pop(questions.PACKAGES, None)
        return True
    if tree.installed[-1] != known:
        data.db.write_attribute(questions.PACKAGES, tree.installed[-1])
    return False


def decision(select: Any) -> dict[str, Any]:
    """Return what testmon's plugin deselects, and the seconds it orders tests by, for another process."""
    return {
        "files": list(select.deselected_files),
        "tests": list(select.deselected_tests),
        "durations": dict(select.testmon_data.avg_durations),
    }


def decide_as(select: Any, decided: Mapping[str, Any]) -> None:
    """Make testmon's plugin deselect and order tests as the process does whose `decision` this is."""
    select.deselected_files, select.deselected_tests = decided["files"], decided["tests"]
    select.testmon_data = SimpleNamespace(avg_durations=defaultdict(int, decided["durations"]))


class NoCollector:
    """Replaces testmon's coverage collector: lines come from the journals."""

    def start_testmon(self, test_name: str, next_test_name: str | None = None) -> None: ...

    def discard_current(self) -> None: ...

    def get_batch_coverage_data(self) -> dict[str, Any]:
        return {}

    def close(self) -> None: ...


@contextmanager
def own_source_tree(environment: Mapping[str, str] | None = None) -> Iterator[None]:
    """Make testmon see files as `SourceTree` does while entered. It leaves out patch releases of packages by itself."""
    tree, drop = testmon_core.SourceTree, testmon_core.drop_patch_version
    installed: list[str] = []

    def noted(packages: str) -> Any:
        installed.append(packages)
        return drop(packages)

    testmon_core.SourceTree = partial(SourceTree, installed=installed, environment=environment)
    testmon_core.drop_patch_version = noted
    try:
        yield
    finally:
        testmon_core.SourceTree, testmon_core.drop_patch_version = tree, drop
