"""Checkouts that probes run in: private worktrees, or with `--in-place` the user's checkout."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from rlcanary.bisect.runs.pinned_files import PinnedFile
from rlcanary.bisect.runs.submodules import submodule_paths
from rlcanary.bisect.runs.worktree import Untestable
from rlcanary.errors import UserError
from rlcanary.system.git import GitError, Repository, git
from rlcanary.system.sessions import Stop


class Place(Protocol):
    """A checkout for one probe at a time."""

    path: Path

    def prepare(self, sha: str, pinned: Sequence[PinnedFile] = (), stop: Stop | None = None) -> None:
        """Check out the commit `sha`, with the pinned files copied over it.

        Raises:
            Untestable: git cannot check the commit out, or its submodules are not available.
            GitError: The place itself cannot be made.
            Stopped: The search was asked to stop.
        """
        ...

    def remove(self) -> None:
        """Restore the state from before the search."""
        ...


class Checkout:
    """The user's own checkout. It is clean at the start, and on the same branch again at the end.

    Untracked and ignored files are left alone: a commit that would overwrite one is untestable.
    """

    def __init__(self, repository: Repository, with_submodules: bool = True) -> None:
        """Check that the checkout can be used.

        Raises:
            UserError: The search would mix with uncommitted changes.
        """
        self.path = repository.toplevel
        self._repository = repository
        self._with_submodules = with_submodules
        if edits := repository.uncommitted(*(["--ignore-submodules=untracked"] if with_submodules else [])):
            raise UserError(
                f"--in-place: {edits} tracked files have uncommitted changes: commit or stash them, or leave --in-place "
                "out, which searches in a worktree and does not touch them"
            )
        if hidden := _hidden_from_git(repository, with_submodules):
            raise UserError(
                f"--in-place: git does not show changes of {hidden}, which would be lost: `git update-index "
                f"--no-assume-unchanged --no-skip-worktree {hidden}`, or commit them in a submodule, or leave --in-place out"
            )
        for name in ("BISECT_LOG", "MERGE_HEAD", "rebase-merge", "rebase-apply", "CHERRY_PICK_HEAD", "index.lock"):
            if (repository.git_dir / name).exists():
                raise UserError(
                    f"--in-place: another git operation is under way here ({name}): finish it, or leave --in-place out"
                )
        try:
            # `--short` would give heads/NAME where a tag has the branch's name, and a checkout of that detaches HEAD.
            self.home = repository.git("symbolic-ref", "--quiet", "HEAD").strip().removeprefix("refs/heads/")
        except GitError:
            self.home = repository.git("rev-parse", "HEAD").strip()
        self._laid: list[Path] = []  # pinned files that the commit under test does not have

    def prepare(self, sha: str, pinned: Sequence[PinnedFile] = (), stop: Stop | None = None) -> None:
        new: dict[str, str | None] = {}  # with what is in their way
        self._take_up_pinned_files()
        try:
            git(self.path, "reset", "--quiet", "--hard", stop=stop)
            added = git(self.path, "diff", "--name-only", "--no-renames", "--diff-filter=A", "-z", "HEAD", sha)
            new = {name: self._in_the_way(name) for name in added.split("\0") if name}
            switch(self.path, sha, stop, self._with_submodules)
        except GitError as error:
            for name, obstacle in new.items():  # A failed checkout leaves the files that git wrote first.
                if obstacle is None and not (self.path / name).is_dir():
                    (self.path / name).unlink(missing_ok=True)
            obstacles = dict.fromkeys(obstacle for obstacle in new.values() if obstacle)
            why = f"in the way of this commit: {', '.join(obstacles)}" if obstacles else "git cannot check it out"
            raise Untestable(f"{why}: {error}") from None
        for file in pinned:
            if link := file.behind_a_link(self.path):
                raise Untestable(f"{file.relative} is pinned, and {link} is a link in this commit")
            if not os.path.lexists(self.path / file.relative):
                self._laid.append(self.path / file.relative)
            file.lay_over(self.path)

    def _take_up_pinned_files(self) -> None:
        """Delete the pinned files that were put where the commit has none: they would be in the way of others that do."""
        while self._laid:
            file = self._laid.pop()
            file.unlink(missing_ok=True)
            for folder in file.parents:
                if folder == self.path or not folder.is_dir() or any(folder.iterdir()):
                    break
                folder.rmdir()

    def _in_the_way(self, name: str) -> str | None:
        """Return the file that is where this one is to be, or where it needs a folder; None if there is none."""
        if os.path.lexists(self.path / name):
            return name
        folders = (self.path / folder for folder in Path(name).parents)
        return next((str(each.relative_to(self.path)) for each in folders if each.is_file()), None)

    def remove(self) -> None:
        """Go home."""
        self._take_up_pinned_files()
        switch(self.path, self.home, None, self._with_submodules)


def _hidden_from_git(repository: Repository, with_submodules: bool) -> str | None:
    """Return a file that git is told not to look at, or a submodule with edits that its own settings hide."""
    for entry in repository.git("ls-files", "-v", "-z", "--full-name", ":/").split("\0"):
        mark, _, name = entry.partition(" ")
        if (mark.islower() or mark == "S") and os.path.lexists(repository.toplevel / name):
            return name
    if with_submodules and (repository.toplevel / ".gitmodules").is_file():
        look = 'git status --porcelain --untracked-files=no --ignore-submodules=untracked | sed "s|^|$displaypath: |"'
        told = git(repository.toplevel, "submodule", "--quiet", "foreach", "--recursive", look)
        return told.partition(": ")[0] or None
    return None


def switch(checkout: Path, where: str, stop: Stop | None, with_submodules: bool) -> None:
    """Switch to a branch or commit. A probe's changes to tracked files are dropped.

    The checkout was clean when the search began, so every difference comes from a probe.

    Raises:
        GitError: git cannot switch.
    """
    git(checkout, "reset", "--quiet", "--hard", stop=stop)
    if with_submodules and (checkout / ".gitmodules").is_file():
        git(checkout, "submodule", "--quiet", "foreach", "--recursive", "git reset --quiet --hard", stop=stop)
    if with_submodules:
        _check_submodules_that_come_back(checkout, where)
    detach = [] if _is_branch(checkout, where) else ["--detach"]
    git(checkout, "checkout", "--quiet", "--no-overwrite-ignore", *detach, where, "--", stop=stop)
    if with_submodules:
        _switch_submodules(checkout, stop)


def _check_submodules_that_come_back(checkout: Path, where: str) -> None:
    """Check that no folder left by a submodule of other commits has edits, which are the user's.

    Raises:
        GitError: One has.
    """
    here = git(checkout, "ls-files", "--stage", "-z").split("\0")
    there = git(checkout, "ls-tree", "-r", "-z", where).split("\0")
    known, wanted = ({e.split("\t", 1)[1] for e in entries if e.startswith("160000 ")} for entries in (here, there))
    for path in sorted(wanted - known):
        folder = checkout / path
        if (folder / ".git").exists() and git(folder, "status", "--porcelain", "--untracked-files=no"):
            raise GitError(["submodule"], f"{path} has uncommitted changes, and this checkout does not use it")


def _switch_submodules(checkout: Path, stop: Stop | None) -> None:
    """Check out the recorded commits of the submodules. Untracked and ignored files in them are not overwritten.

    Raises:
        GitError: A commit is not available, or a file is in its way.
    """
    if not (checkout / ".gitmodules").is_file():
        return
    paths = submodule_paths(git(checkout, "config", "-z", "-f", ".gitmodules", "--list"))
    # What `git submodule update --checkout` runs would overwrite ignored files.
    how = f"!git -c core.hooksPath={os.devnull} checkout --quiet --no-overwrite-ignore --detach"
    update = [word for name in paths for word in ("-c", f"submodule.{name}.update={how}")]
    git(checkout, *update, "submodule", "--quiet", "update", stop=stop)
    for path in paths.values():
        if (checkout / path / ".git").exists():
            git(
                checkout / path, "checkout-index", "--all", "--quiet", stop=stop
            )  # A probe may have deleted the folder.
            _switch_submodules(checkout / path, stop)


def _is_branch(checkout: Path, name: str) -> bool:
    try:
        git(checkout, "show-ref", "--verify", "--quiet", f"refs/heads/{name}")
    except GitError:
        return False
    return True
