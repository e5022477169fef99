"""A generated project of code that selectors miss, and edits of it with the tests whose outcome each can change.

Every group is a package with a module of each kind of code, and tests in a random order that use it. What an edit concerns
follows from how the group was made, not from a run.
"""

import random
import sqlite3
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

USERS = 3  # at most so many tests use one piece of code

MODULES = {
    "workers": """
        import queue
        import subprocess
        import sys
        import threading
        from multiprocessing.pool import ThreadPool

        asked, answers = queue.Queue(), queue.Queue()
        thread = None
        pool = None
        server = None

        def serve():
            while True:
                function = asked.get()
                answers.put(function())

        def by_thread(function):
            global thread
            if thread is None:
                thread = threading.Thread(target=serve, daemon=True)
                thread.start()
            asked.put(function)
            return answers.get()

        def by_pool(function):
            global pool
            if pool is None:
                pool = ThreadPool(1)
            return pool.apply(function)

        def by_server(text):
            global server
            if server is None:
                server = subprocess.Popen(
                    [sys.executable, "-m", "{group}.echo"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
            server.stdin.write(text + "\\n")
            server.stdin.flush()
            return server.stdout.readline().strip()

        def job0():
            return 0

        def job1():
            return 1

        def job2():
            return 2
        """,
    "echo": """
        import sys

        def answer(line):
            return line.upper()

        if __name__ == "__main__":
            for line in sys.stdin:
                print(answer(line.strip()), flush=True)
        """,
    "script": """
        def compute():
            return 5

        if __name__ == "__main__":
            print(compute())
        """,
    "memory": """
        import functools
        from pathlib import Path

        @functools.lru_cache
        def cached():
            return load_cached()

        def load_cached():
            return (Path(__file__).parent / "data/cached.json").read_text()

        class Table:
            @functools.cached_property
            def rows(self):
                return load_rows()

        def load_rows():
            return [1]

        table = Table()
        single = None

        def singleton():
            global single
            if single is None:
                single = load_single()
            return single

        def load_single():
            return [2]

        entries = {}

        def entry(name):
            if name in entries:
                return entries[name]
            entries[name] = load_entry(name)
            return entries[name]

        def load_entry(name):
            return name + "!"
        """,
    "values": """
        from pathlib import Path

        RATE = 3
        NAME = max("x", "y")

        class Limits:
            longest = 10

        def rate():
            return RATE

        def scaled(x, by=2):
            return x * by

        def taken(x):
            return x
        """,
    "answers": """
        import os
        from pathlib import Path

        HERE = Path(__file__).parent

        def override():
            try:
                return (HERE / "override.json").read_text()
            except FileNotFoundError:
                return ""

        def has_flag():
            return os.path.exists(HERE / "flag")

        def shards():
            return len(list((HERE / "shards").glob("*.txt")))

        def mode():
            return os.environ.get("{group}_MODE", "")
        """,
    "kept": """
        class Kept:
            size = 3
        """,
}
FILES = {
    "data/cached.json": "[1]",
    "data/model.pth": "weights",
    "data/program.py": "X = 1\n",
    "data/updated.txt": "before",
    "data/native.bin": "1",
    ".hidden/settings.json": "{}",
    "shards/a.txt": "1",
}
CONFTEST = """
    import pytest

    @pytest.fixture(scope="session")
    def early():
        return early_value()

    def early_value():
        return 1

    @pytest.fixture(scope="session")
    def late(request):
        return request.getfixturevalue("early")
    """
HEADER = """
    import ctypes
    import os
    import pickle
    import sqlite3
    import subprocess
    import sys
    from pathlib import Path

    import pytest
    from {group} import answers, memory, values, workers

    HERE = Path(__file__).parent
    """
