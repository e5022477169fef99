"""What a user sees: as wide as it may be, in the colours asked for, and nothing of a user's text read as markup."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import rlcanary

CHECK = (sys.executable, "-m", "rlcanary", "check", "reference", "--only=mask.pad_id_zero")


def typed(command: tuple[str, ...], cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose output is no terminal."""
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR", "NO_COLOR")}
    return subprocess.run(
        command, cwd=cwd, env=kept | environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("environment", "width"),
    [
        ({}, 120),
        ({"COLUMNS": "70"}, 70),
        ({"COLUMNS": "0"}, 120),
        ({"FORCE_COLOR": "1"}, 120),
        ({"FORCE_COLOR": "1", "COLUMNS": "70"}, 70),
        ({"FORCE_COLOR": "1", "TERM": "dumb", "COLUMNS": "70"}, 70),
    ],
)
def test_report_is_as_wide_as_columns_says_or_120_without_a_terminal(
    environment: dict[str, str], width: int, tmp_path: Path
) -> None:
    done = typed(CHECK, tmp_path, **environment)
    lines = re.sub(r"\x1b\[[\d;]*m", "", done.stdout).splitlines()
    assert max(map(len, lines)) == width
    assert ("\x1b[" in done.stdout) == (environment.get("FORCE_COLOR") == "1" and "TERM" not in environment)
    assert done.stderr == ""  # no bar


EVIL = """
from rlcanary.adapters.reference import ReferenceAdapter

class Evil(ReferenceAdapter):
    name = "evil [/red] [bold]mine[/] :warning:"

    def completion_mask(self, ids, eos_ids, pad_id):
        raise ValueError("[/red] [bold]loud[/] :warning:")

    def configurations(self):
        return {"a :warning:": self}
"""


@pytest.mark.parametrize("option", ["--github", "--matrix"])
def test_brackets_in_names_and_messages_are_text(option: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EVIL)
    done = rlcanary("check", "mine.py", option, "--only=mask.pad_id_zero", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    shown = " ".join(done.stdout.split())
    assert "Conformance of evil [/red] [bold]mine[/] :warning:" in shown
    assert "[/red] [bold]loud[/] :warning:" in shown
    assert option != "--matrix" or "a :warning:" in shown


def test_stale_check_that_did_not_run_says_why_in_the_codes_words(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        EVIL.replace("raise ValueError", "raise NotProvided").replace(
            "import ReferenceAdapter", "import ReferenceAdapter\nfrom rlcanary import NotProvided"
        )
    )
    (tmp_path / "known.txt").write_text("mask.pad_id_zero  # mended\n    value off by 1\n")
    only = "--only=mask.pad_id_zero,advantage.shift"
    done = rlcanary("check", "mine.py", "--expected=known.txt", only, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "did not run ([/red] [bold]loud[/] :warning:)" in done.stdout


def test_reader_that_leaves_early_changes_no_exit_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(EVIL)
    for adapter, code in (("reference", 0), ("mine.py", 1)):
        command = (sys.executable, "-m", "rlcanary", "check", adapter, "--only=mask.pad_id_zero")
        reading, writing = os.pipe()
        os.close(reading)
        done = subprocess.run(command, cwd=tmp_path, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writing)
        assert (done.returncode, done.stderr) == (code, "")


@pytest.mark.parametrize("command", [["--version"], ["check", "--help"]])
def test_help_whose_reader_left_is_no_internal_error(command: list[str]) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "rlcanary", *command], stdout=writing, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("command", [["check", "--help"], ["check", "reference", "--only=mask.pad_id_zero"]])
def test_full_disk_below_the_output_is_one_line(command: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "rlcanary", *command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert (done.returncode, done.stderr) == (2, "rlcanary: cannot write the output: No space left on device\n")
