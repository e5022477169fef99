"""Write a first adapter for your codebase."""

from pathlib import Path

import click

from rlcanary.errors import UserError
from rlcanary.scaffold.templates import first_adapter
from rlcanary.system.files import require_writable, write_whole


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
def new_adapter(path: Path) -> None:
    """Write a first adapter to PATH (a .py file), ready to run and to be filled with your own functions."""
    if path.suffix != ".py" or not path.stem.isidentifier():
        raise UserError(f"{path} is no name for a Python module: give one such as tests/canary.py")
    if path.exists():
        raise UserError(f"{path} exists already and was left as it is: give another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    require_writable(path)
    class_name = "".join(part.capitalize() for part in path.stem.split("_"))
    write_whole(path, first_adapter(class_name))
    click.echo(f"{path} written. Check it with: rlcanary check {path}")
