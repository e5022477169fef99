"""Decide which files `rlcanary init` writes into a repository. A file that is there is never written over."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import distribution
from pathlib import Path

from rlcanary.scaffold.functions import Function
from rlcanary.scaffold.releases import is_local, origin_of
from rlcanary.scaffold.survey import Survey, installed_release
from rlcanary.scaffold.templates import (
    ADAPTERS,
    DEFAULTS,
    HOOK,
    PRE_COMMIT,
    PYTEST_SETTINGS,
    WORKFLOW,
    first_adapter,
    framework_adapter,
)
from rlcanary.system.files import write_whole


@dataclass(frozen=True)
class Planned:
    """A file of the plan.

    Attributes:
        path: the file, relative to the repository.
        text: what to write, or to append; None to leave the file as it is.
        note: what it is for; or, for a file that is left, what to add to it by hand.
        appends: whether the text goes behind what the file has.
    """

    path: str
    text: str | None
    note: str
    appends: bool = False

    def write(self, root: Path) -> None:
        """Write or append the text.

        Raises:
            OSError: the file could not be written. An existing file is unchanged.
        """
        if self.text is None:
            return
        path = root / self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        there = path.read_bytes().decode() if self.appends else ""
        added = self.text.replace("\n", "\r\n") if "\r\n" in there else self.text
        write_whole(Path(os.path.realpath(path)), there + added)  # a link stays one


@dataclass(frozen=True)
class Plan:
    """The files of a repository that is checked.

    Attributes:
        found: the survey.
        framework: the framework whose adapter is the start, None for a first adapter of the codebase's own.
        only: the checks to run, as `rlcanary check --only` takes them; all if empty.
        functions: the repository's own functions that a first adapter may call, by capability.
    """

    found: Survey
    framework: str | None
    only: tuple[str, ...] = ()
    functions: Mapping[str, Sequence[Function]] = field(default_factory=dict)

    @property
    def adapter(self) -> str:
        """The adapter's file, relative to the repository."""
        return f"{self.found.tests}/canary.py"

    @property
    def expected(self) -> str:
        """The file of known failures, relative to the repository."""
        return f"{self.found.tests}/canary_expected.txt"

    @property
    def releases(self) -> str:
        """The file of the releases with which the known failures were found, relative to the repository."""
        return f"{self.found.tests}/canary_requirements.txt"

    @property
    def runs_checks(self) -> bool:
        """Whether the known failures, and with them the releases, are still to be written."""
        return not (self.found.root / self.expected).exists()

    @property
    def arguments(self) -> str:
        """The adapter and the choice of checks, as a command line."""
        return shlex.join([self.adapter, *(part for prefix in self.only for part in ("--only", prefix))])

    @property
    def command(self) -> str:
        """The command that CI runs."""
        return f"rlcanary check {self.arguments} --expected {self.expected}"

    def files(self) -> list[Planned]:
        """List the files besides that of known failures: the adapter, then those that name the known failures."""
        return [self._adapter_file(), self._pytest_settings(), self._workflow(), self._hook()]

    def _adapter_file(self) -> Planned:
        if self.framework is None:
            text = first_adapter("Canary", self.found.name, self.functions)
            note = "textbook code: put a call of your own function in place of each body"
        else:
            text = framework_adapter(self.framework, self.found.name)
            note = f"{ADAPTERS[self.framework].title}'s own code; its comments say where your settings and functions go"
        return self._new(self.adapter, text, note, "")

    def _pytest_settings(self) -> Planned:
        file = self.found.pytest_file
        if file is not None:
            name = os.path.relpath(file, self.found.root)
            path = (self.found.root / self.expected).relative_to(file.parent).as_posix()
            value = f'["{path}"]' if file.suffix == ".toml" else path
            missing = "canary_expected" not in file.read_text(encoding="utf-8")
            return Planned(name, None, f"add to pytest's settings: canary_expected = {value}" if missing else "")
        note = f"the known failures of pytest --canary={self.adapter}"
        is_there = (self.found.root / "pyproject.toml").is_file()
        text = PYTEST_SETTINGS.format(expected=self.expected)
        return Planned("pyproject.toml", text if is_there else text.lstrip(), note, appends=is_there)

    def _workflow(self) -> Planned:
        inside = self.found.inside
        text = WORKFLOW.format(
            defaults=DEFAULTS.format(folder=json.dumps(inside)) if inside else "",
            python=f"{sys.version_info.major}.{sys.version_info.minor}",
            install=" ".join(self._requirements()),
            command=self.command,
        )
        name = "-".join(filter(None, ["rlcanary", *inside.split("/")]))
        path = f"{self._to_repository}.github/workflows/{name}.yml"
        return self._new(path, text, "runs the checks on each pull request, on a CPU", "")

    def _hook(self) -> Planned:
        entry, inside = f"{self.command} --fail-on update", self.found.inside
        if inside:
            entry = shlex.join(["sh", "-c", f"cd {shlex.quote(inside)} && {entry}"])
        files = f"        files: {json.dumps(f'^{re.escape(inside)}/')}\n" if inside else ""
        hook = HOOK.format(entry=json.dumps(entry), files=files)
        by_hand = f"add to its repos:\n{PRE_COMMIT.format(hook=hook).partition(chr(10))[2]}".rstrip()
        note = "runs them before each push, and stops it for a wrong update"
        return self._new(f"{self._to_repository}.pre-commit-config.yaml", PRE_COMMIT.format(hook=hook), note, by_hand)

    @property
    def _to_repository(self) -> str:
        """The way up to the root of the git repository; GitHub and pre-commit read no file of theirs elsewhere."""
        return "../" * len(self.found.inside.split("/")) if self.found.inside else ""

    def _new(self, path: str, text: str, note: str, by_hand: str) -> Planned:
        file = self.found.root / path
        if not file.exists():
            return Planned(path, text, note)
        has_it = "rlcanary" in file.read_text(encoding="utf-8", errors="replace")
        return Planned(path, None, "" if has_it else by_hand)

    def _requirements(self) -> list[str]:
        """List what CI installs: the repository, the framework where no file names it, the releases, and rlcanary.

        Of a project without a build system, which pip often cannot build, these are its dependencies.
        """
        wanted = ["-e ."] if self.found.is_package else [shlex.quote(each) for each in self.found.dependencies]
        wanted += [f"-r {self.found.requirements}"] if self.found.requirements else []
        if self.framework is not None and self.framework not in self.found.named:
            release = installed_release(self.framework)
            wanted.append(f"{self.framework}=={release}" if release else self.framework)
        if self.runs_checks or (self.found.root / self.releases).exists():
            wanted.append(f"-r {self.releases}")
        return [*wanted, shlex.quote(own_requirement())]


def own_requirement() -> str:
    """Return the requirement that installs this rlcanary elsewhere: the commit that it was installed from, else its name."""
    origin = origin_of(distribution("rlcanary"))
    if is_local(origin) or "vcs_info" not in origin:
        return "rlcanary[torch]"
    source = origin["vcs_info"]
    return f"rlcanary[torch] @ {source['vcs']}+{origin['url']}@{source['commit_id']}"


def local_source() -> str:
    """Say what on this machine rlcanary was installed from, which no other machine can reach; empty for anything else."""
    origin = origin_of(distribution("rlcanary"))
    if not is_local(origin):
        return ""
    kinds = {"vcs_info": "a git repository", "dir_info": "a folder", "archive_info": "a file"}
    return next(told for key, told in kinds.items() if key in origin)
