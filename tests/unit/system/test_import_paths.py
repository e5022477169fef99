"""What the interpreter of a command says, or cannot say, of the folders that it imports from."""

import sys
from pathlib import Path

import pytest

from rlcanary.system.import_paths import ImportPaths, find_import_paths


@pytest.mark.parametrize(
    "text",
    ["#!/no/such/python\n", "#!/bin/sh python\nexit 1\n", "#!/usr/bin/env no-such-python\n"],
    ids=["missing", "fails", "not on PATH"],
)
def test_interpreter_that_cannot_be_asked_gives_no_folders(tmp_path: Path, text: str) -> None:
    program = tmp_path / "tool"
    program.write_text(text)
    program.chmod(0o755)
    assert find_import_paths(["./tool"], tmp_path, tmp_path) == ImportPaths((), ())


def test_interpreter_that_prints_nothing_but_words_gives_no_folders(tmp_path: Path) -> None:
    program = tmp_path / "python-of-mine"
    program.write_text("#!/bin/sh\necho hello\n")
    program.chmod(0o755)
    assert find_import_paths([str(program)], tmp_path, tmp_path) == ImportPaths((), ())


def test_lines_that_a_start_of_python_prints_are_no_part_of_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('welcome')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    assert "site" in find_import_paths([sys.executable], tmp_path, tmp_path).relative
