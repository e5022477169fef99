"""One project, one recorded run, many edits, each of a kind that was once missed."""

import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from selection_holes_project import FILES
from selection_session import edited, run_testmon, selected, stored_tests, write_project

from rlcanary.commands.testing.selection import selection


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("holes") / "project"
    write_project(folder, {name: textwrap.dedent(text).lstrip() for name, text in FILES.items()})
    (folder / "data/native").write_text("1")
    import sqlite3

    with sqlite3.connect(folder / "data/rows.db") as rows:
        rows.execute("create table t (x)")
        rows.execute("insert into t values (1)")
    rows.close()
    run = run_testmon(folder, "-q", "-p", "no:rlcanary-cleanup")
    assert run.returncode == 0, run.stdout
    return folder


def ids(text: str) -> set[str]:
    return {f"test_{name}" for name in text.split()}


def test_nothing_is_selected_without_an_edit(project: Path) -> None:
    assert selected(project) == set()


@pytest.mark.parametrize(
    ("file", "old", "new", "expected"),
    [
        (
            "work/threads.py",
            "_first(x):\n    return x",
            "_first(x):\n    return x + 0",
            "pool_first callback_of_a_thread_of_c",
        ),
        (
            "work/threads.py",
            "pooled_second(x):\n    return x",
            "pooled_second(x):\n    return 0 + x",
            "pool_first pool_second",
        ),
        (
            "work/threads.py",
            "served_second(x):\n    return x",
            "served_second(x):\n    return 0 + x",
            "queue_first queue_second",
        ),
        (
            "work/threads.py",
            "served_first(x):\n    return x",
            "served_first(x):\n    return x + 0",
            "queue_first queue_second bare_thread",
        ),
        ("data/vocabulary.json", "[1]", "[1 ]", "cache_first cache_second"),
        ("work/memory.py", "return json", "return 0 or json", "cache_first cache_second"),
        ("work/memory.py", '{"a": 1}', '{"a": 1, "b": 2}', "property_first property_second"),
        ("work/memory.py", "return 1", "return 1 + 0", "singleton_first singleton_second"),
        ("work/memory.py", "return [name]", "return [name, 0]", "dictionary_first dictionary_second"),
        ("work/constants.py", "RATE = 3", "RATE = 4", "rate"),
        ("work/constants.py", "DEPTH = 4", "DEPTH = 5", ""),
        ("work/constants.py", "longest = 10", "longest = 11", "longest"),
        ("work/constants.py", "scaled(x, by=2)", "scaled(x, by=3)", "scaled"),
        ("data/model.pth", "weights", "other", "checkpoint"),
        ("data/program.py", "X = 1", "X = 1  # one", "program_as_data"),
        ("data/log.txt", "before", "after", "opened_for_update"),
        ("data/native", "1", "2", "native_reader"),
        (".hidden/settings.json", "{}", "{ }", "hidden"),
        ("conftest.py", "return 1", "return 2", "early_first late_fixture late_fixture_again"),
        ("work/kept.py", "size = 3", "size = 3 + 0", "unpickled unpickled_again"),
        ("work/source.py", "# one", "# two", "source"),
    ],
)
def test_an_edit_selects(project: Path, file: str, old: str, new: str, expected: str) -> None:
    with edited(project, file, old, new):
        assert selected(project) == ids(expected)


def test_an_edit_of_a_process_that_an_earlier_test_started_selects_its_users(project: Path) -> None:
    """And perhaps the tests during which it was not yet waiting again."""
    with edited(project, "work/echo.py", "line.title()", "line.title() + ''"):
        found = selected(project)
    assert ids("server_first server_second") <= found
    assert not ids("queue_first variable") & found


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        ("override.json", "override"),
        ("flag", "flag"),
        ("shards/b.txt", "shards"),
        ("elsewhere.txt", ""),
    ],
)
def test_a_new_file_selects_the_tests_that_asked_for_it(project: Path, file: str, expected: str) -> None:
    (project / file).write_text("x")
    try:
        assert selected(project) == ids(expected)
    finally:
        (project / file).unlink()


def test_a_module_that_takes_another_ones_place_selects_its_importers(project: Path) -> None:
    (project / "work/optional").mkdir()
    (project / "work/optional/__init__.py").write_text("")
    try:
        assert ids("override flag shards") <= selected(project)
    finally:
        (project / "work/optional/__init__.py").unlink()
        (project / "work/optional").rmdir()


def test_a_new_conftest_selects_the_tests_below_it(project: Path) -> None:
    (project / "work/conftest.py").write_text("")
    assert selected(project) == set()
    (project / "work/conftest.py").unlink()


def test_a_variable_that_code_read_selects(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLES_MODE", "other")
    assert selected(project) == ids("variable")


def test_pytests_options_select_every_test(project: Path) -> None:
    every = {test.partition("::")[2] for test in stored_tests(project)}
    with edited(project, "pytest.ini", "", "[pytest]\nfilterwarnings = error\n"):
        assert selected(project) == every


def test_the_command_says_what_can_never_be_recorded(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    (project / ".git").mkdir()
    (project / ".git/HEAD").write_text("")
    for file, words in ((".git/HEAD", "never recorded"), ("data", "is a folder"), ("nothing.json", "no such file")):
        shown = CliRunner().invoke(selection, ["why", file], catch_exceptions=False)
        assert words in " ".join(shown.output.split())
