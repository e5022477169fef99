"""Write docs/algorithms.md: which algorithms can be declared, and what the checks say of implementations of them.

Runs the checks of losses, advantages and credit on each, which takes some twenty minutes on one core. Which implementation
has an algorithm, `rlcanary.adapters.algorithms.under` says.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

from rlcanary.adapters import load_adapter
from rlcanary.adapters.algorithms import ALGORITHMS, under
from rlcanary.adapters.grpo import GrpoAdapter
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.adapter import Adapter, NotProvided

ROOT = Path(__file__).parents[1]
AREAS = ("advantage", "credit", "loss", "value", "kl", "importance", "gradient", "split")
CHECKS = [check for check in all_checks() if check.area in AREAS]
BY_HAND = {
    "dr-grpo": "dr_grpo:DrGrpo",
    "dapo": "dapo_packed:DapoPacked",
    "rloo": "rloo:Rloo",
    "gspo": "gspo:Gspo",
    "cispo": "cispo:Cispo",
    "ppo": "ppo:Ppo",
    "reinforce++": "ppo:ReinforcePlusPlus",
}

PAGE = """# Algorithms

The algorithms that conventions can declare, and how many checks of advantages, credit, losses, KL and splits pass on
implementations of them, of those that apply. Written by `.venv/bin/python tools/write_algorithms.py`, which runs the code of
each. "By hand" are those in `tests/support/styles`, written without the reference; the bundled trainer is `rlcanary train`,
whose losses are the reference's; TRL, verl and torchrl run their own functions. A dash: there is no such implementation, or
it has no setting for the algorithm.

| algorithm | declare | {columns} |
|---|---|{lines}|
{rows}
## What fails

[A check failed](a-check-failed.md#what-the-checks-find-in-released-frameworks) says what happens, and where.

| implementation | check | under |
|---|---|---|
{failures}"""


def by_hand(name: str) -> Adapter | None:
    if name not in BY_HAND:
        return None
    module, _, style = BY_HAND[name].partition(":")
    return load_adapter(f"styles.{module}:{style}")


def bundled(name: str) -> Adapter:
    return GrpoAdapter(ALGORITHMS[name])


def framework(installed: str) -> Callable[[str], Adapter | None]:
    """Return a function from an algorithm's name to the framework's adapter under it, None where it has no such setting."""

    def installed_under(name: str) -> Adapter | None:
        try:
            return under(load_adapter(installed), ALGORITHMS[name])
        except NotProvided:
            return None

    return installed_under


IMPLEMENTATIONS: dict[str, Callable[[str], Adapter | None]] = {
    "by hand": by_hand,
    "bundled trainer": bundled,
    "TRL": framework("trl"),
    "verl": framework("verl"),
    "torchrl": framework("torchrl"),
}


def judged(adapter: Adapter) -> tuple[int, list[str]]:
    """Run the checks -> the number of those that apply, and the names of those that fail."""
    statuses = {check.id: run_check(check, adapter, "unused").status for check in CHECKS}
    failed = [name for name, status in statuses.items() if status in ("fail", "error")]
    return len(failed) + sum(status == "pass" for status in statuses.values()), failed


def main() -> None:
    rows, failures = "", defaultdict[tuple[str, str], list[str]](list)
    for name in ALGORITHMS:
        cells = []
        for told, make in IMPLEMENTATIONS.items():
            print(f"{name}: {told}", file=sys.stderr, flush=True)
            adapter = make(name)
            if adapter is None:
                cells.append("-")
                continue
            count, failed = judged(adapter)
            cells.append(f"{count - len(failed)} of {count}" if failed else f"all {count}")
            for check in failed:
                failures[told, check].append(name)
        rows += f'| {name} | `PRESETS["{name}"]` | {" | ".join(cells)} |\n'
    told_failures = "".join(
        f"| {told} | `{check}` | {', '.join(names)} |\n"
        for (told, check), names in sorted(failures.items(), key=lambda each: list(IMPLEMENTATIONS).index(each[0][0]))
    )
    page = PAGE.format(
        columns=" | ".join(IMPLEMENTATIONS),
        lines="|".join("---" for _ in IMPLEMENTATIONS),
        rows=rows,
        failures=told_failures,
    )
    (ROOT / "docs/algorithms.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests/support"))
    main()
