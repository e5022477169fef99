"""Detection of the bugs that are planted in a framework's installed code, through its adapter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rlcanary.adapters.load import load_adapter
from rlcanary.bugs.detection import changed_capabilities
from rlcanary.bugs.museum import all_bugs
from rlcanary.bugs.planted.plant import Framework, Plant, Planted
from rlcanary.checks import all_checks, run_check
from rlcanary.contract.adapter import provided
from rlcanary.mutants.killing import Fate, Trial, kill
from rlcanary.mutants.mutant import Run

Outcome = Literal["caught", "missed", "raises", "elsewhere"]


@dataclass(frozen=True)
class Sighting:
    """The verdict of the checks on a bug in a framework.

    Attributes:
        adapter: the name of the framework's adapter.
        bug: the bug's id.
        outcome: "caught" by a finding that the framework does not have without it, "missed", "raises" if it only makes
            checks raise, or "elsewhere" if the adapter does not drive its code.
        check: the check that catches it, or raises first.
        reason: why it is missed or elsewhere, if that was reviewed.
        checks: the number of checks that call its code.
    """

    adapter: str
    bug: str
    outcome: Outcome
    check: str = ""
    reason: str = ""
    checks: int = 0

    @property
    def is_surprise(self) -> bool:
        """Whether it contradicts the list: missed without a reason, or caught in spite of one."""
        return (self.outcome in ("missed", "raises") and not self.reason) or (
            self.outcome == "caught" and bool(self.reason)
        )


def sightings(
    framework: Framework,
    only: Sequence[str] = (),
    workers: int | None = None,
    tell: Callable[[str, int, int], object] = lambda *_: None,
) -> Iterator[Sighting]:
    """Plant each bug in the framework in a process of its own, and run the checks that call its code until one fails.

    Args:
        framework: the framework and its bugs.
        only: the ids of the bugs; all by default.
        workers: processes at once; by default one per processor.
        tell: is called before each check on the original with its id, the number of checks that have run, and that of all.

    Raises:
        UserError: the framework is not installed, or lacks the code that a bug changes.
    """
    for bug, reason in framework.elsewhere.items():
        if not only or bug in only:
            yield Sighting(framework.adapter, bug, "elsewhere", reason=reason)
    chosen = [plant for plant in framework.plants if not only or plant.bug in only]
    if chosen:
        yield from _judged(framework, chosen, workers, tell)


def _judged(
    framework: Framework, plants: Sequence[Plant], workers: int | None, tell: Callable[[str, int, int], object]
) -> Iterator[Sighting]:
    name, museum = framework.adapter, {bug.id: bug for bug in all_bugs()}
    adapter = load_adapter(name)
    framework.prepare()
    able = provided(adapter)
    planted = [
        (plant, Planted(name, plant, frozenset({*changed_capabilities(museum[plant.bug]), *plant.through} & able)))
        for plant in plants
    ]
    wanted = frozenset().union(*(each.capabilities for _, each in planted))
    checks = [check for check in all_checks() if wanted & set(check.needs) and able.issuperset(check.needs)]
    runs: list[Run] = []
    for index, check in enumerate(checks):
        tell(check.id, index, len(checks))
        result = run_check(check, adapter, name)
        if result.status in ("pass", "fail", "error"):
            runs.append(Run(check, result.seconds, {}, tuple(found.fingerprint for found in result.findings)))
    trials = {
        plant.bug: Trial(name, adapter, each, [run for run in runs if each.reached_by(run)]) for plant, each in planted
    }
    bugs = {id(trial): plant for plant, trial in zip(plants, trials.values(), strict=True)}
    for trial, fate in kill(list(trials.values()), workers):
        yield _sighting(bugs[id(trial)], trial, fate)


def _sighting(plant: Plant, trial: Trial, fate: Fate) -> Sighting:
    outcomes: dict[str, Outcome] = {"killed": "caught", "crashed": "raises", "hung": "raises"}
    outcome = outcomes.get(fate.verdict, "missed")
    return Sighting(trial.name, plant.bug, outcome, fate.check, plant.missed, len(trial.runs))
