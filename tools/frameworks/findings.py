"""Keep what the checks found in frameworks, and write docs/findings.md from it.

`collect NAME RESULTS.json` keeps the failures of a run in `results/NAME.json`. `write` writes the page from these and from
the reasons in the expected files, where each failure was traced to a line; of a framework without results it has what its
expected file says. A reason that begins with `on purpose:` is a choice of the framework, and one that has `as in CHECK` is
another sign of the same finding: neither counts.
"""

from __future__ import annotations

import html
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlcanary.checks import all_checks

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PAGE = ROOT / "docs/findings.md"
TITLES = {
    "trl": "TRL",
    "verl": "verl",
    "torchrl": "torchrl",
    "skyrl": "SkyRL",
    "openrlhf": "OpenRLHF",
    "nemo_rl": "NeMo RL",
    "prime_rl": "prime-rl",
    "slime": "slime",
    "areal": "AReaL",
    "ms_swift": "ms-swift",
    "nano_aha": "nano-aha-moment",
    "open_instruct": "open-instruct",
}
SEVERITIES = {"update": "a wrong update", "dashboard": "a wrong logged number", "hardening": "hardening"}
HEAD = """# Findings in released frameworks

`tools/frameworks/run` writes this page: it runs the checks on the frameworks' own code, and each failure was traced to the
line named here. {total} causes in {frameworks} frameworks, as their expected files tell causes apart; one may turn several
checks red. What a framework does on purpose is listed apart and does not count. How to read a failure is said under
[A check failed](a-check-failed.md).

The severity is that of the check: *a wrong update* changes what is learned, *a wrong logged number* what people see;
*hardening* matters only where something else has gone wrong. Settings are those of the adapter, which are a framework's
defaults where nothing else is said.

| framework | release | checks that ran | causes | of them wrong updates |
|---|---|---|---|---|
"""


class UntracedError(ValueError):
    """A failure whose line nobody wrote down."""


@dataclass(frozen=True)
class Finding:
    """A failure traced to its line, with the other checks that it turns red.

    Attributes:
        failure: the failure of the check that shows it best.
        reason: its cause and line, from the expected file.
        others: ids of the further checks.
    """

    failure: dict[str, Any]
    reason: str
    others: tuple[str, ...]


def condensed(results: dict[str, Any], title: str) -> dict[str, Any]:
    """Keep of a run its versions, how many checks ran, and its failures with their smallest counterexamples."""
    ran = [each for each in results["checks"] if each["status"] in ("pass", "fail", "error")]
    failures = [
        {name: _portable(each[name]) for name in ("id", "severity", "message", "snippet")}
        for each in ran
        if each["status"] != "pass"
    ]
    versions = {name: version for name, version in results["versions"].items() if name != "rlcanary"}
    return {
        "name": title,
        "versions": versions,
        "checks": len(results["checks"]),
        "ran": len(ran),
        "failures": failures,
    }


def _portable(text: str) -> str:
    """Leave folders of the machine out of a text: what is below a framework's package or this repository stays."""
    absolute = r"(?<![\w/.])/[^\s'\"()]*/"
    text = re.sub(absolute + r"(?=tools/frameworks/)", "", text)
    return re.sub(absolute + r"(?=[\w-]+\.py)", "", text)


def reasons(path: Path) -> dict[str, str]:
    """Read the reason of each entry of an expected file."""
    entries = (line.partition("#") for line in path.read_text().splitlines() if line[:1].isalpha())
    return {check_id.strip(): reason.strip() for check_id, _, reason in entries}


def expected_file(name: str) -> Path:
    own = HERE / f"expected/{name}.txt"
    return own if own.exists() else ROOT / f"tests/expected/{name}.txt"


def findings(result: dict[str, Any], traced: dict[str, str]) -> tuple[list[Finding], list[Finding]]:
    """Join failures and reasons -> findings, and what the framework does on purpose.

    Raises:
        UntracedError: a failure has no reason.
    """
    heads: dict[str, list[dict[str, Any]]] = {}
    for failure in result["failures"]:
        reason = traced.get(failure["id"], "say why")
        if reason == "say why":
            raise UntracedError(f"{failure['id']} of {result['name']} is traced to no line")
        # "as in X" and, in older entries, "… as in X": another sign of X.
        other = re.search(r"as in ([a-z_]+\.[a-z_]+)", reason)
        head = traced.get(other[1], reason) if other and other[1] != failure["id"] else reason
        heads.setdefault(head, []).append(failure)
    made = [
        Finding(_gravest(failures, traced, head), head, tuple(each["id"] for each in failures))
        for head, failures in heads.items()
    ]
    purposes = [each for each in made if each.reason.startswith("on purpose:")]
    return [each for each in made if each not in purposes], purposes


