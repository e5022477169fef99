"""Failures as annotations of GitHub: lines on standard output that its runner shows beside the code."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlcanary.checks.check import Check, Result
from rlcanary.checks.findings.diagnosis import Cause
from rlcanary.checks.findings.expected import STALE, Comparison
from rlcanary.checks.findings.grouping import grouped
from rlcanary.checks.findings.locations import Location, line_of, location_of
from rlcanary.checks.findings.report import folded, told_of
from rlcanary.checks.severity import EFFECTS, Severity, reaches, worst
from rlcanary.contract.adapter import Adapter


def to_annotations(
    adapter: Adapter,
    checks: Sequence[Check],
    results: Sequence[Result],
    comparison: Comparison,
    causes: Sequence[Cause],
    least: Severity,
    root: Path,
    expected_path: Path | None = None,
) -> list[str]:
    """Write one annotation per cause, and one per group of failures without a known cause. GitHub shows ten of a step.

    Failures of the severity `least` or a worse one are errors, as for the exit code; others are warnings. Stale entries,
    adapter errors and a run that checked nothing are errors too.

    Args:
        adapter: the adapter that was checked.
        checks: the checks that ran.
        results: their results, in the same order.
        comparison: the results compared with the expected failures.
        causes: the causes of the unexpected failures.
        least: the severity from which a failure counts.
        root: the folder of the repository.
        expected_path: the file of expected failures, for its stale entries.
    """
    by_id = {check.id: check for check in checks}

    def annotated(members: Sequence[Result], title: str, message: str) -> str:
        place = location_of(members[0], by_id[members[0].id], adapter, root)
        is_red = any(reaches(member.severity, least) for member in members)
        severity = worst(found.severity for member in members for found in member.findings)
        effect = f": {EFFECTS[severity]}" if severity else ""
        return _command("error" if is_red else "warning", place, f"{title}{effect}", message)

    folds, rest = folded(comparison.unexpected, causes)
    lines = [annotated(members, cause.words, f"{told_of(members)}\n{members[0].message}") for cause, members in folds]
    for fold in grouped(rest, checks, results):
        first = fold.members[0]
        lines.append(annotated(fold.members, first.id, "\n".join(filter(None, [first.message, fold.told]))))
    for result in comparison.stale:
        place = None if expected_path is None else line_of(result.id, expected_path, root)
        lines.append(_command("error", place, f"{result.id} is stale", f"It {STALE}."))
    lines += [_command("error", None, f"{each.id}: adapter error", each.message) for each in comparison.misfits]
    lines += [_command("error", None, "nothing was checked", comparison.nothing)] if comparison.nothing else []
    return lines


def _command(level: str, place: Location | None, title: str, message: str) -> str:
    where = f"file={_property(place.path)},line={place.line}," if place else ""
    return f"::{level} {where}title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
