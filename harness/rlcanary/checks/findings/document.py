"""The results of a run of checks as plain data: what `--json` writes and the HTML pages show."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

from rlcanary.checks.check import Check, Result
from rlcanary.checks.findings.coverage import Coverage, coverage
from rlcanary.checks.findings.diagnosis import Diagnosis
from rlcanary.checks.findings.expected import Comparison, compare
from rlcanary.checks.findings.grouping import grouped
from rlcanary.checks.findings.picture import picture
from rlcanary.checks.severity import Severity
from rlcanary.checks.tally import Found


def to_document(
    adapter: str,
    results: Sequence[Result],
    diagnosis: Diagnosis,
    checks: Sequence[Check] = (),
    comparison: Comparison | None = None,
    least: Severity = "hardening",
    versions: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return the results as plain data.

    The keys are `adapter`, `exit_code` (the verdict), `versions` (package to version: rlcanary, torch, and the distribution
    of the adapter's name), `checks`, `causes` (with `cause`, `findings`, `checks`), `folds` (the failures that no cause
    explains, by the capability that their checks call: `capability`, `told`, `checks`), `explanations` (check that failed to
    its explanation), `expected` (the checks that failed as expected), `stale` (those expected to fail that did not),
    `causes_cut_after` (the limit in seconds that ended the search for causes, null if none did) and `coverage` (with the
    fields of `Coverage`). A check has `id`, `area`, `status`, `severity` (the worst of its findings), `message`, `snippet`,
    `seconds` and `findings`; a finding has `fingerprint`, `message`, `snippet`, `severity`, `cause` (null where none is
    known) and `picture` (as `rlcanary.checks.findings.picture`).

    Args:
        adapter: the adapter's name.
        results: one per check that was asked for.
        diagnosis: the causes of the failures.
        checks: the checks, in the order of the results; without them there are no folds and no explanations.
        comparison: the results compared with the expected failures; without it none is expected.
        least: the severity from which a failure counts.
        versions: the versions or commits of what a bundled adapter drives.
    """

    def finding(result: Result, found: Found) -> dict[str, Any]:
        words = [cause.words for cause in diagnosis.causes if cause.covers(result.id, found)]
        told = {"fingerprint": str(found.fingerprint), "message": found.message, "snippet": found.snippet}
        cause = words[0] if words else None
        return {**told, "severity": found.severity, "cause": cause, "picture": picture(found)}

    comparison = compare(results, {}) if comparison is None else comparison
    explained = {check_id for cause in diagnosis.causes for check_id in cause.explained}
    failed = [result for result in results if result.status in ("fail", "error")]
    folds = grouped([result for result in failed if result.id not in explained], checks, results) if checks else []
    return {
        "adapter": adapter,
        "exit_code": comparison.exit_code(least),
        "versions": versions_of(adapter) | dict(versions or {}),
        "checks": [
            {
                "id": result.id,
                "area": result.area,
                "status": result.status,
                "severity": result.severity,
                "message": result.message,
                "snippet": result.snippet,
                "seconds": result.seconds,
                "findings": [finding(result, found) for found in result.findings],
            }
            for result in results
        ],
        "causes": [
            {"cause": cause.words, "findings": cause.count, "checks": list(cause.explained)}
            for cause in diagnosis.causes
        ],
        "folds": [
            {"capability": fold.capability, "told": fold.told, "checks": [member.id for member in fold.members]}
            for fold in folds
        ],
        "explanations": {
            check.id: "\n\n".join(check.paragraphs)
            for check, result in zip(checks, results, strict=False)
            if result in failed
        },
        "expected": sorted(result.id for result in comparison.known),
        "stale": sorted(result.id for result in comparison.stale),
        "causes_cut_after": diagnosis.cut_after,
        "coverage": asdict(coverage_of(results)),
    }


def to_json(document: Mapping[str, Any]) -> str:
    """Write the results as JSON that any reader takes."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"


def coverage_of(results: Iterable[Result]) -> Coverage:
    """Count which of these checks ran."""
    results = list(results)
    missing = {result.id: result.missing for result in results if result.status == "not-provided"}
    misfits = [result.id for result in results if result.status == "adapter-error"]
    return coverage([result.id for result in results], missing, misfits)


def versions_of(adapter: str) -> dict[str, str]:
    """Return the versions of rlcanary, torch, and the installed distribution of the adapter's name if there is one."""
    versions = {"rlcanary": metadata.version("rlcanary"), "torch": torch.__version__}
    try:
        return {adapter: metadata.version(adapter), **versions}
    except (metadata.PackageNotFoundError, ValueError):
        return versions
