"""The findings of a report, each check with its counterexample drawn. A report is what `rlcanary check --json` writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcanary.html.frame import escaped
from rlcanary.html.strips import drawing
from rlcanary.system.printable import counted

EFFECTS = {"update": "wrong update", "dashboard": "wrong number on the dashboard", "hardening": "hardening"}
DRAWN = 4
"""Findings of one check that are drawn; the others are named."""

Report = Mapping[str, Any]


def name_of(report: Report) -> str:
    """Return the adapter's name, with the version of its framework where that is known."""
    return " ".join(filter(None, [report["adapter"], version_of(report)]))


def version_of(report: Report) -> str:
    """Return the version of the framework, "" where it is not known."""
    versions: Mapping[str, str] = report.get("versions", {})
    return versions.get(report["adapter"], "")


def article(check: Report, report: Report, anchor: str, note: str = "") -> str:
    """Write a check that failed: its message, its findings drawn, why it matters, and the program.

    Args:
        check: the check's entry in the report.
        report: the report.
        anchor: the id of the article.
        note: a line below the title, as text.
    """
    findings = check["findings"]
    told = [EFFECTS.get(check["severity"], "")] + (["raised"] if check["status"] == "error" else [])
    told += ["expected to fail"] if check["id"] in report.get("expected", ()) else []
    tags = "".join(f'<span class="tag fail">{escaped(each)}</span>' for each in told if each)
    parts = [f'<article id="{escaped(anchor)}">\n<h3>{escaped(check["id"])}{tags}</h3>']
    parts += [f"<p class=muted>{escaped(note)}</p>"] if note else []
    parts.append(_message(check["message"], findings))
    parts += [drawing(each) for each in _first(findings)]
    if explanation := report.get("explanations", {}).get(check["id"]):
        paragraphs = "".join(f"<p>{escaped(each)}</p>" for each in explanation.split("\n\n"))
        parts.append(_fold("The property, why breaking it is silent, where to look", paragraphs))
    if len(findings) > 1:
        others = [
            f"<h4>{escaped(each['fingerprint'])}</h4>{_message(each['message'], [each])}{drawing(each)}"
            for each in findings[1:DRAWN]
        ]
        left = [f"<li>{escaped(each['fingerprint'])}" for each in findings[DRAWN:]]
        others += [f"<h4>Not drawn</h4><ul>{''.join(left)}</ul>"] if left else []
        parts.append(_fold(f"{counted(len(findings) - 1, 'further finding')} of this check", "".join(others)))
    if check["snippet"]:
        parts.append(_fold("Program that shows it again", f"<pre><code>{escaped(check['snippet'])}</code></pre>"))
    return "\n".join([*filter(None, parts), "</article>"])


def failed(report: Report) -> list[Report]:
    """Return the entries of the checks that failed or raised."""
    return [check for check in report["checks"] if check["status"] in ("fail", "error")]


def without_verdict(report: Report, title: str = "Without a verdict, or stale") -> str:
    """Write what an exit code tells besides failures: stale entries, adapter errors, checks that compared nothing."""
    stale = report.get("stale", ())
    told = [(name, "is expected to fail and does not: remove it") for name in stale]
    for status, words in (("adapter-error", "met an adapter error"), ("not-compared", "compared nothing")):
        told += [
            (check["id"], f"{words}: {check['message']}")
            for check in report["checks"]
            if check["status"] == status and check["id"] not in (*report.get("expected", ()), *stale)
        ]
    lines = "".join(f"<li><b>{escaped(name)}</b> {escaped(words)}" for name, words in told)
    return f"<section>\n<h2>{escaped(title)}</h2>\n<ul>{lines}</ul>\n</section>" if told else ""


def _first(findings: Sequence[Report]) -> Sequence[Report]:
    """Return the first finding; where it is of a single number, also the first one of tokens in its case."""

    def size(finding: Report) -> int:
        compared = finding.get("picture", {}).get("compared")
        return 0 if compared is None else compared["shape"][0] * compared["shape"][1]

    def case(finding: Report) -> str:
        return str(finding["fingerprint"]).rpartition(": ")[0]

    alike = [each for each in findings[1:] if case(each) == case(findings[0]) and size(each) > 1]
    return [*findings[:1], *(alike[:1] if size(findings[0]) == 1 else [])]


def _message(message: str, findings: Sequence[Report]) -> str:
    """Write a message without the lines that a picture, or the list of further findings, shows better."""
    is_drawn = bool(findings) and "compared" in findings[0].get("picture", {})
    hidden = (*(("  got:", "  expected:") if is_drawn else ()), *(("also: ", "and ") if len(findings) > 1 else ()))
    first, *rest = message.split("\n")
    shown = [f"<b>{escaped(first)}</b>", *(escaped(line) for line in rest if not line.startswith(hidden))]
    return f"<pre class=message>{chr(10).join(shown)}</pre>"


def _fold(summary: str, body: str) -> str:
    return f"<details><summary>{escaped(summary)}</summary>{body}</details>"
