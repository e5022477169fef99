"""The demo's stage: a folder, a console, and commands run in the environment of this Python."""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

WIDTH = 100


class PlayError(Exception):
    """A part of the story failed. The message has the part and the end of its output."""


@dataclass
class Stage:
    """The folder and the console of the demo.

    Attributes:
        console: The console that shows the story.
        home: The folder that holds the repository and everything made from it.
        seconds: The duration of each step, by name.
    """

    console: Console
    home: Path
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def repository(self) -> Path:
        return self.home / "tinygrpo"

    @contextmanager
    def step(self, name: str, explanation: str) -> Iterator[None]:
        """Shows the heading and the explanation of a step, and measures its duration."""
        self.console.print()
        self.console.rule(f"[bold]{len(self.seconds) + 1}. {name}", align="left")
        self.console.print(explanation, highlight=False)
        self.console.print()
        started = time.perf_counter()
        yield
        self.seconds[name] = round(time.perf_counter() - started, 2)

    @contextmanager
    def progress(self, doing: str, total: int | None = None) -> Iterator[Progress]:
        """Shows a live line while something runs. A line stays when it is done."""
        columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30)]
        counted = [MofNCompleteColumn()] if total else []
        progress = Progress(
            *columns,
            *counted,
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
            disable=not self.console.is_terminal,
        )
        started = time.perf_counter()
        with progress:
            progress.add_task(doing, total=total)
            yield progress
        took = time.perf_counter() - started
        self.console.print(Text.assemble(("✓ ", "green"), doing, (f"  {took:.1f} s", "dim")))

    def show_command(self, text: str) -> None:
        """Shows a command as typed in a shell."""
        self.console.print(Text(f"$ {text}", style="cyan"), soft_wrap=True)

    def show(self, output: str, style: str = "") -> None:
        """Shows the output of a command, in its own colours if it has any."""
        text = Text.from_ansi(output.rstrip("\n"))
        text.stylize(style)
        self.console.print(text)

    def environment(self) -> dict[str, str]:
        """Returns this process's environment, changed so that the user's settings have no effect.

        The commands of this Python are found first, each process has one thread, git reads no user settings, and
        temporary files stay in `home`.
        """
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("GIT_", "PYTEST_"))}
        path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", os.defpath)])
        return kept | {
            "PATH": path,
            "COLUMNS": str(self.console.width),
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_NOSYSTEM": "1",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.home),
        }

    def run(
        self,
        command: Sequence[str],
        allowed: Sequence[int] = (0,),
        stderr: int | IO[str] = subprocess.PIPE,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a command in the repository and returns its output.

        Args:
            command: The program and its arguments.
            allowed: The exit codes that are no failure.
            stderr: The destination of its errors, instead of the output.
            variables: Additional environment variables.

        Raises:
            PlayError: The command ended with another exit code.
        """
        sys.stdout.flush()
        done = subprocess.run(
            command,
            cwd=self.repository,
            env=self.environment() | variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
        if done.returncode not in allowed:
            raise failure(command, done.returncode, done.stdout + (done.stderr or ""))
        return done

    def colours(self) -> dict[str, str]:
        """Returns the variable that makes a command print colours for `show`, if the console has colours."""
        return {"FORCE_COLOR": "1"} if self.console.is_terminal and not self.console.no_color else {}

    def git(self, *arguments: str) -> str:
        return self.run(["git", *arguments]).stdout


def failure(command: Sequence[str], exit_code: int, output: str) -> PlayError:
    tail = "\n".join(output.strip().splitlines()[-25:])
    return PlayError(f"`{shlex.join(command)}` ended with exit code {exit_code}:\n{tail}")
