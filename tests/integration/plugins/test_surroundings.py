"""What a test changes for every test behind it is put back, and what shared fixtures and imports set stays."""

from pathlib import Path

import pytest
from inner_session import Run, run_session

TESTS = """
import os, socket, threading
import pytest
from pathlib import Path
from multiprocessing import shared_memory

os.environ["AT_IMPORT"] = "1"
kept = []

@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    os.environ["WIDE"] = "1"
    before = os.getcwd()
    os.chdir(tmp_path_factory.mktemp("wide"))
    yield
    assert os.environ.pop("WIDE") == "1"
    os.chdir(before)

@pytest.fixture
def narrow(monkeypatch):
    monkeypatch.setenv("NARROW", "1")
    os.environ["NARROW_LEFT"] = "1"
    yield
    os.environ["TEAR_DOWN"] = "1"

def test_changes_much(narrow, tmp_path):
    import torch
    os.environ["NEW"] = "1"
    os.environ["HOME"] = "/nowhere"
    del os.environ["PATH"]
    os.chdir(tmp_path)
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)

def test_finds_nothing_of_that():
    import torch
    assert not {"NEW", "NARROW", "NARROW_LEFT", "TEAR_DOWN"} & set(os.environ)
    assert os.environ["HOME"] != "/nowhere" and "PATH" in os.environ and os.environ["AT_IMPORT"] == "1"
    assert Path.cwd() == Path(__file__).parent
    assert torch.get_default_dtype() == torch.float32 and torch.is_grad_enabled()

def test_first_user(wide, narrow):
    os.environ["WIDE"] = "2"
    os.chdir("/")

def test_second_user(wide):
    assert os.environ["WIDE"] == "1"
    assert Path.cwd().name.startswith("wide")

def test_late(request):
    os.environ["NEW"] = "1"
    request.getfixturevalue("session_wide")

@pytest.fixture(scope="session")
def session_wide():
    os.environ["SESSION"] = "1"

def test_after_late():
    assert os.environ["SESSION"] == "1"
    assert "NEW" not in os.environ

def test_import_sets(tmp_path, monkeypatch):
    (tmp_path / "sets_a_variable.py").write_text("import os\\nos.environ['BY_IMPORT'] = '1'\\n")
    monkeypatch.syspath_prepend(tmp_path)
    import sets_a_variable
    os.environ["BY_TEST"] = "1"

def test_keeps_what_the_import_set():
    assert os.environ["BY_IMPORT"] == "1"
    assert "BY_TEST" not in os.environ

@pytest.mark.leak_check(sockets=0, shm=0, threads=0)
def test_leaves_more():
    kept.append(socket.create_server(("127.0.0.1", 0)))
    threading.Thread(target=threading.Event().wait, name="left", daemon=True).start()
    kept.append(shared_memory.SharedMemory(create=True, size=64, name=f"rlcanary_left_{os.getpid()}"))

def test_folder_is_gone(tmp_path):
    os.chdir(tmp_path)
    tmp_path.rmdir()

def test_is_where_the_module_fixture_went():
    assert Path.cwd().name.startswith("wide")
    kept[-1].close(); kept[-1].unlink()
"""


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_session(tmp_path_factory.mktemp("changing"), TESTS)


def said_of(session: Run, test: str) -> str:
    section = session.output.partition("left behind, and ended or put back")[2]
    return section.partition(f"::{test}\n")[2].partition("test_inner.py::")[0]


@pytest.mark.parametrize(
    "claim",
    [
        "test_finds_nothing_of_that",
        "test_second_user",
        "test_after_late",
        "test_keeps_what_the_import_set",
        "test_folder_is_gone",
        "test_is_where_the_module_fixture_went",
    ],
)
def test_next_test_finds_the_surroundings_of(session: Run, claim: str) -> None:
    assert session.cases[claim].outcome == "passed", session.cases[claim].text


