"""The `rlcanary` command, whose subcommands are the modules below `commands/`."""

import ast
import errno
import importlib
import io
import os
import select
import signal
import sys
import traceback
from pathlib import Path

import click

from rlcanary import commands
from rlcanary.errors import UserError


def subcommands(section: str = "*") -> dict[str, Path]:
    """Find the modules below `commands/` by the name of their subcommand: those of a section, or all."""
    folder = Path(commands.__file__).parent
    modules = [path for path in folder.glob(f"{section}/[!_]*.py") if path.parent.name in commands.SECTIONS]
    return {path.stem.replace("_", "-"): path for path in sorted(modules, key=lambda path: path.name)}


def summary(module: Path) -> str:
    """Read the one-line help of a subcommand: the first line of its module, which is not imported for it."""
    return (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").partition("\n")[0]


class CommandsFolder(click.Group):
    """A group whose subcommands are the modules below `commands/`, imported when they are used."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(subcommands())

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        module = subcommands().get(name)
        if module is None:
            return None
        imported = importlib.import_module(f"rlcanary.commands.{module.parent.name}.{module.stem}")
        command = getattr(imported, module.stem)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, subcommands()))
        for section, heading in commands.SECTIONS.items():
            with formatter.section(heading):
                rows = [(name.ljust(width), summary(module)) for name, module in subcommands(section).items()]
                formatter.write_dl(rows)


STDOUT = 1
READER_LEFT = 128 + signal.SIGPIPE  # as of any program whose reader, such as `head`, left before the end


@click.group(cls=CommandsFolder, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rlcanary", prog_name="rlcanary")
def cli() -> None:
    """Catch RL-on-LLM training that runs without an error and learns the wrong thing, and find the commit that did it.

    Exit codes: 0 success, 1 failure found, 2 usage error, 3 internal error.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder is there no longer: change into one that is") from None


def main() -> None:
    """Run the command line; a user's mistake becomes one line on stderr and exit code 2."""
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
    except BaseException as error:  # noqa: BLE001 - what is left is a defect of rlcanary, and so is an exit of foreign code
        if _has_reader_left():  # click makes an exit with 1 of it
            _drop_output()
            sys.exit(READER_LEFT)
        if not isinstance(error, OSError) or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            # Python would exit with 1, which means that a check failed and makes a bisect blame the commit, or with 0.
            traceback.print_exc()
            sys.exit(3)
        _drop_output()
        message = f"cannot write {error.filename or 'the output'}: {error.strerror}"
    else:
        sys.exit(code if isinstance(code, int) else 0)
    click.echo(f"rlcanary: {' '.join(message.split())}", err=True)
    sys.exit(2)


def _has_reader_left() -> bool:
    """Tell whether standard output is a pipe that nobody reads any more."""
    poll = select.poll()
    poll.register(STDOUT, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _drop_output() -> None:
    """Send what standard output still holds nowhere: that it cannot be written would become the exit code."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)
