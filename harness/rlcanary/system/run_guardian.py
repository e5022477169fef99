"""The parent process of a run's command. All processes that the command starts or leaves behind become its descendants.

This also finds a daemon that has left its session and emptied its environment. It runs as a program, with the standard
library only:

    run_guardian.py STATUS_FD HOLD_FD COMMAND…

It writes `started` to STATUS_FD, and then `error ERRNO` or `ended WAIT_STATUS`. Then it stays, so that its children can
be listed and ended, until a byte comes from HOLD_FD. If HOLD_FD is closed without a byte, its starter was killed, and it
stays until it has no children.
"""

import contextlib
import ctypes
import errno
import os
import signal
import sys

PR_SET_CHILD_SUBREAPER = 36


def main() -> None:
    status, hold, command = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    for descriptor in (status, hold):
        os.set_inheritable(descriptor, False)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    child = os.fork()
    if not child:
        os.setsid()
        for signum in (signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(signum, signal.SIG_DFL)  # Python ignores these signals; the command must not.
        os.write(status, f"error {_execute(command)}\n".encode())
        os._exit(127)
    with contextlib.suppress(BrokenPipeError):
        os.write(status, b"started\n")
    pid, code = os.wait()
    while pid != child:
        pid, code = os.wait()
    with contextlib.suppress(BrokenPipeError):
        os.write(status, f"ended {code}\n".encode())
    if not os.read(hold, 1):
        with contextlib.suppress(ChildProcessError):
            while True:
                os.wait()


def _execute(command: list[str]) -> int:
    """Replace this process by the command. Returns the error number if there is no such program."""
    number = 0
    for words in (command, ["sh", *command]):  # A shell runs a script without a #! line in this way.
        try:
            os.execvp(words[0], words)
        except OSError as error:
            number = error.errno or 0
        if number != errno.ENOEXEC:
            break
    return number


if __name__ == "__main__":
    main()
