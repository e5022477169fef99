"""Checks catch each known mistake: a candidate that ends in an error explains nothing, and nobody would see it."""

from collections import Counter

import pytest
from first_failure import first_failure

from rlcanary.bugs.mistakes import MISTAKES
from rlcanary.bugs.mistakes.planting import Mistaken, reached_by
from rlcanary.checks import all_checks
from rlcanary.contract.presets import GRPO

TELLING = GRPO.replace(
    kl_coef=0.5,
    entropy_coef=0.1,
    temperature=0.7,
    dual_clip=3.0,
    old_logprobs="sampler",
    importance_level="token",
    importance_mode="truncate",
    importance_high=2.0,
)


CAUGHT: Counter[str] = Counter()
"""How many mistakes each check has caught so far: such checks come first, since most mistakes fail several."""


# One in four with each change, all of them nightly.
TRIED = [words if n % 4 == 0 else pytest.param(words, marks=pytest.mark.nightly) for n, words in enumerate(MISTAKES)]


@pytest.mark.parametrize("words", TRIED)
def test_each_known_mistake_gives_wrong_numbers_and_no_error_of_its_own(words: str) -> None:
    patches = MISTAKES[words]
    reached = reached_by(patches)
    for conventions in (TELLING, GRPO):
        adapter = Mistaken(conventions, patches)
        for check in sorted(all_checks(), key=lambda check: (check.needs[0] not in reached, -CAUGHT[check.id])):
            if reached & set(check.needs):
                result = first_failure(check, adapter, "reference")
                assert result.status != "error", result.message
                if result.status == "fail":
                    CAUGHT[check.id] += 1
                    return
    pytest.fail("no check fails: it explains nothing")
