"""`rlcanary train` as a person types it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples/arithmetic.yaml"
COMMAND = [sys.executable, "-m", "rlcanary", "train", str(EXAMPLE), "--set", "schedule.prompts_per_step=4"]


def rlcanary_train(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, capture_output=True, text=True, env=environment)


def test_a_run_shows_where_it_is_and_its_log_is_read_by_dump_logs(tmp_path: Path) -> None:
    done = rlcanary_train("--set", "run.steps=2", "--set", "run.tensorboard=true", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "step 2/2  reward 0." in done.stderr
    assert "Step 2 of runs/arithmetic" in done.stdout
    assert "8 groups of 32: 8 used" in done.stdout
    dumped = subprocess.run(
        [sys.executable, "-m", "rlcanary", "dump-logs", "runs/arithmetic", "out.json", "--error-on-conflicts"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert dumped.returncode == 0, dumped.stdout + dumped.stderr
    reward = json.loads((tmp_path / "out.json").read_text())["reward"]
    assert list(reward) == ["0", "1"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--set", "data.datasets=[{name: gsm9k}]"], "data.datasets[0]: unknown"),
        (["--set", "model={path: no/such/model}"], "model: path is no/such/model"),
        (["--set", "roles.verifier.options={exakt: {}}"], "no verifier exakt"),
        (["--resume"], "no checkpoint to resume from"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    done = rlcanary_train(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_a_chat_template_is_refused_where_one_is_needed(tmp_path: Path) -> None:
    from rlcanary.tiny_models import tiny_qwen2, tiny_tokenizer

    tiny_qwen2().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    done = rlcanary_train("--set", "model={path: model}", "--check", cwd=tmp_path)
    assert done.returncode == 2
    assert "has no chat template" in done.stderr
    done = rlcanary_train("--set", "model={path: model}", "--set", "data.chat_template=false", "--check", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "runs").exists()
