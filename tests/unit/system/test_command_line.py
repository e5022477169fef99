"""The command of a process, also while another program is taking its place."""

import subprocess
from pathlib import Path

import pytest

from rlcanary.system.processes import command_line


def test_a_process_that_is_being_replaced_gets_its_command_a_moment_later(monkeypatch: pytest.MonkeyPatch) -> None:
    read, reads = Path.read_bytes, []

    def early(path: Path) -> bytes:
        reads.append(path)
        return b"" if len(reads) < 4 else read(path)

    with subprocess.Popen(["sleep", "907"]) as process:
        monkeypatch.setattr(Path, "read_bytes", early)
        try:
            assert command_line(process.pid) == "sleep 907"
        finally:
            process.kill()


def test_a_process_that_has_ended_has_no_command() -> None:
    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert command_line(process.pid) == ""
