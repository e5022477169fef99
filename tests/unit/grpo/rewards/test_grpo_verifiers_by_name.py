"""Rows name their verifier: every name has one, made once, with options that exist."""

import subprocess
import sys

import pytest

from rlcanary.errors import UserError
from rlcanary.grpo.rewards.by_name import VERIFIERS, VerifiersByName
from rlcanary.grpo.rewards.multi import MultiVerifier, TypedTarget
from rlcanary.grpo.rewards.verifier import judge

RIGHT = {
    "exact": ("7", "7"),
    "math": (r"\boxed{7}", "14/2"),
    "gsm8k": ("#### 7", 7),
    "ifeval": ("seven", {"instruction_id_list": ["change_case:english_lowercase"], "kwargs": [{}]}),
    "code": ("```python\nseven = 7\n```", "assert seven == 7"),
}


def test_every_name_has_a_verifier_and_together_they_make_a_multi_verifier():
    verifiers = VerifiersByName()
    assert set(verifiers) == set(VERIFIERS) == set(RIGHT)
    several = MultiVerifier(verifiers)
    for name, (completion, target) in RIGHT.items():
        assert judge(several, completion, TypedTarget(name, target)).value == 1.0
        assert verifiers[name] is verifiers[name]


def test_options_reach_their_verifier():
    verifiers = VerifiersByName({"gsm8k": {"mode": "strict", "format_weight": 0.2}})
    assert judge(verifiers["gsm8k"], "#### 8", 7).value == 0.2


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
    assert verifiers.take_problems() == {"bad target": 1}
    assert verifiers.take_problems() == {}
    verifiers["gsm8k"].verify("#### 7", "no number")
    verifiers["exact"].verify("", "7")
    assert verifiers.take_problems() == {"bad target": 1, "no answer": 1}


@pytest.mark.parametrize(
    ("options", "error"),
    [({"maths": {}}, "no verifier maths; there are exact, math"), ({"gsm8k": {"modus": "strict"}}, "'modus'")],
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
