"""Index a folder of results files in sqlite, so that one metric over 10,000 runs is read in milliseconds.

The JSON files stay the truth. The index (`.index.sqlite` in their folder) is a cache: opening it compares name, size,
time of change and inode of every file with the indexed ones, and reads the files that differ. It may be deleted at any
time. A broken one is built anew, and where none can be kept (a read-only folder, a file system without locks) it lives
in memory for the one command.
"""

import datetime
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rlcanary.errors import UserError
from rlcanary.history.listing import Listing, Stamp, storable
from rlcanary.history.run_result import RunResult, UnreadableFile, read_run
from rlcanary.system.journal import file_lock
from rlcanary.system.printable import printable

INDEX_NAME = ".index.sqlite"
LOCK_NAME = ".index.lock"
PATIENCE_S = 60.0
VERSION = 4  # an index of another version is built anew
GLIMPSE_CHARACTERS = 40
LARGEST = 1e300
EVERY_FILE = (0, 2**63 - 1)

# A file is either a run or a problem. `inode` is text, because sqlite's integers are signed. `listing` holds the digest of
# the folder's listing that was indexed.
TABLES = """
CREATE TABLE files (
    id INTEGER PRIMARY KEY, name TEXT NOT NULL, modified_ns INTEGER NOT NULL, bytes INTEGER NOT NULL, inode TEXT NOT NULL,
    problem TEXT, run_id TEXT, started_s REAL, git_commit TEXT, dirty INTEGER, exit_status INTEGER, environment TEXT,
    host TEXT, copy_of TEXT
);
CREATE INDEX runs ON files (started_s, run_id) WHERE problem IS NULL AND copy_of IS NULL;
CREATE INDEX run_ids ON files (run_id);
CREATE TABLE metrics (id INTEGER PRIMARY KEY, key TEXT NOT NULL, metric TEXT NOT NULL, UNIQUE (key, metric));
CREATE TABLE nodeids (id INTEGER PRIMARY KEY, nodeid TEXT NOT NULL UNIQUE);
CREATE TABLE measurements (
    metric INTEGER NOT NULL, file INTEGER NOT NULL, value REAL, other TEXT, nodeid INTEGER, passed INTEGER NOT NULL,
    PRIMARY KEY (metric, file)
) WITHOUT ROWID;
CREATE TABLE listing (digest BLOB);
"""
MARK_COPIES = """
UPDATE files SET copy_of = nullif(
    (SELECT min(name) FROM files AS same WHERE same.run_id = files.run_id AND same.problem IS NULL), name
)
WHERE run_id IN (SELECT run_id FROM files WHERE problem IS NULL GROUP BY run_id HAVING count(*) > 1) OR copy_of IS NOT NULL
"""

Watch = Callable[[list[str]], Iterable[str]]


class Run(NamedTuple):
    """A run in the index."""

    file: str
    run_id: str
    started_s: float  # since the epoch
    git_commit: str | None
    dirty: bool | None
    exit_status: int | None
    environment: str | None
    host: str | None = None

    @property
    def start(self) -> datetime.datetime:
        """The time when the run started, in UTC."""
        return datetime.datetime.fromtimestamp(self.started_s, datetime.UTC)


