"""How long one metric over many runs takes: the index of rlcanary, the jq command, jq's Python binding, json and orjson.

    python benchmarks/history.py [--runs 10000] [--repeat 5] [--json FILE] [--quick]

The runs hold 50 tests with 4 metrics each. All read the same files and must give the same values; the least time of the
repetitions counts, with the files in the page cache. Promised: 50 ms for 10,000 runs after start-up, in which the index has
compared every file with what it knows.
"""

import argparse
import datetime
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, track
from rich.table import Table

from rlcanary.history.history import load_history, results_files
from rlcanary.history.index import INDEX_NAME
from rlcanary.history.jq_query import run_query
from rlcanary.history.trends import Trend

TESTS, METRICS = 50, 4
KEY, METRIC = "test_module_7::test_number_7", "metric_2"
NAME = f"{KEY}.{METRIC}"
FILTER = f'.metrics["{KEY}"].{METRIC}'
PROMISED_MS = 50


def write_history(folder: Path, runs: int, console: Console) -> None:
    dice = random.Random(0)
    start = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
    for run in track(range(runs), "writing runs", console=console, transient=True):
        keys = [f"test_module_{test}::test_number_{test}" for test in range(TESTS)]
        level = 1.0 if run < 0.7 * runs else 1.05
        commit = f"{run:040x}"
        document = {
            "exit_status": 0,
            "git_commit": commit,
            "start_time": "",
            "metrics": {key: {f"metric_{i}": dice.gauss(level, 0.02) for i in range(METRICS)} for key in keys},
            "gpu_types": ["NVIDIA H100 80GB HBM3"],
            "coverage": None,
            "schema": 1,
            "start_time_utc": (start + datetime.timedelta(hours=run)).isoformat(),
            "run_id": f"{run:06d}",
            "tests": {f"tests/unit/{key}": {"outcome": "passed", "duration": 1.0, "key": key} for key in keys},
        }
        (folder / f"{run:06d}.json").write_text(json.dumps(document))


def with_jq_command(folder: Path) -> list[float]:
    files = "".join(f"{path}\0" for path in results_files(folder))
    command = ["xargs", "-0", "jq", FILTER]
    done = subprocess.run(command, input=files, capture_output=True, text=True, check=True)
    return [float(line) for line in done.stdout.split()]


def with_jq_binding(folder: Path) -> list[float]:
    return [float(str(result)) for result in run_query(FILTER, results_files(folder))]


def with_json(folder: Path) -> list[float]:
    return [json.loads(path.read_bytes())["metrics"][KEY][METRIC] for path in results_files(folder)]


def with_orjson(folder: Path) -> list[float]:
    import orjson

    return [orjson.loads(path.read_bytes())["metrics"][KEY][METRIC] for path in results_files(folder)]


def with_index(folder: Path) -> list[float]:
    with load_history(folder) as history:
        return [float(value or 0) for value in history.series(NAME).values]


def with_index_and_steps(folder: Path) -> list[float]:
    with load_history(folder) as history:
        series = history.series(NAME)
        assert len(Trend(series).steps) == 1
        return [float(value or 0) for value in series.values]


def with_command(folder: Path) -> list[float]:
    command = [sys.executable, "-m", "rlcanary", "trend", NAME, "--dir", str(folder), "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return [run["value"] for run in json.loads(done.stdout)["runs"]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=10_000, help="runs of the history (default: 10000)")
    parser.add_argument("--repeat", type=int, default=5, help="repetitions (default: 5)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="1,000 runs, 2 repetitions")
    arguments = parser.parse_args()
    runs, repeat = (1000, 2) if arguments.quick else (arguments.runs, arguments.repeat)

    ways: dict[str, Callable[[Path], list[float]]] = {
        "index, with freshness check": with_index,
        "index, and change points": with_index_and_steps,
        "rlcanary trend, whole process": with_command,
        "json": with_json,
        "jq binding (trend --jq)": with_jq_binding,
    }
    missing = {}
    try:
        import orjson  # noqa: F401
    except ImportError:
        missing["orjson"] = "not installed"
    else:
        ways["orjson"] = with_orjson
    if shutil.which("jq") and shutil.which("xargs"):
        ways["jq command"] = with_jq_command
    else:
        missing["jq command"] = "not installed"

    quiet = Console(stderr=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_history(folder, runs, quiet)
        megabytes = sum(path.stat().st_size for path in results_files(folder)) / 1e6
        began = time.perf_counter()
        with load_history(folder):
            build_s = time.perf_counter() - began
        index_megabytes = (folder / INDEX_NAME).stat().st_size / 1e6
        expected = with_json(folder)
        seconds: dict[str, float] = {}
        with Progress(console=quiet, transient=True) as progress:
            task = progress.add_task("asking", total=repeat * len(ways))
            for _ in range(repeat):
                for way, ask in ways.items():
                    began = time.perf_counter()
                    values = ask(folder)
                    spent = time.perf_counter() - began
                    # jq 1.6 rounds to 17 digits.
                    if not all(abs(a - b) <= 1e-15 * abs(b) for a, b in zip(values, expected, strict=True)):
                        sys.exit(f"{way} gives other values")
                    seconds[way] = min(spent, seconds.get(way, spent))
                    progress.advance(task)

    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"One metric over {runs} runs ({megabytes:.0f} MB)", title_justify="left")
    table.add_column("")
    table.add_column("ms", justify="right")
    table.add_column("times the index", justify="right")
    for way, spent in sorted(seconds.items(), key=lambda item: item[1]):
        table.add_row(way, f"{1000 * spent:.1f}", f"{spent / seconds['index, with freshness check']:.1f}")
    for way, reason in missing.items():
        table.add_row(way, reason, "")
    console.print(table)
    console.print(f"Building the index once: {build_s:.1f} s, {index_megabytes:.0f} MB.")
    console.print(f"Promised: {PROMISED_MS} ms for 10,000 runs after start-up, with freshness check.")
    if arguments.json is not None:
        figures = {
            "runs": runs,
            "milliseconds": {way: 1000 * spent for way, spent in seconds.items()},
            "build_s": build_s,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
