"""Compute a key per commit from its dependencies: commits with the same ones can share an environment."""

import hashlib
import json
import platform
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from rlcanary.system.git import Commit, GitError, Repository

LOCK_FILES = ("uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock")
DEPENDENCY_FILES = re.compile(
    r"pyproject\.toml|setup\.(py|cfg)|\.python-version|Pipfile|environment\.ya?ml|pylock(\..+)?\.toml"
    rf"|[\w-]*(requirements|constraints)[\w.-]*\.(txt|in)|{'|'.join(map(re.escape, LOCK_FILES))}"
)
PROJECT_TABLES = ("dependencies", "optional-dependencies", "requires-python")
TOOL_TABLES = ("uv", "poetry", "pdm")
CONTAINER_VARIABLES = ("CONTAINER", "APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")
GITLINK = "160000"


def dependency_keys(
    repository: Repository, good: Commit, commits: Sequence[Commit], circumstances: Mapping[str, str]
) -> dict[str, str]:
    """Compute a dependency key for `good` and each commit. Equal keys mean equal dependencies.

    The key covers the lock files, the requirement files, the dependencies in pyproject.toml, the contents of packages
    of the repository that these name by path, the commits of the submodules, and `circumstances`.

    Args:
        repository: The user's repository.
        good: The parent of the first commit.
        commits: Oldest first, each the child of the one before.
        circumstances: The result of `circumstances()`, with the builder's name.
    """
    local = [*_local_packages(repository, good.sha), *_local_packages(repository, commits[-1].sha)]
    state = _state(repository, good.sha, local)
    digests: dict[str, str] = {}

    def key() -> str:
        contents = {path: _digest(repository, path, blob, digests) for path, blob in state.items()}
        text = json.dumps([sorted(contents.items()), sorted(circumstances.items())])
        return hashlib.sha256(text.encode()).hexdigest()[:24]

    keys = {good.sha: key()}
    changes = _changes(repository, good.sha, commits[-1].sha)
    for commit in commits:
        changed = False
        for mode, path, blob in changes.get(commit.sha, ()):
            if path in state or _matters(mode, path, local, repository):
                changed = True
                if mode == "000000":
                    state.pop(path, None)
                else:
                    state[path] = blob
        keys[commit.sha] = key() if changed else next(reversed(keys.values()))
    return keys


def circumstances(python_version: str, environment: Mapping[str, str]) -> dict[str, str]:
    """Collect the facts besides the commit that an environment depends on: Python, machine, system, container."""
    found = {name: environment[name] for name in CONTAINER_VARIABLES if environment.get(name)}
    return found | {"python": python_version, "machine": platform.machine(), "system": platform.system()}


def _state(repository: Repository, sha: str, local: Sequence[str]) -> dict[str, str]:
    entries = repository.git("ls-tree", "-r", "-z", "--full-tree", sha).split("\0")
    state = {}
    for entry in filter(None, entries):
        facts, path = entry.split("\t", 1)
        mode, _, blob = facts.split()
        if _matters(mode, path, local, repository):
            state[path] = blob
    return state


def _changes(repository: Repository, good: str, bad: str) -> dict[str, list[tuple[str, str, str]]]:
    """List the new mode, path and object of every file that a commit changed against its first parent."""
    text = repository.git(
        *("log", "--first-parent", "--diff-merges=first-parent", "--raw", "--no-abbrev", "--no-renames", "-z"),
        *("--format=%x01%H", f"{good}..{bad}"),
    )
    changes: dict[str, list[tuple[str, str, str]]] = {}
    for block in text.split("\x01")[1:]:
        sha, _, rest = block.partition("\0")
        fields = rest.strip("\n").split("\0")
        changes[sha.strip()] = [
            (facts.split()[1], path, facts.split()[3])
            for facts, path in zip(fields[0::2], fields[1::2], strict=False)
            if facts.strip().startswith(":")
        ]
    return changes


