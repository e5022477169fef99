"""Rows name their verifier: every name has one, made once, with options that exist."""

import subprocess
import sys
from collections import Counter

import pytest

from rlcanary.errors import UserError
from rlcanary.grpo.data.data import item_iterator
from rlcanary.grpo.plan.plan import DataSettings
from rlcanary.grpo.rewards.by_name import VERIFIERS, VerifiersByName
from rlcanary.grpo.rewards.verifier import Score, judge
from rlcanary.tiny_models import tiny_tokenizer

RIGHT = {
    "exact": ("7", "7"),
    "math": (r"\boxed{7}", "14/2"),
    "gsm8k": ("#### 7", 7),
    "ifeval": ("seven", {"instruction_id_list": ["change_case:english_lowercase"], "kwargs": [{}]}),
    "code": ("```python\nseven = 7\n```", "assert seven == 7"),
}


def test_every_name_has_a_verifier_that_is_made_once():
    verifiers = VerifiersByName()
    assert set(verifiers) == set(VERIFIERS) == set(RIGHT)
    for name, (completion, target) in RIGHT.items():
        assert judge(verifiers[name], completion, target).value == 1.0
        assert verifiers[name] is verifiers[name]


def test_options_reach_their_verifier():
    verifiers = VerifiersByName({"gsm8k": {"mode": "strict", "format_weight": 0.2}})
    assert judge(verifiers["gsm8k"], "#### 8", 7).value == 0.2
    assert judge(verifiers["exact"], "#### 8", "8").value == 0.0


def test_a_name_without_a_verifier_scores_nothing():
    assert "sql" not in VerifiersByName()
    with pytest.raises(KeyError, match="sql"):
        VerifiersByName()["sql"]


def test_a_dataset_with_a_name_without_a_verifier_is_refused_before_the_run(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"id": "a", "prompt": "1=", "target": "1", "verifier": "sql"}\n')
    data = DataSettings(datasets=({"name": str(path)},), chat_template=False)
    with pytest.raises(UserError, match="asks for the verifier 'sql', there are code, exact"):
        item_iterator(data, tiny_tokenizer(), VerifiersByName(), seed=0)


def test_each_verifier_keeps_its_own_bounds(monkeypatch):
    class Narrow:
        bounds = (0.0, 1.0)

        def verify(self, completion, target):
            return Score(2.0)

    class Wide(Narrow):
        bounds = (-1.0, 2.0)

    monkeypatch.setitem(VERIFIERS, "narrow", Narrow)
    monkeypatch.setitem(VERIFIERS, "wide", Wide)
    verifiers = VerifiersByName()
    assert verifiers["wide"].verify("", "").value == 2.0
    assert verifiers["narrow"].verify("", "").problem == "out of bounds"


def test_what_verifiers_say_is_counted_by_name():
    verifiers = VerifiersByName()
    for target in ("7", "8", "no number"):
        verifiers["gsm8k"].verify("#### 7", target)
    tally = verifiers.tallies()["gsm8k"]
    assert (tally.calls, tally.scored, tally.zeros, tally.problems) == (3, 2, 1, {"bad target": 1})
    assert set(verifiers.tallies()) == {"gsm8k"}


def test_problems_are_told_once():
    verifiers = VerifiersByName()
    verifiers["gsm8k"].verify("#### 7", "no number")
    taken = verifiers.take_problems()
    assert taken == Counter({"bad target": 1})
    assert taken.keys() >= {"timeout", "worker died"}  # what did not come up is 0, not missing
    assert verifiers.take_problems() == Counter()
    verifiers["gsm8k"].verify("#### 7", "no number")
    verifiers["exact"].verify("", "7")
    assert verifiers.take_problems() == Counter({"bad target": 1, "no answer": 1})


@pytest.mark.parametrize(
    ("options", "error"),
    [({"maths": {}}, "no verifier maths"), ({"gsm8k": {"modus": "strict"}}, "option modus")],
)
def test_options_that_do_not_exist_are_refused_at_once(options, error):
    with pytest.raises(UserError, match=error):
        VerifiersByName(options)


def test_nothing_is_imported_for_a_verifier_that_no_row_asks_for():
    code = (
        "import sys; from rlcanary.grpo.rewards.by_name import VerifiersByName; VerifiersByName()['exact'];"
        "print({'ray', 'sympy', 'torch', 'math_verify'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
