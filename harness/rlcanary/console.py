"""The consoles that reports and progress are printed on."""

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

# A pipe or a CI log has no width of its own, and Rich's 80 columns cut tables short.
PLAIN_WIDTH = 120


def report_console(highlight: bool = True) -> Console:
    """Open standard output: as wide as the terminal, or 120 columns without one. NO_COLOR is respected."""
    console = Console(highlight=highlight)
    return console if console.is_terminal else Console(highlight=highlight, width=PLAIN_WIDTH)


def progress_bar() -> Progress:
    """Show a bar with a description and a count on stderr, gone when it is done; shows nothing without a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
