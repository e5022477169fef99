"""Search for the causes of a suite's failures.

A candidate is the oracle with one known mistake, or with another declaration. It explains a failed check if that check, run
on it, finds the same wrong numbers in every case, and no others. A candidate that gives other numbers explains nothing.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import wraps
from typing import Any

import torch

from rlcanary.checks.check import Check, Result, judge
from rlcanary.checks.tally import Finding, Fingerprint, Found, Tally
from rlcanary.checks.time_limit import TookTooLong, time_limit
from rlcanary.contract.adapter import CAPABILITIES
from rlcanary.contract.conventions import Conventions

SECONDS = 20.0
"""Bound on the search for the causes of one suite's failures."""

# Numbers that agree to this share are the same: the code under test may round otherwise than the oracle.
AGREEMENT = 1e-3
FIRST_CASES = 2


@dataclass(frozen=True)
class Candidate:
    """A possible cause.

    Attributes:
        words: the mistake in plain words, such as "the padding is trained".
        adapter: an adapter with this mistake and no other.
        changed: the capabilities that the mistake changes; the others are those of the oracle.
    """

    words: str
    adapter: Any
    changed: frozenset[str]


@dataclass(frozen=True)
class Cause:
    """A mistake that explains findings.

    Attributes:
        words: the mistake in plain words.
        explained: the findings that it explains, by the id of their check.
    """

    words: str
    explained: Mapping[str, frozenset[Fingerprint]]

    @property
    def count(self) -> int:
        """The number of findings that it explains."""
        return sum(map(len, self.explained.values()))

    def covers(self, check_id: str, found: Found) -> bool:
        """Tell whether it explains this finding of a check."""
        return found.fingerprint in self.explained.get(check_id, frozenset())


@dataclass(frozen=True)
class Diagnosis:
    """The result of a search for causes.

    Attributes:
        causes: those that explain most first.
        cut_after: the limit in seconds that ended the search before it had tried every candidate, None if none did.
    """

    causes: list[Cause]
    cut_after: float | None = None

    def __str__(self) -> str:
        """Say that causes may be missing; nothing where the search was complete."""
        if self.cut_after is None:
            return ""
        return f"the search for causes ended after {self.cut_after:g} s: a failure without a cause may have one"


def diagnose(
    checks: Sequence[Check],
    results: Sequence[Result],
    declared: Conventions,
    oracle: Any,
    candidates: Iterable[Candidate],
    *,
    seed: int = 0,
    timeout: float = 0,
    seconds: float = SECONDS,
) -> Diagnosis:
    """Find the candidates that explain failures.

    A finding has one cause at most. A cause has no finding in a check that passed and calls nothing else than those
    which it explains.

    Args:
        checks: the checks that ran.
        results: their results, in the same order.
        declared: the conventions that the code under test declares.
        oracle: an adapter without a mistake, under these conventions.
        candidates: the possible causes, the likelier ones first.
        seed: the seed of the run.
        timeout: time limit of one check in seconds, 0 for none.
        seconds: time limit of the whole search, 0 for none. A search that is cut short returns what it has found.
    """
    failed = [row for row in zip(checks, results, strict=True) if row[1].status in ("fail", "error")]
    if not failed:
        return Diagnosis([])
    search = _Search(declared, oracle, seed, timeout, time.monotonic() + seconds if seconds else None)
    failed.sort(key=lambda row: row[1].seconds)
    passed = [row for row in zip(checks, results, strict=True) if row[1].status == "pass"]
    passed.sort(key=lambda row: row[1].seconds)
    found = search.explanations(failed, passed, candidates)
    causes: dict[str, dict[str, frozenset[Fingerprint]]] = {}
    taken: set[tuple[str, Fingerprint]] = set()
    while found:
        found.sort(key=lambda each: -len(each.pairs - taken))
        best = found.pop(0)
        new = best.pairs - taken
        if not new:
            break
        if not best.is_verified and search.contradicts(best, passed):
            continue
        taken |= new
        told = causes.setdefault(best.candidate.words, {})
        for check_id, fingerprint in new:
            told[check_id] = told.get(check_id, frozenset()) | {fingerprint}
    told_causes = (Cause(words, explained) for words, explained in causes.items())
    return Diagnosis(sorted(told_causes, key=lambda cause: -cause.count), seconds if search.is_over() else None)


@dataclass(frozen=True)
class _Explanation:
    """The findings that a candidate explains, and the capabilities that the checks of these call.

    Attributes:
        is_verified: the checks that passed do not contradict it.
    """

    candidate: Candidate
    pairs: frozenset[tuple[str, Fingerprint]]
    called: frozenset[str]
    is_verified: bool = False


