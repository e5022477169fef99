"""Prepared rows, counted and rendered a second time."""

from collections import Counter

import pytest

from rlcanary.contract.presets import GRPO
from rlcanary.contract.records.preparation import DataRow, PreparationOptions
from rlcanary.reference.data.preparing import prepare, prompt_ids
from rlcanary.tiny_models import tiny_chat_tokenizer

TOKENIZER = tiny_chat_tokenizer()


def row(id: int, prompt: str, dataset: str = "one") -> DataRow:
    return DataRow(id, [{"role": "user", "content": prompt}], str(id), dataset)


ROWS = [row(id, "x" * id, "one" if id % 3 else "two") for id in range(1, 10)]


def test_prompt_is_the_template_written_by_hand() -> None:
    system, asked = {"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2?"}
    text = "<bos><|start|>system\nbe brief<|end|>\n<|start|>user\n2+2?<|end|>\n<|start|>assistant\n"
    assert TOKENIZER.decode(prompt_ids([asked], TOKENIZER, "be brief")) == text
    assert TOKENIZER.decode(prompt_ids([system, asked], TOKENIZER, "be long")) == text
    assert "system" not in TOKENIZER.decode(prompt_ids([asked], TOKENIZER, ""))


@pytest.mark.parametrize("limit", [12, 15, 18])
def test_each_treatment_of_long_prompts_has_the_length_that_its_name_says(limit: int) -> None:
    whole = {each.id: list(each.prompt_ids) for each in prepare(ROWS, TOKENIZER, PreparationOptions()).kept}
    options = PreparationOptions(max_prompt_tokens=limit)
    fit = [id for id, ids in whole.items() if len(ids) <= limit]
    dropped = prepare(ROWS, TOKENIZER, options)
    assert [each.id for each in dropped.kept] == fit
    assert set(dropped.dropped or {}) == set(whole) - set(fit)
    for side, is_left in (("left", True), ("right", False)):
        cut = prepare(ROWS, TOKENIZER, options, GRPO.replace(long_prompt=side))
        for each in cut.kept:
            ids = list(each.prompt_ids)
            assert len(ids) == min(limit, len(whole[each.id]))
            assert (whole[each.id][-len(ids) :] if is_left else whole[each.id][: len(ids)]) == ids
    strict = GRPO.replace(long_prompt="raise")
    if len(fit) < len(ROWS):
        with pytest.raises(ValueError, match=f"more than {limit}"):
            prepare(ROWS, TOKENIZER, options, strict)
    else:
        assert len(prepare(ROWS, TOKENIZER, options, strict).kept) == len(ROWS)


def test_equal_prompts_with_another_reference_are_other_rows() -> None:
    rows = [row(1, "a"), row(2, "a"), DataRow(3, row(1, "a").messages, "1")]
    assert [each.id for each in prepare(rows, TOKENIZER, PreparationOptions()).kept] == [1, 2, 3]
    once = prepare(rows, TOKENIZER, PreparationOptions(), GRPO.replace(equal_prompts="drop"))
    assert ([each.id for each in once.kept], set(once.dropped or {})) == ([1, 2], {3})


def test_each_row_is_in_one_part_and_datasets_have_their_counts() -> None:
    options = PreparationOptions(seed=5, counts={"one": 4, "two": 2}, held_out=2, max_prompt_tokens=40)
    data = prepare(ROWS, TOKENIZER, options)
    parts = [each.id for each in (*data.kept, *data.held_out)]
    assert sorted([*parts, *(data.dropped or {})]) == [each.id for each in ROWS]
    assert Counter(each.dataset for each in (*data.kept, *data.held_out)) == {"one": 4, "two": 2}
    assert len(data.held_out) == 2


def test_every_order_of_three_rows_is_drawn_about_as_often() -> None:
    orders = Counter(
        tuple(each.id for each in prepare(ROWS[:3], TOKENIZER, PreparationOptions(seed=seed)).kept)
        for seed in range(240)
    )
    assert len(orders) == 6
    assert max(orders.values()) < 2.5 * min(orders.values())


@pytest.mark.parametrize("options", [PreparationOptions(counts={"two": 4}), PreparationOptions(held_out=9)])
def test_more_rows_than_there_are_is_an_error(options: PreparationOptions) -> None:
    with pytest.raises(ValueError, match=r"fewer rows|cannot be held out"):
        prepare(ROWS, TOKENIZER, options)
