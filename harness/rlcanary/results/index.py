"""A sqlite index of a folder of results files, so that one metric over 10,000 runs is read in milliseconds.

The JSON files stay the truth. The index (`.index.sqlite` in their folder) is a cache: opening it compares name, size,
time of change and inode of every file with what was indexed, and reads the files that differ. It may be deleted at any
time. A broken one is built anew, and where none can be kept (a read-only folder, a file system without locks) it lives
in memory for the one command.
"""

import math
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, overload

from rlcanary.errors import UserError
from rlcanary.results.journal import file_lock
from rlcanary.results.run_result import RunResult, UnreadableFile, read_run

INDEX_NAME = ".index.sqlite"
LOCK_NAME = ".index.lock"
PATIENCE_S = 60.0
VERSION = 1  # an index of another version is built anew
SHOWN_CHARACTERS = 40

TABLES = """
CREATE TABLE files (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, modified_ns INTEGER NOT NULL, bytes INTEGER NOT NULL, inode TEXT NOT NULL,
    problem TEXT, run_id TEXT, started_s REAL, git_commit TEXT, dirty INTEGER, exit_status INTEGER, environment TEXT
);
CREATE TABLE metrics (id INTEGER PRIMARY KEY, key TEXT NOT NULL, metric TEXT NOT NULL, UNIQUE (key, metric));
CREATE TABLE nodeids (id INTEGER PRIMARY KEY, nodeid TEXT NOT NULL UNIQUE);
CREATE TABLE measurements (
    metric INTEGER NOT NULL, file INTEGER NOT NULL, value REAL, other TEXT, nodeid INTEGER, PRIMARY KEY (metric, file)
) WITHOUT ROWID;
"""

Watch = Callable[[list[str]], Iterable[str]]


class Stamp(NamedTuple):
    """What tells whether a file is the one that was indexed."""

    name: str
    modified_ns: int
    bytes: int
    inode: str  # as text: sqlite's integers are signed


class IndexedFile(NamedTuple):
    """A file of the folder: a run, or a file that cannot be read as one, with the reason in `problem`."""

    id: int
    name: str
    modified_ns: int
    bytes: int
    inode: str
    problem: str | None
    run_id: str
    started_s: float  # since the epoch
    git_commit: str | None
    dirty: int | None
    exit_status: int | None
    environment: str | None


class Measurement(NamedTuple):
    """A metric in one file: a finite number, or None with what else it was in `other` (None there for NaN and
    infinities).
    """

    file: int
    value: float | None
    other: str | None
    nodeid: str | None


class Index:
    """An open index that agrees with the files. `files` lists all of them; `problem` says why it is not kept, if so."""

    def __init__(
        self, folder: Path, connection: sqlite3.Connection, files: list[IndexedFile], problem: str | None
    ) -> None:
        self.folder = folder
        self._connection = connection
        self.files = files
        self.problem = problem

    def metrics(self) -> dict[tuple[str, str], int]:
        """The id of every (test key, metric)."""
        rows = self._connection.execute("SELECT key, metric, id FROM metrics ORDER BY key, metric")
        return {(key, metric): number for key, metric, number in rows}

    def counts(self) -> dict[tuple[str, str], int]:
        """In how many files each (test key, metric) is."""
        rows = self._connection.execute(
            "SELECT key, metric, runs FROM metrics JOIN "
            "(SELECT metric AS number, count(*) AS runs FROM measurements GROUP BY metric) ON number = id "
            "ORDER BY key, metric"
        )
        return {(key, metric): runs for key, metric, runs in rows}

    def measurements(self, metric: int) -> list[Measurement]:
        nodeids = dict(self._connection.execute("SELECT id, nodeid FROM nodeids"))
        rows = self._connection.execute(
            "SELECT file, value, other, nodeid FROM measurements WHERE metric = ?", (metric,)
        )
        return [Measurement(file, value, other, nodeids.get(nodeid)) for file, value, other, nodeid in rows]

    def close(self) -> None:
        self._connection.close()

    def discard(self) -> None:
        """Closes the index and removes it: a folder without a single run is not ours to keep one in."""
        self._connection.close()
        if self.problem is None:
            _remove(self.folder)
            (self.folder / LOCK_NAME).unlink(missing_ok=True)


def unwatched(names: list[str]) -> Iterable[str]:
    return names


