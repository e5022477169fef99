"""The audit inside real training runs: bugs that it finds, runs that it leaves alone, and what it costs.

    python benchmarks/live.py [--part planted|healthy|simulated|cost|trainers] [--runs 50] [--journal FILE] [--quick]

Runs are those of a small loop over an adapter's own functions: sample, make a batch, score, advantages, loss, step, sync.
planted: every bug of the museum that such a run reaches is planted in it; a finding of the audit alone counts.
healthy: runs of four kinds: rows one version old, low-rank adapters, an engine in bfloat16, and four micro-batches.
simulated: runs of 5,000 audited updates, from what an engine in bfloat16 made of one real run.
cost: CPU time of the process, with the audit against without, in alternating runs, and the memory of tensors.
trainers: the same CPU time inside TRL's trainer and the bundled one, and that of a second run without the audit: chance.

With a journal an interrupted benchmark goes on where it stopped: a nightly adds runs to those of the nights before.
"""

import argparse
import json
import logging
import statistics
from pathlib import Path
from typing import Any

import torch
from audited_runs import cost, healthy, planted, simulated
from audited_runs.journal import Journal
from rich.console import Console
from rich.progress import track
from rich.table import Table

from rlcanary.bugs import all_bugs

PARTS = ("planted", "healthy", "simulated", "cost", "trainers")
console, quiet = Console(width=120, highlight=False), Console(stderr=True)


def of_bugs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plant bugs, and print which are found."""
    bugs = [bug for bug in all_bugs() if planted.reached(bug) and arguments.only in bug.id]
    if arguments.quick:
        bugs = bugs[::7][:10]
    journal = Journal(arguments.journal)
    all_of_them: dict[str, Any] = {}
    for bug in track(bugs, "planting bugs", console=quiet, transient=True):
        run = ["planted", bug.id, arguments.updates]
        all_of_them[bug.id] = journal.result(run, lambda bug=bug: planted.planted(bug, arguments.updates))  # type: ignore[misc]
    idle = sorted(name for name, each in all_of_them.items() if each == planted.IDLE)
    found = {name: each for name, each in all_of_them.items() if name not in idle}
    caught = {name: each for name, each in found.items() if each is not None}
    console.print(f"{len(caught)} of {len(found)} bugs that a run reaches are found")
    if caught:
        console.print(f"median {statistics.median(after for _, after in caught.values()):g} audited updates")
    table = Table("first finding", "bugs")
    for kind in sorted({kind for kind, _ in caught.values()}):
        table.add_row(kind, str(sum(each == kind for each, _ in caught.values())))
    console.print(table)
    for name in sorted(set(found) - set(caught)):
        console.print(f"  not found: {name}")
    console.print(f"  {len(idle)} others end these runs, or take their weights nowhere else: {', '.join(idle)}")
    return {"found": found}


def of_healthy_runs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train without a mistake, and print how many runs have a finding."""
    count, length = (1, 20) if arguments.quick else (arguments.runs, arguments.length)
    journal = Journal(arguments.journal)
    runs = [(kind, seed) for seed in range(arguments.seed, arguments.seed + count) for kind in healthy.KINDS]
    found = {}
    for kind, seed in track(runs, "healthy runs", console=quiet, transient=True):
        run = ["healthy", kind, seed, length]
        found[kind, seed] = journal.result(run, lambda kind=kind, seed=seed: healthy.healthy(kind, seed, length))  # type: ignore[misc]
    alarms = {kind: [seed for each, seed in runs if each == kind and found[kind, seed]] for kind in healthy.KINDS}
    for kind, seeds in alarms.items():
        console.print(f"{kind}: {len(seeds)} of {count} healthy runs of {length} updates have a finding {seeds or ''}")
    return {"alarms": alarms}


def of_simulated_runs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Simulate long runs, and print how many have a finding."""
    source = torch.Generator().manual_seed(arguments.seed)
    runs, updates, length = (20, 200, 20) if arguments.quick else (5000, 5000, 300)
    rollouts = simulated.record(arguments.seed, length)
    alarms = {}
    for name, start in (("engine in bfloat16", None), ("engine in bfloat16 that was exact at the start", 0.0)):
        pools = simulated.pool(rollouts, 20, start, source)
        alarms[name] = simulated.alarms(pools, runs, updates, source)
        console.print(
            f"{name}: {alarms[name]['any']} of {runs} simulated runs of {updates} audited updates have a finding"
        )
    return {"simulated": alarms}


def of_costs(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time steps with the audit and without it, and print the ratio."""
    size = (64, 2, 16) if arguments.quick else (256, 4, 48)
    ratios = {every: cost.cost(every, steps, size) for every, steps in ((1, 10), (20, 40))}
    for every, ratio in ratios.items():
        console.print(f"every={every}: {ratio:.3f} times the CPU time of a step without the audit")
    peak, held = cost.memory(size)
    console.print(
        f"every=1: {peak:.4f} times the peak memory of a step without the audit, and {held} bytes more between steps"
    )
    return {"cost": ratios, "memory": {"peak": peak, "held": held}}


def of_trainers(arguments: argparse.Namespace) -> dict[str, Any]:
    """Time whole trainers with the audit and without it, and print the ratios."""
    from audited_runs import trainers  # TRL takes seconds to import

    steps, features, tokens = (3, 64, 16) if arguments.quick else (101, 512, 128)
    figures = {}
    for name in trainers.TRAINERS:
        steps_of_one = trainers.costs(name, steps, features, tokens)
        for ratios in track(steps_of_one, f"steps in {name}", steps - 1, console=quiet, transient=True):
            figures[name] = ratios
        for run, ratio in figures[name].items():
            console.print(f"{name}, {run}: {ratio:.3f} times the CPU time of a step without the audit")
    return {"trainers": figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, action="append", help="only this part; may be given several times")
    parser.add_argument("--updates", type=int, default=20, help="updates of a run with a bug (default: 20)")
    parser.add_argument("--only", metavar="TEXT", default="", help="only bugs whose id has this text")
    parser.add_argument("--runs", type=int, default=50, help="healthy runs of each kind (default: 50)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed of healthy and simulated runs (default: 0)")
    parser.add_argument("--length", type=int, default=300, help="updates of a healthy run (default: 300)")
    parser.add_argument("--journal", type=Path, help="keep runs here, and do not repeat those that it has")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="ten bugs, one short healthy run of each kind")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("rlcanary.live").setLevel(logging.ERROR)
    parts = {
        "planted": of_bugs,
        "healthy": of_healthy_runs,
        "simulated": of_simulated_runs,
        "cost": of_costs,
        "trainers": of_trainers,
    }
    figures: dict[str, Any] = {}
    for name in arguments.part or PARTS:
        figures |= parts[name](arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
