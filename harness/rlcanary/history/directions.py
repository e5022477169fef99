"""The better direction of a metric: as declared, else by the words in its name."""

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import NamedTuple

from rlcanary.errors import UserError


class Direction(StrEnum):
    LOWER = "lower"
    """Lower is better."""
    HIGHER = "higher"
    """Higher is better."""
    STABLE = "stable"
    """Any lasting move is a regression: the number should not depend on the code's changes."""
    IGNORE = "ignore"


class Rule(NamedTuple):
    """A declared direction. The pattern is a metric's whole name, in which `*` stands for any text."""

    pattern: str
    direction: Direction


LOWER_WORDS = re.compile(
    "loss|losses|error|errors|err|mse|rmse|mae|perplexity|ppl|diff|difference|staleness|"
    "elapsed|times?|seconds?|secs?|ms|latency|duration|mem|memory|bytes|gb|mb|failures|failed|timeouts|retries"
)
HIGHER_WORDS = re.compile(
    "rewards?|accuracy|acc|scores?|pass|passed|success|solved|wins?|f1|bleu|rouge|throughput|tps|mfu|utilization|speedup"
)
RATE = re.compile(r"(?<![a-z])per_?(s|sec|secs|second|min|minute|hour)(?![a-z])")
SHARE = re.compile(r"(?<![a-z])per_?gpu(?![a-z])")
FAULTS = re.compile("errors?|failures|failed|timeouts|retries")


def direction_of(key: str, metric: str, rules: Sequence[Rule]) -> Direction | None:
    """Finds the direction of a metric.

    The first rule that matches `<key>.<metric>` decides, else the words of the metric's name. None if neither gives one
    direction.
    """
    for rule in rules:
        if matches(rule.pattern, f"{key}.{metric}"):
            return rule.direction
    spelled = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", metric).lower()
    words = re.findall(r"[a-z]+[0-9]*", spelled)
    if RATE.search(spelled):
        return Direction.LOWER if any(map(FAULTS.fullmatch, words)) else Direction.HIGHER
    lower, higher = (any(map(known.fullmatch, words)) for known in (LOWER_WORDS, HIGHER_WORDS))
    higher |= not lower and SHARE.search(spelled) is not None  # throughput; of time and memory a GPU takes little
    if lower == higher:
        return None
    return Direction.LOWER if lower else Direction.HIGHER


def matches(pattern: str, name: str) -> bool:
    """Tells if the pattern matches the whole name. Only `*` is special: names hold brackets of their own."""
    return re.fullmatch(".*".join(map(re.escape, pattern.split("*"))), name, re.DOTALL) is not None


def parse_rules(lines: Iterable[str]) -> list[Rule]:
    """Parses rules from lines of the form `PATTERN = DIRECTION`.

    Raises:
        UserError: for a line of another form.
    """
    rules = []
    for line in lines:
        pattern, separator, word = (part.strip() for part in line.rpartition("="))
        if not (separator and pattern and word in list(Direction)):
            raise UserError(
                f"rlcanary_directions: {line!r} is not of the form `PATTERN = DIRECTION` with a direction of "
                f"{', '.join(Direction)}"
            )
        rules.append(Rule(pattern, Direction(word)))
    return rules
