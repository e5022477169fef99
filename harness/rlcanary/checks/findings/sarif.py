"""Failures as SARIF 2.1.0, which code scanning reads: a rule per check, a result per check that fails."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rlcanary.checks.check import Check, Result
from rlcanary.checks.findings.diagnosis import Cause
from rlcanary.checks.findings.expected import Comparison, Expectation
from rlcanary.checks.findings.locations import location_of
from rlcanary.checks.severity import Severity
from rlcanary.contract.adapter import Adapter

LEVELS: dict[Severity, str] = {"update": "error", "dashboard": "warning", "hardening": "note"}


def to_sarif(
    adapter: Adapter,
    checks: Sequence[Check],
    comparison: Comparison,
    expected: Mapping[str, Expectation],
    causes: Sequence[Cause],
    root: Path,
) -> str:
    """Write one run with a result per failed check; expected failures are there too, as suppressed."""
    failed = [*comparison.unexpected, *comparison.known]
    rules = [check for check in checks if check.id in {result.id for result in failed}]
    places = {check.id: place for place, check in enumerate(rules)}

    def entry(result: Result) -> dict[str, Any]:
        check = rules[places[result.id]]
        words = [cause.words for cause in causes if any(cause.covers(result.id, found) for found in result.findings)]
        told: dict[str, Any] = {
            "ruleId": result.id,
            "ruleIndex": places[result.id],
            "level": LEVELS[result.severity or check.severity],
            "message": {"text": "\n".join([*(f"{each}." for each in words[:1]), result.message])},
            "partialFingerprints": {"rlcanaryCheck/v1": f"{adapter.name}:{result.id}"},
        }
        if place := location_of(result, check, adapter, root):
            file = {"uri": place.path, "uriBaseId": "%SRCROOT%"}
            told["locations"] = [{"physicalLocation": {"artifactLocation": file, "region": {"startLine": place.line}}}]
        if result in comparison.known:
            told["suppressions"] = [{"kind": "external", "justification": expected[result.id].reason}]
        return told

    driver = {"name": "rlcanary", "version": version("rlcanary"), "rules": [_rule(check) for check in rules]}
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": [entry(each) for each in failed]}
    schema = "https://json.schemastore.org/sarif-2.1.0.json"
    return json.dumps({"$schema": schema, "version": "2.1.0", "runs": [run]}, indent=2) + "\n"


def _rule(check: Check) -> dict[str, Any]:
    return {
        "id": check.id,
        "shortDescription": {"text": check.summary},
        "fullDescription": {"text": "\n\n".join(check.paragraphs)},
        "defaultConfiguration": {"level": LEVELS[check.severity]},
    }
