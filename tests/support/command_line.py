"""Runs the `rlcanary` command line in this process, which saves the imports of a process of its own."""

import contextlib
import importlib
import io
import subprocess
import sys
from pathlib import Path
from unittest import mock

from rlcanary.cli import main


def rlcanary(*arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `rlcanary ARGUMENTS` in a folder; modules that it imports from there are forgotten, and so is its path."""
    command = ["rlcanary", *map(str, arguments)]
    stdout, stderr, code = io.StringIO(), io.StringIO(), None
    importlib.invalidate_caches()
    with (
        mock.patch.object(sys, "argv", command),
        mock.patch.object(sys, "path", list(sys.path)),
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            main()
        except SystemExit as ended:
            code = ended.code
    for name, module in list(sys.modules.items()):
        if Path(getattr(module, "__file__", None) or "/").is_relative_to(cwd):
            del sys.modules[name]
    assert isinstance(code, int)
    return subprocess.CompletedProcess(command, code, stdout.getvalue(), stderr.getvalue())
