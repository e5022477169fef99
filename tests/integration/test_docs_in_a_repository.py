"""The commands of the README and of the pages on bisect, selection, the tracker and trends, typed in a team's repository.

Other pages have tests of their own: test_example_folders.py (CI), test_pages.py, test_nightlies_guide.py,
test_case_study.py, test_grpo_command.py and test_live_example.py.
"""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from bisect_repositories import git, make_history
from readme_commands import commands, typed

ROOT = Path(__file__).parents[2]
TOOLS = {f"tools/{file.name}": file.read_text() for file in (ROOT / "tools").glob("*.sh")}
CANARY = """
from rlcanary import Adapter, Conventions, LossOutput, reference


class Canary(Adapter):
    conventions = Conventions(aggregation="token_mean")
    settable = ("kl_coef",)

    def configurations(self):
        return {"default": self, "with KL": self.configured(kl_coef=0.04)}

    def policy_loss(self, batch):
        return LossOutput(reference.policy_loss(batch, self.conventions).loss / 2)
"""
TEST = """
from trainer.loss import policy_loss


def test_kl(tracker):
    loss = policy_loss(1.0)
    tracker.track("{metric}", loss)
    assert loss == 2.0 or {tracks_only}
"""
SETTINGS = """
[pytest]
pythonpath = .
addopts = --import-mode=importlib
rlcanary_directions =
    *.kl = lower
"""
FIRST_BAD = 3


@pytest.fixture(autouse=True)
def without_the_users_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)


def files(number: int) -> dict[str, str]:
    """The team's files in its commit of this number: the loss is halved in the third of four."""
    test = TEST.format(metric="loss", tracks_only=False)
    named = {
        "tests/test_loss.py": test,
        "tests/unit/test_loss.py": test,
        "tests/test_x.py": TEST.format(metric="tokens_per_s", tracks_only=True).replace("test_kl", "test_y"),
        "tests/test_grpo.py": TEST.format(metric="reward", tracks_only=True).replace("test_kl", "test_run"),
        "tests/test_rollout.py": TEST.format(metric="length", tracks_only=True).replace("test_kl", "test_rollout"),
    }
    added_later = {"tests/test_new.py": "def test_new():\n    pass\n"} if number > 1 else {}
    return {
        **TOOLS,
        **named,
        **added_later,
        "pytest.ini": SETTINGS,
        "trainer/__init__.py": "",
        "trainer/loss.py": f"def policy_loss(x):\n    return {1.0 if number >= FIRST_BAD else 2.0} * x\n",
        "canary.py": CANARY,
        "tests/canary.py": CANARY,
        "number": f"{number}\n",
    }


@pytest.fixture
def team(tmp_path: Path) -> Path:
    repository = make_history(tmp_path / "team", 4, files, executable=list(TOOLS))
    git(repository, "tag", "v1.4", "c1")
    git(repository, "tag", "v0.4", "c1")
    return repository


def page(name: str) -> list[tuple[str, int]]:
    """The commands of a page with their exit codes."""
    text = (ROOT / name).read_text().replace("```bash", "```sh")
    return [(command, code) for command, code in commands(text) if command]


BISECTS = [
    command.replace("-- CMD", "-- pytest tests/test_loss.py::test_kl")
    for name in ("README.md", "docs/bisect.md")
    for command, _ in page(name)
    if re.search(r"bisect-run\.sh|rlcanary bisect", command) and "rlcanary check trl" not in command
]


