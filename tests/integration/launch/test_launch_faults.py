"""What a real Slurm does not do on demand: programs of these names on the PATH answer as a broken one would."""

import json
import os
import subprocess
from pathlib import Path

import pytest
from launch_repositories import SCRIPT, fake_programs, launch, make_project, script, typed

pytestmark = pytest.mark.usefixtures("plain_git")

RUNS = 'for word in "$@"; do script=$word; done; bash "$script"; echo 42'
"""An sbatch whose job has ended when it returns."""
LOSES = "echo 42"
NO_ACCOUNTING = "echo 'Slurm accounting storage is disabled' >&2; exit 1"
FAILS = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"


def twice(fault: str, then: str, counter: Path) -> str:
    """A program that is broken the first two times."""
    return f'echo x >> "{counter}"; if [ "$(wc -l < "{counter}")" -le 2 ]; then {fault}; fi\n{then}'


def launch_with(tmp_path: Path, loss: str = "0.5", runs: int = 1, **programs: str) -> subprocess.CompletedProcess[str]:
    defaults = {"sbatch": RUNS, "sacct": NO_ACCOUNTING, "squeue": "echo '42|COMPLETED'", "scancel": "true"}
    fakes = fake_programs(tmp_path / "bin", defaults | programs)
    project = make_project(tmp_path / "p", loss, **{"grpo-tiny": script(runs=runs)})
    return launch(project, SCRIPT, EXECUTOR="slurm", PATH=f"{fakes}{os.pathsep}{os.environ['PATH']}")


@pytest.mark.parametrize("state", ["NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT", "BOOT_FAIL", "PREEMPTED", "CANCELLED by 0"])
def test_job_that_was_lost_is_no_verdict(tmp_path: Path, state: str) -> None:
    result = launch_with(tmp_path, sbatch=LOSES, sacct=f"echo '42|{state}'")
    assert result.returncode == 137, result.stderr
    assert f"job {state.split()[0]}: no result file" in result.stdout


def test_job_that_ran_out_of_memory_is_no_verdict_whatever_it_wrote(tmp_path: Path) -> None:
    assert launch_with(tmp_path, loss="1.5", sacct="echo '42|OUT_OF_MEMORY'").returncode == 137


def test_job_that_completed_without_a_result_is_no_verdict(tmp_path: Path) -> None:
    result = launch_with(tmp_path, sbatch=LOSES, sacct="echo '42|COMPLETED'")
    assert result.returncode == 137, result.stderr
    assert "job COMPLETED: no result file" in result.stdout


@pytest.mark.parametrize("loss", ["0.5", "1.5"])
def test_run_that_was_lost_leaves_no_verdict_to_those_after_it(tmp_path: Path, loss: str) -> None:
    """The next run may have judged metrics of fewer steps than were asked for."""
    loses_first = f"[ -e {tmp_path}/lost ] || {{ touch {tmp_path}/lost; echo 41; exit; }}\n{RUNS}"
    result = launch_with(tmp_path, loss, runs=2, sbatch=loses_first, sacct="echo '41|NODE_FAIL'; echo '42|COMPLETED'")
    assert result.returncode == 137, result.stderr
    assert "run 1 of 2: job NODE_FAIL" in result.stdout


def test_job_that_nobody_knows_any_more_is_no_verdict(tmp_path: Path) -> None:
    invalid = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    result = launch_with(tmp_path, sbatch=LOSES, squeue=invalid)
    assert result.returncode == 137, result.stderr
    assert "job LOST" in result.stdout


def test_result_still_counts_when_the_scheduler_has_forgotten_the_job(tmp_path: Path) -> None:
    """As a Slurm without accounting has, some minutes later."""
    forgotten = "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1"
    fakes = fake_programs(tmp_path / "bin", {"sbatch": RUNS, "sacct": NO_ACCOUNTING, "squeue": forgotten})
    path = f"{fakes}{os.pathsep}{os.environ['PATH']}"
    project = make_project(tmp_path / "p", "1.5", **{"grpo-tiny": script()})
    assert launch(project, SCRIPT, EXECUTOR="slurm", PATH=path, WATCH="0").returncode == 0
    assert typed(project, "launches", PATH=path).returncode == 1


def test_launch_that_was_killed_while_it_submitted_has_no_verdict(tmp_path: Path) -> None:
    fakes = fake_programs(tmp_path / "bin", {"sbatch": RUNS, "sacct": "echo '42|COMPLETED'"})
    path = f"{fakes}{os.pathsep}{os.environ['PATH']}"
    project = make_project(tmp_path / "p", **{"grpo-tiny": script(runs=2)})
    launch(project, SCRIPT, EXECUTOR="slurm", PATH=path, WATCH="0")
    (record,) = project.glob("launches/*/launch.json")
    record.write_text(json.dumps(json.loads(record.read_text()) | {"jobs": ["42"]}))
    asked = typed(project, "launches", PATH=path)
    assert (asked.returncode, "1 of 2 runs were submitted" in asked.stdout) == (137, True), asked.stderr


