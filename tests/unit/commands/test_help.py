"""`rlcanary --help` lists every subcommand, by sections."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from rlcanary import commands
from rlcanary.cli import cli


def test_help_lists_every_module_below_its_section() -> None:
    text = CliRunner().invoke(cli, ["--help"]).output
    folder = Path(commands.__file__).parent
    modules = {path for path in folder.glob("*/[!_]*.py") if path.parent.name != "parts"}
    for section, heading in commands.SECTIONS.items():
        part = text.partition(f"{heading}:\n")[2].partition("\n\n")[0]
        own = {path for path in modules if path.parent.name == section}
        assert {line.split()[0] for line in part.splitlines() if line[2:3].strip()} == {
            path.stem.replace("_", "-") for path in own
        }
        modules -= own
    assert not modules


@pytest.mark.parametrize("group", ["selection", "bisect"])
def test_no_line_of_a_subcommand_is_cut(group: str) -> None:
    assert "..." not in CliRunner().invoke(cli, [group, "--help"]).output.partition("Commands:")[2]
