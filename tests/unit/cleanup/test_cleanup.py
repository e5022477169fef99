"""Whose GPUs, whose tracebacks, whose processes: the parts of the clean-up that need no cluster."""

import gc
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from waiting import wait_for

from rlcanary.cleanup import belongings
from rlcanary.cleanup.frames import clear_tracebacks
from rlcanary.cleanup.gpu_shares import share, take_share, visible_devices
from rlcanary.cleanup.leaks import _gpu_tensors, growth, measure
from rlcanary.system import processes


@pytest.mark.parametrize(
    ("devices", "workers", "shares"),
    [
        (["0", "1", "2", "3"], 2, [["0", "2"], ["1", "3"]]),
        (["4", "7"], 2, [["4"], ["7"]]),
        (["GPU-aaaa", "MIG-bbbb"], 2, [["GPU-aaaa"], ["MIG-bbbb"]]),
        (["0", "1", "2"], 2, [["0", "2"], ["1"]]),
        (["5"], 3, [["5"], ["5"], ["5"]]),
        ([], 2, [[], []]),
    ],
)
def test_workers_share_the_callers_gpus(devices: list[str], workers: int, shares: list[list[str]]) -> None:
    assert [share(devices, worker, workers) for worker in range(workers)] == shares


def test_worker_in_the_place_of_a_crashed_one_has_a_share_too() -> None:
    assert share(["0", "1"], worker=3, workers=2) == ["1"]


def test_share_is_taken_of_what_the_caller_may_use() -> None:
    assert visible_devices({"CUDA_VISIBLE_DEVICES": "4, 7"}) == ["4", "7"]
    assert visible_devices({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_pytest_inside_a_worker_takes_no_share_of_the_workers_share() -> None:
    session = {"PYTEST_XDIST_TESTRUNUID": "a", "PYTEST_XDIST_WORKER_COUNT": "2"}
    environment = {**session, "PYTEST_XDIST_WORKER": "gw1", "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    for _ in range(2):
        take_share(environment)
        assert environment["CUDA_VISIBLE_DEVICES"] == "1,3"
    # It may have workers of its own.
    environment["PYTEST_XDIST_TESTRUNUID"] = "b"
    take_share(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"


def test_worker_without_a_number_keeps_the_callers_gpus() -> None:
    environment = {"PYTEST_XDIST_WORKER": "alpha", "PYTEST_XDIST_WORKER_COUNT": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    take_share(environment)
    assert environment["CUDA_VISIBLE_DEVICES"] == "0,1"


class Tensor:
    """Stands for something large that a failed test holds."""


def raise_from_a_chain(tensors: list[Tensor]) -> None:
    def innermost(tensor: Tensor) -> None:
        raise ValueError("innermost")

    def inner(tensor: Tensor) -> None:
        try:
            innermost(tensors.pop())
        except ValueError as error:
            raise KeyError("inner") from error

    def in_group(tensor: Tensor) -> None:
        try:
            inner(tensors.pop())
        except KeyError as error:
            raise ExceptionGroup("group", [error]) from None

    in_group(tensors.pop())


def test_cleared_traceback_holds_no_variable_of_the_whole_chain() -> None:
    tensors = [Tensor(), Tensor(), Tensor()]
    references = [weakref.ref(tensor) for tensor in tensors]
    with pytest.raises(ExceptionGroup) as caught:
        raise_from_a_chain(tensors)
    gc.collect()
    assert all(reference() is not None for reference in references)
    clear_tracebacks(caught.value)
    assert [reference() for reference in references] == [None] * 3


def test_process_id_with_another_start_time_is_left_alone() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        identity = processes.identify(child.pid)
        assert identity is not None
        assert processes.end([identity._replace(started=identity.started + 1)]) == []
        assert child.poll() is None
        assert [left.pid for left in processes.end([identity])] == [child.pid]
        assert processes.identify(child.pid) is None
    finally:
        child.kill()
        child.wait()


def test_descendants_of_a_child_end_with_it() -> None:
    script = "import subprocess, time; print(subprocess.Popen(['sleep', '9999']).pid, flush=True); time.sleep(9999)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    grandchild = int(child.stdout.readline())
    identity = processes.identify(child.pid)
    assert identity is not None
    processes.end([identity])
    child.stdout.close()
    child.wait()
    assert processes.identify(grandchild) is None


def test_a_killed_child_that_still_gives_its_memory_back_is_no_longer_listed_and_is_reaped() -> None:
    script = "import time; held = b'x' * 2**30; print(flush=True); time.sleep(9999)"
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    child.kill()
    while processes.command_line(child.pid):
        pass
    census = processes.census()
    assert child.pid not in {process.pid for process in census.alive}

    def is_reaped() -> bool:
        # It waits some seconds for the child, which may need longer for its memory.
        processes.reap(census.dead)
        return not Path(f"/proc/{child.pid}").exists()

    wait_for(is_reaped)
    with pytest.raises(ChildProcessError):
        os.waitpid(child.pid, os.WNOHANG)
    child.stdout.close()
    child.wait()


def test_child_is_listed_until_it_ends() -> None:
    child = subprocess.Popen(["sleep", "62"])
    assert child.pid in {process.pid for process in processes.children()}
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert child.pid not in {process.pid for process in processes.children()}  # a zombie is no leak
    child.wait()


def test_what_grew_is_named(tmp_path) -> None:
    before = measure()
    with (tmp_path / "open").open("w"):
        (grown,) = growth(before, measure())
    assert str(grown) == f"+1 file descriptors: {tmp_path / 'open'}"
    assert growth(before, measure()) == []


OTHER = """
import sys
from multiprocessing import shared_memory
segment = shared_memory.SharedMemory(create=True, size=8, name=sys.argv[1])
print("made", flush=True)
input()
segment.close(), segment.unlink()
"""
MEASURING = """
import os
from multiprocessing import shared_memory
from rlcanary.cleanup.leaks import exceeded, measure
before = measure()
print("measured", flush=True)
input()
own = shared_memory.SharedMemory(create=True, size=8, name=f"rlcanary_{os.getpid()}")
own.close()
print(exceeded(before, measure(), {"shm": 0}), flush=True)
own.unlink()
"""


def begin(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Start Python code in a process, and wait for its first line."""
    command = [sys.executable, "-c", code, *arguments]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def test_segments_that_other_processes_make_and_remove_do_not_count() -> None:
    removes = begin(OTHER, f"rlcanary_{os.getpid()}")
    measures = begin(MEASURING)
    removes.communicate("\n")
    makes = begin(OTHER, f"rlcanary_{measures.pid}_other")
    said, _ = measures.communicate("\n")
    makes.communicate("\n")
    assert f"+1 segments in /dev/shm: rlcanary_{measures.pid} (allowed: 0)" in said


def test_looking_for_tensors_on_gpus_asks_no_object_for_its_class(monkeypatch: pytest.MonkeyPatch) -> None:
    class Proxy:
        @property
        def __class__(self) -> type:
            raise RuntimeError("what it stands for is not there")

    pytest.importorskip("torch")
    kept = Proxy()
    assert any(each is kept for each in gc.get_objects())
    monkeypatch.setattr(belongings, "cuda_is_up", lambda: True)
    assert _gpu_tensors() == {}
