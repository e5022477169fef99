"""Append-only journals: files of JSON lines that outlive the process that writes them.

The first line names the kind of journal and its version. Each later line is a record:

    {"journal": "results", "version": 1}
    {"record": "metric", "name": "loss", "value": 0.5}

A record is passed to the operating system as a whole line before `append` returns. So it survives `os._exit`, SIGKILL
and a crash of the interpreter. With `sync` it also survives a power cut. If a record cannot be written whole (a full
disk), the caller gets an OSError. Its half line is closed with `TORN` before the next record, so no other record is
lost and the half line is never taken for a record. Readers report every line that they cannot use.
"""

import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rlcanary.errors import UserError

Record = dict[str, Any]
Locking = Callable[[int, int], None]

TORN = b" (torn)\n"
"""The end of a torn line. No JSON ends like this, so a record that lacks only its newline is not read as a written one.
"""


class UnreadableJournal(UserError):
    """The file is no journal of the expected kind and version. The message has the file and the reason."""


class Damage(NamedTuple):
    """A line of a journal that holds no record."""

    path: Path
    line: int  # from 1
    reason: str
    text: bytes
    unfinished: bool  # half a line: its `append` never returned, or still runs in another process

    def __str__(self) -> str:
        return f"{self.path} line {self.line} is damaged ({self.reason}): {self.text[:60]!r}"


class Contents(NamedTuple):
    records: list[Record]
    damage: list[Damage]


