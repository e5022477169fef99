"""Read the records of a run, by test."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlcanary.selection.dependencies import Dependencies, Run
from rlcanary.selection.journal import Journals
from rlcanary.selection.source_map import SourceMap


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
