"""What rlcanary's pytest plugins cost: CPU time of pytest with all of them on, against bare pytest.

    python benchmarks/tracker_overhead.py [--tests 5000] [--rounds 5] [--json FILE] [--quick]

Plugins are loaded as everywhere, by their entry points (for every plugin named with `-p`, pytest looks through all that is
installed once more). Bare pytest has those of rlcanary switched off with `-p no:`. The plugins that rlcanary depends on
(timeout, testmon, xdist) are on in both, everything else that is installed in neither. The two take turns, and the medians
of user and system time are compared, so that other load on the machine counts the same for both. Promised: a ratio of at
most 1.15 for 5,000 trivial tests, and at most 1.2 for starting pytest with a single one.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from importlib.metadata import distribution, distributions
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from pytest_rlcanary import PLUGINS

DEPENDENCIES = ("pytest-timeout", "pytest-testmon", "pytest-xdist")
TESTS_A_FILE = 100
MOST_FOR_TESTS = 1.15
MOST_FOR_START = 1.2


OWN = [f"rlcanary-{name}" for name in PLUGINS]


def plugins(*names: str) -> set[str]:
    """The entry points of pytest plugins in these distributions, or in all that are installed."""
    found = [distribution(name) for name in names] if names else distributions()
    return {point.name for one in found for point in one.entry_points if point.group == "pytest11"}


def make_project(folder: Path, tests: int) -> Path:
    """A git repository with this many tests that do nothing."""
    folder.mkdir()
    (folder / "pytest.ini").write_text("[pytest]\nrlcanary_results = unit_results.json\n")  # no test uses the tracker
    (folder / ".gitignore").write_text("unit_results*\n.testmondata*\n__pycache__/\n")
    for number in range(0, tests, TESTS_A_FILE):
        body = "".join(f"def test_{i}(): pass\n" for i in range(number, min(number + TESTS_A_FILE, tests)))
        (folder / f"test_{number}.py").write_text(body)
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@example.org"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=folder, check=True)
    return folder


def cpu_seconds(project: Path, switched_on: list[str]) -> float:
    """User and system time of a run of pytest and its children, with these plugins of rlcanary on and its others off."""
    own = set(OWN) - set(switched_on) if switched_on else {"rlcanary"}
    others = plugins() - plugins("rlcanary", *DEPENDENCIES) | own
    off = [part for name in ["cacheprovider", *sorted(others)] for part in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", "-q", *off]
    # As on most machines, modules are compiled once, in the round that does not count, and not at every start.
    environment = {
        **os.environ,
        "PYTHONDONTWRITEBYTECODE": "",
        "PYTHONPYCACHEPREFIX": str(project.parent / "bytecode"),
    }
    process = subprocess.Popen(
        command, cwd=project, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    _, status, usage = os.wait4(process.pid, 0)
    if status != 0:
        sys.exit(f"{' '.join(command)} in {project} ended with status {status}")
    return usage.ru_utime + usage.ru_stime


def compare(
    project: Path, settings: dict[str, list[str]], rounds: int, progress: Progress, title: str
) -> dict[str, float]:
    """Median CPU seconds for each setting, which take turns; one round before does not count."""
    task = progress.add_task(title, total=(rounds + 1) * len(settings))
    seconds: dict[str, list[float]] = {name: [] for name in settings}
    for number in range(rounds + 1):
        for name, switched_on in settings.items():
            spent = cpu_seconds(project, switched_on)
            if number:
                seconds[name].append(spent)
            progress.advance(task)
    return {name: statistics.median(values) for name, values in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", type=int, default=5000, help="trivial tests (default: 5000)")
    parser.add_argument(
        "--rounds", type=int, default=5, help="runs of each setting (default: 5; four times as many starts)"
    )
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="500 tests, 2 rounds")
    arguments = parser.parse_args()
    tests, rounds = (500, 2) if arguments.quick else (arguments.tests, arguments.rounds)

    settings = {"bare pytest": [], "all plugins": OWN}
    alone = {f"{name} alone": [name] for name in OWN}
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True), transient=True) as progress:
        many = make_project(Path(folder) / "many", tests)
        one = make_project(Path(folder) / "one", 1)
        of_tests = compare(many, settings | alone, rounds, progress, f"{tests} tests")
        of_start = compare(one, settings | alone, 4 * rounds, progress, "starting")

    ratios = {
        "tests": of_tests["all plugins"] / of_tests["bare pytest"],
        "start": of_start["all plugins"] / of_start["bare pytest"],
    }
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title="CPU time of pytest (user and system, medians)", title_justify="left")
    for column in ("", f"{tests} tests", "ratio", "start with one test", "ratio"):
        table.add_column(column, justify="right" if column else "left")
    for name, start in of_start.items():
        table.add_row(
            name,
            f"{of_tests[name]:.2f} s",
            f"{of_tests[name] / of_tests['bare pytest']:.3f}",
            f"{1000 * start:.0f} ms",
            f"{start / of_start['bare pytest']:.3f}",
        )
    console.print(table)
    for what, most in (("tests", MOST_FOR_TESTS), ("start", MOST_FOR_START)):
        console.print(f"{'kept  ' if ratios[what] <= most else 'missed'} {what}: {ratios[what]:.3f}, at most {most}")
    if arguments.json is not None:
        figures = {"tests": tests, "rounds": rounds, "ratios": ratios, "of_tests_s": of_tests, "of_start_s": of_start}
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
