"""Loading the adapter named on the command line."""

import copy
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from types import ModuleType

from rlcanary.contract.adapter import CAPABILITIES, Adapter, contract_of, newer_arguments, provided, written
from rlcanary.contract.conventions import Conventions
from rlcanary.errors import UserError
from rlcanary.system.printable import printable

BUNDLED = {
    "reference": "rlcanary.adapters.reference:ReferenceAdapter",
    "grpo": "rlcanary.adapters.grpo:GrpoAdapter",
    "trl": "rlcanary.adapters.trl:TrlAdapter",
    "verl": "rlcanary.adapters.verl.adapter:VerlAdapter",
    "torchrl": "rlcanary.adapters.torchrl.adapter:TorchrlAdapter",
    "nemo_rl": "rlcanary.adapters.nemo_rl.adapter:NemoRlAdapter",
    "openrlhf": "rlcanary.adapters.openrlhf.adapter:OpenrlhfAdapter",
    "skyrl": "rlcanary.adapters.skyrl.adapter:SkyrlAdapter",
    "prime_rl": "rlcanary.adapters.prime_rl.adapter:PrimeRlAdapter",
}


def load_adapter(spec: str) -> Adapter:
    """Load the adapter that `spec` names.

    Args:
        spec: the name of a bundled adapter ("trl"), or of one that an installed package registers in the entry-point
            group `rlcanary.adapters`; a module and a class ("mylib.canary:MyAdapter"); or a module or a Python file
            that defines exactly one adapter ("mylib.canary", "tests/canary.py"). A name in brackets behind it is one of its
            configurations ("trl[gspo]").

    Raises:
        UserError: the name matches no object or several, it fails to import, the object is not an adapter with at least
            one capability and readable conventions, or torch is not installed.
    """
    if configuration := re.fullmatch(r"(.+)\[([^\[\]]+)\]", spec):
        return _configuration(load_adapter(configuration[1]), *configuration.groups())
    named = registered()
    targets = named.get(spec, {spec})
    if len(targets) > 1:
        raise UserError(
            f"several installed packages have an adapter {spec!r}: give one of {', '.join(sorted(targets))}"
        )
    target = min(targets)
    place, _, attribute = target.rpartition(":") if ":" in target else (target, "", "")
    module = _import_file(Path(place)) if place.endswith(".py") else _import_module(place, spec, list(named))
    adapter = _pick(module, attribute, spec)
    if not provided(adapter):
        meant = "; ".join(misspelt(adapter))
        raise UserError(
            f"adapter {spec!r} has no capability: override at least one method of rlcanary.Adapter, "
            f"{meant or 'token_logprobs or advantages for a start'}"
        )
    for name in sorted(provided(adapter)):
        _check_signature(adapter, name, spec)
    _require_conventions(adapter, spec)
    if _name_is_inherited(adapter):
        adapter.name = type(adapter).__name__
    elif _is_made_elsewhere(adapter, module):
        adapter.name = spec
    _require_plain(adapter.name, f"the name of adapter {spec!r}")
    if importlib.util.find_spec("torch") is None:
        raise UserError("the checks need torch: pip install 'rlcanary[torch]'")
    return adapter


def _require_plain(name: object, what: str) -> None:
    """Raise UserError for a name that does not fit into every report."""
    if not isinstance(name, str) or not name or printable(name) != name:
        raise UserError(f"{what} is {name!r}: give it one line of text without control characters")


def _name_is_inherited(adapter: Adapter) -> bool:
    """Tell if an adapter of a user has only the name of the bundled adapter that it extends, or none."""
    own = list(itertools.takewhile(lambda each: not each.__module__.startswith("rlcanary."), type(adapter).__mro__))
    return bool(own) and not any("name" in vars(each) for each in (adapter, *own))


def _is_made_elsewhere(adapter: Adapter, module: ModuleType) -> bool:
    """Tell if a user's module holds an instance of a bundled adapter, under other settings, that has no name of its own."""
    bundled, own = type(adapter).__module__, module.__name__
    return bundled.startswith("rlcanary.") and not own.startswith("rlcanary.") and "name" not in vars(adapter)


def configurations_of(adapter: Adapter) -> dict[str, Adapter]:
    """Return the configurations of an adapter by name, each named in reports as the adapter with it.

    Raises:
        UserError: they cannot be listed.
    """
    with _foreign(f"listing the configurations of {adapter.name} failed"):
        listed: object = adapter.configurations()
    if not (isinstance(listed, dict) and all(isinstance(each, Adapter) for each in listed.values())):
        raise UserError(f"the configurations of {adapter.name} are no dict of adapters: let it return them by name")
    found = {}
    for name, each in listed.items():
        _require_plain(name, f"the name of a configuration of {adapter.name}")
        found[name] = copy.copy(each)
        found[name].name = f"{adapter.name}[{name}]"
    return found


def _configuration(adapter: Adapter, spec: str, name: str) -> Adapter:
    found = configurations_of(adapter)
    if name not in found:
        told = f"its configurations are {', '.join(found)}" if found else "it lists no configurations"
        raise UserError(f"{spec} has no configuration {name!r}: {told}")
    return found[name]


def registered() -> dict[str, set[str]]:
    """Return the `module:Class` of each adapter that is bundled or registered by an installed package, by name."""
    named = {name: {target} for name, target in BUNDLED.items()}
    for entry in _entries(tuple(sys.path)):
        named.setdefault(entry.name, set()).add(entry.value)
    return named


