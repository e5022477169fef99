"""Drawn cases: more of them than a check's fixed ones, smallest first, from a seed.

They are drawn here rather than by Hypothesis: a case comes from a generator and a size, so a failing one is made smaller by
drawing it again with less size, in at most `LARGEST` more runs of code that may take seconds. Findings have the same
fingerprints in every run, and users of `rlcanary check` install nothing more.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Generator

from rlcanary.checks.case import Case
from rlcanary.checks.tally import Tally

LARGEST = 8
"""The largest size: the order of magnitude of rows, groups and lengths."""

Draw = Callable[..., Case]
"""Draws one case from those that it needs of `conventions`, `rng` and `size`, an int from 1 to `LARGEST`."""


def run_examples(
    run: Callable[[Case], None], draw: Draw, given: dict[str, Any], examples: int, seed: int, tally: Tally
) -> None:
    """Run this many drawn cases, of growing size, up to the first that fails; keep the findings of its smallest form.

    Args:
        run: runs one case and records its findings in the tally.
        draw: draws a case.
        given: what `draw` may need besides `rng` and `size`.
        examples: number of cases.
        seed: makes the cases repeatable.
        tally: the record of the check.
    """
    for number in range(1, examples + 1):
        full = max(1, number * LARGEST // examples)
        run(_drawn(draw, given, seed, number, full))
        if tally.found:
            found = tally.found.copy()
            for size in range(1, full):
                tally.found.clear()
                run(_drawn(draw, given, seed, number, size))
                if tally.found:
                    return
            tally.found[:] = found
            return


def _drawn(draw: Draw, given: dict[str, Any], seed: int, number: int, size: int) -> Case:
    rng = Generator().manual_seed(100_003 * seed + number)
    values = {**given, "rng": rng, "size": size}
    case = draw(**{name: values[name] for name in inspect.signature(draw).parameters})
    case.label = f"example {number} of seed {seed}, size {size}"
    return case
