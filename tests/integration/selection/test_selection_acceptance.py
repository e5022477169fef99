"""One run on real Ray, then one edit after another: which tests would run?"""

import shutil
from pathlib import Path
from typing import NamedTuple

import pytest
from selection_session import edited, run_testmon, selected

PROJECT = Path(__file__).parents[2] / "support/repositories/selection_project"
EVERY_TEST = frozenset({"every test"})
USES_COUNTER = (
    "test_actor_a test_long_a test_long_b test_nested test_fire_and_forget test_after_fire_and_forget test_killed "
    "test_ray_kill"
)

USES_CLUSTER = (
    f"{USES_COUNTER} test_task test_task_again test_async test_async_other test_threaded test_background_thread "
    "test_lazy_first test_lazy_again test_error test_stream_actor test_stream_task test_subprocess_in_actor "
    "test_shell_in_actor"
)


class Edit(NamedTuple):
    what: str
    file: str
    old: str
    new: str
    tests: frozenset[str]


def edit(what: str, file: str, old: str, new: str, tests: str | frozenset[str]) -> object:
    expected = tests if isinstance(tests, frozenset) else frozenset(tests.split())
    return pytest.param(Edit(what, file, old, new, expected), id=what)


def returns(function: str, value: str) -> tuple[str, str]:
    return f"def {function}:\n    return {value}", f"def {function}:\n    return {value} + 0"