def test_launch_of_which_nothing_is_heard_has_no_verdict(tmp_path: Path) -> None:
    fakes = fake_programs(tmp_path / "bin", {"sbatch": LOSES, "sacct": NO_ACCOUNTING, "squeue": FAILS})
    path = f"{fakes}{os.pathsep}{os.environ['PATH']}"
    project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
    assert launch(project, SCRIPT, EXECUTOR="slurm", PATH=path, WATCH="0").returncode == 0
    asked = typed(project, "launches", PATH=path)
    assert (asked.returncode, "the scheduler gave no answer" in asked.stderr) == (2, True), asked.stderr
    assert list(project.glob("launches/*/verdict.json")) == []


@pytest.mark.parametrize(("loss", "code"), [("0.5", 0), ("1.5", 1)])
def test_question_that_is_not_answered_is_asked_again(tmp_path: Path, loss: str, code: int) -> None:
    squeue = twice(FAILS, "echo '42|COMPLETED'", tmp_path / "asked")
    result = launch_with(tmp_path, loss, squeue=squeue)
    assert result.returncode == code, result.stderr
    assert len((tmp_path / "asked").read_text().split()) == 3


def test_running_job_is_waited_for_while_questions_fail(tmp_path: Path) -> None:
    late = 'for word in "$@"; do script=$word; done; (sleep 1; exec bash "$script") >/dev/null 2>&1 & echo 42'
    asked = tmp_path / "asked"
    state = f'ls "{tmp_path}"/p/launches/*/run1/result.json >/dev/null 2>&1 && echo "42|COMPLETED" || {{ {FAILS}; }}'
    result = launch_with(tmp_path, sbatch=late, squeue=f'echo x >> "{asked}"; {state}')
    assert result.returncode == 0, result.stderr


def test_submission_that_was_not_heard_is_repeated(tmp_path: Path) -> None:
    busy = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
    assert launch_with(tmp_path, sbatch=twice(busy, RUNS, tmp_path / "asked")).returncode == 0


@pytest.mark.parametrize(
    "why", ["Invalid account or account/partition combination specified", "Job violates accounting/QOS policy"]
)
def test_submission_that_was_refused_aborts(tmp_path: Path, why: str) -> None:
    result = launch_with(tmp_path, sbatch=f"echo 'sbatch: error: Batch job submission failed: {why}' >&2; exit 1")
    assert result.returncode == 2
    assert why in result.stderr.splitlines()[-1]


def test_accounting_is_believed_where_the_queue_has_forgotten(tmp_path: Path) -> None:
    assert launch_with(tmp_path, sacct="echo '42|COMPLETED'", squeue=FAILS).returncode == 0


def test_task_of_an_array_is_known_by_its_number(tmp_path: Path) -> None:
    """sacct has one row for the tasks that wait, which says nothing of one of them."""
    tasks = (
        'for word in "$@"; do script=$word; done; for i in 0 1; do SLURM_ARRAY_TASK_ID=$i bash "$script"; done; echo 42'
    )
    waits = f"[ -e {tmp_path}/asked ] || {{ touch {tmp_path}/asked; echo '42_[0-1]|PENDING'; exit; }}"
    fakes = {
        "sbatch": tasks,
        "sacct": f"{waits}\nprintf '42_0|COMPLETED\n42_1|OUT_OF_MEMORY\n'",
        "squeue": "printf '42_0|PENDING\n42_1|PENDING\n'",
    }
    path = f"{fake_programs(tmp_path / 'bin', fakes)}{os.pathsep}{os.environ['PATH']}"
    project = make_project(tmp_path / "p", **{"grpo-tiny": script(), "grpo-b": script()})
    result = launch(project, SCRIPT, "tests/test_suites/llm/grpo-b.sh", EXECUTOR="slurm", PATH=path)
    assert result.returncode == 137, result.stderr
    assert [line.split("│")[1].strip() for line in result.stdout.splitlines() if "grpo-" in line] == ["good", "infra"]


def test_scheduler_that_never_answers_is_given_up(tmp_path: Path) -> None:
    from rlcanary.jobs.job import Job, QueryFailed, State
    from rlcanary.jobs.waiting import NoAnswer, Waiting

    class Silent:
        name, slowest_poll = "silent", 1.0

        def submit(self, jobs: object) -> list[str]:
            return ["42"]

        def states(self, ids: object) -> dict[str, State]:
            raise QueryFailed("squeue: connection refused")

        def cancel(self, ids: object) -> None: ...

    job = Job("x", ["true"], tmp_path, tmp_path / "job", tmp_path / "out", {})
    waiting = Waiting(Silent(), {"42": job}, silence=0.0)
    with pytest.raises(NoAnswer, match="connection refused"):
        waiting.look()


def test_looks_become_rarer_while_nothing_changes(tmp_path: Path) -> None:
    from rlcanary.jobs.job import Job, State
    from rlcanary.jobs.waiting import Waiting

    class Running:
        name, slowest_poll = "running", 30.0

        def submit(self, jobs: object) -> list[str]:
            return ["42"]

        def states(self, ids: object) -> dict[str, State]:
            return {"42": State(now[0], False)}

        def cancel(self, ids: object) -> None: ...

    now = ["PENDING"]
    waiting = Waiting(Running(), {"42": Job("x", ["true"], tmp_path, tmp_path / "job", tmp_path / "out", {})})
    pauses = []
    for look in range(40):
        waiting.look()
        pauses.append(waiting.interval)
        now = ["RUNNING"] if look >= 30 else now
    assert pauses[1:30] == sorted(pauses[1:30])
    assert pauses[29] == 30.0
    assert pauses[31] < 1 < pauses[39]
