"""The page of one run of `rlcanary check`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rlcanary.html.findings import Report, article, failed, name_of, without_verdict
from rlcanary.html.frame import escaped, page
from rlcanary.html.strips import LEGEND

VERDICTS = {
    0: ("passed", "pass"),
    1: ("failed", "fail"),
    2: ("nothing was checked", "fail"),
    3: ("no check failed, but the adapter itself met errors", "fail"),
}
"""What the exit code says."""
STATUSES = {
    "fail": ("failed", "fail"),
    "expected": ("failed as expected", "muted"),
    "stale": ("stale", "fail"),
    "error": ("raised", "fail"),
    "adapter-error": ("adapter errors", "muted"),
    "pass": ("passed", "pass"),
    "not-compared": ("not compared", "muted"),
    "not-provided": ("not provided", "muted"),
}


def check_page(report: Report) -> str:
    """Write the page of a report: its head, the areas by status, and the findings by cause, drawn."""
    title = f"Conformance of {name_of(report)}"
    return page(title, "\n".join([_head(report, title), _areas(report), *_findings(report), without_verdict(report)]))


def _head(report: Report, title: str) -> str:
    counts, (verdict, style) = _counts(report["checks"], report), VERDICTS[report["exit_code"]]
    facts = [
        f"<li><b class={kind}>{counts[status]}</b> {words}"
        for status, (words, kind) in STATUSES.items()
        if counts[status] or status == "fail"
    ]
    versions = " · ".join(f"{name} {version}" for name, version in report["versions"].items())
    covered = report["coverage"]
    told = f"{covered['ran']} of {covered['checks']} checks ran."
    if covered["not_checked"]:
        told += f" Not reached: {', '.join(covered['not_checked'])}."
    if covered["provide"]:
        told += f" Provide {' and '.join(covered['provide'])} to run {covered['would_run']} more."
    if report["causes_cut_after"] is not None:
        told += f" The search for causes ended after {report['causes_cut_after']:g} s: a failure may have one."
    return f"""<header>
<h1>{escaped(title)}</h1>
<p class=muted>{escaped(versions)}</p>
<p><b class={style}>{verdict}</b> (exit code {report["exit_code"]})</p>
<ul class=facts>{"".join(facts)}</ul>
<p>{escaped(told)}</p>
</header>"""


def _counts(checks: Sequence[Report], report: Report) -> Counter[str]:
    """Count the checks by status; those that fail as a list of known failures says, or do not, have one of their own."""
    own = dict.fromkeys(report["expected"], "expected") | dict.fromkeys(report["stale"], "stale")
    return Counter(own.get(check["id"]) or check["status"] for check in checks)


def _areas(report: Report) -> str:
    """Write a tile for each area of which a check ran; the head names the others."""
    tiles = []
    for area, members in groupby(report["checks"], key=lambda check: check["area"]):
        checks = list(members)
        if all(check["status"] == "not-provided" for check in checks):
            continue
        counts = _counts(checks, report)
        told = [
            f"<span class={style}>{counts[status]} {words}</span>"
            for status, (words, style) in STATUSES.items()
            if counts[status]
        ]
        first = next((check for check in checks if check["status"] in ("fail", "error")), None)
        kind = (
            "failing"
            if counts["fail"] or counts["error"] or counts["stale"]
            else "passing"
            if counts["pass"]
            else "open"
        )
        name = f'<a href="#{escaped(first["id"])}">{escaped(area)}</a>' if first else escaped(area)
        tiles.append(f"<li class={kind}><b>{name}</b>{''.join(told)}")
    return f"<section>\n<h2>Areas</h2>\n<ul class=areas>{''.join(tiles)}</ul>\n</section>"


def _findings(report: Report) -> list[str]:
    """Write the failures under the cause that explains them, then the others by the capability that they call."""
    left = {check["id"]: check for check in failed(report)}
    if not left:
        return []
    order = [check["id"] for check in report["checks"]]
    parts = [f"<section>\n<h2>Findings</h2>\n{LEGEND}\n</section>"]
    groups = [(f"Cause: {cause['cause']}", "", sorted(cause["checks"], key=order.index)) for cause in report["causes"]]
    groups += [
        (f"No known cause: checks of {fold['capability']}", fold["told"], fold["checks"]) for fold in report["folds"]
    ]
    groups.append(("Others", "", list(left)))
    for title, told, names in groups:
        members = [left.pop(name) for name in names if name in left]
        if members:
            articles = "\n".join(article(check, report, check["id"]) for check in members)
            line = f"<p class=muted>{escaped(told)}</p>\n" if told else ""
            parts.append(f"<section>\n<h2>{escaped(title)}</h2>\n{line}{articles}\n</section>")
    return parts
