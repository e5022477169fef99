"""The exhibits of the museum for its pages: what each bug does, and what the checks find of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.detection import Detection
from rlcanary.bugs.effect import effect_of
from rlcanary.bugs.training_run import EVERY, reaches_a_run, rewards
from rlcanary.checks import all_checks
from rlcanary.checks.findings.diagnosis import Diagnosis
from rlcanary.checks.findings.document import to_document
from rlcanary.contract.adapter import NotProvided
from rlcanary.contract.conventions import Conventions
from rlcanary.html.museum_page import Exhibit


def exhibits(detections: Iterable[Detection], with_runs: bool) -> Iterator[Exhibit]:
    """Yield an exhibit for each detected bug.

    Args:
        detections: the bugs, and the results of the checks on them.
        with_runs: train with each bug that a run reaches, which takes some seconds each.
    """
    by_id = {check.id: check for check in all_checks()}
    usual: dict[Conventions, list[float] | None] = {}
    for detection in detections:
        bug, effect = detection.bug, effect_of(detection.bug)
        curve = None
        if with_runs and reaches_a_run(bug):
            adapter = bug().configured(**effect.settings) if effect else bug()
            conventions = adapter.conventions
            if conventions not in usual:
                usual[conventions] = _run(ReferenceAdapter(conventions))
            right, wrong = usual[conventions], _run(adapter)
            curve = (right, wrong, EVERY) if right and wrong else None
        checks = [by_id[result.id] for result in detection.results]
        yield Exhibit(
            id=bug.id,
            area=bug.area(),
            source=bug.source,
            effect=bug.effect,
            report=to_document(bug.id, detection.results, Diagnosis([]), checks),
            push=effect.picture if effect else None,
            settings=effect.settings if effect else {},
            curve=curve,
        )


def _run(adapter: ReferenceAdapter) -> list[float] | None:
    try:
        return rewards(adapter)
    except (NotProvided, ValueError):  # with the mistake, the code may refuse to go on
        return None
