"""The journal of a search: every finished run is on disk before the next one starts."""

import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlcanary.bisect.outcomes import Outcome
from rlcanary.errors import UserError

SCHEMA = 1


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


class Lock:
    """Held while a search runs in a checkout. The kernel lets go of it when the process ends, however it ends."""

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


class Journal:
    """An append-only JSONL file in a folder of its own, beside the output of each run."""

    def __init__(self, folder: Path) -> None:
        """Open the journal in `folder`, making both. Raises BlockingIOError while another process writes it."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.path = folder / "journal.jsonl"
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
    def create(cls, folder: Path, header: Header) -> "Journal":
        """A journal in a new folder under `folder`, named for the time and the bad commit."""
        folder.mkdir(parents=True, exist_ok=True)
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        journal = cls(Path(tempfile.mkdtemp(prefix=f"{stamp}-{header.bad[:10]}-", dir=folder)))
        journal.append("start", schema=SCHEMA, pid=os.getpid(), **asdict(header))
        return journal

    def append(self, event: str, **details: Any) -> None:
        """Write one event and wait until it is on disk."""
        line = json.dumps({"event": event, "time": now(), **details}, ensure_ascii=True) + "\n"
        os.write(self._descriptor, line.encode())
        os.fsync(self._descriptor)

    def events(self) -> list[dict[str, Any]]:
        return list(_events(self.path))

    def observations(self) -> list[Observation]:
        """Every finished run so far, oldest first; interrupted and infrastructure runs are no evidence and left out."""
        names = [field.name for field in fields(Observation)]
        found = [{name: e[name] for name in names} for e in self.events() if e["event"] == "observation"]
        kept = [Observation(**(values | {"outcome": Outcome(values["outcome"])})) for values in found]
        return [o for o in kept if o.outcome not in (Outcome.INFRA, Outcome.ABORT)]

    @property
    def is_finished(self) -> bool:
        """Whether the search reached its end; one that was interrupted or killed did not."""
        return self.last("end") is not None

    def last(self, *names: str) -> dict[str, Any] | None:
        """The latest event of one of these names."""
        return next((e for e in reversed(self.events()) if e["event"] in names), None)

    @property
    def header(self) -> Header | None:
        """None for a journal whose first line never reached the disk."""
        start = next((e for e in self.events() if e["event"] == "start"), None)
        if start is None or start["schema"] != SCHEMA:
            return None
        return Header(
            **{name: start[name] for name in ("root", "good", "bad", "directory")},
            command=tuple(start["command"]),
            pinned=tuple((path, digest) for path, digest in start["pinned"]),
        )

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
