"""Run probes until a search is over: choose commits, journal what their runs show, pass it on to the search."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rlcanary.bisect.line.merges import Inside
from rlcanary.bisect.opening import OpenSearch
from rlcanary.bisect.runs.environments import environment_keys
from rlcanary.bisect.runs.pool import Finished
from rlcanary.bisect.search.verdict import Refusal, Verdict
from rlcanary.bisect.view.progress import Progress
from rlcanary.bisect.view.refusals import NOT_FOUND, Refused, explain
from rlcanary.jobs.outcomes import EVIDENCE, Outcome
from rlcanary.system.git import Commit

MOST_RUNS = 500
"""The most runs of a search without --budget-runs. A search that has not found the commit by then rarely will."""


class BudgetSpent(Exception):
    """The limit of --budget-runs or --budget-minutes is reached."""


class Aborted(Exception):
    """The outcome table ends the whole search."""


class Loop:
    """Runs the probes of one search. Every run is journalled.

    Args:
        search: The search.
        began: The monotonic time at which it began.
    """

    def __init__(self, search: OpenSearch, began: float) -> None:
        plan = search.plan
        self.names = {commit.sha: commit for commit in (plan.good, *plan.commits)}
        """The commits that the search may run, by SHA."""
        self.runs = 0
        self._open = search
        self._began = began
        self._took: list[float] = []
        self._failures: Counter[str] = Counter()
        self._entered: set[str] = set()

    def run(self) -> Verdict:
        """Search the first parents, then inside the guilty merge.

        Raises:
            BudgetSpent: A limit is reached.
            Aborted: The outcome table ends the search.
            Refused: The search cannot start from these ends.
            Contradiction: Every run is believed, and two contradict each other.
            Interrupted: A signal came.
            GitError: git failed.
            OSError: The disk failed.
        """
        descent = self._open.descent
        for observation in self._open.journal.observations():
            descent.record(observation)
        self._run_stage()
        depth = 0
        while descent.advance():
            if len(descent.insides) < depth:
                self._open.display.notice("runs inside the merge contradict it: resuming the outer search")
            elif descent.insides:
                self._enter(descent.insides[-1])
            depth = len(descent.insides)
            self._run_stage()
        if (refusal := descent.stage.search.refusal) is not None:
            self._refuse(refusal)
        return descent.verdict()

    def stop(self) -> None:
        """Stop all running probes. Results of those that had finished are kept."""
        for result in self._open.pool.stop():
            if result.observation is not None and result.observation.outcome in EVIDENCE:
                self._open.journal.record(result.observation)

    def _enter(self, inside: Inside) -> None:
        """Prepare to test the commits that a merge brought in."""
        if inside.merge.sha in self._entered:
            return
        self._entered.add(inside.merge.sha)
        self.names |= {commit.sha: commit for commit in (inside.good, *inside.commits)}
        if self._open.environments is not None and self._open.plan.builder is not None:
            keys = environment_keys(self._open.plan.builder, self._open.plan.repository, inside.good, inside.commits)
            self._open.environments.add(keys)
        self._open.display.notice(
            f"{inside.merge.short} is a merge: searching the {len(inside.commits)} commits of its branch"
        )

    def _run_stage(self) -> None:
        """Run probes until the innermost search is over, or an outer search has to go on."""
        pool = self._open.pool
        changed = True
        while True:
            self._open.interrupts.check()
            self._end_in_time()
            running = [probe.commit.sha for probe in pool.running]
            if changed:
                for sha in self._cancel_worthless(running):
                    running.remove(sha)
                if pool.free and self._open.descent.reopened is None:
                    self._start_more(running)
                self._show_progress()
            if pool.is_idle:
                return
            finished = [self._keep(result) for result in pool.wait()]
            changed = bool(finished)
            for result in finished:
                self._use(result)

    def _start_more(self, running: list[str]) -> None:
        ready = () if self._open.environments is None else self._open.environments.built()
        wanted = self._open.descent.stage.search.next_commits(self._open.pool.free, running, ready)
        for sha in wanted:
            if (spent := self._spent()) is not None:
                if self._open.pool.is_idle:
                    raise BudgetSpent(spent)
                return
            self._start(self.names[sha])

    def _start(self, commit: Commit) -> None:
        self.runs += 1
        number = self._open.pool.start(commit)
        self._open.journal.append("run", commit=commit.sha, run=number)

    def _cancel_worthless(self, running: Sequence[str]) -> list[str]:
        if not running:
            return []
        worthless = Counter(self._open.descent.stage.search.worthless(running))
        cancelled: list[str] = []
        for probe in self._open.pool.running:
            if worthless[probe.commit.sha] > 0:
                worthless[probe.commit.sha] -= 1
                cancelled.append(probe.commit.sha)
                probe.cancellation.cancel()
        return cancelled

    def _spent(self) -> str | None:
        """Return why no more runs may start, or None."""
        runs, minutes = self._open.request.budget_runs, self._open.request.budget_minutes
        if runs is None and self.runs >= MOST_RUNS:
            return (
                f"{MOST_RUNS} runs were not enough: the command is too flaky to tell good commits from bad ones; make it "
                "less flaky, or allow more with --budget-runs N"
            )
        if runs is not None and self.runs >= runs:
            return f"the budget of {runs} runs is spent"
        expected = sum(self._took) / len(self._took) if self._took else 0.0
        if minutes is not None and time.monotonic() - self._began + expected > 60 * minutes:
            return f"the budget of {minutes:g} minutes is spent, or would be by the next run"
        return None

    def _end_in_time(self) -> None:
        """Stop the running probes when --budget-minutes is over."""
        minutes = self._open.request.budget_minutes
        if minutes is not None and time.monotonic() - self._began > 60 * minutes:
            raise BudgetSpent(f"the budget of {minutes:g} minutes is spent")

    def _keep(self, result: Finished) -> Finished:
        """Write the result of a probe to the journal. A commit with too many infrastructure failures is untestable."""
        observation = result.observation
        if observation is None:
            self._open.journal.append("cancelled", commit=result.commit.sha, run=result.number)
            self._open.display.cancelled(result.number, result.commit)
            return result
        if observation.outcome is Outcome.INFRA:
            self._failures[result.commit.sha] += 1
            if (attempts := self._failures[result.commit.sha]) > self._open.request.retries:
                reason = observation.reason + (f", {attempts} times" if attempts > 1 else "")
                observation = replace(observation, outcome=Outcome.UNTESTABLE, reason=reason)
        else:
            self._failures[result.commit.sha] = 0
        self._open.journal.record(observation)
        self._took.append(observation.seconds)
        self._open.display.finished(result.number, result.commit, observation)
        return replace(result, observation=observation)

    def _use(self, result: Finished) -> None:
        """Pass an observation on to the search."""
        observation = result.observation
        if observation is None:
            return
        if observation.outcome is Outcome.ABORT:
            raise Aborted(f"stopped: {observation.reason} on {result.commit.short}")
        if observation.outcome is not Outcome.INFRA:
            self._open.descent.record(observation)
        elif self._spent() is None:
            self._start(result.commit)

    def _refuse(self, refusal: Refusal) -> None:
        stage = self._open.descent.stage
        end, name = (stage.good, stage.good_name) if refusal.startswith("good") else (stage.bad, "BAD")
        if refusal is Refusal.GOOD_UNTESTABLE:
            self._try_other_end()
        outputs = [o.output for o in self._open.journal.observations() if o.commit == end.sha and o.output]
        if outputs and refusal is not Refusal.ALIKE:
            self._open.display.tail(Path(outputs[-1]), f"output on {name}")
        message = explain(refusal, stage.good, stage.good_name, stage.bad, self._open.journal, self._open.request.worse)
        if self._open.environments is not None and refusal is Refusal.GOOD_FAILS:
            message += f". It ran in an environment built with {self._open.environments.builder}: --env none uses yours"
        raise Refused(message)

    def _try_other_end(self) -> None:
        """Run BAD once if GOOD lacks the command, to tell a missing file from a misspelt command."""
        bad, observations = self._open.descent.stage.bad, self._open.journal.observations()
        reasons = [
            observation.reason
            for observation in observations
            if observation.commit == self._open.descent.stage.good.sha
        ]
        if any(o.commit == bad.sha for o in observations) or not reasons[-1].startswith(NOT_FOUND):
            return
        self._start(bad)
        while not self._open.pool.is_idle:
            self._open.interrupts.check()
            for result in self._open.pool.wait():
                self._keep(result)

    def _show_progress(self) -> None:
        search = self._open.descent.stage.search
        left = search.tests_left()
        seconds = sum(self._took) / len(self._took) * left / self._open.request.jobs if self._took else None
        running = tuple(probe.commit for probe in self._open.pool.running)
        verdict = search.result()
        self._open.display.progress(
            Progress(
                running, self.runs, left, seconds, sum(self._took), self._open.descent.stage.commits, verdict.posterior
            )
        )
