"""Save each test's dependencies in testmon's database as soon as the test is over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rlcanary.selection import testmon_data
from rlcanary.selection.dependencies import Dependencies
from rlcanary.selection.recording import Recording
from rlcanary.selection.unseen import unseen_in


class Saver:
    """Saves the tests of one run, in the process that owns testmon's database."""

    def __init__(self, data: Any, recording: Recording) -> None:
        self.data, self.recording = data, recording
        self.fingerprints = testmon_data.Fingerprints(data)
        self.saved: dict[str, tuple[Dependencies, int]] = {}

    def save(self, tests: Mapping[str, Mapping[str, Any]]) -> None:
        """Save these tests, given with their reports by phase."""
        self.recording.read()
        self.store({test: self.recording.dependencies(test) for test in tests}, tests)

    def save_late(self, reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Save again the tests with records that arrived after they were over: work that no test waited for."""
        self.recording.read()
        late = {
            test: self.recording.dependencies(test)
            for test, (found, lines) in self.saved.items()
            if self.recording.run.changed_since(lines, found) and reports.get(test)
        }
        self.store({test: found for test, found in late.items() if found != self.saved[test][0]}, reports)
        self.note(late)

    def store(self, tests: Mapping[str, Dependencies], reports: Mapping[str, Mapping[str, Any]]) -> None:
        written = self.recording.run.written
        executions = {
            test: self.fingerprints.of_test(test, found, reports[test], written) for test, found in tests.items()
        }
        if executions:
            testmon_data.save(self.data, executions, tests)
        self.note(tests)

    def note(self, tests: Mapping[str, Dependencies]) -> None:
        lines = self.recording.run.lines_read
        self.saved.update((test, (found, lines)) for test, found in tests.items())

    def summary(self) -> list[str]:
        """Return lines for the user: what was not recorded, and which kinds of what is never seen may apply."""
        run = self.recording.run
        said = [*run.problems, *unseen_in(run)]
        unrecorded = {test: found.unrecorded for test, (found, _) in self.saved.items() if found.unrecorded}
        if unrecorded:
            calls = sorted({call for found in unrecorded.values() for call in found})
            said.append(
                f"calls of {len(unrecorded)} tests were not recorded, so these tests "
                f"depend on every module imported there: {', '.join(calls[:5])}{' …' if len(calls) > 5 else ''}"
            )
        return said
