"""Print the result for people on stdout."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rlcanary.bisect.search.verdict import likeliest
from rlcanary.bisect.view.progress import STYLES, duration
from rlcanary.bisect.view.report import Report, changed_files, evidence_by_commit
from rlcanary.console import report_console
from rlcanary.jobs.outcomes import Outcome
from rlcanary.system.git import Commit, Repository

TWO_STEPS = "two commits break it, each a part of the runs"
LISTED_SUSPECTS = 20
ESTIMATES = {
    "false_fail": "a good commit fails {:.0%} of the time",
    "false_pass": "a bad commit passes {:.0%} of the time",
    "before": "before {:.6g}",
    "after": "after {:.6g}",
    "noise": "noise {:.2g}",
}
LEAST_RATE = 0.02
"""The least flake rate that is mentioned."""


def print_summary(report: Report, repository: Repository) -> None:
    """Print the result. The line `SHA is the first bad commit` matches git's."""
    console = report_console(highlight=False)
    if report.culprit is not None:
        _print_culprit(console, report, report.culprit, repository)
    elif report.steps:
        _print_steps(console, report)
    else:
        _print_suspects(console, report)
    if report.relapse is not None:
        bad, good = report.relapse
        _say(
            console,
            f"The history breaks more than once: {bad.short} is bad, and {good.short} after it is good. The result is "
            "one of several breaks; narrow GOOD and BAD down to the one that matters.",
            "yellow",
        )
    if (learned := _learned(report)) is not None:
        _say(console, learned)
    for commit, share in report.next_best():
        if report.culprit is not None:
            _say(console, f"next best: {share:.1%}  {commit.short} {commit.subject}")
    console.print(_evidence(report, repository))
    facts = [f"{report.runs} run{'s' * (report.runs != 1)} in {duration(report.wall_seconds)}"]
    if report.reused:
        facts.append(f"{report.reused} outcomes reused")
    if report.environments_built:
        facts.append(f"{report.environments_built} environments built")
    _say(console, f"{', '.join(facts)}. Log: {report.log}")
    if report.message:
        _say(console, report.message)


def _print_culprit(console: Console, report: Report, culprit: Commit, repository: Repository) -> None:
    _say(console, f"\n{culprit.sha} is the first bad commit", "bold red")
    for name, value in (("Author", culprit.author), ("Date", culprit.date), ("Subject", culprit.subject)):
        _say(console, f"{name + ':':9}{value}")
    body = repository.git("log", "-1", "--format=%b", culprit.sha).strip()
    for line in body.splitlines():
        _say(console, f"    {line}".rstrip())
    _say(console, changed_files(culprit, repository))
    for merge in report.merges:
        brought = f"It came in with the merge {merge.commit.short} {merge.commit.subject}"
        _say(console, f"It is a merge, and the search ends there: {merge.note}" if merge.note else brought)
    if report.posterior:
        _say(console, f"probability {report.probability:.1%}")


def _print_steps(console: Console, report: Report) -> None:
    _say(console, f"\n{TWO_STEPS}", "bold red")
    for step in report.steps:
        rate = f"from here on {step.failure_rate:.0%} of the runs fail, probability {step.probability:.1%}"
        if len(step.suspects) == 1:
            sha = step.suspects[0]
            _say(console, f"{sha}  {report.commits[sha].subject}\n  {rate}", "bold yellow")
        else:
            _say(console, f"one of these {len(step.suspects)} commits: {rate}", "bold yellow")
            _list(console, report, step.suspects)


def _print_suspects(console: Console, report: Report) -> None:
    count = len(report.suspects)
    sure = f", with probability {report.probability:.1%}" if report.posterior else ""
    _say(console, f"\none of these {count} commits is the first bad one{sure}", "bold yellow")
    _list(console, report, [commit.sha for commit in report.suspects])
    if report.status == "range":
        untestable = {o.commit for o in report.observations if o.outcome is Outcome.UNTESTABLE}
        tested = {observation.commit for observation in report.observations}
        untried = sum(commit.sha not in tested for commit in report.suspects)
        if untestable:
            _say(
                console,
                "Untestable commits hide which one it is. Make one of them testable and replay the log to continue.",
            )
            if untried:
                _say(console, f"{untried} of them lie between untestable commits and were not tried.")
        else:
            _say(
                console,
                "They cannot be told apart: the command repeats its outcome on the same commit, right or wrong. If it "
                "takes a seed, give it $RLCANARY_BISECT_SEED.",
            )


def _list(console: Console, report: Report, suspects: Sequence[str]) -> None:
    for sha in likeliest(suspects, report.posterior, LISTED_SUSPECTS):
        share = f"{report.posterior[sha]:6.1%}  " if sha in report.posterior else ""
        _say(console, f"  {share}{sha}  {report.commits[sha].subject}")
    if (more := len(suspects) - LISTED_SUSPECTS) > 0:
        first, last = report.commits[suspects[0]].short, report.commits[suspects[-1]].short
        _say(console, f"  and {more} more of {first} to {last}")


def _learned(report: Report) -> str | None:
    parts = [
        ESTIMATES[name].format(value)
        for name, value in report.estimates.items()
        if value == value and (name not in ("false_fail", "false_pass") or value >= LEAST_RATE)
    ]
    measured = any(observation.outcome is Outcome.MEASURED for observation in report.observations)
    if not parts or not (measured or _is_flaky(report)):
        return None
    return ("The metric: " if measured else "The command is flaky: ") + ", ".join(parts)


def _is_flaky(report: Report) -> bool:
    """Whether any commit both passed and failed."""
    passed = {o.commit for o in report.observations if o.outcome is Outcome.GOOD}
    return any(o.outcome is Outcome.BAD and o.commit in passed for o in report.observations)


def _evidence(report: Report, repository: Repository) -> Table:
    """List every commit that ran, in the order of the history."""
    table = Table(title="Evidence", title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in ("commit", "outcome", "seconds", "why", "subject"):
        table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
    for evidence in evidence_by_commit(report.observations, repository):
        runs = evidence.observations
        outcomes = Text(", ").join(
            Text(outcome if count == 1 else f"{count} {outcome}", style=STYLES[outcome])
            for outcome, count in evidence.counts.items()
        )
        table.add_row(
            evidence.commit.short,
            outcomes,
            f"{sum(run.seconds for run in runs) / len(runs):.1f}",
            Text(", ".join(dict.fromkeys(run.reason for run in runs))),
            Text(evidence.commit.subject),
        )
    return table


def _say(console: Console, text: str, style: str = "") -> None:
    console.print(Text(text, style=style), soft_wrap=True)
