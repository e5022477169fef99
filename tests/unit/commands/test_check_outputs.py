"""The formats of `rlcanary check` for CI: each is valid, and says what the exit code says, at the user's line."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import jsonschema
import pytest
from command_line import rlcanary

from rlcanary.adapters.load import load_adapter
from rlcanary.bugs.causes import causes_of
from rlcanary.checks import Result, all_checks
from rlcanary.checks.findings.annotations import to_annotations
from rlcanary.checks.findings.expected import Comparison
from rlcanary.checks.findings.junit import to_junit
from rlcanary.checks.findings.locations import Location, location_of, repository_root

SCHEMA = Path(__file__).parents[3] / "docs/check-results.schema.json"
CHECKS = {check.id: check for check in all_checks()}

LOSSES = "def centred(rewards):\n    return rewards - undefined\n"
CANARY = """\
from losses import centred

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import LossOutput


class Canary(ReferenceAdapter):
    name = "mine"

    def advantages(self, rewards, group_ids):
        return centred(rewards)

    def policy_loss(self, batch):
        output = super().policy_loss(batch)
        batch.advantages += 1
        return LossOutput(output.loss / 2, output.metrics)

    def entropy(self, logits):
        return logits.sum(-1)
"""
LINES = {"losses.py": 2, "advantages": 10, "policy_loss": 13}
ONLY = "advantage.shift,loss.declared_value,loss.inputs_untouched,mask.pad_id_zero,entropy,step.dropout_is_on"


class Outputs:
    """The exit code, standard output and the files of one run."""

    def __init__(self, folder: Path) -> None:
        (folder / "tests").mkdir()
        (folder / "tests/losses.py").write_text(LOSSES)
        (folder / "tests/canary.py").write_text(CANARY)
        (folder / "known.txt").write_text("")
        check = ("check", "tests/canary.py", "--only", ONLY)
        rlcanary("check", "tests/canary.py", "--only", "entropy", "--update-expected", "known.txt", cwd=folder)
        stale = "mask.pad_id_zero  # mended in May\n    value off by 1\n"
        (folder / "known.txt").write_text((folder / "known.txt").read_text().replace("say why", "on purpose") + stale)
        files = ("--json", "out.json", "--junit", "out.xml", "--sarif", "out.sarif", "--github")
        # The search for causes may take long, and nothing here depends on what it finds.
        with mock.patch("rlcanary.bugs.causes.causes_of", partial(causes_of, seconds=0.5)):
            done = rlcanary(*check, "--expected", "known.txt", "--fail-on", "update", *files, cwd=folder)
        assert done.returncode == 1, done.stderr
        self.stdout = done.stdout
        self.document = json.loads((folder / "out.json").read_text())
        self.suite = ElementTree.parse(folder / "out.xml").getroot().find("testsuite")
        self.sarif = json.loads((folder / "out.sarif").read_text())
        self.known = (folder / "known.txt").read_text().splitlines()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Outputs:
    return Outputs(tmp_path_factory.mktemp("outputs"))


def test_json_has_the_published_schema(outputs: Outputs) -> None:
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(outputs.document)
    assert {each["status"] for each in outputs.document["checks"]} == {"pass", "fail", "error", "not-provided"}


def test_junit_counts_what_the_exit_code_counts(outputs: Outputs) -> None:
    suite = outputs.suite
    assert suite is not None
    cases = {case.get("name"): case for case in suite.iter("testcase")}
    assert suite.get("tests") == str(len(cases)) == str(len(outputs.document["checks"]))
    failed = {name: case[0].get("type") for name, case in cases.items() if len(case) and case[0].tag == "failure"}
    assert failed == {"loss.declared_value": "update", "mask.pad_id_zero": "stale"}
    assert cases["advantage.shift"][0].tag == "error"
    counts = [suite.get(name) for name in ("failures", "errors", "skipped")]
    assert counts == [str(len(list(suite.iter(tag)))) for tag in ("failure", "error", "skipped")]
    skipped = {name: case[0].get("message") for name, case in cases.items() if len(case) and case[0].tag == "skipped"}
    assert "hardening" in skipped["loss.inputs_untouched"]
    assert "on purpose" in skipped["entropy.filtered_logits"]
    assert "not provided" in skipped["step.dropout_is_on"]
    place = cases["loss.declared_value"]
    assert (place.get("file"), place.get("line")) == ("tests/canary.py", str(LINES["policy_loss"]))


def test_junit_replaces_what_xml_cannot_hold() -> None:
    result = Result("mask.pad_id_zero", "mask", "fail", "got \x00\x1b[31m\ud800 <&", "", 0.1)
    check, adapter = CHECKS["mask.pad_id_zero"], load_adapter("reference")
    text = to_junit(adapter, [check], [result], Comparison([result], [], []), {}, "hardening", Path.cwd())
    (failure,) = ElementTree.fromstring(text.encode()).iter("failure")
    assert failure.get("message") == "got \ufffd\ufffd[31m\ufffd <&"


def test_sarif_has_what_the_standard_requires(outputs: Outputs) -> None:
    log = outputs.sarif
    assert log["version"] == "2.1.0"
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "rlcanary"
    assert len({rule["id"] for rule in rules}) == len(rules)
    for result in run["results"]:
        assert result["message"]["text"]
        assert rules[result["ruleIndex"]]["id"] == result["ruleId"]
        assert result["level"] in ("error", "warning", "note")
        (location,) = result["locations"]
        physical = location["physicalLocation"]
        assert re.fullmatch(r"tests/\w+\.py|known\.txt", physical["artifactLocation"]["uri"])
        assert physical["region"]["startLine"] >= 1


def test_sarif_has_each_failure_at_the_users_line_and_suppresses_the_expected(outputs: Outputs) -> None:
    def place(result: dict[str, Any]) -> tuple[str, int]:
        physical = result["locations"][0]["physicalLocation"]
        return physical["artifactLocation"]["uri"], physical["region"]["startLine"]

    results = {result["ruleId"]: result for result in outputs.sarif["runs"][0]["results"]}
    # What raised is shown where it raised, what is wrong where the adapter calls it.
    assert place(results["advantage.shift"]) == ("tests/losses.py", LINES["losses.py"])
    assert place(results["loss.declared_value"]) == ("tests/canary.py", LINES["policy_loss"])
    assert results["loss.inputs_untouched"]["level"] == "note"
    suppressed = {name for name, result in results.items() if "suppressions" in result}
    assert suppressed == {name for name in results if name.startswith("entropy.")} != set()
    assert results["entropy.filtered_logits"]["suppressions"] == [{"kind": "external", "justification": "on purpose"}]


def test_annotations_are_grouped_and_stand_at_the_users_lines(outputs: Outputs) -> None:
    lines = [line for line in outputs.stdout.splitlines() if line.startswith("::")]
    parsed = [re.fullmatch(r"::(error|warning) file=([^,:]+),line=(\d+),title=([^,:]+)::(.+)", line) for line in lines]
    assert all(parsed), lines
    found = {(match[1], match[2], int(match[3])) for match in parsed if match}
    stale = outputs.known.index("mask.pad_id_zero  # mended in May") + 1
    assert {
        ("error", "tests/losses.py", LINES["losses.py"]),
        ("error", "tests/canary.py", LINES["policy_loss"]),
        ("error", "known.txt", stale),
    } <= found
    assert not any("entropy" in line for line in lines)


def test_annotation_escapes_what_github_reads(tmp_path: Path) -> None:
    result = Result("mask.pad_id_zero", "mask", "fail", "100 %, 1\r\n2: ::error::", "", 0.1)
    comparison = Comparison([result], [], [])
    adapter, checks = load_adapter("reference"), [CHECKS["mask.pad_id_zero"]]
    (line,) = to_annotations(adapter, checks, [result], comparison, [], "hardening", tmp_path)
    assert line == "::error title=mask.pad_id_zero::100 %25, 1%0D%0A2: ::error::"


def test_inherited_capability_is_shown_at_the_adapters_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_inherits.py").write_text(
        "from rlcanary.adapters.reference import ReferenceAdapter\n\n\nclass Mine(ReferenceAdapter):\n    name = 'mine'\n"
    )
    monkeypatch.chdir(tmp_path)
    result, check = Result("mask.pad_id_zero", "mask", "fail", "", "", 0.1), CHECKS["mask.pad_id_zero"]
    assert location_of(result, check, load_adapter("mine_inherits.py"), tmp_path) == Location("mine_inherits.py", 4)
    assert location_of(result, check, load_adapter("reference"), tmp_path) is None


def test_paths_are_those_of_the_checkout_also_where_it_is_named_by_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checkout/trainer").mkdir(parents=True)
    (tmp_path / "link").symlink_to("checkout")
    monkeypatch.setenv("GITHUB_WORKSPACE", str(tmp_path / "link"))
    monkeypatch.chdir(tmp_path / "link/trainer")
    assert repository_root() == (tmp_path / "checkout").resolve()
