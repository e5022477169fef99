"""Turn the user's options into a plan: resolve names to SHAs and refuse bad input before the first run."""

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rlcanary.bisect.record.git_log import BisectLog, Mark, read_log
from rlcanary.bisect.request import Request
from rlcanary.bisect.runs.environments import Builder, choose_builder, environment_keys
from rlcanary.bisect.runs.pinned_files import in_virtual_environment, script_of
from rlcanary.bisect.runs.submodules import submodules_left_out
from rlcanary.bisect.settings import BisectSettings
from rlcanary.errors import UserError
from rlcanary.jobs.outcomes import OutcomeTable
from rlcanary.system.git import Commit, Repository


@dataclass(frozen=True)
class Plan:
    repository: Repository
    good: Commit
    good_name: str
    """The name of `good` in messages: GOOD, the merge base, or the fork."""
    commits: tuple[Commit, ...]
    """The first-parent commits after `good`, oldest first; the last one is BAD."""
    root: str
    marks: tuple[Mark, ...]
    """Lines of a replayed log about `good` and `commits`."""
    trusted: frozenset[str]
    """The ends that need no run: GOOD with `--skip-good-check`, and both ends of a log that rlcanary did not write."""
    save_dir: Path
    table: OutcomeTable
    builder: Builder | None
    """Builds an environment per dependency set. None uses the caller's."""
    keys: dict[str, str]
    """The environment key of each commit. Empty without a builder."""
    notices: tuple[str, ...]

    @property
    def bad(self) -> Commit:
        return self.commits[-1]


def make_plan(request: Request, repository: Repository, settings: BisectSettings) -> Plan:
    """Resolve and check everything that can be checked without a run.

    Raises:
        UserError: The search cannot start with these options.
    """
    if not request.command or not request.command[0]:
        raise UserError(
            "the command to run on each commit is missing: add it at the end, as in `-- pytest tests/test_x.py`"
        )
    _check_combinations(request)
    if request.good is not None and request.good_when_added is not None:
        raise UserError("GOOD and --good-when-added both name the good commit: give one of them")
    log = BisectLog() if request.replay is None else read_log(request.replay, repository)
    bad = _end(request.bad, "BAD", "fails", log.bad, repository)
    if request.good_when_added is not None:
        good = repository.added(request.good_when_added, bad)
    else:
        good = _end(request.good, "GOOD", "passes", log.good, repository)
    notices = [f"warning: {text}" for text in log.damage]
    name, start = _start(good, bad, repository, notices)
    commits = tuple(repository.commits("--first-parent", "--reverse", f"{start}..{bad}"))
    _find_command(request, repository, start, bad)
    here = {start, *(commit.sha for commit in commits)}
    marks = tuple(mark for mark in log.marks if mark.commit in here or log.root is not None)
    if strangers := len(log.marks) - len(marks):
        notices.append(f"{strangers} commits of the log lie outside the first-parent range and are left out")
    if edits := repository.uncommitted():
        notices.append(
            f"uncommitted changes in {edits} tracked file{'s' * (edits > 1)} are not tested: only commits are"
        )
    _name_submodules(request, repository, start, bad, notices)
    first = repository.commit(start)
    builder, keys = _environments(request, repository, first, commits, notices)
    return Plan(
        repository,
        first,
        name,
        commits,
        repository.root(bad),
        marks,
        _trusted(request, start, log) & {start, bad},
        _writable(request.save_dir, repository),
        settings.outcomes.timing_out_as(request.on_timeout),
        builder,
        keys,
        tuple(notices),
    )


def _trusted(request: Request, good: str, log: BisectLog) -> frozenset[str]:
    of_log = (log.good, log.bad) if log.root is None else ()
    return frozenset(sha for sha in (*of_log, good if request.skip_good_check else None) if sha is not None)


def _name_submodules(request: Request, repository: Repository, good: str, bad: str, notices: list[str]) -> None:
    if request.no_submodules:
        notices.append("submodules are left out (--no-submodules)")
    elif left_out := submodules_left_out(repository, good, bad):
        notices.append(
            f"submodules that your checkout has not initialised are left out: {', '.join(left_out)} "
            "(`git submodule update --init PATH` includes one)"
        )


def _environments(
    request: Request, repository: Repository, good: Commit, commits: tuple[Commit, ...], notices: list[str]
) -> tuple[Builder | None, dict[str, str]]:
    program = repository.toplevel / repository.directory / request.command[0]
    if request.env == "auto" and "/" in request.command[0] and in_virtual_environment(program):
        return None, {}
    bad = commits[-1].sha
    builder = choose_builder(request.env, repository, bad)
    if request.env == "none" or (builder is None and shutil.which("python3") is None):
        return None, {}
    keys = environment_keys(builder, repository, good, commits)
    count = len(set(keys.values()))
    if request.env == "auto" and count == 1:
        return None, {}  # One set of dependencies: the user's environment fits all commits.
    if builder is None:
        missing = "uv is not installed" if repository.has_file(bad, "uv.lock") else "there is no lock file"
        notices.append(
            f"the dependencies change in this range ({count} sets), but {missing}: runs of all commits use your "
            "environment; --env pip or --env 'COMMAND' builds one for each"
        )
        return None, {}
    if count == 1:
        notices.append(f"all commits have the same dependencies: one environment, built with {builder.name} and kept")
    else:
        notices.append(
            f"the dependencies change in this range ({count} sets): each gets an environment of its own, built with "
            f"{builder.name} when it is needed and kept (--env none uses yours for all)"
        )
    return builder, keys


