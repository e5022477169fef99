"""`rlcanary train` as a person types it."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlcanary import cli

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples/arithmetic.yaml"
ARGUMENTS = ["train", str(EXAMPLE), "--set", "schedule.prompts_per_step=4"]


def rlcanary_train(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "rlcanary", *ARGUMENTS, *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, env=environment)


@pytest.fixture
def typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[object, str]]:
    """The command in this process and in an empty folder -> its exit code, and what it wrote to stderr."""

    def run(*arguments: str) -> tuple[object, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["rlcanary", *ARGUMENTS, *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code, capfd.readouterr().err

    return run


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
        (["--set", "lora.targets=[q_prj]"], "no linear layer named 'q_prj', there are down_proj, gate_proj, k_proj"),
        (["--set", "roles.verifier.options={exakt: {}}"], "no verifier exakt"),
        (["--set", "roles.verifier.options={code: {timeout: soon}}"], "the verifier code: timeout is 'soon'"),
        (["--set", "conventions.max_grad_norm=-1"], "max_grad_norm=-1.0 is not positive"),
        (["--set", "conventions.kl_coef=.nan"], "kl_coef=nan is not 0 or more"),
        (["--set", "data.mixing=sequence", "--set", "data.weights={arithmetic: 2.5}"], "data.weights: count 2.5 of"),
        (["--set", "data.weights={arithmetic: much}"], "data.weights.arithmetic is 'much'"),
        (["--set", "data.weights={}"], "data.weights: a weight is needed for each of arithmetic"),
        (["--resume"], "no checkpoint to resume from"),
    ],
)
def test_a_plan_that_cannot_be_run_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, typed: Callable[..., tuple[object, str]], arguments: list[str], said: str
) -> None:
    code, stderr = typed(*arguments)
    assert code == 2
    assert said in stderr
    assert stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_pages_changes_of_the_example_can_be_run(typed: Callable[..., tuple[object, str]]) -> None:
    page = (ROOT / "docs/grpo.md").read_text()
    changes = re.findall(r"^rlcanary train examples/arithmetic.yaml (--set .*)$", page, re.MULTILINE)
    assert changes
    for each in changes:
        assert typed(*shlex.split(each), "--check")[0] == 0, each


@pytest.mark.parametrize("further", [[], ["--check"]], ids=["", "--check"])
def test_a_gpu_that_is_not_there_is_refused_in_one_line_and_leaves_nothing(
    tmp_path: Path, typed: Callable[..., tuple[object, str]], monkeypatch: pytest.MonkeyPatch, further: list[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    code, stderr = typed("--set", "run.device=cuda", *further)
    assert code == 2
    assert "torch sees no GPU" in stderr
    assert stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_without_a_chat_template_is_refused_where_one_is_needed(
    tmp_path: Path, typed: Callable[..., tuple[object, str]]
) -> None:
    from rlcanary.tiny_models import tiny_qwen2, tiny_tokenizer

    tiny_qwen2().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    # The witness for all refusals: whatever a new process imports and loads on the way, one line is all that it says.
    done = rlcanary_train("--set", "model={path: model}", "--check", cwd=tmp_path)
    assert done.returncode == 2
    assert "has no chat template" in done.stderr
    assert done.stderr.count("\n") == 1
    code, stderr = typed("--set", "model={path: model}", "--set", "data.chat_template=false", "--check")
    assert code == 0, stderr
    assert not (tmp_path / "runs").exists()
