"""Metric checks: what they mean, what they refuse, and that no hole lets a bad run pass."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rlcanary.commands.metrics.check_metrics import check_metrics
from rlcanary.errors import UserError
from rlcanary.run_metrics.expression import Check, Verdict

SCRIPT = Path(__file__).parents[2] / "check_metrics.py"
NAN, INF = float("nan"), float("inf")

RUN: dict[str, Any] = {
    "loss": {str(step): float(step) for step in range(1, 11)},  # 1.0 … 10.0 at steps 1 … 10
    "from_zero": {str(step): float(step) for step in range(10)},
    "every_tenth": {str(step): step / 10 for step in range(10, 101, 10)},
    "resumed": {str(step): 1.0 for step in range(51, 61)},
    "nan": {"1": 1.0, "2": NAN, "3": 2.0},
    "null": {"1": None, "2": 3.0},
    "inf": {"1": 1.0, "2": INF},
    "a->b<=c": {"1": 2.0},
    "empty": {},
    "text": {"1": "x"},
    "metrics": {"test_loss::test_clip[a'b]": {"ratio": 0.5, "mode": "greedy", "list": [3, 1, 2], "ok": True}},
}


def verdict(check: str) -> Verdict:
    return Check(check).on(RUN)


@pytest.mark.parametrize(
    ("call", "value"),
    [
        ('min(data["loss"])', 1.0),
        ('max(data["loss"])', 10.0),
        ('mean(data["loss"])', 5.5),
        ('median(data["loss"])', 5.5),
        ('ratio_above(data["loss"], 8)', 0.3),
        ('mean(data["loss"], -6, -1)', 7.0),  # steps 5 … 9
        ('mean(data["loss"], -6, 0)', 7.5),
        ('mean(data["loss"], 3, 6)', 4.0),
        ('mean(data["loss"], range_start=9)', 9.5),
        ('median(data["loss"], range_end=-7)', 2.0),
        ('mean(data["loss"], ignore_top_p=0.2)', 4.5),
        ('mean(data["loss"], 1, 0, 1.0)', 1.0),
        ('max(data["loss"], -6, -1)', 9.0),
        ('mean(data["loss"], last=2)', 9.5),
        ('mean(data["from_zero"])', 4.5),
        ('min(data["from_zero"], 0, 2)', 0.0),
        ('mean(data["every_tenth"], last=3)', 9.0),
        ('mean(data["every_tenth"], -3)', 10.0),
        ('mean(data["resumed"], -3)', 1.0),
        ('max(data["nan"], allow_nonfinite=True)', 2.0),
        ('max(data["null"], allow_nonfinite=True)', 3.0),
        ('max(data["metrics"]["test_loss::test_clip[a\'b]"]["list"])', 3),
        ('data["metrics"]["test_loss::test_clip[a\'b]"]["list"][-1]', 2),
        ('data["loss"]["9"]', 9.0),
        ('data["loss"][9]', 9.0),
        ('abs(data["loss"]["1"] - 3) / 2 + 1 * -1', 0.0),
        ('len(data["loss"])', 10),
        ('len(data["nan"]) + 1', 4),
        ('len(data["empty"])', 0),
        ('len(data["metrics"]["test_loss::test_clip[a\'b]"]["list"])', 3),
    ],
)
def test_value(call: str, value: float) -> None:
    answer = verdict(f"{call} == {value}")
    assert answer.values == [pytest.approx(value)]
    assert answer.passed, answer.message


def test_top_values_that_are_ignored_are_counted_exactly() -> None:
    data = {"m": {str(step): float(step) for step in range(1, 101)}}
    assert Check('mean(data["m"], ignore_top_p=0.07) == 47').on(data).passed  # the mean of 1 … 93


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        ('data["loss"]["9"] < 1500', True),
        ('0 < mean(data["loss"]) < 6', True),
        ('0 < mean(data["loss"]) < 5', False),
        ('6 < mean(data["loss"]) < 7', False),
        ('data["a->b<=c"]["1"] != 3', True),
        ('data["a->b<=c"]["1"] != 2', False),
        ('data["loss"]["1"] < 2 and data["loss"]["2"] < 2', False),
        ('data["loss"]["1"] < 2 or data["loss"]["2"] < 2', True),
        ('not data["loss"]["1"] > 2', True),
        ('not data["loss"]["1"] < 2', False),
        ('data["metrics"]["test_loss::test_clip[a\'b]"]["mode"] == "greedy"', True),
        ('data["metrics"]["test_loss::test_clip[a\'b]"]["ok"] == True', True),
        ('"10" in data["loss"]', True),
        ('10 in data["loss"]', True),
        ('"11" in data["loss"]', False),
        ('"11" in data["every_tenth"] or "3" in data["empty"]', False),
        ('"11" not in data["loss"]', True),
        ('"10" not in data["loss"]', False),
        ('not "11" in data["loss"] and len(data["loss"]) == 10', True),
        ('len(data["loss"]) == 2', False),
    ],
)
def test_condition(check: str, passed: bool) -> None:
    answer = verdict(check)
    assert answer.passed is passed
    assert bool(answer.message) is not passed


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ('max(data["nan"]) < 5', "not finite, at steps 2"),
        ('min(data["nan"]) < 5', "not finite"),
        ('mean(data["nan"]) < 5', "not finite"),
        ('median(data["nan"]) < 5', "not finite"),
        ('ratio_above(data["nan"], 9) < 0.5', "not finite"),
        ('max(data["null"]) < 5', "not finite"),
        ('min(data["inf"]) < 5', "not finite"),
        ('data["nan"]["2"] != 5', "is not finite (nan)"),
        ('data["inf"]["2"] > 5', "is not finite (inf)"),
        ('1 / data["inf"]["2"] < 5', "is not finite (inf)"),
        ('abs(data["null"]["1"]) >= 0', "is not finite (null)"),
        ('max(data["null"], 1, 2, allow_nonfinite=True) < 5', "1 of 1 values are not finite"),
        ('ratio_above(data["empty"], 1) < 0.5', "the metric has no value"),
        (
            'mean(data["resumed"], 1, 11) < 5',
            "at steps 51, 52, 53, …",
        ),
        ('mean(data["every_tenth"], -6, -1) < 5', "takes the newest N"),
        ('max(data["los"]) < 5', "the nearest are 'loss'"),
        ('data["loss"]["11"] < 5', "there is no '11'"),
        ('1 < 2 or data["los"]["1"] < 2', "there is no 'los'"),
        ('max(data["text"]) < 5', "step 1 is 'x', not a number"),
        ('data["text"]["1"] < 5', "compares 'x'"),
        ('data["text"]["1"] != 5', "compares 'x'"),
        ('data["loss"] != 5', "object with 10 keys"),
        ('max(data["metrics"]) < 5', "is not a step number"),
        ('data["loss"]["1"]["2"] < 5', "there is no '2' in 1.0"),
        ('data["loss"]["1"] / 0 < 5', "division by zero"),
        ('mean(data["loss"], ignore_top_p=1.5) < 5', "a share from 0 to 1"),
        ('mean(data["loss"], 1.5) < 5', "range_start is a whole number"),
        ('mean(data["loss"], 1, last=3) < 5', "goes without range_start"),
        ('data["metrics"]["test_loss::test_clip[a\'b]"]["ok"] < 5', "compares True"),
        ('"11" in data["loss"]', "has the steps 1, 2, 3"),
        ('"1" in data["empty"]', "data['empty'] has no steps"),
        ('"10" in data["los"]', "the nearest are 'loss'"),
        ('"1" in data["loss"]["1"]', "is 1.0, not a metric"),
        ('"x" in data["text"]["1"]', "is 'x', not a metric"),
        ('len(data["loss"]["1"]) == 1', "is 1.0, not a metric"),
        ('len(data["text"]["1"]) == 1', "is 'x', not a metric"),
        ('len(data["los"]) == 0', "the nearest are 'loss'"),
    ],
)
def test_what_cannot_be_answered_fails_and_says_why(check: str, reason: str) -> None:
    answer = verdict(check)
    assert not answer.passed
    assert reason in answer.message


@pytest.mark.parametrize(
    ("check", "reason"),
    [
        ('__import__("os").system("touch harm") == data', "is not in the grammar"),
        ("().__class__ == data", "is not in the grammar"),
        ('data.get("loss") == 1', "is not in the grammar"),
        ('[x for x in data] == data["loss"]', "is not in the grammar"),
        ('(lambda: data)() == data["loss"]', "is not in the grammar"),
        ('f"{data}" == data["loss"]', "is not in the grammar"),
        ('2 ** 9999999 > data["loss"]["1"]', "is not in the grammar"),
        ('data["loss"][1:3] == 1', "a string or a whole number"),
        ('data[data["loss"]["1"]] == 1', "a string or a whole number"),
        ('open("x") == data["loss"]["1"]', "there is no function open"),
        ('maen(data["loss"]) < 1', "did you mean mean?"),
        ('mean(data["loss"], 1, 2, 3, 4) < 1', "mean: too many"),
        ('mean(data["loss"], start=1) < 1', "keyword argument 'start'"),
        ('mean(**data["loss"]) < 1', "** is not in the grammar"),
        ('loss["1"] < 1', "there is no name loss"),
        ('mean(data["loss"])', "not a condition"),
        ('data["loss"]["1"] in data["loss"]', "is no step"),
        ('"1" in data["loss"] in data["nan"]', "compare with <"),
        ('("1" in data["loss"]) == True', "is not in the grammar"),
        ('data["loss"] is None', "compare with <"),
        ('"1" in "data"', "it does not look at `data`"),
        ('len(data["loss"], 2) == 1', "len: too many"),
        ('(data["loss"]["1"] < 2) < 3', "is not in the grammar"),
        ("1 < 2", "it does not look at `data`"),
        ('data["loss"] <', "invalid syntax"),
        ("", "invalid syntax"),
        ("-" * 3000 + '1 < data["loss"]["1"]', "cannot be read"),
        ("1 + " * 2000 + '1 < data["loss"]["1"]', "longer than 5000 characters"),
        ('data["lo\0ss"] < 1', "null bytes"),
    ],
)
def test_what_is_no_check_is_refused_before_anything_is_looked_up(check: str, reason: str) -> None:
    with pytest.raises(UserError, match=r"^not a check: ") as caught:
        Check(check)
    assert reason in str(caught.value)


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.json"
    path.write_text(json.dumps(RUN))
    return path


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(check_metrics, list(map(str, arguments)), standalone_mode=False)


def test_table_shows_every_check_with_its_value_and_reason(run_file: Path) -> None:
    answer = ask(run_file, 'data["loss"]["9"] < 1500', 'mean(data["loss"], -6, -1) < 0.6')
    assert answer.return_value == 1
    lines = answer.output.splitlines()
    assert "Metric Checks" in lines[0]
    assert all(title in lines[2] for title in ("Status", "Check", "Value", "Message"))
    (passed,) = [line for line in lines if "PASS" in line]
    assert "1500" in passed
    (failed,) = [line for line in lines if "FAIL" in line]
    assert "7 < 0.6 is false" in failed


def test_json_answer_is_json_also_for_nan(run_file: Path) -> None:
    answer = ask(run_file, "--json", 'data["nan"]["2"] < 1')
    assert answer.return_value == 1

    def refuse(constant: str) -> None:
        raise ValueError(constant)

    (document,) = json.loads(answer.output, parse_constant=refuse)
    assert (document["passed"], document["values"]) == (False, [None])


def test_checks_that_all_pass_are_exit_0(run_file: Path) -> None:
    assert ask(run_file, 'data["loss"]["9"] < 1500', '-1 < min(data["from_zero"])').return_value == 0


@pytest.mark.parametrize("text", ["", "[1]", '{"loss": {"1"'], ids=["empty", "list", "truncated"])
def test_file_without_metrics_is_a_mistake_and_not_a_failed_check(run_file: Path, text: str) -> None:
    run_file.write_text(text)
    assert isinstance(ask(run_file, 'data["loss"]["9"] < 1').exception, UserError)


def test_record_that_cannot_be_written_is_a_mistake(run_file: Path, tmp_path: Path) -> None:
    answer = ask(run_file, 'data["loss"]["9"] < 1500', "--record", tmp_path / "nowhere/record.jsonl")
    assert isinstance(answer.exception, UserError)
    assert "its folder does not exist" in str(answer.exception)


def test_run_may_come_through_a_pipe(run_file: Path) -> None:
    with subprocess.Popen(["cat", run_file], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert ask(f"/dev/fd/{process.stdout.fileno()}", 'data["loss"]["9"] < 1500').return_value == 0


def test_known_spelling_is_kept(run_file: Path) -> None:
    def script(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(SCRIPT), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    assert script(run_file, 'data["loss"]["9"] < 1500', 'min(data["loss"]) > 0').returncode == 0
    failed = script(run_file, 'max(data["loss"]) < 1')
    assert failed.returncode == 1
    assert "FAIL" in failed.stdout
    refused = script(run_file, "import os")
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1


def test_control_characters_of_a_run_never_reach_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"mode": {"1": "\x1b[2J"}, "loss\x1b[2J": {"1": 1.0}}))
    answer = ask(tmp_path / "run.json", 'data["mode"]["1"] == "x"', 'data["los"]["1"] < 1')
    assert answer.return_value == 1
    assert "\x1b" not in answer.output
    assert "\\x1b[2J" in answer.output


NEMO_RL = """
data["train/loss"]["1"] < 0.6
data['train/reward']['100'] > 0.5
len(data["train/loss"]) == 2
len(data["train/critic/loss"]) == 2
"10" in data["train/loss"]
"2" in data["validation/accuracy"]
abs(median(data["train/loss"])) < 0.05
data["score"] == 0.2
max(data["ray/node.0.gpu.0.mem_gb"]) < 80
ratio_above(data["train/token_mult_prob_error"], 1.1) < 0.1
mean(data["train/token_mult_prob_error"],-6,-1) < 1.05
mean(data["timing/train/total_step_time"], -6, -1, ignore_top_p=0.2) < 22
"""


@pytest.mark.parametrize("check", NEMO_RL.strip().splitlines())
def test_forms_of_check_in_the_scripts_of_nemo_rl_are_in_the_grammar(check: str) -> None:
    Check(check)
