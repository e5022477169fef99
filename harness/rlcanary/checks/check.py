"""A check, its result, and running one."""

from __future__ import annotations

import copy
import inspect
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import numpy
import torch

from rlcanary.checks.asserts import tallied
from rlcanary.checks.case import Case, Model
from rlcanary.checks.devices import cuda_generators
from rlcanary.checks.examples import Draw, run_examples
from rlcanary.checks.observed import Observed
from rlcanary.checks.programs.program import program
from rlcanary.checks.severity import Severity, severity_of, worst
from rlcanary.checks.tally import Found, Tally
from rlcanary.checks.time_limit import TookTooLong, time_limit
from rlcanary.checks.worlds.models import models_for
from rlcanary.contract.adapter import Adapter, provided
from rlcanary.contract.conventions import Conventions

SHOWN = 12
"""How many findings a message lists behind the first."""


Status = Literal["pass", "fail", "not-compared", "not-provided", "adapter-error", "error"]


Body = Callable[..., object]
Cases = Callable[..., Iterable[Case]]
Alternatives = Callable[[Conventions], Iterable[dict[str, Any]]]


def one_case() -> Iterable[Case]:
    """The cases of a check whose body needs no input."""
    yield Case()


@dataclass(frozen=True)
class Check:
    """A property of RL training code.

    Attributes:
        id: `area.property`.
        needs: the capabilities without which it cannot run.
        run: the body, a function of the adapter and the inputs of one case, which asserts the property
            (`rlcanary.checks.asserts`).
        cases: makes the cases, smallest first. It takes those it needs of `conventions` (the adapter's) and `rng` (a seeded
            generator).
        severity: the effect of breaking it.
        draws: draws one more case, of those that `--examples` asks for; None if the fixed cases are all there is.
        applies: returns the reason why it does not apply under some conventions, or None if it applies.
        alternatives: changed conventions that may explain a failure. The report names those under which every case passes.
        explains: the body that an alternative has to pass, if it demands more than `run`.
        worlds: the models besides the Llama on which a body with an input `model` runs by default
            (`rlcanary.checks.worlds.models`).
    """

    id: str
    needs: tuple[str, ...]
    run: Body
    cases: Cases
    applies: Callable[[Conventions], str | None]
    alternatives: Alternatives
    explains: Body | None = None
    draws: Draw | None = None
    worlds: tuple[str, ...] = ()
    severity: Severity = "update"

    @property
    def area(self) -> str:
        return self.id.split(".")[0]

    @property
    def takes_a_model(self) -> bool:
        """Whether the body has an input `model`, which the run fills."""
        return "model" in inspect.signature(self.run).parameters

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
    """The outcome of one check.

    A check that called the code and compared nothing is "not-compared", never "pass"; one in which a bundled adapter did not
    fit the installed release is an "adapter-error", unless another case failed.

    Attributes:
        id: the check's id.
        area: the check's area.
        status: the outcome in one word.
        message: the counterexample or the error, and the other cases that failed; else the reason why the check or a
            case did not run.
        snippet: Python that reproduces the counterexample.
        seconds: the time it took.
        findings: all findings, in the order of the cases.
        judged: the case and the quantity of each comparison.
        missing: the capabilities that the check needs and the adapter does not provide.
    """

    id: str
    area: str
    status: Status
    message: str
    snippet: str
    seconds: float
    findings: tuple[Found, ...] = ()
    judged: frozenset[tuple[str, str]] = field(default=frozenset(), compare=False, repr=False)
    missing: frozenset[str] = frozenset()

    @property
    def severity(self) -> Severity | None:
        """The worst severity of its findings, None if it has none."""
        return worst(found.severity for found in self.findings)


def other_values(conventions: Conventions, choices: Mapping[str, Iterable[Any]]) -> list[dict[str, Any]]:
    """List the changes of one field each to another of these values of it."""
    return [{name: each} for name, values in choices.items() for each in values if each != getattr(conventions, name)]


def check(
    check_id: str,
    *,
    needs: tuple[str, ...],
    cases: Cases = one_case,
    applies: Callable[[Conventions], str | None] = lambda _: None,
    alternatives: Alternatives = lambda _: (),
    explains: Body | None = None,
    draws: Draw | None = None,
    worlds: tuple[str, ...] = (),
    severity: Severity | None = None,
) -> Callable[[Body], Check]:
    """Decorate the body of a check. Its docstring explains the property to a user whose code fails it."""
    effect = severity or ("dashboard" if check_id.startswith("metrics.") else "update")

    def decorate(body: Body) -> Check:
        return Check(check_id, needs, body, cases, applies, alternatives, explains, draws, worlds, effect)

    return decorate


def run_check(
    check: Check,
    adapter: Adapter,
    spec: str,
    seed: int = 0,
    timeout: float = 0,
    examples: int = 0,
    worlds: tuple[str, ...] = (),
    until: Callable[[Found], bool] | None = None,
) -> Result:
    """Run one check. An exception in the adapter's code becomes the status "error".

    Args:
        check: the check.
        adapter: the adapter under test.
        spec: the adapter's name for `load_adapter`, for snippets.
        seed: the seed of its random cases.
        timeout: its time limit in seconds, 0 for none; a check that takes longer has the status "error". The search for
            declarations that explain a failure has the same limit.
        examples: number of further cases to draw, if the fixed ones hold.
        worlds: the models on which it runs besides its own.
        until: tells whether a finding answers the caller's question: its case is the last then, and no declaration is
            looked for that explains it.
    """
    check = replace(check, worlds=(*check.worlds, *worlds))
    started, tally = time.perf_counter(), Tally()
    with _reproducible(seed):
        status, message, snippet = _run(check, adapter, spec, seed, timeout, examples, tally, until)
    seconds, judged = time.perf_counter() - started, frozenset(tally.judged)
    found = tuple(
        replace(each, severity=severity_of(each.fingerprint.quantity, check.severity)) for each in tally.found
    )
    missing = frozenset(check.needs) - provided(adapter)
    return Result(check.id, check.area, status, message, snippet, seconds, found, judged, missing)


