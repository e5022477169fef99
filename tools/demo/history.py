"""Builds the throw-away repository of the demo: the small GRPO codebase `tinygrpo` and its forty commits.

The first commit is the folder `codebase/`. Each file of `commits/` is one commit more: its message, then its diff.
Author and dates are fixed, so the commits have the same hashes on every machine.

To change a commit, build the repository with --dir, rebase in it, and write every commit from there on back with
`git show --format=%B COMMIT > commits/NNNN-its-subject.patch`.
"""

import argparse
import os
import shutil
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

HERE = Path(__file__).resolve().parent
PLANTED = "0025-accept-strings-for-scale-rewards.patch"
FIRST_MESSAGE = "Train a tiny language model with GRPO"
FIRST_DAY = datetime(2025, 1, 6, 12, tzinfo=UTC)


@dataclass(frozen=True)
class History:
    """The repository that was built.

    Attributes:
        path: The repository's folder.
        commits: The full hashes, oldest first.
        planted: The hash of the commit that plants the bug.
    """

    path: Path
    commits: list[str]
    planted: str


def build(path: Path) -> History:
    """Creates the repository in `path`, which must not exist yet."""
    shutil.copytree(HERE / "codebase", path, ignore=shutil.ignore_patterns("__pycache__", ".*_cache"))
    _git(path, 0, "init", "-q", "-b", "main")
    _git(path, 0, "add", "-A")
    commits = [_commit(path, 0, FIRST_MESSAGE)]
    planted = ""
    for patch in sorted((HERE / "commits").glob("*.patch")):
        day = len(commits)
        _git(path, day, "apply", "--index", str(patch))
        message, _, _ = patch.read_text().partition("\ndiff --git")
        commits.append(_commit(path, day, message))
        if patch.name == PLANTED:
            planted = commits[-1]
    assert planted, f"{PLANTED} is missing"
    return History(path, commits, planted)


def _commit(path: Path, day: int, message: str) -> str:
    _git(path, day, "commit", "-q", "-m", message)
    return _git(path, day, "rev-parse", "HEAD")


def _git(path: Path, day: int, *arguments: str) -> str:
    # The user's settings (signing, hooks, line endings) or a GIT_DIR from a hook would change the hashes.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    date = (FIRST_DAY + timedelta(days=day)).isoformat()
    environment |= {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_AUTHOR_NAME": "tinygrpo developers",
        "GIT_AUTHOR_EMAIL": "dev@example.com",
        "GIT_AUTHOR_DATE": date,
        "GIT_COMMITTER_NAME": "tinygrpo developers",
        "GIT_COMMITTER_EMAIL": "dev@example.com",
        "GIT_COMMITTER_DATE": date,
    }
    command = ["git", "-C", str(path), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout.strip()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Build the repository of the demo, to look at or to play with.")
    parser.add_argument("--dir", type=Path, required=True, help="the folder to create it in; must not exist")
    directory = parser.parse_args().dir
    if directory.exists():
        parser.error(f"{directory} exists already")
    history = build(directory)
    print(f"{len(history.commits)} commits in {history.path}; {history.planted[:10]} plants the bug")