def _gravest(failures: list[dict[str, Any]], traced: dict[str, str], head: str) -> dict[str, Any]:
    own = [each for each in failures if traced[each["id"]] == head] or failures
    return min(own, key=lambda each: list(SEVERITIES).index(each["severity"]))


def page(results: Iterable[tuple[dict[str, Any], dict[str, str]]]) -> str:
    """Write the page of all frameworks."""
    rows, sections, total = [], [], 0
    for result, traced in results:
        found, purposes = findings(result, traced)
        total += len(found)
        updates = sum(each.failure["severity"] == "update" for each in found)
        framework, *others = result["versions"].items()
        release = ", ".join([framework[1], *(f"{name} {version}" for name, version in others)])
        ran = f"{result['ran']} of {result['checks']}" if result["checks"] else "[as listed](a-check-failed.md)"
        rows.append(
            f"| [{result['name']}](#{_anchor(result['name'])}) | {release} | {ran} | {len(found)} | {updates} |\n"
        )
        sections.append(_section(result["name"], found, purposes))
    return HEAD.format(total=total, frameworks=len(rows)) + "".join(rows) + "".join(sections)


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-")


def _section(title: str, found: list[Finding], purposes: list[Finding]) -> str:
    lines = [f"\n## {title}\n\n| check | smallest counterexample | cause and line | severity |\n|---|---|---|---|\n"]
    for each in found:
        checks = ", ".join(f"`{check_id}`" for check_id in each.others)
        told = _cell(each.failure["message"].partition("\n")[0])
        lines.append(f"| {checks} | {told} | {_cell(each.reason)} | {SEVERITIES[each.failure['severity']]} |\n")
    if purposes:
        told = "; ".join(
            f"`{each.failure['id']}` ({each.reason.removeprefix('on purpose:').strip()})" for each in purposes
        )
        lines.append(f"\nOn purpose, and not counted: {_cell(told)}.\n")
    for each in found:
        if each.failure["snippet"] and each.failure["severity"] == "update":
            lines.append(_program(each))
    return "".join(lines)


def _program(each: Finding) -> str:
    told = html.escape(each.failure["message"])
    program = html.escape(each.failure["snippet"].strip())
    return (
        f"\n<details><summary><code>{each.failure['id']}</code>: the counterexample and a program</summary>\n"
        f"<pre>{told}</pre>\n<pre>{program}</pre>\n</details>\n"
    )


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


def collected() -> list[tuple[dict[str, Any], dict[str, str]]]:
    """Read the kept results and the reasons of each framework, in the order of `TITLES`."""
    found = []
    for name in TITLES:
        kept = HERE / f"results/{name}.json"
        if kept.exists():
            found.append((json.loads(kept.read_text()), reasons(expected_file(name))))
        elif expected_file(name).exists():
            found.append((written_down(name), reasons(expected_file(name))))
    return found


def written_down(name: str) -> dict[str, Any]:
    """Read of an expected file what the results of its run would say, as far as it does."""
    severity = {check.id: check.severity for check in all_checks()}
    lines = expected_file(name).read_text().splitlines()
    release = next((line.strip("# ").partition(";")[0].split()[-1] for line in lines if line.startswith("#")), "")
    failures: list[dict[str, Any]] = []
    for line in lines:
        if line[:1].isalpha():
            check_id = line.partition("#")[0].strip()
            failures.append({"id": check_id, "severity": severity[check_id], "message": "", "snippet": ""})
        elif line.strip() and line[0].isspace() and not failures[-1]["message"]:
            failures[-1]["message"] = line.strip()
    return {"name": TITLES[name], "versions": {name: release}, "checks": 0, "ran": 0, "failures": failures}


def main(command: str, *arguments: str) -> None:
    if command == "collect":
        name, path, *release = arguments
        results = json.loads(Path(path).read_text())
        if release:  # that of a framework whose adapter is not bundled
            results["versions"] = {name: release[0], **results["versions"]}
        kept = condensed(results, TITLES[name])
        kept["versions"] = {key: kept["versions"][key] for key in sorted(kept["versions"], key=lambda key: key != name)}
        Path(HERE, f"results/{name}.json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n")
    elif command == "write":
        try:
            PAGE.write_text(page(collected()))
        except UntracedError as error:
            print(f"findings.py: {error}: give its reason in the expected file", file=sys.stderr)
            raise SystemExit(2) from None
    else:
        raise SystemExit("findings.py collect NAME RESULTS.json [RELEASE] | findings.py write")


if __name__ == "__main__":
    main(*sys.argv[1:] or [""])