@cache  # to read what is installed takes longer than most checks
def _entries(_path: tuple[str, ...]) -> EntryPoints:
    return entry_points(group="rlcanary.adapters")


def misspelt(adapter: Adapter) -> list[str]:
    """Return the public methods of an adapter whose names are close to, but not, names of capabilities."""
    own = {name for owner in type(adapter).__mro__ if owner not in (Adapter, object) for name in vars(owner)}
    free = sorted(name for name in own if not name.startswith("_") and not hasattr(Adapter, name))
    nearest = ((name, get_close_matches(name, CAPABILITIES, n=1, cutoff=0.85)) for name in free)
    return [f"{name} is no capability; did you mean {close[0]}?" for name, close in nearest if close]


def outdated(adapter: Adapter) -> list[str]:
    """Return how to write the capabilities that were written before the contract gave them further arguments."""
    lines = []
    for name in sorted(provided(adapter)):
        contract = contract_of(name).parameters
        try:
            inspect.signature(getattr(adapter, name)).bind(*list(contract)[1:])
        except TypeError:
            told = f"{name} takes no {' and '.join(newer_arguments(name))}, which some checks give it"
            lines.append(f"{told}: write it as `def {name}({written(contract)})`")
        except ValueError:  # what is written in C does not say
            continue
    return lines


def _check_signature(adapter: Adapter, name: str, spec: str) -> None:
    """Raise UserError for a capability that cannot take the checks' arguments.

    One that lacks those with a default was written before the contract had them: the checks that give them decline.
    """
    expected = contract_of(name).parameters
    given = [each for each in expected if each not in ("self", *newer_arguments(name))]
    try:
        signature = inspect.signature(getattr(adapter, name))
    except (TypeError, ValueError):  # what is written in C does not say
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise UserError(
            f"{name}{signature} of adapter {spec!r} does not accept the arguments of the checks: write "
            f"`def {name}({written(expected)})` ({error})"
        ) from error


def _require_conventions(adapter: Adapter, spec: str) -> None:
    """Raise UserError if the conventions, which may come from a framework's configuration, cannot be read."""
    with _foreign(f"the conventions of adapter {spec!r} cannot be read"):
        conventions: object = adapter.conventions
    if not isinstance(conventions, Conventions):
        raise UserError(
            f"the conventions of adapter {spec!r} are of type {type(conventions).__name__}: "
            "set them to a rlcanary.contract.conventions.Conventions"
        )


def _import_module(name: str, spec: str, named: list[str]) -> ModuleType:
    with _foreign(f"importing the package of {name!r} failed"):
        try:
            found = importlib.util.find_spec(name)
        except (ModuleNotFoundError, ValueError):
            found = None
    if found is None:
        if spec in named:
            raise UserError(f"adapter {spec!r} is registered in module {name!r}, which does not exist: reinstall it")
        close = get_close_matches(spec, named, n=1)
        meant = f"did you mean {close[0]!r}?" if close else f"the registered adapters are {', '.join(named)}."
        raise UserError(
            f"no adapter {spec!r}: {meant} Otherwise give a module (package.module:Class) that Python finds from here, "
            "or a path that ends in .py"
        )
    with _foreign(f"importing {name!r} failed"):
        return importlib.import_module(name)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"no adapter file {str(path)!r} here ({Path.cwd()})")
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # An adapter's imports often lie beside it, as for a script that Python runs.
    sys.path.insert(0, str(path.resolve().parent))
    with _foreign(f"importing {str(path)!r} failed"):
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return module


@contextmanager
def _foreign(failed: str) -> Iterator[None]:
    """Run code of the user.

    Raises:
        UserError: it raised, or ended itself with `sys.exit`, which would be the exit code of this run.
    """
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"{failed}: {_told(error)}") from error


def _told(error: BaseException) -> str:
    """Summarise an error in one line, with a suggestion for a misspelt convention."""
    told = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith("<frozen")]
    if frames[1:]:  # beyond this module
        told += f" (line {frames[-1].lineno} of {frames[-1].filename})"
    unknown = re.search(r"Conventions.* unexpected keyword argument '(\w+)'", told)
    close = get_close_matches(unknown[1], [field.name for field in fields(Conventions)], n=1) if unknown else []
    return f"{told}; did you mean {close[0]}?" if close else told


def _pick(module: ModuleType, attribute: str, spec: str) -> Adapter:
    if attribute:
        if not hasattr(module, attribute):
            raise UserError(f"{module.__name__!r} has no {attribute!r}: the adapter is written module:Class")
        found = getattr(module, attribute)
    else:
        found = _only_adapter_defined_in(module, spec)
    if not inspect.isclass(found):
        adapter = found
    elif issubclass(found, Adapter):
        with _foreign(f"creating adapter {spec!r} failed"):
            adapter = found()
    else:
        adapter = None
    if not isinstance(adapter, Adapter):
        raise UserError(f"{spec!r} is not an adapter: make it a subclass or an instance of rlcanary.Adapter")
    return adapter


def _only_adapter_defined_in(module: ModuleType, spec: str) -> object:
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, Adapter) and value.__module__ == module.__name__
    ]
    instances = [value for value in vars(module).values() if isinstance(value, Adapter)]
    candidates = instances or classes
    if not candidates:
        raise UserError(f"no adapter in {spec!r}: define a subclass of rlcanary.Adapter there")
    if len(candidates) > 1:
        raise UserError(f"{spec!r} defines {len(candidates)} adapters: say which one, as {spec}:ClassName")
    return candidates[0]
