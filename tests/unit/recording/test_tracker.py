"""The `tracker` fixture and the results file, in real runs of pytest."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from waiting import HANG_S, wait_for

MEASURING = """
def test_exponentiate(tracker):
    before = tracker.get_max_mem()
    tracker.track("result", 2 ** 4)
    tracker.log_max_mem("memory_after")
    tracker.track("change_in_mem", tracker.get_max_mem() - before)
"""


@pytest.fixture(autouse=True)
def only_needed_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a second less for each pytest that a test starts."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_rlcanary.tracker,xdist.plugin")


def results(folder: Path) -> Any:
    return json.loads((folder / "unit_results.json").read_text())


def history(folder: Path) -> list[Any]:
    """All runs of the history, oldest first; each must be whole."""
    return sorted(
        (json.loads(path.read_text()) for path in folder.glob("unit_results/*.json")),
        key=lambda run: run["start_time_utc"],
    )


def metrics_without_time(run: Any) -> dict[str, dict[str, Any]]:
    return {
        key: {name: value for name, value in metrics.items() if name != "_elapsed"}
        for key, metrics in run["metrics"].items()
    }


def start_pytest(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_results_file_has_the_known_shape(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD")  # with everything that is installed, as people run it
    monkeypatch.delenv("PYTEST_PLUGINS")
    pytester.makepyfile(test_power=MEASURING)
    assert pytester.runpytest_subprocess().ret == 0
    run = results(pytester.path)
    assert list(run)[:6] == ["exit_status", "git_commit", "start_time", "metrics", "gpu_types", "coverage"]
    assert run["exit_status"] == 0
    assert time.strptime(run["start_time"], "%Y-%m-%d %H:%M:%S")
    metrics = run["metrics"]["test_power::test_exponentiate"]
    assert list(metrics) == ["result", "memory_after", "change_in_mem", "_elapsed"]
    assert metrics["result"] == 16
    assert 0 <= metrics["change_in_mem"] < metrics["memory_after"] < 1024
    assert run["schema"] == 1
    assert run["versions"]["python"] == ".".join(map(str, sys.version_info[:3]))
    test = run["tests"]["test_power.py::test_exponentiate"]
    assert test["outcome"] == "passed"
    assert test["key"] == "test_power::test_exponentiate"
    assert 0 < metrics["_elapsed"] <= test["duration"]
    assert history(pytester.path) == [run]


def test_commit_and_changed_files_are_recorded(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_nothing(tracker): pass")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.com"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], cwd=pytester.path, check=True)
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=pytester.path, capture_output=True, text=True, check=True
    ).stdout.strip()
    pytester.runpytest_subprocess()
    assert (results(pytester.path)["git_commit"], results(pytester.path)["dirty"]) == (head, False)
    pytester.makepyfile("def test_nothing(tracker): assert True")
    pytester.runpytest_subprocess()
    assert (results(pytester.path)["git_commit"], results(pytester.path)["dirty"]) == (head, True)
    assert all(head[:8] in run["run_id"] for run in history(pytester.path))


def test_every_test_has_its_own_key(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_keys="""
        import pytest

        @pytest.mark.parametrize("p", [0.5, 1])
        def test_param(tracker, p):
            tracker.track("p", p)

        class TestA:
            def test_same(self, tracker):
                tracker.track("owner", "A")

        class TestB:
            def test_same(self, tracker):
                tracker.track("owner", "B")
        """
    )
    pytester.runpytest_subprocess()
    assert metrics_without_time(results(pytester.path)) == {
        "test_keys::test_param[0.5]": {"p": 0.5},
        "test_keys::test_param[1]": {"p": 1},
        "test_keys::TestA::test_same": {"owner": "A"},
        "test_keys::TestB::test_same": {"owner": "B"},
    }


@pytest.mark.parametrize("arguments", [[], ["-n2"], ["-k", "first"]], ids=["alone", "xdist", "one selected"])
def test_modules_of_one_name_do_not_share_a_key(pytester: pytest.Pytester, arguments: list[str]) -> None:
    for folder in ("first", "second"):
        (pytester.mkdir(folder) / "test_loss.py").write_text(
            f"def test_clip(tracker): tracker.track('folder', {folder!r})\n"
        )
    pytester.runpytest_subprocess("--import-mode=importlib", *arguments)
    run = results(pytester.path)
    selected = ["first"] if "-k" in arguments else ["first", "second"]
    assert metrics_without_time(run) == {f"{folder}/test_loss.py::test_clip": {"folder": folder} for folder in selected}
    assert all(test["key"] == nodeid for nodeid, test in run["tests"].items())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("tracker.track('bad', object())", "'bad' cannot be recorded"),
        ("tracker.track('good', 2)", "'good' was already tracked"),
        ("tracker.track('_elapsed', 2)", "is recorded by itself"),
        ("tracker.track('', 2)", "must be a string"),
    ],
    ids=["no JSON form", "twice", "reserved", "no name"],
)
def test_value_that_cannot_be_recorded_fails_its_test_only(pytester: pytest.Pytester, body: str, message: str) -> None:
    pytester.makepyfile(
        test_bad=f"""
        def test_before(tracker):
            tracker.track("kept", 1)

        def test_bad(tracker):
            tracker.track("good", 1)
            {body}

        def test_after(tracker):
            tracker.track("kept", 2)
        """
    )
    outcome = pytester.runpytest_subprocess()
    outcome.assert_outcomes(passed=2, failed=1)
    assert message in outcome.stdout.str()
    assert metrics_without_time(results(pytester.path)) == {
        "test_bad::test_before": {"kept": 1},
        "test_bad::test_bad": {"good": 1},
        "test_bad::test_after": {"kept": 2},
    }


def test_nan_is_null_and_named(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_nan="def test_loss(tracker): tracker.track('loss', [1.0, float('nan')])")
    assert pytester.runpytest_subprocess().ret == 0
    run = results(pytester.path)
    assert run["metrics"]["test_nan::test_loss"]["loss"] == [1.0, None]
    assert run["nonfinite"] == [{"key": "test_nan::test_loss", "metric": "loss", "path": "[1]", "value": "nan"}]


def test_outcome_of_every_test_is_recorded(pytester: pytest.Pytester) -> None:
    pytester.mkdir("unit_results")
    pytester.makepyfile(
        test_all="""
        import pytest

        @pytest.fixture
        def broken():
            raise RuntimeError

        @pytest.fixture
        def breaks_later():
            yield
            raise RuntimeError

        def test_passed(): pass
        def test_failed(): assert False
        def test_error(broken): pass
        def test_late_error(breaks_later): pass
        def test_skipped(): pytest.skip("for a reason")
        def test_xfailed(): pytest.xfail("known")
        @pytest.mark.xfail
        def test_xpassed(): pass
        """
    )
    pytester.runpytest_subprocess()
    run = results(pytester.path)
    assert {nodeid.split("_", 2)[-1]: test["outcome"] for nodeid, test in run["tests"].items()} == {
        "passed": "passed",
        "failed": "failed",
        "error": "error",
        "late_error": "error",
        "skipped": "skipped",
        "xfailed": "xfailed",
        "xpassed": "xpassed",
    }
    assert run["exit_status"] == 1


def test_workers_of_xdist_lose_nothing_and_the_exit_status_is_right(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_many="""
        import pytest

        @pytest.mark.parametrize("i", range(12))
        def test_one(tracker, i):
            tracker.track("i", i)
            assert i != 7
        """
    )
    assert pytester.runpytest_subprocess("-n4").ret == 1
    run = results(pytester.path)
    assert metrics_without_time(run) == {f"test_many::test_one[{i}]": {"i": i} for i in range(12)}
    assert run["exit_status"] == 1
    assert run["tests"]["test_many.py::test_one[7]"]["outcome"] == "failed"
    assert len(run["tests"]) == 12
    assert history(pytester.path) == [run]


def test_worker_that_dies_keeps_what_it_had_tracked(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_crash="""
        import os, signal, pytest

        @pytest.mark.parametrize("i", range(6))
        def test_one(tracker, i):
            tracker.track("i", i)
            if i == 3:
                os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert pytester.runpytest_subprocess("-n4").ret == 1
    run = results(pytester.path)
    assert metrics_without_time(run) == {f"test_crash::test_one[{i}]": {"i": i} for i in range(6)}
    assert run["tests"]["test_crash.py::test_one[3]"]["outcome"] == "failed"
    assert run["exit_status"] == 1


