"""The code under test is foreign: whatever it does to its process, `rlcanary check` ends with a verdict of its own."""

from pathlib import Path
from unittest import mock

import pytest
from command_line import rlcanary

from rlcanary import cli

ADAPTER = """
import sys
from rlcanary import Adapter

class Mine(Adapter):
    name = "mine"

    def __init__(self):
        {created}

    def advantages(self, rewards, group_ids):
        {called}
        return rewards

    def configurations(self):
        {listed}

{imported}
"""


def adapter(folder: Path, **statements: str) -> str:
    """Write an adapter that runs a statement in one of its places, and return its name on the command line."""
    places = dict.fromkeys(("created", "called", "listed", "imported"), "pass") | statements
    (folder / "mine.py").write_text(ADAPTER.format(**places))
    return "mine.py"


@pytest.mark.parametrize(
    ("place", "options", "told"),
    [
        ("imported", (), "importing 'mine.py' failed: SystemExit: 0"),
        ("created", (), "creating adapter 'mine.py' failed: SystemExit: 0"),
        ("listed", ("--matrix",), "listing the configurations of mine failed: SystemExit: 0"),
    ],
)
def test_adapter_that_exits_is_refused_in_one_line(
    tmp_path: Path, place: str, options: tuple[str, ...], told: str
) -> None:
    done = rlcanary(
        "check", adapter(tmp_path, **{place: "sys.exit(0)"}), *options, "--only=advantage.shift", cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (2, f"rlcanary: {told}\n")


@pytest.mark.parametrize("statement", ["sys.exit(0)", "import asyncio; raise asyncio.CancelledError"])
def test_capability_that_exits_or_is_cancelled_is_an_error_of_its_check(tmp_path: Path, statement: str) -> None:
    done = rlcanary("check", adapter(tmp_path, called=statement), "--only=advantage.shift", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "advantages([4], [4]) raised" in done.stdout
    assert "0 passed, 1 raised an error" in done.stdout


def test_exit_that_nobody_expects_is_an_internal_error(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(cli.cli, "main", side_effect=SystemExit(0)), pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3
    assert "SystemExit" in capsys.readouterr().err
