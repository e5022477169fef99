"""Code whose pieces have no name in the conventions is judged by the laws, and by its own functions where it gives them."""

import pytest
import torch
from styles.own_pieces import OwnOracle, OwnPieces, gated

from rlcanary.checks import all_checks, run_check
from rlcanary.contract.conventions import PIECES, Conventions, choices
from rlcanary.reference import importance_weights

CHECKS = {check.id: check for check in all_checks()}
COMPARED = ("advantage.declared_formula", "loss.declared_value", "loss.declared_gradient", "kl.declared_estimator")


# The areas whose checks read these pieces.
AREAS = ("advantage", "loss", "kl", "importance", "gradient", "split", "config", "step", "metrics", "rl_step")


def results_of(adapter):
    return {each.id: run_check(each, adapter, adapter.name) for each in CHECKS.values() if each.area in AREAS}


@pytest.mark.parametrize("style", [OwnPieces, OwnOracle], ids=lambda style: style.name)
def test_pieces_without_a_name_are_never_accused(style):
    results = results_of(style())
    assert {name: each.message for name, each in results.items() if each.status in ("fail", "error")} == {}
    passed = {name for name, each in results.items() if each.status == "pass"}
    assert passed >= {
        "loss.padding_amount",
        "loss.row_order",
        "loss.masked_positions",
        "split.pieces_agree",
        "step.padding",
    }
    assert (passed >= set(COMPARED)) == (style is OwnOracle)


@pytest.mark.parametrize("check_id", COMPARED)
def test_what_is_left_out_says_which_piece_has_nothing_to_compare_with(check_id):
    result = run_check(CHECKS[check_id], OwnPieces(), "unused")
    assert result.status == "not-provided"
    assert "is 'custom', without a function to compare with" in result.message


class PaddingTrained(OwnPieces):
    """The mask is as wide as the batch."""

    def _row_losses(self, batch):
        batch.mask = torch.ones_like(batch.mask)
        return super()._row_losses(batch)


class PiecesCountAlike(OwnPieces):
    """The mean of means of micro-batches."""

    def accumulated_loss(self, batch, n_micro):
        output = super().accumulated_loss(batch, n_micro)
        output.loss = output.loss / n_micro
        return output


@pytest.mark.parametrize(
    ("mistaken", "check_id"),
    [
        (PaddingTrained, "loss.padding_amount"),
        (PaddingTrained, "loss.masked_positions"),
        (PiecesCountAlike, "split.pieces_agree"),
    ],
)
def test_laws_catch_mistakes_in_code_of_any_objective(mistaken, check_id):
    assert run_check(CHECKS[check_id], mistaken(), "unused").status == "fail"


class WrongGate(OwnOracle):
    """The gate is sharper than the one that is meant."""

    def _surrogate(self, current, old, advantage, mask):
        ratio, _, out = super()._surrogate(current, old, advantage, mask)
        return ratio, -gated(2 * current, 2 * old, advantage, mask), out


def test_a_function_of_ones_own_is_what_code_is_compared_with():
    result = run_check(CHECKS["loss.declared_value"], WrongGate(), "unused")
    assert result.status == "fail"
    assert "(gated, " in result.message


def test_a_function_gets_the_weights_of_the_correction():
    conventions = Conventions(importance_level="token", importance_mode=torch.sqrt)
    weights = importance_weights(
        torch.zeros(1, 2), -torch.tensor([[4.0, 9.0]]).log(), torch.ones(1, 2).bool(), conventions
    )
    assert torch.allclose(weights, torch.tensor([[2.0, 3.0]]))


@pytest.mark.parametrize("name", PIECES)
def test_a_piece_takes_a_word_custom_or_a_function_and_nothing_else(name):
    for value in (*choices(name), "custom", max):
        assert getattr(Conventions(**{name: value}), name) == value
    with pytest.raises(ValueError, match="'custom' or a function"):
        Conventions(**{name: "costum"})
