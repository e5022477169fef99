"""A generated project whose tests reach its code in every way, and edits of which it is known what tests they concern."""

import random
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .holes import Edit

MODULES = 60
TESTS = 200
FILES = 20
FUNCTIONS = 4

# How a module's functions are reached. A test of the kind calls `enter(k)` of the module, here, there or in a process.
KINDS = (
    "plain",
    "actor",
    "shared_actor",
    "async_actor",
    "threaded_actor",
    "nested_actor",
    "generator",
    "task",
    "forgotten",
    "subprocess",
    "spawn",
    "fork",
)
ENTRY = {
    "plain": "",
    "actor": """
        @ray.remote(num_cpus=0)
        class Worker:
            def __init__(self):
                self.base = prepare()
            def call(self, k):
                return enter(k)
        """,
    "async_actor": """
        @ray.remote(num_cpus=0)
        class Worker:
            def __init__(self):
                self.base = prepare()
            async def call(self, k):
                await asyncio.sleep(0)
                return enter(k)
        """,
    "threaded_actor": """
        @ray.remote(num_cpus=0, max_concurrency=3)
        class Worker:
            def __init__(self):
                self.base = prepare()
            def call(self, k):
                return enter(k)
        """,
    "nested_actor": """
        @ray.remote(num_cpus=0)
        class Inner:
            def __init__(self):
                self.base = prepare()
            def call(self, k):
                return enter(k)

        @ray.remote(num_cpus=0)
        class Worker:
            def __init__(self):
                self.inner = Inner.remote()
            def call(self, k):
                return ray.get(self.inner.call.remote(k))
        """,
    "generator": """
        @ray.remote(num_cpus=0)
        def stream(k):
            for value in range(2):
                yield enter(k)
        """,
    "task": """
        @ray.remote(num_cpus=0)
        def task(k):
            return enter(k)
        """,
    "subprocess": """
        if __name__ == "__main__":
            enter(int(sys.argv[1]))
        """,
}
ENTRY["shared_actor"] = ENTRY["forgotten"] = ENTRY["actor"]
BODY = {
    "plain": "{m}.enter({k})",
    "actor": "ray.get({m}.Worker.remote().call.remote({k}))",
    "shared_actor": "ray.get(shared_{m}.call.remote({k}))",
    "async_actor": "ray.get(shared_{m}.call.remote({k}))",
    "threaded_actor": "ray.get([shared_{m}.call.remote({k}) for _ in range(3)])",
    "nested_actor": "ray.get({m}.Worker.remote().call.remote({k}))",
    "generator": "[ray.get(r) for r in {m}.stream.options(num_returns='streaming').remote({k})]",
    "task": "ray.get({m}.task.remote({k}))",
    "forgotten": "shared_{m}.call.remote({k})",
    "subprocess": "subprocess.run([sys.executable, '-m', 'gen.{m}', '{k}'], check=True)",
    "spawn": "in_process('spawn', {m}.enter, {k})",
    "fork": "in_process('fork', {m}.enter, {k})",
}
SHARED_KINDS = ("shared_actor", "async_actor", "threaded_actor", "forgotten")


@dataclass
class Module:
    """A generated module, and what its functions call."""

    name: str
    kind: str
    imports: list["Module"]
    calls: list[list[tuple["Module", int]]]  # by function
    reads: list[bool]  # by function: whether it reads the module's data file

    def text(self) -> str:
        imported = "".join(f"from gen import {module.name}\n" for module in self.imports)
        functions = ""
        for number, calls in enumerate(self.calls):
            terms = ["CONSTANT", *(f"{m.name}.f{k}(x)" for m, k in calls), *(["data()"] if self.reads[number] else [])]
            functions += f"def f{number}(x):\n    value = {' + '.join(terms)}\n    return value\n\n\n"
        chosen = ", ".join(f"f{number}" for number in range(FUNCTIONS))
        return (
            "import asyncio\nimport sys\nfrom pathlib import Path\n\nimport ray\n\n"
            f"{imported}\nCONSTANT = 1\n\n\n{functions}"
            f"def enter(k):\n    return ({chosen})[k](k)\n\n\n"
            "def prepare():\n    return 1\n\n\n"
            f"def data():\n    return len(Path(__file__).with_name('{self.name}.json').read_text()) * 0\n\n"
            + textwrap.dedent(ENTRY.get(self.kind, ""))
        )

    def reached(self, function: int) -> set[tuple[str, str]]:
        """The functions that run when this one is called."""
        found = {(self.name, f"f{function}")}
        if self.reads[function]:
            found.add((self.name, "data"))
        for module, number in self.calls[function]:
            found |= module.reached(number)
        return found

    def imported(self) -> set[str]:
        return {self.name}.union(*(module.imported() for module in self.imports))


@dataclass
class Test:
    name: str
    module: Module
    function: int
    file: int

    @property
    def id(self) -> str:
        return f"tests/test_{self.file:02}.py::{self.name}"

    def functions(self) -> set[tuple[str, str]]:
        kind, own = self.module.kind, self.module.name
        found = self.module.reached(self.function) | {(own, "enter")}
        if "actor" in kind or kind == "forgotten":
            found |= {(own, "prepare")}
            found |= {(own, "__init__")}
        return found


