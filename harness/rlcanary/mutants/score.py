"""The share of mutants that the checks kill, by module, capability and adapter, and the results as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rlcanary.mutants.killing import Fate, Trial, Verdict

Judged = tuple[Trial, Fate]


@dataclass(frozen=True)
class Score:
    """Numbers of mutants by verdict.

    Attributes:
        counts: the number of mutants with each verdict.
    """

    counts: Mapping[Verdict, int]

    @property
    def silent(self) -> int:
        """The mutants that count: those that run without an error."""
        return sum(self.counts.get(verdict, 0) for verdict in ("killed", "survived", "unreached"))

    @property
    def share(self) -> float | None:
        """The killed share of the mutants that run without an error; None if there is none."""
        return self.counts.get("killed", 0) / self.silent if self.silent else None


def score(judged: Iterable[Judged]) -> Score:
    """Count the verdicts."""
    return Score(Counter(fate.verdict for _, fate in judged))


def scores(judged: Sequence[Judged]) -> dict[str, dict[str, Score]]:
    """Return the scores "by adapter", "by module" and "by capability".

    A mutant counts for each capability through which a check runs it.
    """
    groups: dict[str, dict[str, list[Judged]]] = {"adapter": {}, "module": {}, "capability": {}}
    for trial, fate in judged:
        named = {
            "adapter": [trial.name],
            "module": [trial.mutant.where.partition(":")[0]],
            "capability": sorted(trial.capabilities),
        }
        for kind, names in named.items():
            for name in names:
                groups[kind].setdefault(name, []).append((trial, fate))
    return {kind: {name: score(found) for name, found in sorted(named.items())} for kind, named in groups.items()}


def to_json(judged: Sequence[Judged]) -> str:
    """Return the scores and every mutant with its verdict as JSON."""
    document = {
        "scores": {
            kind: {name: {**found.counts, "score": found.share} for name, found in named.items()}
            for kind, named in scores(judged).items()
        },
        "mutants": [
            {
                "adapter": trial.name,
                "where": trial.mutant.where,
                "diff": trial.mutant.diff,
                "capabilities": sorted(trial.capabilities),
                "verdict": fate.verdict,
                "check": fate.check,
                "seconds": round(fate.seconds, 3),
            }
            for trial, fate in judged
        ],
    }
    return json.dumps(document, indent=2) + "\n"
