"""Write the journal of one process.

Every fact is appended to the process's journal the moment it is known, so that a killed process loses nothing. The journal
has the form of `rlcanary.system.journal`, which a recorded process may not have installed. Its records are
`{"fields": [...]}`:

    c context file line name caller at    a function, or a module's body, began to run or was resumed; it was called from
                                 line `at` of the file `caller`, or from no known code of the project;
                                 line 0 stands for pytest, which called a test
    d context file signature caller at    a file was opened for reading; its time of change and size
    q context kind path answer caller at  a path was looked at: whether it exists, or the names in a
                                 folder; or the value of an environment variable
    v file signature             a module was imported from a file with this time of change and size
    w file content               a file was opened for writing or replaced; a text that stands for its content before
    u context context caller at  the first used the second
    l context kind text          a context's kind and name
    s context callee file…       a call into another process was sent, to code in these files; `module:NAME` where only
                                 the name is known, * for any
    r context callee             such a call arrived where it is recorded
    h context file               code outside of the project imported a module by its name, and may read any part of it
    a context                    the code that ran here is unknown: it may depend on everything
    p text                       a problem for the user to read
"""

from __future__ import annotations

import errno
import fcntl
import os
from _json import encode_basestring_ascii as quoted  # all of json takes milliseconds, in every child process
from contextlib import suppress

# A test that closes and reopens files could put another file at a low descriptor.
JOURNAL_DESCRIPTOR = 400
KIND, VERSION = "selection", 3
HEADER = f'{{"journal": "{KIND}", "version": {VERSION}}}\n'.encode()
TORN = b" (torn)\n"  # ends a half line, as in rlcanary.system.journal
LOST = ".lost"  # suffix of the file that stands for records which could not be written


class JournalWriter:
    """Appends records to `folder/<process>.journal`.

    Attributes:
        said: records that are written once.
    """

    def __init__(self, folder: str, process: str) -> None:
        self.folder, self.process = folder, process
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin to write, or go on in another folder."""
        self.said: set[tuple[str, ...]] = set()
        self.torn = False
        self.open_journal()

    def open_journal(self) -> None:
        path = os.path.join(self.folder, self.process.replace(":", "-") + ".journal")
        low = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            self.descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, JOURNAL_DESCRIPTOR)
        except OSError:  # the limit of open files is lower than that
            self.descriptor = low
        else:
            os.close(low)
        if os.fstat(self.descriptor).st_size == 0:
            self.put(HEADER)

    def write(self, *fields: str) -> None:
        line = f'{{"fields": [{", ".join(map(quoted, fields))}]}}\n'.encode()
        try:
            self.put(line)
        except OSError:  # code under test may close every descriptor that it finds
            try:
                self.open_journal()
                self.put(line)
            except OSError:  # a full disk is no trouble of the code under test
                self.lose()

    def put(self, line: bytes) -> None:
        """Write a line. Raises OSError if it cannot be written whole."""
        if self.torn:
            line = TORN + line
        written = os.write(self.descriptor, line)
        self.torn = written < len(line) and (self.torn or written > 0)
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def lose(self) -> None:
        """Mark this process's records as incomplete: an empty file needs no room on a full disk."""
        with suppress(OSError):
            path = os.path.join(self.folder, self.process.replace(":", "-") + LOST)
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))

    def say(self, *fields: str) -> None:
        """Write a line unless this process has written it before."""
        if fields not in self.said:
            self.said.add(fields)
            self.write(*fields)
