"""Test selection: recall and over-selection beside plain pytest-testmon and an import map, and what recording costs.

    python benchmarks/selection.py [--edits 300] [--seed 0] [--json FILE] [--quick]

A generated project of 200 tests and 60 modules uses every kind of remote code: own and shared actors, async, threaded and
nested ones, generators, tasks, work that nobody waits for, subprocesses, multiprocessing. Its generator knows which
functions, constants and files each test reaches, so that the exact set of tests of an edit is known without running any.
Each tool records the project once; then every edit is made, the tool's choice is read, and the edit is taken back. An edit
of a module's body (a constant, an import) concerns every test that imports the module, in whatever process.

Recording costs: the same suite with and without `--testmon`, in turns. Other work on the machine makes single times long,
never short, so the fastest tenth of the short stretches counts, timed inside the tests. The promises are for Python 3.12:
the benchmark goes on in the environment of `make venv312` if there is one.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table
from testmon import testmon_core

from rlcanary.selection import testmon_data
from rlcanary.selection.source_map import SourceMap

MODULES = 60
TESTS = 200
FILES = 20
FUNCTIONS = 4
START_MS = 25  # a start takes 20 to 1000 ms, and a runtime_env would add 500 to 850
PYTHON_312 = Path(".venv312/bin/python")

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


def generate(seed: int) -> Project:
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
    for number in range(TESTS):
        module = entered[number % len(entered)]
        # Tests of a module are in one file, as people have them.
        file = entered.index(module) % FILES
        project.tests.append(Test(f"test_{number:03}", module, chance.randrange(FUNCTIONS), file))
    return project


@dataclass
class Edit:
    what: str
    path: str
    old: str
    new: str
    exact: set[str]


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
            yield Edit(what, path, "CONSTANT = 1", "CONSTANT = 2", importing)
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


@contextmanager
def made(folder: Path, edit: Edit) -> Iterator[None]:
    path = folder / edit.path
    before = path.read_text()
    assert edit.old in before, edit
    path.write_text(before.replace(edit.old, edit.new, 1))
    try:
        yield
    finally:
        path.write_text(before)


def environment(folder: str, **more: str) -> dict[str, str]:
    """The variables of a run, with a folder of its own for Ray, so that it finds no other cluster of this machine."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST_"))}
    return inherited | {"RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1", "RAY_TMPDIR": folder} | more


def run_pytest(folder: Path, *options: str, **more: str) -> float:
    """Seconds of a run of all tests."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:rlcanary-tracker", "-p", "no:rlcanary-cleanup", *options]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="rlcb-", ignore_cleanup_errors=True) as short:
        variables = environment(short, **more)
        run = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit((run.stdout + run.stderr)[-3000:])
    return time.perf_counter() - began


def unstable(folder: Path, datafile: str) -> set[str]:
    os.environ["TESTMON_DATAFILE"] = datafile
    data = testmon_core.TestmonData.for_worker(rootdir=str(folder), exec_id=1)
    data.files_of_interest = data.db.all_filenames()
    data.determine_stable()
    data.db.con.close()
    return set(data.unstable_test_names)


def by_rlcanary(folder: Path, edit: Edit) -> set[str]:
    with testmon_data.own_source_tree():
        return unstable(folder, ".testmondata-ours")


def by_testmon(folder: Path, edit: Edit) -> set[str]:
    return unstable(folder, ".testmondata-plain")


def by_import_map(project: Project) -> Callable[[Path, Edit], set[str]]:
    def choose(folder: Path, edit: Edit) -> set[str]:
        sources = SourceMap(folder, [str(folder)])
        return {t.id for t in project.tests if edit.path in sources.closure([t.id.partition("::")[0]])}

    return choose


@dataclass
class Score:
    exact: int = 0
    found: int = 0
    chosen: int = 0
    incomplete: int = 0

    def add(self, exact: set[str], chosen: set[str]) -> None:
        self.exact += len(exact)
        self.found += len(exact & chosen)
        self.chosen += len(chosen)
        self.incomplete += not exact <= chosen


def compare(folder: Path, project: Project, made_edits: list[Edit]) -> dict[str, dict[str, Score]]:
    tools = {"rlcanary": by_rlcanary, "pytest-testmon": by_testmon, "import map": by_import_map(project)}
    scores: dict[str, dict[str, Score]] = {tool: {} for tool in tools}
    for edit in track(made_edits, "edits", disable=not sys.stderr.isatty()):
        with made(folder, edit):
            for tool, choose in tools.items():
                chosen = choose(folder, edit)
                for what in ("all", edit.what):
                    scores[tool].setdefault(what, Score()).add(edit.exact, chosen)
                if tool == "rlcanary" and (missed := edit.exact - chosen):
                    print(f"missed after an edit of {edit.what} in {edit.path}: {', '.join(sorted(missed)[:5])}")
    return scores


CALLS = """
import json, os, time
import pytest, ray

@pytest.fixture(scope="session")
def cluster():
    ray.init(num_cpus=4, include_dashboard=False, logging_level="error")
    yield
    ray.shutdown()

def layer(x, depth):
    return x if depth == 0 else layer(x + 1, depth - 1)

@ray.remote(num_cpus=0)
class Actor:
    def call(self, x):
        return layer(x, 5)

    def compute(self, n):
        return work(n)

def token(i, state):
    total = 0
    for j in range(12):
        total += (i * j) % 7
        state = (state * 31 + total) % 1000003
    return state

def work(n):
    state = 1
    for i in range(n):
        state = token(i, state)
    return state

def note(name, seconds):
    with open(os.environ["TIMES"], "a") as stream:
        stream.write(json.dumps([name, seconds]) + "\\n")

