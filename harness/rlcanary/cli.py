"""The `rlcanary` command. Each subcommand lives beside the code it runs and is imported when it is used."""

import importlib
import io
import sys
import traceback
from typing import NamedTuple

import click

from rlcanary import __version__
from rlcanary.errors import UserError


class Subcommand(NamedTuple):
    module: str
    summary: str


# The attribute in the module has the subcommand's name, with _ for -.
SUBCOMMANDS = {
    "check": Subcommand("rlcanary.commands.check", "Run the conformance checks on an adapter."),
    "new-adapter": Subcommand("rlcanary.commands.new_adapter", "Write a first adapter for your codebase."),
    "bugs": Subcommand("rlcanary.bugs.detection", "Show which checks catch which shipped bug."),
    "trend": Subcommand("rlcanary.commands.history_options", "Show how a tracked metric moved over runs and commits."),
    "regress": Subcommand("rlcanary.commands.regress", "Show which metrics became worse, since which commit."),
    "report": Subcommand("rlcanary.history.report", "Write one HTML page with a plot of every metric."),
    "check-metrics": Subcommand("rlcanary.commands.check_metrics", "Hold the numbers of a run against limits."),
    "dump-logs": Subcommand("rlcanary.commands.dump_logs", "Turn TensorBoard files and JSON lines into one JSON file."),
    "gates": Subcommand("rlcanary.commands.gates", "Show which tests the gates hold back, and why."),
    "known-issues": Subcommand("rlcanary.commands.known_issues", "Show the registry of known issues."),
    "selection": Subcommand(
        "rlcanary.commands.selection", "Show which tests an edit would run with --testmon, and why."
    ),
    "launch": Subcommand(
        "rlcanary.commands.launch", "Run test scripts as jobs on a snapshot of the code, and judge them."
    ),
    "launches": Subcommand("rlcanary.commands.launches", "Tell how launches ended, or cancel them."),
    "code-snapshot": Subcommand("rlcanary.launch.snapshot", "Copy the tracked code to a folder named for its content."),
    "train": Subcommand("rlcanary.commands.train", "Train with the bundled GRPO, as a plan says."),
    "bisect": Subcommand("rlcanary.commands.bisect", "Find the commit that broke a command."),
}


class LazyGroup(click.Group):
    """A group that knows its subcommands' one-line help without importing them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in SUBCOMMANDS:
            return None
        command = getattr(importlib.import_module(SUBCOMMANDS[name].module), name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, subcommand.summary) for name, subcommand in SUBCOMMANDS.items()])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="rlcanary")
def cli() -> None:
    """Catch RL-on-LLM training that runs without an error and learns the wrong thing, and find the commit that did it.

    Exit codes: 0 all well, 1 something failed, 2 the command was not understood, 3 rlcanary itself broke.
    """


def main() -> None:
    """Entry point: runs the command line and turns every user's mistake into one line on stderr and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # an arrow that the locale has no byte for is no reason to fail
    try:
        code = cli.main(standalone_mode=False)
    except UserError as error:
        message = str(error)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(2)
    except click.UsageError as error:
        command = error.ctx.command_path if error.ctx else "rlcanary"
        message = f"{error.format_message().rstrip('.')}. See `{command} --help`."
    except click.ClickException as error:
        message = error.format_message()
    except click.Abort:
        sys.exit(130)
    except Exception:  # noqa: BLE001 - whatever it is, it is a defect of ours
        # Python would exit with 1, which means that a check failed and makes a bisect blame the commit.
        traceback.print_exc()
        sys.exit(3)
    else:
        sys.exit(code if isinstance(code, int) else 0)
    click.echo(f"rlcanary: {' '.join(message.split())}", err=True)
    sys.exit(2)