class Journal:
    """One process's journal, open for appending, and locked while it is open. Threads may share it.

    Args:
        path: The file. It is created if it is missing.
        kind: The kind of journal, such as `results`.
        version: The version of its record format.
        new: Refuse a file that exists.
        locking: `fcntl.lockf` or `fcntl.flock`. A `lockf` lock ends with this process, even if a forked child lives on,
            but also when this process closes the file after reading it elsewhere. A `flock` lock is shared with forked
            children.

    Raises:
        BlockingIOError: Another process has the journal open.
        FileExistsError: The file exists, and `new` is set.
        UnreadableJournal: The file is no journal of this kind and version.
        OSError: The file cannot be written or locked, or the disk is full.
    """

    def __init__(
        self, path: Path, kind: str, version: int, *, new: bool = False, locking: Locking = fcntl.lockf
    ) -> None:
        self.path = path
        self._locking = locking
        self._turn = threading.RLock()  # a signal handler may append while this thread does
        self._pid = os.getpid()
        self._in_doubt = True  # whether the last line may lack its end
        self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | (os.O_EXCL if new else 0), 0o644)
        status = os.fstat(self._descriptor)
        self._file = status.st_dev, status.st_ino
        try:
            try_lock(self._descriptor, path, locking)
            self._begin(header_line(kind, version))
        except BaseException:
            os.close(self._descriptor)
            raise

    def _begin(self, header: str) -> None:
        """Write the header of an empty file, or check an existing header."""
        first = os.pread(self._descriptor, 4096, 0).split(b"\n")[0]
        size = os.fstat(self._descriptor).st_size
        if size == len(first) and f"{header}\n".encode().startswith(
            first
        ):  # empty, or torn in the middle of its header
            os.ftruncate(self._descriptor, 0)
            try:
                self.append_line(header)
            except OSError:
                self.path.unlink(missing_ok=True)
                raise
        elif problem := header_problem(first, header):
            raise UnreadableJournal(f"{self.path}: {problem}")

    @property
    def closed(self) -> bool:
        return self._descriptor < 0

    def append(self, record: Mapping[str, Any], sync: bool = False) -> None:
        """Write one record. With `sync`, wait until it is on disk.

        Raises:
            OSError: The record could not be written whole, or the file was deleted. It counts as not written.
            ValueError: The record has no JSON form.
            TypeError: The record has no JSON form.
        """
        self.append_line(_encode(record), sync)

    def append_line(self, text: str, sync: bool = False) -> None:
        """Write one record that is already JSON text, on one line."""
        line = text.encode() + b"\n"
        if os.getpid() != self._pid:  # forked, perhaps while another thread held the lock
            self._turn, self._pid, self._in_doubt = threading.RLock(), os.getpid(), True
        with self._turn:
            size = self._size()
            if self._in_doubt and size and os.pread(self._descriptor, 1, size - 1) != b"\n":
                line = TORN + line
            self._in_doubt = True
            while line:
                line = line[os.write(self._descriptor, line) :]
            self._in_doubt = False
            if sync:
                os.fsync(self._descriptor)

    def _size(self) -> int:
        """Return the size in bytes. Reopen the file if code under test closed the descriptor."""
        if self.closed:
            raise ValueError(f"{self.path} is closed")
        status = self._status()
        if status is None:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND)
            try_lock(self._descriptor, self.path, self._locking)
            self._in_doubt = True
            status = self._status()
        if status is None or status.st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "the journal was deleted while it was open", str(self.path))
        return status.st_size

    def _status(self) -> os.stat_result | None:
        """Return the file's status. None if the descriptor is closed or now belongs to another file."""
        try:
            status = os.fstat(self._descriptor)
        except OSError:
            return None
        return status if (status.st_dev, status.st_ino) == self._file else None

    def sync(self) -> None:
        """Wait until every record is on disk.

        Raises:
            OSError: The disk failed, or the file was deleted.
        """
        self._size()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, which also releases its lock."""
        if not self.closed:
            is_ours = self._status() is not None
            descriptor, self._descriptor = self._descriptor, -1
            if is_ours:
                os.close(descriptor)


def read_journal(
    path: Path, kind: str, version: int, problem_of: Callable[[Record], str | None] = lambda _: None
) -> Contents:
    """Read all records of a journal, and list the unusable lines.

    A journal with a half-written header has no records. `problem_of` returns why an object is no record, or None.

    Raises:
        UnreadableJournal: The file is no journal of this kind and version.
        OSError: The file cannot be read.
    """
    header = header_line(kind, version)
    first, newline, rest = path.read_bytes().partition(b"\n")
    if not newline and header.encode().startswith(first):
        return Contents([], [])
    if problem := header_problem(first, header):
        raise UnreadableJournal(f"{path}: {problem}")
    return parse_records(path, rest, 2, problem_of)


def parse_records(
    path: Path, text: bytes, first_line: int, problem_of: Callable[[Record], str | None] = lambda _: None
) -> Contents:
    """Parse the records in a part of a journal that begins at this line."""
    records: list[Record] = []
    damage: list[Damage] = []
    *lines, rest = text.split(b"\n")
    for number, line in enumerate(lines, start=first_line):
        try:
            record = _decode(line.decode())
            problem = problem_of(record) if isinstance(record, dict) else "not an object"
        except (ValueError, RecursionError) as error:
            problem = str(error)
        if problem is None:
            records.append(record)
        else:
            damage.append(Damage(path, number, problem, line, unfinished=line.endswith(TORN[:-1])))
    if rest:
        damage.append(Damage(path, first_line + len(lines), "it is cut off", rest, unfinished=True))
    return Contents(records, damage)


def header_line(kind: str, version: int) -> str:
    return json.dumps({"journal": kind, "version": version})


def header_problem(line: bytes, expected: str) -> str | None:
    """Return why a journal with this first line does not match the expected header, or None."""
    if line == expected.encode():
        return None
    known = json.loads(expected)
    try:
        header = _decode(line.decode())
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("journal") != known["journal"]:
        return f"not a journal of {known['journal']}: it begins with {line[:60]!r}"
    version = f"{header.get('version')!r:.20}"
    return f"version {version} of a journal of {known['journal']}; this rlcanary reads version {known['version']}"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_encode = json.JSONEncoder(allow_nan=False).encode
_decode = json.JSONDecoder(parse_constant=_refuse).decode


def try_lock(descriptor: int, path: Path, locking: Locking = fcntl.lockf) -> None:
    """Lock an open file.

    Raises:
        BlockingIOError: Another process holds the lock.
        OSError: The file system has no locks.
    """
    try:
        locking(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError) as error:  # EAGAIN or EACCES, depending on the system
        raise BlockingIOError(error.errno, "locked by another process", str(path)) from error
    except OSError as error:
        raise OSError(error.errno, f"the file system cannot lock it: {error.strerror}", str(path)) from error


@contextmanager
def locked(path: Path, wait: Callable[[], object], locking: Locking = fcntl.flock) -> Iterator[None]:
    """Hold the lock of a file, which is created if it is missing.

    Args:
        path: The file.
        wait: Called before each new attempt. It raises to give up.
        locking: `fcntl.flock` also excludes other threads; `fcntl.lockf` excludes other hosts on a shared disk.

    Raises:
        OSError: The file cannot be created or locked.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        while True:
            try:
                try_lock(descriptor, path, locking)
                break
            except BlockingIOError:
                wait()
                time.sleep(0.02)
        yield
    finally:
        os.close(descriptor)


@contextmanager
def file_lock(path: Path, patience_s: float = 60.0) -> Iterator[None]:
    """Hold the lock of a file for milliseconds or seconds, against other processes.

    Raises:
        UserError: Another process has held the lock for `patience_s` seconds.
        OSError: The file cannot be created or locked.
    """
    deadline = time.monotonic() + patience_s

    def wait() -> None:
        if time.monotonic() > deadline:
            raise UserError(f"another process has held {path} for {patience_s:.0f} s; end it and start again")

    with locked(path, wait, fcntl.lockf):
        yield
