"""Pools start their workers when they are first asked, in a test: those of a pool that lasts are not the test's."""

from pathlib import Path

from inner_session import run_session

POOLS = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
import pytest
from rlcanary.system import processes

def commands():
    return [processes.command_line(child.pid) for child in processes.children()]

@pytest.fixture(scope="module")
def executor():
    with ProcessPoolExecutor(1) as executor:
        yield executor

@pytest.fixture(scope="module")
def pool():
    with multiprocessing.Pool(1, maxtasksperchild=1) as pool:  # each task starts a worker in the place of its own
        yield pool

@pytest.mark.parametrize("number", range(3))
def test_executor(executor, number):
    assert executor.submit(abs, -number).result(60) == number

@pytest.mark.parametrize("number", range(3))
def test_pool(pool, number):
    assert pool.apply_async(abs, (-number,)).get(60) == number

@pytest.fixture
def dropped():
    return multiprocessing.get_context("spawn").Pool(1)

def test_drops_a_pool(dropped):
    assert dropped.apply_async(abs, (-1,)).get(60) == 1

def test_starts_a_process():
    multiprocessing.get_context("spawn").Process(target=time.sleep, args=(300,)).start()

def test_nothing_but_the_shared_pools_is_left(executor, pool):
    assert not [command for command in commands() if "spawn_main" in command]
"""


def test_workers_of_a_pool_that_lasts_serve_the_next_test_and_those_of_a_dropped_one_are_ended(tmp_path: Path) -> None:
    run = run_session(tmp_path, POOLS, "-p", "no:rlcanary-tracker")
    assert {name: case.text for name, case in run.cases.items() if case.outcome != "passed"} == {}
    assert "test_inner.py::test_starts_a_process" in run.output.partition("left behind")[2]
