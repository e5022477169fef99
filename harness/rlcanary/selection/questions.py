"""Ask again what the code under test asked: whether a path exists, what a folder holds, what a variable is set to.

A question is a file in testmon's terms, with a name that no file has and the answer as its content, so that another answer
is a change of that file.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterable, Mapping
from configparser import ConfigParser
from configparser import Error as ConfigError
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from rlcanary.selection.injected.rlcanary_recorder.files import (
    ABSENT,
    EXISTS,
    FOLDER,
    LISTING,
    digest,
    kind_of,
    listing,
)
from rlcanary.selection.injected.rlcanary_recorder.files import content as content_of
from rlcanary.selection.injected.rlcanary_recorder.variables import ENVIRONMENT

MODULE = "module"
OPTIONS = "options"
CHOSEN_VARIABLES = "rlcanary_selection_environment"
CONTENT = "content"  # of a file of code that is read as data, comments included
MARK = "?"
PYTEST_OPTIONS = f"pytest{MARK}{OPTIONS}"
PACKAGES = f"installed{MARK}packages"
CONFIGURATIONS = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")


KINDS = (EXISTS, LISTING, ENVIRONMENT, MODULE, CONTENT, OPTIONS, "packages")


def named(kind: str, about: str) -> str:
    return f"{about}{MARK}{kind}"


def is_question(filename: str) -> bool:
    return filename.rpartition(MARK)[2] in KINDS and MARK in filename


def of_candidates(candidates: Iterable[str]) -> str:
    """Name the question which of these modules, paths without an ending, exist."""
    return named(MODULE, "\n".join(sorted(candidates)))


def answer(root: Path, filename: str, environment: Mapping[str, str], listed: dict[str, frozenset[str]]) -> str:
    """Return the present answer to a question; `listed` keeps the names in folders for the next one."""
    about, _, kind = filename.rpartition(MARK)
    path = str(root / about)
    if kind == EXISTS:
        return kind_of(path)
    if kind == CONTENT:
        return content_of(path)
    if kind == LISTING:
        return listing(path)
    if kind == ENVIRONMENT:
        return of_variable(environment, about)
    if kind == MODULE:
        return digest(" ".join(of_module(str(root), each, listed) for each in about.split("\n")).encode())
    return of_pytest(root, environment)


def of_module(root: str, candidate: str, listed: dict[str, frozenset[str]]) -> str:
    """Return a text that changes with what an import finds at this path."""
    folder, _, name = candidate.rpartition("/")
    names = names_in(f"{root}/{folder}", listed)
    package = kind_of(f"{root}/{candidate}") if name in names else ABSENT
    begins = package == FOLDER and "__init__.py" in names_in(f"{root}/{candidate}", listed)
    return f"{package} {begins} {f'{name}.py' in names}"


def names_in(folder: str, listed: dict[str, frozenset[str]]) -> frozenset[str]:
    if folder not in listed:
        try:
            listed[folder] = frozenset(os.listdir(folder))
        except OSError:
            listed[folder] = frozenset()
    return listed[folder]


def of_variable(environment: Mapping[str, str], name: str) -> str:
    value = environment.get(name)
    return "" if value is None else digest(value.encode(errors="surrogateescape"))


def of_pytest(root: Path, environment: Mapping[str, str]) -> str:
    """Return a text that changes with pytest's options in its configuration file, and the variables named there."""
    options = pytest_options(root)
    chosen = options.get(CHOSEN_VARIABLES, [])
    patterns = chosen.split() if isinstance(chosen, str) else list(map(str, chosen))
    variables = {
        name: value for name, value in environment.items() if any(fnmatch(name, pattern) for pattern in patterns)
    }
    return digest(repr((sorted(options.items()), sorted(variables.items()))).encode())


def pytest_options(root: Path) -> dict[str, Any]:
    """Read pytest's section of the configuration file that it takes in this folder; empty if it has none."""
    for name in CONFIGURATIONS:
        path = root / name
        if not path.is_file():
            continue
        try:
            section = section_of(path)
        except (tomllib.TOMLDecodeError, ConfigError, UnicodeDecodeError):
            continue  # pytest itself refuses it, with a better message
        if section is not None:
            return section
    return {}


def section_of(path: Path) -> dict[str, Any] | None:
    if path.suffix == ".toml":
        content = tomllib.loads(path.read_text(encoding="utf-8"))
        if path.name != "pyproject.toml":
            return dict(content.get("pytest", {}))
        pytest = content.get("tool", {}).get("pytest")
        return None if pytest is None else {**pytest.get("ini_options", {}), **pytest}
    parser = ConfigParser(interpolation=None, strict=False, allow_no_value=True)
    parser.read(path, encoding="utf-8")
    section = "tool:pytest" if path.name == "setup.cfg" else "pytest"
    if parser.has_section(section):
        return dict(parser.items(section))
    return {} if path.name.endswith("pytest.ini") else None
