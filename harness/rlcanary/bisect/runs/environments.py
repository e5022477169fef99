"""The environment cache: commits with the same dependencies share one environment."""

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rlcanary.bisect.record.journal import now
from rlcanary.bisect.runs.dependencies import circumstances, dependency_keys, development_requirements, source_folders
from rlcanary.bisect.runs.worktree import Untestable
from rlcanary.errors import UserError
from rlcanary.system.files import write_whole
from rlcanary.system.git import Commit, Repository, environment_without_repository
from rlcanary.system.journal import locked
from rlcanary.system.sessions import Call, Stop, run

FOLDER_VARIABLE = "RLCANARY_ENV"
REQUIREMENT_FILES = ("requirements.txt", "requirements-dev.txt", "dev-requirements.txt", "requirements-test.txt")
REPLACED_VARIABLES = ("PYTHONHOME", "CONDA_PREFIX", "VIRTUAL_ENV_PROMPT")


class Builder(Protocol):
    """A builder fills the folder of an environment. The programs end up in its bin/."""

    @property
    def name(self) -> str:
        """A name that identifies the build: two builders of the same name build the same from the same commit."""
        ...

    def commands(self, checkout: Path, folder: Path) -> list[list[str]]:
        """Return the commands to run in `checkout`, in order.

        Raises:
            Untestable: The commit does not say what to build.
        """
        ...

    def variables(self, folder: Path) -> Mapping[str, str]:
        """Return the environment variables that the commands need."""
        ...


@dataclass(frozen=True)
class Uv:
    """Builds the environment of uv.lock with uv, without the project itself, which is imported from each worktree."""

    name: str = "uv"

    def commands(self, checkout: Path, folder: Path) -> list[list[str]]:
        return [["uv", "sync", "--quiet", "--frozen", "--no-editable", "--no-install-workspace"]]

    def variables(self, folder: Path) -> Mapping[str, str]:
        return {"UV_PROJECT_ENVIRONMENT": str(folder)}


@dataclass(frozen=True)
class Pip:
    """Builds a virtual environment from the requirement files of the root and the dependencies in pyproject.toml."""

    python: str
    name: str = "pip"

    def commands(self, checkout: Path, folder: Path) -> list[list[str]]:
        wanted = [word for file in REQUIREMENT_FILES if (checkout / file).is_file() for word in ("-r", file)]
        try:
            wanted += development_requirements(checkout / "pyproject.toml")
        except ValueError as error:
            raise Untestable(f"pyproject.toml cannot be read: {error}") from None
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        return [[self.python, "-m", "venv", str(folder)], *([[*pip, *wanted]] if wanted else [])]

    def variables(self, folder: Path) -> Mapping[str, str]:
        return {}


@dataclass(frozen=True)
class Shell:
    """Runs the user's command, which fills the folder named by RLCANARY_ENV."""

    command: str

    @property
    def name(self) -> str:
        return self.command

    def commands(self, checkout: Path, folder: Path) -> list[list[str]]:
        return [["sh", "-c", self.command]]

    def variables(self, folder: Path) -> Mapping[str, str]:
        return {FOLDER_VARIABLE: str(folder), "UV_PROJECT_ENVIRONMENT": str(folder)}


def choose_builder(asked: str, repository: Repository, bad: str) -> Builder | None:
    """Choose how to build environments.

    With auto: uv if BAD has a uv.lock, pip if it has requirement files, else none. The dependencies in a pyproject.toml
    alone are seldom all that a command needs.

    Args:
        asked: auto, uv, pip, none or a shell command.
        repository: The user's repository.
        bad: The SHA of BAD.

    Raises:
        UserError: The required tool is not installed, or BAD has no uv.lock.
    """
    if asked == "none":
        return None
    if asked == "auto":
        if repository.has_file(bad, "uv.lock"):
            return Uv() if shutil.which("uv") else None
        has = any(repository.has_file(bad, file) for file in REQUIREMENT_FILES)
        return Pip(_python()) if has else None
    if asked == "uv":
        if shutil.which("uv") is None:
            raise UserError("--env uv: uv is not installed: `pip install uv`, or choose --env pip or none")
        if not repository.has_file(bad, "uv.lock"):
            raise UserError(
                f"--env uv: BAD {bad[:10]} has no uv.lock: choose --env pip, or run `uv lock` and commit it"
            )
        return Uv()
    return Pip(_python()) if asked == "pip" else Shell(asked)


