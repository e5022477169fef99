"""`rlcanary check` as it is typed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import rlcanary
from programs import run_without_rlcanary

WRONG_MEAN = """
import torch
from rlcanary.adapters import Adapter

class WrongMean(Adapter):
    name = "wrong-mean"

    def advantages(self, rewards, group_ids):
        return (rewards - rewards.mean()) / (rewards.std() + 1e-6)

    def keep_group(self, rewards):
        return len(rewards) > 0
"""


def test_reference_passes_and_says_what_it_does_not_provide(tmp_path: Path) -> None:
    # That every check passes is tested in tests/unit/bugs/test_false_alarms.py.
    only = ["--only=advantage", "--only=step.dropout", "--only=evaluation.temperature", "--only=sync.buffers"]
    command = [sys.executable, "-m", "rlcanary", "check", "reference", "--json", "out.json", *only]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    document = json.loads((tmp_path / "out.json").read_text())
    assert document["adapter"] == "reference"
    others = {item["id"]: item["status"] for item in document["checks"] if item["status"] != "pass"}
    # Its conventions declare neither dropout in updates, nor sampling in evaluations, nor buffers that training changes.
    assert others == dict.fromkeys(("step.dropout_is_on", "evaluation.temperature", "sync.buffers"), "not-provided")
    assert len(document["checks"]) >= 12


def test_failure_shows_counterexample_and_exits_with_1(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG_MEAN)
    done = rlcanary("check", "mine", "--json", "out.json", "--programs", "programs", cwd=tmp_path)
    assert done.returncode == 1
    assert "FAIL advantage.declared_formula (wrong update)" in done.stdout
    assert "advantage.groups_are_separate" in done.stdout
    assert "not provided" in done.stdout
    items = {item["id"]: item for item in json.loads((tmp_path / "out.json").read_text())["checks"]}
    fields = {"id", "area", "status", "severity", "message", "snippet", "seconds", "findings"}
    assert set(items["mask.pad_id_zero"]) == fields
    assert items["mask.pad_id_zero"]["status"] == "not-provided"
    failed = items["advantage.groups_are_separate"]
    assert (failed["area"], failed["severity"]) == ("advantage", "update")
    assert "not checked: logprob, forward, " in done.stdout
    done = subprocess.run([sys.executable, "-c", failed["snippet"]], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "Finding: " in done.stderr
    with pytest.raises(AssertionError, match="reward"):
        run_without_rlcanary((tmp_path / "programs" / "advantage.groups_are_separate.py").read_text())


def test_exception_in_the_adapter_is_an_error_and_the_rest_runs(tmp_path: Path) -> None:
    broken = WRONG_MEAN.replace("rewards - rewards.mean()", "rewards - nothing")
    (tmp_path / "mine.py").write_text(broken)
    done = rlcanary("check", "mine.py", "--only", "advantage.", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 1
    checks = json.loads((tmp_path / "out.json").read_text())["checks"]
    # An exception is the right answer to a NaN reward under nan_reward="raise".
    assert [item["id"] for item in checks if item["status"] != "error"] == ["advantage.nan_reward"]
    assert "NameError" in checks[0]["message"]


def test_a_loss_that_is_no_loss_output_is_told_what_to_return(tmp_path: Path) -> None:
    loss = "    def policy_loss(self, batch):\n        return batch.logprobs.sum()\n"
    (tmp_path / "mine.py").write_text(WRONG_MEAN + loss)
    done = rlcanary("check", "mine.py", "--only", "loss.declared_value", cwd=tmp_path)
    assert done.returncode == 1
    assert "policy_loss returned a tensor, where a LossOutput belongs" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["check"], "Missing argument"),
        (["check", "nothing_like_it"], "no adapter 'nothing_like_it'"),
        (["check", "reference", "--only", "loos"], "no check starts with loos"),
        (["check", "reference", "--only", "mask,fliter"], "no check starts with fliter: did you mean filter?"),
        (
            ["check", "reference", "--only", "critic"],
            "starts with critic: did you mean credit? checks of credit, value, ",
        ),
        (
            ["check", "reference", "--only", "loss.metric_"],
            "no check starts with loss.metric_: did you mean loss.metrics?",
        ),
        (["check", "reference", "--only", ""], "no beginning of an id is given"),
        (["check", "reference", "--seed", "-1"], "Invalid value for '--seed'"),
        (["check", "reference", "--timeout", "nan"], "nan is not at most 1000000 seconds"),
        (["check", "reference", "--timeout", "inf"], "inf is not at most 1000000 seconds"),
        (["check", "reference", "--json", "out", "--html", "./out"], "out is given for two files"),
        (["check", "reference", "--json", "out", "--expected", "out"], "out is given for two files"),
        (["new-adapter", "none.py"], "no name for a Python module"),
        (["new-adapter", "_.py"], "no name for a Python module"),
        (["new-adapter", "/dev/null/mine.py"], "cannot make the folder /dev/null"),
        (["check", "reference", "--json", "no/such/folder/out.json"], "cannot write"),
        (["chek", "reference"], "No such command"),
        (["gallery", "nothing_like_it"], "cannot check nothing_like_it: no adapter 'nothing_like_it'"),
    ],
)
def test_mistake_is_one_line_on_stderr_and_exit_2(arguments: list[str], told: str, tmp_path: Path) -> None:
    done = rlcanary(*arguments, cwd=tmp_path)
    assert_refused(done, told)
    assert list(tmp_path.iterdir()) == []


def test_mistake_is_refused_alike_in_a_process_of_its_own(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "rlcanary", "check", "nothing_like_it"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert_refused(done, "no adapter 'nothing_like_it'")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", ["check reference", "init", "trend x", "new-adapter mine.py"])
def test_folder_that_is_there_no_longer_is_refused(arguments: str, tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    command = f"cd {folder} && rmdir {folder} && {sys.executable} -m rlcanary {arguments}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert_refused(done, "the current folder is there no longer")


def assert_refused(done: subprocess.CompletedProcess[str], told: str) -> None:
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert done.stdout == ""


def write_expected(cwd: Path) -> str:
    """Let the command write the failures of WRONG_MEAN and give each a reason."""
    (cwd / "mine.py").write_text(WRONG_MEAN)
    done = rlcanary("check", "mine", "--only", "advantage.", "--update-expected", "known.txt", cwd=cwd)
    assert done.returncode == 0, done.stdout
    assert "groups_are_separate is expected" in done.stderr
    assert "known.txt: written, failed checks: " in done.stdout
    assert "known.txt: added " not in done.stdout
    written = (cwd / "known.txt").read_text()
    (cwd / "known.txt").write_text(written.replace("# say why", "# the mean of the batch, on purpose"))
    return written


def test_expected_findings_keep_the_exit_code_green(tmp_path: Path) -> None:
    count = write_expected(tmp_path).count("say why")
    done = rlcanary("check", "mine", "--only", "advantage.", "--expected", "known.txt", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    assert f"{count} failed as expected" in done.stdout


def test_larger_deviation_than_the_expected_one_is_red(tmp_path: Path) -> None:
    write_expected(tmp_path)
    (tmp_path / "mine.py").write_text(
        WRONG_MEAN.replace("(rewards - rewards.mean())", "5 * (rewards - rewards.mean())")
    )
    done = rlcanary("check", "mine", "--only", "advantage.declared", "--expected", "known.txt", cwd=tmp_path)
    assert done.returncode == 1
    assert "FAIL advantage.declared_formula" in done.stdout
    assert "findings: [2]: value off" in done.stdout


def test_update_keeps_reasons_comments_and_what_did_not_run(tmp_path: Path) -> None:
    written = write_expected(tmp_path)
    known = tmp_path / "known.txt"
    before = "# since the spring\n" + known.read_text() + "mask.pad_id_zero  # another time\n    value off by 1\n"
    known.write_text(before)
    done = rlcanary("check", "mine", "--only", "advantage.", "--update-expected", "known.txt", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert known.read_text() == before
    (tmp_path / "mine.py").write_text(WRONG_MEAN.replace("rewards - rewards.mean()", "0 * rewards"))
    rlcanary("check", "mine", "--only", "advantage.groups", "--update-expected", "known.txt", cwd=tmp_path)
    assert "advantage.groups_are_separate" in written
    assert "advantage.groups_are_separate" not in known.read_text()


COMMENTED = """# Failures that the team knows.

