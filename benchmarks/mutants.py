"""Mutation scores: the share of small mistakes behind each adapter that the checks notice.

    python benchmarks/mutants.py [--adapter NAME]... [--sample N] [--json FILE] [--quick]

Beside the scores stand the checks that kill most mutants, each counted where it is the first to fail. A full run takes
hours on two cores.
"""

import argparse
import time
from collections import Counter
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rlcanary.mutants.equivalents import equivalents
from rlcanary.mutants.gather import PACKAGES, drawn, gather
from rlcanary.mutants.killing import kill
from rlcanary.mutants.score import score, to_json

# The shares that the suite is to reach.
TARGETS = {"reference": 0.97, "grpo": 0.95, "trl": 0.90, "verl": 0.90, "torchrl": 0.90}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", action="append", choices=PACKAGES, help="repeatable (default: all)")
    parser.add_argument("--sample", type=int, help="mutants per adapter, at random (default: all)")
    parser.add_argument("--json", type=Path, help="also write every verdict here")
    parser.add_argument("--quick", action="store_true", help="20 mutants of the reference")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    names, size = arguments.adapter or list(PACKAGES), arguments.sample
    if arguments.quick:
        names, size = ["reference"], 20

    console, listed = Console(width=120), {entry.id for entry in equivalents()}
    table = Table(title="Mutation scores", title_justify="left")
    for name in (
        "Adapter",
        "Mutants",
        "Run",
        "Killed",
        "Survived",
        "Unreached",
        "Crashed",
        "Score",
        "Target",
        "s each",
    ):
        table.add_column(name, justify="left" if name == "Adapter" else "right")
    judged = []
    for name in names:
        found, started = gather(name), time.perf_counter()
        chosen = [trial for trial in drawn(found, size, seed=0) if trial.mutant.id not in listed]
        own = list(track(kill(chosen), name, len(chosen), console=Console(stderr=True), transient=True))
        seconds = (time.perf_counter() - started) / max(len(own), 1)
        counts, share = Counter(fate.verdict for _, fate in own), score(own).share
        table.add_row(
            name,
            *(str(len(each)) for each in (found, own)),
            *(str(counts[verdict]) for verdict in ("killed", "survived", "unreached", "crashed")),
            "" if share is None else f"{100 * share:.1f} %",
            f"{100 * TARGETS[name]:.0f} %",
            f"{seconds:.1f}",
        )
        judged += own
    console.print(table)
    killers = Counter(fate.check for _, fate in judged if fate.verdict == "killed")
    console.print("most kills: " + ", ".join(f"{check} {count}" for check, count in killers.most_common(5)))
    if arguments.json is not None:
        arguments.json.write_text(to_json(judged))


if __name__ == "__main__":
    main()
