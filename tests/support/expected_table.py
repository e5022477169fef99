"""Tables of tests/expected."""

from functools import cache
from pathlib import Path

EXPECTED = Path(__file__).parents[1] / "expected"


@cache
def expected_table(name: str) -> dict[str, list[str]]:
    """A table of lines with a name, a colon and what belongs to the name, without its comments."""
    lines = (line.partition(": ") for line in (EXPECTED / name).read_text().splitlines() if not line.startswith("#"))
    return {key: values.split(", ") for key, _, values in lines}
