"""Test selection: recall and over-selection beside plain pytest-testmon and an import map, and what recording costs.

    python benchmarks/selection.py [--parts local ray real compute unchanged costs] [--edits 300] [--seed 0] [--quick]

local: four packages with a module of each kind of code that selectors miss (`generated_project.holes`): work handed to
threads and processes that an earlier test started, state that is filled once, files that are absent, native or data, the
environment; and 32 kinds of edits of them.

ray: a project of 60 modules uses every kind of remote code: own and shared actors, async, threaded and nested ones,
generators, tasks, work that nobody waits for, subprocesses, multiprocessing.

real: a library of the package index with its own tests (`generated_project.downloaded`), and at most 100 edits of it.

The generators know which functions, constants and files each test reaches, so that the exact set of tests of an edit is
known without running any. Each tool records a project once; then every edit is made, the tool's choice is read, and the edit
is taken back. An edit of a module's statements (an import, an expression) concerns every test that imports the module, in
whatever process; one of a constant, those that read it.

Recording costs: the same suite with and without `--testmon`, in turns. Other work on the machine makes single times long,
never short, so the fastest tenth of the short stretches counts, timed inside the tests. The promises are for Python 3.12:
the benchmark goes on in the environment of `make venv312` if there is one.
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from generated_project import downloaded, edits, generate
from generated_project.costs import CALLS, COMPUTE
from generated_project.holes import Edit, Holes
from rich.console import Console
from rich.progress import track
from rich.table import Table
from testmon import testmon_core

from rlcanary.selection import testmon_data
from rlcanary.selection.source_map import SourceMap

UNCHANGED = "a run without an edit"
START_MS = 25  # a start takes 20 to 1000 ms, and a runtime_env would add 500 to 850
PARTS = ("local", "ray", "real", "compute", "unchanged", "costs")
PYTHON_312 = Path(".venv312/bin/python")


@contextmanager
def made(folder: Path, edit: Edit) -> Iterator[None]:
    if edit.path == "$":
        os.environ[edit.old] = edit.new
        try:
            yield
        finally:
            del os.environ[edit.old]
        return
    path = folder / edit.path
    exists, had_folder = path.exists(), path.parent.exists()
    assert exists == bool(edit.old), edit
    before = path.read_text() if exists else ""
    assert edit.old in before, edit
    path.parent.mkdir(exist_ok=True)
    path.write_text(before.replace(edit.old, edit.new, 1) if exists else edit.new)
    try:
        yield
    finally:
        if exists:
            path.write_text(before)
        else:
            path.unlink()
        if not had_folder:
            path.parent.rmdir()


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
    if isinstance(data.source_tree, testmon_data.SourceTree):
        testmon_data.share_packages(data)
    data.files_of_interest = data.db.all_filenames()
    data.determine_stable()
    data.db.con.close()
    return set(data.unstable_test_names)


def by_rlcanary(folder: Path, _edit: Edit) -> set[str]:
    with testmon_data.own_source_tree():
        return unstable(folder, ".testmondata-ours")


def by_testmon(folder: Path, _edit: Edit) -> set[str]:
    return unstable(folder, ".testmondata-plain")


def by_import_map(tests: list[str]) -> Callable[[Path, Edit], set[str]]:
    def choose(folder: Path, edit: Edit) -> set[str]:
        sources = SourceMap(folder, [str(folder), str(folder / "src")])
        by_file = {file: edit.path in sources.closure([file]) for file in {test.partition("::")[0] for test in tests}}
        return {test for test in tests if by_file[test.partition("::")[0]]}

    return choose


@dataclass
class Score:
    exact: int = 0
    found: int = 0
    chosen: int = 0
    incomplete: int = 0
    below_testmon: int = 0

    def add(self, exact: set[str], chosen: set[str]) -> None:
        self.exact += len(exact)
        self.found += len(exact & chosen)
        self.chosen += len(chosen)
        self.incomplete += not exact <= chosen


Scores = dict[str, dict[str, Score]]


def compare(folder: Path, tests: list[str], made_edits: list[Edit], scores: Scores) -> None:
    """Add what each tool chooses after each edit to the scores, which are by tool and kind of edit."""
    tools = {"rlcanary": by_rlcanary, "pytest-testmon": by_testmon, "import map": by_import_map(tests)}
    for edit in track(made_edits, "edits", disable=not sys.stderr.isatty()):
        with made(folder, edit):
            found = {tool: choose(folder, edit) for tool, choose in tools.items()}
            for tool, chosen in found.items():
                for what in ("all", edit.what):
                    score = scores.setdefault(tool, {}).setdefault(what, Score())
                    score.add(edit.exact, chosen)
                    score.below_testmon += not (edit.exact & found["pytest-testmon"]) <= chosen
                if tool == "rlcanary" and (missed := edit.exact - chosen):
                    print(f"missed after an edit of {edit.what} in {edit.path}: {', '.join(sorted(missed)[:5])}")


def record(folder: Path, console: Console) -> None:
    """Run the project once with each tool."""
    ours = run_pytest(folder, "--testmon", TESTMON_DATAFILE=".testmondata-ours")
    plain = run_pytest(folder, "--testmon", "-p", "no:rlcanary-selection", TESTMON_DATAFILE=".testmondata-plain")
    console.print(f"a run took {ours:.0f} s when rlcanary recorded it, {plain:.0f} s with testmon alone")


def overheads(folder: Path, rounds: int, text: str) -> dict[str, dict[str, float]]:
    """Seconds of each kind of work, with and without recording: a tenth of the times is shorter."""
    folder.mkdir()
    (folder / "pytest.ini").touch()
    (folder / "test_cost.py").write_text(text)
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


def unchanged(folder: Path, rounds: int) -> dict[str, float]:
    """Seconds of processor time of a run after which nothing changed, by tool: the fastest of each, in turns."""
    options = {"recording": (), "pytest-testmon": ("-p", "no:rlcanary-selection")}
    best = dict.fromkeys(options, float("inf"))
    for turn in range(rounds + 1):
        for mode, chosen in options.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            run_pytest(
                folder, "--testmon", *chosen, TESTMON_DATAFILE=f".testmondata-{mode}", PYTHONDONTWRITEBYTECODE=""
            )
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            if turn:  # the first records
                best[mode] = min(best[mode], seconds)
    return best


def promise(text: str, value: float, bound: float, least: bool = False) -> dict[str, object]:
    kept = value >= bound if least else value <= bound
    return {"promise": text, "value": value, "bound": bound, "kept": kept}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--edits", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tests", type=int, default=200, help="tests of the project on Ray")
    parser.add_argument("--here", action="store_true", help="measure this Python, also where there is a .venv312")
    parser.add_argument("--rounds", type=int, default=3, help="sessions of each mode for the costs of recording")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure")
    parser.add_argument("--quick", action="store_true", help="40 edits, and one round of the costs of recording")
    arguments = parser.parse_args()
    if not arguments.here and PYTHON_312.exists() and sys.version_info < (3, 12):
        os.execv(PYTHON_312.absolute(), [str(PYTHON_312), __file__, *sys.argv[1:]])
    number, rounds = (40, 1) if arguments.quick else (arguments.edits, arguments.rounds)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    version = platform.python_version()
    console.print(f"Python {version}, seed {arguments.seed}")
    with tempfile.TemporaryDirectory(prefix="rlcanary-selection-") as name:
        folder, scores = Path(name), Scores()
        if "local" in arguments.parts:
            holes = Holes(groups=4, seed=arguments.seed)
            holes.write(folder / "local")
            record(folder / "local", console)
            tests = [test for by_kind in holes.users.values() for each in by_kind.values() for test, _ in each]
            compare(folder / "local", tests, list(holes.edits(number, arguments.seed + 1)), scores)
        if "ray" in arguments.parts:
            project = generate(arguments.seed, arguments.tests)
            project.write(folder / "ray")
            record(folder / "ray", console)
            tests = [test.id for test in project.tests]
            compare(folder / "ray", tests, list(edits(project, number, arguments.seed)), scores)
        if "real" in arguments.parts:
            (folder / "real").mkdir()
            place = downloaded.download(folder / "real")
            found = list(downloaded.edits(place, min(number, 100), arguments.seed))
            record(place, console)
            compare(place, sorted(downloaded.outcomes(place)), found, scores)
        costs = overheads(folder / "compute", rounds, COMPUTE) if "compute" in arguments.parts else {}
        if "unchanged" in arguments.parts:
            Holes(groups=4, seed=arguments.seed).write(folder / "unchanged")
            for mode, seconds in unchanged(folder / "unchanged", 5 * rounds).items():
                costs.setdefault(mode, {})[UNCHANGED] = seconds
        if "costs" in arguments.parts:
            for mode, found in overheads(folder / "costs", rounds, CALLS).items():
                costs.setdefault(mode, {}).update(found)
    kept = report(console, scores, costs)
    if arguments.json:
        arguments.json.write_text(json.dumps({"python": version, "promises": kept, "costs": costs}, indent=1) + "\n")
    return 0 if all(line["kept"] for line in kept) else 1


def report(console: Console, scores: Scores, costs: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    table = Table(
        "Tool", "Edits", "Recall", "Edits that miss a test", "Chosen / exact", title="which tests an edit runs"
    )
    for tool, by_kind in scores.items():
        for what, score in sorted(by_kind.items()):
            recall = f"{score.found / score.exact:.3f}" if score.exact else "-"
            ratio = f"{score.chosen / score.exact:.2f}" if score.exact else f"{score.chosen} / 0"
            table.add_row(tool if what == "all" else "", what, recall, str(score.incomplete), ratio)
    console.print(table)
    kept: list[dict[str, object]] = []
    if scores:
        every = scores["rlcanary"]["all"]
        kept += [
            promise("recall", every.found / every.exact, 1.0, least=True),
            promise("edits on which testmon alone finds a test more", every.below_testmon, 0),
            promise("chosen / exact", every.chosen / every.exact, 2.0),
        ]
    if costs:
        kept += report_costs(console, costs)
    for line in kept:
        word = "[green]kept  [/]" if line["kept"] else "[red]missed[/]"
        console.print(f"{word} {line['promise']}: {line['value']:.3f} (bound {line['bound']})")
    return kept


def report_costs(console: Console, costs: dict[str, dict[str, float]]) -> list[dict[str, object]]:
    seconds = Table("", "without", "recorded", "ratio", "pytest-testmon", title="what recording costs (ms)")
    without = costs.get("without", {})
    for name, after in costs["recording"].items():
        peer = costs["pytest-testmon"][name]
        before = without.get(name, peer)
        shown = f"{before * 1000:.1f}" if name in without else "-"
        seconds.add_row(name, shown, f"{after * 1000:.1f}", f"{after / before:.2f}", f"{peer * 1000:.1f}")
    console.print(seconds)
    kept: list[dict[str, object]] = []
    if UNCHANGED in costs["recording"]:
        times = costs["recording"][UNCHANGED] / costs["pytest-testmon"][UNCHANGED]
        kept.append(promise("a run without an edit, rlcanary / testmon alone", times, 1.1))
    if "20 calls" not in without:
        return kept
    ratio = {name: costs["recording"][name] / without[name] for name in without}
    start = (costs["recording"]["start of an actor"] - costs["without"]["start of an actor"]) * 1000
    return [
        *kept,
        promise("Ray calls, recorded / not", ratio["20 calls"], 1.15),
        promise("Ray calls in flight, recorded / not", ratio["100 calls in flight"], 1.3),
        promise("compute in an actor, recorded / not", ratio["compute in an actor"], 1.3),
        promise("compute in the test, recorded / not", ratio["compute in the test"], 1.3),
        promise("start of an actor, ms more", start, START_MS),
    ]


if __name__ == "__main__":
    sys.exit(main())
