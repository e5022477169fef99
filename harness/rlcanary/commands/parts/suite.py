"""Run the checks on an adapter, with a progress bar in a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlcanary.console import progress_bar, without_output

if TYPE_CHECKING:
    from rlcanary.checks import Check, Result
    from rlcanary.contract.adapter import Adapter


def run_suite(
    checks: Sequence[Check],
    adapter: Adapter,
    spec: str,
    seed: int = 0,
    timeout: float = 120,
    examples: int = 0,
    models: tuple[str, ...] = (),
    *,
    shows_output: bool = False,
) -> list[Result]:
    """Run checks one after another; the arguments are those of `run_check`. What the code prints is dropped or shown."""
    from rlcanary.checks import run_check

    results = []
    with progress_bar() as progress:
        task = progress.add_task(f"checking {adapter.name}", total=len(checks))
        for item in checks:
            progress.update(task, description=item.id)
            with without_output(unless=shows_output):
                results.append(run_check(item, adapter, spec, seed, timeout, examples, models))
            progress.advance(task)
    return results