# By kind of code: the bodies of its tests.
BODIES = {
    "thread": "assert workers.by_thread(workers.job{user}) == {user}",
    "pool": "assert workers.by_pool(workers.job{user}) == {user}",
    "server": "assert workers.by_server('a{user}') == 'A{user}'",
    "script": "assert subprocess.run([sys.executable, '-m', '{group}.script'], capture_output=True).stdout == b'5\\n'",
    "callback": """
        library = ctypes.CDLL(None)
        called = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(lambda _: workers.job{user}() and None)
        thread = ctypes.c_ulong()
        assert library.pthread_create(ctypes.byref(thread), None, called, None) == 0
        library.pthread_join.argtypes = [ctypes.c_ulong, ctypes.c_void_p]
        assert library.pthread_join(thread, None) == 0""",
    "lru_cache": "assert memory.cached() == '[1]'",
    "cached_property": "assert memory.table.rows == [1]",
    "singleton": "assert memory.singleton() == [2]",
    "dictionary": "assert memory.entry('a') == 'a!'",
    "constant": "assert values.rate() == 3",
    "attribute": "assert values.Limits.longest == 10",
    "default": "assert values.scaled(1) == 2",
    "parameter": "assert values.taken(1) == 1",
    "pth": "assert (HERE / 'data/model.pth').read_bytes()",
    "program": "assert (HERE / 'data/program.py').read_text()",
    "updated": "assert open(HERE / 'data/updated.txt', 'r+').read()",
    "native": "assert subprocess.run('cat data/nati*', shell=True, cwd=HERE, capture_output=True).stdout == b'1'",
    "database": "assert sqlite3.connect(HERE / 'data/rows.db').execute('select x from t').fetchall() == [(1,)]",
    "hidden": "assert (HERE / '.hidden/settings.json').read_text()",
    "override": "assert answers.override() == ''",
    "flag": "assert not answers.has_flag()",
    "shards": "assert answers.shards() == 1",
    "variable": "assert answers.mode() == ''",
    "early": "assert early == 1",
    "late": "assert late == 1",
    "unpickled": "assert pickle.loads(b'c{group}.kept\\nKept\\n.').size == 3",
    "skipped": "assert True",
}
# By kind of edit: the file, what is replaced by what ("" for a new file), and the kinds of code whose tests it concerns.
EDITS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "process that a test started": ("echo.py", "line.upper()", "line.upper() + ''", ("server",)),
    "script": ("script.py", "return 5", "return 5 + 0", ("script",)),
    "behind lru_cache": ("memory.py", "return (Path", "return '' + (Path", ("lru_cache",)),
    "data behind lru_cache": ("data/cached.json", "[1]", "[2]", ("lru_cache",)),
    "behind cached_property": ("memory.py", "return [1]", "return [1, 0]", ("cached_property",)),
    "behind a singleton": ("memory.py", "return [2]", "return [2, 0]", ("singleton",)),
    "behind a dictionary": ("memory.py", 'return name + "!"', 'return name + "?"', ("dictionary",)),
    "constant": ("values.py", "RATE = 3", "RATE = 4", ("constant",)),
    "class attribute": ("values.py", "longest = 10", "longest = 11", ("attribute",)),
    "default": ("values.py", "by=2", "by=3", ("default",)),
    "parameter": ("values.py", "taken(x)", "taken(x, y=0)", ("parameter",)),
    "expression in a module": ("values.py", '"x", "y"', '"x", "z"', ("every",)),
    "import": ("values.py", "from pathlib", "import string\nfrom pathlib", ("every",)),
    "new function": ("values.py", "def taken", "def unused(x):\n    return x\n\ndef taken", ()),
    "comment": ("values.py", "return RATE", "return RATE  # read", ()),
    "checkpoint": ("data/model.pth", "weights", "other", ("pth",)),
    "code read as data": ("data/program.py", "X = 1", "X = 2", ("program",)),
    "file opened r+": ("data/updated.txt", "before", "after", ("updated",)),
    "file of a program": ("data/native.bin", "1", "2", ("native",)),
    "hidden folder": (".hidden/settings.json", "{}", "[]", ("hidden",)),
    "absent file read": ("override.json", "", "1", ("override",)),
    "absent file asked for": ("flag", "", "1", ("flag",)),
    "file in a listed folder": ("shards/b.txt", "", "1", ("shards",)),
    "file in no listed folder": ("data/new.txt", "", "1", ()),
    "module that takes a place": ("values/__init__.py", "", "", ("every",)),
    "new conftest.py": ("tests/conftest.py", "", "import pytest\n", ("nested",)),
    "file of skipif": ("weights", "", "1", ("skipped",)),
    "fixture of a fixture": ("conftest.py", "return 1", "return 2", ("early", "late")),
    "class that is unpickled": ("kept.py", "size = 3", "size = 4", ("unpickled",)),
    "variable of the environment": ("$", "{group}_MODE", "fast", ("variable",)),
    "pytest's options": ("/pytest.ini", "[pytest]", "[pytest]\nfilterwarnings = error", ("all",)),
    "job of a thread": ("workers.py", "return {user}", "return {user} + 0", ("thread", "pool", "callback")),
}


