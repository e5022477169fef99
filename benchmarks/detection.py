"""How well the checks detect: every bug of the museum, false alarms on correct implementations, and the time they take.

    python benchmarks/detection.py [--seeds 20] [--json FILE] [--quick]

The peer is each check alone: what it catches, and the fewest checks that together catch what the whole suite does (greedy
cover). False alarms are counted on the reference under every preset at one seed, and under its defaults over many seeds.
"""

import argparse
import json
import time
from collections import defaultdict
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs import all_bugs
from rlcanary.bugs.detection import detect
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.presets import GRPO, PRESETS


def greedy_cover(caught_by: dict[str, set[str]]) -> list[str]:
    """Checks in the order in which each catches the most bugs that those before it miss."""
    left = {bug for bug, checks in caught_by.items() if checks}
    cover: list[str] = []
    while left:
        gains: dict[str, int] = defaultdict(int)
        for bug in left:
            for check in caught_by[bug]:
                gains[check] += 1
        best = max(sorted(gains), key=gains.__getitem__)
        cover.append(best)
        left = {bug for bug in left if best not in caught_by[bug]}
    return cover


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20, help="seeds of the reference's defaults (default: 20)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="two seeds, two presets, ten bugs")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bugs, presets, seeds = all_bugs(), dict(PRESETS), arguments.seeds
    if arguments.quick:
        bugs, presets, seeds = bugs[::5][:10], dict(list(presets.items())[:2]), 2

    console = Console(width=120)
    quiet = Console(stderr=True)
    caught_by: dict[str, set[str]] = {}
    for bug in track(bugs, "planting bugs", console=quiet, transient=True):
        caught_by[bug.id] = set(detect(bug).caught_by)
    alarms: dict[str, int] = defaultdict(int)
    seconds: dict[str, float] = defaultdict(float)
    runs = [(PRESETS[name], 0) for name in presets] + [(GRPO, seed) for seed in range(seeds)]
    started = time.perf_counter()
    for conventions, seed in track(runs, "trying correct implementations", console=quiet, transient=True):
        for check in all_checks():
            result = run_check(check, ReferenceAdapter(conventions), "reference", seed)
            alarms[check.id] += result.status in ("fail", "error")
            seconds[check.id] += result.seconds
    suite_seconds = (time.perf_counter() - started) / len(runs)

    cover = greedy_cover(caught_by)
    table = Table(title="Detection by check", title_justify="left")
    for name, justify in (
        ("Check", "left"),
        ("Bugs", "right"),
        ("Alone", "right"),
        ("Alarms", "right"),
        ("ms", "right"),
    ):
        table.add_column(name, justify=justify)
    for check in all_checks():
        mine = {bug for bug, checks in caught_by.items() if check.id in checks}
        alone = {bug for bug in mine if caught_by[bug] == {check.id}}
        milliseconds = 1000 * seconds[check.id] / len(runs)
        table.add_row(check.id, str(len(mine)), str(len(alone)), str(alarms[check.id]), f"{milliseconds:.0f}")
    console.print(table)
    caught = sum(bool(checks) for checks in caught_by.values())
    console.print(
        f"{caught} of {len(bugs)} bugs caught by {len(all_checks())} checks, {len(cover)} of which are enough:"
    )
    console.print(", ".join(cover))
    console.print(f"{sum(alarms.values())} false alarms in {len(runs)} runs of the suite on correct implementations")
    console.print(f"{suite_seconds:.1f} s for the suite on the reference, one thread")
    if arguments.json is not None:
        figures = {
            "bugs": {bug: sorted(checks) for bug, checks in caught_by.items()},
            "false_alarms": sum(alarms.values()),
            "runs": len(runs),
            "suite_seconds": round(suite_seconds, 2),
            "cover": cover,
        }
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
