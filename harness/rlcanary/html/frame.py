"""The frame of every page: its head and its style, and text made safe for it."""

import html
import re
from importlib import resources

from rlcanary.system.printable import printable_lines


def page(title: str, body: str) -> str:
    """Return a page of this body, which is HTML. The title is text."""
    return fill(_read("frame.html"), TITLE=escaped(title), THEME=theme(), STYLE=_read("findings.css"), BODY=body)


def theme() -> str:
    """Return the style that all pages share, light and dark."""
    return _read("theme.css")


def fill(template: str, **parts: str) -> str:
    """Replace each `/*NAME*/` of a template. What a part holds is not replaced again."""
    return re.sub(r"/\*([A-Z]+)\*/", lambda found: parts[found[1]], template)


def escaped(text: object) -> str:
    """Escape text for HTML: control characters are written as Python writes them."""
    return html.escape(printable_lines(str(text)))


def _read(name: str) -> str:
    return resources.files("rlcanary.html").joinpath(name).read_text(encoding="utf-8")
