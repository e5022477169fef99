"""A hung test ends within seconds of its limit as a failed test, and the session goes on."""

import json
from pathlib import Path

import pytest
from inner_session import Run, run_session

HANGING = """
import ctypes, subprocess, threading, time
import pytest

pytestmark = pytest.mark.timeout(0.5)

@pytest.fixture(scope="module")
def slow_to_start():
    time.sleep(1)

def test_first_test_with_a_slow_shared_fixture(slow_to_start):
    pass

def test_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_subprocess():
    subprocess.run(["sleep", "600"])

def test_native_code():
    ctypes.CDLL(None).sleep(600)

def test_what_catches_every_exception():
    try:
        time.sleep(600)
    except BaseException:
        pass

def test_retries_for_ever():
    while True:
        try:
            time.sleep(600)
        except Exception:
            pass

@pytest.fixture
def hangs_in_teardown():
    yield
    time.sleep(600)

def test_fixture_hangs_in_teardown(hangs_in_teardown):
    pass

@pytest.fixture
def hangs_in_setup():
    time.sleep(600)

def test_fixture_hangs_in_setup(hangs_in_setup):
    pass

@pytest.fixture(scope="module")
def never_starts():
    time.sleep(600)

def test_first_user_of_a_fixture_that_never_starts(never_starts):
    pass

def test_second_user_of_a_fixture_that_never_starts(never_starts):
    pass

def test_quick_test_after_all_that():
    pass
"""


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_session(tmp_path_factory.mktemp("hanging"), HANGING, "-o", "rlcanary_fixture_timeout=2")


@pytest.mark.parametrize(
    "name", ["lock", "subprocess", "native_code", "what_catches_every_exception", "retries_for_ever"]
)
def test_hung_test_fails_within_five_seconds_of_its_limit_with_its_stack(hanging: Run, name: str) -> None:
    case = hanging.cases[f"test_{name}"]
    assert case.outcome == "failed"
    assert "still running after 0.5 seconds, its limit (call)" in case.text
    assert "stack of thread MainThread" in case.text
    assert f"in test_{name}" in case.text
    assert case.seconds < 5.5


@pytest.mark.parametrize("phase", ["setup", "teardown"])
def test_fixture_of_one_test_that_hangs_is_an_error_of_that_test(hanging: Run, phase: str) -> None:
    case = hanging.cases[f"test_fixture_hangs_in_{phase}"]
    assert case.outcome == "error"
    assert f"its limit ({phase})" in case.text


def test_setup_of_a_shared_fixture_does_not_count_against_the_first_test(hanging: Run) -> None:
    assert hanging.cases["test_first_test_with_a_slow_shared_fixture"].outcome == "passed"


def test_shared_fixture_that_never_starts_is_waited_for_once(hanging: Run) -> None:
    first = hanging.cases["test_first_user_of_a_fixture_that_never_starts"]
    second = hanging.cases["test_second_user_of_a_fixture_that_never_starts"]
    assert (first.outcome, second.outcome) == ("error", "error")
    assert "the fixture never_starts was still running after 2 seconds" in first.text
    assert second.seconds < 1


def test_session_runs_on_after_hung_tests(hanging: Run) -> None:
    assert hanging.cases["test_quick_test_after_all_that"].outcome == "passed"


def test_test_without_a_limit_has_five_minutes(tmp_path: Path) -> None:
    assert "timeout: 300.0s" in run_session(tmp_path, "def test_one(): pass").output


@pytest.mark.parametrize(
    ("options", "marker", "limit"),
    [
        (["-o", "rlcanary_timeout=0.3"], "", "0.3"),
        (["-o", "rlcanary_timeout=50", "--timeout=0.3"], "", "0.3"),
        (["--timeout=50"], "@pytest.mark.timeout(0.3)", "0.3"),
        (["-o", "rlcanary_timeout=50"], "@pytest.mark.timeout(0.3)", "0.3"),
        (["-o", "rlcanary_timeout=0.3"], "@pytest.mark.timeout(method='signal')", "0.3"),
    ],
    ids=["ini", "command line", "marker", "marker above ini", "ini below a marker without a time"],
)
def test_limit_can_be_set_by(tmp_path: Path, options: list[str], marker: str, limit: str) -> None:
    tests = f"import pytest, time\n{marker}\ndef test_sleeps(): time.sleep(60)\n"
    assert f"still running after {limit} seconds" in run_session(tmp_path, tests, *options).cases["test_sleeps"].text


def test_marker_of_zero_means_no_limit(tmp_path: Path) -> None:
    tests = "import pytest, time\n@pytest.mark.timeout(0)\ndef test_sleeps(): time.sleep(0.5)\n"
    assert run_session(tmp_path, tests, "-o", "rlcanary_timeout=0.2").cases["test_sleeps"].outcome == "passed"


DEADLOCK = """
import ctypes
import pytest

def deadlock(library):
    mutex = ctypes.create_string_buffer(64)
    library.pthread_mutex_init(mutex, None)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)

def test_before(tracker):
    tracker.track("value", 1)

@pytest.mark.timeout(0.5)
def test_deadlock(tracker):
    tracker.track("reached", 2)
    deadlock(ctypes.LIBRARY(None))

def test_after():
    pass
"""
UNINTERRUPTIBLE = DEADLOCK.replace("LIBRARY", "CDLL")
HOLDING_THE_INTERPRETER = DEADLOCK.replace("LIBRARY", "PyDLL")