def _check_combinations(request: Request) -> None:
    if (request.metric is None) != (request.worse is None):
        raise UserError("--metric and --worse belong together: name the metric, and which side of it is worse")
    if request.metric is not None and request.deterministic:
        raise UserError(
            "--deterministic applies to a command that passes or fails: leave it out with --metric, whose noise is estimated"
        )
    if request.in_place and request.jobs > 1:
        raise UserError("--in-place runs everything in one checkout: leave --jobs out")


def _end(ref: str | None, name: str, does: str, from_log: str | None, repository: Repository) -> str:
    if ref:
        return repository.resolve(ref, name)
    if from_log is not None:
        return from_log
    raise UserError(f"{name} is missing: give a commit where the command {does}, as --{name.lower()} REF or {name}=REF")


def _start(good: str, bad: str, repository: Repository, notices: list[str]) -> tuple[str, str]:
    """Return the name and SHA of the commit to start from.

    It is GOOD, or the merge base if BAD does not contain GOOD. If that came in through a merge, it is the commit where
    BAD's first-parent line forked from it: only a start on the line is the parent of the first commit searched.
    """
    if good == bad:
        raise UserError(f"GOOD and BAD are the same commit {good[:10]}: there is nothing between them")
    base = repository.merge_base(good, bad)
    if base is None:
        raise UserError(
            "GOOD and BAD have no common ancestor here; in a shallow clone, run `git fetch --unshallow` first"
        )
    if base == bad:
        raise UserError(
            f"GOOD and BAD are swapped: BAD {bad[:10]} is an ancestor of GOOD {good[:10]}, and the search goes from an "
            f"older good commit to a newer bad one; the other way round it is --good {bad[:10]} --bad {good[:10]}"
        )
    name = "GOOD"
    if base != good:
        name = "the merge base of GOOD and BAD"
        notices.append(f"GOOD {good[:10]} is not an ancestor of BAD: the search starts at their merge base {base[:10]}")
    fork = repository.fork(base, bad)
    if fork is None:
        raise UserError(
            f"{name} {base[:10]} came in through a merge, and BAD's first-parent line has no commit in common with it: "
            "give a GOOD on that line (see `git log --first-parent`)"
        )
    if fork != base:
        notices.append(
            f"{name} {base[:10]} is not on BAD's first-parent line: the search starts at {fork[:10]}, where it forked"
        )
        return f"the commit where BAD's first-parent line forked from {name}", fork
    return name, base


def _find_command(request: Request, repository: Repository, good: str, bad: str) -> None:
    """Check that the program and the script exist.

    Raises:
        UserError: Neither this machine nor the history has the program, or GOOD lacks the script.
    """
    program = request.command[0]
    is_in_an_environment = request.env not in ("auto", "none")  # where the program may be, once it is built
    if "/" not in program and shutil.which(program) is None and not is_in_an_environment:
        separately = "give its words separately, without quotes around all of them"
        hint = separately if " " in program else "check the spelling"
        raise UserError(f"command not found: {program!r}: {hint}, or use `bash -c '…'` for shell syntax")
    script = script_of(request.command, repository)
    if script is None:
        return
    place = Path(os.path.normpath(repository.toplevel / repository.directory / script))
    if place.exists():
        return
    inside = place.is_relative_to(repository.toplevel)
    relative = str(place.relative_to(repository.toplevel)) if inside else ""
    if not inside or not any(repository.has_file(end, relative) for end in (good, bad)):
        raise UserError(f"command not found: {script}: no such file in the checkout, GOOD or BAD")
    if not request.skip_good_check and not repository.has_file(good, relative):
        raise UserError(
            f"command not found in GOOD: {script} is not in {good[:10]}: start where it was added with "
            f"--good-when-added {script}, or skip its test with --skip-good-check"
        )


def _writable(asked: Path | None, repository: Repository) -> Path:
    """Create the folder for the saved log and test that it is writable, before hours of runs."""
    folder = (repository.toplevel / "bisect-logs" if asked is None else asked).absolute()
    try:
        make_save_folder(folder, repository)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write the log to {folder}: {error.strerror}; name another folder with --save-dir or BISECT_SAVE_DIR"
        ) from None
    return folder


def make_save_folder(folder: Path, repository: Repository) -> None:
    """Create the folder for the saved log if it is missing. git does not see it in the checkout."""
    if not folder.exists():
        folder.mkdir(parents=True)
        if folder.is_relative_to(repository.toplevel):
            (folder / ".gitignore").write_text("*\n", encoding="utf-8")