def test_first_failure_under_x_keeps_what_was_tracked(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_x="def test_a(tracker):\n    tracker.track('a', 1)\n    assert False\ndef test_b(): pass")
    pytester.runpytest_subprocess("-x")
    run = results(pytester.path)
    assert metrics_without_time(run) == {"test_x::test_a": {"a": 1}}
    assert run["exit_status"] == 1


def test_run_that_fails_as_it_starts_says_how_it_ended(pytester: pytest.Pytester) -> None:
    pytester.mkdir("unit_results")
    pytester.makeconftest("def pytest_sessionstart(): raise RuntimeError('a plugin is broken')")
    pytester.makepyfile("def test_nothing(): pass")
    assert pytester.runpytest_subprocess().ret == pytest.ExitCode.INTERNAL_ERROR
    assert results(pytester.path)["exit_status"] == pytest.ExitCode.INTERNAL_ERROR
    assert len(history(pytester.path)) == 1


def test_run_that_exits_in_the_middle_is_completed_by_the_next_one(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        test_exit="""
        import os

        def test_first(tracker):
            tracker.track("first", 1)

        def test_second(tracker):
            tracker.track("second", 2)
            if "DIE" in os.environ:
                os._exit(0)
        """
    )
    monkeypatch.setenv("DIE", "1")
    pytester.runpytest_subprocess()
    under_way = results(pytester.path)
    assert under_way["exit_status"] is None
    assert history(pytester.path) == []

    monkeypatch.delenv("DIE")
    outcome = pytester.runpytest_subprocess()
    assert "an earlier run was killed" in outcome.stdout.str()
    killed, finished = history(pytester.path)
    assert killed["run_id"] == under_way["run_id"]
    assert killed["exit_status"] is None
    assert metrics_without_time(killed) == metrics_without_time(finished)
    assert "_elapsed" not in killed["metrics"]["test_exit::test_second"]
    assert killed["tests"]["test_exit.py::test_first"]["outcome"] == "passed"
    assert killed["tests"]["test_exit.py::test_second"]["outcome"] is None
    assert results(pytester.path) == finished
    assert [path.name for path in (pytester.path / "unit_results/.journals").iterdir()] == ["lock"]


