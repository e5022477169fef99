"""Datasets: the same seed gives the same tasks, no row is ever left out, and mixtures visit every row once per epoch."""

import json
from collections import Counter

import pytest

from rlcanary.errors import UserError
from rlcanary.grpo.data import datasets
from rlcanary.grpo.data.datasets import Row, ids_of, in_sequence, join, load, load_jsonl, to_item, weighted
from rlcanary.grpo.data.items import ItemIterator
from rlcanary.grpo.rewards.by_name import VerifiersByName
from rlcanary.grpo.rewards.exact import ExactVerifier


def write(path, *rows):
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def test_arithmetic_is_right_and_repeats_from_its_seed():
    rows = load("arithmetic", count=60, seed=3, largest=20, operations="+-*")
    for row in rows:
        assert int(row.target) == eval(row.prompt.rstrip("=")) >= 0
    assert {operation for row in rows for operation in "+-*" if operation in row.prompt} == set("+-*")
    assert rows == load("arithmetic", count=60, seed=3, largest=20, operations="+-*")
    assert rows != load("arithmetic", count=60, seed=4, largest=20, operations="+-*")


def test_problems_repeat_only_when_there_are_no_others():
    assert len({row.prompt for row in load("arithmetic", count=60, largest=9)}) == 60
    assert len(load("arithmetic", count=60, largest=0)) == 60


def test_string_tasks_do_what_they_say():
    rows = load("strings", count=100, letters="abc", longest=5)
    for row in rows:
        task, text = row.prompt.rstrip("=").split()
        assert datasets.STRING_TASKS[task](text) == row.target
    assert {row.prompt.split()[0] for row in rows} == set(datasets.STRING_TASKS)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("arithmetics", {}, "'arithmetics': neither"),
        ("arithmetic", {"hardness": 3}, "no option hardness"),
        ("arithmetic", {"operations": "+/"}, "not some of"),
        ("arithmetic", {"count": 0}, "count=0"),
        ("arithmetic", {"count": 2.5}, r"arithmetic: count is 2\.5: .* integer"),
        ("arithmetic", {"largest": "9"}, "largest is '9'"),
        ("arithmetic", {"seed": True}, "seed is True"),
        ("strings", {"longest": 1.5}, r"longest is 1\.5"),
        ("strings", {"tasks": ["shout"]}, "shout are not some of copy"),
        ("nowhere.jsonl", {}, "the dataset nowhere.jsonl"),
        ("some.jsonl", {"seed": 1}, "no options but a name: seed"),
    ],
)
def test_unknown_dataset_or_option_is_refused(name, options, error):
    with pytest.raises(UserError, match=error):
        load(name, **options)


def test_jsonl_rows_come_as_they_are(tmp_path):
    path = write(
        tmp_path / "mine.jsonl",
        {"id": 1, "prompt": "one", "target": "1"},
        "",
        {
            "id": "two",
            "prompt": [{"role": "user", "content": "2"}],
            "target": 0,
            "verifier": "math",
            "dataset": "other",
        },
    )
    first, second = load(str(path))
    assert first == Row("1", "one", "1", "exact", "mine")
    assert (second.target, second.verifier, second.dataset) == (0, "math", "other")


@pytest.mark.parametrize(
    ("second", "error"),
    [
        ({"prompt": "b", "target": "2"}, "line 2: the row lacks id"),
        ({"id": "", "prompt": "b", "target": None}, "line 2: .*lacks id, target"),
        ({"id": "a", "prompt": "b", "target": "2"}, "line 2: the id 'a' is taken"),
        ({"id": "b", "prompt": "b", "target": "2", "answer": 1}, "line 2: .*no field answer"),
        ('{"id": "b"', "line 2: not JSON"),
        ("[1]", "line 2: a row is an object"),
    ],
)
def test_jsonl_row_that_is_not_whole_is_named_and_not_dropped(tmp_path, second, error):
    path = write(tmp_path / "mine.jsonl", {"id": "a", "prompt": "a", "target": "1"}, second)
    with pytest.raises(UserError, match=error):
        load_jsonl(path)


def test_empty_file_is_no_dataset(tmp_path):
    with pytest.raises(UserError, match="is empty"):
        load_jsonl(write(tmp_path / "mine.jsonl", ""))


def test_system_prompt_of_a_row_replaces_that_of_the_run_even_by_none():
    def roles(row):
        return [(message["role"], message["content"]) for message in row.messages("of the run")]

    assert roles(Row("a", "hello", "")) == [("system", "of the run"), ("user", "hello")]
    assert roles(Row("a", "hello", "", system_prompt="own")) == [("system", "own"), ("user", "hello")]
    assert roles(Row("a", "hello", "", system_prompt="")) == [("user", "hello")]


def test_item_rewards_the_text_of_a_completion():
    item = to_item(Row("a", "3+4=", "7"), lambda row: list(row.prompt.encode()), ExactVerifier())
    assert (item.id, bytes(item.prompt_ids)) == ("a", b"3+4=")
    assert (item.reward("7"), item.reward("8")) == (1.0, 0.0)


@pytest.fixture
def mixture():
    return ids_of(join({"small": load("arithmetic", count=10), "large": load("arithmetic", count=90)}))


def test_joined_datasets_share_no_ids(mixture):
    assert len(set(mixture["small"]) | set(mixture["large"])) == 100
    assert mixture["small"][0] == "small/arithmetic-0"


def test_weighted_order_visits_every_row_once_and_repeats_from_its_seed(mixture):
    order = weighted(mixture, {"small": 1, "large": 1}, seed=5)
    assert sorted(order(0)) == sorted(mixture["small"] + mixture["large"])
    assert order(0) == weighted(mixture, {"small": 1, "large": 1}, seed=5)(0)
    assert order(0) != order(1)
    assert order(0) != weighted(mixture, {"small": 1, "large": 1}, seed=6)(0)


