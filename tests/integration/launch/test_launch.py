"""`rlcanary launch` without a cluster: costs, snapshots, edits, arguments, and what counts as a verdict."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from bisect_repositories import git
from launch_repositories import CHECK, SCRIPT, launch, make_project, outputs, script, typed
from waiting import wait_for

from rlcanary.jobs.job import Job, Resources
from rlcanary.jobs.local import LocalExecutor
from rlcanary.jobs.waiting import JobEnd, Waiting

pytestmark = pytest.mark.usefixtures("plain_git")

LOCAL = {"EXECUTOR": "local"}
TOOLS = Path(__file__).parents[3] / "tools"


def snapshots(project: Path) -> list[Path]:
    return sorted((project / "launches" / "snapshots").glob("p-*"))


def test_dry_run_prices_every_script_exactly_and_launches_nothing(tmp_path: Path) -> None:
    """Rounding each script down, or taking over a number of the script before, would say 0 and 8."""
    scripts = {f"grpo-{name}": script(gpus=1, minutes=59) for name in "abc"}
    scripts["sft-a"] = script(gpus=4, minutes=60, nodes=2, runs=2)
    without_gpus = script().replace("GPUS_PER_NODE=0\n", "")
    project = make_project(tmp_path / "p", **scripts, **{"sft-b": without_gpus})
    names = [f"tests/test_suites/llm/{name}.sh" for name in scripts]
    result = launch(project, *names, DRYRUN="1")
    assert result.stdout.splitlines()[-1] == "GPU-hours: 18.95"
    assert not (project / "launches").exists()
    refused = launch(project, "tests/test_suites/llm/sft-b.sh", DRYRUN="1", GPUS_PER_NODE="8")
    assert refused.returncode == 2
    assert "GPUS_PER_NODE is 'missing'" in refused.stderr


def test_launch_keeps_the_gitignore_that_the_user_wrote_for_its_folder(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-a": script(gpus=1, minutes=1)})
    (project / "launches").mkdir()
    (project / "launches" / ".gitignore").write_text("*\n!notes.md\n")
    launch(project, "tests/test_suites/llm/grpo-a.sh", **LOCAL)
    assert list((project / "launches").glob("grpo-a-*"))
    assert (project / "launches" / ".gitignore").read_text() == "*\n!notes.md\n"


def test_list_stands_for_its_scripts(tmp_path: Path) -> None:
    project = make_project(
        tmp_path / "p", **{"grpo-a": script(gpus=1, minutes=30), "grpo-b": script(gpus=2, minutes=60)}
    )
    suites = project / "tests/test_suites"
    (suites / "nightly.txt").write_text("# Every night.\nllm/grpo-a.sh\n\nllm/grpo-b.sh  # slow\n")
    (suites / "disabled.txt").write_text("# Not run at present.\n")
    priced = launch(project, "tests/test_suites/nightly.txt", DRYRUN="1")
    assert priced.stdout.splitlines()[-1] == "GPU-hours: 2.50"
    empty = launch(project, "tests/test_suites/disabled.txt", DRYRUN="1")
    assert (empty.returncode, "lists no script" in empty.stderr) == (2, True)


def test_disabled_scripts_are_left_out_of_lists_and_none_is_launched_twice(tmp_path: Path) -> None:
    project = make_project(
        tmp_path / "p", **{"grpo-a": script(gpus=1, minutes=30), "grpo-b": script(gpus=2, minutes=60)}
    )
    nightly, one = "tests/test_suites/nightly.txt", "tests/test_suites/llm/grpo-b.sh"
    (project / nightly).write_text("llm/grpo-a.sh\nllm/grpo-b.sh\n")
    disabled = project / "tests/test_suites/disabled.txt"
    disabled.write_text("llm/grpo-b.sh  # the engine hangs\n")
    priced = launch(project, nightly, DRYRUN="1")
    assert priced.stdout.splitlines()[-1] == "GPU-hours: 0.50"
    assert "grpo-b.sh is disabled: the engine hangs" in priced.stderr
    assert launch(project, one, DRYRUN="1").stdout.splitlines()[-1] == "GPU-hours: 2.00"
    assert launch(project, nightly, one, DRYRUN="1").stdout.splitlines()[-1] == "GPU-hours: 2.50"
    disabled.write_text("llm/grpo-a.sh\nllm/grpo-b.sh\n")
    nothing = launch(project, nightly, DRYRUN="1")
    assert (nothing.returncode, "every script is disabled" in nothing.stderr) == (2, True)
    disabled.unlink()
    twice = launch(project, nightly, one, DRYRUN="1")
    assert (twice.returncode, "grpo-b.sh: named twice" in twice.stderr) == (2, True)


@pytest.mark.parametrize(
    ("block", "complaint"),
    [
        ("NUM_RUNS=x", "NUM_RUNS is 'x'"),
        ("NUM_RUNS=0", "at least 1"),
        ("NUM_RUNS=$((1 +))", "does not run"),
    ],
)
def test_configuration_that_does_not_hold_is_refused(tmp_path: Path, block: str, complaint: str) -> None:
    text = script().replace("NUM_RUNS=$(( (MAX_STEPS + STEPS_PER_RUN - 1) / STEPS_PER_RUN ))", block)
    result = launch(make_project(tmp_path / "p", **{"grpo-tiny": text}), SCRIPT, DRYRUN="1")
    assert result.returncode == 2
    assert complaint in result.stderr


def test_job_runs_the_code_as_it_was_at_the_launch(tmp_path: Path) -> None:
    """Uncommitted edits of tracked files count, untracked files do not, and the checkout may change meanwhile."""
    project = make_project(tmp_path / "p", loss="2", **{"grpo-tiny": script("pwd; ls")})
    (project / "loss").write_text("0.25\n")
    (project / "secret").write_text("x\n")
    assert launch(project, SCRIPT, **LOCAL).returncode == 0
    (snapshot,) = snapshots(project)
    (printed,) = outputs(project)
    assert printed.splitlines()[0] == str(snapshot)
    assert "secret" not in printed
    assert (snapshot / "loss").read_text() == "0.25\n"
    assert git(project, "status", "--porcelain") == "M loss\n?? secret"


def test_same_code_is_copied_once_and_other_code_never_meets_it(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
    first = launch(project, SCRIPT, **LOCAL)
    again = launch(project, SCRIPT, **LOCAL)
    assert (first.returncode, again.returncode, len(snapshots(project))) == (0, 0, 1)
    assert "(there already)" in again.stderr
    (project / "loss").write_text("0.75\n")
    assert launch(project, SCRIPT, **LOCAL).returncode == 0
    assert len(snapshots(project)) == 2


def test_snapshot_that_was_changed_since_is_refused(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
    launch(project, SCRIPT, **LOCAL)
    (snapshots(project)[0] / "loss").write_text("0.1\n")
    result = launch(project, SCRIPT, **LOCAL)
    assert result.returncode == 2
    assert "was changed since" in result.stderr


def test_snapshot_that_was_cut_short_is_not_taken_for_one(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
    launch(project, SCRIPT, **LOCAL)
    (snapshot,) = snapshots(project)
    for file in [*snapshot.rglob("*")][::-1]:
        file.rmdir() if file.is_dir() else file.unlink()
    (snapshot.parent / ".p.0123.tmp").mkdir()
    assert launch(project, SCRIPT, **LOCAL).returncode == 0
    assert (snapshot / SCRIPT).is_file()


def test_snapshot_holds_links_programs_and_submodules(tmp_path: Path) -> None:
    inner = make_project(tmp_path / "inner", **{"grpo-inner": script()})
    project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
    git(project, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(inner), "3rdparty/inner")
    (project / "link").symlink_to("loss")
    (project / "program").write_text("#!/bin/sh\n")
    (project / "program").chmod(0o755)
    git(project, "add", "--all")
    git(project, "commit", "--quiet", "--message", "more")
    printed = subprocess.run(
        [TOOLS / "code_snapshot.sh", "mine"], cwd=project, check=True, capture_output=True, text=True
    )
    snapshot = Path(printed.stdout.strip())
    assert snapshot.parent == project / "code_snapshots"
    assert snapshot.name.startswith("mine-")
    assert (snapshot / "3rdparty/inner/loss").read_text() == "0.5\n"
    assert (snapshot / "link").readlink() == Path("loss")
    assert os.access(snapshot / "program", os.X_OK)
    assert not (snapshot / ".git").exists()
    assert git(project, "status", "--porcelain") == ""


def test_arguments_keep_their_quotes(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-tiny": script("printf '<%s>' \"$@\"")})
    assert launch(project, SCRIPT, EXTRA_SCRIPT_ARGS="++a='b c' --d=\"e '$HOME'\" ''", **LOCAL).returncode == 0
    assert outputs(project)[0].startswith("<++a=b c><--d=e '$HOME'><>")
    refused = launch(project, SCRIPT, EXTRA_SCRIPT_ARGS="++a='b", **LOCAL)
    assert refused.returncode == 2
    assert "No closing quotation" in refused.stderr


class TestSedClauses:
    """They edit the copy that is launched, and nothing else."""

    def test_edit_is_seen_by_the_job_and_not_by_the_checkout(self, tmp_path: Path) -> None:
        project = make_project(tmp_path / "p", loss="1.5", **{"grpo-tiny": script("echo one\necho two")})
        assert launch(project, SCRIPT, **LOCAL).returncode == 1
        clauses = "s#< 1'#< 1.6'#\n/echo two/d"
        assert launch(project, SCRIPT, SED_CLAUSES=clauses, **LOCAL).returncode == 0
        assert git(project, "status", "--porcelain") == ""
        printed = sorted(outputs(project), key=lambda text: "two" in text)
        assert [text.splitlines()[:2] for text in printed][1] == ["one", "two"]
        assert "two" not in printed[0]
        assert len(snapshots(project)) == 2, "the edit makes another snapshot"

    @pytest.mark.parametrize("clauses", ["s/no such text/x/", "s#< 1'#< 1.6'#\n/no such line/d"])
    def test_clause_that_matches_nothing_is_an_error_unless_allowed(self, tmp_path: Path, clauses: str) -> None:
        project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
        result = launch(project, SCRIPT, SED_CLAUSES=clauses, **LOCAL)
        assert result.returncode == 2
        assert f"change nothing in {SCRIPT}: '{clauses.splitlines()[-1]}' matches no line" in result.stderr
        assert launch(project, SCRIPT, SED_CLAUSES=clauses, SED_ALLOW_NO_MATCH="1", **LOCAL).returncode == 0

    @pytest.mark.parametrize("clauses", ["s/x/y", "1w /tmp/rlcanary-sed-wrote-this", "1e true"])
    def test_what_sed_may_not_do_is_refused_before_the_start(self, tmp_path: Path, clauses: str) -> None:
        project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
        result = launch(project, SCRIPT, SED_CLAUSES=clauses, **LOCAL)
        assert result.returncode == 2
        assert "not a valid sed script" in result.stderr
        assert not (project / "launches").exists()


@pytest.mark.parametrize(
    ("name", "body", "check", "code", "reason"),
    [
        ("the metrics were never judged", "", "true", 125, "the metrics were not judged"),
        (
            "the training broke",
            "python3 -c 'import nothing_like_this'",
            CHECK,
            125,
            "exit 1: the metrics",
        ),
        ("a later line of the log says FAILED", "", f"{CHECK}; echo '(raylet) FAILED to connect'", 0, "checks pass"),
        ("the log is cut after its heading", "", "echo Metric Checks", 125, "the metrics were not judged"),
        ("a failed check is not the last command", "", f'{CHECK} \'data["loss"]["1"] < 0\' || true', 1, "check fails"),
        ("the script fails after its checks", "", f"{CHECK}; false", 125, "the script fails after them"),
        ("the script asks to be skipped", "exit 125", CHECK, 125, "asked to skip"),
        ("a process was killed", "kill -KILL $$", CHECK, 137, "killed by SIGKILL"),
        (
            "the record of the checks is cut",
            "",
            f"{CHECK}; printf '{{' >> $RLCANARY_METRIC_CHECKS",
            137,
            "is cut short",
        ),
    ],
    ids=lambda value: value.replace(" ", "-") if isinstance(value, str) and value.isascii() and len(value) < 45 else "",
)
def test_verdict_needs_evidence(tmp_path: Path, name: str, body: str, check: str, code: int, reason: str) -> None:
    result = launch(make_project(tmp_path / "p", **{"grpo-tiny": script(body, check=check)}), SCRIPT, **LOCAL)
    assert result.returncode == code, result.stderr
    assert reason in " ".join(result.stdout.replace("│", " ").split())


def test_missing_script_is_untestable_and_a_stranger_is_refused(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
    assert launch(project, "tests/test_suites/llm/grpo-other.sh", **LOCAL).returncode == 125
    stranger = tmp_path / "x.sh"
    stranger.write_text(script())
    assert launch(project, str(stranger), **LOCAL).returncode == 2


def test_container_is_refused_where_there_is_none(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
    result = launch(project, SCRIPT, CONTAINER="image", **LOCAL)
    assert result.returncode == 2
    assert "run_functional_in_docker.sh" in result.stderr


def test_python_imports_the_snapshot(tmp_path: Path) -> None:
    text = script('python3 -c "import sys; print([p for p in sys.path if p])"')
    project = make_project(tmp_path / "p", **{"grpo-tiny": text})
    (project / "src").mkdir()
    assert launch(project, SCRIPT, PYTHONPATH=f"{project}/src:/elsewhere", **LOCAL).returncode == 0
    (snapshot,) = snapshots(project)
    assert f"'{snapshot}/src', '/elsewhere'" in outputs(project)[0]
    assert f"'{project}/src'" not in outputs(project)[0]


def test_job_outlives_a_launch_that_was_killed_and_can_be_cancelled(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-tiny": script("touch $EXP_DIR/running; sleep 9999")})
    command = [sys.executable, "-m", "rlcanary", "launch", SCRIPT]
    with subprocess.Popen(command, cwd=project, env=os.environ | LOCAL, stderr=subprocess.DEVNULL) as process:
        wait_for(lambda: list(project.glob("launches/*/running")))
        process.kill()
    (folder,) = project.glob("launches/grpo-tiny-*")
    runs = typed(project, "launches", str(folder))
    assert (runs.returncode, "RUNNING" in runs.stdout) == (75, True), runs.stderr
    ended = typed(project, "launches", "--cancel", str(folder))
    assert (ended.returncode, "job CANCELLED: no result" in ended.stdout) == (137, True), ended.stderr


def test_ids_are_recorded_before_the_jobs_start(tmp_path: Path) -> None:
    jobs = [Job(name, ["true"], tmp_path, tmp_path / name, tmp_path / "out", dict(os.environ)) for name in ("a", "b")]
    recorded: list[list[str]] = []

    def record(ids: Sequence[str]) -> None:
        assert not any(job.script.exists() for job in jobs)
        recorded.append(list(ids))

    executor = LocalExecutor()
    assert recorded == [executor.submit(jobs, record)]
    executor.cancel(recorded[0])


def test_job_that_takes_longer_than_it_may_is_ended(tmp_path: Path) -> None:
    executor = LocalExecutor()
    command = ["sh", "-c", "echo started; sleep 9999"]
    resources = Resources(minutes=0)
    job = Job("x", command, tmp_path, tmp_path / "job", tmp_path / "out", dict(os.environ), resources=resources)
    waiting = Waiting(executor, {executor.submit([job])[0]: job})
    ends: list[JobEnd] = []
    wait_for(lambda: ends.extend(waiting.look().values()) or ends)
    assert (ends[0].state, ends[0].result) == ("TIMEOUT", None)


def test_folder_that_is_no_launch_is_refused(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
    assert "nothing was launched in" in typed(project, "launches").stderr
    (project / "launches").mkdir()
    refused = typed(project, "launches", "launches")
    assert (refused.returncode, "launches is not a launch" in refused.stderr) == (2, True)


def test_tools_launch_is_the_command(tmp_path: Path) -> None:
    project = make_project(tmp_path / "p", **{"grpo-tiny": script()})
    environment = os.environ | {"DRYRUN": "1", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    command = [TOOLS / "launch", SCRIPT]
    printed = subprocess.run(command, cwd=project, env=environment, check=True, capture_output=True, text=True)
    assert printed.stdout.endswith("GPU-hours: 0.00\n")
