"""Releases of the package index under the checks: their own functions run, and what is found is exactly what is known."""

import json
import math
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
import yaml
from command_line import rlcanary
from programs import run_without_rlcanary
from readme_commands import play

from rlcanary.adapters import load_adapter
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.findings.expected import ADAPTER_ERROR, read_expected
from rlcanary.checks.programs.standalone import standalone
from rlcanary.scaffold.templates import ADAPTERS, framework_adapter

EXPECTED = Path(__file__).parents[1] / "expected"


@cache
def set_up(framework: str, root: Path) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run `rlcanary init` in a repository that depends on the framework -> the repository, and what the command said.

    It runs every check of the framework. All tests share the one run.
    """
    repository = root / framework
    repository.mkdir()
    (repository / "pyproject.toml").write_text(
        f'[project]\nname = "mine"\nversion = "1"\ndependencies = ["{framework}"]\n'
    )
    # In a process of its own: a framework's native code that ends it is then a failure here, not a dead worker of xdist.
    command = [sys.executable, "-m", "rlcanary", "init", "--only", "advantage"]
    done = subprocess.run(command, cwd=repository, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return repository, done


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("repositories")


@pytest.mark.parametrize(("framework", "at_least"), [("trl", 220), ("verl", 240), ("skyrl", 135)])
def test_framework_fails_exactly_where_it_is_known_to(framework: str, at_least: int, root: Path) -> None:
    pytest.importorskip(framework)
    repository, done = set_up(framework, root)
    found = read_expected(repository / "tests/canary_expected.txt", is_draft=True)
    known = read_expected(EXPECTED / f"{framework}.txt")
    beyond = {
        (name, str(each))
        for name, entry in found.items()
        for each in entry.findings
        if not any(one.covers(each) for one in known.get(name, entry).findings)
    }
    assert (found.keys() ^ known.keys(), beyond) == (set(), set())
    assert ADAPTER_ERROR not in [each for entry in found.values() for each in entry.findings]
    failed, ran = map(int, re.findall(r"(\d+) of (\d+) checks that ran fail today", done.stdout)[0])
    assert ran - failed >= at_least
    assert done.stderr == ""


def test_torchrl_fails_exactly_where_it_is_known_to(tmp_path: Path) -> None:
    pytest.importorskip("torchrl")
    known = f"--expected={EXPECTED / 'torchrl'}.txt"
    command = [sys.executable, "-m", "rlcanary", "check", "torchrl", "--json=out.json", known]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = [item["status"] for item in json.loads((tmp_path / "out.json").read_text())["checks"]]
    assert statuses.count("pass") >= 135
    assert "adapter-error" not in statuses
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("framework", "check_id"),
    [
        ("trl", "entropy.filtered_logits"),
        ("verl", "entropy.filtered_logits"),
        ("torchrl", "advantage.constant_reward_is_zero"),
    ],
)
def test_program_of_a_finding_can_do_with_the_framework_and_without_rlcanary(framework: str, check_id: str) -> None:
    pytest.importorskip(framework)
    adapter = load_adapter(framework)
    (check,) = [each for each in all_checks() if each.id == check_id]
    alone = standalone(run_check(check, adapter, framework).snippet, adapter, framework)
    assert framework in alone.partition("\n")[0]
    with pytest.raises(AssertionError):
        run_without_rlcanary(alone)


INVERTED = """
from rlcanary.adapters.verl.adapter import VerlAdapter

class Inverted(VerlAdapter):
    name = "inverted"

    def importance_weights(self, trainer_logprobs, sampler_logprobs, mask):
        return super().importance_weights(sampler_logprobs, trainer_logprobs, mask)
