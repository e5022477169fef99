"""Look for regressions in a history, and say of each what can be done about it."""

import json
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from rlcanary.commands.parts.history_options import warn, with_progress
from rlcanary.errors import UserError
from rlcanary.history.directions import Direction, Rule, direction_of, matches
from rlcanary.history.history import History, metric_name
from rlcanary.history.index import Run
from rlcanary.history.ledger import Ledger, open_ledger, read_ledger
from rlcanary.history.regressions import HISTORY_RUNS, Kind, Regression, Status, find_regressions, judge, too_short
from rlcanary.history.repository import top_level
from rlcanary.history.run_result import read_json
from rlcanary.recording.keys import plain_key
from rlcanary.recording.provenance import environment_change
from rlcanary.system.pytest_settings import Settings

PROBE = "regress_probe.json"


class Notes(dict[str, str]):
    """Additional facts about a regression.

    The keys are `command`, or `no_command` (the reason for its absence). `environment` and `tests` (the tests that
    share the key) are present if there is something to report.
    """


class Look(NamedTuple):
    """The result of a look at some metrics: the regressions, most urgent first, and how many metrics were judged."""

    found: list[Regression]
    notes: list[Notes]
    judged: int
    short: int
    left_out: list[str]


def look(
    history: History,
    pairs: Sequence[tuple[str, str]],
    rules: Sequence[Rule],
    settings: Settings,
    *,
    least_change: float = 0.001,
    recent: int = 30,
    keep: bool = True,
    acknowledge: tuple[str, str] | None = None,
) -> Look:
    """Looks for regressions of metrics, and brings the ledger of alarms up to date if `keep` is set.

    Args:
        history: The runs.
        pairs: The metrics, by test key and name.
        rules: Which way metrics are better.
        settings: pytest's settings.
        least_change: Smaller changes, as a share of the level, are passed over.
        recent: In a metric that is looked at for the first time, a change counts as new within this many runs.
        keep: Write to the ledger.
        acknowledge: Acknowledge the open alarms of the metrics that match this pattern, with this note.
    """
    found, left_out, short, looked_at = [], [], 0, []
    known = history.names()
    directed = sum(direction_of(*pair, rules) not in (None, Direction.IGNORE) for pair in known)
    newest = HISTORY_RUNS if len(history.runs) > HISTORY_RUNS else 0
    for pair in with_progress(pairs, "looking for changes", many=50):
        series = history.numbers(*pair, newest=newest)
        if series is None:
            continue
        if series.left_out:
            left_out.append(series.left_out)
        looked_at.append(metric_name(*pair))
        short += too_short(series)
        found += find_regressions(series, direction_of(*pair, rules), least_change)
    newest_run = history.runs[-1]

    def judged_by(ledger: Ledger) -> list[Regression]:
        if acknowledge is not None:
            _acknowledge(ledger, *acknowledge, newest_run)
        return judge(found, ledger, set(looked_at), max(directed, 1), newest_run, recent)

    judged = _with_ledger(history.folder, keep, judged_by)
    judged.sort(key=lambda regression: (list(Status).index(regression.status), regression.series.name))
    notes = [notes_on(regression, history, settings) for regression in judged]
    return Look(judged, notes, len(looked_at) - short, short, left_out)


def _with_ledger(folder: Path, keep: bool, judged_by: Callable[[Ledger], list[Regression]]) -> list[Regression]:
    """Judges with the ledger; one that cannot be written, as on a full disk, is read, with a warning."""
    if keep:
        try:
            with open_ledger(folder) as ledger:
                return judged_by(ledger)
        except OSError as error:
            told = f"{folder} cannot be written ({error.strerror})"
            warn([f"{told}, so what is new today will be new again tomorrow"])
    return judged_by(read_ledger(folder))


def _acknowledge(ledger: Ledger, pattern: str, note: str, newest_run: Run) -> None:
    """Acknowledges the open alarms of some metrics.

    Raises:
        UserError: There is none.
    """
    chosen = [alarm for alarm in ledger.open_alarms() if matches(pattern, alarm.metric) and "known" in alarm.events]
    if not chosen:
        known = ", ".join(sorted({alarm.metric for alarm in ledger.open_alarms() if "known" in alarm.events}))
        raise UserError(f"no alarm to acknowledge matches {pattern!r}; known are {known or 'none'}")
    for alarm in chosen:
        ledger.note_event(alarm, "acknowledged", newest_run.run_id, newest_run.started_s, note)


def notes_on(regression: Regression, history: History, settings: Settings) -> Notes:
    notes = Notes()
    good, bad = regression.last_good.run, regression.first_bad.run
    if good.environment and bad.environment and good.environment != bad.environment:
        documents = [read_json(history.folder / run.file) for run in (good, bad)]
        notes["environment"] = environment_change(*(getattr(read, "document", {}) for read in documents))
    if len(regression.series.nodeids) > 1:
        notes["tests"] = regression.series.mixed_tests
    if not regression.series.nodeids:
        notes["no_command"] = (
            "no test is recorded for this metric; bisect with a command of your own between the two commits"
        )
    elif regression.status is Status.UNCONFIRMED:
        notes["command"] = from_root(f"pytest {shlex.quote(list(regression.series.nodeids)[-1])}", settings.root)
    elif regression.kind is Kind.DRIFT:
        notes["no_command"] = "it drifts, so no one commit is to blame"
    elif not (good.git_commit and bad.git_commit):
        notes["no_command"] = "no commit was recorded, so there is nothing to bisect"
    elif good.git_commit == bad.git_commit:
        notes["no_command"] = f"both runs are of commit {good.git_commit[:10]}: the change is not in the code" + (
            ", unless in uncommitted files (+)" if good.dirty or bad.dirty else ""
        )
    else:
        notes["command"] = from_root(bisect_command(regression), settings.root)
    return notes


def bisect_command(regression: Regression) -> str:
    """Return a shell command that bisects the metric on its value, or on being finite if it no longer is."""
    nodeid = list(regression.series.nodeids)[-1]
    commits = [point.run.git_commit or "" for point in (regression.last_good, regression.first_bad)]
    ends = f"rlcanary bisect --good {shlex.quote(commits[0][:12])} --bad {shlex.quote(commits[1][:12])}"
    if regression.after is None:
        value = f"data[{quoted('metrics')}][{quoted(plain_key(nodeid))}][{quoted(regression.series.metric)}]"
        probe = (
            f"pytest {shlex.quote(nodeid)} --rlcanary-results={PROBE}; [ $? -le 1 ] || exit 125; "
            f"rlcanary check-metrics {PROBE} {shlex.quote(f'abs({value}) >= 0')}"  # True for finite values.
        )
        return f"{ends} -- bash -c {shlex.quote(probe)}"
    worse = "higher" if regression.rises else "lower"
    name = metric_name(plain_key(nodeid), regression.series.metric)
    return f"{ends} --metric {shlex.quote(name)} --worse {worse} -- pytest {shlex.quote(nodeid)}"


def from_root(command: str, root: Path) -> str:
    """Returns a shell command that runs in the root of pytest's settings."""
    here = Path.cwd()
    place = root if top_level(here) == top_level(root) else here
    return command if place == here else f"cd {shlex.quote(os.path.relpath(place, here))} && {command}"


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
