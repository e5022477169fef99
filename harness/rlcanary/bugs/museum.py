"""Definition of an exhibit, and discovery of all exhibits."""

import importlib
import inspect
import pkgutil
from typing import ClassVar

from rlcanary import bugs
from rlcanary.adapters.reference import ReferenceAdapter

# Bugs that no capability of the contract can observe: source and reason.
OUT_OF_REACH = {
    "T15": ("TRL 5d914a412, #3833", "an entropy quantile per rank; no capability selects tokens by entropy"),
    "T37": ("TRL b55d9f041, #3043", "the mixture of a distillation loss; no capability distils"),
    "T48": ("TRL 8070ac041, #137", "values one position early; there is no critic in the contract"),
    "V24": ("verl 6e15bbe25, #2016", "a factor in the value loss; there is no critic in the contract"),
    "V50": ("verl 6b4a867ff, #5037", "expert routing replayed to the wrong layer; no capability carries routing"),
}


class Bug(ReferenceAdapter):
    """The reference with one mutation: a bug that shipped.

    Attributes:
        id: the name of the exhibit.
        source: repository, commit and pull request of the fix.
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
