"""What a start costs: `rlcanary --help`, and pytest where rlcanary is installed beside pytest where it is not.

The promises: `rlcanary --help` takes at most 0.2 seconds, and pytest at most 1.1 times what it takes without rlcanary. All
take turns in one run, with Python's own start as a measure of the machine; the fastest of each counts. Processor time is
what is promised, since other work on the machine hardly changes it; the time on the clock is shown beside it.

Both environments are bare: a folder of links to what rlcanary depends on, pytest with xdist, timeout and testmon among it,
and to rlcanary or not. Bytecode and the list of installed files are there, as after an installation.
"""

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from importlib.metadata import distribution
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

HELP_SECONDS = 0.2
PYTEST_RATIO = 1.1
ROOT = Path(__file__).parents[1]


class Seconds(NamedTuple):
    processor: float
    clock: float


def requirements(name: str) -> set[str]:
    """What a distribution needs, and what that needs."""
    found: set[str] = set()
    left = [name]
    while left:
        lines = map(Requirement, distribution(left.pop()).requires or ())
        new = {line.name for line in lines if line.marker is None or line.marker.evaluate({"extra": ""})} - found
        found |= new
        left += new
    return found


def bare_environment(folder: Path, *, with_rlcanary: bool) -> str:
    """Make a folder of links to what rlcanary needs, and to itself or not, and return it as PYTHONPATH."""
    folder.mkdir()
    for name in requirements("rlcanary"):
        own = distribution(name)
        tops = {file.parts[0] for file in own.files or () if file.parts[0] not in ("..", "__pycache__")}
        for top in tops:
            (folder / top).symlink_to(Path(str(own.locate_file(top))))
    if with_rlcanary:
        for package in (ROOT / "harness/rlcanary", ROOT / "plugins/pytest_rlcanary"):
            (folder / package.name).symlink_to(package)
        install_record(folder)
    return str(folder)


def install_record(folder: Path) -> None:
    """Write what an installer writes of rlcanary: pytest reads the name of every file of a distribution of plugins."""
    installed = distribution("rlcanary")
    info = folder / f"rlcanary-{installed.version}.dist-info"
    info.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        (info / name).write_text(installed.read_text(name) or "")
    sources = [file.relative_to(root) for root in (ROOT / "harness", ROOT / "plugins") for file in root.rglob("*.py")]
    compiled = [file.parent / "__pycache__" / f"{file.stem}.pyc" for file in sources]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*sources, *compiled]))


def taken(command: list[str], folder: Path, path: str) -> Seconds:
    """The time of one process and its children, in an environment."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON"))}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(command, cwd=folder, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True)
    clock, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{command} exits with {done.returncode}: {done.stdout}{done.stderr}")
    return Seconds(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, clock)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    # -S: the packages of this Python stay out of both environments.
    pytest = [sys.executable, "-S", "-m", "pytest", "-p", "no:cacheprovider"]
    times: dict[str, list[Seconds]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="rlcanary-startup-") as name:
        folder = Path(name, "project")
        folder.mkdir()
        (folder / "pytest.ini").touch()
        (folder / "test_one.py").write_text("def test_one():\n    pass\n")
        without = bare_environment(Path(name, "without"), with_rlcanary=False)
        with_it = bare_environment(Path(name, "with"), with_rlcanary=True)
        commands = {
            "python": ([sys.executable, "-S", "-c", "pass"], without),
            "rlcanary --help": ([sys.executable, "-S", "-m", "rlcanary", "--help"], with_it),
            "pytest without": (pytest, without),
            "pytest with": (pytest, with_it),
        }
        for turn in range(rounds + 1):
            for label, (command, path) in commands.items():
                seconds = taken(command, folder, path)
                if turn:  # the first writes bytecode
                    times[label].append(seconds)
    best = {label: Seconds(*map(min, zip(*found, strict=True))) for label, found in times.items()}
    for label, seconds in best.items():
        print(f"{label + ':':18} {seconds.processor:.3f} s of processor time, {seconds.clock:.3f} s on the clock")
    ratio = best["pytest with"].processor / best["pytest without"].processor
    help_seconds = best["rlcanary --help"].processor
    print(f"rlcanary --help: {help_seconds:.3f} s (promised: at most {HELP_SECONDS} s)")
    print(f"pytest with rlcanary: {ratio:.2f} times pytest without (promised: at most {PYTEST_RATIO})")
    return int(help_seconds > HELP_SECONDS or ratio > PYTEST_RATIO)


if __name__ == "__main__":
    sys.exit(main())
