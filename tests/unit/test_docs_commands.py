"""Every `rlcanary` command in a code block of the docs is one that the command line understands, with its options."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from rlcanary.cli import cli

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.md")])
BLOCK = re.compile(r"^ *```(?:sh|bash|text|console|yaml)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
PROMPT = r"^(?: *(?:\$|run:|-|entry:) )?(?:[A-Z_]+=\S+ )*(?:tools/bisect-run\.sh )?"
TYPED = re.compile(PROMPT + r"rlcanary ([a-z].*)$", re.MULTILINE)
"""A command behind a prompt, in a step of a workflow, after variables, or as the command of a bisect."""


def commands(page: Path) -> Iterator[str]:
    for block in BLOCK.findall(page.read_text()):
        for words in TYPED.findall(block.replace("\\\n", " ")):
            yield re.split(r"\s+#\s|[|>]|&&|;", words)[0].strip()


def parse(command: str) -> None:
    """Parse a command without running it.

    Raises:
        click.UsageError: the command line does not know it, or one of its options.
    """
    name, *left = shlex.split(command)
    context: click.Context | None = None
    found = cli.get_command(click.Context(cli), name)
    while found is not None:
        context = found.make_context(name, left, parent=context)
        names = found.list_commands(context) if isinstance(found, click.Group) else []
        at = next((place for place, word in enumerate(left) if word in names), None)
        if at is None:
            return
        name, left = left[at], left[at + 1 :]
        assert isinstance(found, click.Group)
        found = found.get_command(context, name)
    raise click.UsageError(f"there is no command {name}")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_is_understood(page: Path) -> None:
    for command in commands(page):
        try:
            parse(command)
        except click.UsageError as error:
            pytest.fail(f"{page.relative_to(ROOT)}: rlcanary {command}: {error.format_message()}")


def test_commands_are_found() -> None:
    assert sum(len(list(commands(page))) for page in PAGES) >= 60


@pytest.mark.parametrize(
    "command", ["check reference", "bisect --good a --bad b", "selection why a.py", "train a.yaml"]
)
def test_wrong_option_is_not_understood(command: str) -> None:
    parse(command)
    with pytest.raises(click.UsageError, match="--no-such-option"):
        parse(f"{command} --no-such-option")
