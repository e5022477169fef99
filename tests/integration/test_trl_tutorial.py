"""The page that leads from a TRL run to the commit does so."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from bisect_repositories import found, make_history
from waiting import HANG_S

PAGE = (Path(__file__).parents[2] / "docs/live-in-trl.md").read_text()

pytestmark = [
    pytest.mark.usefixtures("plain_git"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def blocks() -> dict[str, str]:
    """The blocks of the page by their titles."""
    return dict(re.findall(r'^```python title="(.*?)"\n(.*?)^```$', PAGE, re.DOTALL | re.MULTILINE))


def commands() -> list[str]:
    return re.findall(r"^```sh\n(.*?)\n^```$", PAGE, re.DOTALL | re.MULTILINE)


def typed(command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=HANG_S, check=False)


def test_the_page_leads_from_the_run_to_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titled = blocks()
    wrong_line = titled.pop("the last line of loss.py")
    commit, commit_wrong, train, replay, bisect, write_test = commands()
    repository = make_history(tmp_path / "repository", 1, lambda _: {"README.md": "A team.\n"})
    monkeypatch.chdir(repository)
    monkeypatch.syspath_prepend(repository)

    for name, text in titled.items():
        Path(name).write_text(text)
    assert typed(f"set -e\n{commit}").returncode == 0
    Path("loss.py").write_text("".join(titled["loss.py"].splitlines(keepends=True)[:-1]) + wrong_line)
    assert typed(commit_wrong).returncode == 0

    with pytest.warns(UserWarning, match="rlcanary: gradient.*that of aggregation='sequence_mean'"):
        runpy.run_path(train.removeprefix("python "))
    monkeypatch.delitem(sys.modules, "loss")

    assert typed(replay).returncode == 1
    assert found(typed(bisect)) == "Tidy the loss"
    assert typed(write_test).returncode == 1
    kept = [sys.executable, "-P", "-m", "pytest", "-q", "tests/test_update.py"]
    assert subprocess.run(kept, check=False).returncode == 1
    assert typed("git checkout v1 loss.py").returncode == 0
    assert subprocess.run(kept, check=False).returncode == 0
