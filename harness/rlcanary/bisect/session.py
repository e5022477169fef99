"""One search from start to end: every run journalled, nothing left behind."""

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from rlcanary.bisect.display import Display, Progress
from rlcanary.bisect.environments import EnvironmentCache, default_cache_folder, environment_keys
from rlcanary.bisect.git import Commit, GitError
from rlcanary.bisect.import_paths import find_import_paths
from rlcanary.bisect.journal import Header, Journal, Lock, Observation, now, open_idle
from rlcanary.bisect.merges import Inside, look_inside
from rlcanary.bisect.outcomes import Outcome, find_runners
from rlcanary.bisect.pinned import Command, prepare_command
from rlcanary.bisect.places import Checkout, Place
from rlcanary.bisect.plan import Plan, Request
from rlcanary.bisect.pool import Finished, Pool
from rlcanary.bisect.probe import Probe
from rlcanary.bisect.process import Interrupted, Interrupts, Stopped
from rlcanary.bisect.refusals import Refused, explain
from rlcanary.bisect.report import Merge, Report
from rlcanary.bisect.resume import clear_up, mark_of, resume_line, save_log
from rlcanary.bisect.search import Contradiction, Refusal, Verdict
from rlcanary.bisect.searches import make_stage
from rlcanary.bisect.worktree import Worktree
from rlcanary.errors import UserError

RETRIES = 2


class BudgetSpent(Exception):
    """The runs or minutes that were granted are used up."""


