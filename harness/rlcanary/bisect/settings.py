"""`[tool.rlcanary.bisect]` in the pyproject.toml of the checkout: defaults of options, and the user's outcome table."""

import re
import signal
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcanary.errors import UserError
from rlcanary.jobs.outcomes import RUNNERS, SLURM_STATES, TIMEOUT, Outcome, OutcomeTable, Pattern

OPTIONS = {"confidence": float, "env": str, "env-dir": str, "jobs": int, "on-timeout": str, "timeout": float}
"""Command-line options that may have a default here, and their types."""
KINDS = {float: "a number above 0", int: "a whole number above 0", str: "a text"}
TABLE = ("tool", "rlcanary", "bisect")
CHOICES = (Outcome.GOOD, Outcome.BAD, Outcome.UNTESTABLE, Outcome.INFRA, Outcome.ABORT)


@dataclass(frozen=True)
class BisectSettings:
    outcomes: OutcomeTable = field(default_factory=OutcomeTable)
    options: dict[str, Any] = field(default_factory=dict)
    """Values by parameter name, as in click's `default_map`."""


def read_settings(toplevel: Path) -> BisectSettings:
    """Read the settings of a checkout.

    Raises:
        UserError: The file is not valid TOML, or an entry is not valid.
    """
    path = toplevel / "pyproject.toml"
    if not path.is_file():
        return BisectSettings()
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    table = document
    for name in TABLE:
        table = _table(table, name, path)
    unknown = [name for name in table if name not in (*OPTIONS, "outcomes", "patterns")]
    if unknown:
        known = ", ".join((*OPTIONS, "outcomes", "patterns"))
        raise UserError(f"{path}: [tool.rlcanary.bisect] has no entry {unknown[0]!r}; known are {known}")
    own = {
        _condition(str(name), path): _outcome(name, word, path)
        for name, word in _table(table, "outcomes", path).items()
    }
    patterns = tuple(
        Pattern(_expression(text, path), _outcome(text, word, path))
        for text, word in _table(table, "patterns", path).items()
    )
    options = {name.replace("-", "_"): _option(name, table[name], path) for name in OPTIONS if name in table}
    return BisectSettings(OutcomeTable(own, patterns), options)


def _table(parent: dict[str, Any], name: str, path: Path) -> dict[str, Any]:
    table = parent.get(name, {})
    if not isinstance(table, dict):
        raise UserError(f"{path}: {name} is {table!r}, not a table")
    return table


def _option(name: str, value: object, path: Path) -> object:
    kind = OPTIONS[name]
    numbers = (int, float) if kind is float else (kind,)
    if isinstance(value, bool) or not isinstance(value, numbers) or (isinstance(value, int | float) and value <= 0):
        raise UserError(f"{path}: {name} in [tool.rlcanary.bisect] is {value!r}, not {KINDS[kind]}")
    return value


def _condition(name: str, path: Path) -> str:
    runner, _, code = name.rpartition(" ")
    is_code = code.isdigit() and int(code) <= 255 and runner in ("", *RUNNERS)
    if is_code or name == TIMEOUT or name in SLURM_STATES or name in signal.Signals.__members__:
        return name
    raise UserError(
        f"{path}: {name!r} in [tool.rlcanary.bisect.outcomes] is no exit code, 'pytest CODE', signal such as SIGSEGV, "
        f"Slurm state or {TIMEOUT!r}"
    )


def _outcome(name: str, word: object, path: Path) -> Outcome:
    if word in CHOICES:
        return Outcome(str(word))
    raise UserError(f"{path}: the outcome of {name!r} is {word!r}; it can be {', '.join(CHOICES)}")


def _expression(text: str, path: Path) -> re.Pattern[str]:
    try:
        return re.compile(text, re.MULTILINE)
    except re.error as error:
        raise UserError(f"{path}: the pattern {text!r} is no regular expression: {error}") from None
