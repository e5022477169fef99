"""What a check is, where the checks are, and running one."""

from __future__ import annotations

import importlib
import inspect
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from rlcanary.checks.subject import Finding, Subject
from rlcanary.contract import Adapter, NotProvided, provided
from rlcanary.conventions import Conventions

AREAS = (
    "logprob",
    "forward",
    "entropy",
    "mask",
    "advantage",
    "loss",
    "kl",
    "importance",
    "gradient",
    "split",
    "config",
    "batch",
    "eos",
    "reward",
    "rollout",
    "rendering",
    "order",
    "filter",
    "schedule",
    "step",
    "metrics",
    "evaluation",
    "sync",
    "parity",
)

Status = Literal["pass", "fail", "not-provided", "error"]
CheckFunction = Callable[[Subject, torch.Generator], None]


@dataclass(frozen=True)
class Check:
    """A property of RL training code.

    Attributes:
        id: `area.property`.
        needs: the capabilities without which it cannot run.
        run: raises `Finding` when the property does not hold.
        applies: why it does not apply under some conventions, or None where it does.
    """

    id: str
    needs: tuple[str, ...]
    run: CheckFunction
    applies: Callable[[Conventions], str | None]

    @property
    def area(self) -> str:
        return self.id.split(".")[0]

    @property
    def summary(self) -> str:
        """The property in one line."""
        return self.explanation.splitlines()[0]

    @property
    def explanation(self) -> str:
        """The property, why breaking it is silent, and where to look."""
        return inspect.getdoc(self.run) or ""

    @property
    def paragraphs(self) -> list[str]:
        """The explanation without its line breaks, for a reader whose page has another width."""
        return [" ".join(paragraph.split()) for paragraph in self.explanation.split("\n\n")]


@dataclass(frozen=True)
class Result:
    """How one check went. `message` says what was found, or why it did not run or which cases were left out."""

    id: str
    area: str
    status: Status
    message: str
    snippet: str
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check(
    check_id: str, *, needs: tuple[str, ...], applies: Callable[[Conventions], str | None] = lambda conventions: None
) -> Callable[[CheckFunction], Check]:
    """Make a check of a function `(subject, rng)` whose docstring explains the property to the person whose code fails."""

    def decorate(function: CheckFunction) -> Check:
        return Check(check_id, needs, function, applies)

    return decorate


def all_checks() -> list[Check]:
    """Every check, by area and in the order of its module."""
    modules = [importlib.import_module(f"rlcanary.checks.{area}") for area in AREAS]
    return [value for module in modules for value in vars(module).values() if isinstance(value, Check)]


def run_check(check: Check, adapter: Adapter, spec: str, seed: int = 0) -> Result:
    """Run one check. Never raises for what the adapter does: an exception of its code is the status "error"."""
    started = time.perf_counter()
    # The tensors are tiny: more threads only wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        status, message, snippet = _run(check, adapter, spec, seed)
    finally:
        torch.set_num_threads(threads)
    return Result(check.id, check.area, status, message, snippet, time.perf_counter() - started)


def _run(check: Check, adapter: Adapter, spec: str, seed: int) -> tuple[Status, str, str]:
    missing = [name for name in check.needs if name not in provided(adapter)]
    if missing:
        return "not-provided", f"needs {', '.join(missing)}", ""
    reason = check.applies(adapter.conventions)
    if reason:
        return "not-provided", f"does not apply: {reason}", ""
    subject = Subject(adapter, spec)
    try:
        check.run(subject, torch.Generator().manual_seed(seed))
    except Finding as finding:
        return "fail", finding.message, finding.snippet
    except NotProvided as declined:
        return "not-provided", str(declined) or "declined by the adapter", ""
    except Exception as error:  # noqa: BLE001 - the adapter is foreign code; whatever it raises is the result
        frame = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{frame.name}, line {frame.lineno} of {frame.filename}"
        called = f"{subject.tally.calling} raised " if subject.tally.calling else ""
        return "error", f"{called}{type(error).__name__}: {error} ({where})", ""
    declined_cases = sorted(set(subject.tally.declined))
    if not subject.tally.made:
        return "not-provided", "; ".join(declined_cases) or "no case applies", ""
    return "pass", f"left out: {'; '.join(declined_cases)}" if declined_cases else "", ""
