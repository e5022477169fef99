"""A real vLLM engine: shared by a module, gone after it, and gone when pytest itself was killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from inner_session import Run, run_session
from vllm_engines import is_engine_core
from waiting import HANG_S, wait_for

from rlcanary.system.processes import identify

pytestmark = pytest.mark.vllm

ENGINE_TESTS = """
import time
from pathlib import Path

import psutil

from rlcanary.system.processes import children, command_line

def is_engine_core(pid):
    return any(name in command_line(pid) for name in ("EngineCore", "multiprocessing.spawn"))

def test_engine_generates(vllm_engine):
    from vllm import SamplingParams
    (output,) = vllm_engine.generate(["hello four"], SamplingParams(max_tokens=8, ignore_eos=True), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 8

def test_engine_is_shared_and_its_generation_is_bounded(vllm_engine):
    (output,) = vllm_engine.generate(["yes"], use_tqdm=False)
    assert 1 <= len(output.outputs[0].token_ids) <= 16
    engine = next(child.pid for child in children() if is_engine_core(child.pid))
    tree = [engine, *(child.pid for child in psutil.Process(engine).children(recursive=True))]
    Path("pids").write_text(" ".join(map(str, tree)))
"""
TESTS_OF_THE_NEXT_MODULE = """
import time
from pathlib import Path

from rlcanary.system.processes import identify

def test_processes_of_the_engine_are_gone():
    assert [pid for pid in Path("pids").read_text().split() if identify(int(pid))] == []
"""
KILLED = """
import time
from pathlib import Path

def test_is_killed(vllm_engine):
    Path("ready").touch()
    time.sleep(9999)
"""


@pytest.fixture(scope="module")
def engine_session(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "test_next.py").write_text(TESTS_OF_THE_NEXT_MODULE)
    return run_session(folder, ENGINE_TESTS, "-o", f"rlcanary_fixture_timeout={HANG_S}")


def test_engine_is_shared_by_the_tests_of_a_module(engine_session: Run) -> None:
    assert engine_session.cases["test_engine_generates"].outcome == "passed", engine_session.output
    shared = engine_session.cases["test_engine_is_shared_and_its_generation_is_bounded"]
    assert shared.outcome == "passed"


def test_processes_of_an_engine_are_gone_before_the_next_module_begins(engine_session: Run) -> None:
    case = engine_session.cases["test_processes_of_the_engine_are_gone"]
    assert case.outcome == "passed", case.text


def test_engine_of_a_killed_pytest_ends(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(KILLED)
    (tmp_path / "pytest.ini").write_text(f"[pytest]\nrlcanary_fixture_timeout = {HANG_S}\n")
    process = subprocess.Popen([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(lambda: (tmp_path / "ready").exists() or process.poll() is not None)
    assert process.poll() is None
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert any(is_engine_core(child.pid) for child in descendants)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(descendants, timeout=HANG_S)
    # A zombie that this test's own pytest has adopted and not yet reaped holds nothing.
    assert [child for child in alive if identify(child.pid) is not None] == []
