"""Read pytest's configuration file for commands that run without pytest.

The file is found as pytest finds it: upwards from the current folder, the first of FILES that configures pytest.
"""

import configparser
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlcanary.errors import UserError

FILES = ("pytest.toml", ".pytest.toml", "pytest.ini", ".pytest.ini", "pyproject.toml", "tox.ini", "setup.cfg")
OWN_FILES = FILES[:4]  # these configure pytest even when they are empty


@dataclass(frozen=True)
class Settings:
    """The values of a configuration file, and its folder; without a file, the folder in which the search began."""

    root: Path
    values: dict[str, Any] = field(default_factory=dict)
    file: Path | None = None

    def text(self, name: str) -> str:
        """Returns a setting, or "" if it is missing."""
        return str(self.values.get(name, ""))

    def lines(self, name: str) -> list[str]:
        """Returns a setting of several lines, or a TOML list, without blank lines."""
        value = self.values.get(name, "")
        lines = value if isinstance(value, list) else str(value).splitlines()
        return [str(line).strip() for line in lines if str(line).strip()]

    def words(self, name: str) -> list[str]:
        """Returns a setting of several words, or a TOML list."""
        value = self.values.get(name, "")
        return [str(word) for word in (value if isinstance(value, list) else str(value).split())]


def pytest_settings(start: Path) -> Settings:
    """Reads pytest's settings for a command that is run in `start`.

    Raises:
        UserError: for a configuration file that cannot be read.
    """
    for folder in (start, *start.parents):
        for name in FILES:
            values = _read(folder / name)
            if values is not None:
                return Settings(folder, values, folder / name)
    return Settings(start)


def _read(path: Path) -> dict[str, Any] | None:
    """Reads the settings in a file; None if it does not configure pytest."""
    if not path.is_file():
        return None
    empty: dict[str, Any] | None = {} if path.name in OWN_FILES else None
    try:
        if path.suffix == ".toml":
            document = tomllib.loads(path.read_text(encoding="utf-8"))
            if path.name != "pyproject.toml":
                return document.get("pytest", empty)
            table = document.get("tool", {}).get("pytest")
            return None if table is None else table.get("ini_options", table)
        parser = configparser.ConfigParser(interpolation=None, strict=False, allow_no_value=True)
        parser.read_string(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError, configparser.Error) as error:
        raise UserError(f"cannot read pytest's settings in {path}: {error}") from error
    section = "tool:pytest" if path.suffix == ".cfg" else "pytest"
    return dict(parser[section]) if section in parser else empty
