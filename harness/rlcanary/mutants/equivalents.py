"""The reviewed list of equivalent mutants, which no input tells from the original.

Of a framework these are also the mutants that only show under settings which its adapter cannot make.
"""

from __future__ import annotations

import importlib
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.mutants.contract import contract_mutants
from rlcanary.mutants.functions import functions_of, mutants_of

LIST = Path(__file__).with_name("equivalents.toml")


@dataclass(frozen=True)
class Equivalent:
    """A mutant that gives the same results as the original.

    Attributes:
        where: the mutated place, `module:name`.
        diff: the mistake as lines that start with - and +.
        reason: why no input tells the two apart.
        release: the release of the framework whose code this is, such as "torchrl 0.14.1"; "" for code of this package.
    """

    where: str
    diff: str
    reason: str
    release: str = ""

    @property
    def id(self) -> str:
        """The id of the mutant."""
        return f"{self.where}\n{self.diff}"

    @property
    def is_installed(self) -> bool:
        """Whether the code is that of the installed release."""
        name, _, version = self.release.partition(" ")
        try:
            return not name or metadata.version(name) == version
        except metadata.PackageNotFoundError:
            return False


def equivalents(path: Path = LIST) -> list[Equivalent]:
    """Read the entries of the list whose code is installed.

    Raises:
        TypeError: an entry lacks a key or has one too many.
    """
    document: dict[str, list[dict[str, Any]]] = tomllib.loads(path.read_text(encoding="utf-8"))
    found = document.get("equivalent", [])
    entries = (Equivalent(**{name: text.strip() for name, text in entry.items()}) for entry in found)
    return [entry for entry in entries if entry.is_installed]


def stale(entries: list[Equivalent]) -> list[Equivalent]:
    """Return the entries that are no mutants of the code as it is."""
    ids = {where: _ids(where) for where in {entry.where for entry in entries}}
    return [entry for entry in entries if entry.id not in ids[entry.where]]


def _ids(where: str) -> set[str]:
    module = importlib.import_module(where.partition(":")[0])
    found = {mutant.id for mutant in contract_mutants(ReferenceAdapter()) if mutant.where == where}
    functions = {f"{function.__module__}:{function.__qualname__}": function for function in functions_of(module)}
    return found | ({mutant.id for mutant in mutants_of(functions[where])} if where in functions else set())
