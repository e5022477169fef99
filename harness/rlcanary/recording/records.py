"""Keep the records of one process of a run, in its journal on disk or in memory while the disk fails."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

from rlcanary.recording.json_text import json_text

if TYPE_CHECKING:
    from rlcanary.system.journal import Journal, Record


class Records:
    """Appends records.

    Disk trouble raises nothing: it is listed in `problems`, and records wait in memory until the disk recovers.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._journal: Journal | None = None
        self._kept: list[str] = []
        self._waiting: deque[str] = deque()

    def open(self, path: Path) -> None:
        """Begins a journal with the records so far.

        Raises:
            OSError: if it cannot be made.
        """
        # Most runs of pytest record nothing, and every start would pay for these.
        from rlcanary.recording.assembly import JOURNAL_KIND, JOURNAL_VERSION
        from rlcanary.system.journal import Journal

        self._journal = Journal(path, JOURNAL_KIND, JOURNAL_VERSION, new=True)
        self._write_waiting()

    def append(self, record: Record) -> None:
        text = json_text(record)
        self._kept.append(text)
        self.append_line(text)

    def append_line(self, text: str) -> None:
        """Appends a record whose JSON needs no encoder and which the caller remembers."""
        if self._journal is None or self._waiting:
            self._waiting.append(text)
            self._write_waiting()
            return
        try:
            self._journal.append_line(text)
        except OSError as error:
            self._waiting.append(text)
            self._note(error)

    def _write_waiting(self) -> None:
        while self._journal is not None and self._waiting:
            text = self._waiting.popleft()
            try:
                self._journal.append_line(text)
            except OSError as error:
                self._waiting.appendleft(text)
                self._note(error)
                return

    def _note(self, error: OSError) -> None:
        assert self._journal is not None
        problem = f"{self._journal.path}: {error.strerror}; unwritten records are kept in memory"
        if problem not in self.problems:
            self.problems.append(problem)

    def sync(self) -> None:
        """Flushes the journal to the disk."""
        if self._journal is not None:
            try:
                self._journal.sync()
            except OSError as error:
                self._note(error)

    def missing(self) -> list[str]:
        """Returns the JSON of the records that are in no journal: all appended ones if the journal is gone."""
        if self._journal is None or not self._journal.path.exists():
            return self._kept
        self._write_waiting()
        return list(self._waiting)

    def close(self) -> None:
        if self._journal is not None:
            self._journal.close()
