"""Expected failures: a plain file that keeps a team's CI green, and turns it red when the file goes stale.

Each entry is a check with the reason behind a #, and below it, indented, its expected findings:

    advantage.constant_reward_is_zero  # float32 rounding of the mean; see issue 12
        3 rewards of 0.9: value off by 0.056
        5 rewards of 0.7: value off by 0.048

A finding may be up to `tally.MARGIN` times as large as written, or smaller, or missing. A finding that is not in the
file is a new failure. The file is written by `rlcanary check ADAPTER --update-expected FILE`, for the seed of that run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from rlcanary.checks.check import Result, outcome
from rlcanary.checks.registry import all_checks
from rlcanary.checks.severity import Severity, reaches
from rlcanary.checks.tally import Fingerprint, Found
from rlcanary.errors import UserError
from rlcanary.system.files import write_whole

ADAPTER_ERROR = Fingerprint("", "adapter error")
"""Stands where the findings belong in the entry of a check that the adapter itself kept from running."""
ExitCode = Literal[0, 1, 2, 3]
STALE = "is expected to fail and does not: remove it from the file of expected failures"
NO_REASON = "say why"
"""Stands where the reason of a new entry belongs; a file with it is refused."""


@dataclass(frozen=True)
class Expectation:
    """A check that is expected to fail, with the reason and the findings."""

    reason: str
    findings: tuple[Fingerprint, ...]

    def surplus(self, result: Result) -> list[Found]:
        """Return the findings beyond the expected ones."""
        return [found for found in result.findings if not any(each.covers(found.fingerprint) for each in self.findings)]


@dataclass
class _Entry:
    """A check in the file.

    Attributes:
        where: its line, for messages.
        head: its line as it stands there, "" once it is removed.
        body: the lines below it: its findings, comments and blank lines.
    """

    where: str
    head: str
    body: list[str] = field(default_factory=list)

    @property
    def check_id(self) -> str:
        return self.head.partition("#")[0].strip()

    @property
    def reason(self) -> str:
        return self.head.partition("#")[2].strip()

    @property
    def findings(self) -> list[Fingerprint]:
        return [Fingerprint.parse(line.strip()) for line in self.body if _is_finding(line)]

    def expect(self, findings: Iterable[Fingerprint]) -> None:
        """Put these findings in the place of its own; those that stay keep their places, and so do comments."""
        wanted = list(dict.fromkeys(map(str, findings)))
        kept = [line for line in self.body if not _is_finding(line) or line.strip() in wanted]
        place = 1 + max((number for number, line in enumerate(kept) if _is_finding(line)), default=-1)
        there = {line.strip() for line in kept}
        self.body = [*kept[:place], *(f"    {each}" for each in wanted if each not in there), *kept[place:]]


def _is_finding(line: str) -> bool:
    return line[:1].isspace() and line.strip()[:1] not in ("", "#")


def read_expected(path: Path, *, is_draft: bool = False) -> dict[str, Expectation]:
    """Read the expected failures of a file: check id -> reason and findings.

    Args:
        path: the file.
        is_draft: accept entries that have no reason or no findings yet.

    Raises:
        UserError: the file cannot be read, a line has no reason or no findings, or a check is unknown or named twice.
    """
    _, entries, _ = _read(path)
    for entry in entries if not is_draft else ():
        if entry.reason in ("", NO_REASON):
            raise UserError(f"{entry.where}: say after a # why {entry.check_id} is expected to fail")
        if not entry.findings:
            raise UserError(
                f"{entry.where}: {entry.check_id} has no findings, so that any failure of it would be expected; "
                f"write them with rlcanary check ADAPTER --update-expected {path}"
            )
    return {entry.check_id: Expectation(entry.reason, tuple(entry.findings)) for entry in entries}


def update_expected(path: Path, results: Iterable[Result], reason: str = NO_REASON) -> dict[str, Expectation]:
    """Write the failures among the results into the file, which may not exist yet.

    Reasons, comments, blank lines and the entries of checks that did not run stay.

    Args:
        path: the file.
        results: those of a run.
        reason: the reason of new entries.

    Returns:
        The new contents of the file.
    """
    top, read, end = _read(path) if path.exists() else ([], [], "\n")
    entries = {entry.check_id: entry for entry in read}
    for result in results:
        if result.status in ("not-provided", "not-compared"):
            continue
        if result.status == "pass":
            if result.id in entries:
                entries[result.id].expect([])
                entries[result.id].head = ""
            continue
        entry = entries.setdefault(result.id, _Entry("", result.id))
        entry.head = entry.head if entry.reason else f"{result.id}  # {reason}"
        is_misfit = result.status == "adapter-error"
        entry.expect([ADAPTER_ERROR] if is_misfit else [each.fingerprint for each in result.findings])
    lines = [*top, *(line for each in entries.values() for line in ([each.head] if each.head else []) + each.body)]
    # A link stays one.
    write_whole(Path(os.path.realpath(path)), "".join(f"{line}{end}" for line in lines))
    return read_expected(path, is_draft=True)


def _read(path: Path) -> tuple[list[str], list[_Entry], str]:
    """Read the lines above the first entry, the entries, and the end of a line.

    Raises:
        UserError: the file cannot be read, a line is no finding, or a check is unknown or named twice.
    """
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise UserError(f"cannot read the expected failures in {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"cannot read the expected failures in {path}: not a text in UTF-8") from error
    end = "\r\n" if "\r\n" in text else "\n"
    known = {check.id for check in all_checks()}
    top: list[str] = []
    entries: dict[str, _Entry] = {}
    for number, line in enumerate(text.replace("\r\n", "\n").removesuffix("\n").split("\n") if text else (), start=1):
        where = f"{path}, line {number}"
        if _is_finding(line):
            _require_finding(line.strip(), where, is_below_a_check=bool(entries))
        if line[:1].isspace() or line[:1] in ("", "#"):
            (entries[list(entries)[-1]].body if entries else top).append(line)
            continue
        entry = _Entry(where, line)
        if entry.check_id not in known:
            raise UserError(f"{where}: there is no check {entry.check_id!r}")
        if entry.check_id in entries:
            raise UserError(f"{where}: {entry.check_id} stands there twice")
        entries[entry.check_id] = entry
    return top, list(entries.values()), end


def _require_finding(text: str, where: str, *, is_below_a_check: bool) -> None:
    if not is_below_a_check:
        raise UserError(f"{where}: a finding stands there above the first check")
    try:
        Fingerprint.parse(text)
    except ValueError as error:
        raise UserError(f"{where}: {text!r} does not end with a number behind 'off by'") from error


def changes(before: dict[str, Expectation], after: dict[str, Expectation]) -> list[str]:
    """Say in a line each which findings an update of the file added and removed."""

    def findings(entries: dict[str, Expectation]) -> list[str]:
        return [f"{name}: {each}" for name, entry in entries.items() for each in entry.findings]

    old, new = findings(before), findings(after)
    return [f"added {each}" for each in new if each not in old] + [f"removed {each}" for each in old if each not in new]


@dataclass(frozen=True)
class Comparison:
    """Results compared with the expected failures.

    Attributes:
        unexpected: checks that failed or raised without being expected to, or with other findings than expected.
        known: checks that failed as expected.
        stale: checks that were expected to fail, but passed or did not run.
        misfits: checks in which the adapter itself erred without being expected to: these have no verdict.
        nothing: the reason why nothing was checked, "" if something was.
    """

    unexpected: list[Result]
    known: list[Result]
    stale: list[Result]
    misfits: list[Result] = field(default_factory=list)
    nothing: str = ""

    def is_red_from(self, least: Severity) -> bool:
        """Tell whether an unexpected failure has this severity or a worse one, or the file is stale."""
        return bool(self.stale) or any(reaches(result.severity, least) for result in self.unexpected)

    def exit_code(self, least: Severity) -> ExitCode:
        """Return the verdict, which every output says: failures count from the severity `least` on."""
        if self.nothing:
            return 2
        return 1 if self.is_red_from(least) else 3 if self.misfits else 0


def compare(results: Sequence[Result], expected: Mapping[str, Expectation]) -> Comparison:
    """Sort results into unexpected, known, stale and misfits."""
    comparison = Comparison([], [], [], nothing=_nothing(results))
    for result in results:
        expectation = expected.get(result.id)
        if result.status == "adapter-error":
            is_known = expectation is not None and ADAPTER_ERROR in expectation.findings
            (comparison.known if is_known else comparison.misfits).append(result)
        elif result.status not in ("fail", "error"):
            comparison.stale.extend([result] if expectation else [])
        elif expectation and not expectation.surplus(result):
            comparison.known.append(result)
        else:
            comparison.unexpected.append(result if expectation is None else beyond(result, expectation))
    return comparison


def _nothing(results: Sequence[Result]) -> str:
    statuses = {result.status for result in results}
    if statuses <= {"not-provided"}:
        return "the adapter provides nothing that these checks need"
    if statuses <= {"not-provided", "not-compared"}:
        return "the capabilities that these checks call returned nothing to compare"
    return ""


def beyond(result: Result, expectation: Expectation) -> Result:
    """Return the result with only its findings beyond the expected ones."""
    surplus = expectation.surplus(result)
    status, message, snippet = outcome(surplus)
    told = f"{message}\nnot among the {len(expectation.findings)} expected findings: {surplus[0].fingerprint}"
    return replace(result, status=status, message=told, snippet=snippet, findings=tuple(surplus))
