"""The registry of known issues: what it accepts, which tests an entry names, when an entry is over."""

import datetime
from pathlib import Path

import pytest

from rlcanary.errors import UserError
from rlcanary.known_issues import Issue, read_issues, stale_tests

FULL = """
[[issue]]
id = "VLLM-BUNDLES"
tests = ["tests/test_chat.py::test_env*"]
reason = "KeyError: 'bundles'"
priority = "high"
owner = "inference"
workaround = "the sync engine"
upstream = "https://example.org/1"
since = 2026-01-29
until = 2026-06-30
error = "KeyError: .bundles"
versions = ["pytest>=8"]
strict = true
"""


def read(folder: Path, text: str) -> list[Issue]:
    path = folder / "known_issues.toml"
    path.write_text(text)
    return read_issues(path)


def test_entry_has_what_the_file_says(tmp_path: Path) -> None:
    (issue,) = read(tmp_path, FULL)
    assert (issue.id, issue.priority, issue.strict, str(issue.since)) == ("VLLM-BUNDLES", "high", True, "2026-01-29")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (FULL + FULL, "VLLM-BUNDLES .*more than once"),
        (FULL.replace("reason", "raeson"), "unknown raeson"),
        (FULL.replace('"high"', '"urgent"'), "one of high, medium, low"),
        (FULL.replace("2026-01-29", '"2026-01-29"'), "since must be a date"),
        (FULL.replace("2026-06-30", "2026-06-30T00:00:00"), "until must be a date"),
        (FULL.replace('"KeyError: .bundles"', '"("'), "no regular expression"),
        (FULL.replace("pytest>=8", "pytest => 8"), "is no requirement"),
        (FULL.replace('["tests/test_chat.py::test_env*"]', '"tests"'), "tests must be a list"),
        (FULL.replace('id = "VLLM-BUNDLES"', ""), "id must be given"),
        (FULL.replace("issue", "issues"), "unknown issues"),
        ("[[issue", "cannot be read"),
        ("issue = 3", "tables, got issue = 3"),
        ("issue = [3]", r"\[\[issue\]\] tables"),
        ("[issue]\nid = 'X'", r"\[\[issue\]\] tables"),
        (FULL.replace('"inference"', "3"), "owner must be a text"),
    ],
)
def test_registry_with_a_mistake_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read(tmp_path, text)


@pytest.mark.parametrize("content", ["Gr\u00f6\u00dfe = 1".encode("latin-1"), "issue".encode("utf-16"), b"\x00"])
def test_registry_that_is_no_text_in_utf_8_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "known_issues.toml").write_bytes(content)
    with pytest.raises(UserError, match=r"known_issues\.toml cannot"):
        read_issues(tmp_path / "known_issues.toml")


@pytest.mark.parametrize(
    ("pattern", "nodeid", "matches"),
    [
        ("t.py::test_a", "t.py::test_a", True),
        ("t.py::test_a", "t.py::test_a[1-x]", True),
        ("t.py::test_a", "t.py::test_ab", False),
        ("t.py::test_a[1]", "t.py::test_a[1]", True),
        ("t.py::test_a[1]", "t.py::test_a[2]", False),
        ("t.py::test_a[a?b]", "t.py::test_a[a?b]", True),
        ("t.py::test_a[a?b]", "t.py::test_a[aXb]", False),
        ("t.py::test_*", "t.py::test_ab[1]", True),
        ("*::TestChat::*", "tests/t.py::TestChat::test_a", True),
    ],
)
def test_pattern_names_tests(pattern: str, nodeid: str, matches: bool) -> None:
    assert Issue("I", "reason", (pattern,)).matches(nodeid) is matches


def test_issue_is_over_where_its_versions_are_not_installed() -> None:
    assert Issue("I", "reason", versions=("pytest>=8", "pytest<9000")).passed_versions() is None
    assert Issue("I", "reason", versions=("pytest<8",)).passed_versions() is not None
    assert Issue("I", "reason").passed_versions() is None


def test_issue_is_over_after_its_last_day() -> None:
    day = datetime.date(2026, 6, 30)
    issue = Issue("I", "reason", until=day)
    assert issue.ended(day) is None
    assert issue.ended(day + datetime.timedelta(days=1)) is not None


def test_issue_explains_the_failures_that_its_error_matches() -> None:
    issue = Issue("I", "reason", error="KeyError: .bundles")
    assert issue.explains("E   KeyError: 'bundles'\n")
    assert not issue.explains("E   AssertionError: bundles")
    assert Issue("I", "reason").explains("anything")


def test_only_tests_that_are_certainly_gone_are_stale(tmp_path: Path) -> None:
    for name in ("whole.py", "part.py"):
        (tmp_path / name).touch()
    patterns = ("gone.py::test_a", "whole.py::test_gone", "whole.py::test_here", "part.py::test_unseen", "*::test_any")
    issue = Issue("I", "reason", patterns)
    stale = stale_tests(issue, ["whole.py::test_here[1]", "part.py::test_b"], ["whole.py"], tmp_path)
    assert stale == ["gone.py::test_a", "whole.py::test_gone"]


def test_check_of_an_adapter_that_was_not_asked_for_is_not_gone(tmp_path: Path) -> None:
    issue = Issue("I", "reason", ("canary[reference]::loss.on_policy_sign",))
    assert stale_tests(issue, ["t.py::test_a"], ["t.py"], tmp_path) == []
