"""`rlcanary bisect --metric`: bisects on a tracked value, whose step no single run shows."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bisect_repositories import bisect, found, make_history, numbered, refusal

pytestmark = pytest.mark.usefixtures("plain_git")

ENDS = "--good", "c1", "--bad", "c60"
CULPRIT = 37


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return make_history(tmp_path / "r", 60, numbered)


def measuring(tmp_path: Path, script: str) -> tuple[str, ...]:
    """A command that prints what the Python expression `script` says, in terms of the commit i and standard noise z."""
    count = tmp_path / "count"
    code = (
        f"import json, pathlib, random; count = pathlib.Path({str(count)!r})\n"
        "k = len(count.read_text()) if count.exists() else 0; count.write_text('x' * (k + 1))\n"
        f"i = int(pathlib.Path('value').read_text()); z = random.Random(k).gauss(0, 1)\n{script}\n"
    )
    return "python3", "-c", code


@pytest.mark.parametrize(("worse", "sign"), [("higher", 1), ("lower", -1)])
def test_step_of_three_standard_deviations_is_found_with_its_levels(
    repository: Path, tmp_path: Path, worse: str, sign: int
) -> None:
    step = f"print(json.dumps({{'tokens_per_s': 100 + z + {3 * sign} * (i >= {CULPRIT})}}))"
    arguments = "--metric", "test_x::test_y.tokens_per_s", "--worse", worse, "--json", str(tmp_path / "r.json")
    result = bisect(repository, *ENDS, *arguments, "--", *measuring(tmp_path, step))
    assert found(result) == f"change {CULPRIT} [wip]"
    answer = json.loads((tmp_path / "r.json").read_text())
    assert answer["estimates"]["after"] - answer["estimates"]["before"] == pytest.approx(3 * sign, abs=1.2)
    assert {o["outcome"] for o in answer["observations"]} == {"measured"}
    assert all(o["value"] is not None for o in answer["observations"])
    assert "The metric: before" in result.stdout
    again = bisect(repository, "--replay", answer["log"], *arguments[:4], "--", "false")
    assert found(again) == f"change {CULPRIT} [wip]"


def test_value_comes_from_the_results_file_of_a_real_pytest_with_the_tracker(tmp_path: Path) -> None:
    test = (
        "import pathlib\n\ndef test_y(tracker):\n"
        "    tracker.track('reward', 5.0 if int(pathlib.Path('value').read_text()) < 6 else 4.0)\n"
    )
    stale = {"git_commit": None, "start_time": "2020-01-01", "metrics": {"test_x::test_y": {"reward": 1.0}}}
    repository = make_history(
        tmp_path / "r",
        9,
        lambda i: {
            "tests/unit/test_x.py": test,
            "value": f"{i}\n",
            "pytest.ini": "[pytest]\n",
            "old/unit_results.json": json.dumps(stale),
        },
    )
    command = "pytest", "-q", "-p", "pytest_rlcanary.tracker", "tests/unit/test_x.py::test_y"
    options = "--metric", "test_x::test_y.reward", "--worse", "lower"
    result = bisect(repository, "--good", "c1", "--bad", "c9", *options, "--", *command)
    assert found(result) == "change 6 [wip]"
    misspelt = "--metric", "test_x::test_y.rewrad", "--worse", "lower"
    refused = refusal(bisect(repository, "--good", "c1", "--bad", "c9", *misspelt, "--", *command))
    assert "one of test_x::test_y.reward" in refused
    assert "check the name after --metric" in refused


JSON_LINES = """
from pathlib import Path
level = 1 + 5 * (i >= 37) + z / 10
Path("logs").mkdir(exist_ok=True)
Path("logs/run.jsonl").write_text("".join(json.dumps({"step": s, "train": {"loss": level * s}}) + chr(10) for s in (1, 2)))
"""
EVENTS = """
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter
writer = EventFileWriter("logs")
for s in 2, 1:
    value = Summary.Value(tag="train/loss", simple_value=s * (1 + 5 * (i >= 37) + z / 10))
    writer.add_event(Event(step=s, summary=Summary(value=[value])))