@dataclass(frozen=True)
class _Search:
    declared: Conventions
    oracle: Any
    seed: int
    timeout: float
    end: float | None
    # What a mistake does to a check is the same in all versions of it that change the same of the check's capabilities.
    _compared: dict[tuple[str, str, frozenset[str], bool], _Outcome] = field(default_factory=dict)

    def explanations(
        self, failed: list[tuple[Check, Result]], passed: list[tuple[Check, Result]], candidates: Iterable[Candidate]
    ) -> list[_Explanation]:
        """Return what each candidate explains, and end at the first that explains everything."""
        everything = sum(len(result.findings) for _, result in failed)
        called = frozenset(name for check, _ in failed for name in check.needs)
        explanations: list[_Explanation] = []
        for candidate in candidates:
            for version in _versions(candidate, self.oracle, called):
                if self.is_over():
                    return explanations
                explanation = self._explanation(version, failed)
                if explanation is None:
                    continue
                if len(explanation.pairs) < everything:
                    explanations.append(explanation)
                elif not self.contradicts(explanation, passed):
                    return [replace(explanation, is_verified=True)]
        return explanations

    def contradicts(self, explanation: _Explanation, passed: list[tuple[Check, Result]]) -> bool:
        """Tell whether the candidate fails where the code passed, in checks that call only what it explains."""
        for check, result in passed:
            if not (explanation.called >= set(check.needs) and explanation.candidate.changed & set(check.needs)):
                continue
            if self.is_over():
                return False
            if self._outcome(explanation.candidate, check, result) is _Outcome.OTHER:
                return True
        return False

    def _explanation(self, candidate: Candidate, failed: list[tuple[Check, Result]]) -> _Explanation | None:
        pairs: set[tuple[str, Fingerprint]] = set()
        called: set[str] = set()
        # Two mistakes rarely meet in one function: what explains a few of its failures only is a coincidence.
        own = [check.id for check, _ in failed if candidate.changed >= set(check.needs)]
        unexplained = 0
        has_value = False
        for check, result in failed:
            if not candidate.changed & set(check.needs):
                continue
            # Most candidates are refuted by the first findings already.
            outcome = self._outcome(candidate, check, result, FIRST_CASES)
            outcome = self._outcome(candidate, check, result) if outcome is _Outcome.SAME else outcome
            if outcome is _Outcome.SAME:
                pairs |= {(check.id, found.fingerprint) for found in result.findings}
                called |= set(check.needs)
                has_value |= any(not found.is_error for found in result.findings)
            elif check.id in own:
                unexplained += 1
                if outcome is _Outcome.OTHER or 2 * unexplained > len(own):
                    return None
        # Exceptions of one type have many causes: they come under a cause that other findings show.
        return _Explanation(candidate, frozenset(pairs), frozenset(called)) if has_value else None

    def _outcome(self, candidate: Candidate, check: Check, result: Result, first: int | None = None) -> _Outcome:
        """Compare the findings of the candidate with those of the code, in its first cases that failed or in all."""
        key = candidate.words, check.id, candidate.changed & set(check.needs), first is None
        if key not in self._compared:
            self._compared[key] = self._run(candidate, check, result, first)
        return self._compared[key]

    def _run(self, candidate: Candidate, check: Check, result: Result, first: int | None) -> _Outcome:
        against = _Against(result, first)
        left = [self.timeout] if self.timeout else []
        left += [max(self.end - time.monotonic(), 0.01)] if self.end is not None else []
        try:
            with time_limit(min(left, default=0)):
                judge(against.limited(check), candidate.adapter, self.declared, self.seed, against)
        except TookTooLong:
            return _Outcome.OTHER
        except _Ended as ended:
            return ended.outcome
        return _Outcome.SAME if against.has_all else _Outcome.FEWER

    def is_over(self) -> bool:
        return self.end is not None and time.monotonic() >= self.end


def _versions(candidate: Candidate, oracle: Any, called: frozenset[str]) -> Iterable[Candidate]:
    """The candidate, then with its mistake in one of the capabilities alone: code often has a formula twice."""
    changed = candidate.changed & called
    if changed:
        yield candidate
    if len(changed) > 1:
        for name in sorted(changed):
            yield Candidate(candidate.words, _Partly(candidate.adapter, oracle, name), frozenset({name}))


