"""The journal of a search: every finished run is on disk before the next one starts."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
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
"""Of the `start` event."""
KIND, VERSION = "bisect", 1
HEADLESS = b'{"event"'
"""Begins a journal from before journals had a header; its lines are the same."""

TEST_VARIABLES = ("EXTRA_SCRIPT_ARGS", "SED_ALLOW_NO_MATCH", "SED_CLAUSES")
"""What `tools/launch-bisect.sh` takes from the environment: with other values it is another search."""


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
    """When it ended, ISO 8601 in UTC."""
    output: str = ""
    """File that holds what the command printed."""
    value: float | None = None
    """Of the metric."""
    run: int = 0
    """Which run of the command it was, from 1; 0 for what was not run here."""
    environment: str = ""
    """Key of the environment that was built for it."""


@dataclass(frozen=True)
class Header:
    """What makes two searches the same one. Commits are SHAs: names move."""

    root: str
    good: str
    bad: str
    command: tuple[str, ...]
    directory: str
    pinned: tuple[tuple[str, str], ...]
    """Path and SHA-256 of every pinned file."""
    metric: str = ""
    """The metric whose value is searched on, with the side that is worse: `name lower`."""
    variables: tuple[tuple[str, str], ...] = ()
    """Of the environment, those that change what is tested, as they are set (see `TEST_VARIABLES`)."""


NEEDED = {
    "start": ("root", "good", "bad", "directory", "metric", "command", "pinned", "checkout"),
    "options": ("options", "trusted"),
    "observation": tuple(field.name for field in fields(Observation)),
    "run": ("commit", "run"),
    "worktree": ("path",),
    "worktree-removed": ("path",),
    "worktree-kept": ("path",),
    "checkout": ("home",),
    "end": ("status", "reason"),
}
"""What readers need of an event, by its name."""


class Lock:
    """Held while a search runs in a checkout, or its journal is edited.

    The kernel lets go of it when the process ends, however it ends.
    """

    def __init__(self, path: Path) -> None:
        """Raises UserError when another search holds it, or the git directory cannot be written."""
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
    """Who holds the lock, if anyone does."""
    try:
        descriptor = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.read(descriptor, 100).decode().strip()
    finally:
        os.close(descriptor)
    return None


class Record:
    """What a journal holds, for readers; another process may be writing it.

    Every reading raises UnreadableJournal for a file that is no journal of a search, and OSError.
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
        """A sentence for each line that cannot be used. One that is being written, or was during a crash, is no damage."""
        damage = self._contents().damage
        at_end = damage[-1:] if damage and not damage[-1].text.endswith(TORN[:-1]) and not _is_locked(self.path) else []
        return [str(line) for line in damage if not line.unfinished or line in at_end]

    def observations(self) -> list[Observation]:
        """Every finished run that counts, oldest first: those of infrastructure, interrupted ones and undone ones do not."""
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
        """Whether the search reached its end; one that was cut short or edited by hand since did not."""
        last = self.last("end", "observation", "undo")
        return last is not None and last["event"] == "end"

    @property
    def checkout(self) -> str | None:
        """The root of the checkout that the search was started in; None for a journal that cannot be read."""
        start = self.last("start")
        return None if self.header is None or start is None else str(start["checkout"])

    def last(self, *names: str) -> dict[str, Any] | None:
        """The latest event of one of these names."""
        return next((e for e in reversed(self.events()) if e["event"] in names), None)

    @property
    def header(self) -> Header | None:
        """None for a journal whose start never reached the disk whole, and for one of another version."""
        start = next((e for e in self.events() if e["event"] == "start"), None)
        if start is None or start.get("schema") != SCHEMA:
            return None
        return Header(
            **{name: start[name] for name in ("root", "good", "bad", "directory", "metric")},
            command=tuple(start["command"]),
            pinned=tuple((path, digest) for path, digest in start["pinned"]),
            variables=tuple((name, value) for name, value in start.get("variables", [])),
        )