class Index:
    """An open index that agrees with the files. `problem` is the reason why it is not kept on disk, if any."""

    def __init__(self, folder: Path, connection: sqlite3.Connection, problem: str | None) -> None:
        self.folder = folder
        self.problem = problem
        self._connection = connection
        self._metrics: dict[tuple[str, str], int] | None = None

    def run_numbers(self) -> list[int]:
        """Lists the numbers of all runs, oldest first, without copies of a run."""
        rows = self._ask("SELECT id FROM files WHERE problem IS NULL AND copy_of IS NULL ORDER BY started_s, run_id")
        return [number for (number,) in rows]

    def runs(self, numbers: Sequence[int] | None = None) -> dict[int, Run]:
        """Returns runs by number; all of them without numbers."""
        query = "SELECT id, name, run_id, started_s, git_commit, dirty, exit_status, environment, host FROM files"
        if numbers is None:
            rows = self._ask(query)
        else:
            rows = self._ask(f"{query} WHERE id IN ({', '.join('?' * len(numbers))})", *numbers)
        return {
            number: Run(file, run_id, started_s, commit, None if dirty is None else bool(dirty), *others)
            for number, file, run_id, started_s, commit, dirty, *others in rows
        }

    def problems(self) -> list[tuple[str, str]]:
        """Lists the files that are not runs of their own, with the reason."""
        return self._ask(
            "SELECT name, coalesce(problem, 'holds the same run as ' || copy_of || '; counted once') FROM files "
            "WHERE problem IS NOT NULL OR copy_of IS NOT NULL ORDER BY name"
        )

    def metrics(self) -> dict[tuple[str, str], int]:
        """Maps every (test key, metric) to its number in the index."""
        if self._metrics is None:
            rows = self._ask("SELECT key, metric, id FROM metrics ORDER BY key, metric")
            self._metrics = {(key, metric): number for key, metric, number in rows}
        return self._metrics

    def counts(self) -> dict[tuple[str, str], int]:
        """Counts the files of each (test key, metric)."""
        rows = self._ask(
            "SELECT key, metric, runs FROM metrics JOIN "
            "(SELECT metric AS number, count(*) AS runs FROM measurements GROUP BY metric) ON number = id "
            "ORDER BY key, metric"
        )
        return {(key, metric): runs for key, metric, runs in rows}

    def values(self, metric: int, within: tuple[int, int] = EVERY_FILE) -> dict[int, float | None]:
        """Returns a metric by number of the run; None if it was not a finite number.

        Runs in which it was not a number at all are left out, and those in which its test did not pass or which
        were cut short. `within` are the first and last number of the files to look at.
        """
        query = "SELECT file, value FROM measurements WHERE metric = ? AND file BETWEEN ? AND ? AND other IS NULL AND passed"
        return dict(self._ask(query, metric, *within))

    def not_passed(self, metric: int, within: tuple[int, int] = EVERY_FILE) -> int:
        """Counts the runs in which the metric was measured by a test that did not pass at once, or which were cut short."""
        query = (
            "SELECT count(*) FROM measurements JOIN files ON id = file "
            "WHERE metric = ? AND file BETWEEN ? AND ? AND NOT passed AND copy_of IS NULL"
        )
        return int(self._ask(query, metric, *within)[0][0])

    def others(self, metric: int, within: tuple[int, int] = EVERY_FILE) -> list[tuple[str, str]]:
        """Returns a text of the metric per file in which it is not a number, and the file's name; newest first."""
        return self._ask(
            "SELECT other, name FROM measurements JOIN files ON id = file "
            "WHERE metric = ? AND file BETWEEN ? AND ? AND other IS NOT NULL AND passed ORDER BY started_s DESC",
            metric,
            *within,
        )

    def nodeids(self, metric: int, within: tuple[int, int] = EVERY_FILE) -> dict[str, int]:
        """Counts the files with the metric by test; the test of the newest run comes last."""
        found = self._ask(
            "SELECT nodeid, count(*) FROM measurements WHERE metric = ? AND file BETWEEN ? AND ? AND nodeid IS NOT NULL "
            "GROUP BY nodeid",
            metric,
            *within,
        )
        newest = "SELECT max(started_s) FROM files, measurements WHERE metric = ? AND nodeid = ? AND files.id = file"
        if len(found) > 1:
            found.sort(key=lambda row: self._ask(newest, metric, row[0]))
        name = "SELECT nodeid FROM nodeids WHERE id = ?"
        return {self._ask(name, number)[0][0]: count for number, count in found}

    def _ask(self, query: str, *values: Any) -> list[Any]:
        try:
            return self._connection.execute(query, values).fetchall()
        except sqlite3.DatabaseError as error:
            raise UserError(
                f"the index {self.folder / INDEX_NAME} is damaged ({error}); delete it and run the command again"
            ) from error

    def close(self) -> None:
        self._connection.close()

    def discard(self) -> None:
        """Closes the index and removes it: a folder without a single run is not rlcanary's to keep one in."""
        self.close()
        if self.problem is None:
            _remove(self.folder)
            (self.folder / LOCK_NAME).unlink(missing_ok=True)


def unwatched(names: list[str]) -> Iterable[str]:
    return names


