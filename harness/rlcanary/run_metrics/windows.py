"""Functions of metric checks, on one metric: `{"step": value}`, as in a run's JSON.

All take a window of steps: `range_start` (included) and `range_end` (not included) are step numbers; below 1, `range_end`
counts back from the end, and so does a negative `range_start`, where the end is one past the largest step: -1 is the last
step, and a `range_end` of 0 includes it. `last` takes that many of the newest values instead, whatever their steps. A
window without a value is an error, and so is one with a value that is not finite, unless `allow_nonfinite` leaves it out.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

SHOWN_STEPS = 3


class CheckError(Exception):
    """The reason why a check cannot be answered; the check fails."""


def over_window(reduce: Callable[[list[float]], float]) -> Callable[..., float]:
    def function(
        data: object,
        range_start: int | None = None,
        range_end: int = 0,
        *,
        last: int | None = None,
        allow_nonfinite: bool = False,
    ) -> float:
        return reduce(window(data, range_start, range_end, last, allow_nonfinite))

    return function


def mean(
    data: object,
    range_start: int | None = None,
    range_end: int = 0,
    ignore_top_p: float = 0.0,
    *,
    last: int | None = None,
    allow_nonfinite: bool = False,
) -> float:
    """Averages the values without their largest share `ignore_top_p`; at least one value stays."""
    if not _is_number(ignore_top_p) or not 0 <= ignore_top_p <= 1:
        raise CheckError(f"ignore_top_p is a share from 0 to 1, not {ignore_top_p!r}")
    values = sorted(window(data, range_start, range_end, last, allow_nonfinite))
    # 100 values without their top 0.07 are 93, also where 1 - 0.07 is a hair below 0.93.
    kept = max(1, math.floor(len(values) * (1 - ignore_top_p) + 1e-9))
    return math.fsum(values[:kept]) / kept


def ratio_above(
    data: object,
    threshold: float,
    range_start: int | None = None,
    range_end: int = 0,
    *,
    last: int | None = None,
    allow_nonfinite: bool = False,
) -> float:
    """Returns the share of values that reach the threshold (>=)."""
    if not _is_number(threshold):
        raise CheckError(f"the threshold of ratio_above is a number, not {threshold!r}")
    values = window(data, range_start, range_end, last, allow_nonfinite)
    return sum(value >= threshold for value in values) / len(values)


FUNCTIONS: dict[str, Callable[..., float]] = {
    "min": over_window(min),
    "max": over_window(max),
    "mean": mean,
    "median": over_window(statistics.median),
    "ratio_above": ratio_above,
}


def window(
    data: object, range_start: int | None, range_end: int, last: int | None, allow_nonfinite: bool
) -> list[float]:
    """Selects the values of a window in the order of their steps, all finite.

    Raises:
        CheckError: if there are none.
    """
    values = by_step(data)
    steps = list(values)
    if not steps:
        raise CheckError("the metric has no value")
    for name, number in (("range_start", range_start), ("range_end", range_end), ("last", last)):
        if number is not None and (isinstance(number, bool) or not isinstance(number, int)):
            raise CheckError(f"{name} is a whole number, not {number!r}")
    if last is not None:
        if range_start is not None or range_end != 0 or last < 1:
            raise CheckError(
                "last is the number of newest values, at least 1, and goes without range_start and range_end"
            )
        chosen = steps[-last:]
    else:
        end = steps[-1] + 1 + range_end if range_end <= 0 else range_end
        start = steps[0] if range_start is None else steps[-1] + 1 + range_start if range_start < 0 else range_start
        chosen = [step for step in steps if start <= step < end]
        if not chosen:
            raise CheckError(
                f"no value at steps {start} to {end - 1}; there are {len(steps)}, at steps {listed(steps)}. "
                "A window counts steps; last=N takes the newest N values"
            )
    finite = [float(values[step]) for step in chosen if is_finite(values[step])]
    if len(finite) < len(chosen) and not (allow_nonfinite and finite):
        spoiled = [step for step in chosen if not is_finite(values[step])]
        hint = "" if allow_nonfinite else "; allow_nonfinite=True leaves them out"
        raise CheckError(f"{len(spoiled)} of {len(chosen)} values are not finite, at steps {listed(spoiled)}{hint}")
    return finite


def by_step(data: object) -> dict[int, Any]:
    """Sorts a metric's values by step number; a list counts from 0.

    Raises:
        CheckError: if it is not a metric, or a value is not a number.
    """
    if isinstance(data, list):
        data = dict(enumerate(data))
    if not isinstance(data, dict):
        raise CheckError(f"this is {described(data)}, not the values of a metric by step")
    values: dict[int, Any] = {}
    for key, value in data.items():
        try:
            step = int(key)
        except ValueError:
            raise CheckError(f"{key!r} is not a step number, so this is a mapping and not a metric") from None
        if step in values:
            raise CheckError(f"step {step} appears twice")
        if value is not None and not _is_number(value):
            raise CheckError(f"step {step} is {described(value)}, not a number")
        values[step] = value
    return dict(sorted(values.items()))


def is_finite(value: Any) -> bool:
    """Tells if a number is one that JSON can hold; null stands for a number that was not finite."""
    try:
        return value is not None and math.isfinite(value)
    except OverflowError:  # a whole number beyond all floats
        return False


def listed(steps: Sequence[int]) -> str:
    shown = [str(step) for step in steps]
    return ", ".join(shown if len(shown) <= 2 * SHOWN_STEPS else [*shown[:SHOWN_STEPS], "…", *shown[-SHOWN_STEPS:]])


def described(value: object) -> str:
    match value:
        case None:
            return "null"
        case dict():
            return f"an object with {len(value)} keys"
        case list():
            return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
