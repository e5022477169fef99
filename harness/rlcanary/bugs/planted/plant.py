"""A museum bug in the installed code of a framework."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FunctionType

from rlcanary.contract.adapter import Adapter
from rlcanary.errors import UserError
from rlcanary.mutants.functions import function_at, with_text
from rlcanary.mutants.installed import planted_for_good
from rlcanary.mutants.mutant import Run


@dataclass(frozen=True)
class Change:
    """A change of one function's source.

    Attributes:
        place: the function, as `module:name`.
        before: text that its source has once.
        after: what stands there with the bug.
    """

    place: str
    before: str
    after: str


@dataclass(frozen=True)
class Plant:
    """The change that brings a museum bug back into a framework.

    Attributes:
        bug: the bug's id in the museum.
        changes: what the fix changed, undone.
        through: capabilities that reach the changed code, besides those that the bug changes in the reference.
        missed: the reviewed reason why no check catches it, "" where one has to.
    """

    bug: str
    changes: tuple[Change, ...]
    through: tuple[str, ...] = ()
    missed: str = ""


@dataclass(frozen=True)
class Framework:
    """The bugs of a framework.

    Attributes:
        adapter: the name of its adapter.
        plants: those that are brought back.
        elsewhere: shipped bugs in code that the adapter does not drive or that is gone, with the reason, by id.
        prepare: makes modules importable that otherwise are not.
    """

    adapter: str
    plants: Sequence[Plant]
    elsewhere: Mapping[str, str]
    prepare: Callable[[], object]


FRAMEWORKS = ("trl", "verl", "torchrl")


def framework_of(adapter: str) -> Framework:
    """Return the bugs of the framework behind a bundled adapter.

    Raises:
        UserError: none are known.
    """
    if adapter not in FRAMEWORKS:
        raise UserError(f"no bug is planted behind {adapter!r}: the adapters are {', '.join(FRAMEWORKS)}")
    module = importlib.import_module(f"rlcanary.bugs.planted.{adapter}_bugs")
    return Framework(adapter, module.PLANTS, module.ELSEWHERE, getattr(module, "prepare", lambda: None))


class Planted:
    """A mutant that has a bug in a framework's installed functions, from its construction to the end of the process."""

    def __init__(self, adapter: str, plant: Plant, capabilities: frozenset[str]) -> None:
        """Compile the changed functions.

        Args:
            adapter: the name of the framework's adapter.
            plant: the bug.
            capabilities: those of the adapter through which the changed code runs.

        Raises:
            UserError: the framework has no such function, or its source does not have the text once.
        """
        self.adapter, self.capabilities = adapter, capabilities
        self.where = f"{adapter}:{plant.bug}"
        self.diff = "\n".join(f"- {change.before}\n+ {change.after}" for change in plant.changes)
        changes: dict[str, list[tuple[str, str]]] = {}
        for change in plant.changes:
            changes.setdefault(change.place, []).append((change.before, change.after))
        self._codes: list[tuple[FunctionType, CodeType]] = []
        for place, texts in changes.items():
            function = function_at(place)
            self._codes.append((function, with_text(function, texts)))

    @property
    def id(self) -> str:
        return f"{self.where}\n{self.diff}"

    def planted_in(self, adapter: Adapter) -> Adapter:
        """Plant the bug and load the adapter again: what it built before has the original's objects."""
        return planted_for_good(self._codes, self.adapter, adapter)

    def reached_by(self, run: Run) -> frozenset[str]:
        return self.capabilities & frozenset(run.check.needs)