"""


def test_inverted_importance_weights_are_red_with_verls_list(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    (tmp_path / "mine.py").write_text(INVERTED)
    command = [sys.executable, "-m", "rlcanary", "check", "mine.py", "--only=importance."]
    known = f"--expected={EXPECTED / 'verl'}.txt"
    done = subprocess.run([*command, known], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert "not among the" in done.stdout


def test_advantages_are_those_of_trls_trainer() -> None:
    pytest.importorskip("trl")
    got = load_adapter("trl").advantages(torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.long))
    torch.testing.assert_close(got, torch.tensor([1.4997, -0.4999, -0.4999, -0.4999]), atol=1e-4, rtol=0)


def test_settings_reach_trls_trainer() -> None:
    pytest.importorskip("trl")
    adapter = load_adapter("trl").configured(advantage_scale="none", kl_coef=0.5, aggregation="sequence_mean")
    assert adapter.conventions.advantage_scale == "none"
    assert adapter.conventions.kl_coef == 0.5
    got = adapter.advantages(torch.tensor([1.0, 0.0]), torch.zeros(2, dtype=torch.long))
    torch.testing.assert_close(got, torch.tensor([0.5, -0.5]))


def test_the_correction_of_vllms_logprobs_is_trls_own() -> None:
    pytest.importorskip("trl")
    settings = {"importance_level": "token", "importance_mode": "truncate", "importance_high": 1.5}
    adapter = load_adapter("trl").configured(**settings)
    assert {name: getattr(adapter.conventions, name) for name in settings} == settings
    trainer_logprobs, sampler_logprobs = torch.tensor([[-1.0, -1.0, -1.0]]), torch.tensor([[-2.0, -0.9, -9.0]])
    got = adapter.importance_weights(trainer_logprobs, sampler_logprobs, torch.tensor([[True, True, False]]))
    # What stands outside the mask has no meaning.
    torch.testing.assert_close(got[:, :2], torch.tensor([[1.5, math.exp(-0.1)]]))


@pytest.mark.parametrize("framework", ["trl", "verl", "skyrl"])
def test_one_command_gives_a_green_ci_with_what_fails_today(framework: str, root: Path) -> None:
    pytest.importorskip(framework)
    repository, _ = set_up(framework, root)
    workflow = yaml.safe_load((repository / ".github/workflows/rlcanary.yml").read_text())
    *_, install, check = [step["run"] for step in workflow["jobs"]["check"]["steps"] if "run" in step]
    assert shlex.split(install)[:3] == ["pip", "install", framework]  # a project without a build system
    command = shlex.split(check.replace("$GITHUB_STEP_SUMMARY", "summary.md"))
    assert rlcanary(*command[1:], cwd=repository).returncode == 0
    assert (repository / "summary.md").read_text().startswith("## ✅")
    (hook,) = yaml.safe_load((repository / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert rlcanary(*shlex.split(hook["entry"])[1:], cwd=repository).returncode == 0
    assert "advantage.constant_reward_is_zero  # " in (repository / "tests/canary_expected.txt").read_text()
    # The list is honest: without it the same run is red.
    assert rlcanary("check", "tests/canary.py", "--only", "advantage", cwd=repository).returncode == 1


@pytest.mark.parametrize("framework", ["trl", "verl", "skyrl", "torchrl"])
def test_settings_in_the_comments_reach_the_framework(
    framework: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(framework)
    text = framework_adapter(framework, "mine")
    for line in ADAPTERS[framework].settings:
        assert f"# {line}" in text
        text = text.replace(f"# {line}", line)
    (tmp_path / "with_settings.py").write_text(text)
    monkeypatch.setattr(sys, "path", list(sys.path))
    adapter = load_adapter(str(tmp_path / "with_settings.py"))
    changed, declared = adapter.conventions, load_adapter(framework).conventions
    assert (changed.clip_high, changed.aggregation) != (declared.clip_high, declared.aggregation)
    again = adapter.configured(epochs_per_rollout=2).conventions
    assert (again.clip_high, again.aggregation) == (changed.clip_high, changed.aggregation)


def test_checks_of_a_custom_reward_in_trl_see_an_answer_that_is_searched(tmp_path: Path) -> None:
    pytest.importorskip("trl")
    right = "return bool(given) and number(given[-1]) is not None and number(given[-1]) == number(answer)"
    edit = ("rewards.py", right, "return bool(given) and answer in given[-1]")
    checked, trained, broken = play("trl_custom_reward", tmp_path / "example", edit)
    assert "FAIL" not in checked
    assert "trained 2 steps" in trained
    assert "verifying.wrong_answer" in broken


def test_checks_of_a_custom_loss_in_verl_see_a_mean_over_its_own_tokens(tmp_path: Path) -> None:
    pytest.importorskip("verl")
    right = "return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}"
    edit = ("loss.py", right, "return (losses * response_mask).sum() / response_mask.sum(), {}")
    checked, broken = play("verl_custom_loss", tmp_path / "example", edit)
    assert "failed as expected" in checked
    assert "FAIL split.micro_batches" in broken
