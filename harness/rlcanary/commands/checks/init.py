"""Set a repository up: an adapter, known failures, CI."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlcanary.adapters.load import load_adapter
from rlcanary.commands.parts.suite import run_suite
from rlcanary.console import report_console
from rlcanary.errors import UserError
from rlcanary.scaffold.functions import Function, functions_by_capability
from rlcanary.scaffold.plan import Plan, Planned, is_from_a_folder, own_requirement
from rlcanary.scaffold.survey import FRAMEWORKS, Survey, python_files, survey

EFFECT_OF_PLUGINS = {
    "ray": "pytest ends actors that a test leaves behind",
    "vllm": "pytest ends engines that a test leaves behind",
}
"""What the plugins do from the next run of pytest on, where the package is used."""

NOT_TRIAGED = "failed when rlcanary was added; not triaged yet"


@click.command(epilog="Exit codes: 0 set up, 2 usage error, or the checks could not be run.")
@click.option("--dry-run", is_flag=True, help="Print what would be written, run nothing and write nothing.")
@click.option(
    "--framework",
    type=click.Choice([*FRAMEWORKS, "none"]),
    help="Start from the adapter of this framework, or from none, instead of the one that the repository uses.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="PREFIX",
    help="Let CI run only the checks whose id starts with PREFIX; repeatable.",
)
def init(dry_run: bool, framework: str | None, only: tuple[str, ...]) -> None:
    """Set up rlcanary in the repository in the current folder.

    Looks at what the repository uses, and writes an adapter (tests/canary.py), the setting of pytest, a GitHub Actions
    workflow and a pre-commit hook. Then runs the checks and writes those that fail today to tests/canary_expected.txt,
    so that CI starts green. A file that is there already is left as it is.
    """
    root = Path.cwd()
    found = survey(root)
    console, own = report_console(highlight=False), functions_by_capability(root, python_files(root))
    chosen = _start(found, own) if framework is None else framework.replace("none", "") or None
    plan = Plan(found, chosen, only, {} if chosen else own)
    files = plan.files()
    _require_folders(root, [*files, Planned(plan.expected, "", "")])
    _show_survey(console, found, plan)
    if not dry_run:
        for file in files:
            file.write(root)
    expected, problem = None, ""
    if not (root / plan.expected).exists() and not dry_run:
        try:
            expected = _write_expected(plan)
        except UserError as error:
            problem = str(error)
    _show_files(console, plan, files, expected, dry_run=dry_run, has_problem=bool(problem))
    if problem:
        command = f"rlcanary check {plan.arguments} --update-expected {plan.expected}"
        raise UserError(f"{plan.expected} was not written: {problem}. When that is mended, run: {command}")


def _start(found: Survey, own: Mapping[str, Sequence[Function]]) -> str | None:
    """Choose the framework to start from: one that is named as a dependency, or imported where there is no own loss."""
    used = [name for name in found.frameworks if name in found.named or "policy_loss" not in own]
    return used[0] if used else None


def _write_expected(plan: Plan) -> str:
    """Run the checks, write those that fail to the file of known failures, and count them."""
    if find_spec("torch") is None:
        raise UserError("the checks need torch: pip install 'rlcanary[torch]'")
    sys.path.insert(0, str(Path.cwd()))
    adapter = load_adapter(plan.adapter)

    from rlcanary.checks import checks_of
    from rlcanary.checks.findings.expected import update_expected
    from rlcanary.checks.severity import EFFECTS

    results = run_suite(checks_of(plan.only), adapter, plan.adapter)
    counts = Counter(result.status for result in results)
    ran = counts["pass"] + counts["fail"] + counts["error"]
    if not ran:
        raise UserError(f"{plan.adapter} provides nothing that these checks need")
    failed = update_expected(Path(plan.expected), results, NOT_TRIAGED)
    severities = Counter(result.severity for result in results if result.id in failed)
    told = ", ".join(f"{severities[severity]} {effect}" for severity, effect in EFFECTS.items() if severities[severity])
    return f"{len(failed)} of {ran} checks that ran fail today{told and f': {told}'}"


def _require_folders(root: Path, files: list[Planned]) -> None:
    """Raise UserError before anything is written if a file of the plan cannot be."""
    for file in files:
        folder = next(each for each in (root / file.path).parents if each.exists())
        if file.text is not None and not (folder.is_dir() and os.access(folder, os.W_OK)):
            raise UserError(f"cannot write {file.path}: {folder} is not a folder that can be written to")


def _show_survey(console: Console, found: Survey, plan: Plan) -> None:
    console.print(Text(f"{found.name}: {found.root}", style="bold"))
    table = Table.grid(padding=(0, 2))
    for name, files in found.evidence.items():
        more = f" and {len(files) - 1} more" if len(files) > 1 else ""
        told = "its adapter is the start" if name == plan.framework else EFFECT_OF_PLUGINS.get(name, "")
        if name in found.frameworks and plan.framework is None:
            told = f"--framework {name} starts from its adapter"
        table.add_row("found", name, f"in {files[0]}{more}{told and f'; {told}'}")
    if not found.frameworks:
        table.add_row("found", "no framework", "whose adapter is bundled")
    table.add_row("found", "tests", f"in {found.tests}/" if found.has_tests else "nowhere: tests/ is made")
    for capability, functions in plan.functions.items():
        table.add_row("found", functions[0].name, f"in {functions[0].file}:{functions[0].line}; maybe for {capability}")
    console.print(table)


def _show_files(
    console: Console, plan: Plan, files: list[Planned], expected: str | None, *, dry_run: bool, has_problem: bool
) -> None:
    verb = "would write" if dry_run else "wrote"
    table = Table.grid(padding=(0, 2))
    for file in files:
        appended = f"{verb} to" if file.appends else verb
        if file.text is None:
            table.add_row(Text("left", "yellow"), file.path, "exists: see below" if file.note else "exists")
        else:
            table.add_row(Text(appended, "green"), file.path, file.note)
    if expected is not None or dry_run:
        table.add_row(Text(verb, "green"), plan.expected, expected or "the checks that fail today")
    elif not has_problem:
        table.add_row(Text("left", "yellow"), plan.expected, "exists")
    console.print(table)
    for file in files:
        if file.text is None and file.note:
            console.print(Text(f"\n{file.path}: {file.note}"), soft_wrap=True)
    if is_from_a_folder():
        told = "rlcanary is installed from a folder here, which CI cannot reach"
        console.print(Text(f"\n{told}: say in the workflow where it installs {own_requirement()!r} from."))
    if dry_run or has_problem:
        return
    console.print(Text(f"\nCI runs: {plan.command}"), soft_wrap=True)
    if plan.framework is None and files[0].text is not None:
        told = f"{plan.adapter} holds textbook code: CI checks nothing of yours until its methods call your functions."
    else:
        told = f"See what fails: rlcanary check {plan.arguments}; then give each line of {plan.expected} its reason."
    console.print(Text(told), soft_wrap=True)
