"""One project, one recorded run, many edits, each of a kind that was once missed."""

import textwrap
from pathlib import Path

import pytest
from click.testing import CliRunner
from selection_session import edited, run_testmon, selected, stored_tests, write_project

from rlcanary.commands.testing.selection import selection

FILES = {
    "work/__init__.py": "",
    "work/threads.py": """
        import queue
        import threading
        from multiprocessing.pool import ThreadPool

        _queue, _answers = queue.Queue(), queue.Queue()
        _thread = None
        _pool = None

        def serve():
            while True:
                function, x = _queue.get()
                _answers.put(function(x))

        def ask(function, x):
            global _thread
            if _thread is None:
                _thread = threading.Thread(target=serve, daemon=True)
                _thread.start()
            _queue.put((function, x))
            return _answers.get()

        def pool():
            global _pool
            if _pool is None:
                _pool = ThreadPool(1)
            return _pool

        def pooled_first(x):
            return x

        def pooled_second(x):
            return x + 0

        def served_first(x):
            return x

        def served_second(x):
            return x + 0
        """,
    "work/server.py": """
        import subprocess
        import sys

        _server = None

        def ask(text):
            global _server
            if _server is None:
                _server = subprocess.Popen(
                    [sys.executable, "-m", "work.echo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
                )
            _server.stdin.write(text + "\\n")
            _server.stdin.flush()
            return _server.stdout.readline().strip()
        """,
    "work/echo.py": """
        import sys

        def answer(line):
            return line.upper() if line.startswith("a") else other(line)

        def other(line):
            return line.title()

        for line in sys.stdin:
            print(answer(line.strip()), flush=True)
        """,
    "work/memory.py": """
        import functools
        import json
        from pathlib import Path

        HERE = Path(__file__).parent.parent

        @functools.lru_cache
        def vocabulary():
            return parsed("vocabulary.json")

        def parsed(name):
            return json.loads((HERE / "data" / name).read_text())

        class Tokenizer:
            @functools.cached_property
            def table(self):
                return built()

        def built():
            return {"a": 1}

        shared = Tokenizer()
        _settings = None

        def settings():
            global _settings
            if _settings is None:
                _settings = load_settings()
            return _settings

        def load_settings():
            return {"rate": default_rate()}

        def default_rate():
            return 1

        _models = {}

        def model(name):
            if name in _models:
                return _models[name]
            made = _models[name] = make_model(name)
            return made

        def make_model(name):
            return [name]
        """,
    "work/constants.py": """
        RATE = 3
        DEPTH = 4

        class Limits:
            longest = 10
            shortest = 2

        def scaled(x, by=2):
            return x * by

        def shifted(x, by=2):
            return x + by

        def rate():
            return RATE
        """,
    "work/kept.py": """
        class Kept:
            size = 3
        """,
    "work/optional.py": """
        import os
        from pathlib import Path

        HERE = Path(__file__).parent.parent

        def override():
            try:
                return (HERE / "override.json").read_text()
            except FileNotFoundError:
                return ""

        def has_flag():
            return os.path.exists(HERE / "flag")

        def shards():
            return sorted(path.name for path in (HERE / "shards").glob("*.txt"))
        """,
    "shards/a.txt": "1",
    "data/vocabulary.json": "[1]",
    "data/model.pth": "weights",
    "data/program.py": "X = 1\n",
    "data/log.txt": "before",
    ".hidden/settings.json": "{}",
    "conftest.py": """
        import pytest

        @pytest.fixture(scope="session")
        def early():
            return early_value()

        def early_value():
            return 1

        @pytest.fixture(scope="session")
        def late(request):
            return request.getfixturevalue("early")
        """,
    "test_holes.py": """
        import _thread
        import ctypes
        import os
        import pickle
        import sqlite3
        import subprocess
        import threading
        from pathlib import Path

        import pytest
        from work import constants, memory, optional, server, threads

        HERE = Path(__file__).parent

        def test_pool_first():
            assert threads.pool().map(threads.pooled_first, [1]) == [1]

        def test_pool_second():
            assert threads.pool().map(threads.pooled_second, [1]) == [1]

        def test_queue_first():
            assert threads.ask(threads.served_first, 1) == 1

        def test_queue_second():
            assert threads.ask(threads.served_second, 1) == 1

        def test_server_first():
            assert server.ask("a") == "A"

        def test_server_second():
            assert server.ask("b") == "B"

        def test_cache_first():
            assert memory.vocabulary() == [1]

        def test_cache_second():
            assert memory.vocabulary() == [1]

        def test_property_first():
            assert memory.shared.table == {"a": 1}

        def test_property_second():
            assert memory.shared.table == {"a": 1}

        def test_singleton_first():
            assert memory.settings()["rate"] == 1

        def test_singleton_second():
            assert memory.settings()["rate"] == 1

        def test_dictionary_first():
            assert memory.model("a") == ["a"]

        def test_dictionary_second():
            assert memory.model("a") == ["a"]

        def test_rate():
            assert constants.rate() == 3

        def test_longest():
            assert constants.Limits.longest == 10

        def test_scaled():
            assert constants.scaled(1) == 2

        def test_shifted():
            assert constants.shifted(1) == 3

        def test_override():
            assert optional.override() == ""

        def test_flag():
            assert not optional.has_flag()

        def test_shards():
            assert optional.shards() == ["a.txt"]

        @pytest.mark.skipif(not (HERE / "weights").exists(), reason="no weights")
        def test_weights():
            assert True

        def test_checkpoint():
            assert (HERE / "data/model.pth").read_bytes()

        def test_program_as_data():
            assert (HERE / "data/program.py").read_text()

        def test_hidden():
            assert (HERE / ".hidden/settings.json").read_text()

        def test_opened_for_update():
            with open(HERE / "data/log.txt", "r+") as stream:
                assert stream.read()

        def test_native_reader():
            assert subprocess.run("cat data/na?ive", shell=True, capture_output=True, cwd=HERE).stdout == b"1"

        def test_database():
            assert sqlite3.connect(HERE / "data/rows.db").execute("select x from t").fetchall() == [(1,)]

        def test_early_first(early):
            assert early

        def test_late_fixture(late):
            assert late

        def test_late_fixture_again(late):
            assert late

        def test_unpickled():
            assert pickle.loads(b"cwork.kept\\nKept\\n.").size == 3

        def test_unpickled_again():
            assert pickle.loads(b"cwork.kept\\nKept\\n.").size == 3

        def test_bare_thread():
            done = threading.Event()
            _thread.start_new_thread(lambda: (threads.served_first(1), done.set()), ())
            assert done.wait(60)

        def test_callback_of_a_thread_of_c():
            library = ctypes.CDLL(None)
            kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
            called = kind(lambda _: threads.pooled_first(0))
            thread = ctypes.c_ulong()
            assert library.pthread_create(ctypes.byref(thread), None, called, None) == 0
            library.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
            assert library.pthread_join(thread, None) == 0

        def test_variable():
            assert os.environ.get("HOLES_MODE", "") == ""
        """,
}


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


