"""Take the known causes of a metric's values out of a series: the day of the week, the machine, the environment.

A machine that is 5 % slower and takes every third run, or a cluster that is busy at weekends, would look like noise and
hide a step. The effect of such a label is estimated where labels alternate: against the running median, which follows
levels and lines. So a label that came once and stayed has no effect here; what changed with it is a step.
"""

import math
from collections.abc import Hashable, Sequence

import numpy as np

from rlcanary.history.significance import Floats, normal_scores

WINDOW = 21  # runs of the running median; three weeks of daily runs
LEAST_RUNS = 5  # of a label; rarer ones are left as they are
LEAST_DEVIATIONS = 3.1  # of a normal distribution: noise gets one label in a thousand adjusted
ROUNDS = 3  # the running median is taken of adjusted values


def adjust(values: Floats, labels: Sequence[Hashable]) -> tuple[Floats, dict[Hashable, float]]:
    """Takes the effect of labels out of a series, if they have one.

    Whether they do is judged by the test of Kruskal and Wallis on normal scores of the deviations from the running
    median.

    Args:
        values: A series [n].
        labels: Each value's label [n].

    Returns:
        The values without the effects, and the effect of each label in the values' units; none if nothing was taken out.
    """
    if len(set(labels)) < 2 or len(values) < WINDOW:
        return values, {}
    names, codes = _coded(labels)
    counts = np.bincount(codes)
    frequent = np.flatnonzero(counts >= LEAST_RUNS)
    if len(frequent) < 2:
        return values, {}
    judged = counts[codes] >= LEAST_RUNS
    deviations = values - running_median(values)
    if not _differ(deviations[judged], codes[judged], frequent):
        return values, {}
    effects = np.zeros(len(names))
    for _ in range(ROUNDS):
        deviations = values - running_median(values - effects[codes])
        for code in frequent:
            effects[code] = np.median(deviations[codes == code])
        effects[frequent] -= np.average(effects[frequent], weights=counts[frequent])
    return values - effects[codes], {names[code]: float(effects[code]) for code in frequent}


def running_median(values: Floats, window: int = WINDOW) -> Floats:
    """Returns the median of the `window` values around each one [n]; the ends are mirrored."""
    padded = np.pad(values, window // 2, mode="reflect")
    medians: Floats = np.median(np.lib.stride_tricks.sliding_window_view(padded, window), axis=1)
    return medians


def _coded(labels: Sequence[Hashable]) -> tuple[list[Hashable], np.ndarray]:
    numbers: dict[Hashable, int] = {}
    codes = np.array([numbers.setdefault(label, len(numbers)) for label in labels], dtype=np.int64)
    return list(numbers), codes


def _differ(deviations: Floats, codes: np.ndarray, frequent: np.ndarray) -> bool:
    """Tells if the deviations of the labels differ, by more than noise does once in a thousand times."""
    scores = normal_scores(deviations)
    variance = float(scores.var())
    if variance == 0:
        return False
    groups = [scores[codes == code] for code in frequent]
    statistic = sum(len(group) * float(group.mean() - scores.mean()) ** 2 for group in groups) / variance
    freedom = len(groups) - 1
    # The cube root of a chi-squared variable is nearly normal (Wilson and Hilferty, 1931).
    spread = 2 / (9 * freedom)
    return bool(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) > LEAST_DEVIATIONS)
