"""Train with the bundled GRPO from a YAML plan."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from rlcanary.console import report_console
from rlcanary.errors import UserError

if TYPE_CHECKING:
    from rlcanary.grpo.plan.plan import Plan
    from rlcanary.live.audit import Audit

SHOWN = ("reward", "entropy", "grad_norm", "mult_prob_error", "completion_tokens", "policy_version")
# Without a terminal, a line is printed about this often.
LINES = 20


@click.command("train")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key of the plan; repeatable.")
@click.option("--resume", is_flag=True, help="Resume from the last checkpoint in run.folder.")
@click.option("--check", is_flag=True, help="Check that the plan can run, then exit.")
def train(plan: Path, overrides: tuple[str, ...], resume: bool, check: bool) -> int:
    """Train with GRPO from PLAN, a YAML file such as examples/arithmetic.yaml.

    The run's folder gets metrics.jsonl (`rlcanary dump-logs` reads it), trace.ndjson and the checkpoints.
    """
    try:
        from rlcanary.grpo.plan.reading import read_plan

        chosen = read_plan(plan, overrides)
        import torch  # noqa: F401 - asked for here, so that a missing package is named in one line
        import transformers
    except ImportError as error:
        raise UserError(f"training needs the packages of its extra ({error}); pip install 'rlcanary[grpo]'") from error
    transformers.utils.logging.disable_progress_bar()  # it would break up the display
    if check:
        from rlcanary.grpo.training.run import check_plan

        check_plan(chosen)
        report_console().print(f"{plan} can be run")
        return 0
    return _train(chosen, resume)


def _train(plan: Plan, resume: bool) -> int:
    from rlcanary.grpo.train import ENDINGS
    from rlcanary.grpo.train import train as run_plan

    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    console, has_terminal = Console(stderr=True), sys.stderr.isatty()  # FORCE_COLOR makes no terminal
    columns = (
        TextColumn("step"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    every = max(1, plan.run.steps // LINES)
    with Progress(*columns, console=console, transient=True, disable=not has_terminal) as progress:
        bar = progress.add_task("starting", total=plan.run.steps)

        def show(step: int, metrics: Mapping[str, float]) -> None:
            progress.update(bar, completed=step + 1, description=f"reward {metrics['reward']:.3f}")
            if not has_terminal and ((step + 1) % every == 0 or step + 1 == plan.run.steps):
                click.echo(f"step {step + 1}/{plan.run.steps}  reward {metrics['reward']:.3f}", err=True)

        audit = _audit(plan)
        try:
            outcome = run_plan(plan, resume, show, audit)
        except ENDINGS as error:
            _tell_findings(audit)
            click.echo(f"rlcanary: the run ended early: {error}", err=True)
            return 1
    console = report_console()
    if not outcome.metrics:
        console.print(f"all {plan.run.steps} steps were taken before; nothing is left to do")
        return 0
    table = Table(title=f"Step {plan.run.steps} of {plan.run.folder}")
    shown = {name: outcome.metrics[name] for name in SHOWN if name in outcome.metrics}
    for name in shown:
        table.add_column(name, justify="right")
    table.add_row(*(f"{value:.6g}" for value in shown.values()))
    console.print(table)
    account = outcome.account
    fates = ", ".join(f"{count} {fate}" for fate, count in account.fates.items() if count)
    console.print(f"{account.entered} groups of {plan.schedule.group_size}: {fates}")
    _tell_findings(audit)
    return 0


def _tell_findings(audit: Audit | None) -> None:
    for finding in () if audit is None else audit.findings:
        click.echo(f"rlcanary: the audit found {finding}", err=True)


def _audit(plan: Plan) -> Audit | None:
    """Make the audit of the run's updates; None if the plan has none."""
    if not plan.run.audit_every:
        return None
    import logging

    from rlcanary.live.audit import Audit

    logging.getLogger("rlcanary.live").addHandler(logging.NullHandler())  # the findings are printed at the end
    return Audit(
        plan.conventions,
        every=plan.run.audit_every,
        on_finding="log",
        max_staleness=plan.schedule.versions_ahead,
        bundles=plan.run.folder / "canary",
    )
