"""A registry of known failures that a team tolerates for now: known_issues.toml.

[[issue]]
id = "VLLM-BUNDLES"
tests = ["tests/llm/test_chat.py::test_ifeval*"]   # node ids; * stands for anything
reason = "KeyError: 'bundles' when the async engine starts"
priority = "high"                                  # high, medium or low
owner = "inference team"
workaround = "the sync engine"
upstream = "https://…"
since = 2026-01-29
until = 2026-06-30                                 # the last day; from then on the tests fail as any other
error = "KeyError: .bundles"                       # a regular expression; a failure of another kind is a failure
versions = ["vllm>=0.14"]                          # the issue shows only where all of these hold
strict = true                                      # a test that passes fails the run
"""

from __future__ import annotations

import datetime
import re
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from rlcanary.errors import UserError
from rlcanary.system.requirement import parse, unmet

FILE_NAME = "known_issues.toml"
PRIORITIES = ("high", "medium", "low")


@dataclass(frozen=True)
class Issue:
    """One entry of the registry."""

    id: str
    reason: str
    tests: tuple[str, ...] = ()
    priority: str = "medium"
    owner: str = ""
    workaround: str = ""
    upstream: str = ""
    since: datetime.date | None = None
    until: datetime.date | None = None
    error: str = ""
    versions: tuple[str, ...] = ()
    strict: bool = False

    def matches(self, nodeid: str) -> bool:
        """Tell if a node id is one of the issue's tests: the test itself, one of its parameters, or a match of a pattern."""
        return any(nodeid == test or matches_pattern(nodeid, test) for test in self.tests)

    def ended(self, today: datetime.date) -> str | None:
        """Explain why the issue no longer counts: its last day is over, or other versions are installed; None if it does."""
        if self.until is not None and today > self.until:
            return f"it ended on {self.until}"
        return self.passed_versions()

    def passed_versions(self) -> str | None:
        """Explain why the issue does not show with the installed versions; None if it does."""
        return next((reason for text in self.versions if (reason := unmet(text))), None)

    def explains(self, failure: str) -> bool:
        """Tell if a failure with this text is the known one."""
        return not self.error or re.search(self.error, failure) is not None


def matches_pattern(nodeid: str, pattern: str) -> bool:
    # A parameter's brackets and question marks stand for themselves, as in a node id; only * is special.
    literal = pattern.replace("[", "[[]").replace("?", "[?]")
    return fnmatchcase(nodeid, literal) or ("[" not in pattern and fnmatchcase(nodeid, literal + "[[]*"))


def read_issues(path: Path) -> list[Issue]:
    """Read the entries of a registry.

    Raises:
        UserError: the file cannot be read, or an entry lacks or repeats something.
    """
    import tomllib

    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error
    if unknown := document.keys() - {"issue"}:
        raise UserError(f"{path}: unknown {', '.join(sorted(unknown))}; entries are [[issue]] tables")
    tables = document.get("issue", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise UserError(f"{path}: entries are [[issue]] tables, got issue = {tables!r}")
    issues = [read_issue(table, path) for table in tables]
    ids = [issue.id for issue in issues]
    if repeated := sorted({issue_id for issue_id in ids if ids.count(issue_id) > 1}):
        raise UserError(f"{path}: {', '.join(repeated)} appears more than once")
    return issues


def read_issue(table: dict[str, Any], path: Path) -> Issue:
    where = f"{path}, issue {table.get('id', 'without id')}"
    known = {field.name for field in fields(Issue)}
    if unknown := table.keys() - known:
        raise UserError(f"{where}: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(known))}")
    for name in ("id", "reason"):
        if not isinstance(table.get(name), str) or not table[name]:
            raise UserError(f"{where}: {name} must be given, as text")
    for name in ("tests", "versions"):
        value = table.get(name, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise UserError(f"{where}: {name} must be a list of texts")
    for name in ("owner", "workaround", "upstream", "error"):
        if not isinstance(table.get(name, ""), str):
            raise UserError(f"{where}: {name} must be a text")
    if table.get("priority", "medium") not in PRIORITIES:
        raise UserError(f"{where}: priority must be one of {', '.join(PRIORITIES)}")
    if not isinstance(table.get("strict", False), bool):
        raise UserError(f"{where}: strict must be true or false")
    for name in ("since", "until"):
        # A moment is a date to Python, but it cannot be compared with one.
        if type(table.get(name, datetime.date.min)) is not datetime.date:
            raise UserError(f"{where}: {name} must be a date such as 2026-01-29, without quotes")
    try:
        re.compile(table.get("error", ""))
    except re.error as error:
        raise UserError(f"{where}: error is no regular expression: {error}") from error
    issue = Issue(**{**table, "tests": tuple(table.get("tests", ())), "versions": tuple(table.get("versions", ()))})
    for text in issue.versions:
        parse(text)
    return issue


def failure_text(error: BaseException, shown: object) -> str:
    """Return the text in which an issue's error is looked for: what was raised, without the source lines of a traceback.

    Args:
        error: of the test; its causes, and the members of a group, count too.
        shown: the report of the failure. Where it is no traceback, as of an item that is no Python function, it counts
            whole; of a traceback the sections do, such as the stacks of a test that timed out.
    """
    texts: list[str] = []
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop(0)
        if current is None or id(current) in seen:
            continue
        seen.add(id(current))
        texts += traceback.format_exception_only(current)
        waiting += [current.__cause__, None if current.__suppress_context__ else current.__context__]
        if isinstance(current, BaseExceptionGroup):
            waiting += current.exceptions
    is_traceback = hasattr(shown, "reprtraceback")
    texts += [section[1] for section in getattr(shown, "sections", ())] if is_traceback else [str(shown)]
    return "\n".join(texts)


def stale_tests(issue: Issue, nodeids: Sequence[str], whole_files: Iterable[str], root: Path) -> list[str]:
    """List the patterns of an issue that match no test any more.

    Args:
        issue: an entry of the registry.
        nodeids: the tests that were collected.
        whole_files: the files of which all tests were collected.
        root: the folder where node ids begin.
    """
    collected = set(whole_files)
    stale = []
    for pattern in issue.tests:
        file = pattern.partition("::")[0]
        if "*" in file or file.startswith("canary["):
            continue  # a test that was not collected could match as well; checks are there only with --canary
        gone = not (root / file).exists()
        if gone or (file in collected and not any(Issue("", "", (pattern,)).matches(nodeid) for nodeid in nodeids)):
            stale.append(pattern)
    return stale
