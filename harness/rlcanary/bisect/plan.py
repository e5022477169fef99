"""From what the user asked to what will run: every name a SHA, every refusal before the first run."""

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlcanary.bisect.bisect_log import BisectLog, read_log
from rlcanary.bisect.git import Commit, Repository
from rlcanary.bisect.outcomes import Outcome
from rlcanary.errors import UserError


@dataclass(frozen=True)
class Request:
    """What the user asked for; the command line's options by their names."""

    command: tuple[str, ...]
    good: str | None = None
    bad: str | None = None
    good_when_added: str | None = None
    timeout: float | None = None
    skip_good_check: bool = False
    save_dir: Path | None = None
    replay: Path | None = None
    json: Path | None = None
    pin: tuple[str, ...] = ()
    automatic_pins: bool = True
    keep_worktree: bool = False
    fresh: bool = False


@dataclass(frozen=True)
class Plan:
    repository: Repository
    good: Commit
    good_name: str
    """What to call `good` to the user: GOOD, or the merge base."""
    commits: tuple[Commit, ...]
    """The first-parent commits after `good`, oldest first; the last one is BAD."""
    root: str
    marks: Mapping[str, Outcome]
    """What a replayed log says about `good` and `commits`."""
    save_dir: Path
    notices: tuple[str, ...]

    @property
    def bad(self) -> Commit:
        return self.commits[-1]


def make_plan(request: Request, directory: Path) -> Plan:
    """Resolve and check everything that can be checked without a run. Raises UserError."""
    repository = Repository.around(directory)
    if not request.command or not request.command[0]:
        raise UserError(
            "the command to run on each commit is missing: add it at the end, as in `-- pytest tests/test_x.py`"
        )
    if request.good is not None and request.good_when_added is not None:
        raise UserError("GOOD and --good-when-added both name the good commit: give one of them")
    log = BisectLog() if request.replay is None else read_log(request.replay, repository)
    bad = _end(request.bad, "BAD", "fails", log.bad, repository)
    if request.good_when_added is not None:
        good = repository.added(request.good_when_added, bad)
    else:
        good = _end(request.good, "GOOD", "passes", log.good, repository)
    notices: list[str] = []
    name, start = _start(good, bad, repository, notices)
    commits = tuple(repository.commits("--first-parent", "--reverse", f"{start}..{bad}"))
    _find_command(request.command, repository, [start, bad])
    here = {start, *(commit.sha for commit in commits)}
    marks = {sha: outcome for sha, outcome in log.marks.items() if sha in here}
    if strangers := len(log.marks) - len(marks):
        notices.append(f"{strangers} commits of the log lie outside the first-parent range and are left out")
    if edits := repository.uncommitted():
        notices.append(
            f"uncommitted changes in {edits} tracked file{'s' * (edits > 1)} are not under test: commits are"
        )
    return Plan(
        repository,
        repository.commit(start),
        name,
        commits,
        repository.root(bad),
        marks,
        _writable(request.save_dir, repository),
        tuple(notices),
    )


def _end(ref: str | None, name: str, does: str, from_log: str | None, repository: Repository) -> str:
    if ref:
        return repository.resolve(ref, name)
    if from_log is not None:
        return from_log
    raise UserError(f"{name} is missing: give a commit where the command {does}, as --{name.lower()} REF or {name}=REF")


def _start(good: str, bad: str, repository: Repository, notices: list[str]) -> tuple[str, str]:
    """The name and SHA of the commit to start from: GOOD, or the merge base where BAD does not contain GOOD."""
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
            "older good commit to a newer bad one"
        )
    if base == good:
        return "GOOD", good
    notices.append(f"GOOD {good[:10]} is not an ancestor of BAD: the search starts at their merge base {base[:10]}")
    return "the merge base of GOOD and BAD", base


def _find_command(command: tuple[str, ...], repository: Repository, ends: list[str]) -> None:
    """Refuse a program that neither this machine nor the history has."""
    program = command[0]
    if "/" not in program:
        if shutil.which(program) is None:
            hint = (
                "give its words separately, without quotes around all of them"
                if " " in program
                else "check the spelling"
            )
            raise UserError(f"command not found: {program!r}: {hint}, or use `bash -c '…'` for shell syntax")
        return
    place = Path(os.path.normpath(repository.toplevel / repository.directory / program))
    if place.exists():
        return
    inside = place.is_relative_to(repository.toplevel)
    if not inside or not any(repository.has_file(end, str(place.relative_to(repository.toplevel))) for end in ends):
        raise UserError(f"command not found: {program}: no such file in the checkout, GOOD or BAD")


def _writable(asked: Path | None, repository: Repository) -> Path:
    """The folder for the saved log, made and tried now rather than after hours of runs."""
    folder = (repository.toplevel / "bisect-logs" if asked is None else asked).absolute()
    try:
        if not folder.exists():
            folder.mkdir(parents=True)
            if folder.is_relative_to(repository.toplevel):
                (folder / ".gitignore").write_text("*\n", encoding="utf-8")
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise UserError(
            f"cannot write the log to {folder}: {error.strerror}; name another folder with --save-dir or BISECT_SAVE_DIR"
        ) from None
    return folder
