"""The museum of shipped bugs: a page for each, and one that lists them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from rlcanary.html.curve import chart
from rlcanary.html.findings import Report, article, failed
from rlcanary.html.frame import escaped, page
from rlcanary.html.strips import LEGEND, table

SHOWN = 2
"""Checks whose findings a page draws; it names the others."""
ALIKE = 0.02
"""Rewards that differ by less are the same on a chart."""
PUSH = """The push of one update on each token: minus the gradient of the loss by its logprob. Above 0 the token is made
likelier. Expected is the push of the reference, got that of the bug."""
RUN = "A tiny transformer learns to answer with ids of the class that the prompt asks for."


@dataclass(frozen=True)
class Exhibit:
    """A bug of the museum.

    Attributes:
        id: codebase and mistake.
        area: the part of training that it breaks.
        source: where it shipped.
        effect: what it does, in words.
        report: the results of the checks that can see it, as `rlcanary check --json` writes them.
        push: the push of one update on each token as a grid, by the reference ("expected") and by the bug ("got"); None
            where no update of the bug differs.
        settings: the conventions under which it does, where they are not the usual ones.
        curve: the rewards of a training run without and with the bug, and the rounds between them; None if none was made.
    """

    id: str
    area: str
    source: str
    effect: str
    report: Report
    push: Mapping[str, Any] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    curve: tuple[Sequence[float], Sequence[float], int] | None = None


def museum_pages(exhibits: Sequence[Exhibit]) -> dict[str, str]:
    """Return file name -> page: `index.html`, and one page per exhibit."""
    return {"index.html": _index(exhibits)} | {f"{each.id}.html": exhibit_page(each) for each in exhibits}


def exhibit_page(exhibit: Exhibit) -> str:
    """Write the page of one bug: its effect on a batch and on a training run, and what catches it."""
    parts = [
        f'<header>\n<p><a href="index.html">The museum</a></p>\n<h1>{escaped(exhibit.id)}</h1>',
        f"<p><b>{escaped(exhibit.effect)}</b></p>\n<p class=muted>Shipped in {escaped(exhibit.source)}</p>\n</header>",
    ]
    if exhibit.push is not None:
        under = ", ".join(f"{name}={value!r}" for name, value in exhibit.settings.items())
        parts.append(_section("What it does to a batch", PUSH, f"Declared: {under}." if under else ""))
        parts.append(f"{LEGEND}\n<article>{table(exhibit.push, 'Push on each token')}</article>\n</section>")
    if exhibit.curve is not None:
        right, wrong, _ = exhibit.curve
        is_alike = all(abs(one - other) < ALIKE for one, other in zip(right, wrong, strict=True))
        parts.append(
            _section("What it does to a run", RUN, "This run's reward shows nothing of it." if is_alike else "")
        )
        parts.append(f"<article>{chart(*exhibit.curve)}</article>\n</section>")
    caught = failed(exhibit.report)
    parts.append("<section>\n<h2>What catches it</h2>")
    if not caught:
        parts.append("<p>No check.</p>")
    elif exhibit.push is None:
        parts.append(LEGEND)
    drawn = sorted(caught, key=_richness, reverse=True)[:SHOWN]
    parts += [article(check, exhibit.report, check["id"]) for check in drawn]
    others = [check["id"] for check in caught if check not in drawn]
    parts += [f"<p>Also {escaped(', '.join(others))}.</p>"] if others else []
    return page(exhibit.id, "\n".join([*parts, "</section>"]))


def _section(title: str, *paragraphs: str) -> str:
    told = "".join(f"<p>{escaped(each)}</p>\n" for each in paragraphs if each)
    return f"<section>\n<h2>{escaped(title)}</h2>\n{told}"


def _richness(check: Report) -> int:
    """Rank a failed check by how much the picture of its first finding shows."""
    picture = check["findings"][0].get("picture", {}) if check["findings"] else {}
    compared = picture.get("compared")
    if compared is None:
        return int("batch" in picture)
    if any(row["trained"] for row in compared["rows"]):
        return 4
    return 3 if compared["shape"][1] > 1 else 2


def _index(exhibits: Sequence[Exhibit]) -> str:
    counted = "1 silent bug" if len(exhibits) == 1 else f"{len(exhibits)} silent bugs"
    parts = [
        f"<header>\n<h1>The museum</h1>\n<p>{counted} of RL codebases, planted in the reference: "
        "what it does to a batch, what it does to a run, and the checks that catch it.</p>\n</header>"
    ]
    for area, members in groupby(exhibits, key=lambda exhibit: exhibit.area):
        rows = "".join(map(_row, members))
        head = "<tr><th scope=col>Bug<th scope=col>Effect<th scope=col>Caught by"
        body = f"<table class=list><thead>{head}</thead><tbody>{rows}</tbody></table>"
        parts.append(f"<section>\n<h2>{escaped(area)}</h2>\n<div class=scroll>{body}</div>\n</section>")
    return page("The museum", "\n".join(parts))


def _row(exhibit: Exhibit) -> str:
    caught = [check["id"] for check in failed(exhibit.report)]
    told = caught[0] if caught else "no check"
    told += f" and {len(caught) - 1} more" if len(caught) > 1 else ""
    link = f'<a href="{escaped(exhibit.id)}.html">{escaped(exhibit.id)}</a>'
    return f"<tr><th scope=row>{link}<td>{escaped(exhibit.effect)}<td>{escaped(told)}"
