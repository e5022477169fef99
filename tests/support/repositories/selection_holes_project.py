"""A project with each kind of code that a selector once missed."""

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
    "work/source.py": """
        import inspect

        def target():
            return 1  # one

        def comment():
            return inspect.getsource(target).partition("# ")[2].strip()
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

        def test_source():
            from work.source import comment

            assert comment() == "one"
        """,
}
