"""The consoles that reports and progress are printed on."""

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn
from rich.text import Text

# A pipe or a CI log has no width of its own, and Rich's 80 columns cut tables short.
PLAIN_WIDTH = 120


def report_console(highlight: bool = True) -> Console:
    """Open standard output: as wide as COLUMNS says, or as the terminal, or 120 columns without one. NO_COLOR is respected.

    What stands in brackets, as in the names of tests and in tensors, is text: markup and emoji are off.
    """
    width, height = shutil.get_terminal_size((PLAIN_WIDTH, 25))
    return _Report(highlight=highlight, width=width, height=height, markup=False, emoji=False)


class _Report(Console):
    """A console whose reader may leave, as `head` does: the exit code is the verdict all the same."""

    def on_broken_pipe(self) -> None:
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class Count(MofNCompleteColumn):
    """The number of steps done, of how many; nothing where nobody knows of how many."""

    def render(self, task: Task) -> Text:
        return Text() if task.total is None else super().render(task)


def progress_bar() -> Progress:
    """Show a bar with a description and a count on stderr, gone when it is done; shows nothing without a terminal."""
    console = Console(file=sys.stderr)  # not the stream that a progress bar of the code under test is given
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), Count())
    has_terminal = sys.stderr.isatty()  # FORCE_COLOR makes none
    return Progress(*columns, console=console, transient=True, disable=not has_terminal)


@contextmanager
def without_output(*, unless: bool = False) -> Iterator[None]:
    """Drop what code writes to sys.stdout and sys.stderr, such as progress bars of a trainer, or show it."""
    if unless:
        yield
        return
    with redirect_stdout(_nowhere()), redirect_stderr(_nowhere()):
        yield


@cache  # never closed: loggers that are made meanwhile keep it
def _nowhere() -> TextIO:
    """Open a stream that drops everything, and has all that a stream of a process has, such as a file number."""
    return Path(os.devnull).open("w", encoding="utf-8")
