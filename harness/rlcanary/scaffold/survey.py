"""Look at a repository: the RL framework that it uses, Ray, vLLM, its tests, its pytest settings."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlcanary.errors import UserError
from rlcanary.system.pytest_settings import pytest_settings

FRAMEWORKS = ("trl", "verl", "skyrl", "torchrl", "nemo_rl", "openrlhf", "prime_rl")
"""The frameworks with a bundled adapter."""

ALIASES = {"skyrl_train": "skyrl", "skyrl_gym": "skyrl"}
WANTED = (*FRAMEWORKS, "ray", "vllm")
TEXT_FILES = re.compile(r"[\w-]*(requirements|constraints)[\w.-]*\.(txt|in)|setup\.(py|cfg)|Pipfile|environment\.ya?ml")
SKIPPED = {"node_modules", "site-packages", "build", "dist", "venv", "__pycache__"}


@dataclass(frozen=True)
class Survey:
    """The facts about a repository that `rlcanary init` starts from.

    Attributes:
        root: its folder.
        repository: the root of the git repository around it, which GitHub and pre-commit look at; itself without one.
        name: the name of its project, or of its folder.
        evidence: for each framework, Ray and vLLM that it uses, the files that say so.
        named: those of them that a dependency file names.
        tests: the folder of its tests.
        has_tests: whether that folder is there.
        is_package: whether it says how pip builds it.
        dependencies: those of its project table.
        requirements: its requirements.txt, if there is one.
        pytest_file: the file that configures pytest there, in its folder or above it, if there is one.
    """

    root: Path
    repository: Path
    name: str
    evidence: dict[str, list[str]]
    named: frozenset[str]
    tests: str
    has_tests: bool
    is_package: bool
    dependencies: tuple[str, ...]
    requirements: str | None
    pytest_file: Path | None

    @property
    def inside(self) -> str:
        """Its path from the root of the git repository, with slashes; empty if it is the root."""
        return "" if self.root == self.repository else self.root.relative_to(self.repository).as_posix()

    @property
    def frameworks(self) -> list[str]:
        """The frameworks that it uses: those named among its dependencies first, then those that more files import."""
        used = [name for name in FRAMEWORKS if name in self.evidence]
        return sorted(used, key=lambda name: (name not in self.named, -len(self.evidence[name])))


def survey(root: Path) -> Survey:
    """Look at the repository in a folder.

    Raises:
        UserError: its pyproject.toml, or the file that configures pytest, cannot be read.
    """
    project = _pyproject(root)
    named = dict(_named(root, project))
    evidence = {name: [file] for name, file in named.items()}
    for file in python_files(root):
        for name in _imported(file):
            evidence.setdefault(name, []).append(str(file.relative_to(root)))
    tests = next((name for name in ("tests", "test") if (root / name).is_dir()), None)
    settings = pytest_settings(root)
    return Survey(
        root=root,
        repository=next((folder for folder in (root, *root.parents) if (folder / ".git").exists()), root),
        name=project.get("project", {}).get("name") or root.resolve().name,
        evidence=evidence,
        named=frozenset(named),
        tests=tests or "tests",
        has_tests=tests is not None,
        is_package="build-system" in project or (root / "setup.py").is_file(),
        dependencies=tuple(project.get("project", {}).get("dependencies", [])),
        requirements="requirements.txt" if (root / "requirements.txt").is_file() else None,
        pytest_file=settings.file,
    )


def python_files(root: Path) -> Iterator[Path]:
    """Yield the Python files of a repository, without those of environments and builds."""
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in sorted(folders) if name not in SKIPPED and not name.startswith(".")]
        named = (Path(folder, name) for name in sorted(files) if name.endswith(".py"))
        yield from (file for file in named if file.is_file())  # an editor's lock is a link to nothing


def installed_release(package: str) -> str | None:
    """Return the release of a package that is installed here, None if pip knows of none."""
    try:
        return version(package.replace("_", "-"))
    except PackageNotFoundError:
        return None


def _pyproject(root: Path) -> dict[str, Any]:
    path = root / "pyproject.toml"
    if not path.is_file():
        return {}
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _named(root: Path, project: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what the dependency files name, each with the file; the repository's own name counts too."""
    table, poetry = project.get("project", {}), project.get("tool", {}).get("poetry", {})
    groups = [table.get("dependencies", []), *table.get("optional-dependencies", {}).values()]
    groups += [*project.get("dependency-groups", {}).values(), poetry.get("dependencies", {})]
    groups += [group.get("dependencies", {}) for group in poetry.get("group", {}).values()]
    lines = [table.get("name", ""), *(line for group in groups for line in group if isinstance(line, str))]
    for line in lines:
        if name := _wanted(line):
            yield name, "pyproject.toml"
    files = [file for file in sorted(root.glob("*")) if TEXT_FILES.fullmatch(file.name)]
    for file in [*files, *sorted(root.glob("requirements/*.txt")), *sorted(root.glob("requirements/*.in"))]:
        if file.is_file():
            for line in re.split(r"[\n,\[]", file.read_text(encoding="utf-8", errors="replace")):
                if name := _wanted(line):
                    yield name, str(file.relative_to(root))


def _wanted(requirement: str) -> str | None:
    """Return the framework that a requirement is of, None for any other requirement."""
    match = re.match(r"[\s\"'-]*([A-Za-z0-9][\w.-]*)\s*([\[<>=~!;@\"'#]|$)", requirement)
    name = re.sub(r"[-.]", "_", match[1].lower()) if match else ""
    name = ALIASES.get(name, name)
    return name if name in WANTED else None


def _imported(file: Path) -> set[str]:
    text = file.read_text(encoding="utf-8", errors="replace")
    names = re.findall(r"^[ \t]*(?:from|import)[ \t]+([A-Za-z_]\w*)", text, re.MULTILINE)
    return {ALIASES.get(name, name) for name in names} & set(WANTED)
