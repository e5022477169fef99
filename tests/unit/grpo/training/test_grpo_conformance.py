"""The bundled trainer passes every check itself, and bugs that are planted in it are caught."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
from expected_table import expected_table
from first_failure import first_failure

from rlcanary.adapters.grpo import GrpoAdapter
from rlcanary.bugs import Bug, all_bugs
from rlcanary.bugs.detection import relevant_checks
from rlcanary.checks import Check, all_checks, run_check
from rlcanary.contract.conventions import Conventions
from rlcanary.contract.presets import GRPO, PPO, PRESETS
from rlcanary.grpo.sync import sync
from rlcanary.grpo.training import critic, trainer
from rlcanary.reference import split, values

OWN = {
    *("train_step", "rl_step", "rollout", "sync_weights", "generate", "new_buffer", "rollout_seed", "build"),
    *("token_advantages", "values", "value_loss", "converse"),
}
OWN_CHECKS = [check for check in all_checks() if OWN & set(check.needs)]
# A model in bfloat16 is no mistake here: this trainer keeps float32 masters beside it.
HALF_PRECISION = "trl.weights-in-half-precision"
STEP_BUGS = [bug for bug in all_bugs() if bug.area() in ("step", "sync", "rollout") and bug.id != HALF_PRECISION]


def failed(checks: list[Check], adapter: GrpoAdapter) -> list[tuple[str, str]]:
    """Run the checks -> id and message of each that fails or raises."""
    results = [run_check(check, adapter, "grpo") for check in checks]
    return [(result.id, result.message) for result in results if result.status in ("fail", "error")]


def is_caught(checks: Iterable[Check], adapter: GrpoAdapter) -> bool:
    """Whether one of the checks fails."""
    return any(first_failure(check, adapter, "grpo").status in ("fail", "error") for check in checks)


VARIANTS = {
    "grpo": GRPO,
    "verl": PRESETS["verl"],
    "kl-in-reward": GRPO.replace(
        kl_coef=0.5, kl_placement="reward", kl_estimator="k1", old_logprobs="trainer", max_grad_norm=0.5
    ),
}


@pytest.mark.parametrize("name", VARIANTS)
def test_the_bundled_trainer_is_never_accused(name: str) -> None:
    # What it samples is the same under all of them, and so is what depends on the model.
    updates = [replace(check, worlds=()) for check in OWN_CHECKS if "train_step" in check.needs]
    checks = OWN_CHECKS if name == "grpo" else updates
    assert failed(checks, GrpoAdapter(VARIANTS[name])) == []


@pytest.mark.parametrize("bug", STEP_BUGS, ids=lambda bug: bug.id)
def test_a_shipped_bug_planted_in_the_trainer_is_caught(bug: type[Bug]) -> None:
    planted = type(bug.__name__, (bug, GrpoAdapter), {})
    # Those that find it in the reference are the likeliest to.
    likeliest = expected_table("museum.txt")[bug.id]
    assert is_caught(sorted(relevant_checks(bug), key=lambda check: check.id not in likeliest), planted())


@pytest.mark.nightly
def test_a_model_in_bfloat16_beside_its_float32_masters_is_not_accused() -> None:
    (bug,) = (bug for bug in all_bugs() if bug.id == HALF_PRECISION)
    assert failed(relevant_checks(bug), type(bug.__name__, (bug, GrpoAdapter), {})()) == []


def pieces_that_know_only_themselves(given: Any, n_pieces: int, conventions: Conventions) -> Any:
    pieces = split(given, n_pieces, conventions)
    return [replace(piece, global_tokens=None, global_sequences=None) for piece in pieces]


score = trainer.score


def scored_at_temperature_1(model: Any, batch: Any, conventions: Conventions, schedule: Any) -> Any:
    return score(model, batch, conventions.replace(temperature=1.0), schedule)


with_advantages = trainer.with_advantages


def with_rewards_as_advantages(batch: Any, *scored: Any) -> Any:
    return replace(with_advantages(batch, *scored), advantages=batch.rewards)


def values_of_the_tokens_own_position(model: Any, batch: Any) -> Any:
    return values(model, replace(batch, completion_starts=batch.completion_starts + 1))


def nothing(*_: Any) -> None:
    """Leave it out."""


PLANTED: dict[str, tuple[Any, str, Callable[..., Any], Conventions]] = {
    "micro-batches take their own means": (trainer, "split", pieces_that_know_only_themselves, GRPO),
    "the reference scores at temperature 1": (
        trainer,
        "score",
        scored_at_temperature_1,
        GRPO.replace(temperature=0.6, kl_coef=0.5),
    ),
    "advantages are the rewards": (trainer, "with_advantages", with_rewards_as_advantages, GRPO),
    "the critic's micro-batches take their own means": (trainer, "split", pieces_that_know_only_themselves, PPO),
    "the critic looks at the token that it judges": (critic, "values", values_of_the_tokens_own_position, PPO),
    "the prefix cache stays": (sync.InProcessEndpoint, "reset_prefix_cache", nothing, GRPO),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_bug_in_the_trainers_own_code_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where, attribute, wrong, conventions = PLANTED[name]
    monkeypatch.setattr(where, attribute, wrong)
    area = "sync" if where is sync.InProcessEndpoint else "value" if conventions is PPO else "step"
    assert is_caught((check for check in OWN_CHECKS if check.area == area), GrpoAdapter(conventions))
