"""A run of pytest on disk: journals while it lasts, one results file when it is over, and the same for a run that was
killed.

    unit_results.json                    the newest run; its exit_status is null until that run ends
    unit_results/<run id>.json           a copy of every run
    unit_results/.journals/<run id>/     the journals of a run that has not ended, one for each process and one of outcomes
    unit_results/.journals/lock          held while a run starts or ends

A run id is the UTC time, the commit and random digits, so that two runs in one second have two names. Names that
begin with a dot are invisible to `jq … unit_results/*`.
"""

import datetime
import fcntl
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rlcanary.errors import UserError
from rlcanary.files import temporary_pattern, write_whole
from rlcanary.results.gpus import open_gpus
from rlcanary.results.journal import Journal, JournalContents, Record, file_lock, lock, read_journal
from rlcanary.results.json_text import JsonText, quoted
from rlcanary.results.keys import metric_key
from rlcanary.results.outcomes import Outcome
from rlcanary.results.provenance import environment_key, git_commit, installed_versions
from rlcanary.results.store import SCHEMA, history_folder, results_text

if TYPE_CHECKING:
    from rlcanary.results.tracker import Tracker

CONTROLLER = "controller"
OUTCOMES = "outcomes"
LOCK_NAME = "lock"
# Tells a pytest that a test of this run starts, in this process or another one, that this run is alive.
RUN_ID_VARIABLE = "RLCANARY_RUN_ID"


class ProcessRecorder:
    """One process's part in a run: its journal, and trackers for its tests."""

    def __init__(self, run_folder: Path, process: str) -> None:
        self.run_folder = run_folder
        self.journal = Journal(run_folder / f"{process}.jsonl")

    def qualify_keys(self, qualified: Mapping[str, str]) -> None:
        """Notes the keys of tests that do not go by their plain key."""
        if qualified:
            self.journal.append({"record": "keys", "keys": dict(qualified)})

    @contextmanager
    def tracking(self, nodeid: str) -> Iterator["Tracker"]:
        # Most runs of pytest track nothing, and every start would pay for these.
        from rlcanary.results.memory import MemorySampler
        from rlcanary.results.tracker import tracking

        with tracking(nodeid, self.journal, MemorySampler(open_gpus())) as tracker:
            yield tracker

    @property
    def closed(self) -> bool:
        return self.journal.closed

    def close(self) -> None:
        self.journal.close()


class RunRecorder(ProcessRecorder):
    """The process that owns the run: pytest itself, or the controller under xdist.

    recovered lists the results files written for earlier runs that were killed; problems has a line for everything
    that could not be found out at the start.
    """

    def __init__(self, results_file: Path, header: Record, run_folder: Path) -> None:
        super().__init__(run_folder, CONTROLLER)
        self.results_file = results_file
        self.header = header
        self.recovered: list[Path] = []
        self.problems: list[str] = []
        # What has been journalled, so that a run that comes to its end need not read it back.
        self._outcomes: dict[str, Outcome] = {}
        self._outcome_journal = Journal(run_folder / f"{OUTCOMES}.jsonl")
        self._pid = os.getpid()
        self._outer_run_id = os.environ.get(RUN_ID_VARIABLE)
        os.environ[RUN_ID_VARIABLE] = header["run_id"]

    @classmethod
    def start(cls, results_file: Path, root: Path) -> "RunRecorder":
        """Opens the run's journal, merges what killed runs left, and marks the results file as that of a run under way.

        Raises UserError if the place for results cannot be written to.
        """
        history = history_folder(results_file)
        journals = history / ".journals"
        header, problems = describe_run(root)
        run_folder = journals / header["run_id"]
        try:
            journals.mkdir(parents=True, exist_ok=True)
            with file_lock(journals / LOCK_NAME):
                recovery = recover_killed_runs(history)
                remove_unfinished_files(results_file)
                write_whole(results_file, results_text(assemble(header, [], exit_status=None, coverage=None)))
                run_folder.mkdir()
                recorder = cls(results_file, header, run_folder)
            recorder.journal.append({"record": "run", **header})
        except OSError as error:
            raise UserError(
                f"results cannot be written to {results_file} ({error.strerror}: {error.filename}); "
                "choose another place with --rlcanary-results PATH, or switch them off with -p no:rlcanary-tracker"
            ) from error
        recorder.recovered = recovery.files
        recorder.problems = problems + recovery.problems
        return recorder

    def add_outcome(self, nodeid: str, over: Outcome) -> None:
        """Journals how a test ended."""
        outcome, duration_s = over
        # Every test has this record, and with an encoder it would take four times as long.
        self._outcome_journal.append_line(
            f'{{"record": "outcome", "nodeid": {quoted(nodeid)}, "outcome": "{outcome}", "duration_s": {duration_s:.6f}}}'
        )
        self._outcomes[nodeid] = over

    def finish(self, exit_status: int, coverage: float | None) -> list[str]:
        """Merges the journals of all processes into the results file and its copy in the history; returns what
        could not be merged.
        """
        if os.getpid() != self._pid:
            return []  # a child that a test forked came all the way out of pytest; the run is its parent's
        history = history_folder(self.results_file)
        with file_lock(history / ".journals" / LOCK_NAME):
            records, torn = read_run_folder(self.run_folder, without=OUTCOMES)
            text = results_text(assemble(self.header, records, exit_status, coverage, self._outcomes))
            for path in (history / f"{self.header['run_id']}.json", self.results_file):
                write_whole(path, text)
            self.close()
            shutil.rmtree(self.run_folder)
        return torn

    def close(self) -> None:
        if self.closed:
            return
        super().close()
        self._outcome_journal.close()
        if self._outer_run_id is None:
            os.environ.pop(RUN_ID_VARIABLE, None)
        else:
            os.environ[RUN_ID_VARIABLE] = self._outer_run_id


