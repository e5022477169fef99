"""The journal of a search: every finished run is on disk before the next one starts."""

import fcntl
import os
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import NoneType
from typing import Any

from rlcanary.errors import UserError
from rlcanary.jobs.outcomes import EVIDENCE, Outcome
from rlcanary.system.files import write_whole
from rlcanary.system.journal import (
    TORN,
    Contents,
    UnreadableJournal,
    header_line,
    parse_records,
    read_journal,
    try_lock,
)
from rlcanary.system.journal import Journal as AppendOnly

SCHEMA = 2
"""The schema version of the `start` event."""
KIND, VERSION = "bisect", 1
HEADLESS = b'{"event"'
"""The start of a journal from before journals had a header. Its lines are the same."""

PATIENCE_S = 1.0
"""Another start opens each journal for a moment, a running search its own: the time that all of them are waited for."""

TEST_VARIABLES = ("EXTRA_SCRIPT_ARGS", "SED_ALLOW_NO_MATCH", "SED_CLAUSES")
"""Environment variables that change what `tools/launch-bisect.sh` tests. Other values make another search."""


def set_test_variables() -> tuple[tuple[str, str], ...]:
    return tuple((name, os.environ[name]) for name in TEST_VARIABLES if os.environ.get(name))


@dataclass(frozen=True)
class Observation:
    """One finished run of the command, or one line of a replayed log."""

    commit: str
    outcome: Outcome
    reason: str
    seconds: float = 0.0
    time: str = ""
    """The time it ended, ISO 8601 in UTC."""
    output: str = ""
    """Path of the file with the command's output."""
    value: float | None = None
    """The metric's value."""
    run: int = 0
    """The number of the run, from 1. 0 for an outcome from a log or set by hand."""
    environment: str = ""
    """The key of the environment that was built for it."""


@dataclass(frozen=True)
class Header:
    """The identity of a search. Two searches with equal headers are the same. Commits are SHAs, because names move."""

    root: str
    good: str
    bad: str
    command: tuple[str, ...]
    directory: str
    pinned: tuple[tuple[str, str], ...]
    """The path and SHA-256 of every pinned file."""
    metric: str = ""
    """The metric to search on and its worse side, such as `name lower`."""
    variables: tuple[tuple[str, str], ...] = ()
    """The `TEST_VARIABLES` that are set, with their values."""


NEEDED: dict[str, dict[str, Any]] = {
    "start": dict.fromkeys(("root", "good", "bad", "directory", "metric", "checkout"), str)
    | dict.fromkeys(("command", "pinned"), list),
    "request": {"request": dict, "trusted": list, "table": str},
    "observation": dict.fromkeys(("commit", "outcome", "reason", "time", "output", "environment"), str)
    | {"seconds": (int, float), "value": (int, float, NoneType), "run": int},
    "run": {"commit": str, "run": int},
    "worktree": {"path": str},
    "worktree-removed": {"path": str},
    "worktree-kept": {"path": str},
    "checkout": {"home": str},
    "end": {"status": str, "reason": str},
}
"""The fields that readers need of each event, and their types."""