def open_index(folder: Path, watch: Watch = unwatched) -> Index:
    """The index of a folder, brought up to date. `watch` is given the names of the files to read and hands them on as they
    are read (a progress bar).

    Raises OSError if the folder cannot be listed.
    """
    try:
        return _kept_index(folder, watch)
    except (OSError, sqlite3.Error, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
    connection = sqlite3.connect(":memory:", isolation_level=None)
    _update(connection, folder, watch)
    return Index(folder, connection, _files(connection), f"the index of {folder} cannot be kept there: {reason}")


def _kept_index(folder: Path, watch: Watch) -> Index:
    connection = _connect(folder)
    try:
        files = _snapshot(connection)
        if files is None or {_stamp(file) for file in files} != stamps(folder):
            connection.close()
            with file_lock(folder / LOCK_NAME, PATIENCE_S):
                connection = _connect(folder)
                if _snapshot(connection) is None:
                    connection.close()
                    _remove(folder)
                    connection = _connect(folder)
                else:
                    connection.execute("COMMIT")
                _update(connection, folder, watch)
                connection.execute("BEGIN")
                files = _files(connection)
    except BaseException:
        connection.close()
        raise
    return Index(folder, connection, files, None)


def _connect(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(folder / INDEX_NAME, timeout=PATIENCE_S, isolation_level=None)


def _remove(folder: Path) -> None:
    for name in (INDEX_NAME, f"{INDEX_NAME}-journal"):
        (folder / name).unlink(missing_ok=True)


def _snapshot(connection: sqlite3.Connection) -> list[IndexedFile] | None:
    """Begins a read transaction, in which files and measurements are of one moment.

    None, without a transaction, for a new index, one of another version and a broken one.
    """
    try:
        connection.execute("BEGIN")
        if connection.execute("PRAGMA user_version").fetchone() == (VERSION,):
            return _files(connection)
        connection.execute("COMMIT")
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        pass
    return None


def _files(connection: sqlite3.Connection) -> list[IndexedFile]:
    return [IndexedFile._make(row) for row in connection.execute("SELECT * FROM files")]


def _stamp(file: IndexedFile) -> Stamp:
    return Stamp(*file[1:5])


def stamps(folder: Path) -> set[Stamp]:
    """Of every `*.json` of the folder but hidden ones."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        found = set()
        for name in os.listdir(descriptor):  # noqa: PTH208 - a descriptor has no Path
            if name.endswith(".json") and not name.startswith("."):
                try:
                    status = os.stat(name, dir_fd=descriptor)
                except FileNotFoundError:  # removed since the folder was listed, or a link to nowhere
                    found.add(Stamp(_storable(name), 0, 0, "0"))
                else:
                    found.add(Stamp(_storable(name), status.st_mtime_ns, status.st_size, str(status.st_ino)))
        return found
    finally:
        os.close(descriptor)


def _update(connection: sqlite3.Connection, folder: Path, watch: Watch) -> None:
    with _transaction(connection):
        if connection.execute("PRAGMA user_version").fetchone() != (VERSION,):
            for statement in TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        indexed = {_stamp(file): file.id for file in _files(connection)}
        found = stamps(folder)
        gone = indexed.keys() - found
        for stamp in gone:
            _forget(connection, indexed[stamp])
        if gone:
            connection.execute("DELETE FROM metrics WHERE id NOT IN (SELECT metric FROM measurements)")
        new = {stamp.name: stamp for stamp in sorted(found - indexed.keys())}
        writer = _Writer(connection)
        for name in watch(list(new)):
            writer.add(new[name], read_run(folder / name))


@contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _forget(connection: sqlite3.Connection, file: int) -> None:
    connection.execute("DELETE FROM measurements WHERE metric IN (SELECT id FROM metrics) AND file = ?", (file,))
    connection.execute("DELETE FROM files WHERE id = ?", (file,))


class _Writer:
    """Adds files to an index."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self._connection = connection
        self._metrics: dict[tuple[str, str], int] = {
            (key, metric): number for number, key, metric in connection.execute("SELECT * FROM metrics")
        }
        self._nodeids: dict[str, int] = {
            nodeid: number for number, nodeid in connection.execute("SELECT * FROM nodeids")
        }

    def add(self, stamp: Stamp, read: RunResult | UnreadableFile) -> None:
        if isinstance(read, UnreadableFile):
            self._add_file(stamp, read.reason, None, None, None, None, None, None)
            return
        file = self._add_file(
            stamp,
            None,
            _storable(read.run_id),
            read.start.timestamp(),
            _storable(read.git_commit),
            read.dirty,
            read.exit_status,
            _storable(read.environment),
        )
        rows = []
        for key, values in read.metrics.items():
            nodeid = self._nodeid(read.nodeids.get(key))
            rows += [(self._metric(key, name), file, *number_or_text(value), nodeid) for name, value in values.items()]
        self._connection.executemany("INSERT INTO measurements VALUES (?, ?, ?, ?, ?)", rows)

    def _add_file(self, stamp: Stamp, *columns: Any) -> int:
        marks = ", ".join("?" * (len(stamp) + len(columns)))
        return self._insert(f"INSERT INTO files VALUES (NULL, {marks})", *stamp, *columns)

    def _metric(self, key: str, metric: str) -> int:
        pair = (_storable(key), _storable(metric))
        if pair not in self._metrics:
            self._metrics[pair] = self._insert("INSERT INTO metrics VALUES (NULL, ?, ?)", *pair)
        return self._metrics[pair]

    def _nodeid(self, nodeid: str | None) -> int | None:
        if nodeid is None:
            return None
        nodeid = _storable(nodeid)
        if nodeid not in self._nodeids:
            self._nodeids[nodeid] = self._insert("INSERT INTO nodeids VALUES (NULL, ?)", nodeid)
        return self._nodeids[nodeid]

    def _insert(self, statement: str, *values: Any) -> int:
        number = self._connection.execute(statement, values).lastrowid
        assert number is not None
        return number


def number_or_text(value: Any) -> tuple[float | None, str | None]:
    """A metric's value as a finite number, or None and, unless it is NaN, an infinity or null, a glimpse of it."""
    if value is None:
        return None, None
    if isinstance(value, int | float):
        try:
            return (float(value), None) if math.isfinite(value) else (None, None)
        except OverflowError:  # a whole number beyond all floats
            return None, None
    text = repr(value)
    return None, _storable(text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 3]}...")


@overload
def _storable(text: str) -> str: ...
@overload
def _storable(text: str | None) -> str | None: ...
def _storable(text: str | None) -> str | None:
    """JSON may hold halves of surrogate pairs, which no UTF-8 text can."""
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()
