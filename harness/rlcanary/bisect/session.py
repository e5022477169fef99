"""Run one search from start to end. Every run is journalled, and nothing is left behind."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rlcanary.bisect.line.descent import Descent
from rlcanary.bisect.line.merges import Inside, why_not_searched
from rlcanary.bisect.line.stage import make_stage
from rlcanary.bisect.open_places import open_places
from rlcanary.bisect.plan import Plan
from rlcanary.bisect.preparation import prepare
from rlcanary.bisect.record.journal import Header, Lock, Observation, set_test_variables
from rlcanary.bisect.request import Request
from rlcanary.bisect.resume import open_journal, resume_line, save_log
from rlcanary.bisect.runs.environments import EnvironmentCache, default_cache_folder, environment_keys
from rlcanary.bisect.runs.places import Place
from rlcanary.bisect.runs.pool import Finished, Pool
from rlcanary.bisect.search.verdict import Contradiction, Refusal, Verdict
from rlcanary.bisect.view.progress import Display, Progress
from rlcanary.bisect.view.refusals import NOT_FOUND, Contradicted, Refused, explain, explain_merge
from rlcanary.bisect.view.report import Merge, Report
from rlcanary.errors import UserError
from rlcanary.jobs.outcomes import EVIDENCE, Outcome
from rlcanary.system.git import Commit, GitError
from rlcanary.system.sessions import Interrupted, Interrupts

RETRIES = 2
MOST_RUNS = 500
"""The most runs of a search without --budget-runs. A search that has not found the commit by then rarely will."""
CUT_SHORT = ("interrupted", "budget", "aborted")
"""The statuses of searches that the same command resumes."""


class BudgetSpent(Exception):
    """The limit of --budget-runs or --budget-minutes is reached."""


class Aborted(Exception):
    """The outcome table ends the whole search."""


class Session:
    """Holds the lock, the journal and the places of one search while it runs."""

    def __init__(self, request: Request, plan: Plan, display: Display, interrupts: Interrupts) -> None:
        self._request = request
        self._plan = plan
        self._display = display
        self._interrupts = interrupts
        self._names = {commit.sha: commit for commit in (plan.good, *plan.commits)}
        self._runs = 0
        self._took: list[float] = []
        self._began = time.monotonic()
        self._failures: Counter[str] = Counter()
        self._entered: set[str] = set()
        self._trusted = plan.trusted & {plan.good.sha, plan.bad.sha}

    def run(self) -> Report:
        """Search and return the report. The places are removed and the outcomes are saved, even after an error.

        Raises:
            UserError: The search cannot run, or git or the disk failed.
        """
        plan, request, repository = self._plan, self._request, self._plan.repository
        store = repository.common_dir / "rlcanary" / "bisect"
        with ExitStack() as stack:
            lock = Lock(repository.git_dir / "rlcanary" / "bisect.lock")
            stack.callback(lock.release)
            prepared = prepare(request, plan, store / "pinned")
            for text in prepared.notices:
                self._display.notice(text)
            self._header = Header(
                plan.root,
                plan.good.sha,
                plan.bad.sha,
                request.command,
                str(repository.directory),
                tuple((file.relative, file.digest) for file in prepared.command.pinned),
                f"{request.metric} {request.worse}" if request.metric else "",
                set_test_variables(),
            )
            self._journal = open_journal(store, self._header, request, plan, self._trusted, self._display)
            stack.callback(self._journal.close)
            reused = len(self._journal.observations())
            places = stack.enter_context(open_places(request, repository, self._journal, self._display))
            self._environments = None
            if plan.builder is not None:
                folder = (request.env_dir or default_cache_folder()).absolute()
                self._environments = EnvironmentCache(folder, plan.builder, plan.keys)
            probe = prepared.probe(request, plan, self._journal, self._environments)
            self._pool = Pool(probe, places, self._interrupts, self._next_number())
            stack.callback(self._pool.stop)
            return self._report(reused, places)

    def _report(self, reused: int, places: Sequence[Place]) -> Report:
        plan = self._plan
        first = make_stage(
            self._request, plan.repository, plan.good, plan.good_name, plan.commits, trusted=self._trusted
        )
        self._descent = Descent(self._request, plan.repository, first)
        verdict = Verdict(tuple(commit.sha for commit in plan.commits))
        message, goes_on = "", False
        try:
            verdict = self._search()
        except Interrupted as interruption:
            status, message, code = "interrupted", str(interruption), interruption.exit_code
        except BudgetSpent as spent:
            status, message, code = "budget", str(spent), 1
        except Aborted as abortion:
            status, message, code = "aborted", str(abortion), 2
        except Refused as refusal:
            status, message, code = "refused", str(refusal), 2
            goes_on = isinstance(refusal, Contradicted)  # The same command without --deterministic resumes it.
        except (GitError, OSError) as error:
            raise UserError(f"{error}; {self._keep_what_is_known()}") from error
        else:
            status = "found" if verdict.culprit else "relapse" if verdict.relapse else "range"
            code = 0 if verdict.culprit else 1
        self._stop()
        if status in CUT_SHORT:
            verdict = self._descent.verdict()
            self._journal.append("interrupted", reason=message)
        saved = None if status == "refused" else self._save_log()
        if status not in CUT_SHORT and not goes_on:
            suspects = list(verdict.suspects)
            self._journal.append("end", status=status, reason=message, suspects=suspects, log=str(saved or ""))
        if status in CUT_SHORT and saved is not None:
            message = f"{message}; resume with: {resume_line(self._request, saved)}"
        if verdict.culprit and self._request.keep_worktree:
            places[0].prepare(verdict.culprit)
        observations = tuple(self._journal.observations())
        return Report(
            status=status,
            exit_code=code,
            message=message,
            suspects=tuple(self._names[sha] for sha in verdict.suspects),
            observations=observations,
            runs=self._runs,
            reused=reused,
            seconds=sum(observation.seconds for observation in observations),
            wall_seconds=time.monotonic() - self._began,
            log=saved,
            journal=self._journal.path,
            probability=verdict.probability,
            posterior=verdict.posterior,
            estimates=verdict.estimates,
            relapse=None
            if verdict.relapse is None
            else (self._names[verdict.relapse[0]], self._names[verdict.relapse[1]]),
            merges=self._merges(verdict.culprit),
            environments_built=0 if self._environments is None else self._environments.builds,
            commits=self._names,
        )

    def _keep_what_is_known(self) -> str:
        """Save the log and describe how to continue after git or the disk failed."""
        try:
            self._stop()
            log = save_log(self._plan, self._header, self._journal)
        except OSError as error:
            return f"no log could be written either ({error}): mend that and give the same command again"
        return f"what was learned is kept, resume with: {resume_line(self._request, log)}"

    def _save_log(self) -> Path:
        """Write the log. A finished search that is only shown again keeps the log it has."""
        end = self._journal.last("end")
        saved = Path((end or {}).get("log", ""))
        return saved if not self._runs and saved.is_file() else save_log(self._plan, self._header, self._journal)

    def _stop(self) -> None:
        """Stop all running probes. Results of those that had finished are kept."""
        for result in self._pool.stop():
            if result.observation is not None and result.observation.outcome in EVIDENCE:
                self._journal.record(result.observation)

    def _search(self) -> Verdict:
        """Search the first parents, then inside the guilty merge."""
        descent = self._descent
        for observation in self._journal.observations():
            self._take_up(observation)
        self._run_stage()
        depth = 0
        while self._advance():
            if len(descent.insides) < depth:
                self._display.notice("what ran inside speaks against the merge: back to the search that ended at it")
            elif descent.insides:
                self._enter(descent.insides[-1])
            depth = len(descent.insides)
            self._run_stage()
        if (refusal := descent.stage.search.refusal) is not None:
            self._refuse(refusal)
        return descent.verdict()

    def _enter(self, inside: Inside) -> None:
        """Prepare to test the commits that a merge brought in."""
        if inside.merge.sha in self._entered:
            return
        self._entered.add(inside.merge.sha)
        self._names |= {commit.sha: commit for commit in (inside.good, *inside.commits)}
        if self._environments is not None and self._plan.builder is not None:
            keys = environment_keys(self._plan.builder, self._plan.repository, inside.good, inside.commits)
            self._environments.add(keys)
        self._display.notice(
            f"{inside.merge.short} is a merge: looking at the {len(inside.commits)} commits that it brought in"
        )

    def _merges(self, culprit: str | None) -> tuple[Merge, ...]:
        """List the guilty merges, outermost first, with a note on the parts that were not searched."""
        merges = [Merge(merge, "") for merge in self._descent.merges]
        if (closed := self._descent.closed) is not None:
            note = explain_merge(closed.refusal, closed.inside, self._journal)
            merges.append(Merge(closed.inside.merge, note))
        elif culprit is not None and (note := why_not_searched(self._plan.repository, culprit)):
            merges.append(Merge(self._names[culprit], note))
        return tuple(merges)

    def _run_stage(self) -> None:
        """Run probes until the innermost search is over, or an outer search has to go on."""
        pool = self._pool
        changed = True
        while True:
            self._interrupts.check()
            self._end_in_time()
            running = [probe.commit.sha for probe in pool.running]
            if changed:
                for sha in self._cancel_worthless(running):
                    running.remove(sha)
                if pool.free and self._descent.reopened is None:
                    self._start_more(running)
                self._show_progress()
            if pool.is_idle:
                return
            finished = [self._keep(result) for result in pool.wait()]
            changed = bool(finished)
            for result in finished:
                self._use(result)

    def _start_more(self, running: list[str]) -> None:
        ready = () if self._environments is None else self._environments.built()
        wanted = self._descent.stage.search.next_commits(self._pool.free, running, ready)
        for sha in wanted:
            if (spent := self._spent()) is not None:
                if self._pool.is_idle:
                    raise BudgetSpent(spent)
                return
            self._start(self._names[sha])

    def _start(self, commit: Commit) -> None:
        self._runs += 1
        number = self._pool.start(commit)
        self._journal.append("run", commit=commit.sha, run=number)

    def _cancel_worthless(self, running: Sequence[str]) -> list[str]:
        if not running:
            return []
        worthless = Counter(self._descent.stage.search.worthless(running))
        cancelled: list[str] = []
        for probe in self._pool.running:
            if worthless[probe.commit.sha] > 0:
                worthless[probe.commit.sha] -= 1
                cancelled.append(probe.commit.sha)
                probe.cancellation.cancel()
        return cancelled

    def _spent(self) -> str | None:
        """Return why no more runs may start, or None."""
        runs, minutes = self._request.budget_runs, self._request.budget_minutes
        if runs is None and self._runs >= MOST_RUNS:
            return (
                f"{MOST_RUNS} runs did not settle it: the command tells good commits from bad ones too seldom; make it "
                "less flaky, or allow more with --budget-runs N"
            )
        if runs is not None and self._runs >= runs:
            return f"the budget of {runs} runs is spent"
        expected = sum(self._took) / len(self._took) if self._took else 0.0
        if minutes is not None and time.monotonic() - self._began + expected > 60 * minutes:
            return f"the budget of {minutes:g} minutes is spent, or would be by the next run"
        return None

    def _end_in_time(self) -> None:
        """Stop the running probes when --budget-minutes is over."""
        minutes = self._request.budget_minutes
        if minutes is not None and time.monotonic() - self._began > 60 * minutes:
            raise BudgetSpent(f"the budget of {minutes:g} minutes is spent")

    def _keep(self, result: Finished) -> Finished:
        """Write the result of a probe to the journal. A commit with too many infrastructure failures is untestable."""
        observation = result.observation
        if observation is None:
            self._journal.append("cancelled", commit=result.commit.sha, run=result.number)
            self._display.cancelled(result.number, result.commit)
            return result
        if observation.outcome is Outcome.INFRA:
            self._failures[result.commit.sha] += 1
            if (attempts := self._failures[result.commit.sha]) > RETRIES:
                reason = f"{observation.reason}, {attempts} times"
                observation = replace(observation, outcome=Outcome.UNTESTABLE, reason=reason)
        else:
            self._failures[result.commit.sha] = 0
        self._journal.record(observation)
        self._took.append(observation.seconds)
        self._display.finished(result.number, result.commit, observation)
        return replace(result, observation=observation)

    def _use(self, result: Finished) -> None:
        """Pass an observation on to the search."""
        observation = result.observation
        if observation is None:
            return
        if observation.outcome is Outcome.ABORT:
            raise Aborted(f"stopped: {observation.reason} on {result.commit.short}")
        if observation.outcome is not Outcome.INFRA:
            self._take_up(observation)
        elif self._spent() is None:
            self._start(result.commit)

    def _take_up(self, observation: Observation) -> None:
        try:
            self._descent.record(observation)
        except Contradiction as contradiction:
            raise Contradicted.by(contradiction) from None

    def _advance(self) -> bool:
        try:
            return self._descent.advance()
        except Contradiction as contradiction:
            raise Contradicted.by(contradiction) from None

    def _refuse(self, refusal: Refusal) -> None:
        stage = self._descent.stage
        end, name = (stage.good, stage.good_name) if refusal.startswith("good") else (stage.bad, "BAD")
        if refusal is Refusal.GOOD_UNTESTABLE:
            self._try_other_end()
        outputs = [o.output for o in self._journal.observations() if o.commit == end.sha and o.output]
        if outputs and refusal is not Refusal.ALIKE:
            self._display.tail(Path(outputs[-1]), f"output on {name}")
        message = explain(refusal, stage.good, stage.good_name, stage.bad, self._journal, self._request.worse)
        if self._environments is not None and refusal is Refusal.GOOD_FAILS:
            message += f". It ran in an environment built with {self._environments.builder}: --env none uses yours"
        raise Refused(message)

    def _try_other_end(self) -> None:
        """Run BAD once if GOOD lacks the command, to tell a missing file from a misspelt command."""
        bad, observations = self._descent.stage.bad, self._journal.observations()
        reasons = [
            observation.reason for observation in observations if observation.commit == self._descent.stage.good.sha
        ]
        if any(o.commit == bad.sha for o in observations) or not reasons[-1].startswith(NOT_FOUND):
            return
        self._start(bad)
        while not self._pool.is_idle:
            self._interrupts.check()
            for result in self._pool.wait():
                self._keep(result)

    def _show_progress(self) -> None:
        search = self._descent.stage.search
        left = search.tests_left()
        seconds = sum(self._took) / len(self._took) * left / self._request.jobs if self._took else None
        running = tuple(probe.commit for probe in self._pool.running)
        verdict = search.result()
        self._display.progress(
            Progress(
                running, self._runs, left, seconds, sum(self._took), self._descent.stage.commits, verdict.posterior
            )
        )

    def _next_number(self) -> int:
        numbers = [event["run"] for event in self._journal.events() if event["event"] in ("run", "observation")]
        return 1 + max(numbers, default=0)
