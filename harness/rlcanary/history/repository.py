"""Check that a history belongs to the current git repository, and find the repository's address."""

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from rlcanary.errors import UserError
from rlcanary.history.history import History

SAMPLE = 10  # runs at each end of the history
# https://host:port/path, ssh://user@host:port/path and user@host:path. A port of ssh is none of https.
HTTPS = re.compile(r"https?://(?:[^@/]*@)?(?P<host>[\w.-]+(?::\d+)?)/(?P<path>[^?#\s]+?)(?:\.git)?/?\n")
SSH = re.compile(r"(?:ssh://(?:[^@/]*@)?|[^@/:\s]+@)(?P<host>[\w.-]+)(?::\d+)?[:/](?P<path>[^?#\s]+?)(?:\.git)?/?\n")


def require_own_project(history: History, start: Path) -> None:
    """Raises UserError if none of the history's commits is in the repository around its folder.

    If the folder is in no repository, the one around `start` counts. Nothing is raised without a repository, without
    commits or in a shallow clone.
    """
    ends = [*history.runs[:SAMPLE], *history.runs[-SAMPLE:]]
    commits = [run.git_commit for run in ends if run.git_commit and re.fullmatch("[0-9a-f]{7,64}", run.git_commit)]
    if not commits:
        return
    sample = list(dict.fromkeys(commits))
    for place in (history.folder, start):
        known = _are_commits(sample, place)
        if known is None:
            continue
        if not any(known) and _git(["rev-parse", "--is-shallow-repository"], place) == "false\n":
            raise UserError(
                f"the runs in {history.folder} are of another project, or of commits that this clone does not have yet: "
                f"{sample[-1][:10]} and {len(sample) - 1} more are unknown to git here. Name this project's folder with "
                "--dir, fetch the commits, or read them anyway with --any-project"
            )
        return


def top_level(place: Path) -> Path | None:
    """Returns the root of the repository's checkout around a folder, None outside of one."""
    answer = _git(["rev-parse", "--show-toplevel"], place)
    return Path(answer.removesuffix("\n")) if answer else None


def web_address(place: Path) -> str | None:
    """Returns the https address of the remote `origin`, without a name or password; None if it has none."""
    address = _git(["remote", "get-url", "origin"], place) or ""
    found = HTTPS.fullmatch(address) or SSH.fullmatch(address)
    return f"https://{found['host']}/{found['path']}" if found else None


def _are_commits(names: Sequence[str], place: Path) -> list[bool] | None:
    """Tells if these are commits of the repository; None outside a repository."""
    answer = _git(["cat-file", "--batch-check=%(objecttype)"], place, "".join(f"{name}\n" for name in names))
    return None if answer is None else [line == "commit" for line in answer.splitlines()]


def _git(arguments: list[str], place: Path, questions: str = "") -> str | None:
    """Returns git's output; None if git is not installed or fails."""
    environment = {**os.environ, "GIT_NO_LAZY_FETCH": "1", "LC_ALL": "C"}
    command = ["git", "-C", str(place), *arguments]
    try:
        answer = subprocess.run(command, env=environment, input=questions, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return answer.stdout if answer.returncode == 0 else None