def test_calls(cluster):
    actor = Actor.remote()
    ray.get([actor.call.remote(i) for i in range(100)])
    for _ in range(60):
        began = time.perf_counter()
        for i in range(20):
            ray.get(actor.call.remote(i))
        note("20 calls", time.perf_counter() - began)

def test_compute_in_an_actor(cluster):
    actor = Actor.remote()
    ray.get(actor.call.remote(0))
    for _ in range(30):
        began = time.perf_counter()
        ray.get(actor.compute.remote(20000))
        note("compute in an actor", time.perf_counter() - began)

def test_compute_here():
    for _ in range(30):
        began = time.perf_counter()
        work(20000)
        note("compute in the test", time.perf_counter() - began)

def test_start(cluster):
    for _ in range(16):
        began = time.perf_counter()
        ray.get(Actor.remote().call.remote(0))
        note("start of an actor", time.perf_counter() - began)
"""


def overheads(folder: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each kind of work, with and without recording: a tenth of the times is shorter."""
    folder.mkdir()
    (folder / "pytest.ini").touch()
    (folder / "test_cost.py").write_text(CALLS)
    times: dict[str, dict[str, list[float]]] = {"without": {}, "recording": {}, "pytest-testmon": {}}
    options = {
        "without": ("-p", "no:testmon", "-p", "no:rlcanary-selection"),
        "recording": ("--testmon",),
        "pytest-testmon": ("--testmon", "-p", "no:rlcanary-selection"),
    }
    for turn in range(rounds):
        for mode, chosen in options.items():
            noted = folder / f"{mode}-{turn}.jsonl"
            run_pytest(folder, *chosen, TIMES=str(noted), TESTMON_DATAFILE=f".testmondata-{mode}-{turn}")
            for name, value in map(json.loads, noted.read_text().splitlines()):
                times[mode].setdefault(name, []).append(value)
    return {
        mode: {name: sorted(values)[len(values) // 10] for name, values in by_name.items()}
        for mode, by_name in times.items()
    }


def promise(text: str, value: float, bound: float, least: bool = False) -> dict[str, object]:
    kept = value >= bound if least else value <= bound
    return {"promise": text, "value": value, "bound": bound, "kept": kept}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=3, help="sessions of each mode for the costs of recording")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--quick", action="store_true", help="40 edits, and one round of the costs of recording")
    arguments = parser.parse_args()
    if PYTHON_312.exists() and sys.version_info < (3, 12):
        os.execv(PYTHON_312.absolute(), [str(PYTHON_312), __file__, *sys.argv[1:]])
    number, rounds = (40, 1) if arguments.quick else (arguments.edits, arguments.rounds)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    version = platform.python_version()
    console.print(f"Python {version}, seed {arguments.seed}")
    with tempfile.TemporaryDirectory(prefix="rlcanary-selection-") as name:
        folder = Path(name) / "project"
        project = generate(arguments.seed)
        project.write(folder)
        ours = run_pytest(folder, "--testmon", TESTMON_DATAFILE=".testmondata-ours")
        plain = run_pytest(folder, "--testmon", "-p", "no:rlcanary-selection", TESTMON_DATAFILE=".testmondata-plain")
        console.print(
            f"the project's run took {ours:.0f} s when rlcanary recorded it, {plain:.0f} s with testmon alone"
        )
        scores = compare(folder, project, list(edits(project, number, arguments.seed)))
        costs = overheads(Path(name) / "costs", rounds)
    kept = report(console, scores, costs)
    if arguments.json:
        arguments.json.write_text(json.dumps({"python": version, "promises": kept, "costs": costs}, indent=1) + "\n")
    return 0 if all(line["kept"] for line in kept) else 1


def report(
    console: Console, scores: dict[str, dict[str, Score]], costs: dict[str, dict[str, float]]
) -> list[dict[str, object]]:
    table = Table(
        "Tool", "Edits", "Recall", "Edits that miss a test", "Chosen / exact", title="which tests an edit runs"
    )
    for tool, by_kind in scores.items():
        for what, score in sorted(by_kind.items()):
            recall = f"{score.found / score.exact:.3f}" if score.exact else "-"
            ratio = f"{score.chosen / score.exact:.2f}" if score.exact else f"{score.chosen} / 0"
            table.add_row(tool if what == "all" else "", what, recall, str(score.incomplete), ratio)
    console.print(table)
    seconds = Table("", "without", "recorded", "ratio", "pytest-testmon", title="what recording costs (ms)")
    for name in costs["without"]:
        before, after, peer = (costs[mode][name] * 1000 for mode in ("without", "recording", "pytest-testmon"))
        seconds.add_row(name, f"{before:.1f}", f"{after:.1f}", f"{after / before:.2f}", f"{peer:.1f}")
    console.print(seconds)
    every = scores["rlcanary"]["all"]
    ratio = {name: costs["recording"][name] / costs["without"][name] for name in costs["without"]}
    start = (costs["recording"]["start of an actor"] - costs["without"]["start of an actor"]) * 1000
    kept = [
        promise("recall", every.found / every.exact, 1.0, least=True),
        promise("chosen / exact", every.chosen / every.exact, 1.3),
        promise("Ray calls, recorded / not", ratio["20 calls"], 1.15),
        promise("compute in an actor, recorded / not", ratio["compute in an actor"], 1.3),
        promise("compute in the test, recorded / not", ratio["compute in the test"], 1.3),
        promise("start of an actor, ms more", start, START_MS),
    ]
    for line in kept:
        word = "[green]kept  [/]" if line["kept"] else "[red]missed[/]"
        console.print(f"{word} {line['promise']}: {line['value']:.3f} (bound {line['bound']})")
    return kept


if __name__ == "__main__":
    sys.exit(main())
