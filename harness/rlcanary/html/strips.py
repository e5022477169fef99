"""Token strips: a table of a picture's rows, each cell coloured by its number.

A picture is plain data, as `rlcanary.checks.findings.picture` makes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlcanary.html.frame import escaped

LEVELS = 4
"""Shades of each colour."""
LONGEST = 16
"""Characters of a text in a cell; the whole text is shown on hover."""

LEGEND = """<p class="legend"><span><b class="p2">0.5</b><b class="p4">1</b> above 0</span>
<span><b class="n2">&minus;0.5</b><b class="n4">&minus;1</b> below 0; a stronger colour is a larger number</span>
<span><b class="m">0</b> not trained</span>
<span><b class="off">2<i>≠</i></b> differs from what is expected</span></p>"""


def drawing(finding: Mapping[str, Any]) -> str:
    """Draw the pictures of a finding, which name the quantity that is off; empty where it has none."""
    picture, parts = finding.get("picture", {}), []
    if compared := picture.get("compared"):
        quantity = finding["fingerprint"].rpartition(": ")[2].partition(" off by ")[0]
        parts.append(table(compared, f"Expected and got: {quantity}"))
    if batch := picture.get("batch"):
        parts.append(table(batch, f"The batch: {' and '.join(batch['rows'][0]['strips'])} of each token"))
    return "".join(parts)


def table(grid: Mapping[str, Any], caption: str) -> str:
    """Draw a grid: the strips of each row under each other, one column per token or entry."""
    columns, rows = grid["columns"], grid["rows"]
    has_tokens = any(row["trained"] for row in rows)
    height, width = grid["shape"]
    told = [caption]
    told += [f"{len(rows)} of {height} rows"] if len(rows) < height else []
    told += [f"columns {columns[0]} to {columns[-1]} of {width}"] if len(columns) < width else []
    lines = [f"<caption>{escaped('; '.join(told))}</caption>"]
    if width > 1 or has_tokens:
        head = "".join(f"<th scope=col>{column}" for column in columns)
        lines.append(f"<thead><tr><th scope=row>{'token' if has_tokens else 'place'}{head}</thead>")
    for row in rows:
        label = row["label"]
        lines.append("<tbody>")
        if label and len(row["strips"]) > 1:
            lines.append(f"<tr class=row><th colspan={len(columns) + 1} scope=rowgroup><span>{escaped(label)}</span>")
            label = ""
        lines += [_strip(word, label or word, row, columns, _largest(word, rows)) for word in row["strips"]]
        lines.append("</tbody>")
    name = escaped(caption)
    return f'<div class=scroll tabindex=0 role=region aria-label="{name}"><table class=strips>{"".join(lines)}</table></div>'


def shown(value: Any, digits: int = 3) -> str:
    """Write a number with some significant digits; a text, true or false as it is."""
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.{digits}g}".replace("e-0", "e-").replace("e+0", "e").replace("-", "\N{MINUS SIGN}")
    return "" if value is None else str(value)


def _strip(word: str, label: str, row: Mapping[str, Any], columns: Sequence[int], largest: float) -> str:
    is_result = word in ("got", "expected")
    cells = []
    for place, value in enumerate(row["strips"][word]):
        is_off = word == "got" and row["off"][place]
        kinds = [_colour(value, largest)]
        kinds += ["m"] if row["trained"] and not row["trained"][place] and value is not None else []
        kinds += ["none"] if value is None and not is_off else []
        kinds += ["off"] if is_off else []
        text = shown(value)
        if value is None and is_off:
            text = "nothing"
        told = ""
        if is_off:
            told = f"{columns[place]}: got {shown(value, 6) or 'nothing'}, expected {_wanted(row, place)}"
        elif text != shown(value, 6) or len(text) > LONGEST:
            told = shown(value, 6)
        text = text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"
        classes = " ".join(filter(None, kinds))
        attributes = f' class="{classes}"' if " " in classes else f" class={classes}" if classes else ""
        attributes += f' title="{escaped(told)}"' if told else ""
        cells.append(f"<td{attributes}>{escaped(text)}{'<i>≠</i>' if is_off else ''}")
    kind = "" if is_result else " class=beside"
    return f"<tr{kind}><th scope=row>{escaped(label)}{''.join(cells)}"


def _wanted(row: Mapping[str, Any], place: int) -> str:
    wanted, got = row["strips"]["expected"][place], row["strips"]["got"][place]
    told = shown(wanted, 6) or "nothing"
    if isinstance(wanted, float) and isinstance(got, float) and wanted:
        told += f" ({shown(got / wanted)} times)"
    return told


def _largest(word: str, rows: Sequence[Mapping[str, Any]]) -> float:
    """Return the size of the largest number that shares a colour scale with this strip."""
    words = ("got", "expected") if word in ("got", "expected") else (word,)
    cells = [cell for each in rows for name in words for cell in each["strips"].get(name, ())]
    return max((abs(cell) for cell in cells if _is_number(cell)), default=0.0)


def _colour(value: Any, largest: float) -> str:
    if isinstance(value, bool):
        return "p3" if value else ""
    if not _is_number(value) or not largest or not value:
        return "nan" if value in ("nan", "inf", "-inf") else ""
    level = max(1, math.ceil(LEVELS * abs(value) / largest))
    return f"{'p' if value > 0 else 'n'}{min(level, LEVELS)}"


def _is_number(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)