@pytest.mark.parametrize("command", [each for each in BISECTS if each != "rlcanary bisect status"])
def test_a_bisect_of_the_docs_finds_the_commit(team: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    # pytest starts in a third of the time without the plugins of others.
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_rlcanary.tracker")
    done = typed(f"env {command}", team)
    assert done.returncode == 0, done.stdout + done.stderr
    first_bad = git(team, "rev-parse", f"c{FIRST_BAD}")
    if "--dry-run" in command:
        assert "runs" in done.stdout
        return
    assert f"{first_bad} is the first bad commit" in done.stdout
    assert first_bad[:10] in typed("rlcanary bisect status", team).stdout


def test_the_commands_on_selection_name_the_test_and_its_file(team: Path) -> None:
    outputs = {}
    for command, code in page("docs/selection.md"):
        done = typed(f"env {command}", team)
        assert done.returncode in {code, *([1] if command == "pytest --testmon" else [])}, done.stdout + done.stderr
        outputs[command] = done.stdout
    assert "trainer/loss.py" in outputs["rlcanary selection explain test_rollout"]
    for name in ("loss.py", "loss.py policy_loss"):
        assert "tests/test_rollout.py" in outputs[f"rlcanary selection why trainer/{name}"]


def write_results(team: Path) -> None:
    """Write the results of forty days, in the last ten of which the KL is twice as large."""
    metrics = {
        "test_math::test_exponentiate": {"result": 8.0},
        "test_hf_ray_policy::test_lm_policy_generation": {"avg_prob_mult_error": 1.0},
    }
    folder = team / "tests/unit/unit_results"
    folder.mkdir(parents=True)
    for day in range(40):
        moment = f"2026-{9 + day // 28:02}-{1 + day % 28:02}"
        kl = (0.2 if day >= 30 else 0.1) * (1 + 0.01 * (day * 7 % 5))
        run = {
            "schema": 1,
            "exit_status": 0,
            "git_commit": git(team, "rev-parse", f"c{1 + day // 10}"),
            "start_time": f"{moment} 03:00:00",
            "metrics": {**metrics, "test_grpo::test_run": {"kl": kl, "_elapsed": 17.0}},
            "gpu_types": [],
            "coverage": None,
        }
        (folder / f"{moment.replace('-', '')}_030000.json").write_text(json.dumps(run))


@pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")
def test_the_commands_on_the_history_tell_what_became_worse(team: Path) -> None:
    write_results(team)
    outputs = {}
    for name in ("README.md", "docs/tracker.md", "docs/trends.md"):
        for command, _ in page(name):
            if re.match(r"jq |rlcanary (trend|regress|report)", command):
                done = typed(f"env {command}", team)
                assert done.returncode == int(command == "rlcanary regress"), command + done.stdout + done.stderr
                outputs[command] = done.stdout
    assert len(outputs) == 9
    by_jq = next(text for command, text in outputs.items() if "avg_prob_mult_error] | @tsv" in command)
    assert by_jq.splitlines()[0] == f"2026-09-01 03:00:00\t{git(team, 'rev-parse', 'c1')}\t1"
    assert git(team, "rev-parse", "--short=10", "c4") in outputs["rlcanary regress"]
    (acknowledged,) = [text for command, text in outputs.items() if "--acknowledge" in command]
    assert "Nothing is worse" in acknowledged
    assert (team / "tests/unit/unit_results.html").exists()


def test_the_commands_on_the_metrics_of_a_run_judge_it(team: Path) -> None:
    (team / "logs").mkdir()
    lines = [
        {"step": step, "train/loss": 1400.0 + step, "timing/train/total_step_time": 0.5, "train/reward": 0.5}
        for step in range(1, 21)
    ]
    (team / "logs/run.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    for command, code in page("docs/trends.md"):
        if re.match(r"rlcanary (dump-logs|check-metrics)", command):
            done = typed(f"env {command}", team)
            assert done.returncode == code, done.stdout + done.stderr


def test_the_commands_on_checks_are_red_for_a_mistake_until_it_is_expected(team: Path) -> None:
    typed_first = ["rlcanary check canary.py", "pytest --canary=canary.py"]
    assert set(typed_first) <= {command for command, _ in page("README.md")}
    for command in typed_first:
        done = typed(f"env {command}", team)
        assert done.returncode == 1, done.stdout + done.stderr
        assert "loss.declared_value" in done.stdout
    (update,) = [command for command, _ in page("docs/stability.md")]
    configured = next(command for command, _ in page("docs/adapters.md") if "[with KL]" in command)
    for command in (update, configured.replace("--expected", "--update-expected")):
        done = typed(f"env {command}", team)
        assert done.returncode == 0, done.stdout + done.stderr
    expected = team / "tests/canary_with_kl_expected.txt"
    assert typed(f"env {configured}", team).returncode == 2, "a finding without a reason is expected"
    expected.write_text(re.sub(r"^(\w\S+).*", r"\1  # the loss is halved", expected.read_text(), flags=re.MULTILINE))
    assert typed(f"env {configured}", team).returncode == 0
