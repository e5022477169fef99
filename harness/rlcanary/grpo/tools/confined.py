"""Run code that a policy wrote, in this process, after giving up its rights. `PythonTool` starts it.

Arguments: the code's file, the id of the process that started this one, bytes of memory, seconds of CPU time, and the file
descriptor to write to once nothing more can go wrong. Only the standard library is imported, for a quick start.
"""

import ctypes
import errno
import linecache
import os
import platform
import resource
import signal
import struct
import sys
import traceback
from pathlib import Path

FILE_BYTES = 2**24
OPEN_FILES = 64

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER = 2
CLONE_THREAD = 0x10000

# linux/audit.h and the tables of system calls: what opens a socket, starts a process, or reaches into another one.
ARCHITECTURES = {
    "x86_64": (
        0xC000003E,
        {"socket": 41, "fork": 57, "vfork": 58, "kill": 62, "ptrace": 101, "tkill": 200, "clone": 56},
    ),
    "aarch64": (0xC00000B7, {"socket": 198, "kill": 129, "ptrace": 117, "tkill": 130, "clone": 220}),
}
ON_BOTH = {"pidfd_send_signal": 424, "io_uring_setup": 425}
CLONE3 = 435
X32 = 0x40000000

# linux/filter.h and linux/seccomp.h.
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NUMBER, ARCHITECTURE, FIRST_ARGUMENT = 0, 4, 16
KILL, ALLOW, ERROR = 0x80000000, 0x7FFF0000, 0x00050000


def confine(parent: int, memory_bytes: int, cpu_seconds: int) -> None:
    """Give up the network, further processes and everything beyond the limits, and end when the parent does.

    Raises:
        OSError: the system refused a limit.
        KeyError: the processor is not in `ARCHITECTURES`.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    _prctl(libc, PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise ProcessLookupError("the parent process has ended")
    for limit, value in (
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_CPU, cpu_seconds),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_NOFILE, OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    program = _filter(*ARCHITECTURES[platform.machine()])
    instructions = ctypes.create_string_buffer(program, len(program))
    header = ctypes.create_string_buffer(struct.pack("HP", len(program) // 8, ctypes.addressof(instructions)))
    _prctl(libc, PR_SET_NO_NEW_PRIVS, 1)
    _prctl(libc, PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(header))


def run(source: str) -> int:
    """Run the code as the main program -> its exit status. A traceback shows the code's own frames only."""
    linecache.cache["answer.py"] = (len(source), None, source.splitlines(keepends=True), "answer.py")
    try:
        exec(compile(source, "answer.py", "exec"), {"__name__": "__main__"})
    except SystemExit:
        raise
    except BaseException as error:  # noqa: BLE001 - an error of the code is its output
        own = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, own)
        return 1
    return 0


def _filter(architecture: int, calls: dict[str, int]) -> bytes:
    """Build the seccomp program: it allows all calls except those in `ARCHITECTURES`; clone may make threads."""
    denied = [number for name, number in (calls | ON_BOTH).items() if name != "clone"]
    refuse = [_instruction(RETURN, ERROR | errno.EPERM)]
    allow = [_instruction(RETURN, ALLOW)]
    program = [
        _instruction(LOAD, ARCHITECTURE),
        _instruction(EQUAL, architecture, 1, 0),
        _instruction(RETURN, KILL),
        _instruction(LOAD, NUMBER),
        _instruction(AT_LEAST, X32, 0, 1),
        *refuse,
    ]
    for number in denied:
        program += [_instruction(EQUAL, number, 0, 1), *refuse]
    # The C library takes this for a kernel without clone3 and uses clone, whose flags can be read here.
    program += [_instruction(EQUAL, CLONE3, 0, 1), _instruction(RETURN, ERROR | errno.ENOSYS)]
    program += [_instruction(EQUAL, calls["clone"], 1, 0), *allow]
    program += [_instruction(LOAD, FIRST_ARGUMENT), _instruction(ANY_BIT, CLONE_THREAD, 1, 0), *refuse, *allow]
    return b"".join(program)


def _instruction(code: int, operand: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, operand)


def _prctl(libc: ctypes.CDLL, option: int, *values: int) -> None:
    arguments = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)[:4]]
    if libc.prctl(option, *arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


if __name__ == "__main__":
    file, parent_pid, memory, cpu, ready = sys.argv[1:]
    code = Path(file).read_text(encoding="utf-8")
    confine(int(parent_pid), int(memory), int(cpu))
    os.write(int(ready), b"1")
    os.close(int(ready))
    sys.argv = ["answer.py"]
    sys.exit(run(code))