SLEEPY = """
    import pathlib, pytest, time

    @pytest.mark.parametrize("i", range(3))
    def test_one(tracker, i):
        tracker.track("i", i)
        pathlib.Path(f"tracked-{i}").touch()
        if i == 1:
            pathlib.Path("asleep").touch()
            while not pathlib.Path("awake").exists():
                time.sleep(0.02)
"""


@pytest.mark.parametrize("arguments", [[], ["-n2"]], ids=["alone", "xdist"])
def test_killed_run_is_completed_by_the_next_one(pytester: pytest.Pytester, arguments: list[str]) -> None:
    pytester.makepyfile(test_sleepy=SLEEPY)
    process = start_pytest(pytester.path, *arguments)
    wait_for((pytester.path / "asleep").exists)
    wait_for((pytester.path / "tracked-0").exists)  # by the other worker
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    (pytester.path / "awake").touch()

    def completed() -> bool:
        pytester.runpytest_subprocess()
        return any(run["exit_status"] is None for run in history(pytester.path))

    wait_for(completed)  # under xdist, once the last worker is gone too
    killed, *_, finished = history(pytester.path)
    assert killed["exit_status"] is None
    tracked = metrics_without_time(killed)
    assert tracked["test_sleepy::test_one[0]"] == {"i": 0}
    assert tracked["test_sleepy::test_one[1]"] == {"i": 1}
    assert len(finished["metrics"]) == 3


