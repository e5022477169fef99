"""Turn TensorBoard files and JSON lines into one JSON file."""

import json
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from rlcanary.commands.parts.history_options import warn, with_progress
from rlcanary.console import report_console
from rlcanary.errors import UserError
from rlcanary.run_metrics.logs import MergedLogs, log_files, merge
from rlcanary.system.files import require_writable, write_whole
from rlcanary.system.printable import counted

SHOWN_CONFLICTS = 20


@click.command("dump-logs")
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("output", type=click.Path(path_type=Path))
@click.option(
    "--require-tag-prefix",
    "prefixes",
    multiple=True,
    metavar="PREFIX",
    help="Keep only tags that start with PREFIX; repeatable.",
)
@click.option("--error-on-conflicts", is_flag=True, help="Write nothing and exit 1 if two values are at one step.")
def dump_logs(folder: Path, output: Path, prefixes: tuple[str, ...], error_on_conflicts: bool) -> int:
    """Merge the TensorBoard event files and JSON lines under FOLDER into OUTPUT, `{"metric": {"step": value}}`.

    Where two files have different values of a metric at a step, the file changed last counts, and the conflict is shown.
    """
    require_writable(output)
    merged = MergedLogs()
    for source, path in with_progress(log_files(folder), "reading logs", many=2):
        merge(merged, source, path, prefixes)
    warn(merged.problems)
    if not merged.values:
        where = f" with a tag that begins with {' or '.join(prefixes)}" if prefixes else ""
        raise UserError(f"{len(merged.files)} log files under {folder} hold no scalar{where}")
    console = report_console(highlight=False)
    console.print(files_table(merged, folder))
    if merged.conflicts:
        console.print(conflicts_table(merged, folder))
    if merged.conflicts and error_on_conflicts:
        console.print(f"{counted(len(merged.conflicts), 'conflict')}; {output} is not written")
        return 1
    write_whole(output, json.dumps(merged.document(), indent=2, allow_nan=False) + "\n")
    console.print(f"{counted(len(merged.values), 'metric')} in {output}", soft_wrap=True)
    return 0


def files_table(merged: MergedLogs, folder: Path) -> Table:
    table = Table(title="Log files, oldest first")
    table.add_column("File", overflow="fold")
    table.add_column("Scalars", justify="right")
    for path, count in merged.files.items():
        table.add_row(Text(str(path.relative_to(folder))), str(count))
    return table


def conflicts_table(merged: MergedLogs, folder: Path) -> Table:
    shown = merged.conflicts[:SHOWN_CONFLICTS]
    more = "" if len(shown) == len(merged.conflicts) else f", the first {len(shown)} of {len(merged.conflicts)}"
    table = Table(title=f"Two values at one step{more}")
    for name in ("Metric", "Step", "Value", "File", "Kept", "File"):
        table.add_column(name, overflow="fold")
    for conflict in shown:
        table.add_row(
            Text(conflict.tag),
            str(conflict.step),
            f"{conflict.first:.6g}",
            Text(str(conflict.first_file.relative_to(folder))),
            f"{conflict.kept:.6g}",
            Text(str(conflict.kept_file.relative_to(folder))),
        )
    return table
