"""Resume after an unplanned end: clean up after a killed search, and save a log with the command that continues it."""

import os
import shlex
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from rlcanary.bisect.plan import Plan, make_save_folder
from rlcanary.bisect.record.git_log import Mark, format_log
from rlcanary.bisect.record.journal import Header, Journal, Observation, now, open_idle
from rlcanary.bisect.request import Request
from rlcanary.bisect.runs.outputs import KEPT_SEARCHES, delete_outputs
from rlcanary.bisect.runs.probe import DRIVER_VARIABLE
from rlcanary.bisect.runs.worktree import remove_worktree
from rlcanary.bisect.view.progress import Display
from rlcanary.system.files import write_whole
from rlcanary.system.git import GitError, Repository
from rlcanary.system.sessions import end_marked

MARK_VARIABLE = "RLCANARY_BISECT_JOURNAL"
FROM_LOG = "from the log"
"""The reason of an outcome that a replayed log gave."""

RESULTS = ("found", "steps", "range", "relapse")
"""The statuses of a search with a result."""


def open_journal(store: Path, header: Header, request: Request, plan: Plan, display: Display) -> Journal:
    """Open the journal of the same search, to resume it or to show its result again. Otherwise create one.

    Killed searches are cleaned up first.
    """
    same, newer_start = None, False
    for number, journal in enumerate(open_idle(store, lambda text: display.notice(f"warning: {text}"))):
        try:
            advice = clear_up(journal, plan.repository)
        except OSError as error:
            advice = f"an earlier search could not be cleaned up: {error}; delete the folder by hand"
        if advice is not None:
            display.notice(f"warning: {advice}")
        if number >= KEPT_SEARCHES:
            delete_outputs(journal.folder)
        is_same = journal.header == header
        has_result = not newer_start and _is_result(journal, request, plan)
        if request.replay is None:
            continues = has_result or not journal.is_finished
        else:
            continues = not journal.is_finished and _began_with(plan.marks, journal)
        if same is None and is_same and continues and not request.fresh:
            same = journal
            continue
        newer_start = newer_start or is_same
        if is_same and request.fresh and not journal.is_finished:
            journal.append("end", status="given up", reason="--fresh", suspects=[])
        journal.close()
    if same is None:
        journal = Journal.create(store, header, plan.repository.toplevel)
        journal.record_request(request.document(), plan.trusted, repr(plan.table))
        for mark in plan.marks:
            journal.record(Observation(mark.commit, mark.outcome, FROM_LOG, time=now(), value=mark.value))
        return journal
    known = len(same.observations())
    if same.is_finished:
        display.notice(
            f"this search is finished, {known} outcomes known: showing its result again (--fresh starts over)"
        )
    elif known > 0:
        display.notice(f"continuing the interrupted search, {known} outcomes known (--fresh starts over)")
    same.record_request(request.document(), plan.trusted, repr(plan.table))
    for text in same.damage:
        display.notice(f"warning: {text}")
    return same


def put_checkout_back(repository: Repository, store: Path) -> None:
    """Put the checkout back where a killed search in it has left another commit, before HEAD is read as the user's.

    What stands in the way is told by `open_journal`, which tries again.
    """
    for journal in open_idle(store, lambda _: None):
        with suppress(OSError):
            clear_up(journal, repository)
        journal.close()


def _began_with(marks: Sequence[Mark], journal: Journal) -> bool:
    """Whether the search began with these outcomes of a log."""
    told = (Mark(each.commit, each.outcome, each.value) for each in journal.observations() if each.reason == FROM_LOG)
    return list(told) == list(marks)


def _is_result(journal: Journal, request: Request, plan: Plan) -> bool:
    """Whether the search has a result that this command, these options and this outcome table would give as well."""
    end, given = journal.last("end"), journal.last("request")
    if not journal.is_finished or end is None or given is None or end["status"] not in RESULTS:
        return False
    return given["table"] == repr(plan.table) and request.is_same_test(Request.of(given["request"]))


def mark_of(journal: Journal) -> dict[str, str]:
    """Return the environment variables that identify the processes of one search."""
    return {MARK_VARIABLE: str(journal.folder)}


def clear_up(journal: Journal, repository: Repository) -> str | None:
    """End the processes and delete the worktrees of a search whose driver was killed.

    Returns:
        Steps that are left to the user.

    Raises:
        OSError: A worktree cannot be deleted.
    """
    begun = [event["path"] for event in journal.events() if event["event"] == "worktree"]
    ended = [event["path"] for event in journal.events() if event["event"] in ("worktree-removed", "worktree-kept")]
    left = [path for path in begun if path not in ended]
    checkout = journal.last("checkout", "checkout-removed", "checkout-kept")
    in_checkout = checkout is not None and checkout["event"] == "checkout"
    if not left and not in_checkout:
        return None
    end_marked(mark_of(journal))
    for name in left:
        path = Path(name)
        remove_worktree(repository, path)
        if path.parent.is_dir() and not any(path.parent.iterdir()):
            path.parent.rmdir()
        journal.append("worktree-removed", path=name)
    return _restore_checkout(journal, repository, checkout["home"]) if checkout and in_checkout else None


def _restore_checkout(journal: Journal, repository: Repository, home: str) -> str | None:
    if journal.checkout != str(repository.toplevel):
        return None  # Another checkout of the repository: a search there restores it.
    if not _is_where_left(journal, repository):
        journal.append("checkout-removed", home=home)  # The user has moved on.
        return None
    # Without force: the user may have worked here since.
    try:
        repository.git("checkout", "--quiet", "--no-overwrite-ignore", home, "--")
    except GitError as error:
        return f"an earlier --in-place search was killed and moved this checkout: run `git checkout {home}` ({error})"
    journal.append("checkout-removed", home=home)
    return None


def _is_where_left(journal: Journal, repository: Repository) -> bool:
    """Whether HEAD is detached, at a commit that the search ran."""
    try:
        repository.git("symbolic-ref", "--quiet", "HEAD")
    except GitError:
        ran = {event["commit"] for event in journal.events() if event["event"] == "run"}
        return repository.find("HEAD") in ran
    return False


def save_log(plan: Plan, header: Header, journal: Journal, in_place: bool) -> Path:
    """Write the outcomes so far as a `git bisect log`.

    A run, or the user, may have deleted the folder since the start. In place, where the folder may belong to a commit, it
    comes back without a `.gitignore`: one would be in the way of a tracked one.

    Raises:
        OSError: The log cannot be written.
    """
    if in_place:
        plan.save_dir.mkdir(parents=True, exist_ok=True)
    else:
        make_save_folder(plan.save_dir, plan.repository)
    stamp = f"bisect-{datetime.now():%Y%m%d-%H%M%S}-{plan.bad.short}"
    path = plan.save_dir / f"{stamp}.log"
    suffix = 1
    while path.exists():
        suffix += 1
        path = plan.save_dir / f"{stamp}-{suffix}.log"
    write_whole(path, format_log(header, journal.observations(), plan.repository).encode())
    return path


def resume_line(request: Request, log: Path) -> str:
    """Return a shell command that continues from a saved log."""
    driver = os.environ.get(DRIVER_VARIABLE)
    options = request.words()
    if driver:
        settings = {"BISECT_REPLAY_LOG": str(log)}
        words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
        first = ["--"] if options or request.command[0].startswith("-") else []
        return " ".join([*words, shlex.quote(driver), shlex.join([*options, *first, *request.command])])
    return shlex.join(["rlcanary", "bisect", "--replay", str(log), *options, "--", *request.command])