def test_run_under_way_is_left_alone_by_another_one(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(test_sleepy=SLEEPY, test_other="def test_other(tracker): tracker.track('other', 1)")
    first = start_pytest(pytester.path, "test_sleepy.py")
    wait_for((pytester.path / "asleep").exists)
    outcome = pytester.runpytest_subprocess("test_other.py")
    assert "killed" not in outcome.stdout.str()
    (pytester.path / "awake").touch()
    first.communicate(timeout=HANG_S)
    sleepy, other = history(pytester.path)
    assert (sleepy["exit_status"], len(sleepy["metrics"])) == (0, 3)
    assert (other["exit_status"], len(other["metrics"])) == (0, 1)


def test_pytest_within_a_test_leaves_the_outer_run_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_outer="""
        import pytest

        def test_inner_run(tracker):
            tracker.track("before", 1)
            assert pytest.main(["test_inner.py"]) == 0
            tracker.track("after", 2)
        """,
        test_inner="def test_inner(tracker): tracker.track('inner', 1)",
    )
    assert pytester.runpytest_subprocess("test_outer.py").ret == 0
    assert metrics_without_time(results(pytester.path)) == {"test_outer::test_inner_run": {"before": 1, "after": 2}}
    assert len(history(pytester.path)) == 2


def test_forked_child_that_leaves_its_test_does_not_end_the_run(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_fork="""
        import os

        def test_forks(tracker):
            child = os.fork()
            if child == 0:
                raise RuntimeError("the child goes all the way out of pytest")
            os.waitpid(child, 0)
            tracker.track("parent", 1)
        """
    )
    assert pytester.runpytest_subprocess().ret == 0
    (run,) = history(pytester.path)
    assert run["exit_status"] == 0
    assert run["metrics"]["test_fork::test_forks"]["parent"] == 1
    assert run["tests"]["test_fork.py::test_forks"]["outcome"] == "passed"


@pytest.mark.parametrize(
    ("content", "arguments", "exit_status"),
    [
        ("import nothing_of_this_name", [], 2),
        ("def test_a(): pass", ["-k", "none"], 5),
        ("def test_a(): pass", ["missing.py"], 4),
    ],
    ids=["collection error", "all deselected", "no such file"],
)
def test_run_without_a_test_replaces_the_previous_results(
    pytester: pytest.Pytester, content: str, arguments: list[str], exit_status: int
) -> None:
    pytester.makepyfile(test_before=MEASURING)
    pytester.runpytest_subprocess()
    pytester.makepyfile(test_before=content)
    assert pytester.runpytest_subprocess(*arguments).ret == exit_status
    run = results(pytester.path)
    assert (run["exit_status"], run["metrics"]) == (exit_status, {})
    assert [earlier["exit_status"] for earlier in history(pytester.path)] == [0, exit_status]


