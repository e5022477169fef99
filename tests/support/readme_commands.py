"""Plays the commands of an example's README in a copy of it, with the mistake that the README names planted on the way."""

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from unittest import mock

from command_line import rlcanary
from waiting import HANG_S

from rlcanary.bugs.causes import causes_of

EXAMPLES = Path(__file__).parents[2] / "examples"
Edit = tuple[str, str, str]
"""A file of the example, what stands there, and the mistake in its place."""


def commands(text: str) -> list[tuple[str, int]]:
    """The lines of a page's sh blocks, without comments, each with the exit code that its comment names, 0 by default."""
    lines = "".join(re.findall(r"^```sh\n(.*?)^```", text, re.MULTILINE | re.DOTALL)).replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        command, _, comment = line.partition(" #")
        code = re.search(r"exit code (\d+)$", comment)
        found.append((command.strip(), int(code[1]) if code else 0))
    return found


def play(example: str, folder: Path, edit: Edit, prepare: Callable[[Path], None] = lambda _: None) -> list[str]:
    """Copy an example into a folder, type its commands there -> the output of each. The edit comes before a red one."""
    readme = (EXAMPLES / example / "README.md").read_text()
    shutil.copytree(
        EXAMPLES / example, folder, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache", "run", "runs")
    )
    prepare(folder)
    path, right, wrong = folder / edit[0], edit[1], edit[2]
    assert wrong.strip() in " ".join(readme.split()), "the README names another mistake"
    outputs = []
    for command, code in commands(readme):
        if command == f"cd examples/{example}":
            continue
        if code and right in (text := path.read_text()):
            path.write_text(text.replace(right, wrong))
        done = typed(command, folder)
        assert done.returncode == code, f"{command}\n{done.stdout}{done.stderr}"
        outputs.append(done.stdout)
    assert right not in path.read_text(), "no command of the README sees the mistake"
    return outputs


def typed(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Type a command in a folder. `rlcanary` and `python` run in this process, which saves its imports."""
    words = shlex.split(command)
    if words[0] == "rlcanary":
        # The search for causes may take twenty seconds; what it finds is tested elsewhere.
        with mock.patch("rlcanary.bugs.causes.causes_of", partial(causes_of, seconds=1.0)):
            return rlcanary(*words[1:], cwd=folder)
    if words[0] == "python":
        return _python(words[1:], folder)
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=HANG_S
    )


def _python(words: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    printed = io.StringIO()
    with (
        mock.patch.object(sys, "argv", words),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        contextlib.chdir(folder),
        contextlib.redirect_stdout(printed),
    ):
        runpy.run_path(words[0], run_name="__main__")
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(folder):
            del sys.modules[name]
    return subprocess.CompletedProcess(words, 0, printed.getvalue(), "")