def judge(check: Check, adapter: Adapter, declared: Conventions, seed: int, tally: Tally) -> None:
    """Run the cases of a check on an adapter as if it had declared these conventions, and record them in the tally."""
    with _reproducible(seed):
        _run_cases(check, adapter, declared, "", seed, tally)


@contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Seed the global generators, so that code which samples without a seed gives the same findings again."""
    python, numbers = random.getstate(), numpy.random.get_state()
    # The tensors are tiny: more threads only wait for each other.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.random.fork_rng(devices=cuda_generators()):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(numbers)
            torch.set_num_threads(threads)


def _run(
    check: Check,
    adapter: Adapter,
    spec: str,
    seed: int,
    timeout: float,
    examples: int,
    tally: Tally,
    until: Callable[[Found], bool] | None,
) -> tuple[Status, str, str]:
    missing = [name for name in check.needs if name not in provided(adapter)]
    if missing:
        return "not-provided", f"needs {', '.join(missing)}", ""
    reason = check.applies(adapter.conventions)
    if reason:
        return "not-provided", f"does not apply: {reason}", ""
    try:
        with time_limit(timeout):
            _run_cases(check, adapter, adapter.conventions, spec, seed, tally, examples, until)
    except TookTooLong:
        tally.stopped("takes too long", f"took longer than {timeout:g} s: {tally.calling or 'before its first call'}")
    misfits = [f"adapter error: {each}" for each in dict.fromkeys(tally.misfits)]
    left_out = sorted({*tally.declined, *tally.empty, *misfits})
    notes = [f"left out: {'; '.join(left_out)}"] if left_out else []
    if tally.found:
        status, message, snippet = outcome(tally.found)
        told = [] if until else _explanations(check, adapter, spec, seed, tally, timeout, examples)
        hints = [f"{each} gives this in every case: if you mean that, declare it" for each in told]
        return status, "\n".join([message, *hints, *notes]), snippet
    if tally.misfits:
        return "adapter-error", "\n".join(dict.fromkeys(tally.misfits)), ""
    if tally.compared:
        return "pass", "\n".join(notes), ""
    reasons = "; ".join(dict.fromkeys(tally.empty + tally.declined))
    if tally.empty or (tally.made and not tally.declined):
        return "not-compared", reasons or "the code returned nothing that this check compares", ""
    return "not-provided", reasons or "no case applies", ""


def _run_cases(
    check: Check,
    adapter: Adapter,
    declared: Conventions,
    spec: str,
    seed: int,
    tally: Tally,
    examples: int = 0,
    until: Callable[[Found], bool] | None = None,
) -> None:
    """Run the body on each case, or until one has such a finding, as if the adapter had declared these conventions."""
    rng = torch.Generator().manual_seed(seed)

    def written(case: Case) -> str:
        return program(check.run, case, spec, is_elsewhere=tally.is_elsewhere)

    def run(case: Case) -> None:
        # What is declared already needs no setting, which the adapter may not have.
        case.changes = {name: value for name, value in case.changes.items() if getattr(declared, name) != value}
        for each in _on_each_model(case, check, adapter, spec):
            with tally.case(each.label, partial(written, each), each.world, each.inputs), tallied(tally):
                inputs = {name: _fresh(value) for name, value in each.inputs.items()}
                check.run(observed.configured(**each.changes), **inputs)

    with tally.case(""):
        observed = Observed(adapter, tally, declared)
        given = {"conventions": declared, "rng": rng}
        for case in check.cases(**{name: given[name] for name in inspect.signature(check.cases).parameters}):
            run(case)
            if until and any(map(until, tally.found)):
                return
        if check.draws is not None and not tally.found:
            run_examples(run, check.draws, {"conventions": declared}, examples, seed, tally)


def _on_each_model(case: Case, check: Check, adapter: Adapter, spec: str) -> Iterator[Case]:
    """Yield the case, once for each model that the check wants if its body takes one."""
    if not check.takes_a_model:
        yield case
        return
    for model in models_for(adapter, spec, check.worlds):
        yield case.on(model)


def _fresh(value: Any) -> Any:
    return value.make() if isinstance(value, Model) else copy.deepcopy(value)


def _explanations(
    check: Check, adapter: Adapter, spec: str, seed: int, tally: Tally, timeout: float, examples: int
) -> list[str]:
    """Return the alternative declarations under which every case of a failed check passes, as far as time allows."""
    if any(found.is_error for found in tally.found):
        return []
    told, judge = [], replace(check, run=check.explains or check.run)
    with suppress(TookTooLong), time_limit(timeout):
        for other in check.alternatives(adapter.conventions):
            again = Tally()
            judged = adapter.conventions.replace(**other)
            _run_cases(judge, adapter, judged, spec, seed, again, examples, until=lambda _: True)
            if again.compared and not (again.found or again.misfits):
                told.append(", ".join(f"{name}={value!r}" for name, value in other.items()))
    return told


def outcome(found: Sequence[Found]) -> tuple[Status, str, str]:
    """Return status, message and snippet: the first finding (or else error) in full, the others by fingerprint."""
    first = next((each for each in found if not each.is_error), found[0])
    others = [str(each.fingerprint) for each in found if each is not first]
    told = [f"also: {'; '.join(others[:SHOWN])}"] if others else []
    told += [f"and {len(others) - SHOWN} more"] if len(others) > SHOWN else []
    return "error" if first.is_error else "fail", "\n".join([first.message, *told]), first.snippet
