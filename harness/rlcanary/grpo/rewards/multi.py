"""Use several verifiers in one run, each for its own kind of target."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from rlcanary.errors import UserError
from rlcanary.grpo.rewards.verifier import Score, Verifier, judge


@dataclass(frozen=True)
class TypedTarget:
    """A target and the name of the verifier that understands it."""

    type: str
    value: Any


class MultiVerifier:
    """Hands each completion to the verifier of its target's type. A type without a verifier is an error, never a zero."""

    def __init__(self, verifiers: Mapping[str, Verifier]) -> None:
        """Take the verifiers by type.

        Raises:
            UserError: there is none.
        """
        if not verifiers:
            raise UserError("a multi-verifier needs at least one verifier")
        self.verifiers = dict(verifiers)
        bounds = [verifier.bounds for verifier in self.verifiers.values()]
        self.bounds = (min(low for low, _ in bounds), max(high for _, high in bounds))

    def require(self, types: Iterable[str]) -> None:
        """Refuse a dataset before the run if one of its types has no verifier.

        Raises:
            UserError: with the types that have no verifier.
        """
        missing = sorted(set(types) - set(self.verifiers))
        if missing:
            raise UserError(f"no verifier for {', '.join(missing)}; there are {', '.join(sorted(self.verifiers))}")

    def verify(self, completion: str, target: Any) -> Score:
        """Score with the verifier of the target's type, within that verifier's own bounds.

        Raises:
            UserError: the target is not a `TypedTarget`, or its type has no verifier.
        """
        if not isinstance(target, TypedTarget):
            raise UserError(f"a multi-verifier needs a TypedTarget, which names its verifier; got {target!r}")
        self.require([target.type])
        return judge(self.verifiers[target.type], completion, target.value)
