"""The options of `rlcanary bisect`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

OF_ONE_START = ("command", "good", "bad", "good_when_added", "replay", "fresh", "budget_runs", "budget_minutes")
"""Fields that a command which resumes the search does not repeat as options."""
NOT_OF_A_RUN = (*OF_ONE_START, "save_dir", "jobs", "confidence", "keep_worktree", "first_parent")
"""Fields that do not change the outcome of a run."""


@dataclass(frozen=True)
class Request:
    """The options of the command line, by name."""

    command: tuple[str, ...]
    good: str | None = None
    bad: str | None = None
    good_when_added: str | None = None
    timeout: float | None = None
    skip_good_check: bool = False
    save_dir: Path | None = None
    replay: Path | None = None
    pin: tuple[str, ...] = ()
    no_pin: bool = False
    keep_worktree: bool = False
    fresh: bool = False
    jobs: int = 1
    confidence: float = 0.95
    deterministic: bool = False
    first_parent: bool = False
    in_place: bool = False
    on_timeout: str | None = None
    retries: int = 2
    budget_runs: int | None = None
    budget_minutes: float | None = None
    env: str = "auto"
    env_dir: Path | None = None
    metric: str | None = None
    worse: str | None = None
    executor: str = "local"
    no_submodules: bool = False

    def document(self) -> dict[str, Any]:
        """Return the request as JSON."""
        return {name: str(value) if isinstance(value, Path) else value for name, value in asdict(self).items()}

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Read a request from JSON. Options that it lacks have their defaults."""
        values = {field.name: document[field.name] for field in fields(cls) if field.name in document}
        paths = {name: Path(values[name]) for name in ("save_dir", "replay", "env_dir") if values.get(name)}
        return cls(**{**values, **paths, "command": tuple(values["command"]), "pin": tuple(values.get("pin", ()))})

    def is_same_test(self, other: "Request") -> bool:
        """Whether both requests get the same outcomes from the same runs."""
        return all(getattr(self, f.name) == getattr(other, f.name) for f in fields(self) if f.name not in NOT_OF_A_RUN)

    def words(self) -> list[str]:
        """Return the command-line words that repeat the options in another start of the search."""
        words: list[str] = []
        for field in fields(self):
            value, option = getattr(self, field.name), f"--{field.name.replace('_', '-')}"
            if field.name in OF_ONE_START or value == field.default:
                continue
            if value is True:
                words.append(option)
            for one in value if isinstance(value, tuple) else () if value is True else (value,):
                words += [option, str(one).removesuffix(".0") if isinstance(one, float) else str(one)]
        return words
