"""Restore the state that a test can change for later tests: environment variables, working directory, torch's defaults.

It is noted before the test and restored after it. Deliberate changes by fixtures wider than a test stay.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

# Pytest says there which test runs, and changes it at every step of one.
CURRENT_TEST = b"PYTEST_CURRENT_TEST"
# Variables that are looked after where they are set.
OWN = b"RLCANARY_"


class Surroundings(NamedTuple):
    """The state of the process at one moment.

    Attributes:
        environ: the object `os.environ`, which a test may replace by another.
        folder: the working directory, "" if it is gone.
        modules: number of imported modules.
    """

    environ: Any
    environment: dict[bytes, bytes]
    folder: str
    dtype: Any
    grad: bool
    modules: int


def now() -> Surroundings:
    """Read the present state, in a few microseconds."""
    try:
        folder = os.getcwd()  # noqa: PTH109 - twice as fast as pathlib, at every test
    except FileNotFoundError:
        folder = ""
    torch = sys.modules.get("torch")
    dtype, grad = None, True
    if torch is not None and hasattr(torch, "get_default_dtype"):
        dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    return Surroundings(os.environ, environment(), folder, dtype, grad, len(sys.modules))


def environment() -> dict[bytes, bytes]:
    """Return the raw variables but for pytest's; `os.environ.copy()` decodes each, which takes a hundred times as long."""
    raw = getattr(os.environ, "_data", None)
    if raw is None:  # a test has put a plain dictionary in its place
        raw = {os.fsencode(str(name)): os.fsencode(str(value)) for name, value in os.environ.items()}
    variables: dict[bytes, bytes] = dict(raw)
    variables.pop(CURRENT_TEST, None)
    return variables


class Keeper:
    """Notes the surroundings of a test and puts them back."""

    def __init__(self) -> None:
        self.before = now()

    def begin(self) -> None:
        self.before = now()

    @contextmanager
    def shared(self) -> Iterator[None]:
        """Exempt changes made while entered: they come from a fixture that other tests share, and stay."""
        before = now()
        try:
            yield
        finally:
            after, kept = now(), self.before
            variables = dict(kept.environment)
            for name in changed(before.environment, after.environment):
                if name in after.environment:
                    variables[name] = after.environment[name]
                else:
                    variables.pop(name, None)
            self.before = Surroundings(
                after.environ if after.environ is not before.environ else kept.environ,
                variables,
                after.folder if after.folder != before.folder else kept.folder,
                after.dtype if after.dtype != before.dtype else kept.dtype,
                after.grad if after.grad != before.grad else kept.grad,
                kept.modules,
            )

    def put_back(self) -> list[str]:
        """Restore the state that the test has changed, and describe the changes."""
        before, after = self.before, now()
        done = []
        if after.environ is not before.environ:
            os.environ = before.environ  # noqa: B003 - the object whose variables the process has
            done.append("os.environ, replaced: put back")
            after = now()
        if after.environment != before.environment:
            for name in sorted(changed(before.environment, after.environment)):
                done += restore_variable(os.fsdecode(name), before, after)
        if after.folder != before.folder and Path(before.folder).is_dir():
            os.chdir(before.folder)
            done.append(f"the working directory {after.folder or '(which is gone)'}: put back to {before.folder}")
        if after.dtype is not None:
            torch = sys.modules["torch"]
            dtype = torch.float32 if before.dtype is None else before.dtype
            if after.dtype != dtype:
                torch.set_default_dtype(dtype)
                done.append(f"torch's default dtype {after.dtype}: put back to {dtype}")
            if after.grad != before.grad:
                torch.set_grad_enabled(before.grad)
                done.append(f"torch's grad mode {'on' if after.grad else 'off'}: put back")
        return done


def changed(before: dict[bytes, bytes], after: dict[bytes, bytes]) -> set[bytes]:
    """Name the variables that differ, but for rlcanary's own."""
    names = {name for name, _ in before.items() ^ after.items()}
    return {name for name in names if not name.startswith(OWN)}


def restore_variable(name: str, before: Surroundings, after: Surroundings) -> list[str]:
    key = os.fsencode(name)
    if key in before.environment:
        os.environ[name] = os.fsdecode(before.environment[key])
        return [f"the environment variable {name}, {'changed' if key in after.environment else 'removed'}: put back"]
    if module := set_by_import(name, before.modules):
        return [f"the environment variable {name}, which the import of {module} set: kept"]
    os.environ.pop(name, None)
    return [f"the environment variable {name}: removed"]


def set_by_import(name: str, modules_before: int) -> str:
    """Find the module imported since then that sets the variable itself, or "": no test imports it a second time."""
    quoted = rf"\s*['\"]{re.escape(name)}['\"]\s*"
    sets = re.compile(rf"environ(\[{quoted}\]\s*=[^=]|\.setdefault\({quoted},)")
    for module_name, module in list(sys.modules.items())[modules_before:]:
        file = getattr(module, "__file__", None)
        # torch names some of its modules' files without a folder.
        if not isinstance(file, str) or not file.endswith(".py") or not (path := Path(file)).is_absolute():
            continue
        if path.is_file() and sets.search(path.read_text(errors="replace")):
            return module_name
    return ""
