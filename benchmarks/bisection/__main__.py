"""How many runs a search takes, and how often it is right: python benchmarks/bisect.py [--trials 500] [--json FILE]

N commits, the culprit anywhere, runs that fail by chance on good commits and pass by chance on bad ones. No search is told
the rates. `runs` are those between GOOD and BAD, `ends` those of GOOD and BAD themselves: git and git-bayesect take the ends
on trust and run neither. "With history" is the same search that knows 20 past results of good commits and 5 of bad ones, as
a tracker of nightly runs does. Several runs at a time are played twice: in rounds, where they start and end together and the
ends are taken on trust, and as they are used, where a run takes 0.8 to 1.2, the ends are run, and `time` counts. A search is
not right either where it refuses to start. git-bayesect's library takes part where it is installed
(`pip install git_bayesect`), with its own priors and its own confidence of 0.95.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import searches
from rich.console import Console
from rich.progress import track
from rich.table import Table
from searches import COMMITS, DEPENDENCIES, METRIC_COMMITS, Trial

RATES = [(0.0, 0.0), (0.05, 0.05), (0.1, 0.1), (0.3, 0.0), (0.0, 0.3), (0.3, 0.3)]
MOST_RUNS = {(0.0, 0.0): 12, (0.05, 0.05): 18, (0.1, 0.1): 25, (0.3, 0.0): 28, (0.3, 0.3): 120}
MOST_ROUNDS = {4: 9, 8: 6}
MOST_METRIC_RUNS = 20
MOST_BUILDS = 8
MOST_MILLISECONDS = 50
ACCURACY = 0.95
Figures = dict[str, float]


def figures(title: str, play: Callable[..., Trial], *arguments: float, trials: int) -> Figures:
    console = Console(stderr=True)
    seeds = track(range(trials), title, console=console, transient=True)
    played = [asdict(play(seed, *arguments)) for seed in seeds]
    means = {name: float(np.mean([trial[name] for trial in played])) for name in played[0]}
    return means | {"p95_runs": float(np.percentile([trial["runs"] for trial in played], 95))}


def promise(text: str, value: float, bound: float, accuracy: float | None = None) -> dict[str, Any]:
    kept = value <= bound and (accuracy is None or accuracy >= ACCURACY)
    return {"promise": text, "value": value, "bound": bound, "accuracy": accuracy, "kept": kept}


def noise(trials: int) -> tuple[dict[str, Any], list[dict[str, Any]], Table]:
    """The searches of one run at a time."""
    results: dict[str, Any] = {}
    promises = []
    title = f"N = {COMMITS}, rates not told, {trials} searches a cell: runs, + runs of the ends, share that is right"
    table = Table(title=title, title_justify="left")
    for column in ("false fail/pass", "rlcanary", "with history", "git-bayesect", "git bisect", "promised"):
        table.add_column(column, justify="left" if column == "false fail/pass" else "right")
    for rates in RATES:
        name = f"{rates[0]:g}/{rates[1]:g}"
        row = {
            "rlcanary": figures(f"rlcanary {name}", searches.flaky, *rates, False, trials=trials),
            "with history": figures(f"rlcanary {name} with history", searches.flaky, *rates, True, trials=trials),
            "git bisect": figures(f"git bisect {name}", searches.git_bisect, *rates, trials=trials),
            "git-bayesect": None,
        }
        if searches.Bisector is not None:
            row["git-bayesect"] = figures(f"git-bayesect {name}", searches.git_bayesect, *rates, trials=trials)
        results[name] = row
        most = MOST_RUNS.get(rates)
        if most is not None:
            for who in ("rlcanary", "with history"):
                label = "no history" if who == "rlcanary" else who
                promises.append(promise(f"runs at {name}, {label}", row[who]["runs"], most, row[who]["right"]))
        table.add_row(
            name,
            *(cell(row[who]) for who in ("rlcanary", "with history", "git-bayesect", "git bisect")),
            "" if most is None else f"{most}",
        )
    return results, promises, table


def cell(found: Figures | None) -> str:
    if found is None:
        return ""
    ends = f" + {found['ends']:.1f}" if found["ends"] else ""
    return f"{found['runs']:.1f}{ends}, {found['right']:.1%}"


def more(trials: int) -> tuple[dict[str, Any], list[dict[str, Any]], Table]:
    """Several runs at a time, metrics and environments."""
    results: dict[str, Any] = {}
    promises = []
    table = Table(title="Several runs at a time, metrics, environments", title_justify="left")
    for column in ("search", "history", "rounds", "time", "runs", "ends", "builds", "right"):
        table.add_column(column, justify="left" if column == "search" else "right")

    def add(name: str, found: Figures, history: bool) -> None:
        results[f"{name}, {'with' if history else 'no'} history"] = found
        numbers = [
            f"{found[key]:.1f}" if found.get(key) else "" for key in ("rounds", "time", "runs", "ends", "builds")
        ]
        table.add_row(name, "yes" if history else "no", *numbers, f"{found['right']:.1%}")

    for jobs, most in MOST_ROUNDS.items():
        for history in (False, True):
            name = f"{jobs} jobs at 0.1/0.1"
            in_step = figures(name, searches.flaky, 0.1, 0.1, history, jobs, True, trials=trials)
            found = figures(name, searches.flaky, 0.1, 0.1, history, jobs, trials=trials)
            add(name, found | {"rounds": in_step["time"], "right in rounds": in_step["right"]}, history)
            label = f"rounds of {name}, {'with' if history else 'no'} history"
            promises.append(promise(label, in_step["time"], most, in_step["right"]))
    for step in (1.0, 2.0, 3.0):
        name = f"metric lower by {step:g} noises, N = {METRIC_COMMITS}"
        found = figures(name, searches.metric, step, trials=trials if step > 1 else trials // 4 + 1)
        add(name, found, False)
        if step == 2.0:
            promises.append(promise(f"runs of the {name}", found["runs"], MOST_METRIC_RUNS, found["right"]))
    for rates in ((0.0, 0.0), (0.1, 0.1)):
        name = f"{len(DEPENDENCIES)} states of the dependencies at {rates[0]:g}/{rates[1]:g}"
        found = figures(name, searches.environments, *rates, trials=trials)
        add(name, found, False)
        if rates == (0.1, 0.1):
            promises.append(promise(f"builds with {name}", found["builds"], MOST_BUILDS, found["right"]))
    return results, promises, table


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=500, help="searches per cell (default: 500)")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--quick", action="store_true", help="five searches per cell: shows that it runs, no more")
    arguments = parser.parse_args()
    trials = 5 if arguments.quick else arguments.trials
    console = Console(width=125)
    of_noise, promises, table = noise(trials)
    console.print(table)
    if searches.Bisector is None:
        console.print("git-bayesect is not installed: its column is empty (pip install git_bayesect)")
    of_more, more_promises, table = more(trials)
    console.print(table)
    milliseconds = searches.decision_ms(4096)
    promises += [*more_promises, promise("ms of a decision at N = 4096", milliseconds, MOST_MILLISECONDS)]
    for line in promises:
        word = "[green]kept  [/]" if line["kept"] else "[red]missed[/]"
        right = "" if line["accuracy"] is None else f", {line['accuracy']:.1%} right, at least {ACCURACY:.0%}"
        console.print(f"{word} {line['promise']}: {line['value']:.1f}, at most {line['bound']:g}{right}")
    if arguments.json is not None:
        document = {"trials": trials, "noise": of_noise, "more": of_more, "promises": promises}
        arguments.json.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
