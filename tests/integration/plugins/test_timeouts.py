"""A hung test ends within seconds of its limit as a failed test, and the session goes on."""

import json
from pathlib import Path

import psutil
import pytest
from inner_session import RUNS_TWICE, Run, run_session

HANGING = """
import ctypes, subprocess, threading, time
import pytest

pytestmark = pytest.mark.timeout(2)

@pytest.fixture(scope="module")
def slow_to_start():
    time.sleep(5)

@pytest.mark.timeout(4)
def test_first_test_with_a_slow_shared_fixture(slow_to_start):
    pass

def test_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def test_subprocess():
    subprocess.run(["sleep", "9999"])

def test_native_code():
    ctypes.CDLL(None).sleep(9999)

def test_what_catches_every_exception():
    try:
        time.sleep(9999)
    except BaseException:
        pass

def test_retries_for_ever():
    while True:
        try:
            time.sleep(9999)
        except Exception:
            pass

@pytest.fixture
def hangs_in_teardown():
    yield
    time.sleep(9999)

def test_fixture_hangs_in_teardown(hangs_in_teardown):
    pass

@pytest.fixture
def hangs_in_setup():
    time.sleep(9999)

def test_fixture_hangs_in_setup(hangs_in_setup):
    pass

@pytest.fixture(scope="module")
def never_starts():
    print("waited for", file=open("never", "a"))
    time.sleep(9999)

def test_first_user_of_a_fixture_that_never_starts(never_starts):
    pass

def test_second_user_of_a_fixture_that_never_starts(never_starts):
    pass

@pytest.mark.timeout(0)
def test_quick_test_after_all_that():
    pass
"""


