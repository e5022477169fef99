"""The releases with which the checks ran here, so that CI compares with the same."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, distributions, packages_distributions
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

HEADER = """\
# What the checks imported when {expected} was written: CI installs the same releases.
# Take out what CI cannot install. After an upgrade delete both files, and run `rlcanary init` again.
"""


def imported_requirements(root: Path) -> list[str]:
    """List the distributions whose modules this process has imported, as lines of a requirements file.

    What was installed from a folder of the repository is named by it. The repository itself, also where a release of it is
    installed beside it, what was installed from another folder or git repository of this machine, which CI cannot reach, and
    rlcanary are left out.

    Args:
        root: the repository.
    """
    providers = packages_distributions()
    imported = {name.partition(".")[0] for name in sys.modules}
    names = {
        name
        for package in imported & providers.keys()
        for name in providers[package]
        if name != "rlcanary" and is_imported_from(installed(name), package)
    }
    lines = {requirement(installed(name), root.resolve()) for name in names}
    return sorted((line for line in lines if line), key=str.lower)


def installed(name: str) -> Distribution:
    """Find a distribution: where a repository on the path has an `egg-info` too, the one that pip wrote."""
    return max(distributions(name=name), key=lambda each: bool(origin_of(each)))


def is_imported_from(release: Distribution, package: str) -> bool:
    """Tell whether a package was imported from this distribution, not from a folder before it on the path."""
    module = sys.modules[package]
    places = [*getattr(module, "__path__", ()), getattr(module, "__file__", None) or ""]
    folder = Path(str(release.locate_file(""))).resolve()
    return is_local(origin_of(release)) or any(folder in Path(place).resolve().parents for place in places)


def requirement(release: Distribution, root: Path) -> str:
    """Return the requirement that installs this release elsewhere; empty if nothing does."""
    origin = origin_of(release)
    name = release.metadata["Name"]
    if "vcs_info" in origin and not is_local(origin):
        return f"{name} @ {origin['vcs_info']['vcs']}+{origin['url']}@{origin['vcs_info']['commit_id']}"
    if is_local(origin) and "archive_info" not in origin:
        folder = Path(unquote(urlsplit(origin["url"]).path))
        return f"-e ./{folder.relative_to(root)}" if root in folder.parents else ""
    return f"{name}=={release.version.partition('+')[0]}"


def origin_of(release: Distribution) -> dict[str, Any]:
    """Read where pip installed a distribution from (PEP 610); empty for a release of an index."""
    origin: dict[str, Any] = json.loads(release.read_text("direct_url.json") or "{}")
    return origin


def is_local(origin: Mapping[str, Any]) -> bool:
    """Tell whether a distribution was installed from something on this machine, given where it came from."""
    return str(origin.get("url", "")).startswith("file:")
