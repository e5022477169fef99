"""Start and dismiss the guardian of a pytest session (guardian.py, which runs by itself)."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

from rlcanary.cleanup import guardian

# A signal that ends a session must not end its guardian before it has done its work.
BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# A shell is there in a millisecond. Python follows in its place, and sessions shorter than this do not pay for it.
LATER = ("/bin/sh", "-c", f'sleep {guardian.LOOK_SECONDS}; exec "$@"', "rlcanary guardian")


class SessionGuardian:
    """The guardian of this process, and the mark for its children."""

    def __init__(self) -> None:
        owner = os.getpid()
        mark = f"{owner}-{os.urandom(4).hex()}"
        self._outer = os.environ.get(guardian.MARK_VARIABLE)
        command = [sys.executable, "-I", "-S", guardian.__file__, mark, str(owner), str(guardian.start_time(owner))]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED)
        try:
            self._process = subprocess.Popen(
                [*LATER, *command],
                stdin=subprocess.DEVNULL,
                # A reader of pytest's output must not wait for the guardian.
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if name != guardian.MARK_VARIABLE},
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.environ[guardian.MARK_VARIABLE] = f"{self._outer} {mark}" if self._outer else mark

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """Dismiss the guardian when pytest ends in order."""
        with contextlib.suppress(ProcessLookupError):  # a test has ended all children of its process
            os.killpg(self._process.pid, signal.SIGKILL)  # with the shell's sleep
        self._process.wait()
        if self._outer is None:
            os.environ.pop(guardian.MARK_VARIABLE, None)
        else:
            os.environ[guardian.MARK_VARIABLE] = self._outer
