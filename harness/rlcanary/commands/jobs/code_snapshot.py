"""Copy the tracked code to a folder named for its content."""

from pathlib import Path

import click

from rlcanary.errors import UserError
from rlcanary.launch.snapshot import DEFAULT_FOLDER, take_snapshot
from rlcanary.system.git import Repository


@click.command("code-snapshot")
@click.option(
    "--folder", type=click.Path(path_type=Path), metavar="DIR", help=f"Folder of snapshots; default {DEFAULT_FOLDER}/."
)
@click.argument("name", default="snapshot")
def code_snapshot(name: str, folder: Path | None) -> int:
    """Copy the files that git tracks, submodules too, to a folder NAME-KEY, and print its path.

    KEY is a hash of the files: the same code is copied once.
    """
    if not name or "/" in name or name.startswith("."):
        raise UserError(f"NAME is {name!r}: it becomes part of a folder's name, so no '/' and no '.' at its start")
    repository = Repository.around(Path.cwd())
    where = (repository.toplevel / DEFAULT_FOLDER if folder is None else folder).absolute()
    click.echo(take_snapshot(repository, where, name).path)
    return 0
