"""Reports of check results for people and for machines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby

from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from rlcanary.checks.check import Check, Result
from rlcanary.checks.findings.diagnosis import Cause
from rlcanary.checks.findings.document import coverage_of
from rlcanary.checks.findings.expected import STALE, Comparison, ExitCode
from rlcanary.checks.findings.grouping import grouped
from rlcanary.checks.severity import EFFECTS, Severity
from rlcanary.system.printable import counted

STYLES = {
    "pass": "green",
    "fail": "bold red",
    "error": "bold magenta",
    "adapter-error": "magenta",
    "not-compared": "yellow",
    "not-provided": "dim",
}
WIDE = 100
"""Columns from which on the table says in a column of its own what was found."""

MARKS: dict[ExitCode, str] = {0: "✅", 1: "❌", 2: "⚠️", 3: "⚠️"}
LABELS = {
    "pass": "pass",
    "fail": "FAIL",
    "error": "ERROR",
    "adapter-error": "adapter error",
    "not-compared": "not compared",
    "not-provided": "not provided",
}


def show(
    console: Console,
    adapter: str,
    checks: list[Check],
    results: list[Result],
    comparison: Comparison,
    causes: Sequence[Cause] = (),
) -> None:
    """Print the table of all checks by area, each cause, the other unexpected failures by capability, and the counts."""
    known = {result.id for result in comparison.known}
    console.print(_table(adapter, checks, results, known, causes, is_wide=console.width >= WIDE))
    by_id = {check.id: check for check in checks}
    folds, rest = folded(comparison.unexpected, causes)
    for cause, members in folds:
        console.rule(Text("CAUSE", STYLES["fail"]), align="left", style="dim")
        console.print(Text(cause.words, style="bold"))  # in a rule, its end would be cut off
        console.print(Text(told_of(members)))
        console.print("\nThe first of them:\n", style="dim")
        _explain(console, by_id[members[0].id], members[0])
    for fold in grouped(rest, checks, results):
        _explain(console, by_id[fold.members[0].id], fold.members[0])
        if fold.told:
            console.print(Text(f"{fold.told}\n"))
    for result in comparison.stale:
        told = "passes" if result.status == "pass" else f"did not run ({result.message})"
        words = f" {result.id} is expected to fail, but {told}: remove it from the file"
        console.print(Text.assemble(("stale", "bold red"), words))
    console.print(Text(str(coverage_of(results))))
    console.print(summary(adapter, results, comparison))


def folded(
    unexpected: Sequence[Result], causes: Sequence[Cause]
) -> tuple[list[tuple[Cause, list[Result]]], list[Result]]:
    """Sort failures under their causes; return these with their failures, and what has no known cause."""
    folds = []
    for cause in causes:
        members = [each for each in unexpected if any(cause.covers(each.id, found) for found in each.findings)]
        folds += [(cause, members)] if members else []
    under = {member.id for _, members in folds for member in members}
    return folds, [result for result in unexpected if result.id not in under]


def told_of(members: Sequence[Result]) -> str:
    """Say in one line which failures a cause explains."""
    count = sum(len(member.findings) for member in members)
    names = ", ".join(member.id for member in members)
    return f"This alone gives {counted(count, 'finding')} of {counted(len(members), 'check')}: {names}"


def to_markdown(
    adapter: str,
    checks: list[Check],
    results: list[Result],
    comparison: Comparison,
    causes: Sequence[Cause] = (),
    least: Severity = "hardening",
) -> str:
    """Summarise for a CI page: the counts, the causes, then each failure, folded, with its counterexample.

    The verdict is that of the exit code, for which failures of the severity `least` or a worse one count.
    """
    by_id = {check.id: check for check in checks}
    lines = [
        f"## {MARKS[comparison.exit_code(least)]} Conformance of {_escaped(adapter)}",
        "",
        _escaped(summary(adapter, results, comparison).plain),
        "",
        f"{coverage_of(results)}.",
        "",
        *([f"Nothing was checked: {comparison.nothing}.", ""] if comparison.nothing else []),
    ]
    for cause, members in folded(comparison.unexpected, causes)[0]:
        lines += [f"**Cause: {cause.words}.** {told_of(members)}", ""]
    for result in [*comparison.unexpected, *comparison.known]:
        effect = f", {EFFECTS[result.severity]}" if result.severity else ""
        told = " (expected)" if result in comparison.known else ""
        lines += [f"<details><summary><code>{result.id}</code> {LABELS[result.status]}{told}{effect}</summary>", ""]
        lines += [*_fenced("text", result.message), "", by_id[result.id].explanation, ""]
        lines += [*_fenced("python", result.snippet), ""] if result.snippet else []
        lines += ["</details>", ""]
    lines += [f"- `{result.id}` {STALE}" for result in comparison.stale]
    others = [(each, "compared nothing") for each in results if each.status == "not-compared"]
    others += [(each, "met an adapter error") for each in comparison.misfits]
    lines += [f"- `{each.id}` {told}: {_escaped(' '.join(each.message.split()))}" for each, told in others]
    return "\n".join(lines).rstrip() + "\n"


def _fenced(language: str, text: str) -> list[str]:
    """Write a block of code in Markdown, whatever back ticks the text has."""
    fence = "`" * max([3, *(len(run) + 1 for run in re.findall("`+", text))])
    return [f"{fence}{language}", text, fence]


def _escaped(line: str) -> str:
    """Escape what Markdown reads as more than text. An underscore in a word is none."""
    return re.sub(r"[\\`*\[\]<>|]", r"\\\g<0>", line)


def summary(adapter: str, results: list[Result], comparison: Comparison) -> Text:
    """Count in one line the checks of each status, with the time taken."""
    counts = Counter(result.status for result in results)
    unexpected = Counter(result.status for result in comparison.unexpected)
    parts = [(f"{counts['pass']} passed", STYLES["pass"])]
    parts += [(f"{unexpected['fail']} failed", STYLES["fail"])] if unexpected["fail"] else []
    parts += [(f"{unexpected['error']} raised an error", STYLES["error"])] if unexpected["error"] else []
    parts += [(f"{len(comparison.known)} failed as expected", "yellow")] if comparison.known else []
    parts += [(f"{len(comparison.stale)} stale", STYLES["fail"])] if comparison.stale else []
    erred = counted(len(comparison.misfits), "adapter error")
    parts += [(erred, STYLES["adapter-error"])] if comparison.misfits else []
    parts += [(f"{counts['not-compared']} not compared", STYLES["not-compared"])] if counts["not-compared"] else []
    parts += [(f"{counts['not-provided']} not provided", STYLES["not-provided"])] if counts["not-provided"] else []
    line = Text(f"{adapter}: ")
    for index, part in enumerate(parts):
        line.append(", " if index else "").append(*part)
    return line.append(f" in {sum(result.seconds for result in results):.1f} s")


def _table(
    adapter: str,
    checks: list[Check],
    results: list[Result],
    known: set[str],
    causes: Sequence[Cause],
    *,
    is_wide: bool,
) -> Table:
    """Make a row per check that ran, and one for each reason why others of an area did not.

    Areas for which the adapter has no capability share the last row.
    """
    table = Table(title=Text(f"Conformance of {adapter}", "italic"), title_justify="left", expand=True)
    table.add_column("Check", no_wrap=is_wide, ratio=None if is_wide else 1)
    table.add_column("Status", no_wrap=True)
    if is_wide:
        table.add_column("Severity", no_wrap=True)
        table.add_column("Found", no_wrap=True, overflow="ellipsis", ratio=1)

    def add(label: str, status: Text, severity: str, found: str, style: str = "dim") -> None:
        if is_wide:
            table.add_row(label, status, severity, Text(found, style))
        else:
            told = Text.assemble(label, ("\n" if found else "", ""), (found, style))
            table.add_row(told, status.append(f"\n{severity}" if severity else "", style=""))

    nothing: dict[str, int] = {}
    rows = zip(checks, results, strict=True)
    for area, grouped_rows in groupby(rows, key=lambda row: row[0].area):
        members = list(grouped_rows)
        if all(result.status == "not-provided" and result.missing for _, result in members):
            nothing[area] = len(members)
            continue
        missing: Counter[str] = Counter()
        for check, result in members:
            words = next((cause.words for cause in causes if result.id in cause.explained), "")
            first_line = words or result.message.partition("\n")[0]
            if result.status == "not-provided":
                missing[first_line] += 1
                continue
            status = Text(LABELS[result.status], style=STYLES[result.status])
            if result.id in known:
                status = Text("expected", style="yellow")
            add(check.id, status, result.severity or "", first_line, "" if result.status == "fail" else "dim")
        for reason, count in missing.items():
            status = Text(LABELS["not-provided"], style=STYLES["not-provided"])
            add(f"{area}: {counted(count, 'check')}", status, "", reason)
        table.add_section()
    if nothing:
        status = Text(LABELS["not-provided"], style=STYLES["not-provided"])
        areas = counted(len(nothing), "further area")
        told = "the adapter has no capability for them: named below"
        add(f"{areas}: {counted(sum(nothing.values()), 'check')}", status, "", told)
    return table


def _explain(console: Console, check: Check, result: Result) -> None:
    """Print a failure in full. The snippet is printed without indent and not wrapped, so that it can be copied."""
    effect = f" ({EFFECTS[result.severity]})" if result.severity else ""
    title = Text.assemble((f"{LABELS[result.status]} {result.id}", STYLES[result.status]), effect)
    console.rule(title, align="left", style="dim")
    console.print(Text(result.message, style="bold"))
    for paragraph in check.paragraphs if result.status == "fail" else check.paragraphs[:1]:
        console.print(Text(f"\n{paragraph}"))
    if result.snippet:
        console.print("\nReproduce:", style="dim")
        code = Syntax(result.snippet, "python", background_color="default").highlight(result.snippet)
        console.print(code, soft_wrap=True)
    console.print()
