"""Where probes run: worktrees of their own, or the user's checkout for those who must."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rlcanary.system.git import GitError, Repository, git
from rlcanary.bisect.runs.pinned_files import PinnedFile
from rlcanary.system.sessions import Stop
from rlcanary.bisect.runs.worktree import Untestable
from rlcanary.errors import UserError


class Place(Protocol):
    """A checkout that one probe at a time may use."""

    path: Path

    def prepare(self, sha: str, pinned: Sequence[PinnedFile] = (), stop: Stop | None = None) -> None:
        """Make it the commit `sha`, with the pinned files laid over it.

        Raises Untestable when git cannot check the commit out or its submodules cannot be had, GitError when the place
        itself cannot be made, Stopped.
        """
        ...

    def remove(self) -> None:
        """Leave everything as it was found."""
        ...


class Checkout:
    """The user's own checkout: clean at the start, and on the same branch again at the end.

    Untracked and ignored files are left alone: a commit that would overwrite one is untestable.
    """

    def __init__(self, repository: Repository, with_submodules: bool = True) -> None:
        """Raises UserError where a search would mix with work under way."""
        self.path = repository.toplevel
        self._repository = repository
        self._with_submodules = with_submodules
        if edits := repository.uncommitted():
            raise UserError(
                f"--in-place: {edits} tracked files have uncommitted changes: commit or stash them, or leave --in-place "
                "out, which searches in a worktree and does not touch them"
            )
        for name in ("BISECT_LOG", "MERGE_HEAD", "rebase-merge", "rebase-apply", "CHERRY_PICK_HEAD", "index.lock"):
            if (repository.git_dir / name).exists():
                raise UserError(
                    f"--in-place: another git operation is under way here ({name}): finish it, or leave --in-place out"
                )
        try:
            self.home = repository.git("symbolic-ref", "--quiet", "--short", "HEAD").strip()
        except GitError:
            self.home = repository.git("rev-parse", "HEAD").strip()

    def prepare(self, sha: str, pinned: Sequence[PinnedFile] = (), stop: Stop | None = None) -> None:
        new: list[str] = []
        in_the_way: list[str] = []
        try:
            git(self.path, "reset", "--quiet", "--hard", stop=stop)
            new = git(self.path, "diff", "--name-only", "--no-renames", "--diff-filter=A", "-z", "HEAD", sha).split(
                "\0"
            )
            in_the_way = [name for name in new if name and os.path.lexists(self.path / name)]
            switch(self.path, sha, stop, self._with_submodules)
        except GitError as error:
            for name in set(new) - {"", *in_the_way}:  # Git leaves those that it wrote before it came to the bad one.
                if not (self.path / name).is_dir():
                    (self.path / name).unlink(missing_ok=True)
            why = f"in the way of this commit: {', '.join(in_the_way)}" if in_the_way else "git cannot check it out"
            raise Untestable(f"{why}: {error}") from None
        for file in pinned:
            file.lay_over(self.path)

    def remove(self) -> None:
        switch(self.path, self.home, None, self._with_submodules)


def switch(checkout: Path, where: str, stop: Stop | None, with_submodules: bool) -> None:
    """Go to a branch or commit, dropping what a probe changed in tracked files. Raises GitError.

    The checkout was clean when the search began, so whatever differs is a probe's.
    """
    git(checkout, "reset", "--quiet", "--hard", stop=stop)
    detach = [] if _is_branch(checkout, where) else ["--detach"]
    git(checkout, "checkout", "--quiet", "--no-overwrite-ignore", *detach, where, "--", stop=stop)
    if with_submodules and (checkout / ".gitmodules").is_file():
        git(checkout, "submodule", "--quiet", "update", "--force", "--recursive", "--checkout", stop=stop)


def _is_branch(checkout: Path, name: str) -> bool:
    try:
        git(checkout, "show-ref", "--verify", "--quiet", f"refs/heads/{name}")
    except GitError:
        return False
    return True
