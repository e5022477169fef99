"""Read the records that a run's processes have written so far."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rlcanary.selection.injected.rlcanary_recorder.core import UNKNOWN
from rlcanary.selection.injected.rlcanary_recorder.writing import KIND, LOST, VERSION
from rlcanary.system.journal import Record, header_line, header_problem, parse_records

HEADER = header_line(KIND, VERSION)


class Journals:
    """The journals of a run (see `rlcanary_recorder.writing`), each read on from its last position."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.offsets: dict[Path, int] = {}
        self.lines: dict[Path, int] = {}
        self.lost: set[Path] = set()

    def new_lines(self) -> Iterator[tuple[str, list[str]]]:
        """Return the process and the fields of every whole line that was not returned before.

        A line that is being written comes next time. Damage is reported as a problem, and makes every test of the run
        depend on everything.
        """
        for path in sorted(self.folder.glob("*.journal")):
            offset = self.offsets.get(path, 0)
            if path.stat().st_size == offset:
                continue
            with path.open("rb") as stream:
                stream.seek(offset)
                text = stream.read()
            whole = text[: text.rfind(b"\n") + 1]
            self.offsets[path] = offset + len(whole)
            yield from self._records(path, whole)
        for path in sorted(set(self.folder.glob(f"*{LOST}")) - self.lost):
            self.lost.add(path)
            yield from damage(
                path, f"{path.stem}: the record of this process could not be written, perhaps because the disk is full"
            )

    def _records(self, path: Path, whole: bytes) -> Iterator[tuple[str, list[str]]]:
        line = self.lines.get(path, 1)
        self.lines[path] = line + whole.count(b"\n")
        if line == 1 and whole:
            first, _, whole = whole.partition(b"\n")
            line = 2
            if problem := header_problem(first, HEADER):
                yield from damage(path, f"{path}: {problem}")
                whole = b""
        contents = parse_records(path, whole, line, problem_of)
        for record in contents.records:
            yield process_of(path), record["fields"]
        for damaged in contents.damage:
            yield from damage(path, str(damaged))


def process_of(path: Path) -> str:
    return path.stem.replace("-", ":", 1)


def damage(path: Path, problem: str) -> list[tuple[str, list[str]]]:
    process = process_of(path)
    return [(process, ["p", f"{problem}; the tests of this run depend on all code"]), (process, ["a", UNKNOWN])]


def problem_of(record: Record) -> str | None:
    fields = record.get("fields")
    if isinstance(fields, list) and fields and all(isinstance(field, str) for field in fields):
        return None
    return "not a list of fields"
