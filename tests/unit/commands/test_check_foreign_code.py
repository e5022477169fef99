"""The code under test is foreign: whatever it does to its process, `rlcanary check` ends with a verdict of its own."""

import re
import subprocess
import sys
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
    assert done.returncode == 2
    assert re.fullmatch(rf"rlcanary: {re.escape(told)} \(line \d+ of {tmp_path}/mine.py\)\n", done.stderr)


@pytest.mark.parametrize("statement", ["sys.exit(0)", "import asyncio; raise asyncio.CancelledError"])
def test_capability_that_exits_or_is_cancelled_is_an_error_of_its_check(tmp_path: Path, statement: str) -> None:
    done = rlcanary("check", adapter(tmp_path, called=statement), "--only=advantage.shift", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "advantages([4], [4]) raised" in done.stdout
    assert "0 passed, 1 raised an error" in done.stdout


@pytest.mark.parametrize("listed", ["return [self]", "return {'a': 3}", "return {3: self}"])
def test_configurations_that_are_none_are_refused(tmp_path: Path, listed: str) -> None:
    done = rlcanary("check", adapter(tmp_path, listed=listed), "--matrix", "--only=advantage.shift", cwd=tmp_path)
    assert done.returncode == 2
    assert re.search("no dict of adapters|name of a configuration", done.stderr)


def test_exit_that_nobody_expects_is_an_internal_error(capsys: pytest.CaptureFixture[str]) -> None:
    with mock.patch.object(cli.cli, "main", side_effect=SystemExit(0)), pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 3
    assert "SystemExit" in capsys.readouterr().err


OUTPUTS = ("--json=out.json", "--markdown=out.md", "--update-expected=known.txt")


@pytest.mark.parametrize("place", ["imported", "called"])
def test_outputs_are_written_where_the_command_was_typed(tmp_path: Path, place: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    moves = adapter(tmp_path, **{place: f"import os; os.chdir({str(elsewhere)!r})"})
    done = rlcanary("check", moves, "--only=advantage.shift", *OUTPUTS, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir() if path.is_file()} >= {"out.json", "out.md", "known.txt"}
    (tmp_path / "known.txt").write_text((tmp_path / "known.txt").read_text().replace("say why", "on purpose"))
    assert rlcanary("check", moves, "--only=advantage.shift", "--expected=known.txt", cwd=tmp_path).returncode == 0
    assert list(elsewhere.iterdir()) == []


@pytest.mark.parametrize(
    "statement", ["sys.stdout.fileno()", "sys.stderr.buffer.write(b'x')", "sys.stdout.reconfigure(line_buffering=True)"]
)
def test_what_code_does_with_its_output_is_no_failure(tmp_path: Path, statement: str) -> None:
    (tmp_path / "mine.py").write_text(ADAPTER.format(created="pass", called=statement, listed="pass", imported=""))
    done = subprocess.run(
        [sys.executable, "-m", "rlcanary", "check", "mine.py", "--only=advantage.nan_reward,advantage.row_order"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "raised" not in done.stdout
    assert done.returncode in (0, 1)
