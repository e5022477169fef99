"""One search from start to end: both ends verified, every run journalled, nothing left behind."""

import os
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from rlcanary.bisect.bisect_log import format_log
from rlcanary.bisect.display import Display
from rlcanary.bisect.git import Commit, GitError, Repository, environment_without_repository
from rlcanary.bisect.import_paths import find_import_paths
from rlcanary.bisect.journal import Header, Journal, Lock, Observation, now, open_idle
from rlcanary.bisect.outcomes import Outcome, Reading, mentions_pytest, mentions_rlcanary, read_ending
from rlcanary.bisect.pinned import Command, prepare_command
from rlcanary.bisect.plan import Plan, Request
from rlcanary.bisect.process import Interrupted, Interrupts, end_session, run
from rlcanary.bisect.search import Contradiction, Halving, Search, Verdict
from rlcanary.bisect.worktree import Untestable, Worktree, remove_worktree
from rlcanary.errors import UserError
from rlcanary.files import write_whole

RETRIES = 2
DRIVER_VARIABLE = "RLCANARY_BISECT_DRIVER"
MARK_VARIABLE = "RLCANARY_BISECT_JOURNAL"


@dataclass(frozen=True)
class Report:
    """What a search came to; the JSON result holds the same."""

    status: str
    """found, range (untestable commits hide the culprit), refused (an end is not what it should be), interrupted."""
    exit_code: int
    message: str
    suspects: tuple[Commit, ...]
    observations: tuple[Observation, ...]
    runs: int
    """How often the command ran."""
    reused: int
    """How many outcomes came from a journal or a log."""
    seconds: float
    log: Path | None
    journal: Path


