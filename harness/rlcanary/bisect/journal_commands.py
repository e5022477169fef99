"""`rlcanary bisect log|mark|status|undo|visualize`: looking at the last search of a checkout, and correcting it."""

import os
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table
from rich.text import Text

from rlcanary.errors import UserError

if TYPE_CHECKING:
    from rlcanary.bisect.git import Commit, Repository
    from rlcanary.bisect.journal import Header, Journal, Record
    from rlcanary.bisect.merges import Inside
    from rlcanary.bisect.plan import Request
    from rlcanary.bisect.searches import Stage


@click.command()
def log() -> None:
    """Print the last search as a `git bisect log`, to edit and go on from with --replay."""
    from rlcanary.bisect.bisect_log import format_log

    last = _last_search()
    click.echo(format_log(last.header, last.record.observations(), last.repository.commit), nl=False)


@click.command()
@click.argument("count", type=click.IntRange(min=1), default=1)
def undo(count: int) -> None:
    """Take back the last COUNT outcomes; the same bisect command then goes on without them."""
    with _editing() as (last, journal):
        observations = journal.observations()
        if count > len(observations):
            raise UserError(f"there are only {len(observations)} outcomes to take back")
        for observation in reversed(observations[-count:]):
            journal.record_undo(observation)
            commit = last.repository.commit(observation.commit)
            click.echo(f"taken back: {observation.outcome} {commit.short} {commit.subject}")
    click.echo(_how_to_go_on(last))


@click.command()
@click.argument("ref")
@click.argument("outcome", type=click.Choice(["good", "bad", "skip"]))
def mark(ref: str, outcome: str) -> None:
    """Say what the commit REF is, as if it had run; the same bisect command then goes on with it."""
    from rlcanary.bisect.journal import Observation, now
    from rlcanary.bisect.outcomes import Outcome

    outcomes = {"good": Outcome.GOOD, "bad": Outcome.BAD, "skip": Outcome.UNTESTABLE}
    with _editing() as (last, journal):
        if last.header.metric and outcome != "skip":
            raise UserError("this search is for a metric, whose commits have values: only skip can be marked")
        commit = last.repository.commit(last.repository.resolve(ref, "the commit"))
        if commit.sha not in {c.sha for stage in last.stages for c in (stage.good, *stage.commits)}:
            raise UserError(f"{commit.short} is not in the range of the search: see `rlcanary bisect status`")
        journal.record(Observation(commit.sha, outcomes[outcome], "marked by hand", time=now()))
        click.echo(f"marked {outcome}: {commit.short} {commit.subject}")
    click.echo(_how_to_go_on(last))


@click.command()
def status() -> None:
    """Say where the last search stands."""
    from rlcanary.bisect.journal import lock_holder
    from rlcanary.bisect.summary import LISTED_SUSPECTS
    from rlcanary.console import report_console

    last = _last_search()
    holder = lock_holder(last.repository.git_dir / "rlcanary" / "bisect.lock")
    state = f"running, {holder}" if holder else "finished" if last.record.is_finished else "cut short"
    console = report_console(highlight=False)
    outermost, stage = last.stages[0], last.stages[-1]
    verdict = stage.search.result()
    names = {commit.sha: commit for commit in stage.commits}
    lines = [
        f"search {state}: {' '.join(last.header.command)}",
        f"GOOD {outermost.good.short} {outermost.good.subject}",
        f"BAD  {outermost.bad.short} {outermost.bad.subject}",
        f"{len(last.record.observations())} outcomes known, about {stage.search.tests_left()} runs left",
        *(
            f"inside the merge {merge.short} {merge.subject}, which has {outer.search.result().probability:.1%}:"
            for merge, outer in zip(last.merges, last.stages, strict=False)
        ),
        f"{len(verdict.suspects)} of {len(stage.commits)} commits hold {verdict.probability:.1%} of the probability:",
    ]
    for line in lines:
        console.print(Text(line), soft_wrap=True)
    for sha in verdict.suspects[:LISTED_SUSPECTS]:
        console.print(Text(f"  {verdict.posterior[sha]:6.1%}  {names[sha].short} {names[sha].subject}"), soft_wrap=True)
    if (more := len(verdict.suspects) - LISTED_SUSPECTS) > 0:
        console.print(f"  and {more} more")
    console.print(Text(f"journal: {last.record.path}"), soft_wrap=True)


