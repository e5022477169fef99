"""Record a run of pytest on disk: journals while it lasts, one results file when it is over or was killed.

    unit_results.json                    the newest run; its exit_status is null until that run ends
    unit_results/<run id>.json           a copy of every run
    unit_results/.journals/<run id>/     the journals of a run that has not ended, one for each process and one of outcomes
    unit_results/.journals/unreadable/   journals of killed runs with something in them that could not be read
    unit_results/.journals/lock          held while a run starts or ends

A run id is the UTC time, the commit and random digits, so that two runs in one second have two names. Names that
begin with a dot are invisible to `jq … unit_results/*`.

Nothing is written before `open`. Trouble with these files neither ends a run nor fails a test: it is a line in `problems`,
and the records stay in memory until the run ends.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rlcanary.errors import UserError
from rlcanary.recording.json_text import quoted
from rlcanary.recording.records import Records
from rlcanary.recording.results_file import (
    CONTROLLER,
    JOURNALS,
    LOCK_NAME,
    OUTCOMES,
    RUN_ID_VARIABLE,
    history_folder,
    results_text,
)

# Most runs of pytest record nothing, and every start would pay for what writes files: it is imported where it is used.
if TYPE_CHECKING:
    from rlcanary.recording.outcomes import Outcome
    from rlcanary.recording.tracker import Tracker
    from rlcanary.system.journal import Record


class ProcessRecorder:
    """One process's part in a run: its journal, and trackers for its tests.

    Attributes:
        recovered: the results files that `open` wrote for earlier runs that were killed.
        problems: a line for everything that went wrong and that the user should know.
    """

    def __init__(self, results_file: Path, process: str) -> None:
        self.results_file = results_file
        self.history = history_folder(results_file)
        self.recovered: list[Path] = []
        self.problems: list[str] = []
        self.is_open = False
        self.records = Records()
        self._process = process
        self._outer_run_id: str | None = None

    @property
    def header(self) -> Record:
        """Returns the facts about the run that are known before its first test."""
        raise NotImplementedError

    @property
    def run_folder(self) -> Path:
        return self.history / JOURNALS / str(self.header["run_id"])

    def open(self) -> None:
        """Begins to write, starting with the records so far.

        The first process of a run to do so also writes the results of killed runs and marks the results file as that of
        a run in progress.
        """
        from rlcanary.system.journal import file_lock

        if self.is_open:
            return
        self.is_open = True
        self._outer_run_id = os.environ.get(RUN_ID_VARIABLE)
        folder = self.run_folder
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with file_lock(folder.parent / LOCK_NAME):
                if not folder.exists():
                    self._begin_run(folder)
                self._open_journals(folder)
        except (OSError, UserError) as error:
            self.problems.append(
                f"{self.results_file} cannot be written ({reason(error)}); records stay in memory until the run ends"
            )
        os.environ[RUN_ID_VARIABLE] = self.header["run_id"]

    def _begin_run(self, folder: Path) -> None:
        from rlcanary.recording.assembly import assemble
        from rlcanary.recording.recovery import recover_killed_runs, remove_unfinished_files
        from rlcanary.system.files import write_whole

        recovery = recover_killed_runs(self.history)
        self.recovered += recovery.files
        self.problems += recovery.problems
        remove_unfinished_files(self.results_file)
        write_whole(self.results_file, results_text(assemble(self.header, [], exit_status=None, coverage=None)))
        folder.mkdir()

    def _open_journals(self, folder: Path) -> None:
        self.records.open(folder / f"{self._process}.jsonl")
        # Any one journal of the run is enough to complete it.
        self.records.append({"record": "run", **self.header})

    def qualify_keys(self, qualified: Mapping[str, str]) -> None:
        """Notes the keys of tests that do not use their plain key."""
        if qualified:
            self.records.append({"record": "keys", "keys": dict(qualified)})

    @contextmanager
    def tracking(self, nodeid: str) -> Iterator[Tracker]:
        self.open()
        with tracking_into(self.records, nodeid) as tracker:
            yield tracker

    def close(self) -> None:
        self.records.close()
        if self.is_open and os.environ.get(RUN_ID_VARIABLE) == self.header["run_id"]:
            if self._outer_run_id is None:
                del os.environ[RUN_ID_VARIABLE]
            else:
                os.environ[RUN_ID_VARIABLE] = self._outer_run_id


class WorkerRecorder(ProcessRecorder):
    """Records for one worker of xdist."""

    def __init__(self, results_file: Path, header: Record, worker: str) -> None:
        super().__init__(results_file, worker)
        self._header = header

    @property
    def header(self) -> Record:
        return self._header


class RunRecorder(ProcessRecorder):
    """Records for the process that owns the run: pytest itself, or the controller under xdist."""

    def __init__(self, results_file: Path, root: Path) -> None:
        super().__init__(results_file, CONTROLLER)
        self._root = root
        self._started = datetime.datetime.now(datetime.UTC)
        self._header: Record | None = None
        self._outcomes: dict[str, Outcome] = {}
        # A journal of its own, so that a run that comes to its end need not read it back.
        self._outcome_records = Records()
        self._from_workers: list[str] = []
        self._pid = os.getpid()

    @property
    def header(self) -> Record:
        if self._header is None:
            self._header, problems = describe_run(self._root, self._started)
            self.problems += problems
        return self._header

    def _open_journals(self, folder: Path) -> None:
        super()._open_journals(folder)
        self._outcome_records.open(folder / f"{OUTCOMES}.jsonl")

    def open_as_a_worker_did(self) -> None:
        """Begins to write because a worker did: under xdist, only workers know if a test uses the tracker."""
        if not self.is_open and self.run_folder.exists():
            self.open()

    def add_outcome(self, nodeid: str, over: Outcome) -> None:
        """Journals the outcome of a test."""
        outcome, duration_s = over
        # Every test has this record, and with an encoder it would take four times as long.
        self._outcome_records.append_line(
            f'{{"record": "outcome", "nodeid": {quoted(nodeid)}, "outcome": "{outcome}", "duration_s": {duration_s:.6f}}}'
        )
        self._outcomes[nodeid] = over

    def add_from_worker(self, records: list[str], problems: list[str], recovered: list[str]) -> None:
        """Takes over the records that a worker could not write, as JSON, and its problems."""
        self._from_workers += records
        self.problems += problems
        self.recovered += map(Path, recovered)

    def finish(self, exit_status: int, coverage: float | None) -> None:
        """Merges the journals of all processes into the results file and its copy in the history, if the run has records."""
        if os.getpid() != self._pid:
            return  # a child that a test forked came all the way out of pytest; the run is its parent's
        if self._from_workers:
            self.open()
        if self.is_open:
            try:
                self._write_results(exit_status, coverage)
            except (OSError, UserError) as error:
                self.problems.append(f"the results of this run could not be written: {reason(error)}")
        self.close()
        self.problems += [*self.records.problems, *self._outcome_records.problems]

    def _write_results(self, exit_status: int, coverage: float | None) -> None:
        from rlcanary.recording.assembly import assemble
        from rlcanary.recording.recovery import read_run_folder, set_aside
        from rlcanary.system.files import write_whole
        from rlcanary.system.journal import file_lock

        folder = self.run_folder
        folder.mkdir(parents=True, exist_ok=True)  # a test may have removed it
        with file_lock(folder.parent / LOCK_NAME):
            found = read_run_folder(folder, without=OUTCOMES)
            records = found.records + [json.loads(text) for text in (*self.records.missing(), *self._from_workers)]
            text = results_text(assemble(self.header, records, exit_status, coverage, self._outcomes))
            for path in (self.history / f"{self.header['run_id']}.json", self.results_file):
                write_whole(path, text)
            self.close()
            if found.damage:
                self.problems += [*found.damage, f"the journals with this damage were set aside: {set_aside(folder)}"]
            else:
                shutil.rmtree(folder)

    def close(self) -> None:
        super().close()
        self._outcome_records.close()


@contextmanager
def tracking_into(records: Records, nodeid: str) -> Iterator[Tracker]:
    """Gives a tracker of a test; where no one opens the records, its values are kept nowhere."""
    from rlcanary.recording.memory import MemorySampler
    from rlcanary.recording.tracker import tracking
    from rlcanary.system.gpus import open_gpus

    with tracking(nodeid, records, MemorySampler(open_gpus())) as tracker:
        yield tracker


def reason(error: OSError | UserError) -> str:
    if isinstance(error, UserError):
        return str(error)
    return f"{error.strerror}: {error.filename}" if error.filename else str(error.strerror)


def describe_run(root: Path, started: datetime.datetime) -> tuple[Record, list[str]]:
    """Gathers the facts about a run before its first test, and the problems in finding them."""
    from rlcanary.recording.provenance import environment_key, git_commit, installed_versions
    from rlcanary.system.gpus import open_gpus

    commit = git_commit(root)
    problems = [commit.problem] if commit.problem else []
    try:
        gpus = open_gpus()
        gpu_types = gpus.names() if gpus else []
    except UserError as error:
        gpu_types = []
        problems.append(str(error))
    versions = installed_versions()
    header = {
        "git_commit": commit.sha,
        "start_time": started.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        "gpu_types": gpu_types,
        "start_time_utc": started.isoformat(timespec="microseconds"),
        "run_id": f"{started:%Y%m%dT%H%M%SZ}-{(commit.sha or 'nocommit')[:8]}-{os.urandom(4).hex()}",
        "host": platform.node(),
        "dirty": commit.dirty,
        "versions": versions,
        "environment": environment_key(versions, gpu_types),
    }
    return header, problems