@dataclass
class Project:
    """The generated project: what is in it and which tests an edit concerns."""

    modules: list[Module] = field(default_factory=list)
    tests: list[Test] = field(default_factory=list)

    def imported_for(self, test: Test) -> set[str]:
        """The modules that the test's file imports, and those of the script that the test starts."""
        beside = {other.module.name: other.module for other in self.tests if other.file == test.file}
        by_file = (module.imported() for module in beside.values() if module.kind != "subprocess")
        return test.module.imported().union(*by_file)

    def write(self, folder: Path) -> None:
        texts = {"gen/__init__.py": "", "pytest.ini": "[pytest]\npythonpath = .\n", "conftest.py": self.conftest()}
        for module in self.modules:
            texts[f"gen/{module.name}.py"] = module.text()
            texts[f"gen/{module.name}.json"] = "{}\n"
        texts["processes.py"] = PROCESSES
        for file in range(FILES):
            texts[f"tests/test_{file:02}.py"] = self.test_file([test for test in self.tests if test.file == file])
        for name, text in texts.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    def conftest(self) -> str:
        return (
            "import pytest\nimport ray\n\n\n@pytest.fixture(scope='session')\ndef cluster():\n"
            "    ray.init(num_cpus=4, include_dashboard=False, logging_level='error')\n    yield\n    ray.shutdown()\n"
        )

    def test_file(self, tests: list[Test]) -> str:
        modules = {test.module.name: test.module for test in tests}
        lines = "import subprocess\nimport sys\n\nimport pytest\nimport ray\nfrom processes import in_process\n"
        lines += "".join(f"from gen import {name}\n" for name, m in modules.items() if m.kind != "subprocess") + "\n\n"
        for name, module in modules.items():
            if module.kind in SHARED_KINDS:
                lines += (
                    f"@pytest.fixture(scope='module')\ndef shared_{name}(cluster):\n"
                    f"    actor = {name}.Worker.remote()\n    ray.get(actor.__ray_ready__.remote())\n    return actor\n\n\n"
                )
        for test in tests:
            fixture = f"shared_{test.module.name}" if test.module.kind in SHARED_KINDS else "cluster"
            asked = "" if test.module.kind in ("plain", "subprocess", "spawn", "fork") else fixture
            call = BODY[test.module.kind].format(m=test.module.name, k=test.function)
            lines += f"def {test.name}({asked}):\n    {call}\n\n\n"
        return lines


PROCESSES = """import multiprocessing


def in_process(method, function, argument):
    process = multiprocessing.get_context(method).Process(target=function, args=(argument,))
    process.start()
    process.join()
    assert process.exitcode == 0
"""


def generate(seed: int, tests: int = TESTS) -> Project:
    """Leaves first: a third of the modules are helpers that the others call."""
    chance = random.Random(seed)
    project = Project()
    for number in range(MODULES):
        helper = number < MODULES // 3
        kind = "plain" if helper else KINDS[number % len(KINDS)]
        below = [] if number < 6 else chance.sample(project.modules[: MODULES // 3][:number], chance.randint(1, 2))
        calls = [[(m, chance.randrange(FUNCTIONS)) for m in below if chance.random() < 0.6] for _ in range(FUNCTIONS)]
        reads = [chance.random() < 0.3 for _ in range(FUNCTIONS)]
        project.modules.append(Module(f"m{number:02}", kind, below, calls, reads))
    entered = project.modules[MODULES // 3 :] + project.modules[: MODULES // 6]
    for number in range(tests):
        module = entered[number % len(entered)]
        # Tests of a module are in one file, as people have them.
        file = entered.index(module) % FILES
        project.tests.append(Test(f"test_{number:03}", module, chance.randrange(FUNCTIONS), file))
    return project


def edits(project: Project, number: int, seed: int) -> Iterator[Edit]:
    """Random single edits, each with the ids of the tests that run the edited code, or whose outcome it can change."""
    chance = random.Random(seed + 1)
    for index in range(number):
        module = chance.choice(project.modules)
        path = f"gen/{module.name}.py"
        what = ("function", "constructor", "constant", "import", "data file", "comment", "function", "function")[
            index % 8
        ]
        by_function = {test.id: test.functions() for test in project.tests}
        importing = {test.id for test in project.tests if module.name in project.imported_for(test)}
        if what == "constructor":
            module = chance.choice([m for m in project.modules if "actor" in m.kind or m.kind == "forgotten"])
            path = f"gen/{module.name}.py"
            exact = {test for test, found in by_function.items() if (module.name, "__init__") in found}
            yield Edit(what, path, "self.base = prepare()", "self.base = prepare() + 0", exact)
        elif what == "constant":
            readers = {(module.name, f"f{number}") for number in range(FUNCTIONS)}
            exact = {test for test, found in by_function.items() if found & readers}
            yield Edit(what, path, "CONSTANT = 1", "CONSTANT = 2", exact)
        elif what == "import":
            yield Edit(what, path, "import asyncio\n", "import asyncio\nimport string\n", importing)
        elif what == "data file":
            exact = {test for test, found in by_function.items() if (module.name, "data") in found}
            yield Edit(what, f"gen/{module.name}.json", "{}", '{"a": 1}', exact)
        elif what == "comment":
            yield Edit(what, path, "    return value\n", f"    return value  # {index}\n", set())
        else:
            function = chance.randrange(FUNCTIONS)
            exact = {test for test, found in by_function.items() if (module.name, f"f{function}") in found}
            yield Edit("function", path, f"def f{function}(x):\n", f"def f{function}(x):\n    x = x + 0\n", exact)
