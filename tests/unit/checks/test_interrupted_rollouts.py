"""Right ways to treat completions that an engine interrupted, none of which the check of them accuses, and wrong ones."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from rlcanary.adapters.grpo import GrpoAdapter
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.sampling.rollout import Continuing
from rlcanary.checks import Result, all_checks, run_check
from rlcanary.contract.adapter import Adapter
from rlcanary.contract.batch import Completion, Group
from rlcanary.contract.state import Item

Sampling = Mapping[str, Any]
CHECKS = {check.id: check for check in all_checks()}


def result(adapter: Adapter, name: str = "interrupted_generation") -> Result:
    return run_check(CHECKS[f"rollout.{name}"], adapter, "adapter")


class Continues(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        return super().rollout(Continuing(engine, lambda limit, sampled: limit - sampled), items, sampling)


class Restarts(ReferenceAdapter):
    """Sample the same prompt again until nothing interrupts."""

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        groups = super().rollout(engine, items, sampling)
        is_interrupted = any(each.finish_reason == "abort" for group in groups for each in group.completions)
        return self.rollout(engine, items, sampling) if is_interrupted else groups


class Refuses(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        raise ConnectionError("a request was interrupted")


@pytest.mark.parametrize("make", [ReferenceAdapter, GrpoAdapter, Continues, Restarts, Refuses])
def test_a_completion_may_be_continued_sampled_again_kept_left_out_or_refused(make: Callable[[], Adapter]) -> None:
    assert result(make()).status == "pass"
    assert result(make(), "interrupted_versions").status == "pass"


class Changed(Continues):
    """Continue rightly, and change the completions afterwards."""

    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        groups = super().rollout(engine, items, sampling)
        return [replace(group, completions=[self.change(each) for each in group.completions]) for group in groups]

    def change(self, completion: Completion) -> Completion:
        raise NotImplementedError


class LastPieceAlone(Changed):
    def change(self, completion: Completion) -> Completion:
        count = len(completion.token_ids) - 2
        return replace(completion, token_ids=completion.token_ids[-count:], logprobs=completion.logprobs[-count:])


class LogprobsOneLate(Changed):
    def change(self, completion: Completion) -> Completion:
        return replace(completion, logprobs=[*completion.logprobs[1:], 0.0])


class AbortTakenForAStop(ReferenceAdapter):
    def rollout(self, engine: Any, items: list[Item], sampling: Sampling) -> list[Group]:
        groups = super().rollout(engine, items, sampling)
        return [
            replace(group, completions=[replace(each, finish_reason="stop") for each in group.completions])
            for group in groups
        ]


@pytest.mark.parametrize("make", [LastPieceAlone, LogprobsOneLate, AbortTakenForAStop])
def test_pieces_that_are_lost_or_taken_for_whole_completions_are_told(make: Callable[[], Adapter]) -> None:
    assert result(make()).status == "fail"


class VersionsOfTheLastPiece(Changed):
    def change(self, completion: Completion) -> Completion:
        return replace(completion, token_versions=[6] * len(completion.token_ids))


def test_pieces_under_the_version_of_the_last_are_told() -> None:
    assert result(VersionsOfTheLastPiece(), "interrupted_versions").status == "fail"
