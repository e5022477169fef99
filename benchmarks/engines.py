"""Train one plan on transformers, vLLM and Ray, and compare their curves of the reward.

The promise: the curves differ no more than those of other seeds do. A curve's number is its mean reward over the steps. For
each engine an exact permutation test asks how often a difference from transformers as large as this one comes from dealing
the same runs out at random. Less often than one time in a hundred breaks the promise.

A run that has ended is not trained again, so that more `--seeds` add to what is in the folder.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).parents[1]
RAREST = 0.01
ENGINES = {
    "transformers": ("runtime.kind=local", "roles.sampler.engine=transformers"),
    "vllm": ("runtime.kind=local", "roles.sampler.engine=vllm"),
    "ray": ("runtime.kind=ray", "roles.sampler.engine=transformers"),
}


def rewards(plan: Path, engine: str, seed: int, steps: int, folder: Path) -> list[float]:
    """Train a plan in a folder, unless that is done, and return the reward of each step.

    Raises:
        SystemExit: the training failed; its output stands in the message.
    """
    records = folder / "metrics.jsonl"
    if not records.is_file() or len(records.read_text().splitlines()) < steps:
        settings = [*ENGINES[engine], f"run.folder={folder}", f"run.seed={seed}", f"run.steps={steps}"]
        command = ["-m", "rlcanary", "train", str(plan), *(f"--set={each}" for each in settings)]
        done = subprocess.run([sys.executable, *command], capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{command} exits with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line)["reward"] for line in records.read_text().splitlines()]


def chance(first: Sequence[float], second: Sequence[float]) -> float:
    """Compute how often runs dealt out at random differ in their mean at least as much as two groups of runs do."""
    runs = [*first, *second]

    def difference(chosen: Sequence[int]) -> float:
        rest = [value for index, value in enumerate(runs) if index not in chosen]
        return abs(statistics.mean(runs[index] for index in chosen) - statistics.mean(rest))

    found = difference(range(len(first)))
    dealt = [difference(chosen) for chosen in combinations(range(len(runs)), len(first))]
    return statistics.mean(each >= found - 1e-12 for each in dealt)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plan", type=Path, default=ROOT / "examples/arithmetic.yaml")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/engines")
    parser.add_argument("--steps", type=int, default=110)
    parser.add_argument("--seeds", type=int, nargs="+", default=range(500, 505))
    args = parser.parse_args()
    console = Console()
    cells = [(seed, engine) for seed in args.seeds for engine in ENGINES]
    means: dict[str, list[float]] = {engine: [] for engine in ENGINES}
    for seed, engine in track(cells, "training", console=console, disable=not console.is_terminal):
        curve = rewards(args.plan, engine, seed, args.steps, args.folder / f"{engine}-{seed}")
        means[engine].append(statistics.mean(curve))
    table = Table("engine", "runs", "mean reward", "over the seeds", "a difference this large by chance")
    chances = {name: chance(means["transformers"], found) for name, found in means.items() if name != "transformers"}
    for name, found in means.items():
        span = f"{min(found):.3f} to {max(found):.3f}"
        by_chance = f"{chances[name]:.2f}" if name in chances else ""
        table.add_row(name, str(len(found)), f"{statistics.mean(found):.3f}", span, by_chance)
    console.print(table)
    return int(min(chances.values()) < RAREST)


if __name__ == "__main__":
    sys.exit(main())
