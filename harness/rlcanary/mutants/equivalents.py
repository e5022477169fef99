"""The reviewed list of equivalent mutants, which no input tells from the original."""

from __future__ import annotations

import importlib
import tomllib
from dataclasses import dataclass
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
    """

    where: str
    diff: str
    reason: str

    @property
    def id(self) -> str:
        """The id of the mutant."""
        return f"{self.where}\n{self.diff}"


def equivalents(path: Path = LIST) -> list[Equivalent]:
    """Read the list.

    Raises:
        TypeError: an entry lacks a key or has one too many.
    """
    document: dict[str, list[dict[str, Any]]] = tomllib.loads(path.read_text(encoding="utf-8"))
    return [
        Equivalent(**{name: text.strip() for name, text in entry.items()}) for entry in document.get("equivalent", [])
    ]


def stale(entries: list[Equivalent]) -> list[Equivalent]:
    """Return the entries that are no mutants of the code as it is. The packages of all entries have to be installed."""
    ids = {where: _ids(where) for where in {entry.where for entry in entries}}
    return [entry for entry in entries if entry.id not in ids[entry.where]]


def _ids(where: str) -> set[str]:
    module = importlib.import_module(where.partition(":")[0])
    found = {mutant.id for mutant in contract_mutants(ReferenceAdapter()) if mutant.where == where}
    functions = {f"{function.__module__}:{function.__qualname__}": function for function in functions_of(module)}
    return found | ({mutant.id for mutant in mutants_of(functions[where])} if where in functions else set())