class Lock:
    """A file lock for the time that a search runs in a checkout or its journal is edited.

    The kernel releases it when the process ends, even after SIGKILL.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            UserError: Another search holds it, or the git directory is not writable.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(
                f"cannot write {path}: {error.strerror}; the journal of a search lies in the git directory"
            ) from None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(self._descriptor, 100).decode()
            os.close(self._descriptor)
            raise UserError(
                f"a bisect is already running in this checkout ({holder.strip() or 'just starting'}): "
                "wait for it, stop it with Ctrl-C, or start from another `git worktree`"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"process {os.getpid()}, since {now()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._descriptor)


def lock_holder(path: Path) -> str | None:
    """Return a description of the process that holds the lock, or None."""
    return path.read_text(encoding="utf-8").strip() if path.exists() and _is_locked(path) else None


class Record:
    """A reader of a journal, which another process may be writing.

    Every method and property reads the file again.

    Raises:
        UnreadableJournal: The file is not the journal of a search.
        OSError: The file cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def _contents(self) -> Contents:
        if _is_headless(self.path):
            return parse_records(self.path, self.path.read_bytes(), 1, _problem_of)
        return read_journal(self.path, KIND, VERSION, _problem_of)

    def events(self) -> list[dict[str, Any]]:
        return self._contents().records

    @property
    def damage(self) -> list[str]:
        """A sentence for each unusable line, except for a last line that is being written or was cut off by a crash."""
        damage = self._contents().damage
        at_end = damage[-1:] if damage and not damage[-1].text.endswith(TORN[:-1]) and not _is_locked(self.path) else []
        return [str(line) for line in damage if not line.unfinished or line in at_end]

    def observations(self) -> list[Observation]:
        """Return every finished run that counts, oldest first.

        Infrastructure failures, interrupted runs and undone runs do not count.
        """
        names = NEEDED["observation"]
        kept: list[Observation] = []
        for event in self.events():
            if event["event"] == "undo" and kept:
                kept.pop()
            elif event["event"] == "observation" and event["outcome"] in EVIDENCE:
                values = {name: event[name] for name in names} | {"outcome": Outcome(event["outcome"])}
                kept.append(Observation(**values))
        return kept

    @property
    def is_finished(self) -> bool:
        """Whether the search reached its end, and its outcomes were not edited by hand since."""
        last = self.last("end", "observation", "undo")
        return last is not None and last["event"] == "end"

    @property
    def checkout(self) -> str | None:
        """The root of the checkout in which the search started. None if the journal has no usable header."""
        start = self.last("start")
        return None if self.header is None or start is None else str(start["checkout"])

    def last(self, *names: str) -> dict[str, Any] | None:
        """Return the latest event with one of these names."""
        return next((e for e in reversed(self.events()) if e["event"] in names), None)

    @property
    def header(self) -> Header | None:
        """The header of the search. None if the first event was not written whole or has another schema version."""
        start = next((e for e in self.events() if e["event"] == "start"), None)
        if start is None or start.get("schema") != SCHEMA:
            return None
        return Header(
            **{name: start[name] for name in ("root", "good", "bad", "directory", "metric")},
            command=tuple(start["command"]),
            pinned=tuple((path, digest) for path, digest in start["pinned"]),
            variables=tuple((name, value) for name, value in start.get("variables", [])),
        )


class Journal(Record):
    """An append-only JSONL file in a folder of its own, beside the output of each run."""

    def __init__(self, folder: Path) -> None:
        """Open the journal in `folder`. Create both if they are missing.

        Raises:
            BlockingIOError: Another process writes the journal.
            UnreadableJournal: The file is not the journal of a search.
        """
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(folder / "journal.jsonl")
        self.folder = folder
        if _is_headless(self.path):
            _add_header(self.path)
        self._lines = AppendOnly(self.path, KIND, VERSION, locking=fcntl.flock)

    @classmethod
    def create(cls, folder: Path, header: Header, checkout: Path) -> "Journal":
        """Create a journal in a new folder under `folder`, named for the time and the bad commit."""
        folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        journal = cls(Path(tempfile.mkdtemp(prefix=f"{stamp}-{header.bad[:10]}-", dir=folder)))
        journal.append("start", schema=SCHEMA, pid=os.getpid(), checkout=str(checkout), **asdict(header))
        return journal

    def record_request(self, request: Mapping[str, Any], trusted: Collection[str], table: str) -> None:
        """Record a start of the search, for `rlcanary bisect status` and for resuming.

        Args:
            request: The options as JSON.
            trusted: The SHAs of the ends that need no run.
            table: The outcome table as text.
        """
        self.append("request", request=request, trusted=sorted(trusted), table=table)

    def append(self, event: str, **details: Any) -> None:
        """Write one event and wait until it is on disk."""
        self._lines.append({"event": event, "time": now(), **details}, sync=True)

    def record(self, observation: Observation) -> None:
        self.append("observation", **vars(observation))

    def record_undo(self, observation: Observation) -> None:
        """Undo the latest observation that counts."""
        self.append("undo", commit=observation.commit, run=observation.run)

    def close(self) -> None:
        self._lines.close()


