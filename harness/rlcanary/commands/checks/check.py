"""Run the conformance checks on an adapter."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import chdir
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from rlcanary.adapters.load import BUNDLED, load_adapter, misspelt, outdated
from rlcanary.commands.parts.matrix import check_matrix
from rlcanary.commands.parts.suite import run_suite
from rlcanary.console import progress_bar, report_console, without_output
from rlcanary.errors import UserError
from rlcanary.html.check_page import check_page
from rlcanary.system.files import make_folder, require_writable, write_whole

if TYPE_CHECKING:
    from rlcanary.contract.adapter import Adapter


LONGEST = 1_000_000.0
"""Seconds that the limit of a check may have: the system's timers end somewhere."""


def _at_most_some_days(_ctx: click.Context, _parameter: click.Parameter, seconds: float) -> float:
    if not seconds <= LONGEST:  # NaN is not
        raise click.BadParameter(f"{seconds:g} is not at most {LONGEST:.0f} seconds; 0 is no limit")
    return seconds


@click.command(
    help=f"""Run the conformance checks on ADAPTER.

    ADAPTER is a bundled adapter ({", ".join(BUNDLED)}), one that an installed package registers, a module and a class
    (mylib.canary:MyAdapter), or a Python file. A name in brackets behind it is one of its configurations (trl[gspo]).

    With --expected the findings in that file are not counted; others are, and so is a check in it that no longer fails.
    """,
    epilog="Exit codes: 0 no check failed, 1 some did, 2 usage error or nothing was checked, 3 internal error, or none "
    "failed and some met an error of the bundled adapter.",
)
@click.argument("adapter", metavar="ADAPTER")
@click.option(
    "--only",
    multiple=True,
    metavar="PREFIX",
    help="Run only the checks whose id starts with PREFIX, such as `loss.` or `step,sync`; repeatable.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Seed of the random cases."
)
@click.option(
    "--examples",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Draw N more cases per check from the seed; the first that fails is shown in its smallest form.",
)
@click.option(
    "--worlds",
    default="",
    metavar="all|NAME[,NAME]",
    help="Run every check that has a model on these models too, such as router,lora; docs/worlds.md lists them.",
)
@click.option(
    "--matrix",
    is_flag=True,
    help="Run the checks in each configuration that ADAPTER lists; print those that fail or differ side by side.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the results here, as JSON.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write the results here, as a page with pictures.")
