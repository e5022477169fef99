"""The functional tests, typed as a reader would."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def typed(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """From the root, with this environment's commands first on the PATH."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", script, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280
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


def test_training_that_learns_nothing_fails() -> None:
    finished = typed("tests/functional/grpo.sh", "--set", "run.steps=10", "--set", "optimizer.learning_rate=1.0e-9")
    assert finished.returncode == 1, finished.stdout + finished.stderr
    assert "FAIL" in finished.stdout


@pytest.mark.nightly
@pytest.mark.vllm
def test_vllm_samples_what_the_trainer_scores() -> None:
    finished = typed("tests/functional/grpo_vllm.sh")
    assert finished.returncode == 0, finished.stdout + finished.stderr
