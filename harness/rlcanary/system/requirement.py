"""Check whether installed packages satisfy a requirement such as `vllm>=0.14`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from typing import TYPE_CHECKING

from rlcanary.errors import UserError

if TYPE_CHECKING:
    from packaging.requirements import Requirement


def parse(text: str) -> Requirement:
    """Parse a requirement. Its name may be that of a distribution or of a module.

    Raises:
        UserError: The text is no requirement.
    """
    # Imported here, because every start of pytest would pay for it and few sessions have requirements.
    from packaging.requirements import InvalidRequirement, Requirement

    try:
        return Requirement(text)
    except InvalidRequirement as error:
        raise UserError(f"{text!r} is no requirement; write one such as 'vllm>=0.14' ({error.args[0].splitlines()[0]})")  # noqa: B904


def installed_version(name: str) -> str | None:
    """Return the version of a distribution, or of the one with a module of this name. None if there is none."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
    module = name.replace("-", "_")
    if not is_importable(module):
        return None
    holders = importlib.metadata.packages_distributions().get(module.partition(".")[0], [])
    return importlib.metadata.version(holders[0]) if holders else ""


def is_importable(module: str) -> bool:
    """Whether a module could be imported. Only its parent packages are imported."""
    if module in sys.modules:  # a stub that a conftest puts there has no spec; None blocks the import
        return sys.modules[module] is not None
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def unmet(text: str) -> str | None:
    """Describe why a requirement is not met. None if it is."""
    requirement = parse(text)
    version = installed_version(requirement.name)
    if version is None:
        return f"needs {text}; {requirement.name} is not installed"
    if requirement.specifier and not (version and requirement.specifier.contains(version, prereleases=True)):
        return f"needs {text}; installed is {requirement.name} {version or 'of unknown version'}"
    return None
