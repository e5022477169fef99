"""The program of every check can be written so that it runs without rlcanary, with what it uses and no more."""

import inspect

import pytest
import torch
from programs import run_without_rlcanary

from rlcanary.adapters import Adapter
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.checks import Check, all_checks, run_check
from rlcanary.checks.case import Case
from rlcanary.checks.programs.program import program
from rlcanary.checks.programs.standalone import standalone
from rlcanary.checks.worlds.models import models_for
from rlcanary.contract.presets import GRPO

CHECKS = {check.id: check for check in all_checks()}
DECLARED = CHECKS["advantage.declared_formula"]
SPEC = f"{__name__}:AdvantagesOfOne"


def first_case(check: Check) -> Case:
    given = {"conventions": GRPO, "rng": torch.Generator().manual_seed(0)}
    case: Case = next(iter(check.cases(**{name: given[name] for name in inspect.signature(check.cases).parameters})))
    if not check.takes_a_model:
        return case
    return case.on(next(iter(models_for(ReferenceAdapter(), "reference", check.worlds))))


def test_program_of_every_check_can_do_without_rlcanary() -> None:
    written = [
        standalone(program(check.run, first_case(check), "reference"), ReferenceAdapter(), "reference")
        for check in CHECKS.values()
    ]
    needs = [text.partition("\n")[0] for text in written]
    assert len(needs) >= 114
    assert [line for line in needs if "rlcanary" in line] == []


class AdvantagesOfOne(Adapter):
    scale = 2.0

    def advantages(self, rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
        return clipped(rewards) * self.scale

    def entropy(self, logits: torch.Tensor) -> torch.Tensor:
        return never_called(logits)


def clipped(rewards: torch.Tensor) -> torch.Tensor:
    """A function of rlcanary's has this name too."""
    return torch.ones_like(rewards)


def never_called(logits: torch.Tensor) -> torch.Tensor:
    raise AssertionError


def test_program_has_of_the_users_module_what_the_adapter_calls_and_no_more() -> None:
    found = run_check(DECLARED, AdvantagesOfOne(), SPEC)
    alone = standalone(found.snippet, AdvantagesOfOne(), SPEC)
    assert alone.startswith("# Needs torch.\n")
    assert "scale = 2.0" in alone
    assert "never_called" not in alone
    assert alone.count("clipped(rewards)") == 2
    with pytest.raises(AssertionError, match="expected"):
        run_without_rlcanary(alone)


def test_body_of_the_check_and_its_inputs_stand_in_it_as_they_are_printed() -> None:
    found = run_check(DECLARED, AdvantagesOfOne(), SPEC)
    alone = standalone(found.snippet, AdvantagesOfOne(), SPEC)
    _, *functions, call = found.snippet.split("\n\n\n")
    printed = [*functions, call.replace(f"load_adapter({SPEC!r})", "AdvantagesOfOne()")]
    assert [part for part in printed if part.replace("reference.", "advantages_") not in alone] == []


def test_program_with_an_adapter_that_its_module_makes_says_that_it_needs_rlcanary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = AdvantagesOfOne()
    monkeypatch.setitem(globals(), "made", made)
    found = run_check(DECLARED, made, f"{__name__}:made")
    written = standalone(found.snippet, made, f"{__name__}:made")
    assert written.startswith("# Needs rlcanary: ")
    with pytest.raises(AssertionError):
        exec(written, {})
