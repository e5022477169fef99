import signal

import pytest

from rlcanary.bisect.outcomes import Ending, Outcome, mentions_pytest, read_ending


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (0, Outcome.GOOD),
        (1, Outcome.BAD),
        (2, Outcome.BAD),
        (4, Outcome.BAD),
        (124, Outcome.BAD),
        (125, Outcome.UNTESTABLE),
        (126, Outcome.UNTESTABLE),
        (127, Outcome.UNTESTABLE),
        (128 + signal.SIGSEGV, Outcome.BAD),
        (128 + signal.SIGKILL, Outcome.INFRA),
        (-signal.SIGKILL, Outcome.INFRA),
        (-signal.SIGTERM, Outcome.INFRA),
        (-signal.SIGSEGV, Outcome.BAD),
        (-signal.SIGABRT, Outcome.BAD),
        (255, Outcome.BAD),
    ],
)
def test_exit_code_or_signal_means_one_outcome(code: int, outcome: Outcome) -> None:
    assert read_ending(Ending(code, 1.0), runs_pytest=False).outcome is outcome


@pytest.mark.parametrize(
    ("code", "outcome"), [(1, Outcome.BAD), (2, Outcome.BAD), (4, Outcome.UNTESTABLE), (5, Outcome.UNTESTABLE)]
)
def test_pytest_that_finds_no_test_says_nothing_about_the_commit(code: int, outcome: Outcome) -> None:
    assert read_ending(Ending(code, 1.0), runs_pytest=True).outcome is outcome


def test_timeout_counts_as_infrastructure_whatever_the_exit_code() -> None:
    assert read_ending(Ending(0, 3.0, timed_out=True), runs_pytest=False).outcome is Outcome.INFRA


def test_pytest_is_recognised_inside_a_shell_command_but_not_inside_a_word() -> None:
    assert mentions_pytest(["sh", "-c", "cd x && python -m pytest -q"])
    assert not mentions_pytest(["./run_mypytests"])
