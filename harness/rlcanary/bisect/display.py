"""What the user sees: a live line and one line for each run on stderr, the result on stdout."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from rlcanary.bisect.git import Commit, Repository
from rlcanary.bisect.journal import Observation
from rlcanary.bisect.outcomes import Outcome
from rlcanary.console import report_console

if TYPE_CHECKING:
    from rlcanary.bisect.plan import Plan
    from rlcanary.bisect.session import Report

STYLES = {
    Outcome.GOOD: "green",
    Outcome.BAD: "red",
    Outcome.UNTESTABLE: "yellow",
    Outcome.INFRA: "magenta",
    Outcome.ABORT: "magenta",
}
TAIL_LINES = 20
LISTED_SUSPECTS = 20


class Display:
    """Entered while the search runs."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TextColumn("run {task.completed:.0f} of about {task.total:.0f}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("starting", total=1)

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._progress.stop()

    def notice(self, text: str) -> None:
        self._console.print(Text(text))

    def plan(self, plan: "Plan") -> None:
        """What is about to be searched."""
        count = len(plan.commits)
        self.notice(f"GOOD {plan.good.short} {plan.good.subject}")
        self.notice(f"BAD  {plan.bad.short} {plan.bad.subject}")
        runs = (count - 1).bit_length()
        self.notice(f"{count} commit{'s' * (count > 1)} to choose from, about {runs} runs after the check of both ends")
        for text in plan.notices:
            self.notice(text)

    def started(self, number: int, commit: Commit, tests_left: int) -> None:
        about = max(number, number - 1 + tests_left)
        self._progress.update(
            self._task, completed=number, total=about, description=f"testing {commit.short} {commit.subject[:50]}"
        )

    def finished(self, number: int, commit: Commit, observation: Observation) -> None:
        outcome = observation.outcome
        self._console.print(
            Text.assemble(
                f"{number:3d}  {commit.short}  ",
                (f"{outcome:10s}", STYLES[outcome]),
                f"  {observation.seconds:7.1f} s  {commit.subject}",
                ("" if outcome is Outcome.GOOD else f"  ({observation.reason})", "dim"),
            )
        )

    def tail(self, output: Path, title: str) -> None:
        """The end of what the command printed."""
        lines = output.read_text(encoding="utf-8", errors="replace").splitlines()
        self.notice(f"--- {title}, last {min(len(lines), TAIL_LINES)} of {len(lines)} lines of {output}")
        for line in lines[-TAIL_LINES:]:
            self.notice(f"    {line}")

    def summary(self, report: "Report", repository: Repository) -> None:
        """The result, on stdout. `SHA is the first bad commit` is the line that git prints as well."""
        console = report_console(highlight=False)
        if report.status == "found":
            culprit = report.suspects[0]
            console.print(Text(f"\n{culprit.sha} is the first bad commit", style="bold red"), soft_wrap=True)
            for name, value in (("Author", culprit.author), ("Date", culprit.date), ("Subject", culprit.subject)):
                console.print(Text(f"{name + ':':9}{value}"), soft_wrap=True)
            console.print(Text(_changed_files(culprit, repository)), soft_wrap=True)
            _hint_at_merge(console, culprit, repository)
        else:
            untested = _untested(report)
            console.print(
                Text(f"\none of these {len(report.suspects)} commits is the first bad one", style="bold yellow")
            )
            for commit in report.suspects[:LISTED_SUSPECTS]:
                console.print(Text(f"  {commit.sha}  {commit.subject}"), soft_wrap=True)
            if (more := len(report.suspects) - LISTED_SUSPECTS) > 0:
                console.print(Text(f"  and {more} more up to {report.suspects[-1].sha}"))
            console.print(Text("Untestable commits hide which. Make one of them testable and replay the log to go on."))
            if untested:
                console.print(Text(f"{untested} of them lie between untestable commits and were not tried."))
        console.print(_evidence(report, repository))
        again = f", {report.reused} outcomes taken over" if report.reused else ""
        console.print(Text(f"{report.runs} runs, {report.seconds:.1f} s{again}. Log: {report.log}"), soft_wrap=True)


def result_json(report: "Report", plan: "Plan", command: Sequence[str]) -> str:
    """The JSON result; `first_bad` is null unless the search ended at a single commit."""
    found = report.suspects[0] if report.status == "found" else None
    files = [] if found is None else _file_names(found, plan.repository)
    return (
        json.dumps(
            {
                "schema": 1,
                "status": report.status,
                "exit_code": report.exit_code,
                "message": report.message,
                "first_bad": None if found is None else asdict(found) | {"files": files},
                "suspects": [asdict(commit) for commit in report.suspects],
                "good": asdict(plan.good),
                "bad": asdict(plan.bad),
                "command": list(command),
                "runs": report.runs,
                "reused": report.reused,
                "seconds": round(report.seconds, 3),
                "observations": [asdict(observation) for observation in report.observations],
                "notices": list(plan.notices),
                "log": None if report.log is None else str(report.log),
                "journal": str(report.journal),
            },
            indent=2,
        )
        + "\n"
    )


def _evidence(report: "Report", repository: Repository) -> Table:
    """Every outcome, in the order of the history."""
    table = Table(title="Evidence", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("commit", "outcome", "seconds", "why", "subject"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    outcomes = {observation.commit: observation for observation in report.observations}
    ordered = repository.commits("--no-walk=unsorted", *outcomes) if outcomes else []
    position = (
        {sha: i for i, sha in enumerate(repository.git("rev-list", "--topo-order", *outcomes).split())}
        if outcomes
        else {}
    )
    for commit in sorted(ordered, key=lambda commit: -position[commit.sha]):
        observation = outcomes[commit.sha]
        table.add_row(
            commit.short,
            Text(observation.outcome, style=STYLES[observation.outcome]),
            f"{observation.seconds:.1f}",
            Text(observation.reason),
            Text(commit.subject),
        )
    return table


def _untested(report: "Report") -> int:
    tested = {observation.commit for observation in report.observations}
    return sum(commit.sha not in tested for commit in report.suspects)


def _changed_files(commit: Commit, repository: Repository) -> str:
    return repository.git("show", "--first-parent", "--format=", "--stat=100", commit.sha).rstrip()


def _file_names(commit: Commit, repository: Repository) -> list[str]:
    text = repository.git("show", "--first-parent", "--format=", "--name-only", "-z", commit.sha)
    return [name for name in text.split("\0") if name]


def _hint_at_merge(console: Console, commit: Commit, repository: Repository) -> None:
    parents = repository.parents(commit.sha)
    if len(parents) < 2:
        return
    base = repository.merge_base(parents[0], parents[1])
    if base is not None:
        console.print(
            Text(f"It is a merge. To search the branch that it brought in: GOOD={base[:10]} BAD={parents[1][:10]}"),
            soft_wrap=True,
        )
