"""Write a first adapter for your codebase."""

import os
from keyword import iskeyword
from pathlib import Path

import click

from rlcanary.errors import UserError
from rlcanary.scaffold.templates import first_adapter
from rlcanary.system.files import make_folder, require_writable, write_whole


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def new_adapter(path: Path) -> None:
    """Write a first adapter to PATH (a .py file), ready to run and to be filled with your own functions."""
    class_name = "".join(part.capitalize() for part in path.stem.split("_"))
    if path.suffix != ".py" or not path.stem.isidentifier() or not class_name.isidentifier() or iskeyword(class_name):
        raise UserError(f"{path} is no name for a Python module: give one such as tests/canary.py")
    if os.path.lexists(path):
        raise UserError(f"{path} exists already and was left as it is: give another name")
    make_folder(path.parent)
    require_writable(path)
    write_whole(path, first_adapter(class_name))
    click.echo(f"{path} written. Check it with: rlcanary check {path}")
