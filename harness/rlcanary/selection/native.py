"""Watch the project's folders with Linux's inotify, for files that native code or other programs open.

No hook of Python sees a safetensors, Arrow or SQLite library open a file, or `cat`. The kernel tells which files were
opened, not by whom: what Python code of this process did not open is counted to the work that is going on.
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys
import threading
from collections import Counter
from collections.abc import Iterator

from rlcanary.selection.injected.rlcanary_recorder.core import SESSION, Recorder
from rlcanary.selection.injected.rlcanary_recorder.files import CODE, UNKNOWN_CONTENT, is_recordable, signature

MODIFY, OPEN, MOVED_TO, CREATE, IS_FOLDER, OVERFLOW = 0x2, 0x20, 0x80, 0x100, 0x40000000, 0x4000
HEAD = struct.Struct("iIII")
MOST_FOLDERS = 20_000
BUFFER_BYTES = 2**20


class NativeOpens:
    """The opened files of a project, to be asked for each time that work changes hands."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.root = recorder, recorder.root
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.folders: dict[int, str] = {}
        self.owner = os.getpid()
        self.descriptor = -1
        if sys.platform == "linux":
            self.descriptor = self.libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        with recorder.files.pausing():
            complete = self.descriptor >= 0 and self.watch(self.root)
        if not complete:
            recorder.write("p", "files that native code opens are not seen: the project's folders cannot be watched")

    def watch(self, top: str) -> bool:
        """Watch a folder and those in it; return false if the system does not allow so many."""
        for folder, names, _ in os.walk(top):
            relative = os.path.relpath(folder, self.root)
            names[:] = [
                name
                for name in names
                if is_recordable(name) and not os.path.exists(os.path.join(folder, name, "pyvenv.cfg"))
            ]
            if len(self.folders) >= MOST_FOLDERS:
                return False
            number = self.libc.inotify_add_watch(
                self.descriptor, os.fsencode(folder), MODIFY | OPEN | MOVED_TO | CREATE
            )
            if number < 0:
                return False
            self.folders[number] = "" if relative == "." else relative
        return True

    def report(self) -> None:
        """Record the files that were opened or written since the last report, for the present context."""
        if os.getpid() != self.owner or threading.current_thread() is not threading.main_thread():
            return
        opened: Counter[str] = Counter()
        known = self.recorder.files.opened
        for mask, file in self.events():
            path = os.path.join(self.root, file)
            if mask & OVERFLOW:
                self.recorder.write("a", self.recorder.context())
            elif mask & IS_FOLDER:
                if mask & (CREATE | MOVED_TO) and is_recordable(file):
                    self.watch(path)
            elif not is_recordable(file) or file.endswith(CODE):
                continue
            elif mask & OPEN:
                opened[file] += 1
            elif file not in self.recorder.files.written:
                self.recorder.say("w", file, "" if mask & CREATE else UNKNOWN_CONTENT)
        if not self.recorder.files.paused and not self.recorder.context().startswith(SESSION):
            for file, times in opened.items():
                if times > known[file]:
                    self.record(file)
        known.clear()

    def record(self, file: str) -> None:
        try:
            found = self.recorder.files.stat(os.path.join(self.root, file))
        except OSError:
            return
        self.recorder.say("d", self.recorder.context(), file, signature(found))

    def events(self) -> Iterator[tuple[int, str]]:
        while self.descriptor >= 0:
            try:
                read = os.read(self.descriptor, BUFFER_BYTES)
            except BlockingIOError:
                return
            except OSError:  # code under test closed every descriptor that it found
                self.descriptor = -1
                self.recorder.write("p", "files that native code opened were not seen: a test closed the watch on them")
                return
            at = 0
            while at < len(read):
                number, mask, _, length = HEAD.unpack_from(read, at)
                name = read[at + HEAD.size : at + HEAD.size + length].rstrip(b"\0")
                at += HEAD.size + length
                if number in self.folders or mask & OVERFLOW:
                    yield mask, os.path.join(self.folders.get(number, ""), os.fsdecode(name))

    def close(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
