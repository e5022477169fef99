"""The matrix of bugs and frameworks that `rlcanary bugs --adapter` shows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from rlcanary.console import progress_bar, report_console
from rlcanary.errors import UserError
from rlcanary.system.files import write_whole

if TYPE_CHECKING:
    from rich.console import Console

    from rlcanary.bugs.planted.detecting import Sighting


def show_planted(adapters: Sequence[str], only: Sequence[str], json_path: Path | None) -> int:
    """Plant the bugs in the frameworks behind these adapters, show what catches them, and return the exit code.

    It is 1 if a bug is missed without a reviewed reason, or caught in spite of one.

    Raises:
        UserError: no bug of this id is planted in any of them, or a framework lacks the code that a bug changes.
    """
    from rlcanary.bugs.planted import framework_of
    from rlcanary.bugs.planted.detecting import sightings

    frameworks = [framework_of(name) for name in dict.fromkeys(adapters)]
    known = {bug for each in frameworks for bug in (*each.elsewhere, *(plant.bug for plant in each.plants))}
    if unknown := sorted(set(only) - known):
        raise UserError(f"no bug {', '.join(unknown)} is planted in {', '.join(adapters)}")
    found = []
    with progress_bar() as progress:
        for framework in frameworks:
            task = progress.add_task(f"checking {framework.adapter}", total=None)

            def tell(check: str, done: int, total: int, task=task, name=framework.adapter) -> None:  # type: ignore[no-untyped-def]
                progress.update(task, description=f"{name}: {check}", completed=done, total=total)

            for sighting in sightings(framework, only, tell=tell):
                progress.update(task, description=f"{framework.adapter}: {sighting.bug}")
                found.append(sighting)
            progress.remove_task(task)
    if json_path is not None:
        write_whole(json_path, json.dumps({"sightings": [asdict(each) for each in found]}, indent=2) + "\n")
    _show(report_console(), [framework.adapter for framework in frameworks], found)
    return int(any(each.is_surprise for each in found))


def _show(console: Console, adapters: Sequence[str], found: Sequence[Sighting]) -> None:
    by_bug: dict[str, dict[str, Sighting]] = {}
    for each in sorted(found, key=lambda each: (each.outcome == "elsewhere", each.bug)):
        by_bug.setdefault(each.bug, {})[each.adapter] = each
    table = Table(title="The museum in the frameworks", title_justify="left")
    table.add_column("Bug", no_wrap=True)
    for adapter in adapters:
        table.add_column(f"Caught in {adapter} by")
    for bug, of_bug in by_bug.items():
        table.add_row(bug, *(_told(of_bug.get(adapter)) for adapter in adapters))
    console.print(table)
    for each in found:
        if each.reason:
            console.print(Text.assemble((each.outcome, "dim"), f" {each.bug} in {each.adapter}: {each.reason}"))
    for adapter in adapters:
        planted = [each for each in found if each.adapter == adapter and each.outcome != "elsewhere"]
        caught = sum(each.outcome == "caught" for each in planted)
        share = f" ({100 * caught / len(planted):.0f} %)" if planted else ""
        console.print(f"{adapter}: {caught} of {len(planted)} planted bugs caught{share}")


def _told(sighting: Sighting | None) -> Text:
    if sighting is None:
        return Text()
    if sighting.outcome == "caught":
        return Text(sighting.check)
    if sighting.outcome == "elsewhere":
        return Text("elsewhere", "dim")
    return Text.assemble((sighting.outcome, "bold red"), f" ({sighting.checks} checks ran)")
