"""Severity of a finding: its effect on the update."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

Severity = Literal["update", "dashboard", "hardening"]

EFFECTS: dict[Severity, str] = {
    "update": "wrong update",
    "dashboard": "wrong number on the dashboard",
    "hardening": "hardening",
}
"""What each severity means, the worst first."""


def severity_of(quantity: str, declared: Severity) -> Severity:
    """Return the severity of a finding: a logged metric is on the dashboard alone, whatever its check declares."""
    return "dashboard" if declared == "update" and quantity.startswith("metric ") else declared


def worst(severities: Iterable[Severity]) -> Severity | None:
    """Return the worst of them, None if there is none."""
    found = set(severities)
    return next((severity for severity in EFFECTS if severity in found), None)


def reaches(severity: Severity | None, least: Severity) -> bool:
    """Tell whether a severity is the least one or a worse one; None is unknown and reaches every one."""
    order = list(EFFECTS)
    return severity is None or order.index(severity) <= order.index(least)