class Journal:
    """An append-only JSONL file in a folder of its own, beside the output of each run."""

    def __init__(self, folder: Path) -> None:
        """Open the journal in `folder`, making both.

        Raises BlockingIOError while another process writes it, UnreadableJournal for a file that is none of a search.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / "journal.jsonl"
        if _is_headless(self.path):
            _add_header(self.path)
        self._lines = AppendOnly(self.path, KIND, VERSION, locking=fcntl.flock)

    @classmethod
    def create(cls, folder: Path, header: Header, checkout: Path) -> "Journal":
        """A journal in a new folder under `folder`, named for the time and the bad commit."""
        folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        journal = cls(Path(tempfile.mkdtemp(prefix=f"{stamp}-{header.bad[:10]}-", dir=folder)))
        journal.append("start", schema=SCHEMA, pid=os.getpid(), checkout=str(checkout), **asdict(header))
        return journal

    def record_options(self, options: Sequence[str], trusted: Collection[str], table: str) -> None:
        """What of the command line does not make it another search, for a reader that says where it stands and how to go on.

        `trusted`: the SHAs of the ends that need no run. `table`: the outcome table as text.
        """
        self.append("options", options=options, trusted=sorted(trusted), table=table)

    def append(self, event: str, **details: Any) -> None:
        """Write one event and wait until it is on disk."""
        self._lines.append({"event": event, "time": now(), **details}, sync=True)

    def record(self, observation: Observation) -> None:
        self.append("observation", **vars(observation))

    def record_undo(self, observation: Observation) -> None:
        """Take back the latest observation that counts."""
        self.append("undo", commit=observation.commit, run=observation.run)

    @property
    def record_of(self) -> "Record":
        return Record(self.path)

    def events(self) -> list[dict[str, Any]]:
        return self.record_of.events()

    def observations(self) -> list[Observation]:
        return self.record_of.observations()

    @property
    def is_finished(self) -> bool:
        return self.record_of.is_finished

    def last(self, *names: str) -> dict[str, Any] | None:
        return self.record_of.last(*names)

    @property
    def damage(self) -> list[str]:
        return self.record_of.damage

    @property
    def header(self) -> Header | None:
        return self.record_of.header

    def close(self) -> None:
        self._lines.close()


def open_idle(folder: Path, tell: Callable[[str], object]) -> Iterator[Journal]:
    """The journals under `folder` that no process writes, newest first. The caller closes them.

    `tell`: called with a sentence for each that cannot be read.
    """
    for path in sorted(folder.glob("*/journal.jsonl"), reverse=True):
        try:
            yield Journal(path.parent)
        except BlockingIOError:
            continue
        except (UnreadableJournal, OSError) as error:
            tell(f"left out: {error}")


def readable_records(paths: Iterable[Path], tell: Callable[[str], object]) -> list[Record]:
    """The journals that can be read. `tell`: called with a sentence for each other."""
    records: list[Record] = []
    for path in paths:
        try:
            Record(path).events()
        except (UnreadableJournal, OSError) as error:
            tell(f"left out: {error}")
        else:
            records.append(Record(path))
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
    """Raises BlockingIOError while another process writes the journal."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        try_lock(descriptor, path, fcntl.flock)
        text, status = path.read_bytes(), os.fstat(descriptor)
        write_whole(path, f"{header_line(KIND, VERSION)}\n".encode() + text + (b"" if text.endswith(b"\n") else TORN))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))  # It tells which search was the last one.
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
    """The reason why it is no event, or lacks what readers need of one."""
    event = record.get("event")
    if not isinstance(event, str):
        return "not an event of a search"
    if missing := [name for name in NEEDED.get(event, ()) if name not in record]:
        return f"{event} without {', '.join(missing)}"
    if event == "observation" and record["outcome"] not in list(Outcome):
        return f"an outcome that is none: {record['outcome']!r:.20}"
    return None
