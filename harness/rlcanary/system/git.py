"""Query git, without writing to the user's index, checkout or configuration."""

import contextlib
import difflib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcanary.errors import UserError
from rlcanary.system.sessions import LOOK_SECONDS, Stop

# Variables that tie git to one repository. They would point the worktree's git at the user's index.
REPOSITORY_VARIABLES = (
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_WORK_TREE",
)


class GitError(UserError):
    """A git command failed. The message is git's own, for the user."""

    def __init__(self, arguments: Sequence[str], stderr: str) -> None:
        lines = [line.strip() for line in stderr.splitlines() if line.strip()]
        super().__init__(f"git {arguments[0]}: {lines[-1] if lines else 'failed without a message'}")


def environment_without_repository() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in REPOSITORY_VARIABLES}


def git(directory: Path, *arguments: str, stop: Stop | None = None) -> str:
    """Run git in `directory` and return its standard output.

    Hooks are off, queries take no lock, and a password prompt fails instead of waiting forever.

    Raises:
        GitError: git exited with an error.
        Stopped: `stop` requested it.
    """
    environment = environment_without_repository() | {
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C",
    }
    process = subprocess.Popen(
        # With log.showSignature, lines of gpg come between those of `git log`.
        ["git", "-c", f"core.hooksPath={os.devnull}", "-c", "log.showSignature=false", *arguments],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="surrogateescape",
        start_new_session=True,  # Only the driver gets Ctrl-C; it decides which work to finish.
    )
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            stdout, stderr = process.communicate(timeout=LOOK_SECONDS)
            break
        if stop is not None and stop.is_asked:
            process.terminate()
            process.communicate()
            stop.check()
    if process.returncode:
        raise GitError(arguments, stderr)
    return stdout


@dataclass(frozen=True)
class Commit:
    sha: str
    author: str
    date: str
    subject: str

    @property
    def short(self) -> str:
        return self.sha[:10]


@dataclass(frozen=True)
class Repository:
    """The user's checkout and the git directory behind it."""

    toplevel: Path
    git_dir: Path
    """The git directory of this checkout. A linked worktree has its own beside the shared one."""
    common_dir: Path
    directory: Path
    """The starting directory of the command, relative to `toplevel`."""

    @classmethod
    def around(cls, directory: Path) -> "Repository":
        """Find the repository that contains `directory`.

        Raises:
            UserError: There is none.
        """
        try:
            lines = git(
                directory,
                "rev-parse",
                "--path-format=absolute",
                *("--show-toplevel", "--git-dir", "--git-common-dir", "--show-prefix"),
            ).split("\n")
        except FileNotFoundError:
            raise UserError("git is not installed or not on PATH: install it and start again") from None
        except GitError as error:
            if "must be run in a work tree" in str(error):
                raise UserError(f"{directory} is not in a working tree: start in a checkout of the code") from None
            if "not a git repository" not in str(error):
                raise UserError(f"{directory}: {error}") from None
            raise UserError(f"{directory} is not in a git repository: start in a checkout of your code") from None
        return cls(Path(lines[0]), Path(lines[1]), Path(lines[2]), Path(lines[3]))

    def git(self, *arguments: str) -> str:
        return git(self.toplevel, *arguments)

    def resolve(self, ref: str, name: str) -> str:
        """Return the SHA of the commit `ref`. `name` is the user's term for it (GOOD, BAD).

        Raises:
            UserError: There is no such commit.
        """
        if len(ref.split("\n")) > 1:
            raise UserError(
                f"{name} holds {len(ref.split())} lines, not one commit: to start at the commit that added a file, "
                "replace GOOD by --good-when-added PATH"
            )
        sha = None if ref.startswith("-") else self.find(ref)
        if sha is None:
            names = self.git("for-each-ref", "--format=%(refname:short)").split()
            close = difflib.get_close_matches(ref, [*names, "HEAD"], n=1)
            hint = f"did you mean {close[0]!r}?" if close else "give a branch, a tag or a SHA (see `git log`)"
            raise UserError(f"{name}={ref!r} does not name a commit in {self.toplevel}: {hint}")
        return sha

    def find(self, ref: str) -> str | None:
        """Return the SHA of the commit `ref`, or None."""
        with contextlib.suppress(GitError):
            return self.git("rev-parse", "--verify", "--quiet", f"{ref}^{{commit}}").strip()
        return None

    def is_ancestor(self, older: str, newer: str) -> bool:
        return self.merge_base(older, newer) == older

    def merge_base(self, one: str, other: str) -> str | None:
        """Return the best common ancestor, or None if the histories are unrelated."""
        with contextlib.suppress(GitError):
            return self.git("merge-base", one, other).split()[0]
        return None

    def root(self, sha: str) -> str:
        """Return the first commit of the first-parent history, which identifies the repository."""
        return self.git("rev-list", "--first-parent", "--max-parents=0", sha).split()[-1]

    def commits(self, *selection: str) -> list[Commit]:
        """Return the commits of `git log SELECTION`."""
        text = self.git("log", "--format=%H%x00%an%x00%aI%x00%s", *selection)
        rows = text.encode(errors="surrogateescape").decode(errors="replace").split("\n")
        return [Commit(*row.split("\0")) for row in rows if row]

    def commit(self, sha: str) -> Commit:
        return self.commits("-1", sha)[0]

    def merges(self, good: str, bad: str) -> list[str]:
        """List the SHAs of the merges on the first-parent line from `good` to `bad`."""
        return self.git("rev-list", "--first-parent", "--min-parents=2", f"{good}..{bad}").split()

    def fork(self, older: str, newer: str) -> str | None:
        """Return the commit where the first-parent line of `newer` left the history of `older`.

        It is `older` itself if that is on the line, and None if the line begins with a commit that `older` lacks.
        """
        first = self.git("rev-list", "--first-parent", "--reverse", f"{older}..{newer}").split("\n")[0]
        return next(iter(self.parents(first)), None)

    def parents(self, sha: str) -> list[str]:
        return self.git("rev-parse", f"{sha}^@").split()

    def has_file(self, sha: str, path: str) -> bool:
        """Whether the commit's tree holds this path (a file or a folder)."""
        return bool(self.git("ls-tree", "--name-only", sha, "--", path).strip())

    def added(self, path: str, bad: str) -> str:
        """Find the newest commit up to `bad` that added the file `path`, relative to the user's directory."""
        found = git(
            self.toplevel / self.directory,
            *("log", "-1", "--first-parent", "--diff-filter=A", "--format=%H", bad, "--", path),
        ).strip()
        if not found:
            raise UserError(f"--good-when-added {path}: no commit up to {bad[:10]} adds this file; check the path")
        return found

    def uncommitted(self, *options: str) -> int:
        """Count the tracked files that differ from HEAD, staged or not. `options` are those of `git status`."""
        return len(self.git("status", "--porcelain", "--untracked-files=no", *options).splitlines())
