"""The functional tests, typed as a reader would."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from waiting import HANG_S

ROOT = Path(__file__).parents[2]


def typed(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """From the root, with this environment's commands first on the PATH."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", script, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=HANG_S
    )


@pytest.mark.parametrize(("name", "checks"), [("grpo", 5), ("sft", 4), ("eval", 4)])
def test_script_passes_and_prints_its_metric_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, checks: int
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    finished = typed(f"tests/functional/{name}.sh")
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "Metric Checks" in finished.stdout
    assert finished.stdout.count("PASS") == checks
    assert list(tmp_path.glob("rlcanary-run-*")) == []


def test_nightly_judges_what_the_trainer_logs(tmp_path: Path) -> None:
    """Two steps teach nothing, and every check has its numbers."""
    nightly = "tests/test_suites/llm/grpo-sums-1n0g-transformers.sh"
    steps = "s/^MAX_STEPS=.*/MAX_STEPS=2/\ns/^STEPS_PER_RUN=.*/STEPS_PER_RUN=2/"
    launched = subprocess.run(
        [sys.executable, "-m", "rlcanary", "launch", nightly],
        cwd=ROOT,
        env=os.environ
        | {"EXECUTOR": "local", "SED_CLAUSES": steps, "LAUNCH_DIR": str(tmp_path)}
        | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert launched.returncode == 1, launched.stdout + launched.stderr
    (output,) = tmp_path.glob("grpo-*/run1/output.log")
    assert "there is no" not in output.read_text()
    statuses = re.findall(r"^│ (PASS|FAIL) ", output.read_text(), re.MULTILINE)
    # The last check limits the seconds per step, which are those of this machine.
    assert statuses[:3] == ["PASS", "FAIL", "PASS"]
    assert len(statuses) == 4


def test_training_that_learns_nothing_fails() -> None:
    finished = typed("tests/functional/grpo.sh", "--set", "run.steps=10", "--set", "optimizer.learning_rate=1.0e-9")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "FAIL" in finished.stdout


@pytest.mark.nightly
@pytest.mark.vllm
def test_vllm_samples_what_the_trainer_scores() -> None:
    finished = typed("tests/functional/grpo_vllm.sh")
    assert finished.returncode == 0, finished.stdout + finished.stderr
