"""Copy the code as it is now to a folder named for its content."""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcanary.errors import UserError
from rlcanary.launch.edits import Edits
from rlcanary.system.files import make_folder, temporary_pattern
from rlcanary.system.git import Repository, git

DEFAULT_FOLDER = "code_snapshots"


@dataclass(frozen=True)
class Snapshot:
    path: Path
    key: str
    is_new: bool


def take_snapshot(
    repository: Repository, folder: Path, name: str, edits: Edits | None = None, also: Sequence[str] = ()
) -> Snapshot:
    """Copy the tracked files in the checkout, submodules included, to `folder`/`name`-KEY.

    The key is a hash of the files. The same code is copied once, and different code or edits get another folder. The
    copy is written under another name and renamed, so a snapshot with its final name is complete. `also` names files
    relative to the checkout that need not be tracked.

    Raises:
        UserError: An existing snapshot was modified, or there is nothing to copy.
    """
    files = sorted({*tracked_files(repository.toplevel), *also})
    if not files:
        raise UserError(f"git tracks no file in {repository.toplevel}: there is nothing to copy")
    make_folder(folder)
    if not (folder / ".gitignore").exists() and folder.is_relative_to(repository.toplevel):
        (folder / ".gitignore").write_text("*\n", encoding="utf-8")
    temporary = Path(tempfile.mkdtemp(prefix=temporary_pattern(name).split("*")[0], suffix=".tmp", dir=folder))
    try:
        for file in files:
            _copy(repository.toplevel / file, temporary / file)
        if edits is not None:
            edits.apply(temporary)
        key = digest(temporary, files)
        target = folder / f"{name}-{key[:16]}"
        temporary.chmod(0o755)
        try:
            temporary.rename(target)
        except OSError:
            if not target.is_dir():
                raise
            _check(target, files, key)
            return Snapshot(target, key, False)
        return Snapshot(target, key, True)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def tracked_files(toplevel: Path) -> list[str]:
    """List the relative paths of tracked files and links that exist in the checkout, submodules included."""
    names = git(toplevel, "ls-files", "--recurse-submodules", "-z").split("\0")
    return [name for name in names if name and _is_copied(toplevel / name)]


def digest(root: Path, files: Sequence[str]) -> str:
    """Compute a SHA-256 over the paths, the contents and the executable bits."""
    total = hashlib.sha256()
    for file in files:
        path = root / file
        if path.is_symlink():
            kind, content = b"link", os.fsencode(path.readlink())
        elif path.is_file():
            kind = b"program" if path.stat().st_mode & stat.S_IXUSR else b"file"
            content = hashlib.sha256(path.read_bytes()).digest()
        else:
            kind, content = b"missing", b""
        for part in (os.fsencode(file), kind, content):
            total.update(len(part).to_bytes(8, "big") + part)
    return total.hexdigest()


def _is_copied(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target, follow_symlinks=False)


def _check(snapshot: Path, files: Sequence[str], key: str) -> None:
    if digest(snapshot, files) != key:
        raise UserError(f"{snapshot} was changed since it was taken: delete it to take a new one")
