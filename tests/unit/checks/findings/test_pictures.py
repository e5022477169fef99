"""What is drawn of a finding is what its check compared."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.bugs.objective.loss import AdvantagesAsMask
from rlcanary.bugs.scoring.mask import EosNotTrained
from rlcanary.checks import all_checks, run_check
from rlcanary.checks.findings.diagnosis import Diagnosis
from rlcanary.checks.findings.document import to_document
from rlcanary.checks.findings.picture import COLUMNS, ROWS, Row, grid, picture
from rlcanary.checks.tally import Compared, Fingerprint, Found
from rlcanary.contract.batch import Completion, Group
from rlcanary.reference import make_batch


def first(check_id: str, adapter: ReferenceAdapter) -> dict[str, Any]:
    """Return the picture of the first finding of a check."""
    (check,) = (each for each in all_checks() if each.id == check_id)
    return picture(run_check(check, adapter, "example").findings[0])


def drawn(compared: Compared) -> dict[str, Any]:
    return picture(Found(Fingerprint("", "value"), "", "", False, compared))


def test_gradient_is_drawn_with_the_mask_and_the_advantages_of_its_batch() -> None:
    picture = first("loss.declared_gradient", AdvantagesAsMask())
    rows = picture["compared"]["rows"]
    assert "advantage" in rows[0]["label"]
    assert [row["trained"] for row in rows] == [[True, True], [True, False]]
    for row in rows:
        expected, got = row["strips"]["expected"], row["strips"]["got"]
        assert row["off"] == [abs(one - other) > 1e-4 for one, other in zip(expected, got, strict=True)]
    assert any(any(row["off"]) for row in rows)
    assert "batch" not in picture


def test_mask_is_drawn_beside_the_ids_that_the_code_was_given() -> None:
    (row,) = first("mask.keeps_first_eos", EosNotTrained())["compared"]["rows"]
    assert row["strips"] == {"id": [5, 2, 7], "expected": [True, True, False], "got": [True, False, False]}
    assert row["off"] == [False, True, False]


def test_loss_is_drawn_with_the_weight_of_each_token() -> None:
    picture = first("loss.declared_value", AdvantagesAsMask())
    assert picture["compared"]["shape"] == [1, 1]
    assert list(picture["batch"]["rows"][0]["strips"]) == ["advantage"]


def test_entries_that_do_not_count_are_empty_and_never_differ() -> None:
    got, expected = torch.tensor([[1.0, 9.0]]), torch.tensor([[1.0, 2.0]])
    (row,) = drawn(Compared(got, expected, torch.tensor([[True, False]])))["compared"]["rows"]
    assert row["strips"] == {"expected": [1.0, None], "got": [1.0, None]}
    assert row["off"] == [False, False]


def test_lists_of_different_lengths_are_drawn_place_by_place() -> None:
    (row,) = drawn(Compared([5, 6], [5, 7, 8]))["compared"]["rows"]
    assert row["strips"] == {"expected": [5, 7, 8], "got": [5, 6, None]}
    assert row["off"] == [False, True, True]


def test_values_that_are_no_table_are_not_drawn() -> None:
    assert drawn(Compared({"a": 1}, {"a": 2})) == {}
    assert drawn(Compared([], [])) == {}


@pytest.mark.parametrize(
    "change", [{"completion_starts": torch.tensor([9, -4])}, {"completion_mask": torch.ones(1, 3)}]
)
def test_batch_that_the_code_made_wrongly_breaks_no_picture(change: dict[str, torch.Tensor]) -> None:
    group = Group([5, 6], [Completion([8, 9, 2]), Completion([10])], [1.0, 0.0])
    batch = replace(make_batch([group], 0)[0], **change)
    drawn = picture(Found(Fingerprint("", "rows"), "", "", False, seen=({"batch": batch}, {})))
    assert json.loads(json.dumps(drawn, allow_nan=False)) == drawn


def test_large_tensors_are_cut_around_what_differs() -> None:
    off = [False] * 100
    off[60] = True
    cut = grid(
        [
            *(Row(f"row {row}", {"got": [0.0] * 100}, [False] * 100) for row in range(20)),
            Row("last", {"got": [1.0] * 100}, off),
        ]
    )
    assert cut["shape"] == [21, 100]
    assert len(cut["columns"]) == COLUMNS
    assert 60 in cut["columns"]
    assert [len(cut["rows"]), cut["rows"][-1]["label"]] == [ROWS, "last"]


def test_document_is_json_that_any_reader_takes() -> None:
    (check,) = (each for each in all_checks() if each.id == "loss.masked_positions")

    class NanInPadding(ReferenceAdapter):
        def policy_loss(self, batch: Any) -> Any:
            output = super().policy_loss(batch)
            output.loss = output.loss + 0 * (batch.logprobs * ~batch.mask).sum()
            return output

    result = run_check(check, NanInPadding(), "example")
    document = to_document("example", [result], Diagnosis([]), [check])
    assert "nan" in json.dumps(document, allow_nan=False)
    assert document["folds"][0]["checks"] == ["loss.masked_positions"]
    assert document["explanations"].keys() == {"loss.masked_positions"}