writer.close()
"""


@pytest.mark.parametrize("script", [pytest.param(JSON_LINES, id="json-lines"), pytest.param(EVENTS, id="tensorboard")])
def test_value_is_that_of_the_last_step_of_a_log(repository: Path, tmp_path: Path, script: str) -> None:
    if script is EVENTS:
        pytest.importorskip("tensorboard")
    command = sys.executable, *measuring(tmp_path, script)[1:]
    options = "--metric", "train/loss", "--worse", "higher", "--json", str(tmp_path / "r.json")
    assert found(bisect(repository, *ENDS, *options, "--", *command)) == f"change {CULPRIT} [wip]"
    estimates = json.loads((tmp_path / "r.json").read_text())["estimates"]
    assert (estimates["before"], estimates["after"]) == pytest.approx((2, 12), abs=1)


def test_metric_that_moved_the_other_way_is_refused_with_the_way_it_moved(repository: Path, tmp_path: Path) -> None:
    step = f"print(json.dumps({{'loss': 1 + 8 * (i >= {CULPRIT}) + z}}))"
    command = measuring(tmp_path, step)
    result = bisect(repository, *ENDS, "--metric", "t::t.loss", "--worse", "lower", "--", *command)
    assert "higher than GOOD, not lower" in refusal(result)


def test_metric_that_does_not_move_is_refused_with_what_was_measured(repository: Path, tmp_path: Path) -> None:
    same = "print(json.dumps({'metric': 'loss', 'value': 1 + z}))"
    result = bisect(repository, *ENDS, "--metric", "t::t.loss", "--worse", "higher", "--", *measuring(tmp_path, same))
    assert "cannot be told apart" in refusal(result)


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("print('nothing')", "exit 0, and it left no value of t::t.loss"),
        ("print('{\"loss\": NaN}')", "t::t.loss is nan, not a number"),
        ('print(\'{"loss": "low"}\')', "t::t.loss is 'low', not a number"),
        ("raise SystemExit(7)", "cannot be tested: exit 7"),
    ],
)
def test_run_that_measures_nothing_makes_its_commit_untestable(
    repository: Path, tmp_path: Path, script: str, message: str
) -> None:
    command = measuring(tmp_path, script)
    assert message in refusal(bisect(repository, *ENDS, "--metric", "t::t.loss", "--worse", "higher", "--", *command))


def test_failing_test_that_measured_counts_by_its_value(repository: Path, tmp_path: Path) -> None:
    step = f"print(json.dumps({{'loss': 1 + 5 * (i >= {CULPRIT}) + z / 10}})); raise SystemExit(1)"
    command = measuring(tmp_path, step)
    assert found(bisect(repository, *ENDS, "--metric", "t::t.loss", "--worse", "higher", "--", *command)) == (
        f"change {CULPRIT} [wip]"
    )


def test_options_that_do_not_go_together_are_refused(repository: Path) -> None:
    assert "--worse belong together" in refusal(bisect(repository, *ENDS, "--metric", "x", "--", "true"))
    both = "--metric", "x", "--worse", "lower", "--deterministic"
    assert "leave it out with --metric" in refusal(bisect(repository, *ENDS, *both, "--", "true"))
    assert "in one checkout" in refusal(bisect(repository, *ENDS, "--in-place", "--jobs", "2", "--", "true"))


def test_marks_by_hand_are_for_commits_that_pass_or_fail(repository: Path, tmp_path: Path) -> None:
    step = f"print(json.dumps({{'loss': 1 + 5 * (i >= {CULPRIT}) + z / 10}}))"
    bisect(repository, *ENDS, "--metric", "t::t.loss", "--worse", "higher", "--", *measuring(tmp_path, step))
    marked = subprocess.run(
        ["rlcanary", "bisect", "mark", "c9", "good"], cwd=repository, capture_output=True, text=True, check=False
    )
    assert "only skip can be marked" in marked.stderr
