"""The journal of a search: every finished run is on disk before the next one starts."""

import contextlib
import fcntl
import json
import os
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlcanary.bisect.outcomes import EVIDENCE, Outcome
from rlcanary.errors import UserError

SCHEMA = 2


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
    """What a journal holds, for readers; another process may be writing it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def events(self) -> list[dict[str, Any]]:
        return list(_events(self.path))

    def observations(self) -> list[Observation]:
        """Every finished run that counts, oldest first: those of infrastructure, interrupted ones and undone ones do not."""
        names = [field.name for field in fields(Observation)]
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
        """None for a journal whose first line never reached the disk, and for one of another version."""
        start = next((e for e in self.events() if e["event"] == "start"), None)
        if start is None or start["schema"] != SCHEMA:
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
        """Open the journal in `folder`, making both. Raises BlockingIOError while another process writes it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / "journal.jsonl"
        self._turn = threading.Lock()
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._descriptor)
            raise
        text = self.path.read_bytes()
        if text and not text.endswith(b"\n"):
            os.write(self._descriptor, b"\n")  # The line that a power cut tore stays alone.

    @classmethod
    def create(cls, folder: Path, header: Header, checkout: Path) -> "Journal":
        """A journal in a new folder under `folder`, named for the time and the bad commit."""
        folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        journal = cls(Path(tempfile.mkdtemp(prefix=f"{stamp}-{header.bad[:10]}-", dir=folder)))
        journal.append("start", schema=SCHEMA, pid=os.getpid(), checkout=str(checkout), **asdict(header))
        return journal

    def record_options(self, options: Sequence[str], trusted: Collection[str]) -> None:
        """What of the command line does not make it another search, for a reader that says where it stands and how to go on.

        `trusted`: the SHAs of the ends that need no run.
        """
        self.append("options", options=options, trusted=sorted(trusted))

    def append(self, event: str, **details: Any) -> None:
        """Write one event and wait until it is on disk."""
        line = json.dumps({"event": event, "time": now(), **details}, ensure_ascii=True) + "\n"
        with self._turn:
            os.write(self._descriptor, line.encode())
            os.fsync(self._descriptor)

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
    def header(self) -> Header | None:
        return self.record_of.header

    def close(self) -> None:
        os.close(self._descriptor)


def open_idle(folder: Path) -> Iterator[Journal]:
    """The journals under `folder` that no process writes, newest first. The caller closes them."""
    for path in sorted(folder.glob("*/journal.jsonl"), reverse=True):
        with contextlib.suppress(BlockingIOError):
            yield Journal(path.parent)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _events(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_bytes().split(b"\n"):
        try:
            event = json.loads(line)
        except ValueError:
            continue  # Torn by a power cut before its fsync returned, so nothing was built on it.
        if isinstance(event, dict):
            yield event