def test_place_that_cannot_be_written_is_a_usage_error_before_any_test(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("import pathlib\ndef test_ran(): pathlib.Path('ran').touch()")
    pytester.makefile(".txt", blocker="")
    outcome = pytester.runpytest_subprocess("--rlcanary-results", "blocker.txt/results.json")
    assert outcome.ret == pytest.ExitCode.USAGE_ERROR
    (line,) = [line for line in outcome.stderr.lines if line.strip()]
    assert "results cannot be written to" in line
    assert "--rlcanary-results PATH" in line
    assert not (pytester.path / "ran").exists()


def test_place_is_taken_from_the_option_then_the_ini_file(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_a(): pass")
    pytester.makeini("[pytest]\nrlcanary_results = out/ini.json")
    pytester.runpytest_subprocess()
    assert len(list(pytester.path.glob("out/ini/*.json"))) == 1
    pytester.runpytest_subprocess("--rlcanary-results", "option.json")
    assert (pytester.path / "option.json").exists()
    assert len(list(pytester.path.glob("out/ini/*.json"))) == 1


def test_runs_started_together_have_a_file_each(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_a(tracker): tracker.track('a', 1)")
    processes = [start_pytest(pytester.path) for _ in range(3)]
    for process in processes:
        process.communicate(timeout=HANG_S)
        assert process.returncode == 0
    assert len({run["run_id"] for run in history(pytester.path)}) == 3


def test_maximum_memory_includes_what_was_freed_and_what_children_used(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_memory="""
        import subprocess, sys

        CHILD = "import sys; block = bytearray(320 * 2**20); print(flush=True); sys.stdin.read()"

        def test_child(tracker):
            before = tracker.get_max_mem()
            with subprocess.Popen(
                [sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            ) as child:
                child.stdout.readline()
                while tracker.get_max_mem() - before < 0.29:
                    pass
                child.stdin.close()
            tracker.track("change", tracker.get_max_mem() - before)
        """
    )
    assert pytester.runpytest_subprocess().ret == 0
    change_gb = results(pytester.path)["metrics"]["test_memory::test_child"]["change"]
    assert 0.29 < change_gb < 0.4


def test_total_coverage_is_recorded(pytester: pytest.Pytester) -> None:
    pytest.importorskip("pytest_cov")
    pytester.mkdir("unit_results")
    pytester.makepyfile(
        clipping="def f(x):\n    if x:\n        return 1\n    return 2\n",
        test_clipping="import clipping\ndef test_f(): assert clipping.f(1) == 1",
    )
    pytester.runpytest_subprocess("-p", "pytest_cov.plugin", "--cov=clipping")
    assert results(pytester.path)["coverage"] == pytest.approx(75.0)


def test_starting_pytest_imports_nothing_heavy(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    pytester.mkdir("unit_results")
    pytester.makepyfile(
        """
        import sys

        def test_modules():
            assert not {"torch", "ray", "vllm", "transformers", "numpy", "psutil", "jq", "rich"} & set(sys.modules)
        """
    )
    monkeypatch.setenv("PYTEST_PLUGINS", "pytest_rlcanary.tracker")
    outcome = pytester.runpytest_subprocess()
    outcome.assert_outcomes(passed=1)
    assert results(pytester.path)["exit_status"] == 0


def test_litter_of_a_run_killed_while_writing_is_removed(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_a(): pass")
    pytester.mkdir("unit_results")
    litter = [pytester.path / ".unit_results.json.0a1b.tmp", pytester.path / "unit_results/.run.json.0a1b.tmp"]
    for path in litter:
        path.write_text('{"exit_st')
    assert pytester.runpytest_subprocess().ret == 0
    assert not any(path.exists() for path in litter)


def test_journal_with_a_torn_line_is_merged_and_the_line_is_named(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytester.makepyfile(
        test_exit="""
        import os

        def test_first(tracker):
            tracker.track("first", 1)
            if "DIE" in os.environ:
                os._exit(0)
        """
    )
    monkeypatch.setenv("DIE", "1")
    pytester.runpytest_subprocess()
    monkeypatch.delenv("DIE")
    (journal,) = pytester.path.glob("unit_results/.journals/*/controller.jsonl")
    with journal.open("a") as stream:
        stream.write('{"record": "metric", "nodeid": "te')
    outcome = pytester.runpytest_subprocess()
    assert re.search(
        r"rlcanary: warning: \S+/controller.jsonl line 5 is damaged \(it is cut off\)", outcome.stdout.str()
    )
    killed, _ = history(pytester.path)
    assert metrics_without_time(killed) == {"test_exit::test_first": {"first": 1}}
