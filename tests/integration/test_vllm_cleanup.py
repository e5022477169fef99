"""A real vLLM engine: shared by a module, gone after it, and gone when pytest itself was killed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from inner_session import Run, run_session

pytestmark = pytest.mark.vllm

ENGINE_TESTS = """
import time
from pathlib import Path

import psutil

from rlcanary.cleanup.processes import children, command_line

def test_engine_generates(vllm_engine):
    from vllm import SamplingParams
    (output,) = vllm_engine.generate(["hello four"], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8

def test_engine_is_shared_and_its_generation_is_bounded(vllm_engine):
    (output,) = vllm_engine.generate(["yes"], use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16
    engine = next(child.pid for child in children() if "EngineCore" in command_line(child.pid))
    tree = [engine, *(child.pid for child in psutil.Process(engine).children(recursive=True))]
    Path("pids").write_text(" ".join(map(str, tree)))
    Path("ended").write_text(str(time.time()))
"""
TESTS_OF_THE_NEXT_MODULE = """
import time
from pathlib import Path

from rlcanary.cleanup.processes import identify

def test_processes_of_the_engine_are_gone():
    assert [pid for pid in Path("pids").read_text().split() if identify(int(pid))] == []
    assert time.time() - float(Path("ended").read_text()) < 5
"""
KILLED = """
import time
from pathlib import Path

def test_is_killed(vllm_engine):
    Path("ready").touch()
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def engine_session(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "test_next.py").write_text(TESTS_OF_THE_NEXT_MODULE)
    return run_session(folder, ENGINE_TESTS, timeout=280)


def test_engine_is_shared_by_the_tests_of_a_module(engine_session: Run) -> None:
    assert engine_session.cases["test_engine_generates"].outcome == "passed", engine_session.output
    shared = engine_session.cases["test_engine_is_shared_and_its_generation_is_bounded"]
    assert shared.outcome == "passed"
    assert shared.seconds < 15  # an engine of its own would take longer, its end included


def test_processes_of_an_engine_are_gone_within_five_seconds_of_its_last_test(engine_session: Run) -> None:
    case = engine_session.cases["test_processes_of_the_engine_are_gone"]
    assert case.outcome == "passed", case.text


def test_engine_of_a_killed_pytest_is_gone_within_five_seconds(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(KILLED)
    (tmp_path / "pytest.ini").touch()
    process = subprocess.Popen([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.1)
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert any("EngineCore" in child.name() for child in descendants)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(descendants, timeout=5)
    # A zombie that this test's own pytest has adopted and not yet reaped holds nothing.
    assert [child for child in alive if child.is_running() and child.status() != psutil.STATUS_ZOMBIE] == []
