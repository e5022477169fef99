"""Every output of `rlcanary check` says the verdict that the exit code says."""

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from command_line import rlcanary

from rlcanary.checks import tally

ADAPTER = """
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import LossOutput

def baseline(rewards):
    return rewards.mean()

class Right(ReferenceAdapter):
    name = "mine"

class Wrong(ReferenceAdapter):
    name = "mine"

    def completion_mask(self, ids, eos_ids, pad_id):
        return ~super().completion_mask(ids, eos_ids, pad_id)

class Silent(ReferenceAdapter):
    name = "mine"

    def policy_loss(self, batch):
        return LossOutput(super().policy_loss(batch).loss, {})

class Misfit(ReferenceAdapter):
    name = "mine"

    def advantages(self, rewards, group_ids):
        return baseline(rewards, ddof=1)

class Hardening(ReferenceAdapter):
    name = "mine"

    def policy_loss(self, batch):
        output = super().policy_loss(batch)
        batch.advantages += 1
        return output
"""
KNOWN = "mask.pad_id_zero  # was broken\n    value off by 1\n"
FILES = ("--json=out.json", "--junit=out.xml", "--sarif=out.sarif", "--markdown=out.md", "--html=out.html", "--github")
RUNS = {
    "passed": ("Right", "mask.pad_id_zero", "", 0, "✅"),
    "failed": ("Wrong", "mask.pad_id_zero", "", 1, "❌"),
    "expected": ("Wrong", "mask.pad_id_zero", KNOWN, 0, "✅"),
    "stale": ("Right", "mask.pad_id_zero", KNOWN, 1, "❌"),
    "below --fail-on": ("Hardening", "loss.inputs_untouched", "", 0, "✅"),
    "not compared": ("Silent", "loss.metrics", "", 2, "⚠️"),
    "adapter error": ("Misfit", "advantage.shift,mask.pad_id_zero", "", 3, "⚠️"),
}


@pytest.mark.parametrize("run", RUNS)
def test_all_outputs_agree_with_the_exit_code(run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A bundled adapter, whose own errors are no failures of the framework.
    monkeypatch.setattr(tally, "ADAPTERS", tmp_path.parent)
    adapter, only, known, code, mark = RUNS[run]
    (tmp_path / "mine.py").write_text(ADAPTER)
    (tmp_path / "known.txt").write_text(known)
    arguments = (f"mine.py:{adapter}", f"--only={only}", "--expected=known.txt", "--fail-on=update")
    done = rlcanary("check", *arguments, *FILES, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert (tmp_path / "out.md").read_text().startswith(f"## {mark} Conformance of mine\n")
    assert ("::error " in done.stdout) == (code > 0)
    suite = ElementTree.parse(tmp_path / "out.xml").getroot()
    assert any(each.tag in ("failure", "error") for each in suite.iter()) == (code > 0)
    (sarif,) = json.loads((tmp_path / "out.sarif").read_text())["runs"]
    (invocation,) = sarif["invocations"]
    assert invocation["exitCode"] == code
    assert invocation["executionSuccessful"] == (code < 2) == (not invocation["toolExecutionNotifications"])
    assert any(each["level"] == "error" and "suppressions" not in each for each in sarif["results"]) == (code == 1)
    assert json.loads((tmp_path / "out.json").read_text())["exit_code"] == code
    assert f"(exit code {code})" in (tmp_path / "out.html").read_text()
