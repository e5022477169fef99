"""What a check is, where the checks are, and running one."""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

from rlcanary.checks.subject import Subject, Tally
from rlcanary.contract import Adapter, provided
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

Status = Literal["pass", "fail", "not-compared", "not-provided", "error"]
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
    """How one check went.

    A check that called the code and compared nothing is "not-compared", never "pass".

    Attributes:
        id: the check's.
        area: the check's.
        status: how it ended.
        message: the counterexample or the error and which other cases failed; else why the check or a case did not run.
        snippet: Python that reproduces the counterexample.
        seconds: how long it took.
    """

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
    tally = subject.tally
    with tally.case(""):
        check.run(subject, torch.Generator().manual_seed(seed))
    notes = _notes(tally)
    if tally.findings:
        first = tally.findings[0]
        return "fail", "\n".join([first.message, *notes]), first.snippet
    if tally.raised:
        return "error", "\n".join([tally.raised[0].message, *notes]), ""
    if tally.compared:
        return "pass", "\n".join(notes), ""
    reasons = "; ".join(dict.fromkeys(tally.empty + tally.declined))
    if tally.empty or (tally.made and not tally.declined):
        return "not-compared", reasons or "what the calls returned leaves nothing to compare", ""
    return "not-provided", reasons or "no case applies", ""


def _notes(tally: Tally) -> list[str]:
    """A line for the cases that failed behind the first, for those that raised, and for those that were left out."""
    failed = [finding.case for finding in tally.findings[1:]]
    raised = [f"{each.case} ({each.kind})" for each in (tally.raised if tally.findings else tally.raised[1:])]
    left_out = sorted({*tally.declined, *tally.empty})
    lines = [("also fails: ", failed), ("also raised: ", raised), ("left out: ", left_out)]
    return [title + "; ".join(filter(None, parts)) for title, parts in lines if parts]
