"""Find the submodules that the user has initialised, by git's own rules."""

from collections.abc import Callable
from pathlib import Path

from rlcanary.system.git import Repository, git


def submodule_paths(listing: str) -> dict[str, str]:
    """Parse the output of `git config -z --list` on a .gitmodules file into the path of each submodule by name."""
    settings = dict(entry.split("\n", 1) for entry in listing.split("\0") if "\n" in entry)
    return {
        key.removeprefix("submodule.").removesuffix(".path"): path
        for key, path in settings.items()
        if key.startswith("submodule.") and key.endswith(".path")
    }


def initialised_submodules(git_dir: Path, checkout: Path) -> Callable[[str, str], bool]:
    """Return a function that tells whether a submodule is initialised, given its name and path.

    `git help submodules` defines an active submodule: by `submodule.NAME.active`, else by the patterns of
    `submodule.active` (which `git clone --recurse-submodules` sets to all), else by having a URL.

    Args:
        git_dir: The git directory with the configuration.
        checkout: The working tree in which the patterns are looked up.
    """
    entries = [entry.partition("\n") for entry in git(git_dir, "--git-dir=.", "config", "-z", "--list").split("\0")]
    settings = {key: value for key, _, value in entries}
    patterns = [value for key, _, value in entries if key == "submodule.active"]
    matched = set(git(checkout, "ls-files", "-z", "--", *patterns).split("\0")) if patterns else set()

    def is_initialised(name: str, path: str) -> bool:
        if (active := settings.get(f"submodule.{name}.active")) is not None:
            return active.lower() not in ("false", "no", "off", "0")
        return path in matched or (not patterns and f"submodule.{name}.url" in settings)

    return is_initialised


def submodules_left_out(repository: Repository, *commits: str) -> list[str]:
    """List the paths of these commits' submodules that are not initialised in the user's checkout."""
    is_initialised = initialised_submodules(repository.git_dir, repository.toplevel)
    paths: dict[str, None] = {}
    for sha in commits:
        if repository.has_file(sha, ".gitmodules"):
            listing = repository.git("config", "-z", "--list", "--blob", f"{sha}:.gitmodules")
            names = submodule_paths(listing)
            paths |= dict.fromkeys(path for name, path in names.items() if not is_initialised(name, path))
    return list(paths)
