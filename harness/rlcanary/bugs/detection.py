"""Detection of the shipped bugs by the checks, and false alarms on a correct implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlcanary.adapters.reference import ReferenceAdapter
    from rlcanary.bugs import Bug
    from rlcanary.checks import Check, Result
    from rlcanary.contract.conventions import Conventions


@dataclass(frozen=True)
class Detection:
    """A bug and the checks that fail on it."""

    bug: type[Bug]
    results: list[Result]

    @property
    def caught_by(self) -> list[str]:
        return [result.id for result in self.results if result.status == "fail"]


def changed_capabilities(mutated: type[ReferenceAdapter]) -> set[str]:
    """Return the capabilities that the mutation changes."""
    from rlcanary.adapters.reference import ReferenceAdapter
    from rlcanary.contract.adapter import CAPABILITIES

    # Capabilities that make the inputs of checks which call these.
    settings = {
        "new_state": ("train_step", "evaluate", "sync_weights"),
        "new_engine": ("generate", "sync_weights", "evaluate"),
    }
    differing = [
        name for name in (*CAPABILITIES, *settings) if getattr(mutated, name) is not getattr(ReferenceAdapter, name)
    ]
    return {capability for name in differing for capability in settings.get(name, (name,))}


def relevant_checks(mutated: type[ReferenceAdapter]) -> list[Check]:
    """Return the checks that call a capability changed by the mutation; for all others the bug equals the reference."""
    from rlcanary.checks import all_checks

    changed = changed_capabilities(mutated)
    return [check for check in all_checks() if not changed or changed & set(check.needs)]


def detect(bug: type[Bug], seed: int = 0) -> Detection:
    """Run the relevant checks on one bug."""
    from rlcanary.checks import run_check

    return Detection(bug, [run_check(check, bug(), bug.spec(), seed) for check in relevant_checks(bug)])


def false_alarms(conventions: Conventions, seed: int = 0) -> list[Result]:
    """Return the checks that fail, or raise, on the reference under some conventions. There must be none."""
    from rlcanary.adapters.reference import ReferenceAdapter
    from rlcanary.checks import all_checks, run_check

    adapter = ReferenceAdapter(conventions)
    results = [run_check(check, adapter, "reference", seed) for check in all_checks()]
    return [result for result in results if result.status in ("fail", "error")]
