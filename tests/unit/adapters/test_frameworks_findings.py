"""The page of findings in frameworks, and what it is written from. The frameworks themselves are not installed here."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rlcanary.checks import all_checks
from rlcanary.checks.findings.expected import read_expected

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "tools/frameworks"


@pytest.fixture(scope="module")
def findings():
    spec = importlib.util.spec_from_file_location("frameworks_findings", FOLDER / "findings.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def failure(check_id, severity="update", message="3 is not 4\n  got: 3", snippet="assert 3 == 4"):
    return {"id": check_id, "severity": severity, "message": message, "snippet": snippet}


def result(*failures):
    return {"name": "Frame", "versions": {"frame": "1.2"}, "checks": 9, "ran": 7, "failures": list(failures)}


def test_the_page_is_what_the_kept_results_and_the_reasons_say(findings):
    assert findings.page(findings.collected()) == findings.PAGE.read_text(), "run tools/frameworks/findings.py write"


def test_a_failure_that_nobody_traced_to_a_line_is_refused(findings):
    with pytest.raises(ValueError, match=r"kl\.declared_estimator of Frame is traced to no line"):
        findings.findings(result(failure("kl.declared_estimator")), {"kl.declared_estimator": "say why"})


def test_writing_the_page_then_ends_with_one_line_and_exit_code_2(findings, monkeypatch, capsys):
    kept = (result(failure("kl.declared_estimator")), {})
    monkeypatch.setattr(findings, "collected", lambda: [kept])
    with pytest.raises(SystemExit) as ended:
        findings.main("write")
    assert ended.value.code == 2
    told = "findings.py: kl.declared_estimator of Frame is traced to no line: give its reason in the expected file\n"
    assert capsys.readouterr().err == told


def test_signs_of_one_finding_count_once_and_what_is_on_purpose_does_not_count(findings):
    traced = {
        "loss.nothing_trained": "0 / 0 (loss.py:3)",
        "config.aggregation_options": "as in loss.nothing_trained",
        "split.micro_batches": "a mean of means, as in loss.nothing_trained",
        "step.training_mode": "on purpose: dropout stays on",
    }
    found, purposes = findings.findings(result(*map(failure, traced)), traced)
    assert [each.others for each in found] == [tuple(traced)[:3]]
    assert [each.others for each in purposes] == [("step.training_mode",)]


def test_the_page_counts_findings_and_shows_the_program_of_a_wrong_update(findings):
    traced = {"loss.nothing_trained": "0 / 0 (loss.py:3)", "metrics.recomputed": "the next rate (log.py:7)"}
    made = result(failure("loss.nothing_trained"), failure("metrics.recomputed", "dashboard", snippet="assert rate"))
    page = findings.page([(made, traced)])
    assert "2 causes in 1 frameworks" in page
    assert "| [Frame](#frame) | 1.2 | 7 of 9 | 2 | 1 |" in page
    assert "assert 3 == 4" in page
    assert "assert rate" not in page


def test_a_check_that_is_listed_without_its_findings_has_an_empty_counterexample(findings):
    made = result(failure("loss.nothing_trained", message="", snippet=""))
    page = findings.page([(made, {"loss.nothing_trained": "0 / 0 (loss.py:3)"})])
    assert "| `loss.nothing_trained` |  | 0 / 0 (loss.py:3) | a wrong update |" in page


def test_folders_of_a_machine_are_left_out_of_what_is_kept(findings):
    message = "raised (f, line 3 of /home/me/slime/slime/loss.py)"
    snippet = "load_adapter('/home/me/rl/tools/frameworks/adapters/x_adapter.py')"
    check = {**failure("loss.nothing_trained", message=message, snippet=snippet), "status": "fail"}
    kept = findings.condensed({"versions": {"rlcanary": "1", "torch": "2"}, "checks": [check]}, "Frame")
    assert kept["failures"][0]["message"] == "raised (f, line 3 of loss.py)"
    assert kept["failures"][0]["snippet"] == "load_adapter('tools/frameworks/adapters/x_adapter.py')"
    assert (kept["ran"], kept["versions"]) == (1, {"torch": "2"})


@pytest.mark.parametrize("path", sorted((FOLDER / "expected").glob("*.txt")), ids=lambda path: path.stem)
def test_every_expected_failure_is_of_a_known_check_and_names_its_line(path):
    for check_id, expectation in read_expected(path).items():
        told = expectation.reason
        assert re.search(r"\.py:\d+|^as in |^on purpose: ", told), f"{check_id}: {told}"


@pytest.mark.parametrize("path", sorted((FOLDER / "results").glob("*.json")), ids=lambda path: path.stem)
def test_kept_failures_are_of_known_checks_and_hold_no_path_of_a_machine(path):
    kept = json.loads(path.read_text())
    assert {each["id"] for each in kept["failures"]} <= {check.id for check in all_checks()}
    assert not re.search(r"/(home|tmp|work|root)/", path.read_text())


def test_the_nightly_script_reaches_every_framework_of_the_page(findings):
    text = (FOLDER / "run").read_text()
    listed = re.search(r"set -- (.*)", text)[1].split()
    assert set(listed) == set(findings.TITLES)
    assert subprocess.run(["bash", "-n", FOLDER / "run"], check=False).returncode == 0


def test_an_unknown_framework_is_one_line_and_exit_code_2(tmp_path):
    command = ["bash", str(FOLDER / "run"), "no-such-framework"]
    environment = {"FRAMEWORKS": str(tmp_path), "PATH": "/bin:/usr/bin"}
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (run.returncode, run.stderr) == (2, "there is no framework no-such-framework\n")


def test_results_that_cannot_be_kept_end_the_script_with_1(tmp_path):
    """A stand-in of Python runs the checks, and fails where their results are kept."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *collect*) exit 1 ;; esac\n')
    python.chmod(0o755)
    environment = {"FRAMEWORKS": str(tmp_path), "PATH": "/bin:/usr/bin", "PYTHON": str(python)}
    run = subprocess.run(["bash", str(FOLDER / "run"), "trl"], capture_output=True, check=False, env=environment)
    assert run.returncode == 1
