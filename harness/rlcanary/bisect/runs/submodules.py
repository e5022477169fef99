"""Which submodules the user has initialised, as git itself sees it."""

from collections.abc import Callable
from pathlib import Path

from rlcanary.system.git import Repository, git


def submodule_paths(listing: str) -> dict[str, str]:
    """The path of each submodule by its name, from what `git config -z --list` prints of a .gitmodules file."""
    settings = dict(entry.split("\n", 1) for entry in listing.split("\0") if "\n" in entry)
    return {
        key.removeprefix("submodule.").removesuffix(".path"): path
        for key, path in settings.items()
        if key.startswith("submodule.") and key.endswith(".path")
    }


def initialised_submodules(git_dir: Path, checkout: Path) -> Callable[[str, str], bool]:
    """A function that says of a submodule's name and path whether the repository of `git_dir` has initialised it.

    As `git help submodules` defines an active submodule: by `submodule.NAME.active`, else by the patterns of
    `submodule.active` (which `git clone --recurse-submodules` sets to all), else by having an URL. `checkout`: the working
    tree in which the patterns are looked up.
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
    """The paths of the submodules of these commits that the user's checkout has not initialised."""
    is_initialised = initialised_submodules(repository.git_dir, repository.toplevel)
    paths: dict[str, None] = {}
    for sha in commits:
        if repository.has_file(sha, ".gitmodules"):
            listing = repository.git("config", "-z", "--list", "--blob", f"{sha}:.gitmodules")
            names = submodule_paths(listing)
            paths |= dict.fromkeys(path for name, path in names.items() if not is_initialised(name, path))
    return list(paths)
