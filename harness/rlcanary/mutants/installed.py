"""Mistakes in the installed code of a framework, which stay to the end of the process."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from types import CodeType, FunctionType
from typing import cast

from rlcanary.adapters.load import load_adapter
from rlcanary.contract.adapter import Adapter
from rlcanary.mutants.functions import FunctionMutant
from rlcanary.mutants.reach import is_within


def planted_for_good(codes: Iterable[tuple[FunctionType, CodeType]], spec: str, adapter: Adapter) -> Adapter:
    """Give functions other code, and load the adapter again: what it built before has the original's objects.

    The checks use no code of a framework, so that nothing has to be put back before they compute what they expect.

    Args:
        codes: functions and their new code.
        spec: the adapter's name for `load_adapter`.
        adapter: the original.
    """
    for function, code in codes:
        function.__code__ = code
    place = type(adapter).__module__
    package = place.rpartition(".")[0] or place
    for name, module in list(sys.modules.items()):
        if is_within(name, (package,)):
            for value in list(vars(module).values()):
                if hasattr(value, "cache_clear"):
                    value.cache_clear()
    return load_adapter(spec)


@dataclass(frozen=True)
class InstalledMutant(FunctionMutant):
    """A function of a framework with one mistake.

    Attributes:
        spec: the name of the framework's adapter.
    """

    spec: str = ""

    def planted_in(self, adapter: Adapter) -> Adapter:
        """Plant the mutant to the end of the process, which is a fork, and load the adapter again."""
        function = cast(FunctionType, self.function)  # a function as an attribute is typed as a bound method
        return planted_for_good([(function, self.code)], self.spec, adapter)
