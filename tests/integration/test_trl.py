"""The TRL release of the package index under the checks: its own functions run, and what they find is true."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl")

# Each was confirmed by hand on TRL's own functions; see docs/findings.md.
TRUE_FINDINGS = {
    "advantage.constant_reward_is_zero",
    "entropy.filtered_logits",
    "loss.masked_positions",
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("trl")
    command = [sys.executable, "-m", "rlcanary", "check", "trl", "--json", "out.json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    checks = json.loads(Path(folder, "out.json").read_text())["checks"]
    return {item["id"]: item["status"] for item in checks}


def test_trl_fails_exactly_where_it_is_known_to(report: dict[str, str]) -> None:
    assert {check for check, status in report.items() if status in ("fail", "error")} == TRUE_FINDINGS


def test_most_checks_run_on_trl(report: dict[str, str]) -> None:
    assert sum(status == "pass" for status in report.values()) >= 25


def test_advantages_are_those_of_the_trainer() -> None:
    from rlcanary.adapters import load_adapter

    got = load_adapter("trl").advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(got, torch.tensor([1.4997, -0.4999, -0.4999, -0.4999]), atol=1e-4, rtol=0)


def test_settings_reach_the_trainer() -> None:
    from rlcanary.adapters import load_adapter

    adapter = load_adapter("trl").configured(advantage_scale="none", kl_coef=0.5, aggregation="sequence_mean")
    assert adapter.conventions.advantage_scale == "none"
    assert adapter.conventions.kl_coef == 0.5
    got = adapter.advantages(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long))
    torch.testing.assert_close(got, torch.tensor([0.5, -0.5]))
