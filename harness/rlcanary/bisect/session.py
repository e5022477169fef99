"""Run one search from start to end. Every run is journalled, and nothing is left behind."""

import time
from dataclasses import dataclass
from pathlib import Path

from rlcanary.bisect.line.merges import why_not_searched
from rlcanary.bisect.loop import Aborted, BudgetSpent, Loop
from rlcanary.bisect.opening import OpenSearch, open_search
from rlcanary.bisect.plan import Plan
from rlcanary.bisect.request import Request
from rlcanary.bisect.resume import resume_line, save_log
from rlcanary.bisect.search.verdict import Contradiction, Verdict
from rlcanary.bisect.view.progress import Display
from rlcanary.bisect.view.refusals import Refused, explain_merge
from rlcanary.bisect.view.report import Merge, Report
from rlcanary.errors import UserError
from rlcanary.system.git import GitError
from rlcanary.system.sessions import Interrupted, Interrupts


@dataclass(frozen=True)
class End:
    """The way a search ended."""

    status: str
    exit_code: int
    message: str = ""
    verdict: Verdict | None = None
    """None if the search did not reach its end."""
    is_resumed: bool = False
    """Whether the same command, perhaps with other options, goes on with the search."""

    @property
    def is_cut_short(self) -> bool:
        return self.is_resumed and self.status != "refused"


def run_search(request: Request, plan: Plan, display: Display, interrupts: Interrupts) -> Report:
    """Search and return the report. The places are removed and the outcomes are saved, even after an error.

    Raises:
        UserError: The search cannot run, or git or the disk failed.
    """
    began = time.monotonic()
    with open_search(request, plan, display, interrupts) as search:
        reused = len(search.journal.observations())
        loop = Loop(search, began)
        try:
            end = _run(loop)
        except (GitError, OSError) as error:
            raise UserError(f"{error}; {_keep_what_is_known(search, loop)}") from error
        loop.stop()
        verdict = end.verdict or Verdict(tuple(commit.sha for commit in plan.commits))
        if end.is_cut_short:
            verdict = search.descent.verdict()
            search.journal.append("interrupted", reason=end.message)
        log = None if end.status == "refused" else _save_log(search, loop)
        if not end.is_resumed:
            suspects = list(verdict.suspects)
            search.journal.append("end", status=end.status, reason=end.message, suspects=suspects, log=str(log or ""))
        resume = f"; resume with: {resume_line(request, log)}" if end.is_cut_short and log is not None else ""
        if verdict.culprit and request.keep_worktree:
            search.places[0].prepare(verdict.culprit)
        observations = tuple(search.journal.observations())
        return Report(
            status=end.status,
            exit_code=end.exit_code,
            message=end.message + resume,
            suspects=tuple(loop.names[sha] for sha in verdict.suspects),
            observations=observations,
            runs=loop.runs,
            reused=reused,
            seconds=sum(observation.seconds for observation in observations),
            wall_seconds=round(time.monotonic() - began, 3),
            log=log,
            journal=search.journal.path,
            probability=verdict.probability,
            posterior=verdict.posterior,
            estimates=verdict.estimates,
            relapse=verdict.relapse and (loop.names[verdict.relapse[0]], loop.names[verdict.relapse[1]]),
            steps=verdict.steps,
            merges=_merges(search, loop, verdict.culprit),
            environments_built=0 if search.environments is None else search.environments.builds,
            commits=loop.names,
        )


def _run(loop: Loop) -> End:
    try:
        verdict = loop.run()
    except Interrupted as interruption:
        return End("interrupted", interruption.exit_code, str(interruption), is_resumed=True)
    except BudgetSpent as spent:
        return End("budget", 1, str(spent), is_resumed=True)
    except Aborted as abortion:
        return End("aborted", 2, str(abortion), is_resumed=True)
    except Refused as refusal:
        return End("refused", 2, str(refusal))
    except Contradiction as contradiction:
        advice = "leave --deterministic out, or edit the log and replay it"
        return End("refused", 2, f"the runs contradict each other: {contradiction}; {advice}", is_resumed=True)
    status = "steps" if verdict.steps else "relapse" if verdict.relapse else "range"
    status = "found" if verdict.culprit else status
    return End(status, 0 if verdict.culprit else 1, verdict=verdict)


def _keep_what_is_known(search: OpenSearch, loop: Loop) -> str:
    """Save the log and describe how to continue after git or the disk failed."""
    try:
        loop.stop()
        log = save_log(search.plan, search.header, search.journal, search.request.in_place)
    except OSError as error:
        return f"no log could be written either ({error}): fix that and repeat the command"
    return f"the outcomes are kept; resume with: {resume_line(search.request, log)}"


def _save_log(search: OpenSearch, loop: Loop) -> Path:
    """Write the log. A finished search that is only shown again keeps the log it has.

    Raises:
        UserError: The log cannot be written.
    """
    saved = Path((search.journal.last("end") or {}).get("log", ""))
    if not loop.runs and saved.is_file():
        return saved
    try:
        return save_log(search.plan, search.header, search.journal, search.request.in_place)
    except OSError as error:
        raise UserError(f"no log could be written ({error}): fix that and repeat the command") from error


def _merges(search: OpenSearch, loop: Loop, culprit: str | None) -> tuple[Merge, ...]:
    """List the guilty merges, outermost first, with a note on the parts that were not searched."""
    merges = [Merge(merge, "") for merge in search.descent.merges]
    if (closed := search.descent.closed) is not None:
        note = explain_merge(closed.refusal, closed.inside, search.journal)
        merges.append(Merge(closed.inside.merge, note))
    elif culprit is not None and (note := why_not_searched(search.plan.repository, culprit)):
        merges.append(Merge(loop.names[culprit], note))
    return tuple(merges)
