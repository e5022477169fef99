"""Metrics of micro-batches, ranks and steps that are reduced to the one that is logged."""

import math
from collections.abc import Iterator, Sequence

from torch import Generator

from rlcanary.checks.asserts import assert_metrics, assert_true, unless_raised
from rlcanary.checks.case import Case
from rlcanary.checks.check import check
from rlcanary.checks.worlds.inputs import uniform
from rlcanary.checks.worlds.rows import sizes
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.records.reporting import Metric

EVEN = [[1.0, 2.0], [4.0, 9.0]]
UNEVEN = [[1.0, 2.0, 6.0], [10.0], [-2.0, 4.0]]
MEASURED = ("entropy", "tokens", "ratio_min", "ratio_max", "lr")


def _measured(values: Sequence[float], names: Sequence[str] = MEASURED) -> dict[str, Metric]:
    """Return these metrics of one part from the values of its tokens."""
    tokens = len(values)
    measured = {
        "entropy": Metric(math.fsum(values) / tokens, tokens, "mean"),
        "tokens": Metric(tokens, tokens, "sum"),
        "ratio_min": Metric(min(values), tokens, "min"),
        "ratio_max": Metric(max(values), tokens, "max"),
        "lr": Metric(values[-1] / 8, tokens, "last"),
    }
    return {name: measured[name] for name in names}


def _parts() -> Iterator[Case]:
    for told, parts in {"one part": [[1.0, 3.0]], "even parts": EVEN, "uneven parts": UNEVEN}.items():
        yield Case(told, parts=parts, names=MEASURED)
    yield Case("a part repeated", parts=EVEN[:1] * 4, names=MEASURED)
    yield Case("70 parts", parts=[[number / 8] * (1 + number % 3) for number in range(70)], names=MEASURED)
    # Not every codebase has all reductions.
    for told, names in {"a sum": ("tokens",), "extremes": ("ratio_min", "ratio_max")}.items():
        yield Case(f"{told} alone", parts=UNEVEN, names=names)


def _drawn(rng: Generator, size: int) -> Case:
    parts = [uniform(rng, length, low=-3, high=3).tolist() for length in sizes(rng, 2 * size)]
    return Case(parts=parts, names=MEASURED)


@check("merged_metrics.equal_the_whole", severity="dashboard", needs=("merged_metrics",), cases=_parts, draws=_drawn)
def equal_the_whole(adapter: Adapter, parts: list[list[float]], names: tuple[str, ...]) -> None:
    """However the data are split, the merged metrics are those of the whole: means weighted by their counts, sums, extremes.

    Silent because each wrong way gives a number near the right one, which changes with the micro-batch size or the number
    of ranks. Look for means of means over uneven parts, sums that are averaged, minima and maxima that are averaged or
    divided by the number of parts, and metrics of the first or last part alone.
    """
    whole = _measured([value for part in parts for value in part], names)
    expected = {name: metric.value for name, metric in whole.items()}
    assert_metrics(adapter.merged_metrics([_measured(part, names) for part in parts]), expected, "over the whole")


# Means whose names hold "min" and "max", "sum" and "last", as words of the field do.
NAMES = ("terminated", "gemini_score", "softmax_entropy", "climax_reward", "max_length_share", "summary_reward")


def _names() -> Iterator[Case]:
    for name in NAMES:
        yield Case(name, name=name)


@check("merged_metrics.name_decides_nothing", severity="dashboard", needs=("merged_metrics",), cases=_names)
def name_decides_nothing(adapter: Adapter, name: str) -> None:
    """The declared reduction of a metric decides, not the letters of its name: the mean of "terminated" is a mean.

    Silent because the minimum over ranks of a share is a share. Look for reductions that are chosen by whether a name
    contains "min", "max", "sum" or "last".
    """
    parts = [{name: Metric(value, 2, "mean")} for value in (0.5, 0.25, 1.0)]
    assert_metrics(adapter.merged_metrics(parts), {name: 1.75 / 3}, "as the mean of three equal parts")


def _incomplete() -> Iterator[Case]:
    whole = {name: metric.value for name, metric in _measured([value for part in UNEVEN for value in part]).items()}
    for value in (math.nan, 0.0):
        empty = {name: Metric(value, 0, metric.reduction) for name, metric in _measured([1.0]).items()}
        for place in range(len(UNEVEN) + 1):
            parts = [_measured(part) for part in UNEVEN]
            yield Case(
                f"count 0 and value {value:g} in part {place + 1}",
                parts=[*parts[:place], empty, *parts[place:]],
                expected=whole,
            )
    first = {"reward/math": Metric(0.5, 2), "reward/code": Metric(0.25, 2)}
    second = {"reward/code": Metric(0.75, 2), "reward/chat": Metric(8.0, 2)}
    expected = {"reward/math": 0.5, "reward/code": 0.5, "reward/chat": 8.0}
    yield Case("parts with other metrics", parts=[first, second], expected=expected)
    yield Case("parts without metrics", parts=[{}, first, {}, second], expected=expected)


@check("merged_metrics.empty_part", severity="dashboard", needs=("merged_metrics",), cases=_incomplete)
def empty_part(adapter: Adapter, parts: list[dict[str, Metric]], expected: dict[str, float]) -> None:
    """A part without a value of a metric, such as a micro-batch without a trained token, changes nothing and drops nothing.

    Silent because the placeholder of an empty part, 0 or NaN, is averaged with the others, or the metric disappears from
    the log. Look for means over the number of parts, for metrics whose names come from the first part, and for gathers that
    expect each rank to have each metric in the same place.
    """
    merged = unless_raised(adapter.merged_metrics, parts)
    if merged is not None:
        assert_metrics(merged, expected, "over the parts that have it")
        missing = sorted(expected.keys() - merged.keys())
        told = f"some parts have the metrics {', '.join(missing)}, the merged ones lack them"
        assert_true(not missing, told, quantity="metric names")
