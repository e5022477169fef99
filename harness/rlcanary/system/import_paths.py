"""Find the checkout's folders that Python imports from, so that a probe imports the commit under test instead."""

import json
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlcanary.system.git import environment_without_repository

# Import paths come from PYTHONPATH and .pth files, and setuptools maps package names to folders: only Python itself knows.
QUESTION = """
import json, sys
packages = {}
for finder in sys.meta_path:
    packages.update(getattr(sys.modules.get(getattr(finder, "__module__", "")), "MAPPING", {}))
print(json.dumps({"paths": [p for p in sys.path if p], "packages": packages, "prefixes": [sys.prefix, sys.base_prefix]}))
"""


@dataclass(frozen=True)
class ImportPaths:
    relative: tuple[str, ...]
    """Folders of the checkout that Python imports from in any directory. They come first on a probe's PYTHONPATH."""
    unreachable: tuple[str, ...]
    """Packages of the checkout with another name than their folder. Probes would import them from the checkout."""


def find_import_paths(command: Sequence[str], toplevel: Path, directory: Path) -> ImportPaths:
    """Ask the interpreter that the command probably uses. Without one the result is empty."""
    python = _interpreter(command, directory)
    if python is None:
        return ImportPaths((), ())
    try:
        finished = subprocess.run(
            [python, "-c", QUESTION],
            cwd="/",
            env=environment_without_repository(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=True,
        )
        answer = json.loads(finished.stdout.splitlines()[-1])  # A sitecustomize may print lines of its own before.
    except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
        return ImportPaths((), ())  # A Python that cannot start reports it when the command runs.
    prefixes = [Path(prefix).resolve() for prefix in answer["prefixes"]]
    folders: list[Path] = [Path(path).resolve() for path in answer["paths"] if Path(path).is_absolute()]
    unreachable: list[str] = []
    for name, place in answer["packages"].items():
        package = Path(place).resolve()
        parts = name.split(".")
        if package.with_suffix("").parts[-len(parts) :] == tuple(parts):
            folders.append(package.parents[len(parts) - 1])
        elif package.is_relative_to(toplevel):
            unreachable.append(name)
    inside = [
        str(folder.relative_to(toplevel))
        for folder in folders
        if folder.is_relative_to(toplevel) and not any(folder.is_relative_to(prefix) for prefix in prefixes)
    ]
    return ImportPaths(tuple(dict.fromkeys(inside)), tuple(unreachable))


def _interpreter(command: Sequence[str], directory: Path) -> str | None:
    """Find the command's interpreter: the program itself, the one in its #! line, or the first Python on PATH."""
    place = command[0] if "/" not in command[0] else str(directory / command[0])
    program = shutil.which(place)
    if program is not None:
        if Path(program).name.startswith("python"):
            return program
        try:
            with Path(program).open("rb") as file:
                first = file.readline(4096)
        except OSError:
            first = b""  # A program may be executable and not readable.
        if first.startswith(b"#!") and b"python" in first:
            words = first[2:].decode(errors="replace").split()
            return shutil.which(words[-1]) if words[0].endswith("/env") else words[0]
    return shutil.which("python3") or shutil.which("python")
