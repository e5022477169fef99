"""`rlcanary bisect --executor`: the command runs as a job of a real Slurm or a real Ray."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bisect_repositories import bisect, contents, found, make_history, numbered, refusal, started_search
from launch_repositories import SCRIPT, launch, make_project, script, typed
from slurm_cluster import free_ports
from waiting import HANG_S, QUICK_S, wait_for

ENDS = "--good", "c11", "--bad", "c15", "--deterministic"


@pytest.fixture
def project(plain_git: None, tmp_path: Path) -> Path:
    return make_history(tmp_path / "a repo", 15, numbered)


def events(project: Path) -> list[dict[str, Any]]:
    (journal,) = (project / ".git/rlcanary/bisect").glob("*/journal.jsonl")
    return [json.loads(line) for line in journal.read_text().splitlines()[1:]]


def queue(*options: str) -> list[str]:
    command = ["squeue", "--noheader", "--states=RUNNING,PENDING", "--format=%i", *options]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=HANG_S).stdout.split()


@pytest.mark.usefixtures("slurm")
class TestSlurm:
    def test_culprit_is_found_and_nothing_is_left(self, project: Path) -> None:
        before = contents(project)
        command = "sh", "-c", 'echo "job $SLURM_JOB_ID on $(pwd)"; test $(cat value) -lt 13'
        result = bisect(project, *ENDS, "--executor", "slurm", "--jobs", "2", "--", *command)
        assert found(result) == "change 13 [wip]"
        printed = [Path(event["output"]).read_text() for event in events(project) if event["event"] == "observation"]
        assert all(text.startswith("job ") for text in printed)
        assert contents(project) == before
        assert queue() == []

    def test_killed_job_runs_again_and_is_no_evidence(self, project: Path, tmp_path: Path) -> None:
        killed = tmp_path / "killed"
        kill = f"[ $(cat value) != 15 ] || [ -e {killed} ] || {{ touch {killed}; scancel $SLURM_JOB_ID; sleep 30; }}"
        command = "sh", "-c", f"{kill}; test $(cat value) -lt 13"
        assert found(bisect(project, *ENDS, "--executor", "slurm", "--", *command)) == "change 13 [wip]"
        reasons = [event["reason"] for event in events(project) if event.get("outcome") == "infra"]
        assert reasons == ["job CANCELLED: no result file"]

    def test_refused_job_stops_the_search(self, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PARTITION", "nowhere")
        refused = refusal(bisect(project, *ENDS, "--executor", "slurm", "--", "true"))
        assert "job REJECTED: sbatch" in refused

    def test_timeout_ends_the_job(self, project: Path) -> None:
        command = "sh", "-c", "[ $(cat value) != 15 ] || sleep 9999; test $(cat value) -lt 13"
        options = *ENDS, "--executor", "slurm", "--timeout", str(QUICK_S), "--on-timeout", "bad"
        assert found(bisect(project, *options, "--", *command)) == "change 13 [wip]"
        assert queue() == []

    def test_interrupted_search_cancels_its_jobs_and_so_does_the_one_after_a_kill(self, project: Path) -> None:
        options = *ENDS, "--executor", "slurm", "--", "sh", "-c", "sleep 9999"
        with started_search(project, *options) as process:
            wait_for(lambda: queue("--states=RUNNING"))
            process.send_signal(signal.SIGINT)
            assert process.wait(HANG_S) == 130
            wait_for(lambda: not queue())
        with started_search(project, *options) as process:
            wait_for(lambda: queue("--states=RUNNING"))
            process.kill()
            process.wait(HANG_S)
        left = queue()
        assert len(left) == 1
        with started_search(project, *options) as process:
            wait_for(lambda: queue() and queue() != left)
            process.send_signal(signal.SIGINT)
            process.wait(HANG_S)
        wait_for(lambda: not queue())


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[dict[str, str]]:
    """A Ray of our own, by the variables that lead to it."""
    for part in ("ray", "aiohttp_cors", "opencensus"):
        pytest.importorskip(part, reason="Ray's jobs need its dashboard: pip install 'ray[default]'")
    dashboard, gcs, agent, client = free_ports(4)
    access = {"RAY_API_SERVER_ADDRESS": f"http://127.0.0.1:{dashboard}", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": access["RAY_AUTH_TOKEN"]}
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # The names of sockets may not be long.
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--disable-usage-stats"]
    command += [f"--temp-dir={folder}"]
    command += [f"--port={gcs}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
    command += [f"--dashboard-agent-listen-port={agent}"]  # Where another Ray of this machine has it, jobs are refused.
    command += ["--num-cpus=4", "--num-gpus=2", "--object-store-memory=80000000"]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        wait_for(lambda: answers(access))
        yield access
    finally:
        from rlcanary.system.sessions import end_session

        process.terminate()
        process.wait(HANG_S)
        end_session(process.pid)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def ray_jobs(ray_cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ray_cluster.items():
        monkeypatch.setenv(name, value)


def answers(access: dict[str, str]) -> bool:
    headers = {"Authorization": f"Bearer {access['RAY_AUTH_TOKEN']}"}
    request = urllib.request.Request(f"{access['RAY_API_SERVER_ADDRESS']}/api/jobs/", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=5):
            return True
    except OSError:
        return False


@pytest.mark.usefixtures("ray_jobs")
class TestRay:
    def test_culprit_is_found(self, project: Path) -> None:
        command = "sh", "-c", 'echo "job $RAY_JOB_CONFIG_JSON_ENV_VAR"; test $(cat value) -lt 13'
        result = bisect(project, *ENDS, "--executor", "ray", "--jobs", "2", "--", *command)
        assert found(result) == "change 13 [wip]"
        printed = [Path(event["output"]).read_text() for event in events(project) if event["event"] == "observation"]
        assert all('"job_submission_id"' in text for text in printed)

    def test_runs_of_a_script_follow_each_other_and_have_the_cluster_s_gpus(
        self, plain_git: None, tmp_path: Path
    ) -> None:
        body = 'echo x >> "$CKPT_DIR/runs"; if [ "$(wc -l < "$CKPT_DIR/runs")" -lt 2 ]; then exit 0; fi'
        body += "\npython3 -c 'import ray; ray.init(); ray.get(ray.remote(num_gpus=2)(lambda: 1).remote())'"
        nightly = make_project(tmp_path / "p", **{"grpo-tiny": script(body, runs=2, gpus=2)})
        result = launch(nightly, SCRIPT, EXECUTOR="ray")
        assert result.returncode == 0, result.stderr

    def test_job_outlives_a_launch_that_was_killed_and_is_no_verdict_when_it_is_cancelled(
        self, plain_git: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        nightly = make_project(tmp_path / "p", **{"grpo-tiny": script("touch $EXP_DIR/running; sleep 9999")})
        command = [sys.executable, "-m", "rlcanary", "launch", SCRIPT]
        environment = os.environ | {"EXECUTOR": "ray"}
        with subprocess.Popen(command, cwd=nightly, env=environment, stderr=subprocess.DEVNULL) as process:
            wait_for(lambda: list(nightly.glob("launches/*/running")))
            process.kill()
        (folder,) = map(str, nightly.glob("launches/grpo-tiny-*"))
        monkeypatch.delenv("RAY_API_SERVER_ADDRESS")  # The launch's folder has it.
        runs = typed(nightly, "launches", folder)
        assert (runs.returncode, "RUNNING" in runs.stdout) == (75, True), runs.stderr
        ended = typed(nightly, "launches", "--cancel", folder)
        assert (ended.returncode, "job CANCELLED: no result" in ended.stdout) == (137, True), ended.stderr


def test_cluster_that_does_not_answer_aborts(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", f"http://127.0.0.1:{free_ports(1)[0]}")
    refused = refusal(bisect(project, *ENDS, "--executor", "ray", "--", "true"))
    assert "Connection refused" in refused