def test_native_code_that_nothing_interrupts_ends_the_process_with_everything_saved(tmp_path: Path) -> None:
    run = run_session(tmp_path, UNINTERRUPTIBLE, "--testmon")
    assert run.code == 1
    assert run.seconds < 20
    assert run.cases["test_deadlock"].outcome == "failed"
    assert "in deadlock" in run.cases["test_deadlock"].text
    assert "1 tests did not run" in run.output
    results = json.loads((tmp_path / "unit_results.json").read_text())
    assert results["exit_status"] == 1
    assert results["metrics"]["test_inner::test_before"]["value"] == 1
    assert results["metrics"]["test_inner::test_deadlock"]["reached"] == 2
    again = run_session(tmp_path, UNINTERRUPTIBLE, "--testmon", "--collect-only", "-q")
    assert "test_before" not in again.output
    assert "test_deadlock" in again.output


def test_native_code_that_nothing_interrupts_costs_only_its_worker_under_xdist(tmp_path: Path) -> None:
    run = run_session(tmp_path, UNINTERRUPTIBLE, "-n", "1")
    assert "in native code that nothing interrupts" in run.output
    assert run.cases["test_after"].outcome == "passed"


def test_native_code_that_keeps_the_interpreter_ends_the_process_with_its_stack(tmp_path: Path) -> None:
    run = run_session(tmp_path, HOLDING_THE_INTERPRETER)
    assert run.code == 1
    assert "in deadlock" in run.output
    assert run_session(tmp_path, "def test_next(): pass").output.count("what it had recorded is in") == 1


HANGING_IN_RAY = """
import asyncio, time
import pytest, ray

@pytest.fixture(scope="session")
def ray_options():
    return {"num_cpus": 2, "include_dashboard": False}

@ray.remote(num_cpus=0)
class Server:
    def answer(self):
        return 42
    def hang(self):
        time.sleep(600)

@ray.remote(num_cpus=2)
class Stuck:
    def hang(self):
        time.sleep(600)
    def spin(self):
        while True:
            pass
    def answer(self):
        return 42

@ray.remote(num_cpus=0)
class AsyncStuck:
    async def hang(self):
        await asyncio.sleep(600)

@ray.remote(num_cpus=2)
def stuck_task():
    time.sleep(600)

@pytest.fixture(scope="module")
def server(ray_cluster):
    server = Server.remote()
    ray.get(server.answer.remote())
    return server

def test_server_answers(server):
    assert ray.get(server.answer.remote()) == 42

@pytest.mark.timeout(3)
def test_get(ray_cluster, server):
    actor = Stuck.remote()
    ray.get(actor.answer.remote())
    ray.get(actor.hang.remote())

@pytest.mark.timeout(3)
def test_wait(ray_cluster):
    actor = Stuck.remote()
    ray.get(actor.answer.remote())
    ray.wait([actor.spin.remote()])

@pytest.mark.timeout(3)
def test_task(ray_cluster):
    ray.get(stuck_task.remote())

@pytest.mark.timeout(3)
def test_async(ray_cluster):
    ray.get(AsyncStuck.remote().hang.remote())

@pytest.mark.timeout(1)
def test_actor_that_cannot_be_placed(ray_cluster):
    ray.get(Stuck.options(num_cpus=64).remote().answer.remote())

@pytest.mark.timeout(60)
def test_next_test_on_the_shared_cluster(ray_cluster, server):
    assert ray.get(server.answer.remote()) == 42
    assert ray.get(Stuck.remote().answer.remote(), timeout=15) == 42

@pytest.mark.timeout(1)
def test_actor_of_a_shared_fixture(server):
    ray.get(server.hang.remote())
"""


@pytest.fixture(scope="module")
def hanging_in_ray(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_session(tmp_path_factory.mktemp("ray"), HANGING_IN_RAY)


@pytest.mark.ray
@pytest.mark.parametrize(
    ("name", "limit", "stack"),
    [("get", 3, "in hang"), ("wait", 3, "in spin"), ("task", 3, "in stuck_task"), ("async", 3, "ray::AsyncStuck.hang")],
)
def test_test_hung_in_ray_fails_with_the_stack_of_the_busy_worker(
    hanging_in_ray: Run, name: str, limit: float, stack: str
) -> None:
    case = hanging_in_ray.cases[f"test_{name}"]
    assert case.outcome == "failed"
    assert f"still running after {limit} seconds" in case.text
    assert stack in case.text
    assert case.seconds < limit + 5


@pytest.mark.ray
def test_actor_that_cannot_be_placed_is_no_hang(hanging_in_ray: Run) -> None:
    case = hanging_in_ray.cases["test_actor_that_cannot_be_placed"]
    assert case.outcome == "failed"
    assert case.seconds < 6


@pytest.mark.ray
def test_shared_cluster_can_be_used_after_hung_tests(hanging_in_ray: Run) -> None:
    assert hanging_in_ray.cases["test_next_test_on_the_shared_cluster"].outcome == "passed"


@pytest.mark.ray
def test_hung_actor_of_a_shared_fixture_is_named_and_left_to_its_fixture(hanging_in_ray: Run) -> None:
    case = hanging_in_ray.cases["test_actor_of_a_shared_fixture"]
    assert case.outcome == "failed"
    assert "ray::Server.hang" in case.text
    assert "left running" in case.text
    assert "hang (" in case.text  # a line of py-spy's