def _opened(folder: Path, until: float) -> Journal:
    """Open a journal, and wait for one that another process has open.

    Raises:
        BlockingIOError: It has it open for longer.
    """
    while True:
        try:
            return Journal(folder)
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


def open_idle(folder: Path, tell: Callable[[str], object]) -> Iterator[Journal]:
    """Open the journals under `folder` that no process writes, newest first. The caller closes them.

    Args:
        folder: The folder of all searches.
        tell: Called with a sentence for each journal that cannot be read.
    """
    until = time.monotonic() + PATIENCE_S
    for path in sorted(folder.glob("*/journal.jsonl"), reverse=True):
        try:
            yield _opened(path.parent, until)
        except BlockingIOError:
            continue
        except (UnreadableJournal, OSError) as error:
            tell(f"left out: {error}")


def readable_records(paths: Iterable[Path], tell: Callable[[str], object]) -> list[Record]:
    """List the journals that can be read.

    Args:
        paths: The journal files.
        tell: Called with a sentence for each journal that cannot be read, and for damage that leaves one without a header.
    """
    records: list[Record] = []
    for path in paths:
        try:
            Record(path).events()
        except (UnreadableJournal, OSError) as error:
            tell(f"left out: {error}")
        else:
            record = Record(path)
            records.append(record)
            for text in record.damage if record.header is None else ():
                tell(f"left out: {text}")
    return records


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _is_headless(path: Path) -> bool:
    """Whether this is a journal from before journals had a header."""
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return stream.read(len(HEADLESS)) == HEADLESS


def _add_header(path: Path) -> None:
    """Add a header to a journal without one.

    Raises:
        BlockingIOError: Another process writes the journal.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        try_lock(descriptor, path, fcntl.flock)
        text, status = path.read_bytes(), os.fstat(descriptor)
        write_whole(path, f"{header_line(KIND, VERSION)}\n".encode() + text + (b"" if text.endswith(b"\n") else TORN))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # Its age tells which search was the last one.
    finally:
        os.close(descriptor)


def _is_locked(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def _problem_of(record: dict[str, Any]) -> str | None:
    """Return why the object is no event, or which needed field it lacks or is another one. None for a valid event."""
    event = record.get("event")
    if not isinstance(event, str):
        return "not an event of a search"
    needed = NEEDED.get(event, {})
    if missing := [name for name in needed if name not in record]:
        return f"{event} without {', '.join(missing)}"
    if wrong := [name for name, kind in needed.items() if not isinstance(record[name], kind)]:
        return f"{event} with another type of {', '.join(wrong)}"
    if event == "start" and not _is_start(record):
        return "start with another type of command, pinned or variables"
    if event == "request" and not isinstance(record["request"].get("command"), list):
        return "request without a command"
    if event == "observation" and not record["commit"].isalnum():
        return f"no commit: {record['commit']!r:.20}"
    if event == "observation" and record["outcome"] not in list(Outcome):
        return f"an unknown outcome: {record['outcome']!r:.20}"
    return None


def _is_start(record: dict[str, Any]) -> bool:
    """Whether the command consists of texts, and pinned files and variables of pairs of texts."""
    pairs = [record["pinned"], record.get("variables", [])]
    if not all(
        isinstance(each, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in each) for each in pairs
    ):
        return False
    texts = [*record["command"], *(text for each in pairs for pair in each for text in pair)]
    return all(isinstance(text, str) for text in texts)