class Aborted(Exception):
    """The outcome table says to stop the whole search."""


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
        self._merges: list[Merge] = []

    def run(self) -> Report:
        """Search, and report. Raises UserError; whatever happens, the places are gone and what was learned is saved."""
        plan, request, repository = self._plan, self._request, self._plan.repository
        store = repository.common_dir / "rlcanary" / "bisect"
        with ExitStack() as stack:
            lock = Lock(repository.git_dir / "rlcanary" / "bisect.lock")
            stack.callback(lock.release)
            command = self._prepare_command(store / "pinned")
            self._header = Header(
                plan.root,
                plan.good.sha,
                plan.bad.sha,
                request.command,
                str(repository.directory),
                tuple((file.relative, file.digest) for file in command.pinned),
                f"{request.metric} {request.worse}" if request.metric else "",
            )
            self._journal = self._open_journal(store)
            stack.callback(self._journal.close)
            reused = len(self._journal.observations())
            places: list[Place] = []
            stack.callback(lambda: self._finish_places(places))
            self._make_places(places)
            self._pool = Pool(self._make_probe(command), places, self._interrupts, self._next_number())
            stack.callback(self._pool.stop)
            return self._report(reused, places)

    def _report(self, reused: int, places: Sequence[Place]) -> Report:
        plan = self._plan
        trusted = {plan.good.sha} if self._request.skip_good_check else set()
        trusted |= {plan.good.sha, plan.bad.sha} if plan.trusts_ends else set()
        self._stage = make_stage(self._request, plan.repository, plan.good, plan.good_name, plan.commits, trusted)
        message, suspects, log, relapse = "", plan.commits, None, None
        verdict = Verdict(tuple(commit.sha for commit in plan.commits))
        try:
            verdict = self._search()
        except Interrupted as interruption:
            status, message, code = "interrupted", str(interruption), interruption.exit_code
            self._pool.stop()
            self._journal.append("interrupted", reason=message)
        except BudgetSpent as spent:
            status, message, code = "budget", str(spent), 1
            verdict = self._stage.search.result()
            self._journal.append("interrupted", reason=message)
        except Refused as refusal:
            status, message, code = "refused", str(refusal), 2
            self._journal.append("end", status=status, reason=message)
        except (GitError, OSError, Aborted) as error:
            log = save_log(plan, self._header, self._journal)
            line = resume_line(self._request, log)
            raise UserError(f"{error}; what was learned is kept, resume with: {line}") from error
        else:
            relapse = verdict.relapse
            status = "found" if verdict.culprit else "relapse" if relapse else "range"
            code = 0 if verdict.culprit else 1
            self._journal.append("end", status=status, suspects=list(verdict.suspects))
            if verdict.culprit and self._request.keep_worktree:
                places[0].prepare(verdict.culprit)
        if status in ("found", "range", "relapse", "budget"):
            suspects = tuple(self._names[sha] for sha in verdict.suspects)
        if status != "refused":
            log = save_log(plan, self._header, self._journal)
        if status in ("interrupted", "budget") and log is not None:
            message = f"{message}; resume with: {resume_line(self._request, log)}"
        observations = tuple(self._journal.observations())
        return Report(
            status,
            code,
            message,
            suspects,
            observations,
            self._runs,
            reused,
            sum(observation.seconds for observation in observations),
            log,
            self._journal.path,
            verdict.probability,
            verdict.posterior,
            verdict.estimates,
            None if relapse is None else (self._names[relapse[0]], self._names[relapse[1]]),
            tuple(self._merges),
            0 if self._environments is None else self._environments.builds,
            self._names,
        )

    def _search(self) -> Verdict:
        """Along the first parents, then into the guilty merge."""
        self._run_stage()
        if (refusal := self._stage.search.refusal) is not None:
            self._refuse(refusal)
        verdict = self._stage.search.result()
        while verdict.culprit is not None and not self._request.first_parent:
            inside = look_inside(self._plan.repository, self._names[verdict.culprit])
            if inside is None:
                break
            found = self._search_inside(inside)
            if found is None:
                break
            verdict = found
        return verdict

    def _search_inside(self, inside: Inside) -> Verdict | None:
        """The verdict on the branch that a merge brought in; None where it is the merge itself."""
        outer = self._stage
        self._names |= {commit.sha: commit for commit in (inside.good, *inside.commits)}
        if self._environments is not None and self._plan.builder is not None:
            keys = environment_keys(self._plan.builder, self._plan.repository, inside.good, inside.commits)
            self._environments.add(keys)
        self._display.notice(
            f"{inside.merge.short} is a merge: looking at the {len(inside.commits)} commits that it brought in"
        )
        name = "the commit that the branch left"
        self._stage = make_stage(self._request, self._plan.repository, inside.good, name, inside.commits)
        self._run_stage()
        refusal = self._stage.search.refusal
        if refusal is None:
            self._merges.append(Merge(inside.merge, ""))
            return self._stage.search.result()
        self._stage = outer
        if refusal is Refusal.BAD_PASSES:
            note = "both sides pass, and what they make together fails"
        else:
            note = explain(refusal, inside.good, name, inside.commits[-1], self._journal)
        self._merges.append(Merge(inside.merge, note))
        return None

    def _run_stage(self) -> None:
        """Probe until the search of this stage is over."""
        stage, pool = self._stage, self._pool
        in_range = {stage.good.sha, *(commit.sha for commit in stage.commits)}
        for observation in self._journal.observations():
            if observation.commit in in_range:
                self._take_up(observation)
        changed = True
        while True:
            self._interrupts.check()
            self._end_in_time()
            running = [probe.commit.sha for probe in pool.running]
            if changed:
                for sha in self._cancel_worthless(running):
                    running.remove(sha)
                if pool.free:
                    self._start_more(running)
                self._show_progress()
            if pool.is_idle:
                if stage.search.refusal is not None or not stage.wants_ends_confirmed():
                    return
                changed = True
                continue
            finished = pool.wait()
            changed = bool(finished)
            for result in finished:
                self._take(result)

    def _start_more(self, running: list[str]) -> None:
        ready = () if self._environments is None else self._environments.built()
        wanted = self._stage.search.next_commits(self._pool.free, running, ready)
        for sha in wanted:
            if (spent := self._spent()) is not None:
                if self._pool.is_idle:
                    raise BudgetSpent(spent)
                return
            self._start(self._names[sha])

    def _start(self, commit: Commit) -> None:
        self._runs += 1
        self._pool.start(commit)

    def _cancel_worthless(self, running: Sequence[str]) -> list[str]:
        if not running:
            return []
        worthless = Counter(self._stage.search.worthless(running))
        cancelled: list[str] = []
        for probe in self._pool.running:
            if worthless[probe.commit.sha] > 0:
                worthless[probe.commit.sha] -= 1
                cancelled.append(probe.commit.sha)
                probe.cancellation.cancel()
        return cancelled

    def _spent(self) -> str | None:
        """Why no run more may start, or None."""
        runs, minutes = self._request.budget_runs, self._request.budget_minutes
        if runs is not None and self._runs >= runs:
            return f"the budget of {runs} runs is spent"
        expected = sum(self._took) / len(self._took) if self._took else 0.0
        if minutes is not None and time.monotonic() - self._began + expected > 60 * minutes:
            return f"the budget of {minutes:g} minutes is spent, or would be by the next run"
        return None

    def _end_in_time(self) -> None:
        """End what runs when the granted minutes are over."""
        minutes = self._request.budget_minutes
        if minutes is not None and time.monotonic() - self._began > 60 * minutes:
            self._pool.stop()
            raise BudgetSpent(f"the budget of {minutes:g} minutes is spent")

    def _take(self, result: Finished) -> None:
        """Use the result of a probe."""
        observation = result.observation
        if observation is None:
            self._journal.append("cancelled", commit=result.commit.sha, run=result.number)
            self._display.cancelled(result.number, result.commit)
            return
        if observation.outcome is Outcome.INFRA:
            self._failures[result.commit.sha] += 1
            if (attempts := self._failures[result.commit.sha]) > RETRIES:
                reason = f"{observation.reason}, {attempts} times"
                observation = replace(observation, outcome=Outcome.UNTESTABLE, reason=reason)
        self._journal.record(observation)
        self._took.append(observation.seconds)
        self._display.finished(result.number, result.commit, observation)
        if observation.outcome is Outcome.ABORT:
            self._pool.stop()
            raise Aborted(f"stopped by the outcome table: {observation.reason} on {result.commit.short}")
        if observation.outcome is Outcome.INFRA:
            if self._spent() is None:
                self._start(result.commit)
        else:
            self._failures[result.commit.sha] = 0
            self._take_up(observation)

    def _take_up(self, observation: Observation) -> None:
        try:
            self._stage.record(observation.commit, observation.outcome, observation.value)
        except Contradiction as contradiction:
            raise Refused(
                f"the runs contradict each other: {contradiction}; leave --deterministic out, or edit the log and replay it"
            ) from None

    def _refuse(self, refusal: Refusal) -> None:
        stage = self._stage
        end, name = (stage.good, stage.good_name) if refusal.startswith("good") else (stage.bad, "BAD")
        if refusal is Refusal.GOOD_UNTESTABLE:
            self._try_other_end()
        outputs = [o.output for o in self._journal.observations() if o.commit == end.sha and o.output]
        if outputs and refusal is not Refusal.ALIKE:
            self._display.tail(Path(outputs[-1]), f"output on {name}")
        raise Refused(explain(refusal, stage.good, stage.good_name, stage.bad, self._journal))

    def _try_other_end(self) -> None:
        """Is it only GOOD that lacks the command? One run of BAD tells a missing file from a misspelt command."""
        bad = self._stage.bad
        if any(observation.commit == bad.sha for observation in self._journal.observations()):
            return
        self._start(bad)
        while not self._pool.is_idle:
            self._interrupts.check()
            for result in self._pool.wait():
                if result.observation is not None:
                    self._journal.record(result.observation)
                    self._display.finished(result.number, result.commit, result.observation)

    def _show_progress(self) -> None:
        search = self._stage.search
        left = search.tests_left()
        seconds = sum(self._took) / len(self._took) * left / self._request.jobs if self._took else None
        running = tuple(probe.commit for probe in self._pool.running)
        verdict = search.result()
        self._display.progress(
            Progress(running, self._runs, left, seconds, sum(self._took), self._stage.commits, verdict.posterior)
        )

    def _prepare_command(self, copies: Path) -> Command:
        repository, request = self._plan.repository, self._request
        command = prepare_command(
            request.command,
            repository,
            self._plan.bad.sha,
            copies,
            also=request.pin,
            automatic=request.automatic_pins,
        )
        if command.pinned:
            names = ", ".join(file.relative for file in command.pinned)
            self._display.notice(f"pinned as it is in your checkout, the same for every commit: {names}")
        texts = [file.copy.read_text(encoding="utf-8", errors="replace") for file in command.pinned]
        self._runners = find_runners(request.command, texts)
        imports = find_import_paths(request.command, repository.toplevel, repository.toplevel / repository.directory)
        self._import_paths = imports.relative
        if imports.relative:
            self._display.notice(
                f"Python imports from this checkout ({', '.join(imports.relative)}: an editable install or PYTHONPATH): "
                "runs import the same folders of the commit under test"
            )
        if imports.unreachable:
            self._display.notice(
                f"warning: {', '.join(imports.unreachable)} is installed from this checkout and cannot be redirected: "
                "runs import your checkout, not the commit under test"
            )
        return command

    def _make_probe(self, command: Command) -> Probe:
        plan, request = self._plan, self._request
        self._environments = None
        if plan.builder is not None:
            folder = (request.env_dir or default_cache_folder()).absolute()
            self._environments = EnvironmentCache(folder, plan.builder, plan.keys)
        return Probe(
            command,
            plan.repository.toplevel,
            plan.repository.directory,
            self._journal.folder,
            plan.table,
            self._runners,
            request.timeout,
            self._import_paths,
            mark_of(self._journal),
            request.metric,
            self._environments,
            lambda commit, number, pid: self._journal.append("run", commit=commit.sha, run=number, pid=pid),
        )

    def _open_journal(self, store: Path) -> Journal:
        """Continue the search that was cut short, if this is the same one, and clear up after any that was killed."""
        same = None
        continues = not self._request.fresh and self._request.replay is None
        for journal in open_idle(store):
            try:
                advice = clear_up(journal, self._plan.repository)
            except OSError as error:
                advice = f"an earlier search could not be cleared up: {error}; delete the folder by hand"
            if advice is not None:
                self._display.notice(f"warning: {advice}")
            if same is None and continues and not journal.is_finished and journal.header == self._header:
                same = journal
            else:
                journal.close()
        if same is not None:
            self._display.notice(
                f"continuing the search that was cut short, {len(same.observations())} outcomes known (--fresh starts anew)"
            )
            return same
        journal = Journal.create(store, self._header)
        for mark in self._plan.marks:
            journal.record(Observation(mark.commit, mark.outcome, "from the log", time=now(), value=mark.value))
        return journal

    def _next_number(self) -> int:
        return 1 + max((event["run"] for event in self._journal.events() if event["event"] == "run"), default=0)

    def _make_places(self, places: list[Place]) -> None:
        repository = self._plan.repository
        if self._request.in_place:
            checkout = Checkout(repository)
            self._journal.append("checkout", home=checkout.home)
            places.append(checkout)
            return
        for _ in range(self._request.jobs):
            worktree = Worktree(repository)
            self._journal.append("worktree", path=str(worktree.path))
            places.append(worktree)

    def _finish_places(self, places: Sequence[Place]) -> None:
        kept = self._request.keep_worktree
        for index, place in enumerate(places):
            name = {"home": place.home} if isinstance(place, Checkout) else {"path": str(place.path)}
            event = "checkout-restored" if isinstance(place, Checkout) else "worktree-removed"
            if kept and index == 0:
                self._journal.append("checkout-restored" if isinstance(place, Checkout) else "worktree-kept", **name)
                self._display.kept(place)
                continue
            try:
                place.remove()
            except (OSError, Stopped, GitError) as error:
                self._display.notice(f"warning: {place.path} could not be put in order: {error}; do it by hand")
            else:
                self._journal.append(event, **name)