class Session:
    """Holds the lock, the journal and the worktree of one search while it runs."""

    def __init__(self, request: Request, plan: Plan, display: Display, interrupts: Interrupts) -> None:
        self._request = request
        self._plan = plan
        self._display = display
        self._interrupts = interrupts
        self._names = {commit.sha: commit for commit in (plan.good, *plan.commits)}
        self._runs = 0

    def run(self) -> Report:
        """Search, and report. Raises UserError; whatever happens, the worktree is gone and what was learned is saved."""
        repository = self._plan.repository
        store = repository.common_dir / "rlcanary" / "bisect"
        with ExitStack() as stack:
            lock = Lock(repository.git_dir / "rlcanary" / "bisect.lock")
            stack.callback(lock.release)
            self._command = self._prepare_command(store / "pinned")
            self._header = Header(
                self._plan.root,
                self._plan.good.sha,
                self._plan.bad.sha,
                self._request.command,
                str(repository.directory),
                tuple((file.relative, file.digest) for file in self._command.pinned),
            )
            self._journal = self._open_journal(store)
            stack.callback(self._journal.close)
            self._known = {o.commit: o for o in self._journal.observations()}
            reused = len(self._known)
            self._worktree = Worktree(repository, self._interrupts)
            self._journal.append("worktree", path=str(self._worktree.path))
            stack.callback(self._finish_worktree)
            return self._report(reused)

    def _report(self, reused: int) -> Report:
        message, suspects = "", self._plan.commits
        log: Path | None = None
        try:
            verdict = self._search()
        except Interrupted as interruption:
            status, message, code = "interrupted", str(interruption), interruption.exit_code
            self._journal.append("interrupted", reason=message)
        except Refused as refusal:
            status, message, code = "refused", str(refusal), 2
            self._journal.append("end", status=status, reason=message)
        except (GitError, OSError) as error:
            log = self._save_log()
            raise UserError(f"{error}; what was learned is kept, resume with: {self._resume_line(log)}") from error
        else:
            suspects = tuple(self._names[sha] for sha in verdict.suspects)
            culprit = verdict.culprit
            status, code = ("found", 0) if culprit else ("range", 1)
            self._journal.append("end", status=status, suspects=list(verdict.suspects))
            if culprit and self._request.keep_worktree:
                self._worktree.prepare(culprit, self._command.pinned)
        if status != "refused":
            log = self._save_log()
        if status == "interrupted" and log is not None:
            message = f"{message}; resume with: {self._resume_line(log)}"
        observations = tuple(self._known.values())
        seconds = sum(observation.seconds for observation in observations)
        return Report(
            status, code, message, suspects, observations, self._runs, reused, seconds, log, self._journal.path
        )

    def _search(self) -> Verdict:
        plan = self._plan
        if not self._request.skip_good_check:
            self._verify(plan.good, plan.good_name, Outcome.GOOD)
        self._verify(plan.bad, "BAD", Outcome.BAD)
        search: Search = Halving([commit.sha for commit in plan.commits])
        for sha, observation in list(self._known.items()):
            if sha not in (plan.good.sha, plan.bad.sha):
                try:
                    search.record(sha, observation.outcome)
                except Contradiction as contradiction:
                    raise Refused(f"the log contradicts itself: {contradiction}; edit it and replay it again") from None
        while (wanted := search.next_commit()) is not None:
            search.record(wanted, self._test(self._names[wanted], search.tests_left()).outcome)
        return search.result()

    def _verify(self, commit: Commit, name: str, wanted: Outcome) -> None:
        expected_tests = 2 + len(self._plan.commits).bit_length()
        observation = self._known.get(commit.sha) or self._test(commit, expected_tests)
        if observation.outcome is wanted:
            return
        if observation.output:
            self._display.tail(Path(observation.output), f"output on {name}")
        title = f"{name} ({commit.short} {commit.subject})"
        if observation.outcome is Outcome.UNTESTABLE:
            raise Refused(f"{title} cannot be tested: {observation.reason}; choose another commit near it")
        if wanted is Outcome.BAD:
            raise Refused(
                f"{title} passes ({observation.reason}): nothing broke up to it; give a commit where the command fails"
            )
        if name != "GOOD":
            raise Refused(
                f"{title} already fails ({observation.reason}): it broke before GOOD and BAD parted, and GOOD holds a fix; "
                "give an older GOOD that BAD contains"
            )
        raise Refused(f"{title} fails ({observation.reason}): give an older commit where the command passes")

    def _test(self, commit: Commit, tests_left: int) -> Observation:
        """Run the command on a commit, again where the machine failed, and remember the outcome."""
        attempt = 1
        while True:
            observation = self._run_once(commit, tests_left)
            if observation.outcome is Outcome.INFRA and attempt > RETRIES:
                reason = f"{observation.reason}, {attempt} times"
                observation = replace(observation, outcome=Outcome.UNTESTABLE, reason=reason)
            self._record(commit, observation)
            if observation.outcome is not Outcome.INFRA:
                return observation
            attempt += 1

    def _record(self, commit: Commit, observation: Observation) -> None:
        self._journal.append("observation", **vars(observation))
        if observation.outcome is not Outcome.INFRA:
            self._known[commit.sha] = observation
        self._display.finished(self._runs, commit, observation)

    def _run_once(self, commit: Commit, tests_left: int) -> Observation:
        self._interrupts.check()
        self._runs += 1
        self._display.started(self._runs, commit, tests_left)
        output = self._journal.folder / f"{datetime.now():%H%M%S}-{self._runs:03d}-{commit.short}.log"
        try:
            self._worktree.prepare(commit.sha, self._command.pinned)
        except Untestable as error:
            return Observation(commit.sha, Outcome.UNTESTABLE, str(error), time=now())
        directory = self._worktree.path / self._plan.repository.directory
        if not directory.is_dir():
            reason = f"the folder {self._plan.repository.directory} does not exist at this commit"
            return Observation(commit.sha, Outcome.UNTESTABLE, reason, time=now())
        try:
            ending = run(
                self._command.inside(self._worktree.path, self._plan.repository.toplevel),
                directory=directory,
                environment=self._environment(directory),
                output=output,
                timeout=self._request.timeout,
                interrupts=self._interrupts,
                started=lambda pid: self._journal.append("run", commit=commit.sha, pid=pid),
            )
        except Interrupted as interruption:
            aborted = Observation(commit.sha, Outcome.ABORT, str(interruption), time=now(), output=str(output))
            self._journal.append("observation", **vars(aborted))
            raise
        reading: Reading = read_ending(ending, runs_pytest=self._runs_pytest, runs_rlcanary=self._runs_rlcanary)
        return Observation(commit.sha, reading.outcome, reading.reason, round(ending.seconds, 3), now(), str(output))

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
        self._runs_pytest = mentions_pytest([*request.command, *texts])
        self._runs_rlcanary = mentions_rlcanary([" ".join(request.command), *texts])
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

    def _environment(self, directory: Path) -> Mapping[str, str]:
        environment = environment_without_repository() | {"PWD": str(directory)} | _mark(self._journal)
        environment.pop(DRIVER_VARIABLE, None)
        paths = [str(self._worktree.path / relative) for relative in self._import_paths]
        if paths:
            inherited = environment.get("PYTHONPATH")
            environment["PYTHONPATH"] = os.pathsep.join([*paths, *([inherited] if inherited else [])])
        return environment

    def _open_journal(self, store: Path) -> Journal:
        """Continue the search that was cut short, if this is the same one, and clear up after any that was killed."""
        same = None
        continues = not self._request.fresh and self._request.replay is None
        for journal in open_idle(store):
            try:
                _clear_up(journal, self._plan.repository)
            except OSError as error:
                self._display.notice(
                    f"warning: an earlier search could not be cleared up: {error}; delete the folder by hand"
                )
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
        for sha, outcome in self._plan.marks.items():
            replayed = Observation(sha, outcome, "from the log", time=now())
            journal.append("observation", **vars(replayed))
        return journal

    def _finish_worktree(self) -> None:
        if self._request.keep_worktree:
            self._journal.append("worktree-kept", path=str(self._worktree.path))
            where = shlex.quote(str(self._worktree.path))
            self._display.notice(f"worktree kept; delete it with: git worktree remove --force {where}")
            return
        try:
            self._worktree.remove()
        except OSError as error:
            self._display.notice(
                f"warning: the worktree {self._worktree.path} could not be deleted: {error}; delete it by hand"
            )
        else:
            self._journal.append("worktree-removed", path=str(self._worktree.path))

    def _save_log(self) -> Path:
        bad = self._plan.bad.short
        path = self._plan.save_dir / f"bisect-{datetime.now():%Y%m%d-%H%M%S}-{bad}.log"
        suffix = 1
        while path.exists():
            suffix += 1
            path = path.with_name(f"bisect-{datetime.now():%Y%m%d-%H%M%S}-{bad}-{suffix}.log")
        write_whole(path, format_log(self._header, self._known.values(), self._names.__getitem__).encode())
        return path

    def _resume_line(self, log: Path) -> str:
        request = self._request
        driver = os.environ.get(DRIVER_VARIABLE)
        if driver:
            settings = {"BISECT_REPLAY_LOG": str(log)}
            if request.skip_good_check:
                settings["SKIP_GOOD_CHECK"] = "1"
            if request.save_dir is not None:
                settings["BISECT_SAVE_DIR"] = str(request.save_dir)
            words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
            return " ".join([*words, shlex.quote(driver), shlex.join(request.command)])
        options = ["--replay", str(log)]
        if request.timeout is not None:
            options += ["--timeout", f"{request.timeout:g}"]
        if request.skip_good_check:
            options.append("--skip-good-check")
        if request.save_dir is not None:
            options += ["--save-dir", str(request.save_dir)]
        for path in request.pin:
            options += ["--pin", path]
        if not request.automatic_pins:
            options.append("--no-pin")
        return shlex.join(["rlcanary", "bisect", *options, "--", *request.command])


class Refused(Exception):
    """The search cannot start from these ends."""


def _clear_up(journal: Journal, repository: Repository) -> None:
    """End the processes and delete the worktree of a search whose driver was killed."""
    last = journal.last("worktree", "worktree-removed", "worktree-kept")
    if last is None or last["event"] != "worktree":
        return
    if (started := journal.last("run")) is not None:
        end_session(started["pid"], _mark(journal))
    path = Path(last["path"])
    remove_worktree(repository, path)
    if path.parent.is_dir() and not any(path.parent.iterdir()):
        path.parent.rmdir()
    journal.append("worktree-removed", path=str(path))


def _mark(journal: Journal) -> dict[str, str]:
    """What tells the processes of one search from all others."""
    return {MARK_VARIABLE: str(journal.folder)}