# Masks, see issue 12.
mask.pad_id_zero  # known
    # as large as it gets
    value off by 1
    value off by 7

# The end of the list.
mask.pad_equals_eos  # known too
    value off by 1
# vim: ft=conf
"""


def wrong_masks(folder: Path) -> None:
    (folder / "mine.py").write_text(
        "from rlcanary import Adapter\n\n"
        "class Mine(Adapter):\n"
        "    name = 'mine'\n\n"
        "    def completion_mask(self, ids, eos_ids, pad_id):\n"
        "        return ids != ids\n"
    )


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_update_keeps_comments_blank_lines_and_line_ends(tmp_path: Path, end: str) -> None:
    wrong_masks(tmp_path)
    known = tmp_path / "known.txt"
    known.write_bytes(COMMENTED.replace("\n", end).encode())
    update = ("check", "mine.py", "--only=mask.pad", "--update-expected=known.txt")
    assert rlcanary(*update, cwd=tmp_path).returncode == 0
    assert known.read_bytes().decode() == COMMENTED.replace("    value off by 7\n", "").replace("\n", end)
    rlcanary("check", "reference", "--only=mask.pad_id_zero", "--update-expected=known.txt", cwd=tmp_path)
    left = [line for line in COMMENTED.splitlines() if not line.startswith(("mask.pad_id", "    value"))]
    assert [line for line in known.read_text().splitlines() if not line.startswith("    value")] == left
    assert known.read_text().count("    value off by") == 1


def test_update_writes_through_a_link(tmp_path: Path) -> None:
    wrong_masks(tmp_path)
    (tmp_path / "lists").mkdir()
    (tmp_path / "known.txt").symlink_to("lists/mine.txt")
    update = ("check", "mine.py", "--only=mask.pad_id_zero", "--update-expected=known.txt")
    assert rlcanary(*update, cwd=tmp_path).returncode == 0
    assert (tmp_path / "known.txt").is_symlink()
    assert (tmp_path / "lists/mine.txt").read_text() == "mask.pad_id_zero  # say why\n    value off by 1\n"
    (tmp_path / "known.txt").unlink()
    (tmp_path / "known.txt").symlink_to("nowhere/mine.txt")
    done = rlcanary(*update, cwd=tmp_path)
    assert done.returncode == 2
    assert "cannot write" in done.stderr


def test_stale_expectation_turns_red(tmp_path: Path) -> None:
    (tmp_path / "known.txt").write_text("mask.pad_id_zero  # was broken once\n    value off by 1\n")
    done = rlcanary("check", "reference", "--only", "mask.", "--expected", "known.txt", cwd=tmp_path)
    assert done.returncode == 1
    assert "stale mask.pad_id_zero " in done.stdout


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("mask.no_such  # x", "no check 'mask.no_such'"),
        ("mask.pad_id_zero", "say after a #"),
        ("mask.pad_id_zero  # say why\n  value off by 1", "say after a #"),
        ("mask.pad_id_zero  # known", "any failure of it"),
        ("  value off by 1", "above the first check"),
        ("mask.pad_id_zero  # known\n  value off by little", "does not end with a number"),
    ],
)
def test_unclear_expectation_is_refused(tmp_path: Path, line: str, told: str) -> None:
    (tmp_path / "known.txt").write_text(line)
    done = rlcanary("check", "reference", "--expected", "known.txt", cwd=tmp_path)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


SILENT = """
from rlcanary.adapters.reference import ReferenceAdapter
from rlcanary.contract.batch import LossOutput

