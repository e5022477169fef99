"""Bisecting a nightly: `GOOD=… BAD=… tools/bisect-run.sh tools/launch-bisect.sh TEST_CASE`."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bisect_repositories import contents, found, git, log_of, make_history, refusal
from launch_repositories import SCRIPT, script
from waiting import HANG_S, wait_for

TOOLS = Path(__file__).parents[3] / "tools"
NAMES = ("bisect-run.sh", "launch-bisect.sh", "launch-bisect-helper.sh")


def make_nightly(
    folder: Path, n: int, loss: Callable[[int], float], text: Callable[[int], str] = lambda i: script()
) -> Path:
    """A history whose tools changed on the way: those of the checkout are used on every commit."""

    def files(i: int) -> dict[str, str]:
        own = {f"tools/{name}": "exit 77\n" for name in NAMES if i < n}
        own |= {f"tools/{name}": (TOOLS / name).read_text() for name in NAMES if i == n}
        body = text(i)
        return {"loss": f"{loss(i)}\n", **own, **({SCRIPT: body} if body else {})}

    return make_history(folder, n, files, executable=[f"tools/{name}" for name in NAMES])


def bisect_nightly(
    project: Path, *options: str, bad: str, good: str = "c1", case: str = SCRIPT, **variables: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["tools/bisect-run.sh", *options, *["--"][: len(options)], "tools/launch-bisect.sh", case],
        cwd=project,
        env=os.environ | {"GOOD": good, "BAD": bad} | variables,
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )


def observations(project: Path) -> list[dict[str, Any]]:
    (journal,) = (project / ".git/rlcanary/bisect").glob("*/journal.jsonl")
    events = [json.loads(line) for line in journal.read_text().splitlines()[1:]]
    return [event for event in events if event["event"] == "observation"]


LOCAL = {"EXECUTOR": "local"}
ON_SLURM = {"HF_HOME": "/h", "HF_DATASETS_CACHE": "/d", "ACCOUNT": "team", "PARTITION": "test"}


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({"HF_HOME": "", "ACCOUNT": "", "PARTITION": ""}, "HF_HOME ACCOUNT PARTITION"),
        ({"CONTAINER": "image"}, "set MOUNTS before"),
        ({"REQUIRED": "CONTAINER MOUNTS", "MOUNTS": "a:b"}, "set CONTAINER before"),
    ],
)
def test_slurm_needs_variables_before_the_first_job(tmp_path: Path, given: dict[str, str], missing: str) -> None:
    """128 ends a `git bisect run`, and the file ends ours."""
    environment = {"PATH": os.environ["PATH"], "EXECUTOR": "slurm", **ON_SLURM, **given}
    verdict = tmp_path / "verdict"
    result = subprocess.run(
        [TOOLS / "launch-bisect.sh", SCRIPT],
        env=environment | {"RLCANARY_BISECT_VERDICT": str(verdict)},
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert (result.returncode, missing in result.stderr) == (128, True), result.stderr
    assert json.loads(verdict.read_text())["outcome"] == "abort"


@pytest.mark.usefixtures("plain_git")
class TestOnThisMachine:
    def test_metric_regression_is_found_and_the_checkout_stays_as_it_was(self, tmp_path: Path) -> None:
        project = make_nightly(tmp_path / "p", 8, lambda i: 0.5 if i < 5 else 1.5)
        before = contents(project)
        assert found(bisect_nightly(project, "--deterministic", bad="c8", **LOCAL)) == "change 5 [wip]"
        assert contents(project) == before

    def test_every_commit_has_a_snapshot_and_checkpoints_of_its_own(self, tmp_path: Path) -> None:
        body = 'ls -A "$CKPT_DIR"; touch "$CKPT_DIR/step1"'
        project = make_nightly(tmp_path / "p", 4, lambda i: i / 10 if i < 3 else i, lambda i: script(body))
        found(bisect_nightly(project, "--deterministic", bad="c4", **LOCAL))
        (folder,) = (project / ".git/rlcanary/bisect").glob("*/launches")
        assert len(list((folder / "snapshots").iterdir())) == 4
        printed = [file.read_text() for file in folder.glob("*/run1/output.log")]
        assert len(printed) == 4
        assert not any("step1" in text for text in printed)

    def test_missing_test_case_and_broken_training_are_untestable(self, tmp_path: Path) -> None:
        """A commit without the script and one whose training does not start say nothing about the metric."""

        def text(i: int) -> str:
            return "" if i == 4 else script("exit 1") if i == 5 else script()

        project = make_nightly(tmp_path / "p", 9, lambda i: 0.5 if i < 7 else 1.5, text)
        assert found(bisect_nightly(project, "--deterministic", bad="c9", **LOCAL)) == "change 7 [wip]"
        reasons = {event["reason"] for event in observations(project) if event["outcome"] == "untestable"}
        assert reasons <= {f"{SCRIPT}: no such file here", "exit 1: the metrics were not judged"}
        assert reasons

    def test_sed_clauses_edit_the_script_of_every_commit(self, tmp_path: Path) -> None:
        project = make_nightly(tmp_path / "p", 6, lambda i: 0.5 if i < 2 else 1.5 if i < 5 else 2.5)
        clauses = "s#< 1'#< 2'#"
        result = bisect_nightly(project, "--deterministic", bad="c6", SED_CLAUSES=clauses, **LOCAL)
        assert found(result) == "change 5 [wip]"
        (journal,) = (project / ".git/rlcanary/bisect").glob("*/journal.jsonl")
        assert json.loads(journal.read_text().splitlines()[1])["variables"] == [["SED_CLAUSES", clauses]]

    @pytest.mark.parametrize(
        ("variables", "complaint"),
        [
            ({"REQUIRED": "HF_HOME MOUNTS", "HF_HOME": "/x"}, "set MOUNTS before the start"),
            ({"SED_CLAUSES": "s/x/y"}, "not a valid sed script"),
            ({"SED_CLAUSES": "s/not there/y/"}, "change nothing in"),
            ({"EXTRA_SCRIPT_ARGS": "'"}, "No closing quotation"),
        ],
        ids=["variable is missing", "sed does not understand", "clause matches nothing", "quotes do not close"],
    )
    def test_what_no_commit_is_to_blame_for_stops_the_search_before_a_job(
        self, tmp_path: Path, variables: dict[str, str], complaint: str
    ) -> None:
        project = make_nightly(tmp_path / "p", 4, lambda i: 0.5 if i < 3 else 1.5)
        refused = refusal(bisect_nightly(project, bad="c4", **LOCAL, **variables))
        assert complaint in refused
        assert not list((project / ".git/rlcanary/bisect").glob("*/launches/*/run1"))

    def test_arguments_with_spaces_reach_the_script(self, tmp_path: Path) -> None:
        body = '[ "$2" = "b c" ]'
        project = make_nightly(tmp_path / "p", 4, lambda i: 0.5 if i < 3 else 1.5, lambda i: script(body))
        result = bisect_nightly(project, "--deterministic", bad="c4", EXTRA_SCRIPT_ARGS="++a=1 'b c'", **LOCAL)
        assert found(result) == "change 3 [wip]"

    def test_search_that_was_cut_short_does_not_go_on_with_other_clauses(self, tmp_path: Path) -> None:
        project = make_nightly(tmp_path / "p", 6, lambda i: 0.5 if i < 2 else 1.5 if i < 5 else 2.5)
        options = "--deterministic", "--budget-runs", "2"
        assert bisect_nightly(project, *options, bad="c6", **LOCAL).returncode == 1
        edited = bisect_nightly(project, "--deterministic", bad="c6", SED_CLAUSES="s#< 1'#< 2'#", **LOCAL)
        assert "continuing" not in edited.stderr
        assert found(edited) == "change 5 [wip]"
        again = bisect_nightly(project, "--deterministic", bad="c6", **LOCAL)
        assert "2 outcomes known" in again.stderr
        assert found(again) == "change 2 [wip]"

    def test_copy_of_the_tools_works_as_well(self, tmp_path: Path) -> None:
        project = make_nightly(tmp_path / "p", 4, lambda i: 0.5 if i < 3 else 1.5)
        shutil.copytree(project / "tools", project / "tools.bisect")
        command = ["tools.bisect/bisect-run.sh", "--deterministic", "--", "tools.bisect/launch-bisect.sh", SCRIPT]
        environment = os.environ | {"GOOD": "c1", "BAD": "c4"} | LOCAL
        result = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=HANG_S)
        assert found(result) == "change 3 [wip]"


def test_nightly_is_bisected_on_slurm_while_jobs_are_preempted_and_killed(slurm: None, tmp_path: Path) -> None:
    """30 commits, four jobs at a time; one job is preempted and one is killed, and both commits run again."""
    hold = tmp_path / "hold"
    hold.touch()
    body = f"while [ -e {hold} ]; do sleep 0.1; done"
    project = make_nightly(tmp_path / "p", 30, lambda i: 0.5 if i < 22 else 1.5, lambda i: script(body))
    for name in ("home", "data"):
        (tmp_path / name).mkdir()

    def slurm_says(*command: str) -> str:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S).stdout

    def running() -> list[str]:
        return slurm_says("squeue", "--noheader", "--states=RUNNING", "--name=grpo-tiny", "--format=%i").split()

    def disturb() -> None:
        wait_for(lambda: len(running()) >= 2)
        killed = running()[0]
        slurm_says("scancel", killed)
        wait_for(lambda: len(set(running()) - {killed}) >= 2)
        slurm_says("sbatch", "--partition=urgent", "--exclusive", "--wait", "--output=/dev/null", "--wrap=true")
        hold.unlink()

    thread = threading.Thread(target=disturb)
    thread.start()
    result = bisect_nightly(
        project,
        "--jobs=4",
        bad="c30",
        HF_HOME=str(tmp_path / "home"),
        HF_DATASETS_CACHE=str(tmp_path / "data"),
        ACCOUNT="team",
        PARTITION="test",
    )
    thread.join()
    assert found(result) == "change 22 [wip]", result.stderr
    reasons = [event["reason"] for event in observations(project) if event["outcome"] == "infra"]
    assert any("CANCELLED" in reason for reason in reasons), reasons
    assert any("PREEMPTED" in reason for reason in reasons), reasons
    assert slurm_says("squeue", "--noheader", "--states=RUNNING,PENDING", "--format=%i") == ""
    assert log_of(project).is_file()
    assert git(project, "status", "--porcelain") == ""
