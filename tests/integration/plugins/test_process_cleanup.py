"""What a test leaves behind is ended, whatever became of the test and of pytest."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from inner_session import RUNS_TWICE, Run, run_session
from waiting import HANG_S, wait_for

from rlcanary.system.processes import identify

LEAVING = """
import multiprocessing, os, subprocess, sys, threading, time
import pytest
from multiprocessing import shared_memory
from rlcanary.system import processes

def commands():
    return [processes.command_line(child.pid) for child in processes.children()]

@pytest.fixture(scope="module")
def service():
    process = subprocess.Popen(["sleep", "901"])
    yield process
    process.kill()
    process.wait()

def test_uses_a_shared_service(service):
    assert "sleep 901" in commands()

def test_leaves_a_process():
    subprocess.Popen(["sleep", "902"])

def test_leaves_a_daemon():
    subprocess.run("(setsid sleep 903 &)", shell=True)

def test_leaves_one_that_ignores_requests_to_end():
    deaf = "import signal, time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(904)"
    subprocess.Popen([sys.executable, "-c", deaf], stdout=subprocess.PIPE).stdout.readline()

def test_leaves_a_forked_child():
    if os.fork() == 0:
        time.sleep(905)
        os._exit(0)

def test_leaves_no_zombie_of_what_ended_before():
    assert processes.census().dead == set()

def test_only_the_shared_service_is_left(service):
    assert [command for command in commands() if "guardian" not in command] == ["sleep 901"]

@pytest.mark.leak_check
def test_leaves_what_serves_every_test():
    segment = shared_memory.SharedMemory(create=True, size=8)
    segment.close(), segment.unlink()
    subprocess.Popen(["sleep", "9070"])  # see rlcanary_keep_processes

@pytest.mark.leak_check(processes=0)
def test_may_leave_no_process():
    subprocess.Popen(["sleep", "906"])

@pytest.mark.leak_check(threads=0, fds=0)
def test_may_leave_no_thread_or_file():
    threading.Thread(target=time.sleep, args=(5,), name="left-alone", daemon=True).start()
    commands.file = open("left-open", "w")

@pytest.mark.leak_check(process=0)
def test_asks_for_the_unknown():
    pass
"""


@pytest.fixture(scope="module")
def leaving(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("leaving")
    (folder / "pytest.ini").write_text("[pytest]\nrlcanary_keep_processes = sleep 9070\n")
    return run_session(folder, LEAVING)


def test_leak_check_does_not_count_processes_that_tests_may_leave(leaving: Run) -> None:
    assert leaving.cases["test_leaves_what_serves_every_test"].outcome == "passed", leaving.output


def test_processes_that_tests_leave_are_gone_and_those_of_shared_fixtures_stay(leaving: Run) -> None:
    assert leaving.cases["test_only_the_shared_service_is_left"].outcome == "passed", leaving.output


def test_orphans_that_ended_are_reaped(leaving: Run) -> None:
    assert leaving.cases["test_leaves_no_zombie_of_what_ended_before"].outcome == "passed", leaving.output


SESSION_IN_A_SESSION = """
import subprocess
import pytest
from rlcanary.system import processes

def test_inner_session_ends_only_its_own(tmp_path):
    mine = subprocess.Popen(["sleep", "911"])
    (tmp_path / "test_nested.py").write_text("import subprocess\\ndef test_one(): subprocess.Popen(['sleep', '912'])")
    assert pytest.main(["-q", "-p", "no:rlcanary-tracker", str(tmp_path), "--rootdir", str(tmp_path)]) == 0
    commands = [processes.command_line(child.pid) for child in processes.children()]
    assert [command for command in commands if "guardian" not in command] == ["sleep 911"]

@pytest.mark.timeout(1)
def test_limits_still_hold():
    subprocess.run(["sleep", "600"])
"""


def test_session_inside_a_session_ends_only_what_is_its_own(tmp_path: Path) -> None:
    run = run_session(tmp_path, SESSION_IN_A_SESSION)
    assert run.cases["test_inner_session_ends_only_its_own"].outcome == "passed", run.output
    assert "its limit (call)" in run.cases["test_limits_still_hold"].text


@pytest.mark.parametrize(
    ("test", "left"),
    [
        ("test_leaves_a_process", "(sleep 902)"),
        ("test_leaves_a_daemon", "sleep 903"),
        ("test_leaves_one_that_ignores_requests_to_end", "which had to be killed"),
        ("test_leaves_a_forked_child", "-m pytest"),
    ],
)
def test_process_that_a_test_left_is_named(leaving: Run, test: str, left: str) -> None:
    section = leaving.output.partition("left behind, and ended or put back")[2]
    assert left in section.partition(f"{test}\n")[2].partition("test_inner.py::")[0]


def test_leak_check_names_the_owner_of_what_is_left(leaving: Run) -> None:
    assert "+1 processes: sleep 906" in leaving.cases["test_may_leave_no_process"].text
    text = leaving.cases["test_may_leave_no_thread_or_file"].text
    assert "+1 threads: left-alone" in text
    assert "left-open" in text


def test_unknown_resource_of_leak_check_is_refused(leaving: Run) -> None:
    assert "leak_check takes gpu_mb=" in leaving.cases["test_asks_for_the_unknown"].text


KILLED = """
import multiprocessing, os, subprocess, time
from pathlib import Path
from rlcanary.cleanup import guardian
from rlcanary.system import processes

def has_pidfd(pid):
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "pidfd" in os.readlink(fd):
                return True
        except FileNotFoundError:  # it opens and closes a file of every process at each look
            pass
    return False

