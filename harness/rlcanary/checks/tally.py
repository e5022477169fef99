"""Record of a running check: its comparisons, and the outcome of each of its cases."""

from __future__ import annotations

import math
import traceback
from asyncio import CancelledError
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rlcanary.checks.severity import Severity
from rlcanary.contract.adapter import NotProvided
from rlcanary.system.printable import printable_lines

MARGIN = 1.5
"""How much larger than the expected one a deviation may be: other processors round otherwise."""
ADAPTERS = Path(__file__).parents[1] / "adapters"
"""The bundled adapters."""
OWN = ("reference.py", "grpo")
"""Those of code in this package, which has no other releases."""
LOOKUPS = ("importlib", "inspect.py", "omegaconf", "unittest")
"""What an adapter looks something up by, whose frames are not the framework's."""


@dataclass(frozen=True)
class Compared:
    """The two sides of a comparison.

    Attributes:
        got: what the code gave: a tensor, a number, a text, or containers of them.
        expected: what the property demands.
        where: bool, of the shape of the two tensors; only these entries count. None where all do.
    """

    got: Any
    expected: Any
    where: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """The entries of two tensors that count, None where other values or shapes were compared."""
        if self.where is None:
            return None
        return self.got[self.where], self.expected[self.where]


class Finding(AssertionError):
    """A property that does not hold.

    Attributes:
        message: the actual and the expected value.
        quantity: the quantity that is off, such as "gradient".
        magnitude: the size of the deviation; see `Fingerprint`.
        compared: what differs, None for a condition.
    """

    def __init__(
        self,
        message: str,
        quantity: str = "property",
        magnitude: float | None = None,
        compared: Compared | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.quantity = quantity
        self.compared = compared
        self.magnitude = math.inf if magnitude is not None and math.isnan(magnitude) else magnitude


class NothingToCompare(Exception):
    """The code ran, but its result leaves nothing to compare. The message says what is missing."""


@dataclass(frozen=True)
class Fingerprint:
    """Identity of a finding among those of its check, stable across runs.

    Attributes:
        case: the label of its case, "" in a check of one case.
        quantity: the quantity that is off, such as "gradient", "metric kl" or "raises ZeroDivisionError".
        magnitude: the largest deviation as a share of the largest expected number, or itself where zero is expected;
            infinite for NaN, None where the quantity is no number.
    """

    case: str
    quantity: str
    magnitude: float | None = None

    def __str__(self) -> str:
        told = self.quantity if self.magnitude is None else f"{self.quantity} off by {self.magnitude:.2g}"
        return f"{self.case}: {told}" if self.case else told

    @classmethod
    def parse(cls, text: str) -> Fingerprint:
        """Parse the text of a fingerprint.

        Raises:
            ValueError: the text after "off by" is not a number.
        """
        case, _, told = text.rpartition(": ")
        quantity, _, magnitude = told.rpartition(" off by ")
        return cls(case, quantity, float(magnitude)) if quantity else cls(case, told)

    def covers(self, other: Fingerprint) -> bool:
        """Tell whether the other is the same finding, at most `MARGIN` times as large. An infinite one covers its like."""
        if (self.case, self.quantity) != (other.case, other.quantity):
            return False
        if self.magnitude is None or other.magnitude is None:
            return self.magnitude is other.magnitude
        if math.isinf(self.magnitude):
            return math.isinf(other.magnitude)
        return other.magnitude <= MARGIN * self.magnitude


@dataclass(frozen=True)
class Found:
    """A finding in a case of a check, or an exception that ended the case.

    Attributes:
        compared: what differs, None for a condition or an exception.
        severity: the effect on the update.
        frames: the file and the line of each call on the way to an exception, the innermost last.
        seen: the arguments of the last call of the code, and the inputs of the case, by name.
    """

    fingerprint: Fingerprint
    message: str
    snippet: str
    is_error: bool
    compared: Compared | None = field(default=None, compare=False, repr=False)
    severity: Severity = "update"
    frames: tuple[tuple[str, int], ...] = field(default=(), compare=False, repr=False)
    seen: tuple[Mapping[str, Any], ...] = field(default=(), compare=False, repr=False)

    @property
    def tensors(self) -> tuple[Tensor, Tensor] | None:
        """The entries of the code's tensor and of the expected one that count, None if it compared no tensors."""
        return self.compared.tensors if self.compared else None


@dataclass
class Tally:
    """Comparisons and findings of one check.

    Attributes:
        made: calls of the adapter.
        compared: comparisons. A check without one has not passed.
        declined: reasons why the adapter declined a case.
        misfits: errors of a bundled adapter that does not fit the installed release of its framework.
        empty: reasons why a case left nothing to compare.
        found: findings and exceptions, in the order of the cases.
        calling: the capability that was called last, with its arguments.
        given: its tensors, batches and lists, by the names of the contract.
        has_returned: whether that call has ended without an exception.
        is_elsewhere: whether a call has returned tensors on another device than the CPU.
        judged: the label of the case and the name of the quantity of each comparison.
    """

    made: int = 0
    compared: int = 0
    declined: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    empty: list[str] = field(default_factory=list)
    found: list[Found] = field(default_factory=list)
    calling: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)
    has_returned: bool = False
    is_elsewhere: bool = False
    judged: set[tuple[str, str]] = field(default_factory=set)
    _case: str = ""
    _program: Callable[[], str] = str
    _model: str = ""
    _inputs: Mapping[str, Any] = field(default_factory=dict)
    _labels: list[str] = field(default_factory=list)
    _seen: Counter[str] = field(default_factory=Counter)
    _expected: Counter[tuple[str, str]] = field(default_factory=Counter)

    @contextmanager
    def case(
        self, label: str, program: Callable[[], str] = str, model: str = "", inputs: Mapping[str, Any] | None = None
    ) -> Iterator[None]:
        """Record the outcome of the block; exceptions stop here.

        Args:
            label: identifies the case, "" for none.
            program: writes the program that shows a finding of the block again.
            model: the name of its model, for messages; empty for the one that every check runs on.
            inputs: the inputs of the body, which a finding shows.
        """
        around = self._case, self._program, self._model, self._inputs
        self._labels.append(label)
        self._case, self._program = _numbered("; ".join(filter(None, self._labels)), self._seen), program
        self._model, self._inputs = model, inputs or {}
        try:
            yield
        except NotProvided as reason:
            self.declined.append(self._told(str(reason) or "declined by the adapter"))
        except NothingToCompare as reason:
            self.empty.append(self._told(str(reason)))
        except Finding as finding:
            self.note(finding)
        # The adapter is foreign code: any exception is a result, and so is an exit, which would be that of the run.
        except (Exception, SystemExit, CancelledError) as error:  # noqa: BLE001
            if misfit := _misfit(error):
                self.misfits.append(self._told(misfit))
                return
            frames = traceback.extract_tb(error.__traceback__)
            frame = frames[-1]
            where = f"{frame.name}, line {frame.lineno} of {frame.filename}"
            message = f": {error}" if str(error) else ""
            if "same device" in message:
                message += (
                    "; the checks pass tensors on the CPU: move them to your model's device with batch.to(device)"
                )
            called = (
                f"after {self.calling}: " if self.has_returned else f"{self.calling} raised " if self.calling else ""
            )
            told = f"{called}{type(error).__name__}{message} ({where})"
            self.stopped(
                f"raises {type(error).__name__}", told, program(), [(f.filename, f.lineno or 1) for f in frames]
            )
        finally:
            self._labels.pop()
            self._case, self._program, self._model, self._inputs = around

    def note(self, finding: Finding) -> None:
        """Add a finding to the current case."""
        fingerprint = Fingerprint(self._case, finding.quantity, finding.magnitude)
        told, snippet = self._told(finding.message), self._program()
        self.found.append(Found(fingerprint, told, snippet, False, finding.compared, seen=(self.given, self._inputs)))

    def stopped(self, what: str, message: str, snippet: str = "", frames: Iterable[tuple[str, int]] = ()) -> None:
        """Add the exception that ended the current case early."""
        hint = " (an adapter that does not take such a model raises NotProvided)" if self._model else ""
        told = self._told(message) + hint
        reason, seen = Fingerprint(self._case, what), (self.given, self._inputs)
        self.found.append(Found(reason, told, snippet, is_error=True, frames=tuple(frames), seen=seen))

    def _told(self, message: str) -> str:
        """Name the model, and make foreign text fit for every output."""
        return printable_lines(f"on the model {self._model}: {message}" if self._model else message)

    def quantity(self, name: str) -> str:
        """Return the name of the quantity now compared, numbered if the case has compared one of that name before."""
        seen: Counter[str] = Counter({name: self._expected[self._case, name]})
        self._expected[self._case, name] += 1
        numbered = _numbered(name, seen)
        self.judged.add((self._case, numbered))
        return numbered


def _misfit(error: BaseException) -> str:
    """Say where a bundled adapter asked its framework for what this release does not have; nothing for other errors."""
    if not isinstance(error, (ImportError, AttributeError, TypeError)):
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    raised = next((each for each in reversed(frames) if not any(name in each.filename for name in LOOKUPS)), frames[-1])
    place = Path(raised.filename)
    if ADAPTERS not in place.parents or place.relative_to(ADAPTERS).parts[0] in OWN:
        return ""
    return f"{type(error).__name__}: {error} (line {raised.lineno} of adapters/{place.relative_to(ADAPTERS)})"


def _numbered(name: str, seen: Counter[str]) -> str:
    seen[name] += 1
    return f"{name} ({seen[name]})" if name and seen[name] > 1 else name
