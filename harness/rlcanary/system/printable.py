"""Text for a terminal: numbers of things, and text from other people's files made safe."""

import re

# Control characters, of the terminal and of the direction of text, line breaks, and halves of surrogate pairs. `re` compiles
# it at its first use: that takes longer than the import of ten modules, at every start of pytest.
UNPRINTABLE = r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]"


def counted(number: int, noun: str) -> str:
    """Write a number of things: `1 run`, `2 runs`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def printable_lines(text: str) -> str:
    """Return the text with control characters escaped; lines stay lines, and tabs become spaces."""
    return "\n".join(map(printable, text.expandtabs(4).replace("\r\n", "\n").split("\n")))


def printable(text: str) -> str:
    """Return the text on one line, with control characters escaped."""
    return re.sub(UNPRINTABLE, lambda match: match[0].encode("unicode_escape").decode(), text)
