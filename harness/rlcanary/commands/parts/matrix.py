"""Run the checks on each configuration of an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rlcanary.adapters.load import configurations_of
from rlcanary.commands.parts.suite import run_suite
from rlcanary.console import report_console
from rlcanary.errors import UserError
from rlcanary.system.files import write_whole

if TYPE_CHECKING:
    from rlcanary.checks import Check
    from rlcanary.contract.adapter import Adapter


def check_matrix(
    adapter: Adapter,
    spec: str,
    checks: Sequence[Check],
    *,
    seed: int,
    timeout: float,
    examples: int,
    models: tuple[str, ...],
    fail_on: Literal["update", "dashboard", "hardening"],
    json_path: Path | None,
    shows_output: bool,
) -> int:
    """Run checks on each configuration, print them side by side, and return the exit code.

    Raises:
        UserError: the adapter lists no configurations, or nothing was checked in any.
    """
    from rlcanary.adapters.frameworks import versions_of
    from rlcanary.checks.findings.diagnosis import Diagnosis
    from rlcanary.checks.findings.document import to_document, to_json
    from rlcanary.checks.findings.expected import compare
    from rlcanary.checks.findings.matrix import show_matrix

    configurations = configurations_of(adapter)
    if not configurations:
        raise UserError(f"{spec} lists no configurations: let `configurations` return adapters by name")
    results = {
        name: run_suite(checks, each, f"{spec}[{name}]", seed, timeout, examples, models, shows_output=shows_output)
        for name, each in configurations.items()
    }
    if json_path is not None:
        documents = {
            name: to_document(
                configurations[name].name, found, Diagnosis([]), checks, least=fail_on, versions=versions_of(adapter)
            )
            for name, found in results.items()
        }
        write_whole(json_path, to_json({"adapter": adapter.name, "configurations": documents}))
    show_matrix(report_console(), adapter.name, spec, results)
    every = [result for found in results.values() for result in found]
    comparison = compare(every, {})
    if comparison.nothing:
        raise UserError(f"nothing was checked: no configuration of {adapter.name} has what these checks need")
    return comparison.exit_code(fail_on)
