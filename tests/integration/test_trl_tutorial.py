"""The page that leads from a TRL run to the commit does so."""

import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from bisect_repositories import DRIVER, found, make_history
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


def test_the_page_leads_from_the_run_to_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    titled = blocks()
    wrong_line = titled.pop("the last line of loss.py")
    right_line = titled["loss.py"].splitlines(keepends=True)[-1]
    wrong = titled["loss.py"].replace(right_line, wrong_line)

    def files(number: int) -> dict[str, str]:
        return {**titled, "loss.py": wrong if number >= 2 else titled["loss.py"], "n": f"{number}\n"}

    repository = make_history(tmp_path / "repository", 3, files)
    train, _, bisect = commands()

    monkeypatch.chdir(repository)
    monkeypatch.syspath_prepend(repository)
    with pytest.warns(UserWarning, match="rlcanary: gradient.*that of aggregation='sequence_mean'"):
        runpy.run_path(train.removeprefix("python "))
    monkeypatch.delitem(sys.modules, "loss")

    assert bisect.startswith("GOOD=v1 BAD=HEAD tools/bisect-run.sh rlcanary replay ")
    command = bisect.replace("GOOD=v1", "GOOD=c1").replace("tools/bisect-run.sh", shlex.quote(str(DRIVER)))
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=HANG_S)
    assert found(done) == "change 2 [wip]"
