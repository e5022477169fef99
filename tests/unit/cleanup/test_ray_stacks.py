"""The stack of an aborted process is that of its main thread, whichever of its threads could take the signal."""

import signal
import subprocess
import sys

import pytest
from waiting import HANG_S

from rlcanary.cleanup.ray_stacks import abort_main_thread

ANOTHER_THREAD_IS_FREE = """
import faulthandler, signal, sys, threading, time
faulthandler.enable(all_threads=False)  # as Ray does in its workers
threading.Thread(target=time.sleep, args=(9999,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGABRT])
print("blocked", flush=True)
sys.stdin.readline()

def the_call():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGABRT])

the_call()
"""


def test_main_thread_writes_its_stack_where_another_thread_could_take_the_signal() -> None:
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", ANOTHER_THREAD_IS_FREE]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "blocked\n"
        abort_main_thread(process.pid)
        _, written = process.communicate("go on\n", timeout=HANG_S)
    assert "in the_call" in written
    assert process.returncode == -signal.SIGABRT


def test_process_that_is_gone_is_told() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait(HANG_S)
    with pytest.raises(ProcessLookupError):
        abort_main_thread(process.pid)
