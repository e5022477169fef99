"""Find the verifiers that ship by the names that rows use; each is made when a row first asks."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, get_args

from rlcanary.errors import UserError
from rlcanary.grpo.plan.options import require_types
from rlcanary.grpo.rewards.code import CodeVerifier
from rlcanary.grpo.rewards.exact import ExactVerifier
from rlcanary.grpo.rewards.gsm8k import GSM8KVerifier
from rlcanary.grpo.rewards.ifeval import IFEvalVerifier
from rlcanary.grpo.rewards.math import MathVerifier
from rlcanary.grpo.rewards.pool import MakeWorker, Span, VerifierPool
from rlcanary.grpo.rewards.verifier import Problem, Tallied, Tally, Verifier
from rlcanary.grpo.rewards.workers import ChildWorker

VERIFIERS: dict[str, Callable[..., Verifier]] = {
    "exact": ExactVerifier,
    "math": MathVerifier,
    "gsm8k": GSM8KVerifier,
    "ifeval": IFEvalVerifier,
    "code": CodeVerifier,
}
# A completion and a target that a new worker judges first, where the first judgement is slow.
WARM_UP: dict[str, tuple[str, Any]] = {"math": (r"\boxed{\frac12}", "0.5")}


# Verifiers whose judgement can take for ever: a power of powers is expanded in one call that nothing interrupts.
CAN_HANG = ("math",)


class VerifiersByName(Mapping[str, Verifier]):
    """Verifiers by name, in this process or in a `VerifierPool` each; their scores are counted."""

    def __init__(
        self,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        *,
        workers: int | None = 0,
        timeout_s: float = 10.0,
        make_worker: MakeWorker = ChildWorker,
    ) -> None:
        """Take the options; no verifier is made yet.

        Args:
            options: arguments of verifiers, by name.
            workers: workers in each verifier's pool; 0 judges in this process, where nothing ends a call that hangs, and
                None gives those that can hang (`CAN_HANG`) one worker each.
            timeout_s: limit of a call to a pool.
            make_worker: starts a worker of a pool.

        Raises:
            UserError: options of a verifier or with a name that does not exist.
        """
        self._options = dict(options or {})
        self._workers, self._timeout_s, self._make_worker = workers, timeout_s, make_worker
        self._made: dict[str, Tallied] = {}
        self._told: Counter[str] = Counter()
        self._pools: dict[str, VerifierPool] = {}
        if unknown := sorted(set(self._options) - set(VERIFIERS)):
            raise UserError(f"no verifier {', '.join(unknown)}; there are {', '.join(VERIFIERS)}")
        for name, given in self._options.items():
            try:
                require_types(VERIFIERS[name], given)
            except UserError as error:
                raise UserError(f"options of the verifier {name}: {error}") from error

    def __getitem__(self, name: str) -> Verifier:
        """Return the verifier of a name, always the same.

        Raises:
            KeyError: no such name.
            UserError: its options are out of range, or a package that it needs is not installed.
        """
        if name not in self._made:
            make = functools.partial(VERIFIERS[name], **self._options.get(name, {}))
            workers = int(name in CAN_HANG) if self._workers is None else self._workers
            self._made[name] = Tallied(self._pooled(name, make, workers) if workers else make())
        return self._made[name]

    def __iter__(self) -> Iterator[str]:
        return iter(VERIFIERS)

    def __len__(self) -> int:
        return len(VERIFIERS)

    def tallies(self) -> dict[str, Tally]:
        """Return the tally of each verifier so far: zeros apart from timeouts, exceptions and the like."""
        return {name: verifier.tally for name, verifier in self._made.items()}

    def take_problems(self) -> Counter[str]:
        """Return how often each problem came up since the last call, over all verifiers; 0 where it did not."""
        total = sum((verifier.tally.problems for verifier in self._made.values()), Counter[str]())
        since = Counter({problem: total[problem] - self._told[problem] for problem in get_args(Problem)})
        self._told = total
        return since

    def drain_spans(self) -> list[tuple[str, Span]]:
        """Return the calls to pools that ended since the last call, each with the name of its verifier."""
        return [(name, span) for name, pool in self._pools.items() for span in pool.drain_spans()]

    def close(self) -> None:
        """End the pools."""
        for pool in self._pools.values():
            pool.close()

    def _pooled(self, name: str, make: Callable[[], Verifier], workers: int) -> Verifier:
        pool = VerifierPool(
            make,
            make_worker=self._make_worker,
            workers=workers,
            timeout_s=self._timeout_s,
            warm_up=WARM_UP.get(name, ("", "")),
        )
        self._pools[name] = pool
        return pool
