"""Results as JUnit's XML, which CI systems read: a test case per check."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from rlcanary.checks.check import Check, Result
from rlcanary.checks.findings.expected import STALE, Comparison, Expectation
from rlcanary.checks.findings.locations import location_of
from rlcanary.checks.severity import EFFECTS, Severity, reaches
from rlcanary.contract.adapter import Adapter

NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def to_junit(
    adapter: Adapter,
    checks: Sequence[Check],
    results: Sequence[Result],
    comparison: Comparison,
    expected: Mapping[str, Expectation],
    least: Severity,
    root: Path,
) -> str:
    """Write a test suite with a case per check, in which exactly what makes the exit code 1 or 3 is a failure or an error.

    Expected failures, those below the severity `least` and checks that did not run are skipped, each with its reason. Where
    nothing was checked, a case of its own is an error.
    """
    red = {each.id: each for each in comparison.unexpected if reaches(each.severity, least)}
    mild = {each.id: each for each in comparison.unexpected if each.id not in red}
    misfits = {each.id for each in comparison.misfits}
    known, stale = ({each.id for each in group} for group in (comparison.known, comparison.stale))
    suite = ElementTree.Element("testsuite", name=_text(f"rlcanary.{adapter.name}"))
    for check, result in zip(checks, results, strict=True):
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=_text(f"{adapter.name}.{check.area}"),
            name=check.id,
            time=f"{result.seconds:.3f}",
        )
        if result.status in ("fail", "error") and (place := location_of(result, check, adapter, root)):
            case.set("file", _text(place.path))
            case.set("line", str(place.line))
        if check.id in red:
            _add_failure(case, check, red[check.id])
        elif check.id in stale:
            ElementTree.SubElement(case, "failure", type="stale", message=STALE)
        elif check.id in misfits:
            ElementTree.SubElement(
                case, "error", type=result.status, message=_text(f"adapter error: {_first_line(result)}")
            )
        elif check.id in mild:
            _skip(case, f"{mild[check.id].severity}, below the severity {least}: {_first_line(mild[check.id])}")
        elif check.id in known:
            _skip(case, f"expected to fail: {expected[check.id].reason}")
        elif result.status != "pass":
            _skip(case, f"{result.status.replace('-', ' ')}: {_first_line(result)}")
    if comparison.nothing:
        case = ElementTree.SubElement(suite, "testcase", classname=_text(adapter.name), name="anything", time="0")
        ElementTree.SubElement(case, "error", message=_text(f"nothing was checked: {comparison.nothing}"))
    for tag, name in (("testcase", "tests"), ("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(name, str(len(list(suite.iter(tag)))))
    suite.set("time", f"{sum(result.seconds for result in results):.3f}")
    suites = ElementTree.Element("testsuites")
    suites.append(suite)
    ElementTree.indent(suites)
    return ElementTree.tostring(suites, encoding="unicode", xml_declaration=False) + "\n"


def _add_failure(case: ElementTree.Element, check: Check, result: Result) -> None:
    kind = "error" if result.status == "error" else "failure"
    element = ElementTree.SubElement(case, kind, type=result.severity or kind, message=_text(_first_line(result)))
    effect = EFFECTS[result.severity] if result.severity else ""
    element.text = _text("\n\n".join(filter(None, [result.message, effect, check.explanation, result.snippet])))


def _skip(case: ElementTree.Element, reason: str) -> None:
    ElementTree.SubElement(case, "skipped", message=_text(reason))


def _first_line(result: Result) -> str:
    return result.message.partition("\n")[0]


def _text(text: str) -> str:
    """Replace the characters that XML cannot hold."""
    return NOT_IN_XML.sub("\N{REPLACEMENT CHARACTER}", text)
