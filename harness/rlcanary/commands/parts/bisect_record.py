"""`rlcanary bisect log|mark|status|undo|visualize`: show the last search of a checkout, and correct it."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import click
from rich.table import Table
from rich.text import Text

from rlcanary.bisect.line.descent import Descent
from rlcanary.bisect.line.stage import Stage
from rlcanary.bisect.record.git_log import format_log
from rlcanary.bisect.record.journal import (
    Header,
    Journal,
    Lock,
    Observation,
    Record,
    lock_holder,
    now,
    readable_records,
)
from rlcanary.bisect.request import Request
from rlcanary.bisect.search.verdict import likeliest
from rlcanary.bisect.view.posterior_bar import posterior_bar
from rlcanary.bisect.view.progress import STYLES
from rlcanary.bisect.view.summary import LISTED_SUSPECTS, TWO_STEPS
from rlcanary.console import report_console
from rlcanary.errors import UserError
from rlcanary.jobs.outcomes import Outcome
from rlcanary.system.git import Repository


@click.command()
def log() -> None:
    """Print the last search as a `git bisect log`, to edit and go on from with --replay."""
    last = _last_search()
    click.echo(format_log(last.header, last.record.observations(), last.repository), nl=False)


@click.command()
@click.argument("count", type=click.IntRange(min=1), default=1)
def undo(count: int) -> None:
    """Take back the last COUNT outcomes; the same bisect command then goes on without them."""
    with _editing() as (last, journal):
        observations = journal.observations()
        if count > len(observations):
            raise UserError(f"there are only {len(observations)} outcomes to undo")
        for observation in reversed(observations[-count:]):
            journal.record_undo(observation)
            commit = last.repository.commit(observation.commit)
            click.echo(f"taken back: {observation.outcome} {commit.short} {commit.subject}")
    click.echo(_how_to_go_on(last))


@click.command()
@click.argument("ref")
@click.argument("outcome", type=click.Choice(["good", "bad", "skip"]))
def mark(ref: str, outcome: str) -> None:
    """Set the outcome of commit REF by hand; the same bisect command then continues with it."""
    outcomes = {"good": Outcome.GOOD, "bad": Outcome.BAD, "skip": Outcome.UNTESTABLE}
    with _editing() as (last, journal):
        if last.header.metric and outcome != "skip":
            raise UserError("this search is for a metric: only skip can be marked")
        commit = last.repository.commit(last.repository.resolve(ref, "the commit"))
        if not any(commit.sha in stage.range for stage in last.descent.stages):
            raise UserError(f"{commit.short} is not in the range of the search: see `rlcanary bisect status`")
        journal.record(Observation(commit.sha, outcomes[outcome], "marked by hand", time=now()))
        click.echo(f"marked {outcome}: {commit.short} {commit.subject}")
    click.echo(_how_to_go_on(last))


@click.command()
def status() -> None:
    """Say where the last search stands."""
    last = _last_search()
    holder = lock_holder(last.repository.git_dir / "rlcanary" / "bisect.lock")
    state = f"running, {holder}" if holder else "finished" if last.record.is_finished else "cut short"
    console = report_console(highlight=False)
    stages = last.descent.stages
    outermost, stage = stages[0], stages[-1]
    verdict = last.descent.verdict()
    names = {commit.sha: commit for commit in stage.commits}
    if last.descent.closed is not None:
        names |= {commit.sha: commit for commit in last.descent.closed.inside.commits}
    held = f"{len(verdict.suspects)} of {len(stage.commits)} commits hold {verdict.probability:.1%} of the probability"
    lines = [
        *([] if last.refused is None else [f"the last start was refused: {last.refused}"]),
        f"search {state}: {' '.join(last.header.command)}",
        f"GOOD {outermost.good.short} {outermost.good.subject}",
        f"BAD  {outermost.bad.short} {outermost.bad.subject}",
        f"{len(last.record.observations())} outcomes known, about {stage.search.tests_left()} runs left",
        *(
            f"inside the merge {merge.short} {merge.subject}, which has {outer.search.result().probability:.1%}:"
            for merge, outer in zip(last.descent.merges, stages, strict=False)
        ),
        f"{TWO_STEPS if verdict.steps else held}:",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    for sha in likeliest(verdict.suspects, verdict.posterior, LISTED_SUSPECTS):
        share = f"{verdict.posterior[sha]:6.1%}" if sha in verdict.posterior else "inside"
        console.print(Text(f"  {share}  {names[sha].short} {names[sha].subject}"), soft_wrap=True)
    if (more := len(verdict.suspects) - LISTED_SUSPECTS) > 0:
        console.print(f"  and {more} more")
    console.print(Text(f"journal: {last.record.path}"), soft_wrap=True)


@click.command()
def visualize() -> None:
    """Show every commit of the last search with its outcomes and the probability that it is the culprit."""
    last = _last_search()
    console = report_console(highlight=False)
    of: dict[str, list[Text]] = {}
    for observation in last.record.observations():
        of.setdefault(observation.commit, []).append(Text(observation.outcome, style=STYLES[observation.outcome]))
    os.environ.setdefault("LESS", "FRX")  # The same as git: colours, and no pager for output that fits the screen.
    of_merge = 1.0
    with console.pager(styles=True) if console.is_terminal else nullcontext():
        for merge, stage in zip((None, *last.descent.merges), last.descent.stages, strict=True):
            if merge is not None:
                console.print(Text(f"\ninside the merge {merge.short} {merge.subject}"), soft_wrap=True)
            verdict = stage.search.result()
            shares = [of_merge * verdict.posterior[commit.sha] for commit in stage.commits]
            of_merge *= verdict.probability
            console.print(Text(f"GOOD {posterior_bar(shares, console.width - 12)} BAD"))
            console.print(_chart(stage, shares, of))


def _chart(stage: Stage, shares: Sequence[float], of: Mapping[str, Sequence[Text]]) -> Table:
    """Make a table with a row per commit, oldest first."""
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("commit")
    table.add_column("probability", justify="right")
    table.add_column("", no_wrap=True)
    table.add_column("outcomes")
    table.add_column("subject", overflow="fold")
    top = max(shares)
    table.add_row(stage.good.short, "", "", Text(", ").join(of.get(stage.good.sha, [])), Text(stage.good.subject))
    for commit, share in zip(stage.commits, shares, strict=True):
        bar = Text("█" * round(10 * share / top), style="cyan")
        shown = f"{share:.1%}" if share >= 0.0005 else ""
        table.add_row(commit.short, shown, bar, Text(", ").join(of.get(commit.sha, [])), Text(commit.subject))
    return table


@dataclass(frozen=True)
class LastSearch:
    """The newest search of this checkout, from its journal."""

    repository: Repository
    record: Record
    header: Header
    request: Request
    trusted: Sequence[str]
    """The SHAs of the ends that need no run."""
    refused: str | None
    """The reason why the newest start was refused, or None."""

    @cached_property
    def descent(self) -> Descent:
        """The state of the search after all recorded runs."""
        from rlcanary.bisect.line.descent import Descent
        from rlcanary.bisect.line.stage import make_stage
        from rlcanary.bisect.search.verdict import Contradiction

        repository, header = self.repository, self.header
        good = repository.commit(header.good)
        commits = repository.commits("--first-parent", "--reverse", f"{header.good}..{header.bad}")
        descent = Descent(
            self.request, repository, make_stage(self.request, repository, good, "GOOD", commits, trusted=self.trusted)
        )
        try:
            for observation in self.record.observations():
                descent.record(observation)
            while not descent.stage.search.next_commits(1) and descent.advance():
                pass
        except Contradiction as contradiction:
            raise UserError(
                f"the runs contradict each other: {contradiction}; undo the last one with `rlcanary bisect undo`, "
                "or continue without --deterministic"
            ) from None
        return descent


def _refusal(record: Record) -> str | None:
    """Return why a search could not start. None if it did, or if its outcomes were corrected since."""
    end = record.last("end", "observation", "undo") or {}
    return end["reason"] if end.get("status") == "refused" else None


def _last_search() -> LastSearch:
    """Load the newest search. One that could not start is used only if there is no other."""
    repository = Repository.around(Path.cwd())
    store = repository.common_dir / "rlcanary" / "bisect"
    paths = sorted(store.glob("*/journal.jsonl"), key=lambda path: path.stat().st_mtime_ns, reverse=True)
    readable = readable_records(paths, _warn)
    records = [record for record in readable if record.checkout == str(repository.toplevel)]
    if not records:
        raise UserError("there was no search here yet: start one with `rlcanary bisect --good A --bad B -- CMD`")
    refused = _refusal(records[0])
    record = next((record for record in records if _refusal(record) is None), records[0])
    header = record.header
    assert header is not None
    for text in record.damage:
        _warn(text)
    # A search may be killed between the two lines.
    given = record.last("request") or {"request": {"command": header.command}, "trusted": ()}
    return LastSearch(repository, record, header, Request.of(given["request"]), given["trusted"], refused)


def _warn(text: str) -> None:
    click.echo(f"warning: {text}", err=True)


@contextmanager
def _editing() -> Iterator[tuple[LastSearch, Journal]]:
    """Load the last search and hold its lock, so that no search runs meanwhile."""
    last = _last_search()
    lock = Lock(last.repository.git_dir / "rlcanary" / "bisect.lock")
    try:
        try:
            journal = Journal(last.record.path.parent)
        except BlockingIOError:
            raise UserError("this search is running in another worktree: stop it first") from None
        try:
            yield last, journal
        finally:
            journal.close()
    finally:
        lock.release()


def _how_to_go_on(last: LastSearch) -> str:
    ends = ["--good", last.header.good[:10], "--bad", last.header.bad[:10]]
    words = ["rlcanary", "bisect", *ends, *last.request.words(), "--", *last.header.command]
    place = Path(os.path.relpath(last.repository.toplevel / last.header.directory))
    there = "" if place == Path() else f"cd {shlex.quote(str(place))} && "
    return f"go on with: {there}{shlex.join(words)}"
