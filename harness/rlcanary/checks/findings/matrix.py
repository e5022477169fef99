"""The results of one codebase in several configurations, side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlcanary.checks.check import Result, Status
from rlcanary.checks.findings.report import LABELS
from rlcanary.checks.severity import EFFECTS

WORDS: dict[Status, Text] = {
    "pass": Text("pass", "green"),
    "fail": Text("FAIL", "bold red"),
    "error": Text("ERROR", "bold magenta"),
    "adapter-error": Text("ADAPT", "magenta"),
    "not-compared": Text("-", "dim"),
    "not-provided": Text("-", "dim"),
}
RED: Collection[Status] = ("fail", "error")
SHOWN: Collection[Status] = (*RED, "adapter-error")
NAMES = 34
"""Columns that the ids of checks take, about."""


def show_matrix(console: Console, adapter: str, spec: str, results: Mapping[str, Sequence[Result]]) -> None:
    """Print a table of the checks that fail or differ between configurations, and each failure once.

    Args:
        console: the console.
        adapter: the adapter's name.
        spec: the adapter's name on the command line.
        results: the results of each configuration, of the same checks in the same order.
    """
    rows = list(zip(*results.values(), strict=True))
    is_wide = console.width >= NAMES + sum(max(len(name), 5) + 3 for name in results)
    table = Table(title=Text(f"Conformance of {adapter} in {len(results)} configurations"), title_justify="left")
    table.add_column("Check", overflow="fold")
    for number, name in enumerate(results, start=1):
        table.add_column(name if is_wide else str(number), no_wrap=True)
    for label, statuses in _rows(rows):
        table.add_row(label, *(WORDS[status] for status in statuses))
    table.add_section()
    for label, counted in (("ran", ("pass", *RED)), ("failed", RED)):
        counts = (sum(each.status in counted for each in column) for column in results.values())
        table.add_row(Text(f"checks that {label}", "dim"), *map(str, counts))
    console.print(table)
    if not is_wide:
        console.print(Text(", ".join(f"{number} {name}" for number, name in enumerate(results, start=1))))
    same = Counter(row[0].status for row in rows if len({each.status for each in row}) == 1)
    told = f"passed in every configuration: {same['pass']}, run in none: {same['not-provided']}"
    console.print(
        Text(
            f"Checks that are not shown, {told}. A dash: not provided, or nothing compared; ADAPT: an adapter error.\n"
        )
    )
    for row in rows:
        _show_failure(
            console, spec, {name: each for name, each in zip(results, row, strict=True) if each.status in SHOWN}
        )


def _rows(rows: Sequence[tuple[Result, ...]]) -> Iterator[tuple[str, tuple[Status, ...]]]:
    """Yield a row per check that fails or errs somewhere, and one for all checks of an area that differ in the same way."""
    alike: Counter[tuple[str, tuple[Status, ...]]] = Counter()
    for row in rows:
        statuses = tuple(each.status for each in row)
        if set(statuses) & set(SHOWN):
            yield row[0].id, statuses
        elif len({WORDS[status].plain for status in statuses}) > 1:
            alike[row[0].area, statuses] += 1
    for (area, statuses), count in alike.items():
        yield f"{area}: {count} check{'' if count == 1 else 's'}", statuses


def _show_failure(console: Console, spec: str, failed: Mapping[str, Result]) -> None:
    """Print the first configuration's finding, the other configurations, and the command that shows all of it."""
    if not failed:
        return
    name, result = next(iter(failed.items()))
    effect = f" ({EFFECTS[result.severity]})" if result.severity else ""
    console.print(Text(f"{LABELS[result.status]} {result.id}{effect} in {', '.join(failed)}", "bold"))
    console.print(Text(result.message))
    console.print(Text(f"rlcanary check '{spec}[{name}]' --only {result.id}\n", "dim"), soft_wrap=True)
