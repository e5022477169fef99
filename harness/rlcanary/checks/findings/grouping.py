"""Failures without a known cause, folded by the capability that their checks call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from rlcanary.checks.check import Check, Result
from rlcanary.checks.tally import Found

# Ratios that agree to this share are one factor.
AGREEMENT = 1e-3


@dataclass(frozen=True)
class Fold:
    """Failures of checks that all call one capability. It need not be at fault.

    Attributes:
        capability: its name.
        members: the failures; the first is of the check that calls least.
    """

    capability: str
    members: Sequence[Result]

    @property
    def told(self) -> str:
        """Say what the failures share, "" for a single one."""
        others = self.members[1:]
        if not others:
            return ""
        return "\n".join([*self._factors(), f"Also red, through the same {self.capability}: {_names(others)}"])

    def _factors(self) -> list[str]:
        """Say which quantities are off by one factor in several checks, and by no other one in any."""
        told = []
        pairs = [(member.id, found) for member in self.members for found in member.findings]
        quantities = dict.fromkeys(_quantity(found) for _, found in pairs if found.tensors is not None)
        for quantity in quantities:
            those = [(check_id, factor_of(found)) for check_id, found in pairs if _quantity(found) == quantity]
            factors = [factor for _, factor in those]
            first, checks = factors[0], {check_id for check_id, _ in those}
            is_one = first is not None and all(
                each is not None and abs(each - first) <= AGREEMENT * abs(first) for each in factors
            )
            if is_one and len(checks) > 1:
                told.append(
                    f"{self.capability}: the {quantity} is {first:.4g} times the expected one in {len(checks)} checks"
                )
        return told


def grouped(failures: Sequence[Result], checks: Sequence[Check], results: Sequence[Result]) -> list[Fold]:
    """Fold failures by capability, each under one, in the order of their first.

    Checks that call a single capability say which ones are in question; what else calls these comes under them. The rest
    is folded by the capability that most of it calls, or that fewer passed checks call.

    Args:
        failures: the failures to fold.
        checks: the checks that ran.
        results: their results, in the same order.
    """
    needs = {check.id: check.needs for check in checks}
    passed = Counter(name for each in results if each.status == "pass" for name in needs[each.id])
    left, folds = list(failures), []
    while left:
        alone = [needs[each.id] for each in left if len(needs[each.id]) == 1]
        calls = Counter(name for names in alone or [needs[each.id] for each in left] for name in names)
        capability = min(calls, key=lambda name: (-calls[name], passed[name], name))
        members = [each for each in left if capability in needs[each.id]]
        left = [each for each in left if each not in members]
        folds.append(Fold(capability, sorted(members, key=lambda each: (each.status == "error", len(needs[each.id])))))
    places = {each.id: place for place, each in enumerate(failures)}
    return sorted(folds, key=lambda fold: min(places[each.id] for each in fold.members))


def factor_of(found: Found) -> float | None:
    """Return the number by which all entries of a finding are multiplied, None if there is no such number."""
    if found.tensors is None:
        return None
    got, expected = (each.double() for each in found.tensors)
    ratios = (got / expected)[expected != 0]
    if not ratios.numel() or not ratios.isfinite().all() or bool((got[expected == 0] != 0).any()):
        return None
    factor = float(ratios.median())
    is_one = bool(((ratios - factor).abs() <= AGREEMENT * abs(factor)).all())
    return factor if is_one and abs(factor - 1) > AGREEMENT else None


def _quantity(found: Found) -> str:
    return found.fingerprint.quantity.partition(" (")[0]


def _names(results: Sequence[Result]) -> str:
    return ", ".join(result.id for result in results)