@click.option(
    "--programs",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Also write the program of each failure as DIR/CHECK.py, so that it runs without rlcanary.",
)
@click.option("--markdown", type=click.Path(path_type=Path), help="Also write a summary here, as Markdown.")
@click.option("--junit", type=click.Path(path_type=Path), help="Also write the results here, as JUnit's XML.")
@click.option("--sarif", type=click.Path(path_type=Path), help="Also write the failures here, as SARIF 2.1.0.")
@click.option(
    "--github", is_flag=True, help="Also print the failures as GitHub annotations, at the lines of your code."
)
@click.option(
    "--expected",
    "expected_path",
    type=click.Path(path_type=Path),
    help="Read known failures: a line `check.id  # reason` each, with its findings below.",
)
@click.option(
    "--update-expected",
    "updated_path",
    type=click.Path(path_type=Path),
    help="Write this run's failures here in the format of --expected; existing reasons are kept.",
)
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    callback=_at_most_some_days,
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="Stop a check after this long and report an error; 0 for no limit.",
)
@click.option("--show-output", is_flag=True, help="Show what the code prints while it is checked.")
@click.option(
    "--fail-on",
    type=click.Choice(["update", "dashboard", "hardening"]),
    default="hardening",
    show_default=True,
    help="Exit with 1 only for failures of this severity or a worse one: a wrong update, a wrong logged number, hardening.",
)
@click.pass_context
def check(
    ctx: click.Context,
    adapter: str,
    only: tuple[str, ...],
    seed: int,
    examples: int,
    worlds: str,
    matrix: bool,
    show_output: bool,
    fail_on: Literal["update", "dashboard", "hardening"],
    json_path: Path | None,
    html: Path | None,
    programs: Path | None,
    markdown: Path | None,
    junit: Path | None,
    sarif: Path | None,
    github: bool,
    expected_path: Path | None,
    updated_path: Path | None,
    timeout: float,
) -> None:
    if expected_path is not None and updated_path is not None:
        raise UserError("--expected reads the file that --update-expected writes: give one of them")
    updated_file = None if updated_path is None else Path(os.path.realpath(updated_path))
    files = [path for path in (json_path, html, markdown, junit, sarif, updated_file) if path is not None]
    for path in files:
        require_writable(path)
    _require_different([*files, *([] if expected_path is None else [expected_path])])
    if matrix:
        others = {
            "--html": html,
            "--programs": programs,
            "--markdown": markdown,
            "--junit": junit,
            "--sarif": sarif,
            "--github": github or None,
            "--expected": expected_path,
            "--update-expected": updated_path,
        }
        if asked := [option for option, value in others.items() if value is not None]:
            raise UserError(
                f"{asked[0]} takes one configuration: use it without --matrix, as in `rlcanary check '{adapter}[NAME]'`"
            )
    if programs is not None:
        make_folder(programs)
    here = Path.cwd()
    # The console script does not put the current folder, with the user's package, on the path.
    sys.path.insert(0, str(here))
    implementation = load_adapter(adapter)

    from rlcanary.adapters.frameworks import versions_of
    from rlcanary.bugs.causes import causes_of
    from rlcanary.checks import checks_of
    from rlcanary.checks.findings.annotations import to_annotations
    from rlcanary.checks.findings.diagnosis import SECONDS, Diagnosis
    from rlcanary.checks.findings.document import coverage_of, to_document, to_json
    from rlcanary.checks.findings.expected import NO_REASON, changes, compare, read_expected, update_expected
    from rlcanary.checks.findings.junit import to_junit
    from rlcanary.checks.findings.locations import repository_root
    from rlcanary.checks.findings.report import show, to_markdown
    from rlcanary.checks.findings.sarif import to_sarif
    from rlcanary.checks.programs.standalone import standalone
    from rlcanary.checks.worlds.models import chosen

    models, versions = chosen(worlds), versions_of(implementation)
    checks = checks_of(only)
    if matrix:
        if versions:
            click.echo(", ".join(f"{name} {version}" for name, version in versions.items()))
        code = check_matrix(
            implementation,
            adapter,
            checks,
            seed=seed,
            timeout=timeout,
            examples=examples,
            models=models,
            fail_on=fail_on,
            json_path=json_path and here / json_path,
            shows_output=show_output,
        )
        warn_of_names(implementation)
        ctx.exit(code)
    with chdir(here):  # the code under test may have gone elsewhere
        expected = {} if expected_path is None else read_expected(expected_path)
    results = run_suite(checks, implementation, adapter, seed, timeout, examples, models, shows_output=show_output)
    os.chdir(here)
    if updated_path is not None:
        before = read_expected(updated_path, is_draft=True) if updated_path.exists() else None
        expected = update_expected(updated_path, results)
        if before is None:  # all of it is new, and the table below shows it
            count = sum(len(each.findings) for each in expected.values())
            click.echo(f"{updated_path}: written, failed checks: {len(expected)}, findings: {count}")
        for line in changes(before, expected) if before is not None else ():
            click.echo(f"{updated_path}: {line}")
        for name in (name for name, expectation in expected.items() if expectation.reason == NO_REASON):
            click.echo(f"rlcanary: {updated_path}: say after the # why {name} is expected to fail", err=True)
    comparison = compare(results, expected)
    diagnosis = Diagnosis([])
    # Known failures need no explanation.
    if comparison.unexpected:
        with progress_bar() as progress, without_output(unless=show_output):
            progress.add_task(f"searching for causes, {SECONDS:g} s at most", total=None)
            diagnosis = causes_of(checks, results, implementation, seed, timeout)
    causes = diagnosis.causes
    document = to_document(implementation.name, results, diagnosis, checks, comparison, fail_on, versions)
    if json_path is not None:
        write_whole(json_path, to_json(document))
    if html is not None:
        write_whole(html, check_page(document))
    written = [result for result in comparison.unexpected if result.snippet]
    if programs is not None:
        for result in written:
            write_whole(programs / f"{result.id}.py", standalone(result.snippet, implementation, adapter))
    if markdown is not None:
        write_whole(markdown, to_markdown(implementation.name, checks, results, comparison, causes, fail_on))
    root = repository_root()
    if junit is not None:
        write_whole(junit, to_junit(implementation, checks, results, comparison, expected, fail_on, root))
    if sarif is not None:
        write_whole(sarif, to_sarif(implementation, checks, comparison, expected, causes, fail_on, root, expected_path))
    if versions:
        told = ", ".join(f"{name} {version}" for name, version in versions.items())
        click.echo(f"{told}: {coverage_of(results)}")
    show(report_console(), implementation.name, checks, results, comparison, causes)
    if github:
        given = (implementation, checks, results, comparison, causes, fail_on, root, expected_path)
        click.echo("".join(f"{line}\n" for line in to_annotations(*given)), nl=False)
    if programs is not None:
        left = f"; known failures left out: {len(comparison.known)}" if comparison.known else ""
        click.echo(f"rlcanary: programs written to {programs}: {len(written)}{left}", err=True)
    if str(diagnosis):
        click.echo(f"rlcanary: {diagnosis}", err=True)
    warn_of_names(implementation)
    for each in comparison.misfits:
        click.echo(f"rlcanary: adapter error in {each.id}: {each.message.splitlines()[0]}", err=True)
    if comparison.nothing:
        raise UserError(f"nothing was checked: {comparison.nothing}")
    ctx.exit(comparison.exit_code(fail_on))


def _require_different(paths: Sequence[Path]) -> None:
    counts = Counter(map(os.path.realpath, paths))
    if twice := next((path for path in paths if counts[os.path.realpath(path)] > 1), None):
        raise UserError(f"{twice} is given for two files: give each a name of its own")


def warn_of_names(implementation: Adapter) -> None:
    """Print the methods whose names are nearly those of capabilities, and those without newer arguments."""
    for line in (*misspelt(implementation), *outdated(implementation)):
        click.echo(f"rlcanary: {line}", err=True)
