import re
import signal
from pathlib import Path

import pytest

from rlcanary.bisect.settings import read_settings
from rlcanary.errors import UserError
from rlcanary.jobs.outcomes import Outcome, OutcomeTable, Pattern, find_runners
from rlcanary.system.ending import Ending

STANDARD = OutcomeTable()


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (0, Outcome.GOOD),
        (1, Outcome.BAD),
        (2, Outcome.BAD),
        (4, Outcome.BAD),
        (124, Outcome.INFRA),
        (125, Outcome.UNTESTABLE),
        (126, Outcome.UNTESTABLE),
        (127, Outcome.UNTESTABLE),
        (128 + signal.SIGSEGV, Outcome.BAD),
        (128 + signal.SIGKILL, Outcome.INFRA),
        (-signal.SIGKILL, Outcome.INFRA),
        (-signal.SIGTERM, Outcome.INFRA),
        (-signal.SIGSEGV, Outcome.BAD),
        (-signal.SIGABRT, Outcome.BAD),
        (-(signal.SIGRTMIN + 1), Outcome.BAD),
        (255, Outcome.BAD),
    ],
)
def test_exit_code_or_signal_means_one_outcome(code: int, outcome: Outcome) -> None:
    assert STANDARD.read(Ending(code, 1.0)).outcome is outcome


@pytest.mark.parametrize(
    ("code", "outcome"),
    [
        (1, Outcome.BAD),
        (2, Outcome.BAD),
        (3, Outcome.UNTESTABLE),
        (4, Outcome.UNTESTABLE),
        (5, Outcome.UNTESTABLE),
    ],
)
def test_pytest_that_finds_no_test_says_nothing_about_the_commit(code: int, outcome: Outcome) -> None:
    assert STANDARD.read(Ending(code, 1.0), ["pytest"]).outcome is outcome


def test_timeout_counts_as_infrastructure_whatever_the_exit_code() -> None:
    assert STANDARD.read(Ending(0, 3.0, timed_out=True)).outcome is Outcome.INFRA


def test_runners_are_recognised_inside_a_shell_command_but_not_inside_a_word() -> None:
    assert find_runners(["sh", "-c", "cd x && python -m pytest -q"], []) == ("pytest",)
    assert find_runners(["rlcanary", "check", "canary.py"], []) == ("rlcanary",)
    assert find_runners(["rlcanary", "replay", "runs/canary/update-7", "--adapter", "canary.py"], []) == ("rlcanary",)
    assert find_runners(["./run_mypytests"], ["exec nothing"]) == ()


@pytest.mark.parametrize(
    ("state", "code", "outcome"),
    [
        ("COMPLETED", 0, Outcome.GOOD),
        ("FAILED", 1, Outcome.BAD),
        ("FAILED", 125, Outcome.UNTESTABLE),
        ("NODE_FAIL", 0, Outcome.INFRA),
        ("CANCELLED", 0, Outcome.INFRA),
        ("OUT_OF_MEMORY", 137, Outcome.INFRA),
        ("TIMEOUT", 0, Outcome.INFRA),
    ],
)
def test_slurm_state_that_the_command_prints_counts_before_its_exit_code(
    state: str, code: int, outcome: Outcome
) -> None:
    output = f"   JobId=1 JobName=x\n   JobState=RUNNING Reason=None\n   JobState={state} Reason=None ExitCode=0:0\n"
    assert STANDARD.read(Ending(code, 1.0), output=output).outcome is outcome


@pytest.mark.parametrize("state", ["COMPLETED", "FAILED", "NODE_FAIL", "LOST"])
def test_job_without_an_exit_code_is_no_evidence_whatever_its_state(state: str) -> None:
    reading = STANDARD.read(Ending(0, 0.0, state=state, why="no result file"))
    assert reading.outcome is Outcome.INFRA
    assert reading.reason == f"job {state}: no result file"


def test_broken_machine_that_says_so_is_no_evidence_but_a_passing_run_is() -> None:
    output = "training\nOSError: [Errno 28] No space left on device\n"
    assert STANDARD.read(Ending(1, 1.0), output=output).outcome is Outcome.INFRA
    assert STANDARD.read(Ending(0, 1.0), output=output).outcome is Outcome.GOOD


def test_user_settles_codes_signals_states_timeouts_and_patterns_in_pyproject(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        """
        [tool.rlcanary.bisect]
        jobs = 3
        on-timeout = "bad"
        [tool.rlcanary.bisect.outcomes]
        7 = "abort"
        SIGSEGV = "infra"
        timeout = "bad"
        NODE_FAIL = "untestable"
        "pytest 2" = "untestable"
        [tool.rlcanary.bisect.patterns]
        "^NCCL timeout" = "infra"
        """
    )
    settings = read_settings(tmp_path)
    table = settings.outcomes
    assert settings.options == {"jobs": 3, "on_timeout": "bad"}
    assert table.read(Ending(7, 1.0)).outcome is Outcome.ABORT
    assert table.read(Ending(128 + signal.SIGSEGV, 1.0)).outcome is Outcome.INFRA
    assert table.read(Ending(1, 9.0, timed_out=True)).outcome is Outcome.BAD
    assert table.read(Ending(124, 1.0)).outcome is Outcome.BAD
    assert table.read(Ending(0, 1.0), output="JobState=NODE_FAIL").outcome is Outcome.UNTESTABLE
    assert table.read(Ending(2, 1.0), ["pytest"]).outcome is Outcome.UNTESTABLE
    assert table.read(Ending(2, 1.0)).outcome is Outcome.BAD
    assert table.read(Ending(1, 1.0), output="x\nNCCL timeout on rank 3").outcome is Outcome.INFRA


def test_pattern_of_the_user_counts_before_the_exit_code() -> None:
    table = OutcomeTable({"1": Outcome.BAD}, [Pattern(re.compile("flaky node"), Outcome.INFRA)])
    assert table.read(Ending(1, 1.0), output="flaky node 7").outcome is Outcome.INFRA


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tool.rlcanary.bisect]\njbos = 1", "no entry 'jbos'"),
        ("[tool.rlcanary.bisect]\njobs = 0", "jobs in .* is 0"),
        ("[tool.rlcanary.bisect]\nenv = 3", "env in .* is 3, not a text"),
        ("[tool.rlcanary.bisect]\noutcomes = 3", "outcomes is 3, not a table"),
        ("[tool.rlcanary.bisect]\npatterns = ['x']", "patterns is .*, not a table"),
        ("[tool]\nrlcanary = 3", "rlcanary is 3, not a table"),
        ("[tool.rlcanary.bisect.outcomes]\n7 = 'baad'", "'7' is 'baad'"),
        ("[tool.rlcanary.bisect.outcomes]\nSIGSGV = 'bad'", "'SIGSGV' .* is no exit code"),
        ("[tool.rlcanary.bisect.outcomes]\n300 = 'bad'", "'300' .* is no exit code"),
        ("[tool.rlcanary.bisect.patterns]\n'(' = 'bad'", r"'\(' is no regular expression"),
        ("[tool.rlcanary", "cannot read .*pyproject.toml"),
    ],
)
def test_entry_that_means_nothing_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    with pytest.raises(UserError, match=message):
        read_settings(tmp_path)