class Silent(ReferenceAdapter):
    name = "silent"

    def policy_loss(self, batch):
        return LossOutput(super().policy_loss(batch).loss, {})
"""


def test_check_that_compared_nothing_is_no_pass_anywhere(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(SILENT)
    arguments = ("check", "mine.py", "--json", "out.json", "--markdown", "out.md")
    done = rlcanary(*arguments, "--only", "loss.metrics", "--only", "loss.row", cwd=tmp_path)
    assert done.returncode == 0
    assert "not compared" in done.stdout
    assert "1 not compared" in done.stdout
    assert "`loss.metrics` compared" in (tmp_path / "out.md").read_text()
    statuses = {each["id"]: each["status"] for each in json.loads((tmp_path / "out.json").read_text())["checks"]}
    assert statuses["loss.metrics"] == "not-compared"
    alone = rlcanary(*arguments, "--only", "loss.metrics", cwd=tmp_path)
    assert alone.returncode == 2
    assert "nothing to compare" in alone.stderr


ENDLESS = """
import time
from rlcanary.adapters.reference import ReferenceAdapter

class Endless(ReferenceAdapter):
    name = "endless"

    def advantages(self, rewards, group_ids):
        while True:
            time.sleep(0.01)
"""


def test_check_that_does_not_end_is_one_error_and_the_rest_runs(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENDLESS)
    only = ("--only", "advantage.shift", "--only", "mask.")
    done = rlcanary("check", "mine.py", *only, "--timeout", "1", "--json", "out.json", cwd=tmp_path)
    assert done.returncode == 1
    results = {each["id"]: each for each in json.loads((tmp_path / "out.json").read_text())["checks"]}
    assert "1 s: advantages([4], [4])" in results.pop("advantage.shift")["message"]
    assert {each["status"] for each in results.values()} == {"pass"}


def test_markdown_summary_folds_each_failure(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(WRONG_MEAN)
    rlcanary("check", "mine", "--only", "advantage.groups", "--markdown", "out.md", cwd=tmp_path)
    summary = (tmp_path / "out.md").read_text()
    assert summary.startswith("## ❌ Conformance of wrong-mean")
    assert "<code>advantage.groups_are_separate</code> FAIL" in summary


def test_new_adapter_runs_as_it_is(tmp_path: Path) -> None:
    done = rlcanary("new-adapter", "my_canary.py", cwd=tmp_path)
    assert "rlcanary check my_canary.py" in done.stdout
    assert "class MyCanary(Adapter)" in (tmp_path / "my_canary.py").read_text()
    done = rlcanary("check", "my_canary.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    again = rlcanary("new-adapter", "my_canary.py", cwd=tmp_path)
    assert again.returncode == 2
    assert "exists already" in again.stderr


def test_what_the_code_prints_is_shown_on_request_alone(tmp_path: Path) -> None:
    talks = WRONG_MEAN.replace("        return (rewards", "        print('step 1 of 9')\n        return (rewards")
    (tmp_path / "mine.py").write_text(talks)
    quiet = rlcanary("check", "mine", "--only", "advantage.shift", cwd=tmp_path)
    assert "step 1 of 9" not in quiet.stdout + quiet.stderr
    assert "step 1 of 9" in rlcanary("check", "mine", "--only", "advantage.shift", "--show-output", cwd=tmp_path).stdout
