"""Run programs that a completion wrote against tests, in a confined process with hard limits (`PythonTool`)."""

from __future__ import annotations

import ast
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from rlcanary.grpo.rewards.verifier import Score
from rlcanary.grpo.tools.python_tool import PythonTool, code_blocks

# The word is said only behind the last test: a program that exits, or prints anything, before that has passed nothing.
# `exec` and `print` are taken before the program can give these names another meaning.
PROGRAM = """\
def judge(exec=exec, print=print):
    names = {{"__name__": "__main__"}}
    exec({code!r}, names)
    exec({tests!r}, names)
    print({word!r}, flush=True)

judge()
"""


# A test of these alone, such as HumanEval's `check` that nobody calls, would be passed by any program.
PREPARES = (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Assign)


class CodeVerifier:
    """Scores 1 if the last ```python block of a completion passes the tests of its target, else 0.

    A program that fails, does not end in time or takes too much memory is wrong: these are the program's faults and not the
    verifier's. It keeps mistakes out, not cheats: an object that claims to equal everything passes most tests.
    """

    bounds = (0.0, 1.0)

    def __init__(self, *, timeout: float = 5.0, memory_bytes: int = 512 * 2**20) -> None:
        """Set the limits of a program with its tests.

        Raises:
            UserError: as `PythonTool`.
        """
        self._tool = PythonTool(timeout=timeout, memory_bytes=memory_bytes, output_characters=2**20)

    def verify(self, completion: str, target: Any) -> Score:
        """Run the completion's program with the target's tests: Python as a text or a list, or as that under `tests`."""
        tests = _tests(target)
        if tests is None:
            return Score(
                None, "bad target", detail=f"tests are statements that compile and do something, not {target!r}"
            )
        blocks = code_blocks(completion)
        if not blocks:
            return Score(0.0, "no answer")
        word = secrets.token_hex(16)
        result = self._tool.run(PROGRAM.format(code=blocks[-1], tests=tests, word=word))
        has_passed = result.problem is None and result.output.rstrip().endswith(word)
        return Score(float(has_passed), detail=result.problem or "")


def _tests(target: Any) -> str | None:
    if isinstance(target, Mapping):
        target = target.get("tests")
    if isinstance(target, Sequence) and not isinstance(target, str):
        target = "\n".join(map(str, target))
    if not isinstance(target, str) or not target.strip():
        return None
    try:
        tree = ast.parse(target)
    except (SyntaxError, ValueError):
        return None
    return target if any(not isinstance(each, PREPARES) for each in tree.body) else None
