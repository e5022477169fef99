"""Run a program with rlcanary out of its reach."""

import builtins
from typing import Any


def run_without_rlcanary(program: str) -> None:
    exec(program, {"__name__": "program", "__builtins__": {**vars(builtins), "__import__": _import}})


def _import(name: str, *rest: Any) -> Any:
    if name.partition(".")[0] == "rlcanary":
        raise ModuleNotFoundError(name)
    return builtins.__import__(name, *rest)
