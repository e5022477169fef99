"""Show which checks catch which shipped bug."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlcanary.bugs.detection import Detection, detect, false_alarms
from rlcanary.console import progress_bar, report_console
from rlcanary.errors import UserError
from rlcanary.system.files import make_folder, require_writable, write_whole

if TYPE_CHECKING:
    from rlcanary.checks import Result


@click.command(
    epilog="Exit codes: 0 every bug caught and no correct code accused, 1 otherwise, 2 usage error, 3 internal error."
)
@click.option(
    "--adapter",
    "adapters",
    multiple=True,
    metavar="NAME",
    help="Plant the bugs in the installed code of this framework instead (trl, verl, torchrl), and check it; repeatable.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the matrix here, as JSON.")
@click.option(
    "--html",
    type=click.Path(path_type=Path, file_okay=False),
    metavar="DIR",
    help="Also write a page per bug here: what it does to a batch, and what catches it.",
)
@click.option(
    "--curves",
    is_flag=True,
    help="With --html, also train with and without each bug that a run reaches: some seconds each.",
)
@click.option("--only", multiple=True, metavar="ID", help="Plant only these bugs; repeatable.")
@click.option("--seed", default=0, show_default=True, help="Seed of the checks' random cases.")
@click.pass_context
def bugs(
    ctx: click.Context,
    adapters: tuple[str, ...],
    json_path: Path | None,
    html: Path | None,
    curves: bool,
    only: tuple[str, ...],
    seed: int,
) -> None:
    """Plant every bug of the museum in the reference and show which checks catch it."""
    from rlcanary.bugs import all_bugs
    from rlcanary.contract.presets import PRESETS

    if json_path is not None:
        require_writable(json_path)
    if curves and html is None:
        raise UserError("--curves draws on the pages of --html: give a folder for them")
    if adapters:
        if html is not None or seed:
            raise UserError("--html and --seed are for the bugs in the reference: leave out --adapter")
        from rlcanary.commands.parts.planted_bugs import show_planted

        ctx.exit(show_planted(adapters, only, json_path))
    if html is not None:
        make_folder(html)
    planted = [bug for bug in all_bugs() if not only or bug.id in only]
    unknown = set(only) - {bug.id for bug in planted}
    if unknown:
        raise UserError(f"no bug {', '.join(sorted(unknown))} in the museum; `rlcanary bugs` lists them all")
    presets = {} if only else PRESETS

    with progress_bar() as progress:
        task = progress.add_task("planting", total=len(planted) + len(presets))
        detections = []
        for bug in planted:
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
    if html is not None:
        _write_pages(html, detections, curves)
    _show(report_console(), detections, alarms)
    missed = [detection for detection in detections if not detection.caught_by]
    ctx.exit(1 if missed or any(alarms.values()) else 0)


def _write_pages(folder: Path, detections: list[Detection], with_runs: bool) -> None:
    from rlcanary.bugs.exhibits import exhibits
    from rlcanary.html.museum_page import museum_pages

    found = []
    with progress_bar() as progress:
        task = progress.add_task("drawing", total=len(detections))
        for exhibit in exhibits(detections, with_runs):
            progress.update(task, description=f"drawing {exhibit.id}")
            found.append(exhibit)
            progress.advance(task)
    for name, text in museum_pages(found).items():
        write_whole(folder / name, text)
    click.echo(f"rlcanary: pages written to {folder / 'index.html'}", err=True)


def to_json(detections: list[Detection], alarms: dict[str, list[Result]]) -> str:
    """Return the results as JSON.

    The keys are `bugs` (with `id`, `source`, `area`, `effect`, `caught_by`), `false_alarms` (with `preset`, `check`,
    `message`) and `out_of_reach` (with `id`, `source`, `reason`).
    """
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
        told = Text.assemble(("missed", "bold red"), f" ({len(detection.results)} checks ran)")
        if caught:
            told = Text.assemble(caught[0], (f" and {len(caught) - 1} more" if len(caught) > 1 else "", "dim"))
        table.add_row(detection.bug.id, detection.bug.source, detection.bug.effect, told)
    console.print(table)
    for preset, results in alarms.items():
        for result in results:
            words = f" on the reference as {preset}: {result.id}: {result.message}"
            console.print(Text.assemble(("false alarm", "bold red"), words))
    if alarms:
        for bug, (source, reason) in OUT_OF_REACH.items():
            console.print(Text.assemble(("out of reach", "dim"), f" {bug} ({source}): {reason}"))
    caught_count = sum(bool(detection.caught_by) for detection in detections)
    accused = sum(bool(results) for results in alarms.values())
    accusations = (
        f"{accused} of {len(alarms)} correct implementations accused" if alarms else "no correct implementation tried"
    )
    console.print(f"{caught_count} of {len(detections)} bugs caught, {accusations}")