EDITS = [
    edit("actor method", "pkg/workers.py", "self.n += 1", "self.n += 1 + 0", "test_actor_a test_long_a"),
    edit("other actor method", "pkg/workers.py", "other(self.n)", "other(self.n) + 0", "test_long_b test_nested"),
    edit("helper called in an actor", "pkg/scaling.py", *returns("scale(x)", "x * 2"), "test_actor_a test_long_a"),
    edit("constructor of an actor", "pkg/workers.py", "self.n = start", "self.n = start + 0", USES_COUNTER),
    edit("task", "pkg/workers.py", "return task_body(x)", "return task_body(x) + 0", "test_task test_task_again"),
    edit("helper of a task", "pkg/workers.py", "x + RATE", "x + RATE + 0", "test_task test_task_again"),
    edit("async method", "pkg/workers.py", "await self.inner()", "await self.inner() + 0", "test_async"),
    edit("helper of an async method", "pkg/workers.py", *returns("async_body()", "1"), "test_async"),
    edit("other async method", "pkg/workers.py", "return 3", "return 3 + 0", "test_async_other"),
    edit("threaded actor", "pkg/workers.py", *returns("threaded_body(x)", "x"), "test_threaded"),
    edit("thread in an actor", "pkg/workers.py", *returns("background_body()", "1"), "test_background_thread"),
    edit("actor that makes an actor", "pkg/workers.py", "Counter.remote(5)", "Counter.remote(5 + 0)", "test_nested"),
    edit("generator", "pkg/workers.py", *returns("stream_body(i)", "i"), "test_stream_actor test_stream_task"),
    edit("fire and forget", "pkg/workers.py", *returns("late_work()", "1"), "test_fire_and_forget"),
    edit("method that ends in SIGKILL", "pkg/workers.py", *returns("doomed()", "1"), "test_killed"),
    edit("method ended by ray.kill", "pkg/workers.py", *returns("hanging()", "1"), "test_ray_kill"),
    edit(
        "subprocess",
        "pkg/script.py",
        "print(compute())",
        "print(compute() + 0)",
        "test_subprocess test_subprocess_in_actor",
    ),
    edit(
        "module of a subprocess",
        "pkg/script_body.py",
        "return 5",
        "return 5 + 0",
        "test_subprocess test_subprocess_in_actor",
    ),
    edit("command of a shell", "pkg/shell_script.py", "return 0", "return 0 + 0", "test_shell_in_actor"),
    edit(
        "function called by the tear-down of a session fixture",
        "tests/conftest.py",
        *returns("closing()", "1"),
        USES_CLUSTER,
    ),
    edit("function that no process called", "pkg/script_body.py", "return 6", "return 6 + 0", ""),
    edit(
        "multiprocessing", "pkg/processes.py", *returns("child_body()", "5"), "test_process[spawn] test_process[fork]"
    ),
    edit("multiprocessing pool", "pkg/processes.py", *returns("pooled(x)", "x * 2"), "test_pool"),
    edit("process pool executor", "pkg/processes.py", *returns("executed(x)", "x * 5"), "test_process_pool_executor"),
    edit("thread of the test", "pkg/processes.py", *returns("threaded()", "7"), "test_thread"),
    edit("value of a constant", "pkg/constants.py", "RATE = 4", "RATE = 5", "test_task test_task_again"),
    edit("expression in a module that everyone imports", "pkg/constants.py", "RATE = 4", "RATE = abs(4)", EVERY_TEST),
    edit(
        "function of a shared actor's first call",
        "pkg/workers.py",
        *returns("make_model()", "model_size()"),
        "test_lazy_first test_lazy_again",
    ),
    edit("function behind that", "pkg/workers.py", *returns("model_size()", "1"), "test_lazy_first test_lazy_again"),
    edit("constant imported inside a test", "pkg/late.py", "1", "2", "test_import_inside test_import_inside_again"),
    edit(
        "function that ran while a module was imported",
        "pkg/registry.py",
        "append(name)",
        "append(name + '')",
        EVERY_TEST,
    ),
    edit("import statement", "pkg/scaling.py", "", "import os\n", EVERY_TEST),
    edit("empty __init__.py", "pkg/__init__.py", "", "X = 1\n", EVERY_TEST),
    edit(
        "function called by a module fixture",
        "tests/conftest.py",
        *returns("prepare()", "[1]"),
        "test_first_user_of_a_fixture test_second_user_of_a_fixture test_requested_by_name",
    ),
    edit(
        "function called by a session fixture",
        "tests/conftest.py",
        *returns("start_value()", "10"),
        "test_long_a test_long_b test_fire_and_forget test_after_fire_and_forget",
    ),
    edit("data file", "data/config.json", "1", "1 ", "test_data"),
    edit("data file beside a configuration", "data/vocab.txt", "x", "y", "test_data"),
    edit("comment", "pkg/scaling.py", "return x * 2", "return x * 2  # doubled", ""),
    edit("nothing", "pkg/scaling.py", "return x * 2", "return x * 2", ""),
    edit("test", "tests/test_remote.py", 'sys.executable, "-m"', 'sys.executable,  "-m"', ""),
    edit(
        "body of a test",
        "tests/test_remote.py",
        "assert prepared\n",
        "assert prepared, 1\n",
        "test_second_user_of_a_fixture",
    ),
]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project after a recorded run of all its tests."""
    folder = tmp_path_factory.mktemp("recorded") / "project"
    shutil.copytree(PROJECT, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "tests").mkdir()
    (folder / "fixtures.py").rename(folder / "tests/conftest.py")
    (folder / "remote.py").rename(folder / "tests/test_remote.py")
    (folder / "pytest.ini").touch()
    run = run_testmon(folder)
    assert run.returncode == 0, run.stdout
    assert "were not recorded" not in run.stdout
    return folder


@pytest.fixture(scope="module")
def every_test(project: Path) -> set[str]:
    with edited(project, "tests/test_remote.py", "", "import os\n"):
        return selected(project)


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_selects_the_tests_that_ran_the_code(project: Path, every_test: set[str], edit: Edit) -> None:
    with edited(project, edit.file, edit.old, edit.new):
        assert selected(project) == (every_test if edit.tests == EVERY_TEST else edit.tests)


def test_without_an_edit_no_test_runs(project: Path) -> None:
    for file in project.glob("**/*.py"):
        file.touch()
    run = run_testmon(project, "-q")
    assert run.returncode == 0, run.stdout
    assert "no tests ran" in run.stdout
