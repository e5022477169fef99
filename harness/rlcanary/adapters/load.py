"""Finding the adapter that a person names on the command line."""

import importlib
import importlib.util
import inspect
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType

from rlcanary.contract import Adapter, provided
from rlcanary.errors import UserError

BUNDLED = {
    "reference": "rlcanary.adapters.reference:ReferenceAdapter",
    "trl": "rlcanary.adapters.trl:TrlAdapter",
    "verl": "rlcanary.adapters.verl:VerlAdapter",
    "torchrl": "rlcanary.adapters.torchrl:TorchrlAdapter",
    "nemo_rl": "rlcanary.adapters.nemo_rl:NemoRlAdapter",
    "openrlhf": "rlcanary.adapters.openrlhf:OpenrlhfAdapter",
    "prime_rl": "rlcanary.adapters.prime_rl:PrimeRlAdapter",
}


def load_adapter(spec: str) -> Adapter:
    """The adapter that `spec` names.

    Args:
        spec: the name of a bundled adapter ("trl"), a module and a class ("mylib.canary:MyAdapter"), a module or a
            Python file alone when exactly one adapter is defined in it ("mylib.canary", "tests/canary.py").

    Raises:
        UserError: nothing or more than one thing is found under that name, it fails to import, or what is found is not
            an adapter with at least one capability.
    """
    target, _, attribute = BUNDLED.get(spec, spec).rpartition(":") if ":" in BUNDLED.get(spec, spec) else (spec, "", "")
    module = _import_file(Path(target)) if target.endswith(".py") else _import_module(target, spec)
    adapter = _pick(module, attribute, spec)
    if not provided(adapter):
        raise UserError(
            f"adapter {spec!r} has no capability: override at least one method of rlcanary.adapters.Adapter, "
            "token_logprobs or advantages for a start"
        )
    return adapter


def _import_module(name: str, spec: str) -> ModuleType:
    try:
        found = importlib.util.find_spec(name)
    except (ModuleNotFoundError, ValueError):
        found = None
    except Exception as error:
        raise UserError(f"importing the package of {name!r} failed: {type(error).__name__}: {error}") from error
    if found is None:
        close = get_close_matches(spec, BUNDLED, n=1)
        meant = f"did you mean {close[0]!r}?" if close else f"bundled are {', '.join(BUNDLED)}."
        raise UserError(
            f"no adapter {spec!r}: {meant} Otherwise give a module (package.module:Class) that Python finds from here, "
            "or a path that ends in .py"
        )
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise UserError(f"importing {name!r} failed: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"no adapter file {str(path)!r} here ({Path.cwd()})")
    name = path.stem
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    # What the adapter imports is likely to lie beside it, as for a script that Python runs.
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"importing {str(path)!r} failed: {type(error).__name__}: {error}") from error
    return module


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
        try:
            adapter = found()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"creating adapter {spec!r} failed: {type(error).__name__}: {error}") from error
    else:
        adapter = None
    if not isinstance(adapter, Adapter):
        raise UserError(f"{spec!r} is not an adapter: make it a subclass or an instance of rlcanary.adapters.Adapter")
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
        raise UserError(f"no adapter in {spec!r}: define a subclass of rlcanary.adapters.Adapter there")
    if len(candidates) > 1:
        raise UserError(f"{spec!r} defines {len(candidates)} adapters: say which one, as {spec}:ClassName")
    return candidates[0]
