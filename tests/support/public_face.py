"""The public face, a line per name, parameter, field and option.

`python tests/support/public_face.py` writes the file of promised lines anew.
"""

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

import click

import rlcanary
from rlcanary.cli import cli
from rlcanary.commands.jobs.bisect import search
from rlcanary.contract.adapter import CAPABILITIES, Adapter

PROMISED = Path(__file__).parents[1] / "expected/public_face.txt"
BUILDERS = ("configured", "configurations", "new_model", "new_state", "new_engine")


def public_face() -> list[str]:
    """What the package offers now. Something new adds lines; a changed or removed line breaks somebody."""
    lines = [line for name in rlcanary.__all__ for line in _of(name, getattr(rlcanary, name))]
    lines += [line for name in cli.list_commands(click.Context(cli)) for line in _of_command(name)]
    return list(dict.fromkeys(lines))


def _of(name: str, value: Any) -> Iterator[str]:
    if value is Adapter:
        yield "Adapter: name, conventions"
        yield "Adapter: settable"
        for method in (*CAPABILITIES, *BUILDERS):
            yield from _of_signature(f"Adapter.{method}", getattr(Adapter, method))
    elif isinstance(value, dict):
        yield from (f"{name}[{key!r}]" for key in value)
    elif is_dataclass(value):
        needed = [each.name for each in fields(value) if each.default is each.default_factory is MISSING]
        yield f"{name}({', '.join(needed)})"
        yield from (f"{name}.{each.name}" for each in fields(value) if each.name not in needed)
    elif inspect.isfunction(value):
        yield from _of_signature(name, value)
    else:
        yield name
        yield from (f"{name}.{each}" for each in vars(value) if inspect.isclass(value) and not each.startswith("_"))


def _of_signature(name: str, function: Any) -> Iterator[str]:
    parameters = [each for each in inspect.signature(function).parameters.values() if each.name != "self"]
    yield f"{name}({', '.join(each.name for each in parameters if each.default is each.empty)})"
    yield from (f"{name}({each.name}=)" for each in parameters if each.default is not each.empty)


def _of_command(name: str, parents: str = "rlcanary") -> Iterator[str]:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    yield from _of_click(f"{parents} {name}", command)
    if name == "bisect":  # the command behind the group, which has the options of a search
        yield from _of_click(f"{parents} {name}", search)


def _of_click(name: str, command: click.Command) -> Iterator[str]:
    yield name
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.hidden:
            yield f"{name} {max(parameter.opts, key=len)}"
    if isinstance(command, click.Group):
        for sub in command.list_commands(click.Context(command)):
            inner = command.get_command(click.Context(command), sub)
            assert inner is not None
            yield from _of_click(f"{name} {sub}", inner)


if __name__ == "__main__":
    PROMISED.write_text("".join(f"{line}\n" for line in public_face()))