def open_index(folder: Path, watch: Watch = unwatched) -> Index:
    """Opens the index of a folder and updates it.

    `watch` is given the names of the files to read and yields them as they are read (a progress bar).

    Raises:
        OSError: if the folder cannot be listed.
    """
    try:
        try:
            return _kept_index(folder, watch)
        except sqlite3.OperationalError:
            # A process that still had a broken index open, which was replaced, took the new one's journal for its own.
            return _kept_index(folder, watch)
    except (OSError, sqlite3.Error, UserError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
    connection = sqlite3.connect(":memory:", isolation_level=None)
    _update(connection, folder, watch)
    return Index(folder, connection, f"the index of {folder} cannot be kept there: {reason}")


def _kept_index(folder: Path, watch: Watch) -> Index:
    connection = _connect(folder)
    try:
        if not _is_up_to_date(connection, folder):
            connection.close()
            # Under the lock no other process removes the index.
            with file_lock(folder / LOCK_NAME, PATIENCE_S):
                connection = _connect(folder)
                if _indexed(connection) is None:
                    connection.close()
                    _remove(folder)
                    connection = _connect(folder)
                else:
                    connection.execute("COMMIT")
                _update(connection, folder, watch)
                connection.execute("BEGIN")
    except BaseException:
        connection.close()
        raise
    return Index(folder, connection, None)


def _is_up_to_date(connection: sqlite3.Connection, folder: Path) -> bool:
    try:
        return _indexed(connection) == Listing(folder).digest
    except sqlite3.Error:  # another process may just be replacing a broken index
        return False


def _connect(folder: Path) -> sqlite3.Connection:
    return sqlite3.connect(folder / INDEX_NAME, timeout=PATIENCE_S, isolation_level=None)


def _remove(folder: Path) -> None:
    for name in (INDEX_NAME, f"{INDEX_NAME}-journal"):
        (folder / name).unlink(missing_ok=True)


def _indexed(connection: sqlite3.Connection) -> bytes | None:
    """Begins a read transaction, in which all answers are of one moment, and returns the digest of the indexed listing.

    Returns None, without a transaction, for a new index, one of another version and a broken one.
    """
    try:
        connection.execute("BEGIN")
        if connection.execute("PRAGMA user_version").fetchone() == (VERSION,):
            connection.execute("SELECT max(started_s) FROM files").fetchone()
            (digest,) = connection.execute("SELECT digest FROM listing").fetchone()
            return bytes(digest)
        connection.execute("COMMIT")
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError:
        pass
    return None


def _update(connection: sqlite3.Connection, folder: Path, watch: Watch) -> None:
    with _transaction(connection):
        if connection.execute("PRAGMA user_version").fetchone() != (VERSION,):
            for statement in TABLES.split(";"):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {VERSION}")
        listing = Listing(folder)
        found = listing.stamps()
        rows = connection.execute("SELECT id, name, modified_ns, bytes, inode FROM files")
        indexed = {Stamp._make(stamp): number for number, *stamp in rows}
        gone = indexed.keys() - found
        for stamp in gone:
            _forget(connection, indexed[stamp])
        if gone:
            connection.execute("DELETE FROM metrics WHERE id NOT IN (SELECT metric FROM measurements)")
        new = {stamp.name: stamp for stamp in sorted(found - indexed.keys())}
        writer = _Writer(connection)
        for name in watch(list(new)):
            writer.add(new[name], read_run(folder / name))
        connection.execute(MARK_COPIES)
        connection.execute("DELETE FROM listing")
        connection.execute("INSERT INTO listing VALUES (?)", (listing.digest,))


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
            self._add_file(*stamp, read.reason, None, None, None, None, None, None, None)
            return
        file = self._add_file(
            *stamp,
            None,
            printable(read.run_id),
            read.start.timestamp(),
            None if read.git_commit is None else printable(read.git_commit),
            read.dirty,
            read.exit_status,
            None if read.environment is None else printable(read.environment),
            None if read.host is None else printable(read.host),
        )
        rows = []
        for key, values in read.metrics.items():
            nodeid, passed = self._nodeid(read.nodeids.get(key)), read.counts(key)
            rows += [
                (self._metric(key, name), file, *number_or_glimpse(value), nodeid, passed)
                for name, value in values.items()
            ]
        self._connection.executemany("INSERT OR REPLACE INTO measurements VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _add_file(self, *columns: Any) -> int:
        return self._insert(f"INSERT INTO files VALUES (NULL, {', '.join('?' * len(columns))}, NULL)", *columns)

    def _metric(self, key: str, metric: str) -> int:
        pair = (printable(key), printable(metric))
        if pair not in self._metrics:
            self._metrics[pair] = self._insert("INSERT INTO metrics VALUES (NULL, ?, ?)", *pair)
        return self._metrics[pair]

    def _nodeid(self, nodeid: str | None) -> int | None:
        if nodeid is None:
            return None
        nodeid = printable(nodeid)
        if nodeid not in self._nodeids:
            self._nodeids[nodeid] = self._insert("INSERT INTO nodeids VALUES (NULL, ?)", nodeid)
        return self._nodeids[nodeid]

    def _insert(self, statement: str, *values: Any) -> int:
        number = self._connection.execute(statement, values).lastrowid
        assert number is not None
        return number


def number_or_glimpse(value: Any) -> tuple[float | None, str | None]:
    """Returns a metric's value as a finite number, or None and a short text of any other value.

    There is no text for NaN, an infinity or null. A number beyond LARGEST counts as infinite: differences of such
    numbers are.
    """
    if value is None:
        return None, None
    if isinstance(value, int | float):
        return (float(value), None) if abs(value) <= LARGEST else (None, None)
    try:
        text = repr(value)
    except RecursionError:
        text = f"a {type(value).__name__} nested too deep"
    return None, storable(text if len(text) <= GLIMPSE_CHARACTERS else f"{text[: GLIMPSE_CHARACTERS - 3]}...")