def wait_for_a_look():
    owner = str(os.getpid())
    while not (found := [p.pid for p in processes.children() if owner in processes.command_line(p.pid).split()
                         and has_pidfd(p.pid)]):
        time.sleep(0.01)
    # It reads a file of every process twice at each look.
    reads = lambda: int(Path(f"/proc/{found[0]}/io").read_text().split("syscr: ")[1].split()[0])
    enough = reads() + 6 * len(guardian.all_pids())
    while reads() < enough:
        time.sleep(0.01)

def test_is_killed():
    subprocess.Popen(["sleep", "907"])
    subprocess.run("(setsid sleep 908 &)", shell=True)
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(909,)).start()
    multiprocessing.get_context("spawn").Process(target=time.sleep, args=(910,)).start()
    wait_for_a_look()  # a child that is only forked is known to the guardian after its next look
    subprocess.Popen(["sleep", "911"])
    Path("ready").touch()
    time.sleep(9999)
"""


def test_processes_of_a_killed_pytest_end(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(KILLED)
    (tmp_path / "pytest.ini").touch()
    process = subprocess.Popen([sys.executable, "-m", "pytest", "-q"], cwd=tmp_path, stdout=subprocess.DEVNULL)
    wait_for(lambda: (tmp_path / "ready").exists() or process.poll() is not None)
    assert process.poll() is None, "the inner test failed"
    descendants = psutil.Process(process.pid).children(recursive=True)
    assert len(descendants) >= 5  # with the guardian
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _, alive = psutil.wait_procs(descendants, timeout=HANG_S)
    # A zombie that this test's own pytest has adopted and not yet reaped holds nothing.
    assert [child for child in alive if identify(child.pid) is not None] == []


FAILING = """
import gc, weakref
import pytest

class Tensor:
    pass

gc.disable()
KEPT = {}

def fails(name, how):
    tensor = Tensor()
    KEPT[name] = weakref.ref(tensor)
    how()

def raises():
    raise ValueError("wrong")

def asserts():
    assert not "wrong"

@pytest.fixture
def broken():
    fails("in a fixture", raises)

def test_raises(): fails("raised", raises)
def test_asserts(): fails("asserted", asserts)
def test_gives_up(): fails("gave up", pytest.fail)
def test_is_set_up_wrongly(broken): pass
@pytest.mark.xfail
def test_is_expected_to_fail(): fails("as expected", raises)

def test_nothing_is_left():
    assert len(KEPT) == 5
    assert [name for name, tensor in KEPT.items() if tensor() is not None] == []
"""


def test_failed_tests_let_go_of_their_tensors_at_once(tmp_path: Path) -> None:
    run = run_session(tmp_path, FAILING)
    assert run.cases["test_nothing_is_left"].outcome == "passed", run.output


def test_listing_tests_starts_no_process(tmp_path: Path) -> None:
    conftest = (
        "import subprocess\ndef refuse(*args, **options): raise AssertionError(args)\nsubprocess.Popen = refuse\n"
    )
    (tmp_path / "conftest.py").write_text(conftest)
    assert run_session(tmp_path, "def test_one(): pass", "--collect-only", "-p", "no:rlcanary-tracker").code == 0


ENDS_ALL = """
import psutil

def test_ends_every_child():
    children = psutil.Process().children(recursive=True)
    for child in children:
        child.kill()
    psutil.wait_procs(children)
"""


def test_session_ends_in_order_behind_a_test_that_ends_all_children(tmp_path: Path) -> None:
    run = run_session(tmp_path, ENDS_ALL)
    assert run.code == 0, run.output


FORKING = """
import os
from pathlib import Path
from rlcanary.system import processes

def test_forks():
    Path(os.environ["RAY_TMPDIR"]).mkdir(exist_ok=True)
    if child := os.fork():
        Path("ended").write_text(str(os.waitpid(child, 0)[1]))
    else:
        raise AssertionError("comes out of the test")

def test_guardian_and_folder_are_still_there():
    if os.fork() == 0:
        os._exit(0)
    assert Path(os.environ["RAY_TMPDIR"]).is_dir()
    assert any("guardian" in processes.command_line(child.pid) for child in processes.children())
"""


def test_forked_child_that_comes_out_of_its_test_ends_and_cleans_up_nothing_of_the_session(tmp_path: Path) -> None:
    run = run_session(tmp_path, FORKING, "-p", "no:rlcanary-tracker", "-o", "rlcanary_timeout=20")
    assert run.code == 0, run.output
    assert int((tmp_path / "ended").read_text()) >> 8 == 1  # the child's session fails, of itself


ASKED_LATER = """
import multiprocessing, os, subprocess, sys
from rlcanary.system import processes

STARTED = []

def test_starts_one_that_ends():
    STARTED.append(subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"]))
    STARTED.append(multiprocessing.get_context("fork").Process(target=sys.exit, args=(4,)))
    STARTED[1].start()
    for each in STARTED:
        os.waitid(os.P_PID, each.pid, os.WEXITED | os.WNOWAIT)

def test_asks_for_its_code():
    assert STARTED[0].wait() == 3
    STARTED[1].join()
    assert (STARTED[1].exitcode, STARTED[1].is_alive()) == (4, False)
    assert processes.census().dead == set()
"""


def test_exit_code_of_a_process_that_a_test_started_can_be_asked_for_later(tmp_path: Path) -> None:
    run = run_session(tmp_path, ASKED_LATER)
    assert run.code == 0, run.output


RUN_AGAIN = """
import subprocess

ATTEMPTS = []

def test_leaves_a_process_once():
    ATTEMPTS.append(len(ATTEMPTS))
    if len(ATTEMPTS) == 1:
        subprocess.Popen(["sleep", "913"])
"""


def test_second_attempt_of_a_test_is_not_named_with_what_the_first_left(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(RUNS_TWICE)
    assert run_session(tmp_path, RUN_AGAIN).output.count("(sleep 913)") == 1