def environment_keys(
    builder: Builder | None, repository: Repository, good: Commit, commits: Sequence[Commit]
) -> dict[str, str]:
    """Compute the environment key of each commit.

    Raises:
        UserError: No Python is on PATH.
    """
    version = subprocess.run([_python(), "-VV"], capture_output=True, text=True, check=False).stdout.strip()
    around = circumstances(version, os.environ) | {"builder": "" if builder is None else builder.name}
    return dependency_keys(repository, good, commits, around)


def _python() -> str:
    python = shutil.which("python3") or shutil.which("python")
    if python is None:
        raise UserError("there is no Python on PATH to build environments with: install one, or choose --env none")
    return python


@dataclass(frozen=True)
class Environment:
    """A built environment. `variables` lets a process use it on a checkout."""

    folder: Path

    def variables(self, inherited: Mapping[str, str], checkout: Path) -> dict[str, str]:
        kept = {name: value for name, value in inherited.items() if name not in REPLACED_VARIABLES}
        paths = [str(folder) for folder in source_folders(checkout)]
        return kept | {
            "PATH": os.pathsep.join([str(self.folder / "bin"), kept.get("PATH", os.defpath)]),
            "PYTHONPATH": os.pathsep.join(filter(None, [*paths, kept.get("PYTHONPATH")])),
            "UV_NO_SYNC": "1",
            "UV_PROJECT_ENVIRONMENT": str(self.folder),
            "VIRTUAL_ENV": str(self.folder),
            FOLDER_VARIABLE: str(self.folder),
        }


class EnvironmentCache:
    """Builds missing environments. Safe for use by several threads, and by several processes on the same folder.

    Each environment is built in a folder with a unique name, because most cannot be moved. A marker file, written last,
    names the folder of a key. A folder without a marker is half-built and is never used.
    """

    def __init__(self, folder: Path, builder: Builder, keys: Mapping[str, str]) -> None:
        """Set up the cache.

        Args:
            folder: The cache folder, shared by all searches.
            builder: Builds an environment.
            keys: The environment key of each commit.
        """
        self._folder = folder
        self._builder = builder
        self._keys = dict(keys)
        self._failed: dict[str, str] = {}
        self.builds = 0

    @property
    def builder(self) -> str:
        return self._builder.name

    def key(self, sha: str) -> str:
        return self._keys[sha]

    def built(self) -> set[str]:
        """Return the commits whose environment is built."""
        ready = {key for key in set(self._keys.values()) if self._find(key) is not None}
        return {sha for sha, key in self._keys.items() if key in ready}

    def add(self, keys: Mapping[str, str]) -> None:
        """Add the keys of more commits, such as those inside a merge."""
        self._keys |= keys

    def get(
        self,
        sha: str,
        checkout: Path,
        output: Path,
        stop: Stop,
        environment: Mapping[str, str],
        mark: Mapping[str, str],
    ) -> Environment:
        """Return the environment of a commit, and build it in its `checkout` if it is missing.

        The output of the build goes to `output`.

        Raises:
            Untestable: The build failed.
            Stopped: The search was asked to stop.
        """
        key = self._keys[sha]
        self._folder.mkdir(parents=True, exist_ok=True)
        with locked(self._folder / f"{key}.lock", stop.check):
            if (found := self._find(key)) is not None:
                return found
            if key in self._failed:
                raise Untestable(self._failed[key])
            for half_built in self._folder.glob(f"{key}-*"):
                shutil.rmtree(half_built)
            folder = self._folder / f"{key}-{secrets.token_hex(4)}"
            folder.mkdir()
            for command in self._builder.commands(checkout, folder):
                variables = {**environment, **self._builder.variables(folder)}
                ending = run(Call(command, checkout, variables, mark, output), stop)
                if ending.code != 0:
                    lines = output.read_text(encoding="utf-8", errors="replace").split("\n")
                    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
                    self._failed[key] = (
                        f"the environment could not be built (exit {ending.code}: {last[:200]}); see {output}"
                    )
                    raise Untestable(self._failed[key])
            self.builds += 1
            marker = {"folder": folder.name, "builder": self._builder.name, "commit": sha, "time": now()}
            write_whole(self._folder / f"{key}.json", json.dumps(marker) + "\n")
            return Environment(folder)

    def _find(self, key: str) -> Environment | None:
        marker = self._folder / f"{key}.json"
        if not marker.is_file():
            return None
        folder = self._folder / json.loads(marker.read_text(encoding="utf-8"))["folder"]
        return Environment(folder) if folder.is_dir() else None


def default_cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rlcanary" / "environments"


def building_variables() -> dict[str, str]:
    """Return the caller's environment variables without its active virtual environment, which builders would reuse."""
    return {name: value for name, value in environment_without_repository().items() if name != "VIRTUAL_ENV"}