class _Partly:
    """The oracle with one capability of another adapter."""

    def __init__(self, mutated: Any, oracle: Any, only: str) -> None:
        self._mutated, self._oracle, self._only = mutated, oracle, only

    def configured(self, **changes: Any) -> _Partly:
        return _Partly(self._mutated.configured(**changes), self._oracle.configured(**changes), self._only)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle if name in CAPABILITIES and name != self._only else self._mutated, name)


class _Outcome(Enum):
    """A candidate's findings beside those of the code: the same, other ones, or not all of them."""

    SAME = auto()
    OTHER = auto()
    FEWER = auto()


class _Ended(BaseException):
    """The comparison of a candidate with the code is decided. A BaseException, so that it ends the check."""

    def __init__(self, outcome: _Outcome) -> None:
        super().__init__()
        self.outcome = outcome


class _Against(Tally):
    """A tally that ends the check at the first finding that it does not have in common with the code under test."""

    def __init__(self, result: Result, first: int | None) -> None:
        super().__init__()
        self._shared: defaultdict[str, set[str]] = defaultdict(set)
        self._judged_there = result.judged
        self._cases_there = {case for case, _ in result.judged}
        self._theirs: dict[str, dict[str, Found]] = {}
        for each in result.findings:
            self._theirs.setdefault(each.fingerprint.case, {})[each.fingerprint.quantity] = each
        self._wanted = set(list(self._theirs)[:first]) if first else None

    @property
    def has_all(self) -> bool:
        """Whether each finding of the code has been found. Drawn cases, which a candidate does not run, have not."""
        return all(found.keys() <= self._shared[case] for case, found in self._theirs.items())

    def limited(self, check: Check) -> Check:
        """Return the check, which skips the body in the cases that are not compared."""
        if self._wanted is None:
            return check

        @wraps(check.run)
        def run(*given: Any, **inputs: Any) -> object:
            return check.run(*given, **inputs) if self._case in (self._wanted or ()) else None

        return replace(check, run=run)

    @contextmanager
    def case(
        self, label: str, program: Callable[[], str] = str, model: str = "", inputs: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        with super().case(label, program, model, inputs):
            case = self._case
            yield
        if self._wanted is not None and case not in self._wanted:
            return
        if self._theirs.get(case, {}).keys() - self._shared[case]:
            raise _Ended(_Outcome.FEWER)
        if self._wanted is not None:
            self._wanted.remove(case)
            if not self._wanted:
                raise _Ended(_Outcome.SAME)

    def note(self, finding: Finding) -> None:
        fingerprint = Fingerprint(self._case, finding.quantity, finding.magnitude)
        self._match(Found(fingerprint, self._told(finding.message), "", False, finding.compared))

    def stopped(self, what: str, message: str, snippet: str = "", frames: Iterable[tuple[str, int]] = ()) -> None:
        self._match(Found(Fingerprint(self._case, what), message, snippet, is_error=True))

    def _match(self, found: Found) -> None:
        quantity = found.fingerprint.quantity
        theirs = self._theirs.get(self._case, {}).get(quantity)
        # A metric of no tokens has no value: the oracle says NaN, and others 0.
        is_nan = quantity.startswith("metric ") and found.fingerprint.magnitude == math.inf
        if theirs is None:
            name = quantity.partition(" of shape ")[0].partition(" of torch.")[0]
            is_known = self._case in self._cases_there if found.is_error else (self._case, name) in self._judged_there
            if is_known and not is_nan:
                raise _Ended(_Outcome.OTHER)
        elif not (is_nan or _agree(found, theirs)):
            raise _Ended(_Outcome.OTHER)
        self._shared[self._case].add(quantity)


def _agree(mine: Found, theirs: Found) -> bool:
    """Tell whether two findings of the same quantity show the same wrong numbers."""
    if mine.is_error or theirs.is_error:
        return mine.is_error and theirs.is_error
    if mine.tensors and theirs.tensors:
        return _is_same(mine.tensors[0], theirs.tensors[0])
    magnitudes = mine.fingerprint.magnitude, theirs.fingerprint.magnitude
    # The message of a metric has six digits, of which the last may be rounded otherwise.
    if mine.fingerprint.quantity.startswith("metric ") and None not in magnitudes:
        return _is_same(torch.tensor(mine.fingerprint.magnitude), torch.tensor(theirs.fingerprint.magnitude))
    return mine.message == theirs.message


def _is_same(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    if mine.shape != theirs.shape:
        return False
    mine, theirs = mine.double(), theirs.double()
    finite = theirs[theirs.isfinite()].abs()
    magnitude = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(mine, theirs, rtol=AGREEMENT, atol=1e-2 * AGREEMENT * magnitude, equal_nan=True)
