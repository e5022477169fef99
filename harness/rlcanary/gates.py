"""Gates: marks that state the needs of a test, and the flags that let it run.

    include   `--hf-gated` adds the tests marked hf_gated to the others
    only      `--mcore-only` runs the tests marked mcore and nothing else; at most one such flag at a time

A team declares its own in pyproject.toml, as tables [tool.rlcanary.gates.NAME] with `kind`, and optionally `description`,
`module` (must be importable when the flag is given) and `install` (the command to type when it is not).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rlcanary.errors import UserError

Kind = Literal["include", "only"]
KINDS = ("include", "only")
KEYS = {"kind", "description", "module", "install"}
# The file that the plugin writes for `rlcanary gates`.
REPORT_OPTION = "--rlcanary-gates-report"


class Gate(NamedTuple):
    """A mark that holds tests back until its flag is given."""

    name: str
    kind: Kind
    description: str
    module: str = ""
    install: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.name.replace('_', '-')}{'-only' if self.kind == 'only' else ''}"

    @property
    def destination(self) -> str:
        """The flag's name among pytest's options."""
        return self.flag.lstrip("-").replace("-", "_")


BUILT_IN = (
    Gate("hf_gated", "include", "needs a gated model of the Hugging Face hub"),
    Gate("nightly", "include", "is for nightly runs"),
)
MODULES = ("ray", "vllm")
MARKERS = {
    "hf_gated": "hf_gated: needs a gated model of the Hugging Face hub; runs with --hf-gated",
    "nightly": "nightly: for nightly runs; runs with --nightly",
    "gpus": "gpus(n): needs n visible GPUs",
    "ray": "ray: needs Ray",
    "vllm": "vllm: needs vLLM",
    "requires": 'requires("module>=version"): needs this to be installed (repeatable)',
    "run_first": "run_first: runs before all other tests",
}


class Mark(NamedTuple):
    """A mark on a test: its name, its arguments and the names of its keywords."""

    name: str
    args: tuple[Any, ...] = ()
    keywords: tuple[str, ...] = ()


class Held(NamedTuple):
    """The reason why a test is held back, and the gate that holds it."""

    gate: str
    reason: str


class Machine(NamedTuple):
    """Facts about the machine that gates need, looked up once per session and only if a test asks."""

    gpus: int

    @classmethod
    def here(cls) -> Machine:
        from rlcanary.system.gpus import open_gpus

        gpus = open_gpus()
        return cls(0 if gpus is None else len(gpus))


def read_gates(root: Path) -> list[Gate]:
    """Read the built-in gates and those that the pyproject.toml of a project declares.

    Raises:
        UserError: a declaration that cannot be understood.
    """
    path = root / "pyproject.toml"
    gates = {gate.name: gate for gate in BUILT_IN}
    if path.exists():
        import tomllib

        try:
            document = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"{path} cannot be read: {error}") from error
        declared: Any = document
        for key in ("tool", "rlcanary", "gates"):
            declared = declared.get(key, {})
            if not isinstance(declared, dict):
                raise UserError(f"{path}: gates are [tool.rlcanary.gates.NAME] tables, got {key} = {declared!r}")
        for name, table in declared.items():
            gates[name] = declared_gate(name, table, path)
    return list(gates.values())


def declared_gate(name: str, table: Any, path: Path) -> Gate:
    where = f"{path}, [tool.rlcanary.gates.{name}]"
    if not isinstance(table, dict) or table.get("kind") not in KINDS:
        raise UserError(f'{where}: kind must be "include" or "only"')
    if not name.isidentifier():
        raise UserError(f"{where}: the name is that of a mark and must be a Python identifier")
    if name in MARKERS and name not in {gate.name for gate in BUILT_IN}:
        raise UserError(f"{where}: {name} is a gate of rlcanary; choose another name")
    if unknown := table.keys() - KEYS:
        raise UserError(f"{where}: unknown {', '.join(sorted(unknown))}; known are {', '.join(sorted(KEYS))}")
    for key, value in table.items():
        if not isinstance(value, str):
            raise UserError(f"{where}: {key} must be a text, got {value!r}")
    return Gate(
        name,
        table["kind"],
        table.get("description", f"is marked {name}"),
        table.get("module", ""),
        table.get("install", ""),
    )


def check_flags(gates: Iterable[Gate], given: Iterable[str]) -> None:
    """Refuse flags that exclude each other or whose module is missing, before any test runs.

    Raises:
        UserError: with the next step.
    """
    on = set(given)
    chosen = [gate for gate in gates if gate.name in on]
    only = [gate.flag for gate in chosen if gate.kind == "only"]
    if len(only) > 1:
        raise UserError(f"{' and '.join(only)} exclude each other; run pytest once for each")
    for gate in chosen:
        if not gate.module:
            continue
        from rlcanary.system.requirement import is_importable

        if not is_importable(gate.module):
            how = f"; install it with `{gate.install}`" if gate.install else ""
            raise UserError(f"{gate.flag} needs the module {gate.module}, which is not installed{how}")


def held_back(marks: Iterable[Mark], gates: Iterable[Gate], given: Iterable[str], machine: Machine) -> list[Held]:
    """List every reason for which a test does not run; empty if it runs."""
    # Imported where a flag or a mark asks: every start of pytest would pay for it.
    from rlcanary.system.requirement import is_importable, unmet

    marks = list(marks)
    names = {mark.name for mark in marks}
    on = set(given)
    held = []
    for gate in gates:
        if gate.name in names and gate.name not in on:
            held.append(Held(gate.name, f"{gate.description}; {gate.flag} runs it"))
        if gate.kind == "only" and gate.name in on and gate.name not in names:
            held.append(Held(gate.name, f"not marked {gate.name}, and {gate.flag} runs nothing else"))
    for mark in marks:
        if mark.name == "gpus":
            needed = gpus_needed(mark)
            if needed > machine.gpus:
                held.append(Held("gpus", f"needs {needed} GPUs, {machine.gpus} are visible"))
        elif mark.name in MODULES and not is_importable(mark.name):
            held.append(Held(mark.name, f"needs {mark.name}, which is not installed"))
        elif mark.name == "requires":
            held += [Held("requires", reason) for text in requirements(mark) if (reason := unmet(text))]
    return held


def gpus_needed(mark: Mark) -> int:
    """Read the n of gpus(n).

    Raises:
        UserError: n is not a whole number above 0.
    """
    if len(mark.args) != 1 or type(mark.args[0]) is not int or mark.args[0] < 1:
        raise UserError(f"gpus takes one whole number above 0, as in gpus(2); got {mark.args}")
    return int(mark.args[0])


def requirements(mark: Mark) -> list[str]:
    """Read the requirements of requires(…).

    Raises:
        UserError: there is none, or one is given as a keyword.
    """
    if not mark.args or mark.keywords:
        got = [*map(repr, mark.args), *(f"{name}=…" for name in mark.keywords)]
        raise UserError(f'requires takes requirements, as in requires("vllm>=0.14"); got ({", ".join(got)})')
    return [str(text) for text in mark.args]
