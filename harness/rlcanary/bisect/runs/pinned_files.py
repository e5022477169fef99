"""Pin files of the command that must not change during the search, and redirect its arguments to the worktree."""

import hashlib
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcanary.errors import UserError
from rlcanary.system.files import write_whole
from rlcanary.system.git import Repository

INTERPRETERS = re.compile(r"(python|pypy)[\d.]*|(ba|da|z|k|fi)?sh|perl|ruby|node")
WRAPPERS = {"conda", "env", "nice", "nohup", "pdm", "pixi", "poetry", "stdbuf", "time", "timeout", "uv", "xvfb-run"}
SCRIPTS = (".sh", ".bash", ".zsh", ".py", ".pl", ".rb", ".js")
CODE_OPTION = re.compile(r"-[a-zA-Z]*[cm]")
"""An option followed by code or a module's name, such as `bash -lc` and `python -m`."""
TAKES_CODE_AFTER_E = ("perl", "ruby", "node")
"""Interpreters whose option -e is followed by code. The -e of a shell stops its script at an error."""


@dataclass(frozen=True)
class PinnedFile:
    relative: str
    """The file's path relative to the checkout, and during a probe to the worktree."""
    copy: Path
    digest: str
    mode: int

    def behind_a_link(self, worktree: Path) -> str | None:
        """Return a folder of the file that is a link in this commit, through which other files would be written."""
        below = Path(self.relative).parents[:-1]  # the last is the worktree itself
        folders = [str(folder) for folder in below if (worktree / folder).is_symlink()]
        return folders[-1] if folders else None

    def lay_over(self, worktree: Path) -> None:
        """Put the file at its place; a link that is a folder of it makes way."""
        while (link := self.behind_a_link(worktree)) is not None:
            (worktree / link).unlink()
        target = worktree / self.relative
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        shutil.copyfile(self.copy, target)
        target.chmod(self.mode)


@dataclass(frozen=True)
class Command:
    """The user's command, ready to run in any worktree.

    A helper script is pinned in place rather than run from elsewhere, so that `$0`, `sys.path[0]` and relative paths in
    it refer to the worktree.
    """

    arguments: tuple[str, ...]
    """The typed arguments. A program in a virtual environment inside the checkout is named by its absolute path."""
    relocated: frozenset[int]
    """Indices of the arguments that are absolute paths in the checkout. `inside` moves them to the worktree."""
    pinned: tuple[PinnedFile, ...]
    absent: tuple[str, ...] = ()
    """Files and folders named by a relative path that neither the history nor a pin brings to a worktree."""

    def inside(self, worktree: Path, toplevel: Path) -> list[str]:
        """Return the arguments for a run in `worktree`."""
        return [
            str(worktree) + argument.removeprefix(str(toplevel)) if index in self.relocated else argument
            for index, argument in enumerate(self.arguments)
        ]


def prepare_command(
    arguments: Sequence[str], repository: Repository, bad: str, copies: Path, *, also: Sequence[str], automatic: bool
) -> Command:
    """Choose the files to pin and copy each to the folder `copies` under its SHA-256.

    Pinned are a program given by its path, the script of an interpreter, any file that is not in the history (such as a
    new test), and the files in `also`. Every other path follows the history.

    Raises:
        UserError: A path in `also` is not a file of the checkout.
    """
    here = repository.toplevel / repository.directory
    script = _script_index(arguments, here)
    prepared = list(arguments)
    relocated: set[int] = set()
    chosen: list[str] = []
    absent: list[str] = []
    for index, argument in enumerate(arguments):
        path = argument.split("::")[0]
        absolute = Path(path).is_absolute()
        by_name = index == 0 and "/" not in path
        if by_name or not path or not (absolute or os.path.lexists(here / path)):
            continue
        relative = _inside(here / path, repository)
        if relative is None:
            if not absolute:  # A relative path would resolve differently in the worktree.
                prepared[index] = os.path.normpath(here / path) + argument.removeprefix(path)
            continue
        file = repository.toplevel / relative
        if in_virtual_environment(file):
            prepared[index] = str(file)
            continue
        known = relative == "." or repository.has_file(bad, relative)
        pins = automatic and file.is_file() and (index == script or (not known and not absolute))
        if pins:
            chosen.append(relative)
        if absolute and (pins or known):
            prepared[index] = str(file) + argument.removeprefix(path)
            relocated.add(index)
        if not (absolute or pins or known or _in_submodule(file, repository)):
            absent.append(relative)
    for path in also:
        relative = _inside(here / path, repository)
        if relative is None or not (repository.toplevel / relative).is_file():
            raise UserError(f"--pin {path}: no such file in {repository.toplevel}")
        chosen.append(relative)
    pinned = tuple(_copy(repository.toplevel, relative, copies) for relative in dict.fromkeys(chosen))
    left = tuple(relative for relative in dict.fromkeys(absent) if relative not in chosen)
    return Command(tuple(prepared), frozenset(relocated), pinned, left)


def script_of(arguments: Sequence[str], repository: Repository) -> str | None:
    """Return the path, as typed, of the program or script that the command runs. None for a program found on PATH."""
    index = _script_index(arguments, repository.toplevel / repository.directory)
    if index is None:
        return None
    script = arguments[index]
    return script if "/" in script or (index > 0 and script.endswith(SCRIPTS)) else None


def _script_index(arguments: Sequence[str], here: Path) -> int | None:
    """Find the argument that is the program or script: `./check.sh`, `bash check.sh`, `timeout 9 python x.py`."""
    wrapped = Path(arguments[0]).name in WRAPPERS
    for index, argument in enumerate(arguments):
        if INTERPRETERS.fullmatch(name := Path(argument).name):
            for place, later in enumerate(arguments[index + 1 :], start=index + 1):
                if _is_code(later, name):
                    return None
                if not later.startswith("-"):
                    return place
            return None
        if not wrapped or ("/" in argument and index and _is_script(here / argument)):
            return index
    return None


def _is_code(option: str, interpreter: str) -> bool:
    return CODE_OPTION.fullmatch(option) is not None or (
        interpreter in TAKES_CODE_AFTER_E and re.fullmatch(r"-\w*e", option) is not None
    )


def _is_script(file: Path) -> bool:
    return os.access(file, os.X_OK) and file.is_file() and file.read_bytes()[:2] == b"#!"


def _inside(path: Path, repository: Repository) -> str | None:
    """Return the path relative to the checkout, or None if it is outside or in the git directory."""
    place = Path(os.path.realpath(path.parent)) / path.name
    if not place.is_relative_to(repository.toplevel) or place.is_relative_to(repository.common_dir):
        return None
    return str(place.relative_to(repository.toplevel))


def _in_submodule(file: Path, repository: Repository) -> bool:
    return any((folder / ".git").exists() for folder in file.parents if repository.toplevel in folder.parents)


def in_virtual_environment(file: Path) -> bool:
    return (file.parent.parent / "pyvenv.cfg").is_file()


def _copy(toplevel: Path, relative: str, copies: Path) -> PinnedFile:
    source = toplevel / relative
    content = source.read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    copy = copies / digest
    if not copy.exists():
        copies.mkdir(parents=True, exist_ok=True)
        write_whole(copy, content)
    return PinnedFile(relative, copy, digest, source.stat().st_mode & 0o777)