@dataclass
class Edit:
    what: str
    path: str
    old: str
    new: str
    exact: set[str]


@dataclass
class Holes:
    """The project: by group and kind of code, the tests that use it, with their numbers."""

    groups: int
    seed: int
    users: dict[str, dict[str, list[tuple[str, int]]]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        chance = random.Random(self.seed)
        for number in range(self.groups):
            self.add_group(f"group{number}", chance)

    def add_group(self, group: str, chance: random.Random) -> None:
        named = {name: filled(text, group=group) for name, text in MODULES.items()}
        self.texts |= {f"{group}/{name}.py": text for name, text in named.items()} | {f"{group}/__init__.py": ""}
        self.texts |= {f"{group}/{name}": text for name, text in FILES.items()}
        self.texts[f"{group}/conftest.py"] = filled(CONFTEST)
        tests = [
            (kind, user)
            for kind in BODIES
            for user in chance.sample(range(USERS), 1 if kind == "callback" else chance.randint(2, USERS))
        ]
        chance.shuffle(tests)
        self.users[group] = {kind: [] for kind in BODIES} | {
            "nested": [(f"{group}/tests/test_nested_{group}.py::test_it", 0)]
        }
        self.texts[f"{group}/tests/test_nested_{group}.py"] = "def test_it():\n    pass\n"
        half = len(tests) // 2
        for part, chosen in enumerate((tests[:half], tests[half:])):
            file = f"{group}/test_{part}_{group}.py"
            lines = filled(HEADER, group=group)
            for kind, user in chosen:
                name = f"test_{kind}_{user}"
                self.users[group][kind].append((f"{file}::{name}", user))
                asked = kind if kind in ("early", "late") else ""
                mark = (
                    "@pytest.mark.skipif(not (HERE / 'weights').exists(), reason='none')\n" if kind == "skipped" else ""
                )
                body = textwrap.indent(filled(BODIES[kind], group=group, user=str(user)).strip(), "    ")
                lines += f"\n\n{mark}def {name}({asked}):\n{body}\n"
            self.texts[file] = lines

    def write(self, folder: Path) -> None:
        for name, text in {**self.texts, "pytest.ini": "[pytest]\npythonpath = .\n"}.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text)
        for group in self.users:
            connection = sqlite3.connect(folder / group / "data/rows.db")
            connection.executescript("create table t (x); insert into t values (1)")
            connection.close()

    def edits(self, number: int, seed: int) -> Iterator[Edit]:
        """Yield random single edits, each kind as often as the others."""
        chance = random.Random(seed)
        for index in range(number):
            what = list(EDITS)[index % len(EDITS)]
            group, user = chance.choice(list(self.users)), chance.randrange(USERS)
            path, old, new, kinds = EDITS[what]
            change: Callable[[str], str] = lambda text, g=group, u=user: filled(text, group=g, user=str(u))  # noqa: E731
            place = path.removeprefix("/") if path.startswith(("/", "$")) else f"{group}/{path}"
            yield Edit(what, place, change(old), change(new), set(self.concerned(group, kinds, user, "user" in old)))

    def concerned(self, group: str, kinds: tuple[str, ...], user: int, only_user: bool) -> Iterator[str]:
        for name, by_kind in self.users.items():
            for kind, tests in by_kind.items():
                importing = "every" in kinds and kind != "nested" and name == group
                if "all" in kinds or importing or (kind in kinds and name == group):
                    yield from (test for test, number in tests if not only_user or number == user)


def filled(text: str, **values: str) -> str:
    text = textwrap.dedent(text).lstrip("\n")
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", value)
    return text