def describe_run(root: Path) -> tuple[Record, list[str]]:
    """What is known of a run before its first test, and what could not be found out."""
    now = datetime.datetime.now(datetime.UTC)
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
        "start_time": now.astimezone().strftime("%Y-%m-%d %H:%M:%S"),
        "gpu_types": gpu_types,
        "start_time_utc": now.isoformat(timespec="microseconds"),
        "run_id": f"{now:%Y%m%dT%H%M%SZ}-{(commit.sha or 'nocommit')[:8]}-{os.urandom(4).hex()}",
        "host": platform.node(),
        "dirty": commit.dirty,
        "versions": versions,
        "environment": environment_key(versions, gpu_types),
    }
    return header, problems


def assemble(
    header: Record,
    records: list[Record],
    exit_status: int | None,
    coverage: float | None,
    outcomes: Mapping[str, Outcome] = {},
) -> dict[str, Any]:
    """The results file of a run from the records of its journals, and the outcomes that are known without a record.

    A test that ran several times counts with its last time.
    """
    ended = dict(outcomes)
    qualified: dict[str, str] = {}
    tracked: dict[str, dict[str, Record]] = {}
    gpu_types = set(header["gpu_types"])
    for record in records:
        match record["record"]:
            case "keys":
                qualified |= record["keys"]
            case "gpus":
                gpu_types |= set(record["names"])
            case "begin":
                tracked[record["nodeid"]] = {}
            case "metric":
                tracked.setdefault(record["nodeid"], {})[record["name"]] = record
            case "outcome":
                ended[record["nodeid"]] = (record["outcome"], record["duration_s"])
    # By hand, because there may be thousands, and with an encoder each would take three times as long.
    tests: dict[str, JsonText | dict[str, str | None]] = {
        nodeid: JsonText(
            f'{{"outcome": "{outcome}", "duration": {duration_s:.6f}, "key": {quoted(metric_key(nodeid, qualified))}}}'
        )
        for nodeid, (outcome, duration_s) in ended.items()
    }
    keys = {nodeid: metric_key(nodeid, qualified) for nodeid in tracked}
    # A test without an outcome was running when the run was killed.
    for nodeid, key in keys.items():
        tests.setdefault(nodeid, {"outcome": None, "duration": None, "key": key})
    return {
        "exit_status": exit_status,
        "git_commit": header["git_commit"],
        "start_time": header["start_time"],
        "metrics": {
            keys[nodeid]: {name: record["value"] for name, record in metrics.items()}
            for nodeid, metrics in tracked.items()
        },
        "gpu_types": sorted(gpu_types),
        "coverage": coverage,
        "schema": SCHEMA,
        **{name: header[name] for name in ("start_time_utc", "run_id", "host", "dirty", "versions", "environment")},
        "nonfinite": [
            {"key": keys[nodeid], "metric": name, **entry}
            for nodeid, metrics in tracked.items()
            for name, record in metrics.items()
            for entry in record["nonfinite"]
        ],
        "tests": tests,
    }


def read_run_folder(run_folder: Path, without: str | None = None) -> JournalContents:
    """The records of all journals of a run but one, the controller's first."""
    found = (path for path in run_folder.glob("*.jsonl") if path.stem != without)
    paths = sorted(found, key=lambda path: (path.stem != CONTROLLER, path.name))
    journals = [read_journal(path) for path in paths]
    return JournalContents(
        [record for journal in journals for record in journal.records],
        [line for journal in journals for line in journal.problems],
    )


class Recovery(NamedTuple):
    files: list[Path]
    problems: list[str]


def recover_killed_runs(history: Path) -> Recovery:
    """Writes the results file of every run whose processes are all gone but whose journals are still here.

    Needs the folder's lock.
    """
    files: list[Path] = []
    problems: list[str] = []
    for run_folder in sorted(path for path in (history / ".journals").iterdir() if path.is_dir()):
        if run_folder.name == os.environ.get(RUN_ID_VARIABLE) or _is_alive(run_folder):
            continue
        records, torn = read_run_folder(run_folder)
        problems += torn
        header = next((record for record in records if record["record"] == "run"), None)
        if header is not None:
            path = history / f"{run_folder.name}.json"
            # The run may have been killed after its file was written whole and before its journals were removed.
            if not path.exists():
                write_whole(path, results_text(assemble(header, records, exit_status=None, coverage=None)))
                files.append(path)
        elif records or torn:
            problems.append(f"{run_folder} has no readable header and stays where it is; look into it and delete it")
            continue
        shutil.rmtree(run_folder)
    return Recovery(files, problems)


def remove_unfinished_files(results_file: Path) -> None:
    """Removes what a run killed in the middle of a write left. Needs the folder's lock, under which all writing happens."""
    for path in results_file.parent.glob(temporary_pattern(results_file.name)):
        path.unlink()
    for path in history_folder(results_file).glob(temporary_pattern("*")):
        path.unlink()


def _is_alive(run_folder: Path) -> bool:
    with ExitStack() as opened:
        for path in run_folder.glob("*.jsonl"):
            stream = opened.enter_context(path.open("r+b"))
            try:
                lock(stream.fileno(), path)
            except BlockingIOError:
                return True
            fcntl.lockf(stream, fcntl.LOCK_UN)
    return False
