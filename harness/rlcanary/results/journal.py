"""Append-only journals: one file of JSON lines for each process of a run, so that what was tracked outlives the
process.

Every record is handed to the operating system in one write as it happens, so it survives `os._exit`, SIGKILL and a crash
of the interpreter. `sync` also brings it through a power cut or a crash of the machine; it costs milliseconds and is
called once at the end of each test that tracks something, not for each record.

A journal is locked (`fcntl.lockf`) for as long as its process lives. The kernel drops that lock however the process
ends and a forked child does not inherit it, so an unlocked journal is one whose process is gone.
"""

import errno
import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rlcanary.errors import UserError
from rlcanary.results.json_text import json_text

Record = dict[str, Any]


class Journal:
    """One process's journal, open for appending. Raises FileExistsError if the path is taken."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.closed = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o644)
        lock(self._descriptor, path)

    def append(self, record: Record) -> None:
        self.append_line(json_text(record))

    def append_line(self, text: str) -> None:
        """For a record whose JSON is known without an encoder."""
        line = text.encode() + b"\n"
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(errno.ENOSPC, f"only {written} of {len(line)} bytes could be written", str(self.path))

    def sync(self) -> None:
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Closes the file, which also drops its lock."""
        if not self.closed:
            self.closed = True
            os.close(self._descriptor)


class JournalContents(NamedTuple):
    records: list[Record]
    problems: list[str]  # one line for each line of the journal that could not be read


def read_journal(path: Path) -> JournalContents:
    """All readable records of a journal.

    A torn line (the process was ended in the middle of a write) is named in `problems`.
    """
    lines = path.read_bytes().splitlines()
    try:
        # All at once takes a third of the time.
        return JournalContents(json.loads(b"[" + b",".join(lines) + b"]"), [])
    except ValueError:
        pass  # below, line by line
    records: list[Record] = []
    problems: list[str] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            problems.append(f"{path.name} line {number} is torn and could not be merged: {line[:60]!r}")
    return JournalContents(records, problems)


def lock(descriptor: int, path: Path) -> None:
    """Locks an open file for this process.

    Raises BlockingIOError if another process holds it, UserError if the file system has no locks.
    """
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise BlockingIOError(error.errno, "locked by another process", str(path)) from error
        raise UserError(
            f"the file system of {path.parent} does not support locks ({error.strerror}); "
            "choose a folder on another one with --rlcanary-results"
        ) from error


@contextmanager
def file_lock(path: Path, patience_s: float = 60.0) -> Iterator[None]:
    """Holds the lock of a file, which is made if need be; for work that takes milliseconds or seconds.

    Raises UserError after `patience_s` seconds.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    deadline = time.monotonic() + patience_s
    try:
        while True:
            try:
                lock(descriptor, path)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UserError(
                        f"another process has held {path} for {patience_s:.0f} s; end it and start again"
                    ) from None
                time.sleep(0.02)
            else:
                break
        yield
    finally:
        os.close(descriptor)
