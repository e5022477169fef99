"""The mutants of the code behind an adapter, with the checks that run them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from rlcanary.adapters.load import load_adapter
from rlcanary.checks import checks_of
from rlcanary.contract.adapter import Adapter
from rlcanary.errors import UserError
from rlcanary.mutants.contract import contract_mutants
from rlcanary.mutants.functions import functions_reached, mutants_of
from rlcanary.mutants.installed import InstalledMutant
from rlcanary.mutants.killing import Trial
from rlcanary.mutants.mutant import Mutant, Run
from rlcanary.mutants.reach import is_within, runs_on_original

# Frameworks: the checks use none of their code, so that their mutants stay to the end of a process.
INSTALLED = ("trl", "verl", "torchrl")
# The code that is mutated behind each bundled adapter. What one shares with another is mutated behind that one.
PACKAGES = {
    "reference": ("rlcanary.reference",),
    "grpo": ("rlcanary.grpo", "rlcanary.contract.engine", "rlcanary.contract.filtering", "rlcanary.contract.sampling"),
    "trl": ("trl",),
    "verl": ("verl",),
    "torchrl": ("torchrl",),
}


def packages_of(name: str) -> tuple[str, ...]:
    """Return the packages that are mutated behind a bundled adapter.

    Raises:
        UserError: no package is known for this adapter.
    """
    if name not in PACKAGES:
        raise UserError(f"no package is known to mutate behind {name!r}: the adapters are {', '.join(PACKAGES)}")
    return PACKAGES[name]


def function_mutants(
    runs: Sequence[Run], packages: Sequence[str], modules: Sequence[str] = (), installed_behind: str = ""
) -> list[Mutant]:
    """Return the mutants of the functions that the checks run.

    Args:
        runs: the checks on the original.
        packages: the packages to mutate.
        modules: the modules to mutate, by the end of their names (`reference.kl` or `kl`); all by default.
        installed_behind: the adapter of the framework whose code this is, "" if it is none.
    """
    found = (
        mutant
        for function in functions_reached(runs, packages)
        if not modules or _is_one_of(function.__module__, modules)
        for mutant in mutants_of(function)
    )
    if not installed_behind:
        return list(found)
    return [InstalledMutant(**vars(mutant), spec=installed_behind) for mutant in found]


def gather(
    name: str,
    modules: Sequence[str] = (),
    only: tuple[str, ...] = (),
    tell: Callable[[str, int, int], object] = lambda *_: None,
) -> list[Trial]:
    """Run the checks on an adapter, and return the mutants of what they run, each with the checks that run it.

    Args:
        name: the adapter.
        modules: the modules to mutate, as `function_mutants` takes them.
        only: prefixes of the ids of the checks to run; all by default.
        tell: is called before each check with its id, the number of checks that have run, and that of all.

    Raises:
        UserError: no package is known to mutate behind this adapter, it cannot be loaded, or there is no such
            check.
    """
    packages, adapter, checks = packages_of(name), load_adapter(name), checks_of(only)
    runs: list[Run] = []
    for index, check in enumerate(checks):
        tell(check.id, index, len(checks))
        runs += runs_on_original(adapter, name, [check], packages)
    found: list[Mutant] = [
        *function_mutants(runs, packages, modules, name if name in INSTALLED else ""),
        *(
            each
            for each in contract_mutants(adapter)
            if not modules or _is_one_of(each.where.partition(":")[0], modules)
        ),
    ]
    return trials(name, adapter, found, runs)


def trials(name: str, adapter: Adapter, mutants: Sequence[Mutant], runs: Sequence[Run]) -> list[Trial]:
    """Join each mutant with the checks that run it."""
    return [Trial(name, adapter, mutant, [run for run in runs if mutant.reached_by(run)]) for mutant in mutants]


def drawn(found: list[Trial], size: int | None, seed: int) -> list[Trial]:
    """Draw a random sample of this size, in the order of the list; all of them for None."""
    if size is None or size >= len(found):
        return found
    chosen = sorted(random.Random(seed).sample(range(len(found)), size))
    return [found[index] for index in chosen]


def _is_one_of(module: str, names: Sequence[str]) -> bool:
    endings = [module[start:] for start in (0, *(index + 1 for index, sign in enumerate(module) if sign == "."))]
    return any(is_within(ending, names) for ending in endings)
