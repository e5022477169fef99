"""Build rlcanary. Everything is declared in pyproject.toml, except for the version, which comes from the git tag."""

import os
import re
import subprocess
import sys
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).resolve().parent
FIRST = "0.1.0"
"""The release that commits before the first tag lead to."""


def version() -> str:
    """Return the version of these sources.

    The commit of the tag v1.2.3 is version 1.2.3, and the fifth commit after it 1.2.4.dev5+gCOMMIT. A source distribution
    says its version in PKG-INFO. RLCANARY_VERSION names that of sources that have neither, such as a copied folder.
    """
    if "RLCANARY_VERSION" in os.environ:
        return os.environ["RLCANARY_VERSION"]
    if (HERE / "PKG-INFO").is_file():
        return re.search(r"^Version: (.+)$", (HERE / "PKG-INFO").read_text(encoding="utf-8"), re.MULTILINE)[1]
    if _git("rev-parse", "--show-toplevel") != str(HERE):
        print("rlcanary: no git here that says the version: set RLCANARY_VERSION to name it", file=sys.stderr)
        return "0+unknown"
    commit = _git("rev-parse", "--short=10", "HEAD")
    described = re.fullmatch(
        r"v(.*?)(\d+)-(\d+)-g\w+", _git("describe", "--tags", "--long", "--match", "v[0-9]*") or ""
    )
    if not described:
        return f"{FIRST}.dev{_git('rev-list', '--count', 'HEAD')}+g{commit}"
    series, last, behind = described[1], int(described[2]), int(described[3])
    return f"{series}{last + 1}.dev{behind}+g{commit}" if behind else f"{series}{last}"


def _git(*arguments: str) -> str | None:
    """Return what git says of this folder, None if it says nothing."""
    try:
        return subprocess.run(
            ["git", "-C", HERE, *arguments], capture_output=True, text=True, check=True
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


if __name__ == "__main__":
    setup(version=version())
