"""Failures as SARIF 2.1.0, which code scanning reads: a rule per check, a result per check that fails."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rlcanary.checks.check import Check, Result
from rlcanary.checks.findings.diagnosis import Cause
from rlcanary.checks.findings.expected import STALE, Comparison, Expectation
from rlcanary.checks.findings.locations import Location, line_of, location_of
from rlcanary.checks.severity import Severity
from rlcanary.contract.adapter import Adapter

LEVELS: dict[Severity, str] = {"update": "error", "dashboard": "warning", "hardening": "note"}


def to_sarif(
    adapter: Adapter,
    checks: Sequence[Check],
    comparison: Comparison,
    expected: Mapping[str, Expectation],
    causes: Sequence[Cause],
    least: Severity,
    root: Path,
    expected_path: Path | None = None,
) -> str:
    """Write one run with a result per failed check; expected failures are there too, as suppressed.

    A stale entry of the file of expected failures is a result at its line. Adapter errors, and the reason why nothing was
    checked, are notifications of the run, which was not successful then.
    """
    failed = [*comparison.unexpected, *comparison.known]
    rules = [check for check in checks if check.id in {result.id for result in (*failed, *comparison.stale)}]
    places = {check.id: place for place, check in enumerate(rules)}

    def located(result: Result, level: str, text: str, place: Location | None) -> dict[str, Any]:
        told: dict[str, Any] = {
            "ruleId": result.id,
            "ruleIndex": places[result.id],
            "level": level,
            "message": {"text": text},
            "partialFingerprints": {"rlcanaryCheck/v1": f"{adapter.name}:{result.id}"},
        }
        if place:
            file = {"uri": quote(os.fsencode(place.path)), "uriBaseId": "%SRCROOT%"}
            told["locations"] = [{"physicalLocation": {"artifactLocation": file, "region": {"startLine": place.line}}}]
        return told

    def stale(result: Result) -> dict[str, Any]:
        place = None if expected_path is None else line_of(result.id, expected_path, root)
        return located(result, "error", f"{result.id} {STALE}", place)

    def entry(result: Result) -> dict[str, Any]:
        check = rules[places[result.id]]
        words = [cause.words for cause in causes if any(cause.covers(result.id, found) for found in result.findings)]
        text = "\n".join([*(f"{each}." for each in words[:1]), result.message])
        told = located(
            result, LEVELS[result.severity or check.severity], text, location_of(result, check, adapter, root)
        )
        if result in comparison.known:
            told["suppressions"] = [{"kind": "external", "justification": expected[result.id].reason}]
        return told

    driver = {"name": "rlcanary", "version": version("rlcanary"), "rules": [_rule(check) for check in rules]}
    run = {
        "tool": {"driver": driver},
        "invocations": [_invocation(comparison, least)],
        "columnKind": "unicodeCodePoints",
        "results": [*map(entry, failed), *map(stale, comparison.stale)],
    }
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _invocation(comparison: Comparison, least: Severity) -> dict[str, Any]:
    code = comparison.exit_code(least)
    told = [f"adapter error in {each.id}: {each.message}" for each in comparison.misfits]
    told += [f"nothing was checked: {comparison.nothing}"] if comparison.nothing else []
    notifications = [{"level": "error", "message": {"text": text}} for text in told]
    return {"executionSuccessful": code in (0, 1), "exitCode": code, "toolExecutionNotifications": notifications}


def _rule(check: Check) -> dict[str, Any]:
    return {
        "id": check.id,
        "shortDescription": {"text": check.summary},
        "fullDescription": {"text": "\n\n".join(check.paragraphs)},
        "defaultConfiguration": {"level": LEVELS[check.severity]},
    }
