"""A detached worktree in a private temporary folder. Probes may change it freely."""

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlcanary.bisect.runs.pinned_files import PinnedFile
from rlcanary.bisect.runs.submodules import initialised_submodules, submodule_paths
from rlcanary.system.git import GitError, Repository, git
from rlcanary.system.journal import locked
from rlcanary.system.sessions import Stop

DISK_FULL = "No space left on device"


class Untestable(Exception):
    """The commit cannot be checked out or built. The message says why."""


class Worktree:
    """A worktree of one search. `prepare(sha)` checks out a commit with submodules; `remove()` leaves no trace."""

    def __init__(self, repository: Repository, with_submodules: bool = True) -> None:
        self._repository = repository
        self._with_submodules = with_submodules
        # The first `prepare` makes it, after the journal has recorded it.
        self._folder = Path(tempfile.gettempdir(), f"rlcanary-bisect-{secrets.token_hex(6)}").resolve()
        # Keep the checkout's name, because some code depends on it.
        self.path = self._folder / repository.toplevel.name
        self._link = b""

    def prepare(self, sha: str, pinned: Sequence[PinnedFile] = (), stop: Stop | None = None) -> None:
        """Check out the commit `sha` and nothing else, with the pinned files copied over it.

        Raises:
            Untestable: git cannot check the commit out (a filter fails, an object is missing), or its submodules are
                not available.
            GitError: git cannot make a worktree at all.
            Stopped: The search was asked to stop.
        """
        if self._is_whole:
            try:
                self._switch(sha, stop)
            except GitError:
                # A probe can leave a worktree that git cannot mend (a broken .git, folders without permissions).
                self.discard()
        if not self._is_whole:
            self.discard()  # A probe, or a cleaner of /tmp, may have deleted the folder and left git's record of it.
            self._folder.mkdir(mode=0o700, exist_ok=True)
            add = ("worktree", "add", "--detach", "--no-checkout", "--quiet", str(self.path), sha)
            with alone_among_worktrees(self._repository, stop):
                git(self._repository.toplevel, *add, stop=stop)
            self._link = (self.path / ".git").read_bytes()
            try:
                self._switch(sha, stop)
            except GitError as error:
                if DISK_FULL in str(error):
                    raise
                raise Untestable(f"git cannot check it out: {error}") from None
        if self._with_submodules:
            try:
                update_submodules(self.path, self._repository.git_dir, self._repository.common_dir, stop)
            except GitError as error:
                raise Untestable(f"submodules: {error}") from None
        for file in pinned:
            file.lay_over(self.path)

    def remove(self) -> None:
        """Delete the worktree, its folder and git's record of it."""
        self.discard()
        _delete(self._folder)

    def discard(self) -> None:
        """Delete the worktree. The next `prepare` makes a new one."""
        remove_worktree(self._repository, self.path)

    @property
    def _is_whole(self) -> bool:
        """Whether git works in this worktree, rather than in a repository around it or behind a link at its path."""
        link = self.path / ".git"
        is_link = self.path.is_symlink() or self._folder.is_symlink()
        return not is_link and link.is_file() and link.read_bytes() == self._link

    def _switch(self, sha: str, stop: Stop | None) -> None:
        clean = ("clean", "-ffdxq")
        attributes = ":(glob)**/.gitattributes"
        if git(self.path, "diff", "--name-only", "HEAD", sha, "--", attributes, stop=stop):
            # A file whose blob is the same may get other line ends or another filter: git would leave it as it is.
            git(self.path, "read-tree", "--empty", stop=stop)
        git(self.path, *clean, stop=stop)
        git(self.path, "checkout", "--force", "--detach", "--quiet", sha, stop=stop)
        git(self.path, *clean, stop=stop)  # Delete folders of submodules that this commit lacks.


def remove_worktree(repository: Repository, path: Path) -> None:
    """Delete a worktree's folder, then git's record of it. Either may be gone already, or be replaced by a link."""
    if path.parent.is_symlink():
        path.parent.unlink()
    _delete(path)
    with alone_among_worktrees(repository):
        records = repository.git("worktree", "list", "--porcelain", "-z").split("\0")
        if f"worktree {path}" in records:
            # `git worktree prune` would forget the user's own worktrees on unmounted disks as well.
            repository.git("worktree", "remove", "--force", "--force", str(path))


