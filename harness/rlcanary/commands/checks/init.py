"""Set a repository up: an adapter, known failures, CI."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlcanary.adapters.load import load_adapter
from rlcanary.commands.parts.suite import run_suite
from rlcanary.console import report_console
from rlcanary.errors import UserError
from rlcanary.scaffold.functions import Function, functions_by_capability
from rlcanary.scaffold.plan import Plan, Planned, local_source, own_requirement
from rlcanary.scaffold.releases import HEADER, imported_requirements
from rlcanary.scaffold.survey import FRAMEWORKS, Survey, python_files, survey
from rlcanary.system.files import write_whole

if TYPE_CHECKING:
    from rlcanary.checks import Result

EFFECT_OF_PLUGINS = {
    "ray": "pytest ends actors that a test leaves behind",
    "vllm": "pytest ends engines that a test leaves behind",
}
"""What the plugins do from the next run of pytest on, where the package is used."""

COMPARED = ("pass", "fail", "error")
RAN = (*COMPARED, "not-compared")
SHOWN = 5
"""The exceptions that are named at most."""

NOT_TRIAGED = "failed when rlcanary was added; not triaged yet"


@click.command(epilog="Exit codes: 0 set up, 2 usage error or the checks could not be run, 3 internal error.")
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

    Looks at what the repository uses, and writes an adapter (tests/canary.py). Then runs the checks and lists those that
    fail today in tests/canary_expected.txt, so that CI starts green. Last it writes the files that use this list: pytest's
    settings, a GitHub Actions workflow and a pre-commit hook. A file that is there already is left as it is.
    """
    root = Path.cwd()
    if only and find_spec("torch"):
        from rlcanary.checks import checks_of

        checks_of(only)  # refuses what is no beginning of an id before anything is written
    found = survey(root)
    console, own = report_console(highlight=False), functions_by_capability(root, python_files(root))
    chosen = _start(found, own) if framework is None else framework.replace("none", "") or None
    plan = Plan(found, chosen, only, {} if chosen else own)
    files = plan.files()
    _require_folders(root, [*files, Planned(plan.expected, "", "")])
    _show_survey(console, found, plan)
    results, problem = None, ""
    if not dry_run:
        adapter, *naming = files
        adapter.write(root)
        try:
            results = _write_expected(plan) if plan.runs_checks else None
        except UserError as error:
            problem, files = str(error), [adapter]
        else:
            for file in naming:
                file.write(root)
    _show_files(console, plan, files, results, dry_run=dry_run, has_problem=bool(problem))
    if problem:
        missing = f"{plan.expected}, and what names it, was not written"
        raise UserError(f"{missing}: {problem}. When that is mended, run rlcanary init again")


def _start(found: Survey, own: Mapping[str, Sequence[Function]]) -> str | None:
    """Choose the framework to start from: one that is named as a dependency, or imported where there is no own loss."""
    used = [name for name in found.frameworks if name in found.named or "policy_loss" not in own]
    return used[0] if used else None


def _write_expected(plan: Plan) -> list[Result]:
    """Run the checks, and write those that fail to the file of known failures, beside the releases with which they ran."""
    if find_spec("torch") is None:
        raise UserError("the checks need torch: pip install 'rlcanary[torch]'")
    sys.path.insert(0, str(Path.cwd()))
    adapter = load_adapter(plan.adapter)

    from rlcanary.checks import all_checks, checks_of
    from rlcanary.checks.findings.expected import update_expected

    # All of them: pytest reads the list too, and runs every check. CI runs the chosen ones.
    results = run_suite(all_checks(), adapter, plan.adapter)
    os.chdir(plan.found.root)  # the code under test may have gone elsewhere
    chosen = {check.id for check in checks_of(plan.only)}
    if not any(result.status in COMPARED and result.id in chosen for result in results):
        raise UserError(f"{plan.adapter} provides nothing that these checks need")
    update_expected(Path(plan.expected), results, NOT_TRIAGED)
    lines = imported_requirements(plan.found.root)
    write_whole(Path(plan.releases), HEADER.format(expected=plan.expected) + "".join(f"{line}\n" for line in lines))
    return results


def _counted(results: Sequence[Result]) -> str:
    """Say how many of the checks fail, and what that does."""
    from rlcanary.checks.severity import EFFECTS

    failed = [result for result in results if result.status in ("fail", "error")]
    severities = Counter(result.severity for result in failed)
    told = ", ".join(f"{severities[severity]} {effect}" for severity, effect in EFFECTS.items() if severities[severity])
    ran = sum(result.status in RAN for result in results)
    return f"{len(failed)} of {ran} checks that ran fail today{told and f': {told}'}"


def _raised(results: Sequence[Result]) -> list[str]:
    """Say what the checks met that could compare nothing, the most frequent exceptions first."""
    met = Counter(
        re.sub(r" \([^()]*\)$", "", result.message.splitlines()[0].rpartition(" raised ")[2])
        for result in results
        if result.status in ("error", "adapter-error")
    )
    return [f"{count} check{'s' * (count > 1)}: {exception}" for exception, count in met.most_common()]


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
    console: Console,
    plan: Plan,
    files: list[Planned],
    results: Sequence[Result] | None,
    *,
    dry_run: bool,
    has_problem: bool,
) -> None:
    verb = "would write" if dry_run else "wrote"
    table = Table.grid(padding=(0, 2))
    for file in files:
        appended = f"{verb} to" if file.appends else verb
        if file.text is None:
            table.add_row(Text("left", "yellow"), file.path, "exists: see below" if file.note else "exists")
        else:
            table.add_row(Text(appended, "green"), file.path, file.note)
    if results is not None or (dry_run and plan.runs_checks):
        table.add_row(
            Text(verb, "green"), plan.expected, _counted(results) if results else "the checks that fail today"
        )
        table.add_row(Text(verb, "green"), plan.releases, "the releases that they ran with, for CI to install")
    elif not plan.runs_checks:
        table.add_row(Text("left", "yellow"), plan.expected, "exists")
    console.print(table)
    for file in files:
        if file.text is None and file.note:
            console.print(Text(f"\n{file.path}: {file.note}"), soft_wrap=True)
    if source := local_source():
        told = f"rlcanary is installed from {source} on this machine, which CI cannot reach"
        console.print(Text(f"\n{told}: say in the workflow where it installs {own_requirement()!r} from."))
    if dry_run or has_problem:
        return
    if raised := _raised(results or []):
        console.print(Text("\nNothing was compared where code raised an exception:"), soft_wrap=True)
        for line in raised[:SHOWN]:
            console.print(Text(f"  {line}"), soft_wrap=True)
        told = f"Mend what you can, delete {plan.expected} and run rlcanary init again: until then these checks see nothing."
        console.print(Text(told), soft_wrap=True)
    console.print(Text(f"\nCI runs: {plan.command}"), soft_wrap=True)
    if plan.framework is None and files[0].text is not None:
        told = f"{plan.adapter} holds textbook code: CI checks nothing of yours until its methods call your functions."
    else:
        told = f"See what fails: rlcanary check {plan.arguments}; then give each line of {plan.expected} its reason."
    console.print(Text(told), soft_wrap=True)