@pytest.mark.parametrize(
    ("test", "line"),
    [
        ("test_changes_much", "HOME, changed: put back"),
        ("test_changes_much", "PATH, removed: put back"),
        ("test_changes_much", "variable NEW: removed"),
        ("test_changes_much", "NARROW_LEFT: removed"),
        ("test_changes_much", "TEAR_DOWN: removed"),
        ("test_changes_much", "put back to torch.float32"),
        ("test_changes_much", "grad mode off: put back"),
        ("test_changes_much", "the working directory "),
        ("test_import_sets", "BY_IMPORT, which the import of sets_a_variable set: kept"),
        ("test_folder_is_gone", "(which is gone): put back to "),
    ],
)
def test_what_is_put_back_is_named_without_its_value(session: Run, test: str, line: str) -> None:
    assert line in said_of(session, test)
    assert "/nowhere" not in said_of(session, test)


def test_what_undoes_its_own_changes_is_not_named(session: Run) -> None:
    assert "NARROW:" not in session.output
    assert said_of(session, "test_second_user") == ""


def test_sockets_threads_and_shared_memory_are_named(session: Run) -> None:
    text = session.cases["test_leaves_more"].text
    assert "+1 listening sockets: port " in text
    assert "+1 threads: left" in text
    assert "/dev/shm: rlcanary_left_" in text


CONFTEST = """
import os

def pytest_sessionstart(session):
    os.environ["FROM_CONFTEST"] = "1"

def pytest_runtest_setup(item):
    os.environ["OF_EACH_TEST"] = item.name
"""
SKIPPING = """
import os
import pytest

@pytest.mark.skip
def test_skipped_at_once():
    pass

def test_finds_what_the_session_set():
    assert "RAY_TMPDIR" in os.environ and "FROM_CONFTEST" in os.environ

@pytest.fixture(scope="class")
def shared():
    os.environ["SHARED"] = "1"
    yield
    del os.environ["SHARED"]

class TestOfItsOwn:
    def test_uses_it(self, shared):
        assert os.environ["OF_EACH_TEST"] == "test_uses_it"

@pytest.mark.skip
def test_skipped_behind_it():
    pass

def test_finds_nothing_of_it():
    assert "SHARED" not in os.environ
"""


def test_skipped_test_and_what_a_conftest_sets_before_each_test_change_nothing(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    run = run_session(tmp_path, SKIPPING, "-q")
    assert run.code == 0, run.output
    assert "left behind" not in run.output


REPLACING = """
import os
from unittest import mock
import pytest

@pytest.fixture(scope="class")
def another():
    with mock.patch("os.environ", {"ONLY": "1"}):
        yield

class TestOfAnother:
    def test_finds_it(self, another):
        assert os.environ["ONLY"] == "1" and "PATH" not in os.environ
        os.environ |= {"ONLY": "2", "NEW": "1"}

    def test_finds_it_as_it_was(self, another):
        assert os.environ["ONLY"] == "1" and "NEW" not in os.environ and "PATH" not in os.environ

def test_leaves_another():
    os.environ["LEFT"] = "1"
    os.environ = {"A": "1"}

def test_finds_that_of_the_process():
    assert "PATH" in os.environ and not {"A", "LEFT", "ONLY"} & set(os.environ)
    assert os.environ._data
"""


def test_environment_that_a_test_replaces_is_put_back(tmp_path: Path) -> None:
    run = run_session(tmp_path, REPLACING, "-q")
    assert run.code == 0, run.output
    assert "os.environ, replaced: put back" in said_of(run, "test_leaves_another")
    assert "ONLY, changed: put back" in said_of(run, "TestOfAnother::test_finds_it")


def test_distribution_without_workers_distributes_nothing(tmp_path: Path) -> None:
    """As `--dist` in the addopts of a project, for those who give `-n` too."""
    run = run_session(tmp_path, "def test_a(): pass", "--dist", "loadfile", "-p", "xdist")
    assert run.code == 0, run.output
    assert "1 passed" in run.output