@click.command()
def visualize() -> None:
    """Show every commit of the last search with its outcomes and the probability that it is the culprit."""
    from rlcanary.bisect.display import STYLES
    from rlcanary.bisect.posterior_bar import posterior_bar
    from rlcanary.console import report_console

    last = _last_search()
    console = report_console(highlight=False)
    of: dict[str, list[Text]] = {}
    for observation in last.record.observations():
        of.setdefault(observation.commit, []).append(Text(observation.outcome, style=STYLES[observation.outcome]))
    with console.pager(styles=True) if console.is_terminal else _unpaged():
        for merge, stage in zip((None, *last.merges), last.stages, strict=True):
            if merge is not None:
                console.print(Text(f"\ninside the merge {merge.short} {merge.subject}"), soft_wrap=True)
            posterior = stage.search.result().posterior
            shares = [posterior[commit.sha] for commit in stage.commits]
            console.print(Text(f"GOOD {posterior_bar(shares, console.width - 12)} BAD"))
            console.print(_chart(stage, shares, of))


def _chart(stage: "Stage", shares: Sequence[float], of: Mapping[str, Sequence[Text]]) -> Table:
    """A row for each commit, oldest first."""
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
    """The newest journal of this checkout, and the search as far as it went."""

    repository: "Repository"
    record: "Record"
    header: "Header"
    stages: "tuple[Stage, ...]"
    """Along the first parents, then inside each of `merges`."""
    merges: "tuple[Commit, ...]"
    options: tuple[str, ...]


def _last_search() -> LastSearch:
    from rlcanary.bisect.git import Repository
    from rlcanary.bisect.journal import Record
    from rlcanary.bisect.plan import Request
    from rlcanary.bisect.searches import make_stage, make_stage_inside

    repository = Repository.around(Path.cwd())
    store = repository.common_dir / "rlcanary" / "bisect"
    for path in sorted(store.glob("*/journal.jsonl"), key=lambda path: path.stat().st_mtime_ns, reverse=True):
        record = Record(path)
        header, start = record.header, record.last("start")
        if header is None or start is None or start["checkout"] != str(repository.toplevel):
            continue
        options = tuple(start["options"])
        metric, _, worse = header.metric.rpartition(" ")
        request = Request(
            header.command,
            metric=metric or None,
            worse=worse or None,
            deterministic="--deterministic" in options,
            first_parent="--first-parent" in options,
            confidence=float(dict(pairwise(options)).get("--confidence", Request.confidence)),
        )
        commits = repository.commits("--first-parent", "--reverse", f"{header.good}..{header.bad}")
        stages = [make_stage(request, repository, repository.commit(header.good), "GOOD", commits)]
        merges: list[Commit] = []
        probability = 1.0
        _record(stages[-1], record)
        while (inside := _guilty_merge(request, repository, stages[-1])) is not None:
            probability *= stages[-1].search.result().probability
            stage = make_stage_inside(request, repository, inside, probability)
            _record(stage, record)
            if stage.search.refusal is not None:
                break  # The merge itself is the culprit.
            stages.append(stage)
            merges.append(inside.merge)
        return LastSearch(repository, record, header, tuple(stages), tuple(merges), options)
    raise UserError("there was no search here yet: start one with `rlcanary bisect --good A --bad B -- CMD`")


def _record(stage: "Stage", record: "Record") -> None:
    in_range = {commit.sha for commit in (stage.good, *stage.commits)}
    for observation in record.observations():
        if observation.commit in in_range:
            stage.search.record(observation.commit, observation.outcome, observation.value)


def _guilty_merge(request: "Request", repository: "Repository", stage: "Stage") -> "Inside | None":
    """What the culprit of a search that is over brought in."""
    from rlcanary.bisect.merges import look_inside

    if request.first_parent or stage.search.tests_left() or stage.search.refusal is not None:
        return None
    culprit = stage.search.result().culprit
    return None if culprit is None else look_inside(repository, repository.commit(culprit))


@contextmanager
def _editing() -> "Iterator[tuple[LastSearch, Journal]]":
    """The last search, locked so that none runs meanwhile."""
    from rlcanary.bisect.journal import Journal, Lock

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


@contextmanager
def _unpaged() -> Iterator[None]:
    yield


def _how_to_go_on(last: LastSearch) -> str:
    ends = ["--good", last.header.good[:10], "--bad", last.header.bad[:10]]
    words = ["rlcanary", "bisect", *ends, *last.options, "--", *last.header.command]
    place = Path(os.path.relpath(last.repository.toplevel / last.header.directory))
    there = "" if place == Path() else f"cd {shlex.quote(str(place))} && "
    return f"go on with: {there}{shlex.join(words)}"
