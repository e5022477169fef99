"""`rlcanary bugs`: which checks catch which shipped bug, and whether a correct implementation is accused."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table

from rlcanary.console import progress_bar, report_console
from rlcanary.errors import UserError
from rlcanary.files import require_writable, write_whole

if TYPE_CHECKING:
    from rlcanary.adapters.reference import ReferenceAdapter
    from rlcanary.bugs import Bug
    from rlcanary.checks import Check, Result
    from rlcanary.conventions import Conventions


@dataclass(frozen=True)
class Detection:
    """A bug and the checks that fail on it."""

    bug: type[Bug]
    results: list[Result]

    @property
    def caught_by(self) -> list[str]:
        return [result.id for result in self.results if result.status == "fail"]


def relevant_checks(mutated: type[ReferenceAdapter]) -> list[Check]:
    """The checks that call something which the mutation changes; on all others it is the reference itself."""
    from rlcanary.adapters.reference import ReferenceAdapter
    from rlcanary.checks import all_checks
    from rlcanary.contract import CAPABILITIES

    # What the checks work on where they call these capabilities.
    settings = {
        "new_state": ("train_step", "evaluate", "sync_weights"),
        "new_engine": ("generate", "sync_weights", "evaluate"),
    }
    differing = [
        name for name in (*CAPABILITIES, *settings) if getattr(mutated, name) is not getattr(ReferenceAdapter, name)
    ]
    changed = {capability for name in differing for capability in settings.get(name, (name,))}
    return [check for check in all_checks() if not changed or changed & set(check.needs)]


def detect(bug: type[Bug], seed: int = 0) -> Detection:
    """Run the checks that matter on one bug."""
    from rlcanary.checks import run_check

    return Detection(bug, [run_check(check, bug(), bug.spec(), seed) for check in relevant_checks(bug)])


def false_alarms(conventions: Conventions, seed: int = 0) -> list[Result]:
    """The checks that fail, or raise, on the reference under some conventions. There must be none."""
    from rlcanary.adapters.reference import ReferenceAdapter
    from rlcanary.checks import all_checks, run_check

    adapter = ReferenceAdapter(conventions)
    results = [run_check(check, adapter, "reference", seed) for check in all_checks()]
    return [result for result in results if result.status in ("fail", "error")]


@click.command(
    epilog="Exit codes: 0 every bug is caught and nobody accused, 1 otherwise, 2 the command was not understood."
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the matrix here, as JSON.")
@click.option("--only", multiple=True, metavar="ID", help="Only these bugs.")
@click.option("--seed", default=0, show_default=True, help="Seed of the checks' random cases.")
@click.pass_context
def bugs(ctx: click.Context, json_path: Path | None, only: tuple[str, ...], seed: int) -> None:
    """Plant every bug of the museum in the reference and show which checks catch it."""
    from rlcanary.bugs import all_bugs
    from rlcanary.conventions import PRESETS

    if json_path is not None:
        require_writable(json_path)
    exhibits = [bug for bug in all_bugs() if not only or bug.id in only]
    unknown = set(only) - {bug.id for bug in exhibits}
    if unknown:
        raise UserError(f"no bug {', '.join(sorted(unknown))} in the museum; `rlcanary bugs` lists them all")
    presets = {} if only else PRESETS

    with progress_bar() as progress:
        task = progress.add_task("planting", total=len(exhibits) + len(presets))
        detections = []
        for bug in exhibits:
            progress.update(task, description=f"planting {bug.id}")
            detections.append(detect(bug, seed))
            progress.advance(task)
        alarms = {}
        for name, conventions in presets.items():
            progress.update(task, description=f"the reference as {name}")
            alarms[name] = false_alarms(conventions, seed)
            progress.advance(task)

    if json_path is not None:
        write_whole(json_path, to_json(detections, alarms))
    _show(report_console(), detections, alarms)
    missed = [detection for detection in detections if not detection.caught_by]
    ctx.exit(1 if missed or any(alarms.values()) else 0)


def to_json(detections: list[Detection], alarms: dict[str, list[Result]]) -> str:
    """`{"bugs": [{"id", "source", "area", "effect", "caught_by"}], "false_alarms": [{"preset", "check", "message"}],
    "out_of_reach": [{"id", "source", "reason"}]}`."""
    from rlcanary.bugs import OUT_OF_REACH

    document = {
        "bugs": [
            {
                "id": detection.bug.id,
                "source": detection.bug.source,
                "area": detection.bug.area(),
                "effect": detection.bug.effect,
                "caught_by": detection.caught_by,
            }
            for detection in detections
        ],
        "false_alarms": [
            {"preset": preset, "check": result.id, "message": result.message}
            for preset, results in alarms.items()
            for result in results
        ],
        "out_of_reach": [
            {"id": bug, "source": source, "reason": reason} for bug, (source, reason) in OUT_OF_REACH.items()
        ],
    }
    return json.dumps(document, indent=2) + "\n"


def _show(console: Console, detections: list[Detection], alarms: dict[str, list[Result]]) -> None:
    from rlcanary.bugs import OUT_OF_REACH

    table = Table(title="The museum", title_justify="left")
    table.add_column("Bug", no_wrap=True)
    table.add_column("Shipped in")
    table.add_column("Effect")
    table.add_column("Caught by")
    for detection in detections:
        caught = detection.caught_by
        told = f"[bold red]missed[/] ({len(detection.results)} checks ran)"
        if caught:
            told = caught[0] if len(caught) == 1 else f"{caught[0]} [dim]and {len(caught) - 1} more[/]"
        table.add_row(detection.bug.id, detection.bug.source, detection.bug.effect, told)
    console.print(table)
    for preset, results in alarms.items():
        for result in results:
            console.print(f"[bold red]false alarm[/] on the reference as {preset}: {result.id}: {result.message}")
    if alarms:
        for bug, (source, reason) in OUT_OF_REACH.items():
            console.print(f"[dim]out of reach[/] {bug} ({source}): {reason}")
    caught_count = sum(bool(detection.caught_by) for detection in detections)
    accused = sum(bool(results) for results in alarms.values())
    told = (
        f"{accused} of {len(alarms)} correct implementations accused" if alarms else "no correct implementation tried"
    )
    console.print(f"{caught_count} of {len(detections)} bugs caught, {told}")
