"""Estimate which commits are testable after some were not."""

from collections.abc import Collection
from itertools import groupby, pairwise

import numpy as np

from rlcanary.bisect.search.likelihood import Array

INSIDE = 0.05
"""The probability that a commit between two untestable ones is testable."""


def chance_testable(count: int, tested: Collection[int], untestable: Collection[int]) -> Array:
    """Estimate the probability that each of `count` commits is testable, given the tested and untestable ones.

    Untestable commits usually lie side by side, as when a build was broken for a while. Between a tested and an
    untestable commit, the edge of such a stretch may be at any distance, with equal weight per order of magnitude.
    Between two untestable ones only the middle commit is tried, and only while that gap is wider than half of the
    stretch. So both edges are found by halving, and the commits inside are not tried one by one. GOOD may be among the
    tested commits, as -1.
    """
    chance_N = np.ones(count)
    marks = sorted({-1, count - 1, *tested, *untestable})
    bad = set(untestable) - set(tested)
    stretches = _stretches(marks, bad)
    for before, after in pairwise(marks):
        gap = after - before
        if gap < 2 or not {before, after} & bad:
            continue
        inside_N = slice(before + 1, after)
        if before in bad and after in bad:
            first, last = stretches[before]
            chance_N[inside_N] = 0.0
            if 2 * gap > last - first:
                chance_N[(before + after) // 2] = INSIDE
        else:
            distance = np.arange(1, gap) if before in bad else np.arange(gap - 1, 0, -1)
            chance_N[inside_N] = np.log1p(distance) / np.log1p(gap)
    chance_N[[index for index in bad if index >= 0]] = 0.0
    return chance_N


def _stretches(marks: list[int], untestable: set[int]) -> dict[int, tuple[int, int]]:
    """Return the first and last commit of each untestable commit's stretch, which contains no tested commit."""
    stretches: dict[int, tuple[int, int]] = {}
    for is_untestable, group in groupby(marks, untestable.__contains__):
        if is_untestable:
            stretch = list(group)
            stretches |= dict.fromkeys(stretch, (stretch[0], stretch[-1]))
    return stretches
