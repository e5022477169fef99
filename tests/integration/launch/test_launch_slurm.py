"""`rlcanary launch` on a real Slurm: what it runs, what it says of jobs that were lost, what it leaves behind."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from launch_repositories import CHECK, SCRIPT, fake_programs, launch, make_project, outputs, script, typed
from waiting import HANG_S, wait_for

pytestmark = pytest.mark.usefixtures("slurm")

WAITS = 'touch "$EXP_DIR/running"; sleep 9999'


def slurm_says(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S).stdout.strip()


def during(project: Path, act: Callable[[str], object], **variables: str) -> subprocess.CompletedProcess[str]:
    """Launch, and do something to the job, by its id, once it runs."""

    def wait_and_act() -> None:
        wait_for(lambda: list(project.glob("launches/*/running")))
        act(slurm_says("squeue", "--noheader", "--states=RUNNING", "--name=grpo-tiny", "--format=%i"))

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    finished = launch(project, SCRIPT, EXECUTOR="slurm", **variables)
    thread.join()
    return finished


def test_metric_checks_decide(tmp_path: Path) -> None:
    good = launch(make_project(tmp_path / "good", **{"grpo-tiny": script()}), SCRIPT)
    assert (good.returncode, "the metric checks pass" in good.stdout) == (0, True), good.stderr
    bad = launch(make_project(tmp_path / "bad", loss="1.5", **{"grpo-tiny": script()}), SCRIPT)
    assert (bad.returncode, "a metric check fails" in bad.stdout) == (1, True), bad.stderr
    assert "1.5 < 1 is false" in bad.stderr, "the end of what the job printed is shown"


def test_runs_follow_each_other_and_share_their_checkpoints(tmp_path: Path) -> None:
    body = 'echo "$SLURM_JOB_ID" >> "$CKPT_DIR/runs"; if [ "$(wc -l < "$CKPT_DIR/runs")" -lt 3 ]; then sleep 0.3; exit 0; fi'
    project = make_project(tmp_path / "p", **{"grpo-tiny": script(body, runs=3)})
    assert launch(project, SCRIPT).returncode == 0
    (runs,) = project.glob("launches/*/checkpoints/runs")
    jobs = [int(line) for line in runs.read_text().split()]
    assert jobs == sorted(jobs)
    assert len(set(jobs)) == 3


def test_scripts_with_the_same_resources_are_one_array(tmp_path: Path) -> None:
    body = 'echo "array $SLURM_ARRAY_JOB_ID"'
    project = make_project(tmp_path / "p", **{"grpo-tiny": script(body), "grpo-b": script(body)})
    result = launch(project, SCRIPT, "tests/test_suites/llm/grpo-b.sh")
    assert result.returncode == 0, result.stderr
    jobs = re.findall(r"array (\d+)", "".join(outputs(project)))
    assert len(jobs) == 2
    assert len(set(jobs)) == 1


class TestLaunchThatNobodyWaitsFor:
    """`rlcanary launches` asks for it later, from wherever."""

    def test_is_judged_as_if_it_had_been_watched(self, tmp_path: Path) -> None:
        body = f"while [ -e {tmp_path}/hold ]; do sleep 0.1; done"
        worse = script(body, check=CHECK.replace("< 1", "< 0.1"))
        scripts = {"grpo-tiny": script(body, runs=2), "grpo-worse": worse, "grpo-broken": script("exit 3")}
        project = make_project(tmp_path / "p", **scripts)
        (tmp_path / "hold").touch()
        launched = launch(project, *(f"tests/test_suites/llm/{name}.sh" for name in scripts), WATCH="0")
        assert launched.returncode == 0
        hint = launched.stderr.splitlines()[-1]
        command = hint.removeprefix("how they end: rlcanary ").split()
        assert len(command) == 4
        now = typed(project, *command)
        assert (now.returncode, now.stdout.count("none yet") >= 2) == (75, True), now.stdout + now.stderr
        (tmp_path / "hold").unlink()
        later = typed(project, *command, "--watch")
        assert later.returncode == 1, later.stdout + later.stderr
        rows = {
            line.split("│")[2].split("-2")[0].strip(): line for line in later.stdout.splitlines() if "launches/" in line
        }
        assert "the metric checks pass" in rows["launches/grpo-tiny"]
        assert "a metric check fails" in rows["launches/grpo-worse"]
        assert "exit 3: the metrics" in rows["launches/grpo-broken"]
        assert "0.5 < 0.1 is false" in later.stderr, "the end of what the job printed is shown"
        codes = {name: typed(project, "launches", *map(str, project.glob(f"launches/{name}-2*"))) for name in scripts}
        assert [codes[name].returncode for name in scripts] == [0, 1, 125]
        assert typed(project, *command, PATH="").returncode == 1, "the scheduler is not asked again"

    def test_is_cancelled(self, tmp_path: Path) -> None:
        project = make_project(tmp_path / "p", **{"grpo-tiny": script(WAITS)})
        launch(project, SCRIPT, WATCH="0")
        wait_for(lambda: list(project.glob("launches/*/running")))
        (folder,) = project.glob("launches/grpo-tiny-*")
        refused = typed(project, "launches", "--cancel")
        assert (refused.returncode, "name the launches" in refused.stderr) == (2, True)
        cancelled = typed(project, "launches", "--cancel", str(folder))
        assert (cancelled.returncode, "job CANCELLED" in cancelled.stdout) == (137, True), cancelled.stderr
        assert slurm_says("squeue", "--noheader", "--name=grpo-tiny", "--format=%T") == ""


@pytest.mark.parametrize("fault", ["cancelled", "preempted", "node failure"])
def test_job_that_is_lost_is_no_verdict(tmp_path: Path, fault: str) -> None:
    def act(job: str) -> None:
        if fault == "cancelled":
            slurm_says("scancel", job)
        elif fault == "preempted":
            slurm_says("sbatch", "--partition=urgent", "--exclusive", "--wait", "--output=/dev/null", "--wrap=true")
        else:
            node = slurm_says("sinfo", "--noheader", "--partition=test", "--format=%n")
            slurm_says("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
            with contextlib.suppress(subprocess.CalledProcessError):  # It may have come back by itself.
                slurm_says("scontrol", "update", f"NodeName={node}", "State=RESUME")

    result = during(make_project(tmp_path / "p", **{"grpo-tiny": script(WAITS)}), act)
    assert result.returncode == 137, result.stderr
    states = {"cancelled": "CANCELLED", "preempted": "PREEMPTED", "node failure": "NODE_FAIL"}
    assert f"job {states[fault]}" in " ".join(result.stdout.split()), result.stderr


def test_interrupted_launch_cancels_its_jobs(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-tiny": script(WAITS)})
    command = [sys.executable, "-m", "rlcanary", "launch", SCRIPT]
    process = subprocess.Popen(command, cwd=project, env=os.environ | {"WATCH": "1"}, start_new_session=True)
    wait_for(lambda: list(project.glob("launches/*/running")))
    process.send_signal(signal.SIGTERM)
    assert process.wait(HANG_S) == 143
    wait_for(lambda: slurm_says("squeue", "--noheader", "--name=grpo-tiny", "--format=%T") == "")


def test_rejected_job_aborts_and_says_why(tmp_path: Path) -> None:
    result = launch(make_project(tmp_path / "p", **{"grpo-tiny": script()}), SCRIPT, PARTITION="nowhere")
    assert result.returncode == 2
    assert "rejected: sbatch: " in result.stderr.splitlines()[-1]
    assert "nvalid partition" in result.stderr
    assert list(tmp_path.glob("p/launches/grpo-*")) == []


def test_job_that_asks_for_too_much_is_rejected_and_its_batch_cancelled(tmp_path: Path) -> None:
    scripts = {"grpo-tiny": script("sleep 9999"), "grpo-wide": script(gpus=8)}
    result = launch(make_project(tmp_path / "p", **scripts), SCRIPT, "tests/test_suites/llm/grpo-wide.sh")
    assert result.returncode == 2
    assert "the job was rejected" in result.stderr
    wait_for(lambda: slurm_says("squeue", "--noheader", "--name=grpo-tiny", "--format=%T") == "")


def test_container_wraps_the_script_and_mounts_what_it_needs(tmp_path: Path) -> None:
    record = f'printf \'%s\\n\' "$@" > {tmp_path}/arguments; while [[ $1 == --* ]]; do shift; done; exec "$@"'
    fakes = fake_programs(tmp_path / "bin", {"srun": record})
    project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
    path = f"{fakes}{os.pathsep}{os.environ['PATH']}"
    result = launch(
        project, SCRIPT, PATH=path, CONTAINER="image.sqsh", MOUNTS="/data:/data", EXTRA_SCRIPT_ARGS="'++a=b c'"
    )
    assert result.returncode == 0, result.stderr
    (snapshot,) = (project / "launches" / "snapshots").glob("p-*")
    (folder,) = (project / "launches").glob("grpo-tiny-*")
    assert (tmp_path / "arguments").read_text().splitlines() == [
        "--nodes=1",
        "--ntasks=1",
        "--container-image=image.sqsh",
        f"--container-mounts=/data:/data,{snapshot}:{snapshot},{folder}:{folder}",
        f"--container-workdir={snapshot}",
        "bash",
        str(snapshot / SCRIPT),
        "++a=b c",
    ]


def test_script_has_as_many_nodes_as_it_asks_for(tmp_path: Path) -> None:
    """It runs on the first one, and `srun` reaches all."""
    body = 'srun --ntasks-per-node=1 printenv SLURMD_NODENAME | sort > "$LOG_DIR/nodes"; echo once >> "$LOG_DIR/runs"'
    project = make_project(tmp_path / "p", **{"grpo-tiny": script(body, nodes=2)})
    result = launch(project, SCRIPT, PARTITION="wide")
    assert result.returncode == 0, result.stderr
    (logs,) = project.glob("launches/*/logs")
    nodes = slurm_says("sinfo", "--noheader", "--partition=wide", "--Node", "--format=%N").split()
    assert (logs / "nodes").read_text().split() == sorted(nodes)
    assert len(nodes) == 2
    assert (logs / "runs").read_text() == "once\n"


def test_options_of_the_cluster_reach_sbatch(tmp_path: Path) -> None:
    body = 'scontrol show job "$SLURM_JOB_ID"'
    project = make_project(tmp_path / "p", **{"grpo-tiny": script(body, minutes=7)})
    assert launch(project, SCRIPT, PARTITION="urgent", ACCOUNT="team").returncode == 0
    (printed,) = outputs(project)
    for fact in ("Partition=urgent", "Account=team", "TimeLimit=00:07:00", "Requeue=0", "JobName=grpo-tiny"):
        assert fact in printed


def test_result_is_the_last_thing_that_a_job_writes(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-tiny": script(check=f"{CHECK}; ls $EXP_DIR/run1")})
    assert launch(project, SCRIPT).returncode == 0
    (result,) = project.glob("launches/*/run1/result.json")
    assert json.loads(result.read_text())["exit_code"] == 0
    assert "result.json" not in outputs(project)[0]
