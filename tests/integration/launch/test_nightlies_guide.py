"""The commands of docs/nightlies.md, typed in their order on a real Slurm."""

import os
import re
import subprocess
from pathlib import Path

import pytest
from bisect_repositories import make_history
from launch_repositories import fake_programs, script
from waiting import HANG_S

ROOT = Path(__file__).parents[3]
GUIDE = (ROOT / "docs" / "nightlies.md").read_text()
BLOCKS = re.findall(r"^```sh\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
CASE = "tests/test_suites/llm/grpo-sums-1n0g-transformers.sh"
CHECKS = """\
echo "{\\"reward\\": {\\"1\\": $(cat reward)}, \\"seconds/sample\\": {\\"1\\": 1}}" > "$JSON_METRICS"
rlcanary check-metrics "$JSON_METRICS" \\
  'mean(data["reward"], last=10) > 0.3' \\
  'median(data["seconds/sample"], last=50) < 5'"""


@pytest.fixture
def reader(slurm: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose nightly was added in the second commit and broken by the fifth of six, and a docker that records."""
    shipped = [*(ROOT / "tools").glob("*.sh"), ROOT / "tools/launch", *(ROOT / "tests").glob("run_*_in_docker.sh")]
    tools = {str(file.relative_to(ROOT)): file.read_text() for file in shipped}

    def files(i: int) -> dict[str, str]:
        nightly = script("printf '<%s>' \"$@\"", check=CHECKS)
        own = {
            "loss": "1\n",
            "reward": "0.2\n" if i >= 5 else "0.5\n",
            "number": f"{i}\n",
            **tools,
            "tests/functional/grpo.sh": "true\n",
            "tests/functional/sft.sh": 'test "$(cat reward)" = 0.5\n',
            "tests/test_suites/nightly.txt": f"{CASE.removeprefix('tests/test_suites/')}\n",
        }
        return own if i == 1 else {**own, CASE: nightly}

    fakes = fake_programs(tmp_path / "bin", {"docker": 'printf "%s\\n" "$@"'})
    monkeypatch.setenv("PATH", f"{fakes}{os.pathsep}{os.environ['PATH']}")
    return make_history(tmp_path / "p", 6, files, executable=list(tools))


def test_every_command_of_the_guide_does_what_the_guide_says(reader: Path) -> None:
    variables: dict[str, str] = {}

    def typed(text: str) -> subprocess.CompletedProcess[str]:
        (block,) = [block for block in BLOCKS if text in block]
        found = re.search(r"^TEST_CASE=(\S+)$", block, re.MULTILINE)
        variables.update({"TEST_CASE": found[1]} if found else {})
        environment = os.environ | variables
        command = ["bash", "-c", block]
        finished = subprocess.run(command, cwd=reader, env=environment, capture_output=True, text=True, timeout=HANG_S)
        left.remove(block)
        return finished

    left = list(BLOCKS)
    launched = typed("DRYRUN=1")
    assert "GPU-hours: 0.00" in launched.stdout
    assert (launched.returncode, "a metric check fails" in launched.stdout) == (1, True), launched.stderr
    asked = typed("rlcanary launches")
    assert (asked.returncode in (1, 75), asked.stdout.count("launches/grpo-sums-")) == (True, 2), asked.stderr
    snapshot = Path(typed("code_snapshot.sh").stdout.strip())
    assert (snapshot / CASE).is_file()
    for text in ("ACCOUNT=team", "SED_CLAUSES", "EXTRA_SCRIPT_ARGS", "--executor slurm"):
        searched = typed(text)
        assert searched.returncode == 0, searched.stdout + searched.stderr
        assert "Subject: change 5 [wip]" in searched.stdout
    printed = [file.read_text() for file in reader.glob(".git/rlcanary/bisect/*/launches/*/run1/output.log")]
    assert any("<--set><data.datasets=[{name: arithmetic, largest: 5}]>" in text for text in printed)
    docker = typed("run_functional_in_docker.sh")
    assert docker.stdout.splitlines()[-3:] == ["my/image:tag", "bash", "tests/functional/grpo.sh"]
    assert left == []