def test_weighted_order_follows_the_weights_until_a_dataset_is_used_up():
    sizes = {"a": range(1000), "b": range(1000, 2000), "c": range(2000, 3000)}
    drawn = weighted(sizes, {"a": 6, "b": 3, "c": 1})(0)
    shares = Counter(id // 1000 for id in drawn[:1000])
    # five standard deviations of a binomial of 1000 draws are at most 80
    for share, expected in ((shares[0], 600), (shares[1], 300), (shares[2], 100)):
        assert abs(share - expected) < 80
    used_up = max(index for index, id in enumerate(drawn) if id < 1000)
    after = Counter(id // 1000 for id in drawn[used_up + 1 : used_up + 401])
    assert abs(after[1] - 300) < 45


def test_sequence_takes_each_dataset_as_a_whole_or_by_count(mixture):
    assert [id.partition("/")[0] for id in in_sequence(mixture)(0)] == ["small"] * 10 + ["large"] * 90
    counted = in_sequence(mixture, {"small": 3.0, "large": 5})
    assert [id.partition("/")[0] for id in counted(0)] == ["small"] * 3 + ["large"] * 5
    assert counted(0) != counted(1)


def test_datasets_of_one_size_are_not_shuffled_alike():
    order = in_sequence({"a": range(20), "b": range(20, 40)})(0)
    assert order[:20] != [id - 20 for id in order[20:]]


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda mixture: weighted({}, {}), "no dataset"),
        (lambda mixture: weighted({"a": []}, {"a": 1}), "one is empty"),
        (lambda mixture: weighted(mixture, {"small": 1}), "for each of small, large"),
        (lambda mixture: weighted(mixture, {"small": 1, "large": 0}), "finite: {'large': 0}"),
        (lambda mixture: weighted(mixture, {"small": 1, "large": float("nan")}), "positive and finite"),
        (lambda mixture: in_sequence(mixture, {"small": 11, "large": 1}), "count 11 of dataset small"),
        (lambda mixture: in_sequence(mixture, {"small": 2.5, "large": 1}), "2.5 of dataset small is no whole number"),
    ],
)
def test_mixture_that_makes_no_sense_is_refused(mixture, make, error):
    with pytest.raises(UserError, match=error):
        make(mixture)


def test_iterator_visits_a_mixture_epoch_by_epoch():
    rows = join({"a": load("arithmetic", count=5), "b": load("strings", count=5)})
    iterator = ItemIterator(rows, order=weighted(ids_of(rows), {"a": 1, "b": 2}))
    for _ in range(2):
        iterator.start_epoch()
        while (row := iterator.next_item()) is not None:
            iterator.mark_done(row.id)
        assert iterator.counts()["done"] == 10


def test_rows_are_taken_as_their_datasets_were_published(tmp_path):
    solution = "She sold 48/2 = <<48/2=24>>24 clips in May.\nIn all 48+24 = 72.\n#### 72"
    asked = [{"role": "user", "content": "Write without commas."}]
    constraint = json.dumps({"func_name": "validate_no_commas", "N": None})
    kwargs = [{"num_words": 2, "relation": "at least", "keywords": None}]
    check, tests = "def check(candidate):\n    assert candidate() == 1", ["assert one() == 1"]
    path = write(
        tmp_path / "published.jsonl",
        {"question": "How many clips?", "answer": solution},
        {
            "key": 1000,
            "prompt": "Two words.",
            "instruction_id_list": ["length_constraints:number_words"],
            "kwargs": kwargs,
        },
        {"messages": asked, "ground_truth": constraint, "dataset": "ifeval", "constraint_type": "c", "constraint": "C"},
        {"messages": asked, "ground_truth": "12", "dataset": "MATH"},
        {
            "task_id": "HumanEval/0",
            "prompt": "def one():",
            "entry_point": "one",
            "canonical_solution": "",
            "test": check,
        },
        {"task_id": 11, "text": "Say 1.", "code": "", "test_list": tests, "test_setup_code": ""},
        {
            "task_id": 12,
            "prompt": "Say 1.",
            "code": "",
            "test_list": tests,
            "test_imports": [],
            "source_file": "a.ipynb",
        },
    )
    rows, verifiers = load_jsonl(path), VerifiersByName()
    assert [row.id for row in rows] == ["1", "1000", "3", "4", "HumanEval/0", "11", "12"]
    assert [row.verifier for row in rows] == ["gsm8k", "ifeval", "ifeval", "math", "code", "code", "code"]
    answers = [("#### 72", "#### 24"), ("two words", "one"), ("no commas", "one, two")]
    for row, (right, wrong) in zip(rows, answers, strict=False):
        item = to_item(row, lambda row: [1], verifiers[row.verifier])
        assert (item.reward(right), item.reward(wrong)) == (1.0, 0.0)
    for row in rows[4:]:
        item = to_item(row, lambda row: [1], verifiers["code"])
        programs = [f"```python\ndef one():\n    return {number}\n```" for number in (1, 2)]
        assert [item.reward(each) for each in programs] == [1.0, 0.0]
    assert rows[5].prompt == "Say 1.\nYour code should pass these tests:\nassert one() == 1"


def test_the_verifier_sees_the_beginning_of_an_answer_that_the_policy_continues():
    row = Row("a", "3+4=", "7", verifier="gsm8k", answer_prefix="<answer>")
    item = to_item(row, lambda row: [1], VerifiersByName()["gsm8k"])
    assert (item.reward("7</answer>"), item.reward("8</answer>")) == (1.0, 0.0)
