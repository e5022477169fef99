"""The page of several reports: frameworks by areas, and the findings of each, drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from packaging.version import InvalidVersion, Version

from rlcanary.html.findings import Report, article, failed, name_of, version_of, without_verdict
from rlcanary.html.frame import escaped, page
from rlcanary.html.strips import LEGEND


@dataclass(frozen=True)
class Column:
    """A report and the name of its column."""

    label: str
    report: Report


def gallery_page(columns: Sequence[Column]) -> str:
    """Write the page: a table of areas by reports, then the checks that fail, by framework and area.

    Args:
        columns: the reports, in the order in which frameworks are shown. Releases of one framework are put in theirs.
    """
    columns = _ordered(columns)
    names = list(dict.fromkeys(column.report["adapter"] for column in columns))
    areas = list(dict.fromkeys(check["area"] for column in columns for check in column.report["checks"]))
    sections = [
        _framework(number, name, [column for column in columns if column.report["adapter"] == name], areas)
        for number, name in enumerate(names)
    ]
    title = f"Conformance of {', '.join(names)}"
    legend = (
        "A cell links to its findings. ✗ 2 of 9: two of nine checks that ran failed. ✓ 9: all nine passed. "
        "⚠ 2: two more met an error of the adapter itself. none: no check ran."
    )
    head = f"<header>\n<h1>{escaped(title)}</h1>\n<p>{legend}</p>\n</header>"
    return page(title, "\n".join([head, _heat(columns, names, areas), LEGEND, *sections]))


def since(check_id: str, releases: Sequence[Column]) -> str:
    """Say since which release a check fails, "" where there is one only.

    Args:
        check_id: the check.
        releases: the reports of one framework, the oldest first.
    """
    if len({version_of(release.report) for release in releases}) < 2:
        return ""
    statuses = [_status(check_id, release.report) for release in releases]
    red = [status in ("fail", "error") for status in statuses]
    last = max(place for place, is_red in enumerate(red) if is_red)
    first = last
    while first and red[first - 1]:
        first -= 1
    told = f"Fails since {releases[first].label}"
    if first == 0:
        told += " or before"
    elif statuses[first - 1] == "pass":
        told += f", passes in {releases[first - 1].label}"
    else:
        told += f" or before, was not checked in {releases[first - 1].label}"
    if last + 1 < len(releases):
        then = "passes" if statuses[last + 1] == "pass" else "is not checked"
        told += f"; {then} in {releases[last + 1].label}"
    return told


def _ordered(columns: Sequence[Column]) -> list[Column]:
    """Put the releases of a framework beside each other, the oldest first; unknown versions keep their order."""

    def key(column: Column) -> tuple[int, Version]:
        try:
            return 0, Version(version_of(column.report))
        except InvalidVersion:
            return 1, Version("0")

    names = list(dict.fromkeys(column.report["adapter"] for column in columns))
    return sorted(columns, key=lambda column: (names.index(column.report["adapter"]), *key(column)))


def _status(check_id: str, report: Report) -> str:
    return next((check["status"] for check in report["checks"] if check["id"] == check_id), "not-provided")


def _heat(columns: Sequence[Column], names: Sequence[str], areas: Sequence[str]) -> str:
    heads = "".join(f"<th scope=col>{escaped(column.label)}" for column in columns)
    lines = [f"<thead><tr><th scope=col>area{heads}</thead><tbody>"]
    reached = [area for area in areas if any(_reaches(column.report, area) for column in columns)]
    left = [area for area in areas if area not in reached]
    for area in reached:
        cells = "".join(_cell(column.report, area, names.index(column.report["adapter"])) for column in columns)
        lines.append(f"<tr><th scope=row>{escaped(area)}{cells}")
    lines.append("</tbody>")
    return (
        '<div class=scroll tabindex=0 role=region aria-label="Areas by frameworks"><table class=heat>'
        f"{''.join(lines)}</table></div>"
        + (f"<p class=muted>Not reached: {escaped(', '.join(left))}.</p>" if left else "")
    )


def _reaches(report: Report, area: str) -> bool:
    return any(check["area"] == area and check["status"] != "not-provided" for check in report["checks"])


def _cell(report: Report, area: str, number: int) -> str:
    checks = [check for check in report["checks"] if check["area"] == area]
    red = sum(check["status"] in ("fail", "error") for check in checks)
    ran = red + sum(check["status"] == "pass" for check in checks)
    erred = sum(check["status"] == "adapter-error" for check in checks)
    told = f" ⚠ {erred}" if erred else ""
    if red:
        heat = min(3, 1 + 5 * red // (2 * ran))
        return f'<td class="failing h{heat}"><a href="#{_anchor(number, area)}">✗ {red} of {ran}{told}</a>'
    return f"<td class=passing><span>✓ {ran}{told}</span>" if ran else f"<td>{told.strip() or 'none'}"


def _anchor(number: int, name: str) -> str:
    return escaped(f"{number}-{name}")


def _framework(number: int, name: str, releases: Sequence[Column], areas: Sequence[str]) -> str:
    """Write the checks of one framework that fail, each as the newest release that fails it shows it."""
    newest = {check["id"]: (check, release.report) for release in releases for check in failed(release.report)}
    parts = [f"<section>\n<h2>{escaped(name if len(releases) > 1 else name_of(releases[0].report))}</h2>"]
    parts += [] if newest else ["<p>No check failed.</p>"]
    for area in areas:
        members = [(check, report) for check, report in newest.values() if check["area"] == area]
        if members:
            parts.append(
                f'<section id="{_anchor(number, area)}">\n<h3 class=area>{escaped(name)}: {escaped(area)}</h3>'
            )
            parts += [
                article(check, report, f"{number}-{check['id']}", since(check["id"], releases))
                for check, report in members
            ]
            parts.append("</section>")
    others = (without_verdict(each.report, f"{each.label}: without a verdict, or stale") for each in releases)
    return "\n".join([*parts, "</section>", *filter(None, others)])
