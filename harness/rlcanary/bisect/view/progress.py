"""Progress of a running search on stderr: a line per run, and a live display on a terminal."""

import io
import os
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from rlcanary.bisect.record.journal import Observation
from rlcanary.bisect.runs.places import Checkout, Place
from rlcanary.bisect.view.posterior_bar import posterior_bar
from rlcanary.jobs.outcomes import Outcome
from rlcanary.system.files import read_end
from rlcanary.system.git import Commit

STYLES = {
    Outcome.GOOD: "green",
    Outcome.BAD: "red",
    Outcome.MEASURED: "cyan",
    Outcome.UNTESTABLE: "yellow",
    Outcome.INFRA: "magenta",
    Outcome.ABORT: "magenta",
}
TAIL_LINES = 20
TAIL_BYTES = 100_000
BAR_WIDTH = 60
ESTIMATE_SECONDS = 60
"""Without a terminal, the estimate is printed after the first run and then at most this often."""


@dataclass(frozen=True)
class Progress:
    """A snapshot of a running search."""

    running: tuple[Commit, ...]
    runs: int
    tests_left: int
    seconds_left: float | None
    """Estimated seconds to the end. None before the first run has ended."""
    seconds_spent: float
    """The total duration of all runs."""
    commits: tuple[Commit, ...]
    posterior: Mapping[str, float]


class Stderr(io.TextIOBase):
    """Standard error whose terminal may disappear. A dropped ssh session must not end a running search."""

    def __init__(self) -> None:
        self._stream = sys.stderr
        self.is_gone = False

    @property
    def encoding(self) -> str:  # type: ignore[override] # a plain attribute in the base class
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        self._try(lambda: self._stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if not self.is_gone:
            try:
                action()
            except OSError:
                self.is_gone = True


class Display:
    """Prints progress while entered as a context manager."""

    def __init__(self) -> None:
        self._stderr = Stderr()
        self._console = Console(file=cast(IO[str], self._stderr), highlight=False, soft_wrap=True)
        self._told_at: float | None = None
        self._spinner = Spinner("dots", Text("starting"))
        self._live = Live(
            self._spinner,
            console=self._console,
            transient=True,
            refresh_per_second=8,
            redirect_stdout=False,
            redirect_stderr=False,
        )

    def __enter__(self) -> "Display":
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._live.stop()
        self._leave_stderr_if_gone()

    def last_words(self, text: str) -> None:
        """Print a line after the search has ended."""
        print(text, file=self._stderr, flush=True)
        self._leave_stderr_if_gone()

    def _leave_stderr_if_gone(self) -> None:
        if self._stderr.is_gone:
            sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115 - for as long as the process lives

    def notice(self, text: str) -> None:
        self._console.print(Text(text))

    def progress(self, progress: Progress) -> None:
        if self._live.is_started:
            self._live.update(self._picture(progress))
        elif progress.seconds_left is not None and progress.tests_left:
            now = time.monotonic()
            if self._told_at is None or now - self._told_at > ESTIMATE_SECONDS:
                self._told_at = now
                self.notice(f"about {progress.tests_left} runs left, {duration(progress.seconds_left)}")

    def finished(self, number: int, commit: Commit, observation: Observation) -> None:
        outcome = observation.outcome
        self._console.print(
            Text.assemble(
                f"{number:3d}  {commit.short}  ",
                (f"{outcome:10s}", STYLES[outcome]),
                f"  {observation.seconds:7.1f} s  {commit.subject}",
                ("" if outcome is Outcome.GOOD else f"  ({observation.reason})", "dim"),
            )
        )

    def cancelled(self, number: int, commit: Commit) -> None:
        self._console.print(Text(f"{number:3d}  {commit.short}  cancelled: its outcome no longer matters", style="dim"))

    def kept(self, place: Place) -> None:
        """Print where the culprit is checked out, and how to remove it."""
        if isinstance(place, Checkout):
            self.notice(f"checkout left where it is; go back with: git checkout {place.home}")
        else:
            self.notice(f"worktree kept; delete it with: git worktree remove --force {shlex.quote(str(place.path))}")

    def tail(self, output: Path, title: str) -> None:
        """Print the end of the command's output."""
        lines = read_end(output, TAIL_BYTES).splitlines()
        if not lines:
            self.notice(f"--- {title}: it printed nothing")
            return
        self.notice(f"--- the end of the {title}; full output in {output}")
        for line in lines[-TAIL_LINES:]:
            self.notice(f"    {line}")

    def _picture(self, progress: Progress) -> RenderableType:
        names = ", ".join(f"{commit.short} {commit.subject[:40]}" for commit in progress.running)
        text = Text(f"testing {names}" if names else "thinking")
        text.truncate(self._console.width - 8, overflow="ellipsis")
        self._spinner.update(text=text)
        width = max(10, min(BAR_WIDTH, self._console.width - 12))
        facts = [f"run {progress.runs} of about {progress.runs + progress.tests_left}"]
        if progress.seconds_left is not None:
            facts.append(f"about {duration(progress.seconds_left)} left")
        facts.append(f"{duration(progress.seconds_spent)} of run time used")
        lines = [*_bar_lines(progress.commits, progress.posterior, width), Text(" · ".join(facts))]
        for line in lines:
            line.truncate(self._console.width, overflow="ellipsis")
        return Group(*lines, self._spinner)


def _bar_lines(commits: Sequence[Commit], posterior: Mapping[str, float], width: int) -> list[Text]:
    """Draw the posterior over commits."""
    if not posterior:
        return []
    shares = [posterior.get(commit.sha, 0.0) for commit in commits]
    best = max(range(len(shares)), key=shares.__getitem__)
    bar = Text.assemble("GOOD ", (posterior_bar(shares, width), "bold cyan"), " BAD")
    return [bar, Text(f"likeliest culprit: {shares[best]:.0%}  {commits[best].short} {commits[best].subject}")]


def duration(seconds: float) -> str:
    """Format a duration such as `4 s`, `12 min`, `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
