"""Let policies run Python: an answer's code blocks run in a process of their own, and their output is the reply.

The process has no network and can start no other, has limited memory, CPU time and file sizes, an empty folder and none of
the environment, and is killed when its time is up. It has the standard library alone. It sees the machine's files: this
keeps mistakes in, not attackers.
"""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlcanary.errors import UserError

BLOCK = re.compile(r"^```python[ \t]*\n(.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
CONFINED = Path(__file__).with_name("confined.py")


@dataclass(frozen=True)
class CodeResult:
    """The result of one block of code.

    Attributes:
        output: its output on either stream, cut to the limit.
        problem: "exception" (or an exit status that is not zero), "timeout", "killed" (by a signal), or None.
    """

    output: str
    problem: Literal["exception", "timeout", "killed"] | None


class PythonTool:
    """Runs the ```python blocks of an answer, one process for each answer, the blocks one after the other in it."""

    def __init__(
        self, *, timeout: float = 10.0, memory_bytes: int = 512 * 2**20, output_characters: int = 4000
    ) -> None:
        """Set the limits of each answer.

        Args:
            timeout: wall time in seconds.
            memory_bytes: address space of the process.
            output_characters: length of the reply; longer output is cut.

        Raises:
            UserError: this system cannot confine a process so, or a limit is not positive and finite.
        """
        if sys.platform != "linux":
            raise UserError(f"the Python tool confines code by means of Linux, and this is {sys.platform}")
        if not 0 < timeout < math.inf or memory_bytes <= 0 or output_characters <= 0:
            raise UserError(
                f"limits of the Python tool have to be positive and finite: timeout={timeout}, memory_bytes={memory_bytes}, "
                f"output_characters={output_characters}"
            )
        self._timeout, self._memory_bytes, self._output_characters = timeout, memory_bytes, output_characters

    def reply(self, answer: str) -> str | None:
        """Return the output of an answer's blocks, as the message of a tool; None if it has no block."""
        blocks = code_blocks(answer)
        if not blocks:
            return None
        result = self.run("\n".join(blocks))
        ending = {
            None: "",
            "exception": "\n[the code raised an exception]",
            "timeout": f"\n[ended after {self._timeout:g} seconds]",
            "killed": "\n[the code was killed]",
        }[result.problem]
        return (result.output.rstrip() or "[no output]") + ending

    def run(self, code: str) -> CodeResult:
        """Run code as a program, in a process that is gone at the end.

        Raises:
            RuntimeError: the limits could not be set, in which case the code was not run.
        """
        with tempfile.TemporaryDirectory(prefix="rlcanary-python-") as scratch:
            folder, source, output = Path(scratch, "work"), Path(scratch, "source"), Path(scratch, "output")
            folder.mkdir()
            source.write_text(code, encoding="utf-8", errors="replace")
            returncode = self._run(source, folder, output)
            with output.open(encoding="utf-8", errors="replace") as printed:
                return CodeResult(printed.read(self._output_characters), _problem(returncode))

    def _run(self, source: Path, folder: Path, output: Path) -> int | None:
        """Run the process -> its exit status, or None if the time was up."""
        limits = [str(self._memory_bytes), str(math.ceil(self._timeout) + 1)]
        confined, is_ready = os.pipe()
        try:
            with output.open("wb") as stream:
                process = subprocess.Popen(
                    [sys.executable, "-ISu", "-X", "utf8", CONFINED, source, str(os.getpid()), *limits, str(is_ready)],
                    stdin=subprocess.DEVNULL,
                    stdout=stream,
                    stderr=stream,
                    cwd=folder,
                    env={"PATH": os.defpath, "HOME": str(folder), "TMPDIR": str(folder)},
                    pass_fds=[is_ready],
                )
            try:
                returncode = process.wait(self._timeout)
            except subprocess.TimeoutExpired:
                returncode = None
            finally:
                process.kill()
                process.wait()
            os.set_blocking(confined, False)
            os.close(is_ready)
            is_ready = -1
            if returncode is not None and not os.read(confined, 1):
                raise RuntimeError(f"the code could not be confined, and was not run: {output.read_text().strip()}")
            return returncode
        finally:
            os.close(confined)
            if is_ready >= 0:
                os.close(is_ready)


def code_blocks(answer: str) -> Sequence[str]:
    """Return the contents of the ```python blocks; one that is not closed does not count."""
    return BLOCK.findall(answer)


def _problem(returncode: int | None) -> Literal["exception", "timeout", "killed"] | None:
    if returncode is None or returncode == -signal.SIGXCPU:
        return "timeout"
    if returncode < 0:
        return "killed"
    return "exception" if returncode else None
