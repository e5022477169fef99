"""Record the files and folders of the project that code opens, lists, writes or asks about."""

from __future__ import annotations

import os
import stat
import sys
from _sha1 import sha1  # type: ignore[import-not-found]  # hashlib takes milliseconds, in every child process
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Protocol

OWN = __name__.rpartition(".")[0] + "."
# Folders in which tools keep what they know; that they change says nothing about the code under test.
TOOLS = frozenset(
    {".git", ".hg", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", "__pycache__"}
)
NEVER = ("/site-packages/", "/dist-packages/", "/.venv/", "/node_modules/")
CODE = (".py", ".pyc", ".pyo", ".pyi")
ABSENT, FILE, FOLDER = "absent", "file", "folder"
EXISTS, LISTING = "exists", "listing"
UNKNOWN_CONTENT = "?"
# Hashing more than this would cost more than it saves; size and time of change stand for the content.
HASHED_BYTES = 64 * 2**20
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT
ASKING = ("stat", "lstat", "access")
REPORTING = ("_pytest", "traceback", "warnings", "hypothesis")  # show source or hash it; no outcome changes


class Noting(Protocol):
    """The recorder's methods that are used here."""

    def relative(self, path: str) -> str | None: ...

    def context(self) -> str: ...

    def say(self, *fields: str) -> None: ...

    def place(self, frame: FrameType | None) -> tuple[str, str]: ...


def signature(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns} {found.st_size}"


def digest(data: bytes) -> str:
    return str(sha1(data, usedforsecurity=False).hexdigest())


def content(path: str, asked: Callable[[str], os.stat_result] = os.stat) -> str:
    """Return a text that stands for a file's content; empty if there is no such file."""
    try:
        found = asked(path)
        if not stat.S_ISREG(found.st_mode):
            return ""
        if found.st_size > HASHED_BYTES:
            return signature(found)
        with open(path, "rb", buffering=0) as stream:
            return digest(stream.read())
    except OSError:
        return ""


def listing(path: str) -> str:
    """Return a text that stands for the names in a folder, without hidden ones; empty if there is no such folder."""
    try:
        names = sorted(name for name in os.listdir(path) if not name.startswith((".", "__pycache__")))
    except OSError:
        return ""
    return digest("\n".join(names).encode(errors="surrogateescape"))


def kind_of(path: str, asked: Callable[[str], os.stat_result] = os.stat) -> str:
    try:
        return FOLDER if stat.S_ISDIR(asked(path).st_mode) else FILE
    except (OSError, ValueError):
        return ABSENT


def is_recordable(file: str) -> bool:
    """Tell if this path in the project is one that tests can depend on."""
    if TOOLS.intersection(file.split("/")) or any(part in f"/{file}" for part in NEVER):
        return False
    return not file.rpartition("/")[2].startswith(".testmondata")


class Files:
    """Hooks on Python's ways to files. Native code is watched by the test process (`rlcanary.selection.native`)."""

    def __init__(self, recorder: Noting, unrecorded: str) -> None:
        self.recorder, self.unrecorded = recorder, unrecorded
        self.paused = 0
        self.asked: set[tuple[Any, ...]] = set()
        self.written: set[str] = set()
        self.opened: Counter[str] = Counter()  # how often by Python code since the native ones were counted
        self.stat = os.stat

    def start(self) -> None:
        for name in ASKING:
            self.wrap(name)

    def wrap(self, name: str) -> None:
        original: Callable[..., Any] = getattr(os, name)
        asked = self.question

        def ask(path: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return original(path, *arguments, **options)
            finally:
                asked(path, options)

        ask.__name__ = ask.__qualname__ = name
        ask.__doc__ = original.__doc__
        ask.__module__ = "os"
        setattr(os, name, ask)
        for supported in (os.supports_fd, os.supports_dir_fd, os.supports_follow_symlinks, os.supports_effective_ids):
            if original in supported:
                supported.add(ask)

    @contextmanager
    def pausing(self) -> Iterator[None]:
        """Record nothing of what the recorder itself reads."""
        self.paused += 1
        try:
            yield
        finally:
            self.paused -= 1

    def place_of(self, path: Any) -> str | None:
        """Return the path in the project of a path given to a function of `os`, if it is one that counts."""
        if self.paused or isinstance(path, int):
            return None
        try:
            file = self.recorder.relative(os.fsdecode(path))
        except (TypeError, ValueError):
            return None
        return file if file is not None and is_recordable(file) else None

    def audited(self) -> dict[str, Callable[..., None]]:
        """Return functions by the events of Python's audit hooks that they take."""
        return {
            "open": self.opening,
            "import": lambda _name, path, *_: self.library_loaded(path),
            "ctypes.dlopen": self.library_loaded,
            "os.listdir": self.folder_listed,
            "os.scandir": self.folder_listed,
            "os.rename": lambda before, after, *_: self.will_write(before, after),
            "os.link": lambda _before, after, *_: self.will_write(after),
            "os.symlink": lambda _before, after, *_: self.will_write(after),
            **dict.fromkeys(
                ("os.remove", "os.mkdir", "os.rmdir", "os.truncate"), lambda path, *_: self.will_write(path)
            ),
        }

    def opening(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(path, str | bytes) and len(path) > 1:
            writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & WRITING)
            reads = "w" not in mode and "x" not in mode if isinstance(mode, str) else not flags & os.O_TRUNC
            self.file_opened(os.fsdecode(path), reads, writes)

    def library_loaded(self, path: Any) -> None:
        if isinstance(path, str | bytes):
            self.file_opened(os.fsdecode(path), True, False)

    def file_opened(self, path: str, reads: bool, writes: bool) -> None:
        file = self.place_of(path)
        if file is None or (path.endswith(CODE) and not writes and is_import(sys._getframe(1))):
            return
        self.opened[file] += 1
        if writes:
            self.will_write(path)
        if reads:
            self.reads(file, path)

    def will_write(self, *paths: Any) -> None:
        for path in paths:
            self.note_content(path)

    def note_content(self, path: Any) -> None:
        file = self.place_of(path)
        if file is not None and file not in self.written:
            self.written.add(file)
            with self.pausing():
                before = content(os.fsdecode(path), self.stat)
            self.opened[file] += bool(before)
            self.recorder.say("w", file, before)

    def reads(self, file: str, path: str) -> None:
        context = self.recorder.context()
        if context.startswith(self.unrecorded):
            return
        frame = sys._getframe(1)
        caller = self.recorder.place(frame)
        if (context, file, *caller) in self.asked or is_uploading(frame):
            return
        self.asked.add((context, file, *caller))
        try:
            found = self.stat(path)
        except (OSError, ValueError):
            self.recorder.say("q", context, EXISTS, file, ABSENT, *caller)
            return
        if stat.S_ISREG(found.st_mode):
            self.recorder.say("d", context, file, signature(found), *caller)

    def question(self, path: Any, options: dict[str, Any]) -> None:
        """Record that code asked about a path: a file's size and time of change stand for its content."""
        if self.paused or options.get("dir_fd") is not None:
            return
        context = self.recorder.context()
        if context.startswith(self.unrecorded) or isinstance(path, int):
            return
        if (context, path) in self.asked:
            return
        file = self.place_of(path)
        frame = sys._getframe(2)
        if file is None or is_uploading(frame):
            self.asked.add((context, path))
            return
        caller = self.recorder.place(frame)
        if (context, path, *caller) in self.asked:
            return
        self.asked.add((context, path, *caller))
        kind = kind_of(os.fsdecode(path), self.stat)
        if kind == FILE and (not file.endswith(CODE) or reads_source(frame)):
            self.reads(file, os.fsdecode(path))
        elif file != ".":
            self.recorder.say("q", context, EXISTS, file, kind, *caller)

    def folder_listed(self, path: Any) -> None:
        file = self.place_of("." if path is None else path)
        context = self.recorder.context()
        if file is None or context.startswith(self.unrecorded):
            return
        frame = sys._getframe(2)
        if not is_import(frame) and not is_uploading(frame):
            self.recorder.say("q", context, LISTING, file, "", *self.recorder.place(frame))


def callers(frame: FrameType | None, depth: int) -> Iterator[FrameType]:
    while frame is not None and depth:
        yield frame
        frame, depth = frame.f_back, depth - 1


def is_own(frame: FrameType) -> bool:
    """Tell if this is the recorder, which in a run of rlcanary's own tests is code of the project."""
    return (frame.f_globals.get("__name__") or "").startswith(OWN)


def is_import(frame: FrameType) -> bool:
    """Tell if Python's imports, pytest's, or the printing of a traceback read a file of code."""
    importing = ("importlib._bootstrap", "_pytest.assertion.rewrite")
    for each in callers(frame, 8):
        name = each.f_globals.get("__name__") or ""
        if name.startswith(importing):
            return True
        if name in ("linecache", "tokenize"):
            return not reads_source(each)
    return False


def reads_source(frame: FrameType) -> bool:
    """Tell if a program asks for the source of a function, as compilers of Python code do, and not pytest or a report."""
    asked = False
    for each in callers(frame, 16):
        name = each.f_globals.get("__name__") or ""
        if asked and name != "inspect":
            return not name.startswith(REPORTING)
        asked = name == "inspect"
    return False


def is_uploading(frame: FrameType | None) -> bool:
    """Tell if Ray is packing a working_dir: that reads every file, and does not show which of them are used."""
    return any(each.f_globals.get("__name__") == "ray._private.runtime_env.packaging" for each in callers(frame, 1000))