@pytest.fixture(scope="module")
def hanging(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_session(tmp_path_factory.mktemp("hanging"), HANGING, "-o", "rlcanary_fixture_timeout=8")


@pytest.mark.parametrize(
    "name", ["lock", "subprocess", "native_code", "what_catches_every_exception", "retries_for_ever"]
)
def test_hung_test_fails_with_its_stack(hanging: Run, name: str) -> None:
    case = hanging.cases[f"test_{name}"]
    assert case.outcome == "failed"
    assert "after 2 seconds, its limit" in case.text
    assert "stack of thread MainThread" in case.text
    assert f"in test_{name}" in case.text


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
    assert "never_starts was still running" in first.text
    assert "after 8 seconds" in first.text
    assert (hanging.folder / "never").read_text() == "waited for\n"


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

@pytest.mark.timeout(2)
def test_deadlock(tracker):
    tracker.track("reached", 2)
    deadlock(ctypes.LIBRARY(None))

def test_after(tracker):
    tracker.track("value", 3)
"""
UNINTERRUPTIBLE = DEADLOCK.replace("LIBRARY", "CDLL")
HOLDING_THE_INTERPRETER = DEADLOCK.replace("LIBRARY", "PyDLL")


GRACE = "-o", "rlcanary_timeout_grace=2"


def test_native_code_that_nothing_interrupts_ends_only_its_test(tmp_path: Path) -> None:
    run = run_session(tmp_path, UNINTERRUPTIBLE, *GRACE)
    assert run.code == 1
    assert run.cases["test_deadlock"].outcome == "failed"
    assert "in native code" in run.cases["test_deadlock"].text
    assert "in deadlock" in run.cases["test_deadlock"].text
    assert "the remaining tests (1)" in run.output
    assert run.cases["test_after"].outcome == "passed"
    assert "1 failed, 2 passed" in run.output
    results = json.loads((tmp_path / "unit_results.json").read_text())
    assert results["exit_status"] == 1
    tracked = {key: value["value"] for key, value in results["metrics"].items() if "value" in value}
    assert tracked == {"test_inner::test_before": 1, "test_inner::test_after": 3}
    assert results["metrics"]["test_inner::test_deadlock"]["reached"] == 2


CATCHES_EVERYTHING = """
import os, subprocess, time
import pytest

@pytest.fixture(scope="module")
def shared():
    print(os.getpid(), file=open("set_ups", "a"))

@pytest.mark.timeout(2)
@pytest.mark.parametrize("i", [0, 1])
def test_goes_on(shared, i):
    subprocess.Popen(["sleep", "9998"])
    while True:
        try:
            time.sleep(9999)
        except BaseException:
            pass

@pytest.mark.parametrize("i", range(13))
def test_after(shared, i):
    pass

def test_fails():
    assert False
"""


def test_tests_that_catch_every_interruption_end_and_the_others_run(tmp_path: Path) -> None:
    run = run_session(tmp_path, CATCHES_EVERYTHING, *GRACE)
    assert run.code == 1
    for i in (0, 1):
        assert f"FAILED test_inner.py::test_goes_on[{i}]" in run.output
    assert "catches every interruption" in run.output
    assert "native code" not in run.output
    assert [run.cases[f"test_after[{i}]"].outcome for i in range(13)] == ["passed"] * 13
    assert run.cases["test_fails"].outcome == "failed"
    set_up_in = (tmp_path / "set_ups").read_text().split()
    assert len(set_up_in) == len(set(set_up_in))  # one in each process, none where the limit passes before it
    left = [child.info for child in psutil.process_iter(["cmdline", "cwd"]) if child.info["cwd"] == str(tmp_path)]
    assert not [each for each in left if each["cmdline"] == ["sleep", "9998"]]


def test_maxfail_ends_the_session_at_a_test_that_cannot_be_stopped(tmp_path: Path) -> None:
    run = run_session(tmp_path, CATCHES_EVERYTHING, *GRACE, "-x")
    assert run.code == 1
    assert "1 failed" in run.output
    assert "test_after[0]" not in run.cases


@pytest.mark.parametrize(
    ("options", "why"),
    [(["--testmon"], "only this process can write"), (["-p", "no:xdist"], "pytest-xdist is")],
)
def test_what_cannot_run_in_another_process_is_said_and_all_is_saved(
    tmp_path: Path, options: list[str], why: str
) -> None:
    run = run_session(tmp_path, UNINTERRUPTIBLE, *GRACE, *options)
    assert run.code == 1
    assert f"1 tests did not run, because {why}" in run.output
    assert run.cases["test_deadlock"].outcome == "failed"
    assert json.loads((tmp_path / "unit_results.json").read_text())["exit_status"] == 1
    if "--testmon" in options:
        again = run_session(tmp_path, UNINTERRUPTIBLE, "--testmon", "--collect-only", "-q")
        assert "test_before" not in again.output
        assert "test_deadlock" in again.output
        assert "test_after" in again.output


SLOW_REPORT = """
import time

def pytest_runtest_logreport(report):
    if report.nodeid.endswith("test_deadlock"):
        time.sleep(6)
"""


def test_report_that_takes_longer_than_the_grace_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(SLOW_REPORT)
    run = run_session(tmp_path, UNINTERRUPTIBLE, *GRACE)
    assert run.cases["test_deadlock"].outcome == "failed"
    assert run.cases["test_after"].outcome == "passed"


def test_native_code_that_nothing_interrupts_costs_only_its_worker_under_xdist(tmp_path: Path) -> None:
    run = run_session(tmp_path, UNINTERRUPTIBLE, *GRACE, "-n", "1")
    assert "in native code" in run.output
    assert run.cases["test_after"].outcome == "passed"


def test_native_code_that_keeps_the_interpreter_ends_the_process_with_its_stack(tmp_path: Path) -> None:
    run = run_session(tmp_path, HOLDING_THE_INTERPRETER, *GRACE)
    assert run.code == 1
    assert "in deadlock" in run.output
    assert run_session(tmp_path, "def test_next(): pass").output.count("an earlier run was killed") == 1


@pytest.mark.parametrize("library", ["CDLL", "PyDLL"])
def test_file_whose_import_cannot_be_stopped_is_named_and_ends_the_process(tmp_path: Path, library: str) -> None:
    (tmp_path / "test_stuck.py").write_text(f"{DEADLOCK.replace('LIBRARY', library)}\ndeadlock(ctypes.{library}(None))")
    run = run_session(tmp_path, "def test_one(): pass", *GRACE, "-o", "rlcanary_collection_timeout=4")
    assert run.code == 1
    assert "test_stuck.py" in run.output
    assert "in deadlock" in run.output


def test_file_that_hangs_while_it_is_imported_is_an_error_and_the_others_are_collected(tmp_path: Path) -> None:
    (tmp_path / "test_hangs.py").write_text("import time\ntime.sleep(9999)\n")
    options = "--continue-on-collection-errors", "-o", "rlcanary_collection_timeout=4"
    run = run_session(tmp_path, "def test_one(): pass", *options)
    assert run.code == 1
    assert "4 seconds, its limit (collect" in run.output
    assert "line 2, in <module>" in run.output
    assert run.cases["test_one"].outcome == "passed"


SLOW_CLUSTER = """
import sys, time, types
import pytest

@pytest.fixture
def unhurried(monkeypatch):
    # Stands for a machine on which ray.init takes longer than the test may.
    ray = types.ModuleType("ray")
    ray.is_initialized = lambda: False
    ray.init = lambda **options: time.sleep(2)
    ray.shutdown = lambda: None
    monkeypatch.setitem(sys.modules, "ray", ray)

@pytest.mark.timeout(1.5)
def test_needs_a_cluster(unhurried, ray_session):
    assert ray_session is sys.modules["ray"]
"""


def test_cluster_that_ray_was_too_slow_to_start_is_started_again(tmp_path: Path) -> None:
    tests = SLOW_CLUSTER.replace("time.sleep(2)", "init()").replace("@pytest.fixture", FAILS_ONCE, 1)
    run = run_session(tmp_path, tests)
    assert run.cases["test_needs_a_cluster"].outcome == "passed", run.output
    assert (tmp_path / "inits").read_text() == "init\n" * 2
    (tmp_path / "inits").unlink()
    other = run_session(tmp_path, tests.replace("timed out during startup", "no such option"))
    assert "no such option" in other.cases["test_needs_a_cluster"].text


FAILS_ONCE = """def init():
    import subprocess
    with open("inits", "a+") as file:
        file.seek(0)
        first = not file.read()
        print("init", file=file)
    if first:
        subprocess.Popen(["sleep", "9997"])
        raise Exception("The current node timed out during startup.")
    assert "sleep 9997" not in [processes.command_line(child.pid) for child in processes.children()]

from rlcanary.system import processes

@pytest.fixture"""


def test_time_that_the_cluster_of_a_test_takes_to_start_is_not_the_tests(tmp_path: Path) -> None:
    run = run_session(tmp_path, SLOW_CLUSTER)
    assert run.cases["test_needs_a_cluster"].outcome == "passed", run.output


HANGS_AGAIN = """
import time

def test_hangs():
    time.sleep(9999)
"""


def test_each_attempt_at_a_test_has_a_limit(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(RUNS_TWICE)
    run = run_session(tmp_path, HANGS_AGAIN, "--timeout", "2")
    assert "2 failed" in run.output, run.output
