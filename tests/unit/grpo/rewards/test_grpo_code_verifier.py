"""Programs are judged by tests that ran to their end, never by a program that ended well."""

import sys

import pytest
from waiting import HANG_S

from rlcanary.grpo.rewards.code import CodeVerifier
from rlcanary.grpo.rewards.verifier import judge

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="code is confined by means of Linux")

TESTS = ["assert square(2) == 4", "assert square(3) == 9"]


def score(program, tests=TESTS, **limits):
    return judge(CodeVerifier(**{"timeout": HANG_S, **limits}), f"Like this:\n```python\n{program}\n```\n", tests)


def test_program_that_passes_all_tests_is_right():
    program = 'print("{hello}")\ndef square(x):\n    return x * x'
    assert score(program).value == 1.0
    assert score(program, "\n".join(TESTS)).value == 1.0
    assert score(program, {"tests": TESTS}).value == 1.0


def test_last_block_is_the_answer():
    first = "def square(x):\n    return 4\n```\nNo, wait:\n```python\ndef square(x):\n    return x * x"
    assert score(first).value == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "def square(x):\n    return 4",
        "def square(x)",
        "raise SystemExit(0)",
        "import os\nos._exit(0)",
        "exec = print = lambda *given, **named: None",
        "import builtins\nbuiltins.exec = lambda *given: None",
    ],
    ids=["wrong", "no Python", "exits well", "exits at once", "other names", "other builtins"],
)
def test_program_that_does_not_reach_the_end_of_the_tests_is_wrong(program):
    result = score(program)
    assert (result.value, result.problem) == (0.0, None)


def test_program_without_end_is_ended_at_its_limit_and_wrong():
    result = score("while True:\n    pass", timeout=0.5)
    assert (result.value, result.detail) == (0.0, "timeout")


def test_completion_without_a_program_is_counted_apart():
    assert judge(CodeVerifier(), "square(x) = x * x", TESTS).problem == "no answer"


HUMANEVAL = "METADATA = {'author': 'jt'}\n\n\ndef check(candidate):\n    assert candidate(2) == 4\n"


@pytest.mark.parametrize(
    "tests",
    [None, "", [], {}, "assert square(2 ==", {"stdin": "2"}, HUMANEVAL, '{"inputs": ["2"], "outputs": ["4"]'],
)
def test_target_without_tests_is_no_wrong_answer(tests):
    result = score("def square(x):\n    return x * x", tests)
    assert (result.value, result.problem) == (None, "bad target")
