"""Read from the tracker's history how flaky a command is."""

from collections.abc import Sequence
from itertools import pairwise

from rlcanary.bisect.search.pass_fail_noise import History
from rlcanary.errors import UserError
from rlcanary.history.history import find_history, results_files
from rlcanary.history.run_result import UnreadableFile, read_run
from rlcanary.system.git import Repository

NEWEST = 300
"""Number of runs to read. Older runs say little about how flaky a test is now."""
PASSED, FAILED = "passed", "failed"


def past_runs(command: Sequence[str], repository: Repository, good: str, bad: str) -> History | None:
    """Count how often the command's test passed and failed on commits up to `good`, and from `bad` on.

    Only a command that runs a single test by its node id can be looked up. Up to `good`, a failure counts if the runs
    before and after it passed: several failures in a row were an earlier breakage. From `bad` on, passes are treated
    the same way.

    Returns:
        None without a history.
    """
    nodeids = [argument for argument in command if "::" in argument]
    if len(nodeids) != 1:
        return None
    try:
        folder = find_history(repository.toplevel / repository.directory)
    except UserError:
        return None  # Most users have no history; that needs no warning.
    sides: dict[str, list[bool]] = {"good": [], "bad": []}
    known: dict[str, str | None] = {}
    for path in results_files(folder)[-NEWEST:]:
        run = read_run(path)
        if isinstance(run, UnreadableFile) or run.dirty:
            continue  # `rlcanary trend` reports unreadable files.
        outcome = run.outcomes.get(nodeids[0])
        sha = run.git_commit
        if outcome not in (PASSED, FAILED) or not sha:
            continue
        if sha not in known:
            known[sha] = _side(sha, repository, good, bad)
        if (side := known[sha]) is not None:
            sides[side].append(outcome == PASSED)
    good_passed, good_failed = _count(sides["good"], usual=True)
    bad_failed, bad_passed = _count(sides["bad"], usual=False)
    found = History(good_passed, good_failed, bad_passed, bad_failed)
    return found if any(vars(found).values()) else None


def _side(sha: str, repository: Repository, good: str, bad: str) -> str | None:
    if repository.find(sha) is None:
        return None
    if repository.is_ancestor(sha, good):
        return "good"
    return "bad" if repository.is_ancestor(bad, sha) else None


def _count(passed: Sequence[bool], usual: bool) -> tuple[int, int]:
    """Count the usual outcomes, and the other ones that stood alone among usual ones."""
    alone = [usual, *passed, usual]
    unusual = sum(
        now is not usual and before is usual and after is usual
        for (before, now), (_, after) in pairwise(pairwise(alone))
    )
    return sum(outcome is usual for outcome in passed), unusual
