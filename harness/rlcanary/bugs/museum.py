"""Definition of an exhibit, and discovery of all exhibits."""

import importlib
import inspect
import pkgutil
from typing import ClassVar

from rlcanary import bugs
from rlcanary.adapters.reference import ReferenceAdapter

# Of two surveys of 200 shipped bugs, those that no capability of the contract can observe: source and reason.
OUT_OF_REACH = {
    "skyrl.aborted-by-another-id": ("SkyRL c03863579, #1250", "the engine has no call that aborts requests"),
    "open-instruct.judge-without-the-question": (
        "open-instruct 55137f042, #933",
        "no capability makes the prompt of a judge",
    ),
}


class Bug(ReferenceAdapter):
    """The reference with one mutation: a bug that shipped.

    Attributes:
        id: the codebase (or the area, for a bug of several) and the mistake, such as "trl.permuted-scale".
        source: repository, commit and pull request of the fix, and the bug's number in the survey of shipped bugs.
        effect: the mutation's effect on the numbers.
    """

    id: ClassVar[str]
    source: ClassVar[str]
    effect: ClassVar[str]

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.id

    @classmethod
    def spec(cls) -> str:
        """Return the spec with which `load_adapter` finds this bug."""
        return f"{cls.__module__}:{cls.__name__}"

    @classmethod
    def area(cls) -> str:
        """Return the area of the core that it breaks."""
        return cls.__module__.rpartition(".")[2]


def all_bugs() -> list[type[Bug]]:
    """Return every bug of the modules in the folders beside this one, by folder and area."""
    found = pkgutil.walk_packages(bugs.__path__, f"{bugs.__name__}.")
    modules = [importlib.import_module(module.name) for module in found if module.name.count(".") == 3]
    return [
        value
        for module in modules
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Bug) and value.__module__ == module.__name__
    ]