MODULE = "def used(x):\n    return x\n"


def test_a_file_edited_while_it_is_used_selects_the_test(tmp_path: Path) -> None:
    """The edit is made by a program that is not Python, as an editor is."""
    project = write_project(
        tmp_path,
        {
            "module.py": MODULE,
            "data.json": "1",
            "test_it.py": "import subprocess\nfrom pathlib import Path\nfrom module import used\n"
            "def test_code():\n    used(1)\n    subprocess.run('printf \"def used(x): return 2\" > module.py', shell=True)\n"
            "def test_data():\n    Path('data.json').read_text()\n"
            "    subprocess.run('cp data.json new && mv new data.json', shell=True)\n"
            "def test_neither(): pass\n",
        },
    )
    assert run_testmon(project, "-q").returncode == 0
    assert {"test_code", "test_data"} <= selected(project)
    assert "test_neither" in {test.partition("::")[2] for test in stored_tests(project)}


def test_a_file_that_a_warm_cache_stands_for_stays_a_dependency(tmp_path: Path) -> None:
    """As `datasets` does, the loader reads the file once, and later compares its time of change only."""
    project = write_project(
        tmp_path,
        {
            "data/train.jsonl": "{}",
            "loader.py": "import os, pathlib, pickle\nCACHE = pathlib.Path(os.environ['CACHE'])\ndef load(path):\n"
            "    key = os.stat(path).st_mtime_ns\n"
            "    if CACHE.exists() and pickle.loads(CACHE.read_bytes())[0] == key:\n"
            "        return pickle.loads(CACHE.read_bytes())[1]\n"
            "    text = pathlib.Path(path).read_text()\n    CACHE.write_bytes(pickle.dumps((key, text)))\n    return text\n",
            "test_it.py": "from loader import load\ndef test_one():\n    assert load('data/train.jsonl')\n",
        },
    )
    cache = str(tmp_path.parent / f"{tmp_path.name}-cache")
    for turn in range(2):
        assert run_testmon(project, "-q", CACHE=cache).returncode == 0
        with edited(project, "data/train.jsonl", "{}", "{ }"):
            assert selected(project) == {"test_one"}
        (project / "test_it.py").write_text((project / "test_it.py").read_text() + f"    assert {turn + 1}\n")


def test_a_new_conftest_selects_the_tests_beside_it(tmp_path: Path) -> None:
    project = write_project(tmp_path, {"a/test_a.py": "def test_a(): pass\n", "b/test_b.py": "def test_b(): pass\n"})
    assert run_testmon(project, "-q").returncode == 0
    (project / "a/conftest.py").write_text("import pytest\n@pytest.fixture(autouse=True)\ndef strict(): assert 0\n")
    assert selected(project) == {"test_a"}


def test_chosen_variables_select_every_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = write_project(tmp_path, {"test_a.py": "def test_a(): pass\n"})
    (project / "pytest.ini").write_text("[pytest]\nrlcanary_selection_environment = CHOSEN_* OTHER\n")
    assert run_testmon(project, "-q").returncode == 0
    monkeypatch.setenv("NOT_CHOSEN", "1")
    assert selected(project) == set()
    monkeypatch.setenv("CHOSEN_MODE", "1")
    assert selected(project) == {"test_a"}


def test_a_patch_release_of_a_package_runs_every_test(tmp_path: Path) -> None:
    packages = tmp_path / "packages"
    release = "Metadata-Version: 2.1\nName: wheeled\nVersion: 1.2.{}\n"
    project = write_project(tmp_path / "project", {"test_a.py": "def test_a(): pass\n"})
    write_project(packages, {"wheeled-1.2.3.dist-info/METADATA": release.format(3)})
    assert "1 passed" in run_testmon(project, "-q", PYTHONPATH=str(packages)).stdout
    assert "no tests ran" in run_testmon(project, "-q", PYTHONPATH=str(packages)).stdout
    (packages / "wheeled-1.2.3.dist-info/METADATA").write_text(release.format(4))
    assert "1 passed" in run_testmon(project, "-q", PYTHONPATH=str(packages)).stdout


def test_the_command_says_what_can_never_be_recorded(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    (project / ".git").mkdir()
    (project / ".git/HEAD").write_text("")
    for file, words in ((".git/HEAD", "never recorded"), ("data", "is a folder"), ("nothing.json", "no such file")):
        shown = CliRunner().invoke(selection, ["why", file], catch_exceptions=False)
        assert words in " ".join(shown.output.split())