@contextmanager
def alone_among_worktrees(repository: Repository, stop: Stop | None = None) -> Iterator[None]:
    """Hold a lock while a worktree is made or removed, because git fails on the records of half-made worktrees."""
    path = repository.common_dir / "rlcanary" / "worktrees.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path, stop.check if stop is not None else lambda: None):
        yield


def _delete(folder: Path) -> None:
    """Delete a folder that may contain folders without permissions.

    Raises:
        OSError: An entry belongs to another user.
    """
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    if not folder.exists():
        return
    for parent, names, _ in os.walk(folder):
        for name in names:
            if not (place := Path(parent, name)).is_symlink():
                place.chmod(stat.S_IRWXU)
    shutil.rmtree(folder)


def update_submodules(checkout: Path, git_dir: Path, modules_of: Path, stop: Stop | None) -> None:
    """Check out the recorded commits of the initialised submodules of `checkout`, including nested ones.

    Clones come from the user's own clones under `modules_of`/modules if they exist. So no network is needed, and the
    user's configuration and submodule checkouts stay as they are.

    Args:
        checkout: The working tree to update.
        git_dir: The git directory whose configuration lists the initialised submodules.
        modules_of: The git directory whose `modules` folder holds the user's clones.
        stop: What ends the work early, if anything.

    Raises:
        GitError: A commit is not available.
    """
    if not (checkout / ".gitmodules").is_file():
        return
    entries = git(checkout, "ls-files", "--stage", "-z").split("\0")
    links = {entry.split("\t", 1)[1]: entry.split()[1] for entry in entries if entry.startswith("160000 ")}
    is_initialised = initialised_submodules(git_dir, checkout)
    for name, path in submodule_paths(git(checkout, "config", "-z", "-f", ".gitmodules", "--list")).items():
        if path not in links or not is_initialised(name, path):
            continue
        own_clone = modules_of / "modules" / name
        submodule = checkout / path
        _update_submodule(checkout, name, path, own_clone if own_clone.is_dir() else None, links[path], stop)
        git(submodule, "clean", "-ffdxq", stop=stop)
        if own_clone.is_dir():
            update_submodules(submodule, own_clone, own_clone, stop)


def _update_submodule(
    checkout: Path, name: str, path: str, own_clone: Path | None, sha: str, stop: Stop | None
) -> None:
    active = ("-c", f"submodule.{name}.active=true")
    update = ("submodule", "--quiet", "update", "--force", "--checkout", "--", path)
    if own_clone is not None and _has_commit(own_clone, sha):
        # Git forbids clones by path since a hostile .gitmodules could name one; this path is ours, not from the file.
        local = ("-c", "protocol.file.allow=always", "-c", f"submodule.{name}.url={own_clone}")
        git(checkout, *active, *local, *update, stop=stop)
        return
    url = git(checkout, "config", "-f", ".gitmodules", f"submodule.{name}.url").strip()
    if url.startswith(("./", "../")):
        url = _resolve_relative(checkout, url)
    git(checkout, *active, "-c", f"submodule.{name}.url={url}", *update, stop=stop)


def _has_commit(repository: Path, sha: str) -> bool:
    try:
        git(repository, "--git-dir=.", "cat-file", "-e", f"{sha}^{{commit}}")
    except GitError:
        return False
    return True


def _resolve_relative(checkout: Path, url: str) -> str:
    """Resolve a submodule's relative URL against the checkout's remote, or against its path without a remote."""
    remotes = git(checkout, "remote").split()
    remote = "origin" if "origin" in remotes else remotes[0] if remotes else None
    if remote is None:
        base = str(Path(git(checkout, "rev-parse", "--path-format=absolute", "--git-common-dir").strip()).parent)
    else:
        base = git(checkout, "remote", "get-url", remote).strip().rstrip("/")
    while url.startswith(("./", "../")):
        if url.startswith("../"):
            cut = max(base.rfind("/"), base.rfind(":"))
            base = base[:cut]
        url = url.split("/", 1)[1]
    return f"{base}/{url}"