def _matters(mode: str, path: str, local: Sequence[str], repository: Repository) -> bool:
    if mode == GITLINK:
        return True
    place = PurePosixPath(path)
    folders = {".", "requirements", repository.directory.as_posix()}
    if place.parent.as_posix() in folders and DEPENDENCY_FILES.fullmatch(place.name):
        return True
    return any(place.is_relative_to(folder) for folder in local)


def _local_packages(repository: Repository, sha: str) -> list[str]:
    """List the folders of the repository that its dependencies name by path, except the repository itself."""
    sources = _table(_table(_tables(_read(repository, f"{sha}:pyproject.toml")).get("uv")).get("sources"))
    paths = _texts([_table(source).get("path") for source in sources.values()])
    lines = (_read(repository, f"{sha}:requirements.txt") or "").splitlines()
    paths += [match[1] for line in lines if (match := re.match(r"\s*(?:-e\s+|--editable[ =])?(\./[\w./-]+)", line))]
    inside = [PurePosixPath(path).as_posix() for path in paths if not path.startswith(("/", ".."))]
    return [path for path in inside if path != "."]


def _digest(repository: Repository, path: str, blob: str, known: dict[str, str]) -> str:
    """Return the digest of a file. For a pyproject.toml, only its dependency tables count, not its version number."""
    if PurePosixPath(path).name != "pyproject.toml":
        return blob
    if blob not in known:
        text = repository.git("cat-file", "blob", blob)
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError:
            known[blob] = blob
        else:
            project, tool = _table(document.get("project")), _table(document.get("tool"))
            kept = {
                "build-system": document.get("build-system"),
                "dependency-groups": document.get("dependency-groups"),
                "project": {name: project.get(name) for name in PROJECT_TABLES},
                "tool": {name: tool.get(name) for name in TOOL_TABLES},
            }
            known[blob] = hashlib.sha256(json.dumps(kept, sort_keys=True, default=str).encode()).hexdigest()
    return known[blob]


def _tables(text: str | None) -> dict[str, Any]:
    try:
        return _table(tomllib.loads(text or "").get("tool"))
    except tomllib.TOMLDecodeError:
        return {}  # Local packages are not known then; the blob still counts in the key.


def _read(repository: Repository, name: str) -> str | None:
    try:
        return repository.git("cat-file", "blob", name)
    except GitError:
        return None


def development_requirements(pyproject: Path) -> list[str]:
    """List the dependencies in a pyproject.toml, with those of its extras and groups `dev`, `test` and `tests`.

    Raises:
        ValueError: The file is not TOML in UTF-8.
    """
    if not pyproject.is_file():
        return []
    document = tomllib.loads(pyproject.read_text(encoding="utf-8"))
    project = _table(document.get("project"))
    found = _texts(project.get("dependencies"))
    for tables in (_table(project.get("optional-dependencies")), _table(document.get("dependency-groups"))):
        for name in ("dev", "test", "tests"):
            found += _texts(tables.get(name))
    return list(dict.fromkeys(found))


def source_folders(checkout: Path) -> list[Path]:
    """List the folders from which a checkout's own packages are imported."""
    pyproject = checkout / "pyproject.toml"
    tools = _tables(pyproject.read_text(encoding="utf-8", errors="replace")) if pyproject.is_file() else {}
    setuptools = _table(tools.get("setuptools"))
    where = _texts(_table(_table(setuptools.get("packages")).get("find")).get("where"))
    declared = [*where, *_texts(list(_table(setuptools.get("package-dir")).values()))]
    found = [checkout / folder for folder in ("src", *declared)]
    return [folder for folder in dict.fromkeys([*found, checkout]) if folder.is_dir()]


def _table(value: object) -> dict[str, Any]:
    """Return a table of a file that may hold anything. Empty where something else stands in its place."""
    return value if isinstance(value, dict) else {}


def _texts(entries: object) -> list[str]:
    return [entry for entry in entries if isinstance(entry, str)] if isinstance(entries, list) else []
